"""An HTTP send ends in what happened: sent, failed for now or for good, or not known."""

import json
import logging
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from receiver import exchange, reach, send_http
from receiver.destinations import Http, Later, Never, Policy, Result, Senders, Sent, Unknown
from receiver.presets import get
from receiver.verify import Contract, Delivery, Secret, verify
from tests.conftest import NOW_MS
from tests.far_side import (
    KEY,
    Far,
    Script,
    answering,
    drip,
    flood,
    hang,
    owed,
    part,
    request,
    reset,
    said,
    self_signed,
    serving,
    silent_port,
    unused_port,
)
from tests.service import PATIENCE_S

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nyes"
SHORT_S = 0.3
LONG_S = 30.0


@pytest.fixture
def senders() -> Iterator[Senders]:
    made = Senders()
    yield made
    made.close()


def http(port: int, **changes: Any) -> Http:
    values: dict[str, Any] = {
        "name": "app",
        "url": f"http://127.0.0.1:{port}/hook",
        "timeout_s": LONG_S,
    }
    return Http(**values | changes)


def send(senders: Senders, to: Http, value: object = "hello", **headers: str) -> Result:
    return senders.send(to, owed({"json": value, "headers": headers}), NOW_MS)


def after(senders: Senders, script: Script, timeout_s: float = LONG_S) -> Result:
    """How a send to a server that plays this script ends."""
    with serving(script) as far:
        return send(senders, http(far.port, timeout_s=timeout_s))


