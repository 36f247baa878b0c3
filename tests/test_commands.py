"""Every command: its help, its example, its place in the README, its errors, and its start."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import cli
from receiver.commands import shared
from tests.conftest import CONFIG, SECRETS, World, stripe_body

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
#: What would make start-up slow.
SERVER = {"starlette", "uvicorn", "uvloop", "httptools"}
ENGINE = {"apsw", "msgspec", "jmespath", "structlog", "prometheus_client", "urllib3"}
#: Those that end only when told to, take long or ask a sender: their examples are read, not run.
LONG = {
    *{("serve",), ("work",), ("demo",), ("selftest",), ("events", "tail"), ("send",)},
    ("reconcile",),
}
#: What examples name, so that they find something.
EVENT = "evt_1NirD82eZvKYlo2C"


def walk(group: click.Group, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from walk(command, *path, name)
        else:
            yield (*path, name), command


ALL = dict(walk(cli.main))
EACH = [pytest.param(path, id=" ".join(path)) for path in ALL]


def options_of(path: tuple[str, ...]) -> set[str]:
    return {option for parameter in ALL[path].params for option in parameter.opts}


LISTINGS = [path for path in ALL if "--limit" in options_of(path)]


def example_of(path: tuple[str, ...]) -> list[str]:
    """The words of a command's example, without `receiver`, and up to a redirection."""
    text, _, example = (ALL[path].help or "").partition("Example:")
    assert text.strip()
    words = shlex.split(example.strip().splitlines()[0].removeprefix("sudo "), comments=True)
    ends = [words.index(one) for one in (">", "|", "<") if one in words]
    assert words[: len(path) + 1] == ["receiver", *path]
    # The scratch set-up's own config in place of a server's.
    place = "/etc/receiver/receiver.toml"
    return ["receiver.toml" if one == place else one for one in words[1 : min(ends, default=None)]]


