"""Examines set-up, file and machine: findings that say what to do, and what they add up to."""

import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from receiver import backup, check, facts, machine
from receiver.check import Finding
from receiver.config import ConfigError, Settings, Source, load, read
from receiver.console import age, counted, size
from receiver.machine import Site, Syncs, Unit
from receiver.sources import idle, tolerance_of
from store import backups, inbox, integrity, rejections, secrets
from store.database import Snapshot, exists, snapshot
from store.errors import StoreError

DAY_MS = 86_400_000
#: A backup that is older needs a look.
BACKUP_OLD_MS = 2 * DAY_MS
#: How far back clocks and bodies are looked at.
RECENT_MS = 7 * DAY_MS
#: Room that should be left beside the file, in bytes, and below which it is urgent.
FREE_BYTES, FREE_BYTES_MIN = 2_000_000_000, 200_000_000
#: Bytes of a -wal that some reader has kept from being used again.
WAL_BYTES_MAX = 256_000_000
#: Milliseconds that a commit may take to be durable.
SYNC_SLOW_MS, SYNC_UNREAL_MS = 20.0, 0.01
#: Days that a certificate should still be good for.
CERTIFICATE_DAYS = 14
#: Seconds that a signed request may be old before that is no protection.
TOLERANCE_S_MAX = 900
_LOOSE = "open to everybody"
#: What `systemd-analyze security` may say.
EXPOSURE_MAX = 4.0


class Tick(msgspec.Struct, frozen=True):
    """One line of the production checklist."""

    item: str
    done: bool
    why: str


class Diagnosis(msgspec.Struct, frozen=True):
    """All findings, in the order they were made, and the checklist that they add up to."""

    findings: tuple[Finding, ...]
    checklist: tuple[Tick, ...]

    @property
    def is_well(self) -> bool:
        return not any(one.level in ("problem", "config") for one in self.findings)


class Machine(msgspec.Struct, frozen=True):
    """What was asked of the machine; each is None or empty where it could not be."""

    syncs: Syncs | None = None
    sites: Mapping[str, Site] = {}
    unit: Unit | None = None
    clock_is_set: bool | None = None


def examine(path: Path, now_ms: int, *, offline: bool = False) -> Diagnosis:
    """Look at everything, as the file's owner where that is asked of root."""
    findings = check.examine(path)
    try:
        settings = load(path, secrets=False)
    except ConfigError:
        return Diagnosis(tuple(findings), _unearned("the config has problems"))
    asked = ask(settings, offline=offline)
    findings += [*_files(settings), *_place(settings), *_machine(settings, asked, now_ms)]
    findings += _backups(settings, now_ms)
    ticks = _unearned("there is no database yet")
    if exists(settings.database):
        try:
            with snapshot(settings.database) as seen:
                findings += _in_file(seen, settings, now_ms)
                ticks = tuple(_checklist(seen, settings, asked, findings))
        except StoreError as error:
            ticks = _unearned("the database can't be read")
            findings.append(_problem(f"database: {error}"))
    return Diagnosis(tuple(dict.fromkeys(findings)), ticks)


def ask(settings: Settings, *, offline: bool) -> Machine:
    """Ask the machine; with `offline` no URL."""
    try:
        syncs = machine.sync_times(settings.database.parent)
    except OSError:
        syncs = None
    sites = {}
    for source in settings.sources.values():
        url = source.public_url
        if url is not None and url not in sites and not offline:
            sites[url] = machine.ask_site(url, source.name)
    return Machine(syncs, sites, machine.unit(), machine.clock_is_set())


# Files beside the database


def _files(settings: Settings) -> Iterator[Finding]:
    private = dict.fromkeys(_secret_files(read(settings.path), settings.path.parent))
    if settings.env_file is not None:
        private[settings.env_file] = None
    for path in private:
        mode = _mode(path)
        if mode is not None and mode & 0o077:
            yield _problem(
                f"secrets: {path} has mode {mode:o}, so others may read it: `chmod 600 {path}`"
            )
    for path in filter(None, (settings.path, settings.handlers)):
        mode = _mode(path)
        if mode is not None and mode & 0o002:
            yield _problem(f"{path}: everybody may change it: `chmod o-w {path}`")
    if private and not any(mode & 0o077 for mode in map(_mode, private) if mode is not None):
        yield _fine(f"secrets: {counted(len(private), 'file')} that only the owner may read")


def _secret_files(node: object, folder: Path) -> Iterator[Path]:
    if isinstance(node, str) and node.startswith("file:"):
        yield folder / node.removeprefix("file:")
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    for child in children:
        yield from _secret_files(child, folder)


def _mode(path: Path) -> int | None:
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return None


# Where the database is


