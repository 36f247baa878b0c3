"""What the targets of the fuzzer begin with: inputs that come far, and the rules they meet."""

from collections.abc import Callable

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
