"""A sender's API is read by one bounded, timed request, and each answer means one thing."""

import threading
from collections.abc import Iterator

import msgspec
import pytest

from receiver import client as clients
from receiver import presets
from receiver.api import KEYS, parse
from receiver.api import SenderApi as SenderData
from receiver.client import Client, Elsewhere, Found, Missing, Refused, Reply
from receiver.config import Api
from receiver.described import Described
from receiver.destinations import Later, Never
from receiver.select import Unjudgeable
from tests.conftest import NOW_MS
from tests.far_side import unused_port
from tests.sender_api import KEY, SenderApi, error, sender_api

PATH = "/v1/subscriptions/{id}"
AT = "/v1/subscriptions/sub_1"


def wait(over: threading.Event) -> None:
    assert over.wait(10)


@pytest.fixture
def far() -> Iterator[SenderApi]:
    with sender_api() as api:
        api.put(AT, status="active")
        yield api


@pytest.fixture
def client(far: SenderApi) -> Iterator[Client]:
    made = Client(
        Api(KEY.encode(), far.url, presets.api_of(presets.get("stripe")), "2025-03-31.basil"),
        livemode=False,
    )
    yield made
    made.close()


def ask(client: Client, resource_id: str = "sub_1", account: str = "") -> Reply:
    return client.resource(PATH, resource_id, account=account, now_ms=NOW_MS)


def test_a_resource_is_read_with_the_key_the_version_and_the_account(
    far: SenderApi, client: Client
) -> None:
    reply = ask(client, account="acct_2")

    assert isinstance(reply, Found)
    assert reply.document == {"id": "sub_1", "livemode": False, "status": "active"}
    ((path, headers),) = far.asked
    assert path == AT
    assert headers["authorization"] == f"Bearer {KEY}"
    assert headers["stripe-account"] == "acct_2"
    assert headers["stripe-version"] == "2025-03-31.basil"
    assert headers["accept-encoding"] == "identity"


def test_an_event_of_the_senders_own_account_names_none(far: SenderApi, client: Client) -> None:
    ask(client)

    assert "stripe-account" not in far.asked[0][1]


@pytest.mark.parametrize(
    ("auth", "header", "value"),
    [
        ("basic", "authorization", "Basic c2tfdGVzdF9vZl90aGVfdGVzdHM6"),
        ("header:X-Access-Token", "x-access-token", KEY),
    ],
)
def test_a_key_is_shown_as_the_sender_wants(
    far: SenderApi, auth: str, header: str, value: str
) -> None:
    described = parse(Described({"auth": auth, "headers": {"X-Api": "1"}}))
    client = Client(Api(KEY.encode(), far.url, described))

    client.ask("GET", AT, now_ms=NOW_MS)

    assert far.asked[0][1][header] == value
    assert far.asked[0][1]["x-api"] == "1"
    client.close()


def test_an_id_can_not_name_another_place(far: SenderApi, client: Client) -> None:
    for name in ("../customers/cus_1", "sub_1?expand[]=a", "a b", "ü#"):
        assert isinstance(ask(client, name), Missing)
    with pytest.raises(Unjudgeable):
        ask(client, "..")

    assert far.paths == [
        "/v1/subscriptions/..%2Fcustomers%2Fcus_1",
        "/v1/subscriptions/sub_1%3Fexpand%5B%5D%3Da",
        "/v1/subscriptions/a%20b",
        "/v1/subscriptions/%C3%BC%23",
    ]


