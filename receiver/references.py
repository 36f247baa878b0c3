"""Finds the secrets that the configuration only names, without ever showing one."""

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

SECRET_BYTES_MAX = 65_536
ENV_FILE_BYTES_MAX = 1_048_576

#: What systemd passed to the service that runs: root's commands beside it see the same.
SERVICE_CREDENTIALS = "/run/credentials/receiver.service"

KINDS = "env:NAME, file:/path or credential:NAME"

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_CREDENTIAL_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._@-]+", re.ASCII)
# A secret pasted behind `env:` would pass for a name, and names are shown.
_PASTED = re.compile(r"(v1,)?(whsec_|whpk_|whsk_|sk_live_|sk_test_|rk_live_|rk_test_)")
_LINE = r"(?a)(?:export[ \t]+)?([A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*(.*)"
_QUOTED = r"""(?:'([^']*)'|"((?:\\.|[^"\\])*)")[ \t]*(?:\#.*)?"""
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


class Unresolved(Exception):
    """What is wrong with a reference and what to do, without the value."""


class References:
    """Where references of one configuration are looked up.

    `directory` is the configuration's; `lines` are the env_file's, which `environment` overrides.
    """

    def __init__(
        self,
        directory: Path,
        environment: Mapping[str, str],
        lines: Mapping[str, str] | None = None,
        env_file: Path | None = None,
    ) -> None:
        self._directory = directory
        self._environment = environment
        self._lines = lines or {}
        self._env_file = env_file

    def resolve(self, reference: str) -> tuple[bytes, str | None]:
        """The value, and a warning or None; raises Unresolved, in words that never hold it.

        White space around the value is stripped, with a warning; the one line end that closes
        a file is not worth one.
        """
        check(reference)
        kind, _, name = reference.partition(":")
        if kind == "env":
            value = self._variable(name)
        elif kind == "file":
            value = _without_line_end(self._file(name))
        else:
            value = _without_line_end(self._credential(name))
        return _stripped(value, reference)

    def _variable(self, name: str) -> bytes:
        value = self._environment.get(name, self._lines.get(name))
        if value is None:
            place = f"in {self._env_file.name}" if self._env_file else "in a file named by env_file"
            raise Unresolved(f"environment variable {name} is not set (set it, or put it {place})")
        return value.encode("utf-8", "surrogateescape")

    def _file(self, name: str) -> bytes:
        return read_bytes(self._directory / name, SECRET_BYTES_MAX)

    def _credential(self, name: str) -> bytes:
        directory = self._environment.get("CREDENTIALS_DIRECTORY", SERVICE_CREDENTIALS)
        if directory == SERVICE_CREDENTIALS and not os.path.isdir(directory):
            raise Unresolved(
                f"credential {name}: $CREDENTIALS_DIRECTORY is not set "
                f"(start it from a systemd unit with LoadCredential={name}:/path, or use file:)"
            )
        try:
            return read_bytes(Path(directory) / name, SECRET_BYTES_MAX)
        except Unresolved as error:
            raise Unresolved(f"{error} (is LoadCredential={name} set in the unit?)") from error


def check(reference: str) -> None:
    """Raises Unresolved for text that is not a well-formed reference, without repeating it."""
    kind, colon, name = reference.partition(":")
    if not colon or kind not in ("env", "file", "credential"):
        hint = "; remove the leading 'v1,' when you store it" if reference[:3] == "v1," else ""
        raise Unresolved(
            f"is not a reference: write {KINDS} and keep the secret itself out of this file{hint}"
        )
    if _PASTED.match(name):
        raise Unresolved(f"has the secret itself behind {kind}: (write {KINDS})")
    if kind == "env" and not _ENV_NAME.fullmatch(name):
        raise Unresolved("what follows env: is not a variable's name (letters, digits and _)")
    if kind == "credential" and not _CREDENTIAL_NAME.fullmatch(name):
        raise Unresolved("what follows credential: is not a credential's name (no / or spaces)")
    if kind == "file" and (not name.strip() or not name.isprintable()):
        raise Unresolved("what follows file: is not a path (name a file that holds the secret)")


def read_env_file(path: Path) -> tuple[dict[str, str], list[str]]:
    """The variables of KEY=VALUE lines, and the problems found; raises Unresolved if unreadable.

    Blank lines and lines that begin with # are skipped, `export ` is allowed. Unquoted values
    end at white space followed by #; 'single' quotes are literal, "double" ones know \\n, \\r,
    \\t, \\" and \\\\. The last of several lines for a name counts.
    """
    try:
        text = read_bytes(path, ENV_FILE_BYTES_MAX).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unresolved(
            f"{path} is not UTF-8 text (byte {error.start}); save it as such"
        ) from None
    variables: dict[str, str] = {}
    problems: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        found = re.fullmatch(_LINE, line)
        value = _unquoted(found[2]) if found else None
        if found is None or value is None:
            wrong = "a quote is not closed" if found else "is not KEY=VALUE"
            problems.append(f"line {number} of {path}: {wrong}; correct it, or begin it with #")
        else:
            variables[found[1]] = value
    return variables, problems


def read_bytes(path: Path, bytes_max: int) -> bytes:
    """A regular file of at most `bytes_max`; raises Unresolved in words that name it."""
    try:
        value = _read(path, bytes_max + 1)
    except FileNotFoundError:
        raise Unresolved(f"{path}: no such file (create it, or correct the path)") from None
    except PermissionError:
        raise Unresolved(f"{path} may not be read by this user (see ls -l)") from None
    except OSError as error:
        raise Unresolved(f"{path} can't be read: {error.strerror} (check the path)") from None
    if len(value) > bytes_max:
        raise Unresolved(f"{path} is larger than {bytes_max} bytes (is it the right file?)")
    return value


def _read(path: Path, bytes_max: int) -> bytes:
    # Without O_NONBLOCK a named pipe would hold up the start until someone writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Unresolved(f"{path} is not a regular file (name a file)")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(bytes_max)
    finally:
        os.close(descriptor)


def _unquoted(text: str) -> str | None:
    if not text.startswith(("'", '"')):
        return re.split(r"[ \t]+#|^#", text, maxsplit=1)[0].rstrip()
    found = re.fullmatch(_QUOTED, text)
    if found is None:
        return None
    if found[1] is not None:
        return found[1]
    return re.sub(r"\\(.)", lambda escape: _ESCAPES.get(escape[1], escape[1]), found[2])


def _without_line_end(value: bytes) -> bytes:
    return value.removesuffix(b"\n").removesuffix(b"\r")


def _stripped(value: bytes, reference: str) -> tuple[bytes, str | None]:
    bare = value.removeprefix(b"\xef\xbb\xbf").strip()
    if not bare:
        raise Unresolved(f"{reference} is empty (store the secret there)")
    if bare != value:
        return bare, f"{reference}: white space around the secret is left out; store it without"
    return bare, None