def status(line: str, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {line}", *headers, "Content-Length: 0", "", ""]).encode()


def head_of(text: bytes) -> dict[str, str]:
    lines = text.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")[1:]
    return {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}


def body_of(text: bytes) -> bytes:
    return text.partition(b"\r\n\r\n")[2]


# What is sent


def test_a_message_is_posted_as_json_with_its_key_and_correlation(senders: Senders) -> None:
    with serving(answering(OK)) as far:
        result = send(senders, http(far.port), {"text": "grüße", "n": 1})

    assert result == Sent(f"127.0.0.1:{far.port} answered 200 OK")
    assert far.requests[0].startswith(b"POST /hook HTTP/1.1\r\n")
    assert json.loads(body_of(far.requests[0])) == {"text": "grüße", "n": 1}
    head = head_of(far.requests[0])
    assert head["content-type"] == "application/json"
    assert head["idempotency-key"] == KEY
    assert head["x-correlation-id"] == "event-7"
    assert head["user-agent"].startswith("Receiver/")
    assert not any(name.startswith("webhook-") for name in head)


def test_the_method_the_query_and_chosen_headers_are_kept(senders: Senders) -> None:
    with serving(answering(OK)) as far:
        to = http(far.port, url=f"http://127.0.0.1:{far.port}?a=b%20c", method="PUT")
        send(senders, to, **{"content-type": "application/cloudevents+json", "Title": "grüße ✓"})

    assert far.requests[0].startswith(b"PUT /?a=b%20c HTTP/1.1\r\n")
    head = head_of(far.requests[0])
    assert head["content-type"] == "application/cloudevents+json"
    assert head["title"].encode("latin-1").decode() == "grüße ✓"


def test_a_login_in_the_url_is_sent_as_basic_authorization(senders: Senders) -> None:
    with serving(answering(OK)) as far:
        to = http(far.port, url=f"http://me:p%40ss@127.0.0.1:{far.port}/x")
        result = send(senders, to)

    assert head_of(far.requests[0])["authorization"] == "Basic bWU6cEBzcw=="
    assert result == Sent(f"127.0.0.1:{far.port} answered 200 OK")


def test_a_correlation_id_from_anywhere_is_made_safe(senders: Senders) -> None:
    message = owed({"json": 1, "headers": {}})
    odd = type(message)(KEY, "a\r\nX-Evil: b" + "c" * 500, 1, NOW_MS, message.body)
    with serving(answering(OK)) as far:
        senders.send(http(far.port), odd, NOW_MS)

    assert head_of(far.requests[0])["x-correlation-id"] == "a__X-Evil:_b" + "c" * 188
    assert "x-evil" not in head_of(far.requests[0])


def test_with_a_secret_the_message_verifies_as_standard_webhooks(senders: Senders) -> None:
    contract = Contract(
        source="sw",
        identity="sw",
        preset=get("standard-webhooks"),
        secrets=(Secret("env:S", b"whsec_c2VjcmV0IGtleSBvZiAyNCBieXRlcyE="),),
    )
    with serving(answering(OK)) as far:
        to = http(far.port, secret=b"secret key of 24 bytes!")
        send(senders, to, {"type": "done", "data": {"text": "grüße"}})

    head = head_of(far.requests[0])
    headers = [(name.encode(), value.encode("latin-1")) for name, value in head.items()]
    events = verify(contract, Delivery("POST", to.url, headers, body_of(far.requests[0]), NOW_MS))
    assert isinstance(events, tuple)
    assert [(event.event_id, event.type, event.defect) for event in events] == [(KEY, "done", None)]


def test_a_proxy_that_the_environment_names_is_not_used(
    senders: Senders, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{unused_port()}")

    assert isinstance(after(senders, answering(OK)), Sent)


# What the answer means


@pytest.mark.parametrize("line", ["200 OK", "201 Created", "202 Accepted", "204 No Content", "299"])
def test_2xx_is_sent(senders: Senders, line: str) -> None:
    assert isinstance(after(senders, answering(status(line))), Sent)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("408 x", "408 Request Timeout"),
        ("425 x", "425 Too Early"),
        ("429 x", "429 Too Many Requests"),
        ("500 secret-phrase", "500 Internal Server Error"),
        ("503 x", "503 Service Unavailable"),
        ("599 x", "599"),
    ],
)
def test_what_asks_for_another_attempt_is_failed_for_now(
    senders: Senders, line: str, shown: str
) -> None:
    with serving(answering(status(line))) as far:
        result = send(senders, http(far.port))

    assert result == Later(f"127.0.0.1:{far.port} answered {shown}")


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("400 x", "400 Bad Request"),
        ("401 x", "401 Unauthorized"),
        ("404 x", "404 Not Found"),
        ("410 x", "410 Gone"),
        ("451 x", "451 Unavailable For Legal Reasons"),
        ("499 x", "499"),
        ("600 x", "600"),
        ("101 x", "101 Switching Protocols, which is no answer to a message"),
    ],
)
def test_what_is_refused_is_failed_for_good(senders: Senders, line: str, shown: str) -> None:
    with serving(answering(status(line))) as far:
        result = send(senders, http(far.port))

    assert result == Never(f"127.0.0.1:{far.port} answered {shown}")


@pytest.mark.parametrize("code", [301, 302, 303, 304, 307, 308])
def test_a_redirect_is_not_followed(senders: Senders, code: int) -> None:
    with serving(answering(OK)) as elsewhere:
        location = f"Location: http://127.0.0.1:{elsewhere.port}/"
        result = after(senders, answering(status(f"{code} x", location)))

    assert isinstance(result, Never)
    assert said(result).endswith("redirects are not followed (put the final address into url)")
    assert elsewhere.connections == 0


