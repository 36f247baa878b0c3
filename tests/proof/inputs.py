"""What the targets of the fuzzer begin with: inputs that come far, and the rules they meet."""

import json
import random
from collections.abc import Callable
from typing import Any

NOW_MS = 1_800_000_000_000
URL = "https://hooks.example.com/webhooks/x"

#: Takes any bytes, and raises only for what must not happen.
Run = Callable[[bytes], None]
#: What is run, and the inputs to begin with.
Made = tuple[Run, list[bytes]]

# Paths, and what they are looked up in.

EXPRESSIONS = (
    *("data.object.id", "a || b", "@", "length(@)", "items[*].a | [0]", "[?a > `1`].b", "*.*"),
    *("sort_by(@, &a)", "join(',', a)", "to_string(@)", "merge(a, b)", "max_by(@, &to_number(a))"),
    *("a[].b[]", "a[::2]", "not_null(a, b)", "map(&a, @)", "{{}}{a}", "sum(a[*])", "keys(a)"),
)
DOCUMENTS = (
    *(b'{"a": 1, "b": [1.5, -2], "data": {"object": {"id": "in_1"}}}', b"[[[[]]]]", b'"\\ud800"'),
    *(b'{"a": [1, "x", null, {"b": 1e308}]}', b"123456789012345678901234567890", b"1e999", b"-0.0"),
)

# What a message is made of.

MESSAGES = (
    b'{"id": "in_1", "n": 1, "mail": "Ann <ann@example.com>", "text": "Hello\\n.\\nyou"}',
    b'{"id": "a\\r\\nX: y", "n": null, "mail": "a@b.c\\nBcc: d@e.f", "text": "\\u2028\\ud83d"}',
    b'{"id": "\\u00fc", "n": [1], "mail": "\\"Ann, Bob\\" <a@b\\u00fc.example>", "text": "=?"}',
)

# What the other side of a send, a mail server and a sender's API may answer, in this order.

ANSWERS = (
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    b"220 h\r\n250-h\r\n250-AUTH PLAIN LOGIN\r\n250 STARTTLS\r\n235 ok\r\n250 ok\r\n250 ok\r\n"
    b"354 go\r\n250 took it\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 32\r\n\r\n"
    b'{"id": "in_1", "livemode":false}',
    b"HTTP/1.1 503 X\r\nRetry-After: Wed, 21 Oct 2026 07:28:00 GMT\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    b"554 go away\r\n",
    b"HTTP/1.1 404 Not Found\r\nContent-Length: 44\r\n\r\n"
    b'{"error": {"code": "resource_missing"}}     ',
    b"HTTP/1.1 103 Hints\r\nLink: a\r\n\r\nHTTP/1.1 204 No\r\nConnection: close\r\n\r\n",
    b"220 h\r\n250 h\r\n250 ok\r\n250 ok\r\n354 go\r\n451 later\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 65\r\n\r\n"
    b'{"has_more": true, "data": [{"id": "a", "created": 1, "type":"b"}]}',
)

# Requests, good and bad.

REQUESTS = (
    b"POST /webhooks/x HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"2;a=b\r\n{}\r\n0\r\nX: y\r\n\r\n",
    b"POST /x HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    b"GET /x HTTP/1.1\nHost: h\n\nGET /y HTTP/1.1\r\nHost: h\r\n folded\r\n\r\n",
    b"POST /x HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\nabc",
    b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"CONNECT h:1 HTTP/1.1\r\n\r\n",
    b"GET http://a/b?c HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" * 2,
)

# Rules of every kind, and an object that they apply to.