def _place(settings: Settings) -> Iterator[Finding]:
    path = settings.database
    kind = machine.file_system(path)
    if kind in machine.NETWORK or kind.startswith("fuse."):
        yield _problem(
            f"database: {path} is on {kind}, where locks and shared memory can't be relied on: "
            "move it to a disk of this machine"
        )
    elif kind in machine.MEMORY:
        yield _problem(
            f"database: {path} is on {kind}, gone at the next restart: move it to a disk"
        )
    elif kind == "overlay":
        yield _warning(
            f"database: {path} is in a container's own layer, and goes with it: put it on a volume"
        )
    yield from _room(path)
    if exists(path):
        yield from _owned(path)


def _room(path: Path) -> Iterator[Finding]:
    try:
        free = shutil.disk_usage(path.parent).free
    except OSError:
        return
    words = f"disk: {size(free)} are free beside {path}"
    if free < FREE_BYTES_MIN:
        yield _problem(f"{words}: when it is full nothing is taken any more; make room now")
    elif free < FREE_BYTES:
        yield _warning(f"{words}: make room, or `receiver prune`, which lets it be used again")
    else:
        yield _fine(words)


def _owned(path: Path) -> Iterator[Finding]:
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o007:
        yield _problem(f"database: {path} has mode {mode:o}, {_LOOSE}: `chmod o= {path}`")
    for suffix in ("-wal", "-shm"):
        beside = Path(f"{path}{suffix}")
        if beside.exists() and beside.stat().st_uid != status.st_uid:
            yield _problem(
                f"database: {beside} belongs to somebody else than {path}, who may be locked out: "
                f"`chown --reference={path} {beside}`"
            )
    wal = Path(f"{path}-wal")
    length = wal.stat().st_size if wal.exists() else 0
    if length > WAL_BYTES_MAX:
        yield _warning(
            f"database: the -wal has {size(length)}, as something reads the file for long: "
            f"find it with `fuser {path}`"
        )


# The machine


def _machine(settings: Settings, asked: Machine, now_ms: int) -> Iterator[Finding]:
    yield from _syncs(asked.syncs)
    if asked.clock_is_set is False:
        yield _problem(
            "clock: it is not set over the network, and signatures have a time: "
            "`timedatectl set-ntp true`"
        )
    for url, site in asked.sites.items():
        yield _site(url, site, now_ms)
    yield from _unsafe_urls(settings)
    yield from _unit(asked.unit)
    if exists(settings.database):
        for need in facts.amiss(facts.running_on(settings), settings):
            yield _warning(f"{need.name}: {need.words}: `{need.command}`")


def _syncs(syncs: Syncs | None) -> Iterator[Finding]:
    if syncs is None:
        return
    words = (
        f"disk: a commit is durable in {syncs.median_ms:.1f} ms (longest {syncs.longest_ms:.1f})"
    )
    if syncs.median_ms > SYNC_SLOW_MS:
        yield _warning(
            f"{words}: slow; a faster disk answers senders sooner, and takes more a second"
        )
    elif syncs.median_ms < SYNC_UNREAL_MS:
        yield _warning(
            f"{words}: faster than disks are; see that the virtual disk's cache is not `unsafe`"
        )
    else:
        yield _fine(words)


def _site(url: str, site: Site, now_ms: int) -> Finding:
    if site.tls_problem is not None:
        return _problem(
            f"public_url: {url}: TLS fails ({site.tls_problem}): renew or complete the "
            "certificate, as senders check it"
        )
    if site.problem is not None:
        return _warning(
            f"public_url: {url} can't be reached from here ({site.problem}): see from elsewhere "
            "that it can"
        )
    if site.location is not None:
        return _problem(
            f"public_url: {url} redirects to {site.location}: give senders that address, as they "
            "follow no redirect"
        )
    if not site.ours:
        return _problem(
            f"public_url: {url} is answered with {site.status}, and not by Receiver: let the proxy "
            "pass /webhooks/ to server.listen"
        )
    return _certificate(url, site, now_ms)


def _certificate(url: str, site: Site, now_ms: int) -> Finding:
    if site.certificate_until_s is None:
        return _fine(f"public_url: {url} reaches a Receiver")
    days = int(site.certificate_until_s - now_ms / 1000) // 86_400
    words = (
        f"public_url: {url} reaches a Receiver, its certificate is good for {counted(days, 'day')}"
    )
    if days < CERTIFICATE_DAYS:
        return _warning(f"{words}: see that it is renewed")
    return _fine(words)


def _unsafe_urls(settings: Settings) -> Iterator[Finding]:
    for source in settings.sources.values():
        if source.contract.livemode and (source.public_url or "").startswith("http://"):
            yield _problem(
                f"sources.{source.name}: is live, and its URL begins with http://: use TLS"
            )


