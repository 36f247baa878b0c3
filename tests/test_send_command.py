"""A command gets the message on its standard input, and ends in what its exit says."""

import errno
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from receiver import send_command
from receiver.destinations import Command, Later, Never, Owed, Result, Senders, Sent, Unknown
from receiver.reach import Deadline
from receiver.select import Template
from store.database import Store
from tests.far_side import KEY, owed, said

SHORT_S = 0.5
LONG_S = 30.0


def message(*argv: str, value: object = "hello") -> Owed:
    return owed({"argv": list(argv), "input": {"event": value}}, attempt=3)


def command(timeout_s: float = LONG_S) -> Command:
    return Command("deploy", argv=(Template.compile("unused"),), timeout_s=timeout_s)


def run(*argv: str, value: object = "hello", timeout_s: float = LONG_S) -> Result:
    return Senders().send(command(timeout_s), message(*argv, value=value), 0)


def shell(text: str, timeout_s: float = LONG_S) -> Result:
    return run("/bin/sh", "-c", text, timeout_s=timeout_s)


def program(folder: Path, text: str, mode: int = 0o755) -> str:
    path = folder / "program"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_what_was_written_for_another_kind_of_destination_is_never_sent() -> None:
    others: tuple[dict[str, Any], ...] = (
        {"json": {}, "headers": {}},
        {"to": "a@b.test", "subject": "s", "text": "t"},
    )
    for other in others:
        result = Senders().send(command(), owed(other), 0)

        assert isinstance(result, Never)
        assert "deploy was another kind of destination" in said(result)


def test_a_program_reads_the_message_and_gets_its_arguments_as_they_are(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    text = f'#!/bin/sh\ncat > {kept}\nprintf "%s|" "$@"\n'
    path = program(tmp_path, text)

    result = run(path, "two words", "$HOME; `id` *", "", "-x", "a\nb", value={"text": "grüße"})

    assert result == Sent(f"{path} ended with 0; it said: two words|$HOME; `id` *||-x|a b|")
    assert json.loads(kept.read_bytes()) == {"event": {"text": "grüße"}}


def test_a_program_that_says_nothing_is_sent() -> None:
    assert shell("exit 0") == Sent("/bin/sh ended with 0")


def test_another_exit_code_is_failed_for_now() -> None:
    result = shell("echo starting; echo 'no such branch' >&2; exit 3")

    assert result == Later("/bin/sh ended with 3; it said: starting no such branch")


def test_a_program_that_is_killed_is_failed_for_now() -> None:
    assert shell("kill -9 $$") == Later("/bin/sh was killed by SIGKILL")


def test_the_environment_is_small_and_names_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRIPE_WEBHOOK_SECRET", "whsec_x")
    monkeypatch.setenv("LANG", "C.UTF-8")

    result = send_command.send(command(), message("/usr/bin/env"), os.environ)

    shown = dict(word.partition("=")[::2] for word in said(result).split() if "=" in word)
    assert shown["RECEIVER_OPERATION_KEY"] == KEY
    assert shown["RECEIVER_CORRELATION_ID"] == "event-7"
    assert shown["RECEIVER_ATTEMPT"] == "3"
    assert shown["LANG"] == "C.UTF-8"
    assert "STRIPE_WEBHOOK_SECRET" not in shown


def test_a_program_is_found_without_a_path_of_ours() -> None:
    result = send_command.send(command(), message("env"), {})

    assert f"PATH={send_command.PATH}" in said(result)


def test_no_descriptor_of_ours_leaks(store: Store, tmp_path: Path) -> None:
    lists = "import os, sys; print(sorted(os.listdir('/proc/self/fd'), key=int))"
    # Even one that was made to be inherited stays behind.
    with (tmp_path / "open").open("w") as opened:
        fcntl.fcntl(opened, fcntl.F_SETFD, 0)

        result = run(sys.executable, "-c", lists)

    # The last one is the listing's own.
    assert said(result).endswith("it said: ['0', '1', '2', '3']")


def test_a_long_message_is_fed_while_the_program_talks() -> None:
    text = "import sys; sys.stdout.write('x' * 300_000); sys.exit(len(sys.stdin.read()) != 300_012)"

    result = run(sys.executable, "-c", text, value="a" * 300_000)

    assert isinstance(result, Sent)


def test_a_program_need_not_read_the_message() -> None:
    result = run("/bin/sh", "-c", "exec <&-; exit 0", value="a" * 1_000_000)

    assert result == Sent("/bin/sh ended with 0")


def test_the_end_of_a_long_output_is_kept_on_one_line() -> None:
    result = shell(
        "i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done; printf '\\033[1m\\000'"
    )

    assert said(result).startswith("/bin/sh ended with 0; it said: ...")
    assert said(result).endswith("line 19998 line 19999 [1m")
    assert len(said(result)) == 500


def test_output_is_bounded_while_the_program_runs() -> None:
    running = send_command._Running(["/usr/bin/yes"], b"", {})

    with running:
        assert not running.ended_by(Deadline(SHORT_S))
        assert len(running.said()) == send_command.OUTPUT_BYTES_MAX


def test_a_program_that_takes_too_long_is_stopped_and_unknown() -> None:
    start = time.monotonic()
    result = shell("echo begun; exec sleep 60", timeout_s=SHORT_S)
    took_s = time.monotonic() - start

    assert result == Unknown(
        "/bin/sh was stopped after 0.5 s, in the middle of its work; it said: begun"
    )
    assert took_s < LONG_S


def test_a_program_may_tidy_up_when_it_is_stopped() -> None:
    script = "trap 'echo tidied; exit 0' TERM; echo begun; while :; do sleep 0.01; done"

    result = shell(script, timeout_s=SHORT_S)

    assert isinstance(result, Unknown)
    assert said(result).endswith(" tidied")


def test_a_program_that_ignores_the_stop_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_command, "GRACE_S", SHORT_S)
    pids = tmp_path / "pids"
    script = f"trap '' TERM; sleep 60 & echo $$ $! > {pids}; wait; sleep 60"

    result = shell(script, timeout_s=SHORT_S)

    assert isinstance(result, Unknown)
    for pid in map(int, pids.read_text().split()):
        wait_for(lambda pid=pid: is_gone(pid))