CUT = {"Content-Length": "99", "Connection": "close"}
# As GitHub tells of its limit: when it ends, in seconds.
LIMITED = {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": str(NOW_MS // 1000 + 60)}
MISPLACED = (
    "No such subscription: 'sub_1'; a similar object exists in live mode, but a test mode key "
    "was used to make this request."
)


@pytest.mark.parametrize(
    ("answer", "expected", "words"),
    [
        (error(404, code="resource_missing", message="No such"), Missing, "(resource_missing)"),
        (error(404, code="resource_missing", message=MISPLACED), Elsewhere, "in the other mode"),
        (error(404, type="invalid_request_error"), Later, "is api.base_url right?"),
        ((404, {}, b"<html>not here</html>"), Later, "is api.base_url right?"),
        (error(401, type="invalid_request_error"), Refused, "the key is refused (correct api.key)"),
        (error(403, type="invalid_request_error"), Refused, "the key may not read this"),
        ((403, {"Retry-After": "7"}, b"{}"), Later, "403 Forbidden and asks to wait 7 s"),
        ((403, LIMITED, b"{}"), Later, "and asks to wait 60 s"),
        (error(429, {"Retry-After": "7"}, code="rate_limit"), Later, "asks to wait 7 s"),
        (error(503, {"Retry-After": "7"}), Later, "503 Service Unavailable and asks to wait 7 s"),
        ((500, {}, b""), Later, "500"),
        (error(400, code="parameter_unknown"), Never, "(parameter_unknown)"),
        ((302, {"Location": "/v1/else"}, b""), Refused, "redirects are not followed"),
        ((200, {}, b"<html>"), Later, "something else than JSON"),
        ((200, {}, b'{"id": "sub_2"}'), Never, "about another thing than sub_1"),
        ((200, {}, b'{"id": "sub_1", "livemode": true}'), Refused, "is live data: use a key for"),
        ((200, {}, b'{"id": "sub_1", "deleted": true}'), Missing, "it is deleted"),
        ((200, CUT, b"{}"), Later, "broke off before the answer was whole"),
    ],
)
def test_each_answer_means_one_thing(
    far: SenderApi,
    client: Client,
    answer: tuple[int, dict[str, str], bytes],
    expected: type,
    words: str,
) -> None:
    far.instead = lambda path: answer

    reply = ask(client)

    assert type(reply) is expected
    assert words in reply.why  # type: ignore[union-attr]
    assert KEY not in repr(reply)
    assert "No such" not in repr(reply)


@pytest.mark.parametrize(
    ("answer", "waits"),
    [
        (error(401), True),
        (error(403), True),
        (error(429), True),
        (error(503), False),
        (error(404), False),
    ],
)
def test_what_would_refuse_all_the_others_too_says_so(
    far: SenderApi, client: Client, answer: tuple[int, dict[str, str], bytes], waits: bool
) -> None:
    far.instead = lambda path: answer

    reply = ask(client)

    assert isinstance(reply, Later)
    assert reply.unreachable is waits


def test_what_can_not_be_reached_is_asked_later() -> None:
    client = Client(
        Api(b"k", f"http://127.0.0.1:{unused_port()}", presets.api_of(presets.get("stripe")))
    )

    reply = ask(client)

    assert isinstance(reply, Later)
    assert reply.unreachable
    assert "refused the connection" in reply.why


def test_an_answer_that_is_too_long_is_not_read_on(
    far: SenderApi, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "ANSWER_BYTES_MAX", 1000)
    far.put(AT, status="x" * 2000)

    reply = ask(client)

    assert isinstance(reply, Never)
    assert "more than 1000 bytes" in reply.why


def test_an_answer_that_does_not_come_ends_with_the_time_limit(
    far: SenderApi, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "TIMEOUT_S", 0.2)
    over = threading.Event()
    far.before_answer = lambda path, number: (over.wait(10) and None) or None

    reply = ask(client)
    over.set()

    assert isinstance(reply, Later)
    assert "no whole answer within 0.2 s" in reply.why


def test_a_key_is_known_by_its_beginning() -> None:
    described = presets.api_of(presets.get("stripe"))

    assert described.mode_of(b"sk_test_1") is False
    assert described.mode_of(b"rk_live_1") is True
    assert described.mode_of(b"whsec_1") is None


@pytest.mark.parametrize(
    ("described", "problem"),
    [
        ("x", "api: must be a table"),
        ({"auht": "bearer"}, "api.auht: is not a known key (did you mean auth?)"),
        ({"base_url": "ftp://a"}, "api.base_url: is not the address of a web server"),
        ({"base_url": 1}, "api.base_url: must be a text, not empty"),
        ({"auth": "token"}, "api.auth: must be header:NAME"),
        ({"auth": "header:Authorization"}, "api.auth: must be header:NAME, and no header that"),
        ({"headers": {"Host": "a"}}, "api.headers: must be a table of headers"),
        ({"base_url": "https://a\n"}, "api.base_url: must be one line of text"),
        ({"test_keys": [1]}, "api.test_keys: must be a text or a list of texts"),
        ({"says": "a["}, "api.says: 'a['"),
        ({"missing": {}}, "api.missing: needs at least one"),
        ({"resources": {"a": "b"}}, "api.resources.a: is not the path of a resource"),
        ({"resources": {"a": "/b"}}, "api.resources.a: has no {id}"),
        ({"resources": []}, "api.resources: must be a table of KIND"),
    ],
)
def test_a_description_that_can_not_be_used_is_refused(described: object, problem: str) -> None:
    reader = Described(described, "api")

    parse(reader)

    assert any(one.startswith(problem) for one in reader.problems), reader.problems


def test_a_description_has_the_same_fields_as_its_words() -> None:
    assert set(KEYS) == {field.name for field in msgspec.structs.fields(SenderData)}
