"""What holds for the project as a whole: imports, the clock, dependencies, pins and targets."""

import ast
import functools
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from receiver import presets

ROOT = Path(__file__).parents[1]
FOLDERS = ("receiver", "store")
COMMANDS = ROOT / "receiver/commands"
MAY_IMPORT = {
    "cli": {"cli", "receiver", "store"},
    "commands": {"receiver", "store"},
    "receiver": {"receiver", "store"},
    "store": {"store"},
}
SQLITE = {"apsw", "sqlite3"}
CLOCKS = {
    "time.time",
    "time.time_ns",
    "datetime.date.today",
    "datetime.datetime.now",
    "datetime.datetime.today",
    "datetime.datetime.utcnow",
}
# uvicorn imports these two itself, by the names it is given.
RUN_BY_UVICORN = {"httptools", "uvloop"}
TARGETS = (
    "help",
    "demo",
    "run",
    "test",
    "lint",
    "check",
    "sdk-test",
    "proof",
    "fuzz",
    "bench",
    "binary",
    "release",
    "deb",
    "systemd-test",
    "front-test",
    "lowest",
    "lock",
    "clean",
)
# Each with the extras that it pins.
LOCKS = {
    ".ci/runtime.lock": (),
    ".ci/development.lock": ("crypto", "test", "dev"),
    ".ci/bench.lock": ("bench",),
    ".ci/fuzz.lock": ("fuzz",),
    ".ci/pack.lock": ("crypto", "pack"),
    ".ci/sdks.lock": ("crypto", "test", "sdks"),
}
RUNTIME_LOCK = ".ci/runtime.lock"
# Packages that are imported by another name.
IMPORTED_AS = {"squareup": "square", "paddle_python_sdk": "paddle_billing"}
# In parts, so that this file doesn't name one either.
REGISTRIES = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("npmjs", "org"),
        ("npmjs", "com"),
        ("deb", "debian", "org"),
        ("proxy", "golang", "org"),
    )
]
MAKE_TIMEOUT_S = 60

MODULES = sorted(
    [
        *ROOT.glob("*.py"),
        *(path for folder in FOLDERS for path in ROOT.joinpath(folder).rglob("*.py")),
    ]
)
each_module = pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
each_lock = pytest.mark.parametrize("lock", LOCKS)


# Layers


@each_module
def test_imports_point_down(path: Path) -> None:
    ours = imports(path) & MAY_IMPORT.keys()

    assert ours <= MAY_IMPORT[layer(path)]


@each_module
def test_only_commands_and_the_entry_know_the_commands(path: Path) -> None:
    assert "receiver.commands" not in path.read_text() or layer(path) in ("cli", "commands")


@each_module
def test_only_the_store_knows_sqlite(path: Path) -> None:
    engines = imports(path) & SQLITE

    assert not engines or layer(path) == "store"


@each_module
def test_the_clock_is_read_by_the_command_line_and_defaults_only(path: Path) -> None:
    readings = list(clock_readings(ast.parse(path.read_text())))

    assert not readings or path == COMMANDS / "shared.py"


@pytest.mark.parametrize(
    "line",
    [
        "import time\nnow = time.time()",
        "import time as t\nnow = t.time_ns()",
        "from time import time\nnow = time()",
        "import time\ndef f(now=time.time()): pass",
        "from datetime import UTC, datetime\nnow = datetime.now(UTC)",
        "import datetime\nday = datetime.date.today()",
    ],
)
def test_every_way_to_read_the_clock_is_found(line: str) -> None:
    assert list(clock_readings(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        "import time\ndef f(clock=time.time): pass",
        "import time\ndef f(*, clock=time.time_ns): pass",
        "import time\nclass A:\n    clock: Clock = time.time",
        "import time\nstart = time.monotonic()",
        "def f(time): return time.time",
    ],
)
def test_a_clock_that_is_passed_in_is_no_reading(line: str) -> None:
    assert not list(clock_readings(ast.parse(line)))


# Dependencies


def test_what_the_code_imports_is_what_is_declared() -> None:
    imported = {name for path in MODULES for name in third_party(path)}

    assert imported - declared("crypto") | RUN_BY_UVICORN == declared()


