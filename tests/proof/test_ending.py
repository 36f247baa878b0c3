"""A proof that is cut short leaves no server behind."""

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service import PATIENCE_S, ROOT, until

COMMAND = (sys.executable, "-m", "tests.proof", "--only", "kills", "--kills", "100000")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_proof_that_is_cut_short_leaves_no_server_behind(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with subprocess.Popen(COMMAND, cwd=ROOT, stderr=subprocess.DEVNULL) as proof:
        try:
            until(lambda: servers(tmp_path) != [])

            proof.send_signal(number)

            assert proof.wait(PATIENCE_S) != 0
            until(lambda: servers(tmp_path) == [])
        finally:
            proof.kill()
    if number != signal.SIGKILL:
        assert list(tmp_path.iterdir()) == []


def servers(folder: Path) -> list[int]:
    """The processes that serve in this folder, by their command lines."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if b"serve" in words and any(one.startswith(bytes(folder)) for one in words):
                found.append(int(process.name))
    return found