def _unit(unit: Unit | None) -> Iterator[Finding]:
    if unit is None:
        yield _warning(
            f"systemd: no {machine.UNIT} is installed here: without one nothing starts the server "
            "again after a crash or a restart"
        )
        return
    if not unit.active:
        yield _problem(f"systemd: {machine.UNIT} is not active: `systemctl enable --now receiver`")
    if unit.restart == "no":
        yield _problem(f"systemd: {machine.UNIT} has Restart=no: set Restart=always")
    if unit.exposure is not None and unit.exposure > EXPOSURE_MAX:
        yield _warning(
            f"systemd: exposure {unit.exposure} of 10: `systemd-analyze security {machine.UNIT}` "
            "says which directives are missing"
        )
    elif unit.active:
        yield _fine(f"systemd: {machine.UNIT} is active, exposure {unit.exposure or '?'} of 10")


# Backups


def _backups(settings: Settings, now_ms: int) -> list[Finding]:
    folder = backup.folder_of(settings)
    newest = backup.newest(settings)
    if newest is None:
        return [_warning(f"backup: there is none in {folder}: run `receiver backup` daily")]
    try:
        facts = backups.examine(newest)
    except StoreError as error:
        return [_problem(f"backup: {error}; run `receiver backup` now")]
    passed = now_ms - newest.stat().st_mtime_ns // 1_000_000
    words = f"backup: {newest}, made {age(passed)}, restores {counted(facts.events, 'event')}"
    if passed > BACKUP_OLD_MS:
        return [_warning(f"{words}: that is long ago; run `receiver backup` daily")]
    return [_fine(words)]


# In the file


def _in_file(seen: Snapshot, settings: Settings, now_ms: int) -> Iterator[Finding]:
    for words in integrity.full_check(seen):
        yield _problem(f"database: is damaged: {words}; `receiver restore` the newest backup")
    for words in integrity.schema_faults(seen):
        yield _problem(
            f"database: {words}, so a rule of the ledger may not hold: find who changed it, then "
            "put it back from `.schema` of a new file"
        )
    for words in integrity.foreign_key_faults(seen):
        yield _warning(f"database: {words}: the app's own rows; correct them there")
    yield from _shared(seen, settings)
    yield from _clocks(seen, settings, now_ms)
    yield from _same_bodies(seen, now_ms)
    for source in settings.sources.values():
        if inbox.latest(seen, source.name) is None:
            yield _warning(
                f"sources.{source.name}: nothing ever came: `receiver sources show {source.name}` "
                "has the URL to enter at the sender"
            )
        yield from _secrets(seen, source, now_ms)


def _shared(seen: Snapshot, settings: Settings) -> Iterator[Finding]:
    tables = integrity.foreign_tables(seen)
    mode = integrity.journal_mode(seen)
    if mode != "wal":
        yield _problem(
            f"database: its journal mode is {mode}: something switched it; let nobody but Receiver "
            "set journal_mode"
        )
    for name in integrity.foreign_triggers(seen):
        yield _warning(
            f"database: trigger {name} of the app fires on one of Receiver's tables, in the "
            "transaction of a delivery: drop it, and use a rule with `sql`"
        )
    if not tables:
        return
    owner, ours = settings.database.stat().st_uid, os.geteuid()
    if owner != ours:
        yield _problem(
            f"database: it is the app's, of user {owner}, and this runs as user {ours}: run the "
            "service as the app's user"
        )
    yield _fine(
        f"database: shared with an app ({counted(len(tables), 'table')}); what can't be seen from "
        "here: the app's SQLite is 3.37 or newer, its busy timeout 5 s, synchronous never off, and "
        "wal_autocheckpoint=0 in one older than 3.51.3"
    )


def _clocks(seen: Snapshot, settings: Settings, now_ms: int) -> Iterator[Finding]:
    known = rejections.skews(seen, now_ms - RECENT_MS)
    for name in settings.sources:
        skews = [skew for source, skew in known if source == name]
        if not skews:
            continue
        late = sum(skew > 0 for skew in skews)
        early = len(skews) - late
        if early:
            yield _problem(
                f"clock: {counted(early, 'genuine delivery')} of {name} came from the future, by "
                f"up to {-min(skews)} s: this machine's clock is behind; `timedatectl`"
            )
        if late:
            yield _warning(
                f"clock: {counted(late, 'genuine delivery')} of {name} came up to {max(skews)} s "
                "old: the clock is ahead (`timedatectl`), or they were held up; "
                f"`receiver rejections list --source {name}`"
            )


