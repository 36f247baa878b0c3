"""What the machine is like for the file and for the service, asked of it within a few seconds."""

import http.client
import os
import re
import shutil
import socket
import ssl
import statistics
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import urllib3

#: Writes that are timed, and their bytes: one page, as a small commit has.
SYNCS, SYNC_BYTES = 20, 4_096

#: Seconds for each program that is asked, and for a URL.
PROGRAM_S, URL_S = 10.0, 5.0

#: Tries of a ping, and how much longer each pause between them is than the last, in seconds.
PINGS, PING_PAUSE_S = 4, 0.5

UNIT = "receiver.service"

#: Kinds of file systems where locks or shared memory can't be relied on; and that end at a restart.
NETWORK = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "9p",
    "afs",
    "ceph",
    "glusterfs",
    "lustre",
    "ocfs2",
)
MEMORY = ("tmpfs", "ramfs")

_OCTAL = re.compile(r"\\([0-7]{3})")
_EXPOSURE = re.compile(r"exposure level for .*?: ([0-9.]+)")


class Syncs(msgspec.Struct, frozen=True):
    """How long a page took to be durable, in milliseconds."""

    median_ms: float
    longest_ms: float


class Site(msgspec.Struct, frozen=True):
    """What a public URL answered; `problem` where nobody could be asked.

    `certificate_until_s` is when the certificate ends, in Unix seconds; `ours` says that a
    Receiver answered.
    """

    status: int | None = None
    location: str | None = None
    ours: bool = False
    certificate_until_s: float | None = None
    tls_problem: str | None = None
    problem: str | None = None


class Unit(msgspec.Struct, frozen=True):
    """What the service manager says of the unit; `exposure` is 0 for none to 10."""

    active: bool
    restart: str
    output: str
    exposure: float | None


def file_system(path: Path) -> str:
    """The kind of the file system that a file or folder is on; '' if that is not known."""
    real = os.path.realpath(path)
    best, kind = "", ""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        # proc(5): the mount point is the fifth field, the kind follows a lone hyphen.
        fields, _, rest = line.partition(" - ")
        point = _OCTAL.sub(lambda found: chr(int(found[1], 8)), fields.split()[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, rest.split()[0]
    return kind


def sync_times(folder: Path) -> Syncs:
    """Make a page durable several times, in a file that is gone afterwards. Raises OSError."""
    path = folder / f".receiver-doctor-{os.getpid()}"
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        taken = []
        for _ in range(SYNCS):
            started = time.perf_counter()
            os.write(descriptor, os.urandom(SYNC_BYTES))
            os.fdatasync(descriptor)
            taken.append((time.perf_counter() - started) * 1000)
    finally:
        os.close(descriptor)
        path.unlink()
    return Syncs(statistics.median(taken), max(taken))


def ask_site(url: str, source: str) -> Site:
    """What answers at the URL of a source. Only looks; follows no redirect."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        context = ssl.create_default_context()
        connection = http.client.HTTPSConnection(host, parts.port, timeout=URL_S, context=context)
    else:
        connection = http.client.HTTPConnection(host, parts.port, timeout=URL_S)
    try:
        connection.connect()
        until = _certificate_until(connection.sock)
        # No source takes a GET, so nothing is delivered.
        connection.request("GET", f"{parts.path}/webhooks/{source}")
        answer = connection.getresponse()
        return Site(
            status=answer.status,
            location=answer.headers.get("Location"),
            ours="X-Request-Id" in answer.headers,
            certificate_until_s=until,
        )
    except ssl.SSLError as error:
        return Site(
            tls_problem=getattr(error, "verify_message", None) or error.reason or str(error)
        )
    except (OSError, http.client.HTTPException) as error:
        return Site(problem=str(getattr(error, "strerror", None) or error or type(error).__name__))
    finally:
        connection.close()


def ping(url: str) -> str | None:
    """Ask a URL that counts as asked by an answer of 2xx; what is wrong, without the URL."""
    if not url.startswith(("http://", "https://")):
        return "is no URL that begins with https://"
    # Tried again here, since urllib3 would log the URL with each try.
    for number in range(PINGS):
        time.sleep(PING_PAUSE_S * number)
        try:
            answer = urllib3.request("GET", url, timeout=URL_S, retries=False, redirect=False)
        except urllib3.exceptions.HTTPError as error:
            problem = f"nobody could be asked in {PINGS} tries ({type(error).__name__})"
        else:
            return None if 200 <= answer.status < 300 else f"the answer was {answer.status}"
    return problem


def unit() -> Unit | None:
    """The installed unit, or None where there is none, or no systemd."""
    names = ("LoadState", "ActiveState", "Restart", "StandardError")
    text = _run("systemctl", "show", UNIT, "--property", ",".join(names))
    said = dict(line.split("=", 1) for line in (text or "").splitlines() if "=" in line)
    if said.get("LoadState") != "loaded":
        return None
    judged = _EXPOSURE.search(_run("systemd-analyze", "security", "--no-pager", UNIT) or "")
    return Unit(
        active=said.get("ActiveState") == "active",
        restart=said.get("Restart", ""),
        output=said.get("StandardError", ""),
        exposure=float(judged[1]) if judged else None,
    )


def clock_is_set() -> bool | None:
    """Whether the clock is set over the network; None where nobody can say."""
    said = (_run("timedatectl", "show", "--property", "NTPSynchronized", "--value") or "").strip()
    return {"yes": True, "no": False}.get(said)


def _certificate_until(connected: socket.socket) -> float | None:
    if not isinstance(connected, ssl.SSLSocket):
        return None
    until = (connected.getpeercert() or {}).get("notAfter")
    return ssl.cert_time_to_seconds(until) if isinstance(until, str) else None


def _run(*words: str) -> str | None:
    program = shutil.which(words[0])
    if program is None:
        return None
    try:
        ran = subprocess.run(  # noqa: S603  fixed words, no shell
            [program, *words[1:]],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROGRAM_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout
