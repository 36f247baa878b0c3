"""The secrets that senders handed over, as the server knows them while it runs."""

from collections.abc import Sequence

import msgspec

from receiver.config import Settings
from receiver.verify import Contract, Secret
from store import captured
from store.database import Snapshot

#: Captured secrets of one source that are accepted.
CAPTURED_MAX = 20


def reference(number: int) -> str:
    """The name of a captured secret, in place of a reference from the config."""
    return f"captured:{number}"


def secrets_of(kept: Sequence[captured.Captured]) -> tuple[Secret, ...]:
    """Captured secrets, to be tried like those of the config."""
    return tuple(Secret(reference(one.id), one.secret) for one in kept)


def complete(contract: Contract, snapshot: Snapshot) -> Contract:
    """The contract with what was captured for its source."""
    kept = captured.listed(snapshot).get(contract.source, ())
    return msgspec.structs.replace(contract, secrets=(*contract.secrets, *secrets_of(kept)))


class Captures:
    """What is armed and what was captured; asked for each delivery, without reading the file.

    So whatever anybody sends to a source that is not armed never gets as far as the database.
    """

    def __init__(self) -> None:
        self._settings: Settings | None = None
        self._wanted = False
        self._armed: dict[str, captured.Armed] = {}
        self._secrets: dict[str, tuple[Secret, ...]] = {}
        # By source, what a contract became: made anew when any part of it is another.
        self._contracts: dict[str, tuple[Contract, bool, tuple[Secret, ...], Contract]] = {}

    def look(self, snapshot: Snapshot, settings: Settings) -> None:
        """See what the command line, or another process, has changed."""
        if settings is not self._settings:
            self._settings = settings
            sources = settings.sources.values()
            self._wanted = any(source.contract.preset.captures for source in sources)
        if self._wanted:
            self._armed = captured.armed(snapshot)
            kept = captured.listed(snapshot)
            self._secrets = {source: secrets_of(some) for source, some in kept.items()}

    def contract(self, contract: Contract, at_ms: int) -> Contract:
        """The contract with what was captured, armed if it is at that time."""
        source = contract.source
        armed = source in self._armed and self._armed[source].is_open(at_ms)
        secrets = self._secrets.get(source, ())
        known = self._contracts.get(source)
        if known is None or known[0] is not contract or known[1:3] != (armed, secrets):
            made = msgspec.structs.replace(
                contract, secrets=(*contract.secrets, *secrets), armed=armed
            )
            known = self._contracts[source] = contract, armed, secrets, made
        return known[3]

    def add(self, source: str, number: int, secret: bytes) -> None:
        """A secret is durable from now on, and nothing is awaited any more."""
        self.disarm(source)
        known = self._secrets.get(source, ())
        if all(one.reference != reference(number) for one in known):
            self._secrets[source] = (*known, Secret(reference(number), secret))

    def disarm(self, source: str) -> None:
        self._armed.pop(source, None)
