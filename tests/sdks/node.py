"""The senders' JavaScript libraries, in one process of node for all tests."""

import json
import subprocess
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


class Node:
    """Calls of runner.mjs, one after the other."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ["node", "runner.mjs"],
            cwd=FOLDER,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, call: str, **given: object) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"call": call, "given": given}) + "\n")
        stdin.flush()
        answer = json.loads(stdout.readline())
        assert "error" not in answer, answer
        return answer.get("result")

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait(10)