@pytest.fixture
def scratch(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """A set-up in which what the examples name is there."""
    (world.folder / ".env").write_text("".join(f"{k}={v}\n" for k, v in SECRETS.items()))
    world.configure('env_file = ".env"\n' + CONFIG)
    world.link()
    world.deliver("stripe", stripe_body(EVENT, "invoice.paid", id="in_1", customer="cus_1",
                  status="open", amount_paid=5))  # fmt: skip
    world.invoice(EVENT, "in_2")
    body = json.dumps({"method": "POST", "url": "https://x/webhooks/stripe", "headers": {}})
    (world.folder / "request.json").write_text(body)
    monkeypatch.chdir(world.folder)
    monkeypatch.delenv("RECEIVER_CONFIG", raising=False)
    return world


def run(*words: str, typed: str = "") -> Result:
    runner = CliRunner(env={"NO_COLOR": "1"})
    result = runner.invoke(cli.main, words, input=typed, prog_name="receiver")
    assert isinstance(result.exception, SystemExit | None), result.exc_info
    return result


@pytest.mark.parametrize("path", EACH)
def test_every_example_is_right_usage(scratch: World, path: tuple[str, ...]) -> None:
    words = example_of(path)

    if path in LONG:
        context: click.Context | None = None
        command: click.Command = cli.main
        for name in path:
            context = click.Context(command, context, info_name=name)
            assert isinstance(command, click.Group)
            found = command.get_command(context, name)
            assert found is not None
            command = found
        command.make_context(path[-1], words[len(path) :], context)
        return
    ran = run(*words, typed="y\n")
    assert "unexpected" not in ran.stderr, ran.stderr
    assert ran.exit_code in (shared.FINE, shared.FOUND, shared.MISSING), ran.output


@pytest.mark.parametrize("path", EACH)
def test_every_command_that_reads_the_config_takes_c(path: tuple[str, ...]) -> None:
    without = {("init",), ("demo",), ("version",), ("completion",), ("alerts", "rules")}

    assert {"-c", "--config"} <= options_of(path) or path in without | {("sources", "presets")}


@pytest.mark.parametrize("path", EACH)
def test_every_command_is_in_the_readme_once(path: tuple[str, ...]) -> None:
    name, *rest = path
    row = re.search(rf"`receiver {name}`(?: \(([^)]*)\))?", README.split("## Commands")[1])

    assert row, f"write `receiver {name}` under Commands"
    assert not rest or f"`{rest[0]}`" in (row[1] or ""), f"`{rest[0]}` is missing in {row[0]}"


def test_the_readme_names_no_command_that_is_not_there() -> None:
    named = re.findall(r"`receiver ([a-z]+)(?: ([a-z]+))?", README)

    for name, rest in named:
        assert name in cli.MODULES, name
        group = cli.main.get_command(click.Context(cli.main), name)
        if isinstance(group, click.Group) and rest:
            assert (name, rest) in ALL, (name, rest)


@pytest.mark.parametrize("path", LISTINGS, ids=" ".join)
def test_every_listing_prints_json_lines_when_asked(scratch: World, path: tuple[str, ...]) -> None:
    assert "--json" in options_of(path)

    ran = run(*path, "--json")

    assert ran.exit_code in (shared.FINE, shared.FOUND), ran.output
    for line in ran.stdout.splitlines():
        assert isinstance(json.loads(line), dict)


@pytest.mark.parametrize(
    "path", [path for path in ALL if path[-1] in ("list", "show")], ids=" ".join
)
def test_what_lists_or_shows_takes_json(path: tuple[str, ...]) -> None:
    assert "--json" in options_of(path)


@pytest.mark.parametrize("path", EACH)
def test_nonsense_is_wrong_usage_in_one_line(scratch: World, path: tuple[str, ...]) -> None:
    takes_any_number = any(parameter.nargs == -1 for parameter in ALL[path].params)
    for words in (["--nonsense"],) if takes_any_number else (["--nonsense"], ["x"] * 9):
        ran = run(*path, *words)

        assert (ran.exit_code, ran.stdout) == (shared.USAGE, ""), ran.output
        (line,) = ran.stderr.splitlines()
        assert line.startswith("receiver: ")
        assert f"`receiver {' '.join(path)} --help`" in line


START = """
import contextlib, io, sys
import cli
loaded = {}
def run(*words):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try: cli.main(words)
        except SystemExit: pass
for path in [(), *%r]:
    run(*path, "--help")
run("--version")
print(*sorted(sys.modules))
for path in %r:
    run(*path)
print(*sorted(sys.modules))
"""


def test_no_help_imports_the_engine_and_no_listing_the_server(scratch: World) -> None:
    done = subprocess.run(
        [sys.executable, "-c", START % (list(ALL), [*LISTINGS, ("sources", "list")])],
        cwd=scratch.folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    after_help, after_lists = (set(line.split()) for line in done.stdout.splitlines())

    assert not (SERVER | ENGINE) & after_help
    assert "apsw" in after_lists
    assert not SERVER & after_lists


# Completion


def completed(folder: Path, *words: str) -> list[str]:
    """What a shell is told for the last word."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "cli.py")],
        cwd=folder,
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT),
            "_RECEIVER_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(("receiver", *words)),
            "COMP_CWORD": str(len(words)),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("ev",), ["events"]),
        (("events", "s"), ["show"]),
        (("events", "list", "--state", "p"), ["pending", "parked"]),
        (("events", "list", "--source", "co"), ["connect"]),
        (("sources", "show", "sh"), ["shopify"]),
        (("completion", "f"), ["fish"]),
    ],
    ids=str,
)
def test_a_shell_completes_commands_states_and_sources(
    scratch: World, words: tuple[str, ...], found: list[str]
) -> None:
    assert completed(scratch.folder, *words) == found


def test_completion_without_a_config_or_with_a_broken_one_finds_no_names(tmp_path: Path) -> None:
    assert completed(tmp_path, "sources", "show", "s") == []
    (tmp_path / "receiver.toml").write_text("[[[")
    assert completed(tmp_path, "sources", "show", "s") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_of_the_shell(shell: str) -> None:
    ran = run("completion", shell)

    assert ran.exit_code == 0
    assert "_RECEIVER_COMPLETE" in ran.stdout


def test_bash_takes_the_script_and_completes_by_it(scratch: World) -> None:
    script = run("completion", "bash").stdout
    program = f"""
        receiver() {{ {shlex.quote(sys.executable)} {shlex.quote(str(ROOT / "cli.py"))} "$@"; }}
        export -f receiver
        env() {{ shift 0; command env "${{@:1:2}}" _RECEIVER_COMPLETE=bash_complete \
            {shlex.quote(sys.executable)} {shlex.quote(str(ROOT / "cli.py"))}; }}
        {script}
        COMP_WORDS=(receiver events sh) COMP_CWORD=2
        _receiver_completion receiver
        echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "-c", program], cwd=scratch.folder, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip

    assert done.stdout.strip() == "show", done.stderr