def test_interim_answers_are_not_the_answer(senders: Senders) -> None:
    interim = (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 x\r\n\r\nHTTP/1.1 103 x\r\nLink: a\r\n\r\n"
    )

    assert isinstance(after(senders, answering(interim + OK)), Sent)
    assert isinstance(after(senders, answering(interim + status("404 x"))), Never)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("30", 30.0),
        (" 0 ", 0.0),
        ("999999999999", 86_400.0),
        ("Fri, 15 Jan 2027 08:02:00 GMT", 120.0),
        ("Friday, 15-Jan-27 08:02:00 GMT", 120.0),
        ("Fri, 15 Jan 2027 08:02:00", 120.0),
        ("Fri, 15 Jan 2027 07:00:00 GMT", 0.0),
        ("Fri, 15 Jan 2099 08:00:00 GMT", 86_400.0),
        ("", None),
        ("soon", None),
        ("-5", None),
        ("1e9", None),
        ("٣", None),
        ("9" * 5_000, None),
        ("Fri, 99 Jan 2027 08:00:00 GMT", None),
        ("Fri, 15 Jan 99999999 08:00:00 GMT", None),
    ],
)
def test_retry_after_is_honoured_within_bounds(
    senders: Senders, value: str, seconds: float | None
) -> None:
    for line in ("429 x", "503 x"):
        answer = status(line, f"Retry-After: {value.encode().decode('latin-1')}")
        result = after(senders, answering(answer))

        assert isinstance(result, Later)
        assert result.retry_after_s == seconds
        assert ("asks to wait" in said(result)) == (seconds is not None)


# An answer that is too long, too slow, or breaks off


def test_a_long_answer_is_sent_and_cut_off(senders: Senders) -> None:
    ten_megabytes = b"HTTP/1.1 200 OK\r\nContent-Length: 10000000\r\n\r\n" + b"a" * 10_000_000

    assert isinstance(after(senders, answering(ten_megabytes)), Sent)


def test_an_endless_answer_is_sent_and_its_connection_closed(senders: Senders) -> None:
    with serving(answering(b"HTTP/1.1 200 OK\r\n\r\n", flood)) as far:
        result = send(senders, http(far.port))
        wait_for(lambda: bool(far.errors))

    assert isinstance(result, Sent)
    assert isinstance(far.errors[0], ConnectionError)