def test_what_a_program_leaves_in_the_background_does_not_hold_it(tmp_path: Path) -> None:
    left = tmp_path / "pid"

    start = time.monotonic()
    result = shell(f"sleep 60 & echo $! > {left}; echo done")
    took_s = time.monotonic() - start

    pid = int(left.read_text())
    assert result == Sent("/bin/sh ended with 0; it said: done")
    assert took_s < LONG_S
    assert not is_gone(pid)
    os.kill(pid, signal.SIGKILL)


def test_a_child_that_goes_on_talking_does_not_hold_it(tmp_path: Path) -> None:
    left = tmp_path / "pid"

    result = shell(f"yes & echo $! > {left}", timeout_s=LONG_S)

    pid = int(left.read_text())
    assert isinstance(result, Sent)
    # Nobody listens any more.
    wait_for(lambda: is_gone(pid))


def test_a_missing_program_is_failed_for_now(tmp_path: Path) -> None:
    path = str(tmp_path / "missing")

    assert run(path) == Later(
        f"{path} was not started: there is no such program (is the path right, and that in its "
        "#! line?)",
        unreachable=True,
    )


def test_a_program_that_may_not_be_run_is_failed_for_now(tmp_path: Path) -> None:
    path = program(tmp_path, "#!/bin/sh\n", mode=stat.S_IRUSR)

    assert run(path) == Later(
        f"{path} was not started: it may not be run (is it executable for this user?)",
        unreachable=True,
    )


def test_what_is_no_program_is_failed_for_now(tmp_path: Path) -> None:
    path = program(tmp_path, "echo hello\n")

    assert run(path) == Later(
        f"{path} was not started: it is no program of this machine (does a script begin with #!?)",
        unreachable=True,
    )


def test_arguments_that_are_too_long_are_failed_for_good() -> None:
    result = run("/bin/echo", *["a" * 100_000] * 50)

    assert result == Never("/bin/echo was not started: its arguments are too long")


def test_programs_run_at_the_same_time() -> None:
    results: list[Result] = []
    threads = [
        threading.Thread(target=lambda: results.append(run("/bin/cat", value="a" * 100)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)

    assert [type(result) for result in results] == [Sent] * 8


def test_no_program_stays_behind_as_a_zombie() -> None:
    shell("exit 0")
    shell("exec sleep 60", timeout_s=SHORT_S)

    children = subprocess.run(
        ["/bin/ps", "-o", "stat=", "--ppid", str(os.getpid())],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    assert "Z" not in children


def is_gone(pid: int) -> bool:
    """Ended, though perhaps not yet waited for by whoever inherited it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ESRCH)
    return text.rpartition(")")[2].split()[0] == "Z"


def wait_for(what: Any) -> None:
    end = time.monotonic() + LONG_S
    tick = threading.Event()
    while not what():
        assert time.monotonic() < end
        tick.wait(0.01)
