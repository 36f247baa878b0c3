"""`receiver verify` on senders whose scheme is code, and on bodies that came as gzip."""

import base64
import functools
import gzip
import hmac
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from store import certificates
from store.database import Store
from tests.test_cli import Run, configure
from tests.test_cli import run as run
from tests.test_coded import CERTIFICATE_URL, NOW_MS, SIGNER, transmission

PAYPAL = '[sources.x]\nscheme = "paypal"\nsecrets = ["file:id"]\n'


def judge(folder: Path, run: Run, config: str, request: dict[str, Any], at_s: int) -> Any:
    configure(folder, config)
    folder.joinpath("request.json").write_text(json.dumps(request))
    return run("verify", "x", "--request", "request.json", "--at", str(at_s), "--json")


def paypal_request() -> dict[str, Any]:
    delivery = transmission()
    headers = {name.decode(): value.decode() for name, value in delivery.headers}
    return {"headers": headers, "body": delivery.body.decode()}


def test_verify_uses_the_certificates_that_the_server_fetched(run: Run, tmp_path: Path) -> None:
    tmp_path.joinpath("id").write_text("1JE4291016473214C")

    before = json.loads(judge(tmp_path, run, PAYPAL, paypal_request(), NOW_MS // 1000).stdout)
    assert before["verdict"] == "unverified"
    assert before["event_id"] == "WH-1"
    assert f"the certificate at {CERTIFICATE_URL} is not known yet" in before["reason"]

    with closing(Store.create(tmp_path / "receiver.db", lambda: NOW_MS)) as store:
        store.write(lambda tx: certificates.keep(tx, CERTIFICATE_URL, SIGNER.pem.decode(), NOW_MS))
    after = json.loads(judge(tmp_path, run, PAYPAL, paypal_request(), NOW_MS // 1000).stdout)
    assert after["verdict"] == "valid"


def test_the_file_keeps_sixteen_certificates(tmp_path: Path) -> None:
    with closing(Store.create(tmp_path / "receiver.db", lambda: NOW_MS)) as store:
        for i in range(40):
            keep = functools.partial(certificates.keep, url=f"https://x/{i}", pem="", fetched_ms=i)
            store.write(keep)

        kept = store.write(certificates.known)

    assert sorted(kept) == sorted(f"https://x/{i}" for i in range(24, 40))


def test_check_names_a_certificate_that_is_none(run: Run, tmp_path: Path) -> None:
    tmp_path.joinpath("id").write_text("1JE4291016473214C")
    pinned = '["file:id", { secret = "file:id", name = "cert_pem" }]'
    configure(tmp_path, PAYPAL.replace('["file:id"]', pinned))

    result = run("check")

    assert result.exit_code == 2
    assert "sources.x.secrets: it is no certificate in PEM form" in result.output


GITHUB = '[sources.x]\nscheme = "github"\nsecrets = ["file:secret"]\n'


def gzip_request(body: bytes, sent: bytes, **headers: str) -> dict[str, Any]:
    digest = hmac.new(b"secret", body, "sha256").hexdigest()
    named = {"X-Hub-Signature-256": f"sha256={digest}", "X-GitHub-Delivery": "d-1"}
    named |= {"X-GitHub-Event": "push", "Content-Encoding": "gzip"} | headers
    return {"headers": named, "body_base64": base64.b64encode(sent).decode()}


def test_verify_inflates_a_body_as_the_server_would(run: Run, tmp_path: Path) -> None:
    tmp_path.joinpath("secret").write_text("secret")
    body = b'{"action":"created"}'
    taken = GITHUB + "gzip = true\n"
    packed = gzip.compress(body)

    # Signed as it was sent, or before it was compressed.
    for signed in (body, packed):
        found = judge(tmp_path, run, taken, gzip_request(signed, packed), 1_760_000_000)
        assert json.loads(found.stdout)["verdict"] == "valid"
        assert json.loads(found.stdout)["reason"] is None
    other = judge(tmp_path, run, taken, gzip_request(b"{}", packed), 1_760_000_000)
    assert json.loads(other.stdout)["verdict"] == "bad-signature"


@pytest.mark.parametrize(
    ("config", "sent", "words"),
    [
        (GITHUB, gzip.compress(b"{}", mtime=0), "set sources.x.gzip = true"),
        (GITHUB + "gzip = true\n", b"{}", "the body is not gzip"),
        (GITHUB + "gzip = true\n", gzip.compress(b" " * 2_000_000), "bytes unpacked"),
    ],
)
def test_what_the_server_would_not_read_is_said(
    run: Run, tmp_path: Path, config: str, sent: bytes, words: str
) -> None:
    tmp_path.joinpath("secret").write_text("secret")

    result = judge(tmp_path, run, config, gzip_request(b"{}", sent), 1_760_000_000)

    assert result.exit_code == 1
    assert "the server refuses it unread" in result.stderr
    assert words in result.stderr