def test_no_more_of_an_answer_is_read_than_the_limit(
    senders: Senders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_http, "ANSWER_BYTES_MAX", 100)
    with serving(
        answering(b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n" + b"a" * 100, hang)
    ) as far:
        result = send(senders, http(far.port))
        send(senders, http(far.port))

    assert isinstance(result, Sent)
    assert far.connections == 2


@pytest.mark.parametrize(
    ("begin", "before"),
    [
        (b"", "was sent the message"),
        (b"HTTP/1.1 200 OK\r\n", "was sent the message"),
        (b"HTTP/1.1 103 x\r\n\r\n", "was sent the message"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "answered 200 OK"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffff\r\n", "answered 200 OK"),
    ],
)
@pytest.mark.parametrize("then", [hang, drip])
def test_what_is_not_answered_in_time_is_unknown(
    senders: Senders, begin: bytes, before: str, then: Script
) -> None:
    with serving(answering(begin, then)) as far:
        start = time.monotonic()
        result = send(senders, http(far.port, timeout_s=SHORT_S))
        took_s = time.monotonic() - start

    assert result == Unknown(
        f"127.0.0.1:{far.port} {before}, but there was no whole answer within 0.3 s: "
        "it may have been acted on"
    )
    assert took_s < 10 * SHORT_S


@pytest.mark.parametrize(
    ("begin", "before"),
    [
        (b"", "was sent the message"),
        (b"HTTP/1.1 200 OK", "was sent the message"),
        (b"HTTP/1.1 200 OK\r\n", "was sent the message"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "was sent the message"),
        (b"HTTP/1.1 103 x\r\n\r\n", "was sent the message"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", "answered 200 OK"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", "answered 200 OK"),
    ],
)
@pytest.mark.parametrize("then", [part, reset])
def test_what_breaks_off_after_the_request_is_unknown(
    senders: Senders, begin: bytes, before: str, then: Script
) -> None:
    with serving(answering(begin, then)) as far:
        result = send(senders, http(far.port))

    assert result == Unknown(
        f"127.0.0.1:{far.port} {before}, but the connection broke off before the answer was "
        "whole: it may have been acted on"
    )


@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize("script", [reset, answering(b"", part), answering(status("503 x"))])
def test_one_attempt_is_one_request(senders: Senders, method: Any, script: Script) -> None:
    with serving(script) as far:
        result = send(senders, http(far.port, method=method))

    assert isinstance(result, Later | Unknown)
    assert far.connections == 1
    assert len(far.requests) <= 1


def test_a_refusal_counts_though_its_text_breaks_off(senders: Senders) -> None:
    begin = b"x\r\nContent-Length: 5\r\n\r\na"

    assert isinstance(after(senders, answering(b"HTTP/1.1 500 " + begin, reset)), Later)
    assert isinstance(after(senders, answering(b"HTTP/1.1 404 " + begin, hang)), Never)


def test_what_is_not_http_is_unknown(senders: Senders) -> None:
    result = after(senders, answering(b"220 mail.example.com ESMTP\r\n", part))

    assert isinstance(result, Unknown)
    assert said(result).endswith("but what came back is not HTTP: it may have been acted on")


def test_a_request_that_is_never_read_is_unknown(senders: Senders) -> None:
    with serving(hang) as far:
        result = send(senders, http(far.port, timeout_s=SHORT_S), "a" * 20_000_000)

    assert isinstance(result, Unknown)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    answer=st.binary(max_size=200)
    | st.builds(lambda tail: b"HTTP/1.1 " + tail, st.binary(max_size=200))
    | st.builds(lambda tail: b"HTTP/1.1 200 OK\r\n" + tail, st.binary(max_size=200))
    | st.builds(
        lambda tail: b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + tail,
        st.text("0af\r\n;-", max_size=60).map(str.encode),
    )
)
@example(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-a\r\n")
@example(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n")
@example(b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5_000 + b"\r\n\r\n")
def test_any_answer_at_all_is_judged(senders: Senders, answer: bytes) -> None:
    result = after(senders, answering(answer, part), timeout_s=5)

    assert said(result)


# No connection


def test_a_refused_connection_is_failed_for_now(senders: Senders) -> None:
    port = unused_port()

    result = send(senders, http(port))

    assert result == Later(
        f"127.0.0.1:{port} refused the connection (is it running?)", unreachable=True
    )


def test_a_connection_that_is_not_taken_is_failed_for_now(senders: Senders) -> None:
    with silent_port() as port:
        result = send(senders, http(port, timeout_s=SHORT_S))

    assert result == Later(
        f"127.0.0.1:{port} did not take a connection in time (is a firewall between?)",
        unreachable=True,
    )


@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".example"])
def test_a_name_that_does_not_resolve_is_failed_for_now(senders: Senders, host: str) -> None:
    result = send(senders, http(1, url=f"http://{host}/hook"))

    assert result == Later(
        f"the name of {host} can't be resolved (is it spelled right? does DNS work?)",
        unreachable=True,
    )


@pytest.mark.parametrize(
    "url", ["", "ftp://x/", "http://", "http://u:s3cret@x:p0rt/", "http://[1/", "http://no name/"]
)
def test_a_url_that_is_none_is_failed_for_now(senders: Senders, url: str) -> None:
    result = send(senders, http(1, url=url))

    assert result == Later("url is no http or https URL (correct it)", unreachable=True)


def test_a_host_that_is_none_is_failed_for_now(senders: Senders) -> None:
    result = send(senders, http(1, url="http://[fe80::1%25nosuch0]/"))

    assert result == Later("url names no host that can be reached (correct it)", unreachable=True)


# TLS


@pytest.mark.parametrize(
    ("name", "days", "trusted", "words"),
    [
        ("127.0.0.1", 2, False, "self-signed certificate"),
        ("example.com", 2, True, "IP address mismatch"),
        ("127.0.0.1", -2, True, "certificate has expired"),
    ],
)
def test_a_bad_certificate_is_failed_for_now_with_nothing_sent(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    days: int,
    trusted: bool,
    words: str,
) -> None:
    pair = self_signed(tmp_path, name, days=days)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(pair.certificate))
    senders = Senders()

    with serving(answering(OK), tls=pair.tls) as far:
        result = send(senders, http(1, url=f"https://127.0.0.1:{far.port}/hook"))

    senders.close()
    assert isinstance(result, Later)
    assert result.unreachable
    assert said(result).startswith(
        f"TLS with 127.0.0.1:{far.port} failed: its certificate is refused: "
    )
    assert words in said(result)
    assert far.requests == []


