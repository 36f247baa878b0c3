"""Reads the point in time that an operator gives to a filter."""

import re
from datetime import UTC, datetime

_AGE = re.compile(r"(\d{1,6}) ?(s|min|m|h|d|w)", re.ASCII)
_UNIT_MS = {
    "s": 1_000,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
    "w": 604_800_000,
}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def parse(text: str, now_ms: int) -> int:
    """UTC milliseconds of RFC 3339, a date, or an age such as `2h` or `3d`; raises ValueError.

    What names no offset is local time, as listings show it.
    """
    age = _AGE.fullmatch(text.strip())
    if age is not None:
        return max(0, now_ms - int(age[1]) * _UNIT_MS[age[2]])
    try:
        passed = datetime.fromisoformat(text.strip()).astimezone() - _EPOCH
    except (ValueError, OverflowError) as error:
        raise ValueError(
            f"{text!r} is no time: write 2h, 3d, 2026-11-30 or 2026-11-30T14:00:00Z"
        ) from error
    return int(passed.total_seconds() * 1000)
