"""Fuzzes one target under atheris, led by what it covers: `python -m tests.proof.fuzz TARGET ...`.

Only the extra `fuzz` has atheris, and libFuzzer ends the process itself, so each target has one.
"""

import argparse
import importlib
import re
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

#: Bytes of one input, seconds that one may take, and MiB of memory that one process may.
INPUT_BYTES_MAX, INPUT_S_MAX, MEMORY_MIB_MAX = 4_096, 10, 1_024

#: What inputs are joined of, besides what the comparisons in the code tell.
WORDS = (
    *('"id"', '"type"', '"data"', '"object"', "null", "true", "1e999", "-0", "NaN", "\\\\ud800"),
    *("18446744073709551616", "\\x00", "\\xff\\xfe", "\\xef\\xbb\\xbf", "\\xe2\\x80\\xa8", "%41"),
    *("%00", "&", "=", "+", "{", "}", "[", "]", "\\x0d\\x0a", "\\x0d\\x0a\\x0d\\x0a", "v1,", "v1="),
    *("t=", "sha256=", "Content-Length: ", "Transfer-Encoding: chunked", "0\\x0d\\x0a\\x0d\\x0a"),
    *(
        "payload=",
        "[*]",
        "[?",
        "&@",
        "sort_by(",
        "{{",
        "}}",
        "\\x1f\\x8b\\x08",
        "Bcc: ",
        "..",
        "=?",
    ),
)


class Fuzzed(NamedTuple):
    """How one target ended; `fault` in words, '' where there was none."""

    executions: int
    covered: int
    fault: str


def run(target: str, executions: int, seed: int, seconds: int, kept: Path) -> Fuzzed:
    """Fuzz a target in a process of its own; what it ends by is left in the folder `kept`."""
    kept.mkdir(parents=True, exist_ok=True)
    log = kept / f"{target}.log"
    with tempfile.TemporaryDirectory() as folder, log.open("w") as stream:
        corpus = Path(folder, "corpus")
        corpus.mkdir()
        options = ["--executions", executions, "--seed", seed, "--seconds", seconds]
        places = ["--corpus", corpus, "--kept", kept]
        subprocess.run(
            [sys.executable, "-m", "tests.proof.fuzz", target, *map(str, [*options, *places])],
            stdout=stream,
            stderr=stream,
            check=False,
        )
    said = log.read_text(errors="replace")
    # At its end a late alarm of libFuzzer's may kill the process, so its exit code says nothing.
    executions = _last(r"^Done (\d+) runs", said)
    fault = "" if executions else f"{target}: {_why(said)} (see {kept})"
    executions = executions or _last(r"^#(\d+)", said)
    return Fuzzed(executions, _last(r"cov: (\d+)", said), fault)


def _last(pattern: str, text: str) -> int:
    found = re.findall(pattern, text, re.MULTILINE)
    return int(found[-1]) if found else 0


def _why(text: str) -> str:
    found = re.findall(
        r"^(?:\w+\.)*\w*(?:Error|Exception|Stop|Missing)\b.*|^.*ERROR: .*", text, re.M
    )
    return " / ".join(found[:2]) or "\n".join(text.splitlines()[-3:])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.proof.fuzz", description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--executions", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=int, default=0, help="0: no limit")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--kept", type=Path, default=Path())
    parser.add_argument("--input", type=Path, help="run this one input alone")
    asked = parser.parse_args()
    atheris: Any = importlib.import_module("atheris")
    # What was imported before is not instrumented.
    with atheris.instrument_imports(include=["receiver", "jmespath"]):
        from tests.proof.targets import TARGETS

    folder = tempfile.mkdtemp(dir=asked.corpus.parent)
    execute, seeds = TARGETS[asked.target].make(Path(folder), ExitStack())
    if asked.input is not None:
        execute(asked.input.read_bytes())
        return
    for number, seed in enumerate(seeds):
        (asked.corpus / f"seed-{number:04}").write_bytes(seed)
    words = asked.corpus.with_suffix(".dict")
    words.write_text("".join(f'"{_escaped(word)}"\n' for word in WORDS))
    atheris.Setup(
        [
            *(asked.target, str(asked.corpus), f"-seed={asked.seed}", f"-runs={asked.executions}"),
            *(f"-max_len={INPUT_BYTES_MAX}", f"-timeout={INPUT_S_MAX}", f"-dict={words}"),
            *(f"-rss_limit_mb={MEMORY_MIB_MAX}", f"-max_total_time={asked.seconds}"),
            *(f"-artifact_prefix={asked.kept}/{asked.target}-", "-reload=0"),
        ],
        execute,
    )
    atheris.Fuzz()


def _escaped(word: str) -> str:
    return word.replace('"', '\\"')


if __name__ == "__main__":
    main()
