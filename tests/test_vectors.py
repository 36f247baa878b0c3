"""Every delivery of the vectors gets its verdict, by the function and by the command."""

import base64
import contextlib
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

import cli
from receiver import presets
from receiver.coded import CertificateMissing
from receiver.verify import Contract, Delivery, Rejected, verdict, verify
from tests import vectors
from tests.vectors import VECTORS, Vector

ROOT = Path(__file__).parents[1]
PATIENCE_S = 30
# What is told of a verdict besides what is told of each.
MORE = {
    "handshake": {"status", "response", "headers"},
    "bad-signature": {"explanation"},
    "expired": {"explanation"},
}
each_vector = pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: str(vector["id"]))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which the command runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RECEIVER_CONFIG", raising=False)
    return tmp_path


def contract_of(vector: Vector) -> Contract:
    preset = presets.get(vector["provider"])
    return Contract("x", "x", preset, vectors.secrets(vector))


def ask(vector: Vector, folder: Path) -> list[str]:
    """Write the files that `verify` needs for a vector, and return its arguments."""
    config, environment = vectors.config(vector)
    folder.joinpath("receiver.toml").write_text(config)
    folder.joinpath(".env").write_text(environment)
    asked = {key: vector[key] for key in ("method", "url", "headers")}
    content = "body_base64" if vector["body_encoding"] == "base64" else "body"
    folder.joinpath("request.json").write_text(json.dumps(asked | {content: vector["body"]}))
    at = str(vector["now"])
    return ["verify", "x", "--request", "request.json", "--at", at, "--json"]


def check(vector: Vector, code: int, output: str) -> None:
    found: dict[str, Any] = json.loads(output)
    assert found["verdict"] == vector["expect"], found["reason"]
    assert code == (0 if vector["expect"] in ("valid", "handshake") else 1)
    assert found | vectors.facts(vector) == found
    assert set(found) == {"verdict", "event_id", "event_type", "account", "reason"} | MORE.get(
        found["verdict"], set()
    )
    if found["verdict"] == "handshake":
        wanted = vector["response"]
        assert found["status"] == wanted["status"]
        assert found["response"] == wanted.get("body", "")
        assert found["headers"].get("Content-Type") == wanted.get("content_type")
        assert found["headers"].items() >= wanted.get("headers", {}).items()


def test_a_delivery_that_is_refused_leaves_nothing_for_the_garbage_collector() -> None:
    """What waits for it holds the body, up to a megabyte that nobody signed."""
    given = [(contract_of(vector), vectors.delivery(vector)) for vector in VECTORS]
    spoilt = [(contract, replace(one, body=one.body + b" ")) for contract, one in given]
    late = [(c, replace(one, received_ms=one.received_ms + 10**9)) for c, one in given]
    for each in (*given, *spoilt, *late):
        judge(*each)
    gc.collect()
    gc.disable()
    try:
        for each in (*given, *spoilt, *late):
            judge(*each)
        assert gc.collect() == 0
    finally:
        gc.enable()


def judge(contract: Contract, delivery: Delivery) -> None:
    with contextlib.suppress(Rejected, CertificateMissing):
        verify(contract, delivery)


@each_vector
def test_every_vector_gets_its_verdict_and_its_facts(vector: Vector) -> None:
    judged = verdict(contract_of(vector), vectors.delivery(vector))

    assert judged.verdict == vector["expect"], judged.reason
    wanted = vectors.facts(vector)
    assert {name: getattr(judged, name) for name in wanted} == wanted


@each_vector
def test_the_command_says_the_same(vector: Vector, folder: Path) -> None:
    result = CliRunner().invoke(cli.main, ask(vector, folder))

    check(vector, result.exit_code, result.stdout)
    for secret in vectors.secrets(vector):
        # A shorter one may be a word of ours.
        assert len(secret.value) < 8 or secret.value.decode() not in result.output


@pytest.mark.parametrize(
    "name",
    [
        *("stripe-valid", "github-json", "shopify-valid", "stdwh-published-v1"),
        *("sendgrid-sdk-test", "mollie-repeated-header-second-good", "gumroad-ping"),
        *("meta-get-challenge", "notion-verification-token", "gocardless-valid"),
    ],
)
def test_a_process_of_its_own_says_the_same(tmp_path: Path, name: str) -> None:
    vector = vectors.named(name)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    environment.pop("RECEIVER_CONFIG", None)

    done = subprocess.run(
        [sys.executable, str(ROOT / "cli.py"), *ask(vector, tmp_path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )

    assert done.stderr == ""
    check(vector, done.returncode, done.stdout)


def test_a_body_in_base64_and_repeated_headers_are_read(folder: Path) -> None:
    vector = vectors.named("stdwh-published-v1")
    words = ask(vector, folder)
    signature = vector["headers"]["webhook-signature"]
    request = {
        "headers": vector["headers"] | {"webhook-signature": ["v1,AAAA", signature]},
        "body_base64": base64.b64encode(vectors.body(vector)).decode(),
    }
    folder.joinpath("request.json").write_text(json.dumps(request))

    result = CliRunner().invoke(cli.main, words)

    check(vector, result.exit_code, result.stdout)


def test_a_config_that_begins_with_a_byte_order_mark_is_read(folder: Path) -> None:
    vector = VECTORS[0]
    words = ask(vector, folder)
    path = folder / "receiver.toml"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())

    result = CliRunner().invoke(cli.main, words)

    check(vector, result.exit_code, result.stdout)
