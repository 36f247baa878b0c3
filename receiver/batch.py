"""Splits the body of a batch into its elements, each byte for byte as it was sent."""

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from receiver.described import Described
from receiver.extract import Locator, look_up, without_bom

#: Elements of one delivery: all of them are one transaction.
ELEMENTS_MAX = 3_000
#: Lists of one sender's batches.
PATHS_MAX = 4

EACH = "*"

_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])

Path = tuple[str, ...]


class Batch(msgspec.Struct, frozen=True):
    """Where a sender's elements are; a path's `*` stands for every element of a list."""

    at: tuple[Path, ...]
    # Where the account of an element is that does not say it itself.
    account: Path | None = None
    # Each element has a signature of its own, and the delivery has none.
    each_signed: bool = False


class Element(msgspec.Struct, frozen=True):
    """One element: its bytes, and what stands at the batch's `account` for it."""

    body: bytes
    account: object = None


class NotSplit(Exception):
    """The body is not a batch of that form, or too long a one; the message says which."""


def split(batch: Batch, body: bytes) -> list[Element]:
    """The elements in their order, none where every list is empty. Raises NotSplit."""
    whole = msgspec.Raw(without_bom(body))
    elements: list[Element] = []
    found = False
    for path in batch.at:
        chains = _reach(whole, path)
        if chains is not None:
            found = True
            elements += _elements(path, batch.account, chains)
        if len(elements) > ELEMENTS_MAX:
            raise NotSplit(_TOO_MANY)
    if not found:
        raise NotSplit(f"no list at {' or '.join(map(text_of, batch.at))}")
    return elements


def wrap(batch: Batch, element: bytes, account: str = "") -> bytes:
    """A batch of one, as the sender would send it."""
    document: object = msgspec.Raw(element)
    for step in reversed(batch.at[0]):
        document = [document] if step == EACH else {step: document}
    if batch.account is not None and account:
        place: Any = document
        for step in batch.account[:-1]:
            place = place[0] if step == EACH else place.setdefault(step, {})
        place[batch.account[-1]] = account
    return msgspec.json.encode(document)


_TOO_MANY = f"a batch of more than {ELEMENTS_MAX} elements is not taken apart"

# A value of the body after all that it is in, the whole body first.
_Chain = tuple[msgspec.Raw, ...]


def _elements(path: Path, account: Path | None, chains: Sequence[_Chain]) -> list[Element]:
    if account is None:
        return [Element(bytes(chain[-1])) for chain in chains]
    steps = _shared(path, account)
    known: dict[int, object] = {}
    elements = []
    for chain in chains:
        holder = chain[steps]
        if id(holder) not in known:
            # Once for all elements in it.
            known[id(holder)] = look_up(msgspec.json.decode(holder), account[steps:])
        elements.append(Element(bytes(chain[-1]), known[id(holder)]))
    return elements


def _reach(whole: msgspec.Raw, path: Path) -> list[_Chain] | None:
    """What the path leads to; None where no list stands at any of its `*`."""
    chains: list[_Chain] = [(whole,)]
    listed = False
    for step in path:
        following: list[_Chain] = []
        for chain in chains:
            values = _values(chain[-1], step)
            listed = listed or (step == EACH and values is not None)
            following += [(*chain, value) for value in values or ()]
            if len(following) > ELEMENTS_MAX:
                raise NotSplit(_TOO_MANY)
        chains = following
    return chains if listed else None


def _values(raw: msgspec.Raw, step: str) -> list[msgspec.Raw] | None:
    """What one step leads to; None where it can't be taken."""
    try:
        if step == EACH:
            return _LIST.decode(raw)
        value = _OBJECT.decode(raw).get(step)
    except (msgspec.DecodeError, RecursionError):
        return None
    return None if value is None else [value]


def text_of(path: Path) -> str:
    return f"json:/{'/'.join(step.replace('~', '~0').replace('/', '~1') for step in path)}"


# From the table of a sender.


def parse(sender: Described, *, event_id: Sequence[Locator], body_proved: bool) -> Batch | None:
    """The sender's `batch` and what belongs to it; None where it sends single events.

    `event_id` are the places that its id is made of; `body_proved`: a good delivery proves its
    whole body.
    """
    at = sender.texts("batch")
    account = sender.text("batch_account")
    signed = sender.choice("batch_signed", ("whole", "each")) or "whole"
    if not at:
        for key in ("batch_account", "batch_signed"):
            if key in sender.table:
                sender.fail(key, "needs batch, which says where the elements are")
        return None
    paths = [sender.attempt("batch", _path, text) for text in at]
    batch = Batch(
        at=tuple(path for path in paths if path is not None),
        account=None if account is None else sender.attempt("batch_account", _path, account),
        each_signed=signed == "each",
    )
    _check(sender, batch, event_id, body_proved)
    return batch


def _check(sender: Described, batch: Batch, event_id: Sequence[Locator], body_proved: bool) -> None:
    """What no single field can tell."""
    account = batch.account
    shared = any(place.kind in ("header", "path") for place in event_id)
    outside = account is not None and any(
        EACH in account[_shared(path, account) :] for path in batch.at
    )
    unproved = account is not None and not (body_proved and not batch.each_signed)
    rules = [
        ("batch", len(batch.at) > PATHS_MAX, f"has more than {PATHS_MAX} places"),
        ("event_id", shared, "must be json:/path with batch, as each element has its own"),
        ("batch_account", outside, "has a * that is not one of the batch's"),
        ("batch_account", unproved, "needs a signature over {body}"),
    ]
    for key, broken, what in rules:
        if broken:
            sender.fail(key, what)


def _path(text: str) -> Path:
    """The steps of `json:/entry/*/changes/*`; raise ValueError, with words, for another form."""
    pointer = text.removeprefix("json:")
    steps = tuple(s.replace("~1", "/").replace("~0", "~") for s in pointer.split("/")[1:])
    if pointer == text or not pointer.startswith("/") or EACH not in steps:
        raise ValueError(f"{text!r} must be json:/path with * for every element of a list")
    return steps


def _shared(path: Path, account: Path) -> int:
    """How many steps an element's path and its account's have in common."""
    pairs = zip(path, account, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