def test_what_the_tests_import_is_declared() -> None:
    paths = [path for path in ROOT.glob("tests/**/*.py") if "node_modules" not in path.parts]
    sdks = {path for path in paths if path.parent.name == "sdks"}
    allowed = declared() | declared("test") | declared("crypto") | declared("bench")
    names = (name.replace("-", "_") for name in declared("sdks"))
    libraries = {IMPORTED_AS.get(name, name) for name in names}

    assert {name for path in {*paths} - sdks for name in third_party(path)} - {"tests"} <= allowed
    imported = {name.lower() for path in sdks for name in third_party(path)} - {"tests"}
    assert imported <= allowed | libraries


@each_module
def test_an_extra_is_imported_only_when_it_is_needed(path: Path) -> None:
    at_import = imported_by(ast.parse(path.read_text()).body, path)

    assert not at_import & declared("crypto")


def test_every_package_of_the_code_is_installed() -> None:
    folders = {path.parent for path in MODULES if path.name == "__init__.py"}

    packages = {".".join(folder.relative_to(ROOT).parts) for folder in folders}

    assert packages == set(settings()["tool"]["setuptools"]["packages"])


def test_the_lock_holds_what_builds_the_project() -> None:
    build = settings()["build-system"]["requires"]

    assert build == settings()["dependency-groups"]["build"]
    assert {name_of(requirement) for requirement in build} <= pins(RUNTIME_LOCK).keys()


@each_lock
def test_every_pin_has_a_hash(lock: str) -> None:
    blocks = re.split(r"^(?=\w)", (ROOT / lock).read_text(), flags=re.MULTILINE)

    unhashed = [block for block in blocks[1:] if "--hash=sha256:" not in block]

    assert len(blocks) > 1
    assert not unhashed


@each_lock
def test_pins_satisfy_the_lower_bounds(lock: str) -> None:
    pinned = pins(lock)
    extras = LOCKS[lock]

    for requirement in requirements(*extras):
        name, bounds = requirement.split(">=")
        bound = bounds.partition(",")[0]

        assert numbers(pinned[name]) >= numbers(bound), requirement


@each_lock
def test_every_lock_pins_what_the_runtime_lock_pins(lock: str) -> None:
    assert pins(RUNTIME_LOCK).items() <= pins(lock).items()


def test_no_file_names_the_host_of_a_package_registry() -> None:
    named = [
        f"{path.relative_to(ROOT)}: {host}"
        for path in project_files()
        for host in REGISTRIES
        if host in path.read_bytes().decode(errors="replace")
    ]

    assert not named


# Makefile


@pytest.mark.parametrize("target", TARGETS)
def test_make_knows_the_target(target: str) -> None:
    made = make("--dry-run", target)

    assert made.returncode == 0, made.stderr
    assert "Nothing to be done" not in made.stdout


def test_make_alone_lists_every_target() -> None:
    made = make()

    assert [line.split()[1] for line in made.stdout.splitlines()] == list(TARGETS)


def test_a_python_that_is_not_there_is_told_in_one_line(tmp_path: Path) -> None:
    made = make("demo", f"VENV={tmp_path}/venv", "PYTHON=no-such-python")

    assert "no-such-python is missing" in told(made)
    assert "python3-venv" in told(made)


def test_a_python_that_is_too_old_is_told_in_one_line(tmp_path: Path) -> None:
    python = lame_python(tmp_path, "sys.version_info = (3, 9, 2, 'final', 0)")

    made = make("demo", f"VENV={tmp_path}/venv", f"PYTHON={python}")

    assert "is Python 3.9; Receiver needs 3.11 or newer" in told(made)