@pytest.fixture
def trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    pair = self_signed(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(pair.certificate))
    return pair.tls


def test_a_message_is_sent_over_tls_and_the_connection_used_again(trusted: Any) -> None:
    senders = Senders()
    with serving(answering(OK), tls=trusted) as far:
        to = http(1, url=f"https://127.0.0.1:{far.port}/hook")
        results = [send(senders, to) for _ in range(3)]

    assert results == [Sent(f"127.0.0.1:{far.port} answered 200 OK")] * 3
    assert far.connections == 1


@pytest.mark.parametrize("then", [hang, drip, reset])
def test_what_is_not_answered_over_tls_is_unknown(trusted: Any, then: Script) -> None:
    senders = Senders()
    with serving(answering(b"HTTP/1.1 200 OK\r\nX-", then), tls=trusted) as far:
        to = http(1, url=f"https://127.0.0.1:{far.port}/hook", timeout_s=SHORT_S)
        start = time.monotonic()
        result = send(senders, to)
        took_s = time.monotonic() - start

    senders.close()
    assert isinstance(result, Unknown)
    assert took_s < 10 * SHORT_S


@pytest.mark.parametrize("script", [hang, reset, part, drip])
def test_a_handshake_that_fails_is_failed_for_now(senders: Senders, script: Script) -> None:
    with serving(script) as far:
        to = http(1, url=f"https://127.0.0.1:{far.port}/hook", timeout_s=SHORT_S)
        result = send(senders, to)

    assert isinstance(result, Later)
    assert result.unreachable
    assert said(result)


def test_a_connection_that_was_reset_before_its_handshake_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        plain = reach.connect("127.0.0.1", listener.getsockname()[1], reach.Deadline(PATIENCE_S))
        far, _ = listener.accept()
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        far.close()
        assert select.select([plain], [], [], PATIENCE_S)[0]

        # What is left open is a warning, which is an error here.
        with pytest.raises(ConnectionResetError):
            reach.encrypt(plain, reach.trusting(), "localhost")


def test_a_server_without_tls_is_failed_for_now(senders: Senders) -> None:
    def greet(far: Far, connection: socket.socket) -> None:
        connection.sendall(status("400 Bad Request"))

    with serving(greet) as far:
        result = send(senders, http(1, url=f"https://127.0.0.1:{far.port}/hook"))

    assert isinstance(result, Later)
    assert said(result).endswith("(does it speak TLS on this port?)")


# Connections that are kept


def test_a_connection_is_used_again_at_once(senders: Senders) -> None:
    with serving(answering(OK)) as far:
        results = [send(senders, http(far.port)) for _ in range(3)]

    assert [type(result) for result in results] == [Sent] * 3
    assert far.connections == 1


def test_a_connection_that_was_closed_meanwhile_is_not_used(senders: Senders) -> None:
    closed = threading.Event()

    def close(far: Far, connection: socket.socket) -> None:
        connection.close()
        closed.set()

    with serving(answering(OK, close), answering(OK)) as far:
        first = send(senders, http(far.port))
        assert closed.wait(LONG_S)
        second = send(senders, http(far.port))

    assert (type(first), type(second)) == (Sent, Sent)
    assert far.connections == 2


def test_a_connection_that_holds_unasked_bytes_is_not_used(senders: Senders) -> None:
    answered, strayed = threading.Event(), threading.Event()

    def stray(far: Far, connection: socket.socket) -> None:
        answered.wait(LONG_S)
        connection.sendall(status("404 Stray"))
        strayed.set()
        hang(far, connection)

    with serving(answering(OK, stray), answering(OK)) as far:
        first = send(senders, http(far.port))
        answered.set()
        assert strayed.wait(LONG_S)
        second = send(senders, http(far.port))

    assert (type(first), type(second)) == (Sent, Sent)
    assert far.connections == 2


