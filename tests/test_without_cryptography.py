"""What is said where a public key needs the optional package, and it is not installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from receiver import presets
from tests.keys import keys_of

ROOT = Path(__file__).parents[1]
PATIENCE_S = 30


def receiver(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run the command where importing the package fails."""
    absent = folder / "absent" / "cryptography"
    absent.mkdir(parents=True, exist_ok=True)
    (absent / "__init__.py").write_text("raise ImportError('it is not installed')")
    paths = os.pathsep.join((str(absent.parent), str(ROOT)))
    return subprocess.run(
        [sys.executable, str(ROOT / "cli.py"), *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.mark.parametrize("command", ["check", "serve", "verify"])
@pytest.mark.parametrize("name", ["discord", "sendgrid", "paypal"])
def test_the_package_that_is_missing_is_named(tmp_path: Path, name: str, command: str) -> None:
    (tmp_path / "secret").write_bytes(keys_of(presets.get(name)).secret)
    config = f'[sources.x]\nscheme = "{name}"\nsecrets = ["file:secret"]\n'
    (tmp_path / "receiver.toml").write_text(config)
    (tmp_path / "request.json").write_text(json.dumps({"body": "{}"}))
    words = ["verify", "x", "--request", "request.json"] if command == "verify" else [command]

    done = receiver(tmp_path, *words)

    assert done.returncode == 2
    assert "needs the package cryptography" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
