"""Every target of the fuzzer at a small size: what it begins with, and some of it mutated."""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.proof.fuzz import INPUT_BYTES_MAX
from tests.proof.targets import TARGETS

MUTATED = 150
SEED = 8

#: Found by the fuzzer, and mended since; each with its target.
FOUND = (
    ("wire", b"\x04POST /x HTTP/1.1\r\nTransfer-Encoding: c\r\nTransfer-Encoding: chunked\r\n\r\n"),
)


def mutated(seeds: list[bytes], count: int) -> Iterator[bytes]:
    chance = random.Random(SEED)
    for _ in range(count):
        text = bytearray(chance.choice(seeds))[:INPUT_BYTES_MAX]
        for _ in range(chance.randrange(1, 6)):
            at = chance.randrange(len(text) + 1)
            other = chance.choice(seeds)
            cut = slice(chance.randrange(len(other) + 1), chance.randrange(len(other) + 1))
            piece = chance.choice([chance.randbytes(1), b"", other[cut][:40], b"\xff\xfe\0"])
            text[at : at + chance.randrange(4)] = piece
        yield bytes(text)


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_of_a_target_ends_in_anything_but_what_is_declared(
    name: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        run, seeds = TARGETS[name].make(tmp_path, stack)
        for text in (b"", *seeds, *mutated(seeds, MUTATED)):
            run(text)


@pytest.mark.parametrize(("name", "text"), FOUND)
def test_what_was_found_before_is_not_found_again(name: str, text: bytes, tmp_path: Path) -> None:
    with ExitStack() as stack:
        TARGETS[name].make(tmp_path, stack)[0](text)