def test_a_connection_that_was_idle_is_not_used(
    senders: Senders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "IDLE_S_MAX", 0.0)
    with serving(answering(OK)) as far:
        results = [send(senders, http(far.port)) for _ in range(2)]

    assert [type(result) for result in results] == [Sent] * 2
    assert far.connections == 2


def test_where_unknown_goes_to_review_no_connection_is_used_twice(senders: Senders) -> None:
    with serving(answering(OK)) as far:
        to = http(far.port, policy=Policy(ambiguous="review"))
        results = [send(senders, to) for _ in range(2)]

    assert [type(result) for result in results] == [Sent] * 2
    assert far.connections == 2


def test_a_used_connection_that_is_reset_by_the_request_is_unknown(senders: Senders) -> None:
    def reset_the_second(far: Far, connection: socket.socket) -> None:
        request(connection)
        reset(far, connection)

    with serving(answering(OK, reset_the_second)) as far:
        first = send(senders, http(far.port))
        second = send(senders, http(far.port))

    assert (type(first), type(second)) == (Sent, Unknown)
    assert far.connections == 1


def test_the_time_limit_begins_again_with_each_message(senders: Senders) -> None:
    def second_hangs(far: Far, connection: socket.socket) -> None:
        far.requests.append(request(connection))
        hang(far, connection)

    with serving(answering(OK, second_hangs)) as far:
        send(senders, http(far.port))
        start = time.monotonic()
        result = send(senders, http(far.port, timeout_s=SHORT_S))
        took_s = time.monotonic() - start

    assert isinstance(result, Unknown)
    assert SHORT_S * 0.9 < took_s < SHORT_S * 10


def test_a_new_url_leaves_the_old_connections(senders: Senders) -> None:
    with serving(answering(OK)) as old, serving(answering(OK)) as new:
        send(senders, http(old.port))
        result = send(senders, http(new.port))

    assert isinstance(result, Sent)
    assert (old.connections, new.connections) == (1, 1)


def test_many_threads_send_to_one_destination(senders: Senders) -> None:
    results: list[Result] = []
    with serving(answering(OK)) as far:
        threads = [
            threading.Thread(target=lambda: results.append(send(senders, http(far.port))))
            for _ in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)

    assert [type(result) for result in results] == [Sent] * 16
    assert len(far.requests) == 16


def test_after_close_nothing_is_sent(senders: Senders) -> None:
    senders.close()

    with serving(answering(OK)) as far:
        result = send(senders, http(far.port))

    assert result == Later("nothing was sent: the worker is stopping, or the url has changed")
    assert far.connections == 0


# Secrets


@pytest.mark.parametrize(
    "script",
    [
        answering(OK),
        answering(status("404 T0KEN hunter2 pa55age")),
        answering(status("500 T0KEN", "Retry-After: T0KEN")),
        answering(status("302 x", "Location: http://x/T0KEN")),
        answering(b"T0KEN hunter2", part),
        answering(b"HTTP/1.1 200 OK\r\nno colon T0KEN\r\n\r\n", part),
        answering(b"HTTP/1.1 200 OK\r\nContent-Length: 1, 2\r\n\r\n", part),
        reset,
    ],
)
def test_no_secret_and_no_body_is_told_or_logged(
    senders: Senders, caplog: pytest.LogCaptureFixture, script: Script
) -> None:
    caplog.set_level(logging.DEBUG)
    with serving(script) as far:
        url = f"http://user:hunter2@127.0.0.1:{far.port}/services/T0KEN?key=T0KEN"
        result = send(senders, http(1, url=url, secret=b"s1gning"), "pa55age")

    told = said(result) + caplog.text
    assert not any(word in told for word in ("user", "hunter2", "T0KEN", "s1gning", "pa55age"))


def wait_for(what: Any) -> None:
    end = time.monotonic() + LONG_S
    tick = threading.Event()
    while not what():
        assert time.monotonic() < end
        tick.wait(0.01)