RULES = """
database = "receiver.db"
[worker]
run = "off"
[sources.stripe]
scheme = "stripe"
secrets = ["env:STRIPE"]
livemode = false
gzip = true
[destinations.api]
kind = "http"
url = "http://127.0.0.1:9/"
headers = { "X-Id" = "{data.object.id}" }
[destinations.mail]
kind = "email"
smtp = "smtp://127.0.0.1:9"
from = "us@example.com"
to = "{data.object.mail}"
subject = "{data.object.id}"
text = "{data.object.text}"
[[rules]]
operation = "grant"
source = "stripe"
on = ["a", "b.*"]
when = { "data.object.n" = { gt = 0 }, "data.object.text" = { matches = "^[a-z]+" } }
subject = "data.object.id"
customer = "data.object.customer"
grant = { unit = "credits", amount = 100 }
send = [{ to = "api" }, { to = "mail" }]
[[rules]]
operation = "reverse"
source = "stripe"
on = ["c"]
subject = "data.object.id"
reverse = { operation = "grant", subject = "data.object.of", amount = "data.object.n" }
[[rules]]
operation = "record"
source = "stripe"
on = ["*"]
subject = "data.object.id"
record.kind = "r"
record.data = { all = "{@}", one = "x {data.object.text}", n = "{length(data.object.items)}" }
send = [{ to = "api" }, { to = "mail" }]
[[rules]]
operation = "state"
source = "stripe"
on = ["d", "*"]
project.kind = "thing"
project.id = "data.object.id"
project.object = "data.object"
project.version = "time"
project.state = "state"
project.fields = { a = "{a}" }
[[rules]]
operation = "change"
source = "stripe"
on = ["e", "*"]
subject = "data.object.id"
sql = ["insert into app (a, b) values ({data.object.n}, {data.object.text})"]
[[rules]]
operation = "link"
source = "stripe"
on = ["f"]
link = { customer = "data.object.customer", workspace = "data.object.workspace" }
"""
OBJECT = {
    "id": "o_1",
    "customer": "cus_1",
    "workspace": "acme",
    "n": 1,
    "text": "abc",
    "mail": "a@example.com",
    "of": "o_0",
    "items": [1],
    "state": "on",
    "time": 1_700_000_000,
    "a": {"b": None},
}

# Requests whose length may be read in two ways, and the statuses that are right for them; one that
# is not complete may have no answer.

_POST = b"POST /webhooks/github HTTP/1.1\r\nHost: h\r\n"
_CHUNKED = _POST + b"Transfer-Encoding: chunked\r\n\r\n"
ATTACKS: tuple[tuple[bytes, tuple[int, ...]], ...] = (
    *(
        (_POST + lines + b"\r\n\r\n", (400,))
        for lines in (
            b"Content-Length: 4\r\nTransfer-Encoding: chunked",
            b"Transfer-Encoding: chunked\r\nContent-Length: 4",
            b"Content-Length: 0\r\nContent-Length: 40",
            b"Content-Length: 0, 40",
            b"Content-Length: +4",
            b"Content-Length: 0x4",
            b"Content-Length: 4 4",
            b"Content-Length: -1",
            b"Content-Length:",
            b"Content-Length : 0",
            b"Content-Length: 18446744073709551617",
            b"Transfer-Encoding: chunked, identity",
            b"Transfer-Encoding: identity, chunked",
            b"Transfer-Encoding: xchunked",
            b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
            b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
            b"Transfer-Encoding : chunked",
            b"Transfer-Encoding: \x0bchunked",
            b'Transfer-Encoding: "chunked"',
            b"Transfer-Encoding:\r\n chunked",
            b"X-A: b\r\n Content-Length: 40",
            b"X-A: b\nContent-Length: 40",
            b"X-A: b\rContent-Length: 40",
            b"X-A: b\0c",
            b" X-A: b",
        )
    ),
    *(
        (_CHUNKED + chunks, (400, 401))
        for chunks in (
            b"0x2\r\n{}\r\n0\r\n\r\n",
            b"-1\r\n{}\r\n0\r\n\r\n",
            b"+2\r\n{}\r\n0\r\n\r\n",
            b"2\n{}\n0\n\n",
            b"2\r\n{}0\r\n\r\n",
            b"2\r\n{}\r\n0\r\nbad\r\n\r\n",
            b"10000000000000002\r\n{}\r\n0\r\n\r\n",
            b"ffffffffffffffff\r\n{}\r\n0\r\n\r\n",
            b"2;\n{}\r\n0\r\n\r\n",
            b"\r\n2\r\n{}\r\n0\r\n\r\n",
        )
    ),
    (b"POST /webhooks/github HTTP/1.1\nHost: h\nContent-Length: 40\n\n", (400,)),
    (b"POST /webhooks/github HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", (400, 401)),
    (b"POST /webhooks/github HTTP/0.9\r\nContent-Length: 4\r\n\r\n", (400, 401)),
    (b"POST /webhooks/github\r\n\r\n", (400, 401)),
)

