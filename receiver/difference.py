"""Shows a stored body for reading, and how two of them differ."""

import difflib
import json
from collections.abc import Iterator

from receiver.config import Source
from receiver.extract import decode

#: Lines of one body that are compared, and shown.
LINES_MAX = 20_000


def pretty(body: bytes, source: Source | None) -> list[str]:
    """The lines of a body: JSON indented, its keys in order; anything else as text.

    `source` says how the sender packs JSON into a form; without it a form stays one line.
    """
    preset = None if source is None else source.contract.preset
    payload, forms = (None, False) if preset is None else (preset.payload, preset.forms)
    document = decode(body, payload, forms)
    if document.problem is not None:
        text = body.decode("utf-8", "backslashreplace")
    else:
        text = json.dumps(document.value, indent=2, sort_keys=True, ensure_ascii=False)
    lines = text.split("\n")
    if len(lines) > LINES_MAX:
        return [*lines[:LINES_MAX], f"... {len(lines) - LINES_MAX} more lines"]
    return lines


def unified(stored: bytes, other: bytes, source: Source | None) -> Iterator[str]:
    """The lines of a unified diff, from the stored body to the other."""
    yield from difflib.unified_diff(
        pretty(stored, source), pretty(other, source), "stored", "other", lineterm=""
    )
