"""What a sender wants to be told in place of the usual status and word."""

from collections.abc import Mapping

import msgspec

from receiver.described import Described

#: Characters of a body.
BODY_CHARS_MAX = 99

# The words of an outcome, each 200 unless the sender wants another; and what is refused.
ACCEPTED = (
    *("done", "duplicate", "conflict", "ignored", "parked", "quarantined", "pending", "dead"),
)
REFUSED = ("rejected", "forbidden")


class Reply(msgspec.Struct, frozen=True):
    """A status, and a body in place of the outcome's word."""

    status: int
    body: str | None = None


def parse(sender: Described) -> tuple[tuple[str, Reply], ...] | None:
    """What is wanted, by the outcome's word; None where all is as usual."""
    table = sender.table.get("statuses")
    if table is None:
        return None
    reader = sender.inner("statuses", table)
    reader.unknown(("accepted", *ACCEPTED, *REFUSED))
    given = {key: _reply(reader, key) for key in reader.table}
    usual = given.get("accepted")
    replies = [(word, given.get(word) or usual) for word in ACCEPTED]
    replies += [(word, given.get(word)) for word in REFUSED]
    return tuple((word, reply) for word, reply in replies if reply is not None)


def _reply(reader: Described, key: str) -> Reply | None:
    value = reader.table[key]
    given = value if isinstance(value, Mapping) else {"status": value}
    status, body = given.get("status", 200), given.get("body")
    kind = 4 if key in REFUSED else 2
    if type(status) is not int or status // 100 != kind:
        # A 2xx is a promise, and anything else makes the sender send it again.
        reader.fail(key, f"must be a status from {kind}00 to {kind}99, or a table with one")
        return None
    if body is not None and not (
        isinstance(body, str) and body.isascii() and len(body) <= BODY_CHARS_MAX
    ):
        reader.fail(key, f"its body must be a text of at most {BODY_CHARS_MAX} ASCII characters")
        return None
    if not given.keys() <= {"status", "body"}:
        reader.fail(key, "a table may have status and body")
        return None
    return Reply(status, "" if status == 204 else body)
