"""The licences of what a packed program holds: Python, the packages, the machine's libraries."""

import subprocess
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

#: What packs is not in the pack; PyInstaller's loader is, under the exception it names for that.
TOOLS = frozenset(
    ("altgraph", "packaging", "pip", "pycparser", "pyinstaller-hooks-contrib", "setuptools")
)
LOADER = """\
Its loader is free to be given on with any program: see the exception in PyInstaller's COPYING.txt.
"""


def text(binaries: Iterable[str], own: Path) -> str:
    """All of them, with a heading each; `binaries` are the libraries that went in."""
    parts = [("Receiver", own.read_text()), ("Python", _python())]
    parts += sorted(_packages())
    parts += sorted(_libraries(binaries))
    return "\n\n".join(f"{'=' * 78}\n{name}\n{'=' * 78}\n\n{words}" for name, words in parts)


def _python() -> str:
    folders = (sysconfig.get_path("stdlib"), "/usr/share/doc/python3.11", "/usr/share/doc/python3")
    for folder in map(Path, folders):
        for name in ("LICENSE.txt", "copyright"):
            if (folder / name).is_file():
                return (folder / name).read_text(errors="replace")
    raise FileNotFoundError(f"no licence of Python in {', '.join(folders)}")


def _packages() -> Iterator[tuple[str, str]]:
    for one in distributions():
        name = one.metadata["Name"].lower()
        if name in TOOLS or name == "edge-receiver":
            continue
        words = LOADER if name == "pyinstaller" else _words_of(one)
        yield f"{one.metadata['Name']} {one.version}", words


def _words_of(one: Distribution) -> str:
    files = [
        Path(str(file.locate()))
        for file in one.files or ()
        if ".dist-info" in str(file)
        and file.name.lower().startswith(("licen", "copying", "notice"))
    ]
    named = one.metadata.get("License-Expression") or one.metadata.get("License") or ""
    return "\n".join([named, *(file.read_text(errors="replace") for file in files)])


def _libraries(binaries: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Those of Debian's packages that a library comes from."""
    places = {
        place
        for path in binaries
        for place in (path, path.removeprefix("/usr"), str(Path(path).resolve()))
    }
    # Once for all, since it reads its whole database each time; it fails for those of no package.
    found = subprocess.run(  # noqa: S603  fixed words, no shell
        ["dpkg-query", "-S", *sorted(places)],  # noqa: S607
        capture_output=True,
        text=True,
    )
    owners = {line.split(":")[0] for line in found.stdout.splitlines()}
    for owner in owners:
        words = Path("/usr/share/doc") / owner / "copyright"
        if words.is_file():
            yield (
                f"{owner} (a library of the machine that it was built on)",
                words.read_text(errors="replace"),
            )
