"""What a config that is read again changes in a process that runs, and what only a restart does."""

import msgspec

from receiver.config import Settings


def in_force(old: Settings, new: Settings) -> Settings:
    """The new settings, but for what a process that runs can't change: that stays as it was."""
    worker = msgspec.structs.replace(new.worker, run=old.worker.run, threads=old.worker.threads)
    warnings = new.warnings
    if new.worker.run != old.worker.run:
        # They are about what runs after a restart.
        warnings = tuple(one for one in warnings if "worker.run" not in one)
    return msgspec.structs.replace(new, database=old.database, worker=worker, warnings=warnings)


def restart_needed(old: Settings, new: Settings) -> list[str]:
    """The settings that differ and are only read at the start, by a server or a worker."""
    changed = {
        "database": old.database != new.database,
        "worker.run": old.worker.run != new.worker.run,
        "worker.threads": old.worker.threads != new.worker.threads,
    }
    return [name for name, differs in changed.items() if differs]


def restart_of_server_needed(old: Settings, new: Settings) -> list[str]:
    """The same of those that only a server reads."""
    before, after = old.server, new.server
    changed = {
        "server.listen": before.listen != after.listen,
        "server.admin": before.admin != after.admin,
        "server.pending_max": before.pending_max != after.pending_max,
        "server.tls": (before.tls is None) != (after.tls is None),
    }
    return [name for name, differs in changed.items() if differs]


def gone(old: Settings, new: Settings) -> list[str]:
    """The sources, rules and destinations that were there and are not any more."""
    return [
        *(f"source {name}" for name in old.sources if name not in new.sources),
        *(f"rule {name}" for name in old.operations if name not in new.operations),
        *(f"destination {name}" for name in old.destinations if name not in new.destinations),
    ]
