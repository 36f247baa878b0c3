"""Senders' certificates that were fetched and proved, by their URL; the file keeps the newest."""

from store.database import Snapshot, Tx


def keep(tx: Tx, url: str, pem: str, fetched_ms: int) -> None:
    """Store one, in place of what was at the URL before."""
    tx.db.execute(
        """
        insert into receiver_certificates (url, pem, fetched_ms) values (?, ?, ?)
        on conflict (url) do update set pem = excluded.pem, fetched_ms = excluded.fetched_ms
        """,
        (url, pem, fetched_ms),
    )


def known(tx: Tx | Snapshot) -> dict[str, bytes]:
    """All of them, in PEM."""
    found = tx.db.execute("select url, pem from receiver_certificates")
    return {str(url): str(pem).encode() for url, pem in found}