def _same_bodies(seen: Snapshot, now_ms: int) -> Iterator[Finding]:
    count, last = inbox.same_bodies(seen, now_ms - RECENT_MS)
    if count:
        yield _warning(
            f"events: {count} in a week had the body of another under an id that nobody signed, "
            f"the last is `receiver events show {last}`: did somebody replay them?"
        )


def _secrets(seen: Snapshot, source: Source, now_ms: int) -> Iterator[Finding]:
    uses = secrets.last_used(seen)
    old = [one.reference for one in idle(source, uses)]
    where = f"sources.{source.name}.secrets"
    for name in old:
        yield _warning(f"{where}: {name} proved nothing for a day, and another did: take it out")
    several = {one.reference for one in source.contract.signing if not one.account}.difference(old)
    recent = [
        one.reference
        for one in uses
        if one.source == source.name
        and one.reference in several
        and one.last_ms > now_ms - RECENT_MS
    ]
    if len(recent) > 1:
        yield _warning(
            f"{where}: {' and '.join(recent)} are in use: finish the rotation at the sender, then "
            "take the old one out"
        )


# The checklist


def _checklist(
    seen: Snapshot, settings: Settings, asked: Machine, findings: Sequence[Finding]
) -> Iterator[Tick]:
    sources = settings.sources.values()
    unsigned = [one.name for one in sources if not _is_signed(one)]
    yield Tick(
        "signature",
        bool(sources) and not unsigned,
        f"not verified: {', '.join(unsigned)}" if unsigned else "every source verifies its senders",
    )
    yield _tolerance(settings)
    altered = integrity.schema_faults(seen)
    lost = [one for one in findings if "the config no longer has it" in one.text]
    yield Tick(
        "unique key",
        not altered and not lost,
        "a key's name was lost, or a rule of the file altered"
        if altered or lost
        else "event keys and business keys are unique in the file",
    )
    # Who may read the file says nothing of what a commit does in it.
    broken = [
        one
        for one in findings
        if one.level == "problem" and one.text.startswith("database:") and _LOOSE not in one.text
    ]
    yield Tick(
        "one transaction",
        not broken,
        "the database has problems" if broken else "events and effects share one file, in WAL mode",
    )
    yield from _service_ticks(settings, asked)
    open_ = [one for one in findings if one.text.startswith("secrets: ") and one.level == "problem"]
    unused = [one for one in findings if ".secrets: " in one.text]
    yield Tick(
        "secrets",
        not open_ and not unused,
        "some are open to others, or no longer used"
        if open_ or unused
        else "private, and all in use",
    )


def _tolerance(settings: Settings) -> Tick:
    known = {name: tolerance_of(source) for name, source in settings.sources.items()}
    wide = [name for name, seconds in known.items() if (seconds or 0) > TOLERANCE_S_MAX]
    if wide:
        return Tick("tolerance", False, f"more than {TOLERANCE_S_MAX} s for {', '.join(wide)}")
    timeless = [name for name, seconds in known.items() if seconds is None]
    ageless = [name for name in timeless if settings.sources[name].contract.preset.signs_time]
    if ageless:
        why = f"any age is taken by {', '.join(ageless)}, though a time is signed: set tolerance_s"
        return Tick("tolerance", False, why)
    if timeless:
        why = f"no time is signed by {', '.join(timeless)}: their keys alone hold off a replay"
        return Tick("tolerance", True, why)
    return Tick("tolerance", bool(known), "every source refuses what is stale")


def _service_ticks(settings: Settings, asked: Machine) -> Iterator[Tick]:
    worker = settings.worker
    yield Tick(
        "bounded retries",
        worker.run != "off",
        f"at most {worker.attempts_max} attempts in {worker.age_max_s // 3600} h"
        if worker.run != "off"
        else "worker.run is off: nothing is tried again",
    )
    kept = asked.unit is not None and asked.unit.output in ("journal", "inherit")
    yield Tick("logs", kept, "kept by the journal" if kept else "nobody is seen to keep them")
    local = settings.server.admin.is_local
    yield Tick(
        "inspection",
        local,
        "by this command, and health on a local address" if local else "server.admin is public",
    )


def _is_signed(source: Source) -> bool:
    schemes = source.contract.preset.schemes
    return bool(source.contract.secrets) and all(one.algo != "none" for one in schemes)


def _unearned(why: str) -> tuple[Tick, ...]:
    items = ("signature", "tolerance", "unique key", "one transaction", "bounded retries")
    return tuple(Tick(item, False, why) for item in (*items, "logs", "inspection", "secrets"))


def _problem(text: str) -> Finding:
    return Finding("problem", text)


def _warning(text: str) -> Finding:
    return Finding("warning", text)


def _fine(text: str) -> Finding:
    return Finding("fine", text)
