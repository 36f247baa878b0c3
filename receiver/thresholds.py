"""When something needs a person: the limits of `[alerts]`, each of which can be turned off."""

import msgspec

from receiver.tables import Table, kind_of

SECONDS_MAX = 31_536_000
COUNT_MAX = 1_000_000
REMIND_H_MAX = 8_760


class Thresholds(msgspec.Struct, frozen=True):
    """The limits; None is off. Without `to` nothing is sent, and `receiver status` tells it."""

    to: str | None = None
    remind_h: int = 24
    #: An event or a message that is still pending after so long.
    oldest_unfinished_s: int | None = 900
    parked_too_long_s: int | None = 86_400
    #: So many events or messages.
    dead: int | None = 1
    quarantined: int | None = 1
    conflicts: int | None = 1
    review: int | None = 1
    #: Unfinished events of one type that failed.
    failures_of_type: int | None = 5
    #: The part of a source's deliveries in the last hour that was refused.
    rejection_rate: float | None = 0.5
    #: Genuine deliveries of one source, refused for their time alone within ten minutes.
    wrong_clock: int | None = 3
    disk_free_percent: int | None = 10
    #: Since the last backup, or without one since the file was made.
    backup_age_s: int | None = 172_800
    #: What the last reconcile of a source found missing.
    reconcile_gap: int | None = 1


def parse(table: Table | None) -> Thresholds:
    """The limits in `[alerts]`; what is not there is as usual."""
    if table is None:
        return Thresholds()
    table.allow(Thresholds.__struct_fields__)
    usual = Thresholds()
    return Thresholds(
        to=table.text("to"),
        remind_h=table.integer("remind_h", 1, REMIND_H_MAX) or usual.remind_h,
        oldest_unfinished_s=limit(table, "oldest_unfinished_s", SECONDS_MAX),
        parked_too_long_s=limit(table, "parked_too_long_s", SECONDS_MAX),
        dead=limit(table, "dead", COUNT_MAX),
        quarantined=limit(table, "quarantined", COUNT_MAX),
        conflicts=limit(table, "conflicts", COUNT_MAX),
        review=limit(table, "review", COUNT_MAX),
        failures_of_type=limit(table, "failures_of_type", COUNT_MAX),
        rejection_rate=_part(table, "rejection_rate"),
        wrong_clock=limit(table, "wrong_clock", COUNT_MAX),
        disk_free_percent=limit(table, "disk_free_percent", 100),
        backup_age_s=limit(table, "backup_age_s", SECONDS_MAX),
        reconcile_gap=limit(table, "reconcile_gap", COUNT_MAX),
    )


def limit(table: Table, key: str, most: int) -> int | None:
    """A limit from 1 on; `false` turns it off."""
    usual: int | None = getattr(Thresholds(), key, None)
    if _is_off(table, key):
        return None
    return table.integer(key, 1, most) or usual


def _part(table: Table, key: str) -> float | None:
    usual: float | None = getattr(Thresholds(), key)
    if _is_off(table, key):
        return None
    value = table.values.get(key, usual)
    if isinstance(value, bool) or not isinstance(value, int | float):
        table.problem(key, f"expected a number or false, got {kind_of(value)}")
        return usual
    if not 0 < value <= 1:
        table.problem(key, "expected more than 0 and at most 1, as in 0.5 for half of them")
        return usual
    return float(value)


def _is_off(table: Table, key: str) -> bool:
    return table.values.get(key) is False
