"""What is fuzzed, and how much of all executions each target gets."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from tests.proof import incoming, outgoing
from tests.proof.inputs import Made


class Target(NamedTuple):
    """`make` is given an empty folder, and a stack that ends what it begins."""

    make: Callable[[Path, ExitStack], Made]
    #: Of a million executions: slower ones get fewer.
    share: int


TARGETS = {
    "verify": Target(lambda folder, stack: incoming.verification(), 251_000),
    "signed": Target(lambda folder, stack: incoming.inside(stack), 12_000),
    "bodies": Target(lambda folder, stack: incoming.bodies(), 110_000),
    "heads": Target(lambda folder, stack: incoming.heads(folder), 199_500),
    "wire": Target(lambda folder, stack: incoming.wire(stack), 20_000),
    "explain": Target(lambda folder, stack: incoming.explanations(), 500),
    "select": Target(lambda folder, stack: outgoing.selection(), 150_000),
    "messages": Target(lambda folder, stack: outgoing.messages(), 250_000),
    "transaction": Target(lambda folder, stack: outgoing.transaction(folder, stack), 6_000),
    "answers": Target(lambda folder, stack: outgoing.answers(stack), 1_000),
}
assert sum(target.share for target in TARGETS.values()) == 1_000_000