@pytest.mark.parametrize("module", ["ensurepip", "venv"])
def test_a_python_without_venv_is_told_which_package_to_install(
    tmp_path: Path, module: str
) -> None:
    python = lame_python(tmp_path, f"sys.modules['{module}'] = None")

    made = make("test", f"VENV={tmp_path}/venv", f"PYTHON={python}")

    version = "{}.{}".format(*sys.version_info)
    assert f"apt-get install python{version}-venv" in told(made)


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    # The tests may themselves run under make, whose settings must not reach this one.
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    environment.pop("MFLAGS", None)
    return subprocess.run(
        ["make", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=MAKE_TIMEOUT_S,
    )


def told(made: subprocess.CompletedProcess[str]) -> str:
    """The one line that a failed make wrote before its own."""
    assert made.returncode != 0
    line, ending = made.stderr.splitlines()
    assert ending.startswith("make: ***")
    return line


def lame_python(folder: Path, lameness: str) -> Path:
    """A command that runs `python -c PROGRAM` after the statement `lameness`."""
    python = folder / "python"
    command = shlex.quote(sys.executable)
    python.write_text(f'#!/bin/sh\nexec {command} -c "import sys; {lameness}\n$2"\n')
    python.chmod(0o755)
    return python


# Reading the project


def layer(path: Path) -> str:
    return (
        "commands"
        if path.is_relative_to(COMMANDS)
        else path.relative_to(ROOT).with_suffix("").parts[0]
    )


@functools.cache
def imports(path: Path) -> frozenset[str]:
    return frozenset(imported_by(ast.walk(ast.parse(path.read_text())), path))


def imported_by(nodes: Iterator[ast.AST] | list[ast.stmt], path: Path) -> set[str]:
    """The top-level names that these nodes import, wherever in the file they stand."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(layer(path) if node.level else str(node.module).split(".")[0])
    return found


def third_party(path: Path) -> frozenset[str]:
    return imports(path) - sys.stdlib_module_names - MAY_IMPORT.keys()


def clock_readings(tree: ast.Module) -> Iterator[str]:
    """Every mention of a wall clock but the ones that are a default, as `line 12: time.time`."""
    origins = imported_names(tree)
    defaults = {id(node) for node in default_values(tree)}
    for node in ast.walk(tree):
        clock = origin(node, origins)
        if clock in CLOCKS and id(node) not in defaults:
            assert isinstance(node, ast.expr)
            yield f"line {node.lineno}: {clock}"


def imported_names(tree: ast.Module) -> dict[str, str]:
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update({alias.asname or alias.name: alias.name for alias in node.names})
        elif isinstance(node, ast.ImportFrom):
            names.update(
                {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            )
    return names


def default_values(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arguments):
            yield from node.defaults
            yield from (value for value in node.kw_defaults if value)
        elif isinstance(node, ast.ClassDef):
            yield from (
                line.value for line in node.body if isinstance(line, ast.AnnAssign) and line.value
            )


def origin(node: ast.AST, origins: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return origins.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := origin(node.value, origins)):
        return f"{owner}.{node.attr}"
    return None


def settings() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirements(*extras: str) -> list[str]:
    """What the project needs and what these extras add, without its mentions of itself."""
    project = settings()["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][name] for name in extras)]
    return [item for lines in lists for item in lines if name_of(item) != project["name"]]


def declared(extra: str | None = None) -> set[str]:
    """The import names that the dependencies, or one extra alone, allow."""
    if extra is None:
        return {name_of(requirement).replace("-", "_") for requirement in requirements()}
    extras = {name_of(requirement).replace("-", "_") for requirement in requirements(extra)}
    return extras - declared()


def name_of(requirement: str) -> str:
    return re.split(r"[\[><=; ]", requirement)[0]


def pins(lock: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / lock).read_text(), flags=re.MULTILINE))


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))


def project_files() -> Iterator[Path]:
    for path in ROOT.iterdir():
        if path.is_file():
            yield path
    for folder in (".ci", "systemd", "tests", *FOLDERS):
        for path in ROOT.joinpath(folder).rglob("*"):
            if path.is_file() and not {"__pycache__", "node_modules"} & {*path.parts}:
                yield path


def test_the_readme_lists_every_sender() -> None:
    section = (ROOT / "README.md").read_text().partition("\n## Senders\n")[2]
    (listed,) = re.findall(r"^`adyen`,[^.]*\.", section, re.MULTILINE)

    assert tuple(re.findall(r"`([^`]*)`", listed)) == presets.names()


def test_the_readmes_own_table_is_a_scheme() -> None:
    text = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"```toml\n(\[sources\.billing\].*?)```", text, re.DOTALL)

    preset = presets.parse(tomllib.loads(example)["sources"]["billing"]["scheme"])

    assert preset.livemode is not None


def test_the_map_in_the_architecture_names_every_file_of_the_code() -> None:
    named = set(re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", (ROOT / "ARCHITECTURE.md").read_text()))
    files = {path.name for path in MODULES if path.name != "__init__.py"}

    assert files == {name for name in named if name in files}