# Bodies that are signed.

MAIL = "ann@example.com"
INJECTED = (
    *(
        "a\r\nBcc: evil@example.com",
        "a\nX-Evil: 1",
        "a\r\n\r\nevil",
        "\u2028X-Evil: 1",
        "\0",
        "{@}",
    ),
    *(
        "{{data}}",
        "=?utf-8?q?=0d=0aX-Evil:_1?=",
        "\ud800",
        "\u202e",
        "${jndi:x}",
        "%0d%0aX-Evil: 1",
    ),
    *("a" * 900, "\x85X-Evil: 1", "\x1b[2J", "."),
)


def _attack(chance: random.Random, **of: Any) -> dict[str, Any]:
    number = chance.randrange(10**12)
    fields = {"id": f"a_{number}", "mail": MAIL, "text": "hello"} | of
    return {
        "id": f"evt_{number}",
        "type": "attack",
        "livemode": False,
        "data": {"object": fields},
    }


def _injected(chance: random.Random) -> bytes:
    text = chance.choice(INJECTED)
    where = chance.choice(["text", "mail", "id"])
    return json.dumps(
        _attack(chance, **{where: f"{MAIL}{text}" if where == "mail" else text})
    ).encode()


def _exploding(chance: random.Random) -> bytes:
    items = [{"a": [{"b": [{"x": 2}] * 20}] * 20}] * chance.choice([1, 10, 40])
    return json.dumps(_attack(chance, items=items)).encode()


def _hinting(chance: random.Random) -> bytes:
    kind = {"type": "customer.subscription.updated"}
    return json.dumps(_attack(chance) | kind).encode()


def _spoilt(chance: random.Random) -> bytes:
    """A body that is no JSON, or holds what JSON need not carry."""
    whole = json.dumps(_attack(chance, n="N")).encode()
    value = chance.choice(
        [
            *(
                b"NaN",
                b"Infinity",
                b"1e999",
                b"-0",
                b"1" * 5_000,
                b"18446744073709551616",
                b"1.5e-999",
            ),
            *(b'"\\ud800"', b'"\\u0000"', b'"\xff\xfe"', b"[" * 100_000, b'{"a":' * 20_000, b"nul"),
            *(
                b"[" * 500 + b"]" * 500,
                b'"' + b"a" * 500_000 + b'"',
                b'{"":{"":1}}',
                b"0x1",
                b"'a'",
            ),
        ]
    )
    return chance.choice([b"", b"\xef\xbb\xbf", b"\0", b" "]) + whole.replace(b'"N"', value)


def _named(chance: random.Random) -> bytes:
    """An id, a type or an account that is long, or no text."""
    name = chance.choice(["id", "type", "account", "livemode"])
    value: Any = chance.choice(
        ["x" * 900_000, "a\0b", "a\nb", "\ud800", "", None, 1, 1.5, [], {}, True, -1, 10**40]
    )
    return json.dumps(_attack(chance) | {name: value}).encode()


BODIES = (_injected, _exploding, _hinting, _spoilt, _named)
