"""The command `receiver`: finds the command that is called, and tells what went wrong."""

import gc
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from receiver import __version__, console
from receiver.commands.shared import (
    COMPLETION_VARIABLE,
    FINE,
    FOUND,
    MISSING,
    USAGE,
    Failure,
    Listed,
)

#: Containers made and not freed before the garbage collector looks for cycles.
COLLECT_AFTER = 20_000
#: Characters of an unexpected error's message.
WORDS_CHARS_MAX = 500
INTERRUPTED = 130
#: Whoever read the output has closed it: what a shell says of a command that SIGPIPE ended.
UNREAD = 141

#: The commands as `receiver --help` groups them, each with its module in receiver/commands.
SECTIONS = {
    "Set up and run": {
        "init": "setup",
        "serve": "setup",
        "work": "setup",
        "check": "setup",
        "sources": "sources",
        "version": "setup",
        "completion": "completion",
    },
    "Try out": {
        "demo": "trying",
        "selftest": "selftest",
        "send": "trying",
        "verify": "trying",
    },
    "Look and repair": {
        "status": "status",
        "alerts": "status",
        "events": "events",
        "replay": "events",
        "parked": "parked",
        "conflicts": "conflicts",
        "resources": "resources",
        "rejections": "rejections",
        "outbox": "outbox",
        "reconcile": "reconcile",
        "audit": "audit",
    },
    "Customers and amounts": {
        "links": "links",
        "balance": "amounts",
        "ledger": "amounts",
        "records": "amounts",
    },
    "Keep": {
        "backup": "care",
        "restore": "care",
        "prune": "care",
        "redact": "care",
        "export": "export",
        "doctor": "doctor",
    },
}
MODULES = {name: module for section in SECTIONS.values() for name, module in section.items()}


class Commands(Listed):
    """Loads the module of the command that is called, and no other.

    Errors become lines on stderr and an exit code, never a traceback. A command returns its exit
    code, or None for 0.
    """

    def list_commands(self, context: click.Context) -> list[str]:
        return list(MODULES)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in MODULES:
            return None
        command = getattr(importlib.import_module(f"receiver.commands.{MODULES[name]}"), name)
        assert isinstance(command, click.Command), f"{name} is no command of {MODULES[name]}"
        return command

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        given = sys.argv[1:] if args is None else args
        main = super().main

        def run() -> Any:
            check_text(given)
            variable = complete_var or COMPLETION_VARIABLE
            return main(args, prog_name, variable, standalone_mode=False, **extra)

        if not standalone_mode:
            return run()
        # What is imported stays, and a decoded body makes hundreds of containers, none of them in a
        # cycle: looking for garbage would be a tenth of every command, and more of a server.
        gc.set_threshold(COLLECT_AFTER)
        open_missing()
        for stream in (sys.stdout, sys.stderr):
            # A terminal that can't show a character gets its escape.
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
        sys.exit(exit_code_of(run))

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except BrokenPipeError as error:
            # Whatever is still to be written, at the end too, goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise Failure(code=UNREAD) from error

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.summary(context, name)) for name in names])


def open_missing() -> None:
    """Nowhere in place of a standard stream that was closed before we began.

    Its number would be that of the next file, a lock or a socket, and a log has somewhere to go.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None and os.open(os.devnull, os.O_RDWR) == number:
            # It stays open as long as the process.
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def check_text(arguments: Sequence[str]) -> None:
    """Raises Failure for what no id, name or text in the file could be."""
    for number, argument in enumerate(arguments, 1):
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            raise Failure(
                f"argument {number} is not UTF-8 text (character {error.start + 1}); "
                "write it in UTF-8",
                code=USAGE,
            ) from error


def exit_code_of(run: Callable[[], Any]) -> int:
    """Run a command; what went wrong is one line, or several, on stderr."""
    lines: Sequence[str]
    try:
        return int(run() or FINE)
    except click.Abort:
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        # Its message is the whole help.
        error.show()
        return USAGE
    except Failure as error:
        lines, code = error.lines, error.code
    except click.ClickException as error:
        lines, code = usage_lines(error), error.exit_code
    except Exception as error:
        # The outermost place: whatever it is, the operator gets a line and no traceback.
        lines, code = known_failure(error)
    for line in lines:
        console.warn(f"receiver: {line}", "red")
    return code


def usage_lines(error: click.ClickException) -> Sequence[str]:
    """One line: what is wrong, and where to read how it is used."""
    text = " ".join(error.format_message().split())
    context = error.ctx if isinstance(error, click.UsageError) else None
    if isinstance(error, click.NoSuchOption) and isinstance(getattr(context, "command", 0), Listed):
        text = f"{text.rstrip('.')}: options stand after the whole command"
    where = "" if context is None else f" (see `{context.command_path} --help`)"
    return (text.rstrip(".") + where,)


def known_failure(error: Exception) -> tuple[Sequence[str], int]:
    """The lines and the exit code of an error."""
    from receiver.config import ConfigError
    from receiver.named import Absent, Ambiguous
    from receiver.operate import Declined
    from receiver.process import NotReplayable
    from store.errors import Refused, Replaced, StoreError, Unavailable

    match error:
        case ConfigError():
            return error.problems, USAGE
        case Absent():
            return (str(error),), MISSING
        case Ambiguous():
            return (str(error), *error.names), USAGE
        case Declined() | StoreError() | Unavailable() | Refused() | Replaced() | NotReplayable():
            return (str(error),), FOUND
        case OSError() if error.strerror:
            named = "" if error.filename is None else f"{error.filename}: "
            return (f"{named}{error.strerror}",), FOUND
    return (unexpected(error),), FOUND


def unexpected(error: Exception) -> str:
    """What to report of an error that nobody foresaw, with the place that raised it."""
    import traceback

    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    words = " ".join(str(error).split())[:WORDS_CHARS_MAX]
    return f"unexpected {type(error).__name__} at {place}: {words}; please report it"


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="receiver", message="%(prog)s %(version)s")
def main() -> None:
    """Receive webhooks, verify them, and apply each one once."""


if __name__ == "__main__":
    main()
