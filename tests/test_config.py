"""A configuration is taken as a whole, or refused with everything that is wrong with it."""

import datetime
import ipaddress
import os
import re
import tomllib
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as trials
from hypothesis import strategies as st

from receiver.config import (
    CONFIG_BYTES_MAX,
    RULES_CACHED_MAX,
    Address,
    Call,
    ConfigError,
    Grant,
    Link,
    Record,
    Reverse,
    Settings,
    Sql,
    build,
    load,
)
from receiver.select import Scope

# The first text of a fresh checkout builds tables of Unicode, and machines differ in speed.
STEADY = trials(deadline=None, suppress_health_check=[HealthCheck.too_slow])

SECRET = "whsec_bm90IGEgcmVhbCBzZWNyZXQ="
ENVIRONMENT = {"STRIPE_WEBHOOK_SECRET": SECRET}

SOURCE = """
[sources.stripe]
scheme = "stripe"
livemode = true
secrets = ["env:STRIPE_WEBHOOK_SECRET"]
"""
GITHUB = """
[sources.github]
scheme = "github"
secrets = ["env:STRIPE_WEBHOOK_SECRET"]
"""
RULE = """
[[rules]]
operation = "initial-credit-grant"
source = "stripe"
on = ["invoice.paid"]
subject = "data.object.id"
customer = "data.object.customer"
grant = { unit = "credits", amount = 100 }
"""
WHOLE = """
database = "app.db"
handlers = "handlers.py"
env_file = ".env"
public_url = "https://hooks.example.com"

[server]
listen = "127.0.0.1:9080"
admin = "unix:admin.sock"
trusted_proxies = ["127.0.0.1", "10.0.0.0/8"]
tls = { certificate = "cert.pem", key = "key.pem" }
body_bytes_max = 1048576
pending_max = 512

[sources.stripe]
scheme = "stripe"
secrets = [
  "env:STRIPE_WEBHOOK_SECRET",
  { secret = "file:old.secret", account = "acct_1", livemode = true },
  { secret = "env:VERIFY_TOKEN", name = "verify_token" },
]
livemode = true
account = "acct_1"
mode = "sync"
tolerance_s = 120
volatile = ["request", "pending_webhooks"]
gzip = true
allow_ips = ["192.0.2.0/24", "2001:db8::1"]
public_url = "https://other.example.com/in/"

[sources.feedback]
scheme = { sig = "header:X-Signature", algo = "sha256", enc = "hex", signed = "{body}", \
event_id = "json:/id", event_type = "json:/type" }
identity = "feedback-form"
secrets = ["env:STRIPE_WEBHOOK_SECRET"]

[[rules]]
operation = "link-customer"
source = "stripe"
on = ["checkout.session.completed"]
link = { customer = "data.object.customer", workspace = "data.object.client_reference_id" }

[[rules]]
operation = "initial-credit-grant"
source = "stripe"
on = ["invoice.paid", "invoice.payment_succeeded"]
when = { "data.object.amount_paid" = { gt = 0 } }
expect = { "data.object.status" = "paid", "data.object.currency" = ["usd", "eur"] }
subject = "data.object.id"
customer = "data.object.customer"
grant = { unit = "credits", amount = 100 }

[[rules]]
operation = "plan-credit-grant"
source = "stripe"
on = ["invoice.paid"]
subject = "data.object.id"
customer = ["data.object.customer", "data.object.account"]
grant.unit = "credits"
grant.by = ["data.object.lines.data[0].pricing.price_details.price", "data.object.price.id"]
grant.amounts.price_basic = 100
grant.amounts.price_large = 1000

[[rules]]
operation = "refund-credit-grant"
source = "stripe"
on = ["credit_note.created"]
subject = "data.object.id"
reverse = { operation = "initial-credit-grant", subject = "data.object.invoice", amount = "a.b" }

[[rules]]
operation = "initial-alert"
source = "feedback"
on = ["feedback.created"]
subject = "feedback.id"
record = { kind = "feedback-alert", data = { text = "{feedback.text}", rating = "{feedback.n}" } }

[[rules]]
operation = "upgrade-plan"
source = "stripe"
on = ["customer.subscription.*"]
customer = "data.object.customer"
sql = ["update workspaces set plan = {data.object.items.data[0].price.id} where id = {_workspace}"]

[[rules]]
operation = "welcome"
source = ["stripe", "feedback"]
on = ["*"]
call = "welcome_pack"
"""


def write(directory: Path, text: str) -> Path:
    path = directory / "receiver.toml"
    path.write_text(text)
    return path


def taken(directory: Path, text: str, **environment: str) -> Settings:
    return load(write(directory, text), environment=ENVIRONMENT | environment)


def refused(directory: Path, text: str, **environment: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        taken(directory, text, **environment)
    return caught.value.problems


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A directory with every file that WHOLE names."""
    for name in ("handlers.py", "cert.pem", "key.pem"):
        (tmp_path / name).touch()
    (tmp_path / ".env").write_text(f"VERIFY_TOKEN=token\nSTRIPE_WEBHOOK_SECRET={SECRET}\n")
    (tmp_path / "old.secret").write_text(f"{SECRET}\n")
    write(tmp_path, WHOLE)
    return tmp_path


# What is taken


def test_a_whole_configuration_is_taken_without_a_problem_or_warning(whole: Path) -> None:
    settings = load(whole / "receiver.toml", environment={})

    assert settings.warnings == ()
    assert settings.path == whole / "receiver.toml"
    assert settings.database == whole / "app.db"
    assert settings.handlers == whole / "handlers.py"
    assert settings.env_file == whole / ".env"
    assert settings.public_url == "https://hooks.example.com"
    assert list(settings.sources) == ["stripe", "feedback"]


def test_the_server_is_parsed(whole: Path) -> None:
    server = load(whole / "receiver.toml", environment={}).server

    assert server.listen == Address("127.0.0.1", 9080)
    assert server.admin == Address(unix=whole / "admin.sock")
    assert server.trusted_proxies == (
        ipaddress.ip_network("127.0.0.1"),
        ipaddress.ip_network("10.0.0.0/8"),
    )
    assert server.tls is not None
    assert server.tls.certificate == whole / "cert.pem"
    assert server.tls.key == whole / "key.pem"
    assert (server.body_bytes_max, server.pending_max) == (1_048_576, 512)


def test_a_source_becomes_its_contract(whole: Path) -> None:
    source = load(whole / "receiver.toml", environment={}).sources["stripe"]
    contract = source.contract

    assert (source.name, source.scheme, source.mode) == ("stripe", "stripe", "sync")
    assert source.body_gzip
    assert source.allow_ips == (
        ipaddress.ip_network("192.0.2.0/24"),
        ipaddress.ip_network("2001:db8::1"),
    )
    assert source.public_url == "https://other.example.com/in"
    assert (contract.source, contract.identity) == ("stripe", "stripe")
    assert (contract.account, contract.livemode, contract.tolerance_s) == ("acct_1", True, 120)
    assert contract.volatile == ("pending_webhooks", "request")


def test_secrets_keep_their_reference_and_what_they_are_bound_to(whole: Path) -> None:
    first, old, token = (
        load(whole / "receiver.toml", environment={}).sources["stripe"].contract.secrets
    )

    assert (first.reference, first.value) == ("env:STRIPE_WEBHOOK_SECRET", SECRET.encode())
    assert (old.reference, old.account, old.livemode) == ("file:old.secret", "acct_1", True)
    assert (token.name, token.value) == ("verify_token", b"token")


def test_a_source_has_the_public_url_of_the_server_and_a_sender_of_its_own(whole: Path) -> None:
    source = load(whole / "receiver.toml", environment={}).sources["feedback"]

    assert source.public_url == "https://hooks.example.com"
    assert source.scheme == source.contract.preset.name == "custom"
    assert source.contract.identity == "feedback-form"


def test_rules_are_compiled(whole: Path) -> None:
    rules = {r.operation: r for r in load(whole / "receiver.toml", environment={}).rules}
    event: dict[str, Any] = {
        "data": {"object": {"id": "in_1", "customer": "cus_1", "amount_paid": 5, "status": "open"}}
    }
    scope = Scope(event, {"_event": {}, "_workspace": "w1"})

    grant = rules["initial-credit-grant"]
    assert grant.on == ("invoice.paid", "invoice.payment_succeeded")
    assert grant.sources == ("stripe",)
    assert grant.when is not None
    assert grant.when.holds(scope)
    assert grant.expect is not None
    assert grant.expect.unmet(scope) == "data.object.status is 'open', expected 'paid'"
    assert grant.subject is not None
    assert grant.subject.value(scope) == "in_1"
    assert grant.customer is not None
    assert grant.customer.value(scope) == "cus_1"
    assert grant.effect == Grant("credits", 100)


def test_each_effect_is_compiled(whole: Path) -> None:
    effects = [rule.effect for rule in load(whole / "receiver.toml", environment={}).rules]

    link, _, plan, reverse, record, sql, call = effects
    assert isinstance(link, Link)
    assert link.workspace.text == "data.object.client_reference_id"
    assert isinstance(plan, Grant)
    assert plan.amount is None
    assert plan.by is not None
    assert plan.amounts == {"price_basic": 100, "price_large": 1000}
    assert isinstance(reverse, Reverse)
    assert reverse.operation == "initial-credit-grant"
    assert reverse.amount is not None
    assert isinstance(record, Record)
    assert record.data.render(Scope({"feedback": {"text": "hi"}}, {})) == {
        "text": "hi",
        "rating": None,
    }
    assert isinstance(sql, Sql)
    assert sql.statements[0].sql == "update workspaces set plan = ? where id = ?"
    assert call == Call("welcome_pack")


def test_what_is_left_out_has_a_safe_default(tmp_path: Path) -> None:
    settings = taken(tmp_path, SOURCE + RULE)

    assert settings.database == tmp_path / "receiver.db"
    assert settings.handlers is None
    assert settings.server.listen == Address("127.0.0.1", 8080)
    assert settings.server.admin == Address("127.0.0.1", 8081)
    assert settings.server.trusted_proxies == ()
    assert settings.server.body_bytes_max == 1_048_576
    assert settings.server.pending_max == 1_024
    source = settings.sources["stripe"]
    assert source.mode == "sync"
    assert not source.body_gzip
    assert source.allow_ips == ()
    assert source.public_url is None
    assert source.contract.tolerance_s is None


def test_the_database_is_in_the_state_directory_of_systemd(tmp_path: Path) -> None:
    state = {"STATE_DIRECTORY": "/var/lib/receiver:/var/lib/other"}

    assert taken(tmp_path, SOURCE, **state).database == Path("/var/lib/receiver/receiver.db")
    named = taken(tmp_path, 'database = "a.db"' + SOURCE, **state)
    assert named.database == tmp_path / "a.db"


def test_the_environment_of_the_process_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRIPE_WEBHOOK_SECRET", SECRET)

    settings = load(write(tmp_path, SOURCE))

    assert settings.sources["stripe"].contract.secrets[0].value == SECRET.encode()


def test_loading_changes_nothing_in_the_environment(whole: Path) -> None:
    before = dict(os.environ)

    load(whole / "receiver.toml")

    assert dict(os.environ) == before


def test_a_relative_path_of_the_config_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, SOURCE)
    monkeypatch.chdir(tmp_path)

    settings = load(Path("receiver.toml"), environment=ENVIRONMENT)

    assert settings.database == tmp_path / "receiver.db"


def test_loading_without_secrets_looks_at_nothing_outside_the_file(tmp_path: Path) -> None:
    settings = load(write(tmp_path, WHOLE), secrets=False, environment={})

    assert [secret.value for secret in settings.sources["stripe"].contract.secrets] == [b""] * 3


def test_loading_without_secrets_still_refuses_a_plain_one(tmp_path: Path) -> None:
    path = write(tmp_path, SOURCE.replace("env:STRIPE_WEBHOOK_SECRET", SECRET))

    with pytest.raises(ConfigError, match="is not a reference"):
        load(path, secrets=False)


def test_a_rule_of_several_types_without_a_subject_is_warned_of(tmp_path: Path) -> None:
    several = RULE.replace('on = ["', 'on = ["invoice.payment_succeeded", "')
    text = SOURCE + "\n".join(line for line in several.split("\n") if "subject" not in line)

    (warning,) = taken(tmp_path, text).warnings
    one = taken(tmp_path, SOURCE + several).warnings

    assert warning.startswith("rules[0].subject: is not set, so each event does this again")
    assert one == ()


def test_settings_are_frozen(tmp_path: Path) -> None:
    settings = taken(tmp_path, SOURCE)

    with pytest.raises(AttributeError):
        settings.database = Path("/")  # type: ignore[misc]


def test_nothing_that_settings_print_holds_a_secret(whole: Path) -> None:
    settings = load(whole / "receiver.toml", environment={})

    assert SECRET not in repr(settings)
    assert SECRET not in repr(settings.sources["stripe"].contract.checks)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:0", Address("127.0.0.1", 0)),
        ("localhost:80", Address("localhost", 80)),
        ("[::1]:8080", Address("::1", 8080)),
        ("unix:/run/receiver/http.sock", Address(unix=Path("/run/receiver/http.sock"))),
    ],
)
def test_an_address_of_this_machine_is_taken(tmp_path: Path, text: str, address: Address) -> None:
    settings = taken(tmp_path, f'[server]\nlisten = "{text}"\n{SOURCE}')

    assert settings.server.listen == address
    assert settings.server.listen.is_local
    assert str(settings.server.listen) == text


@pytest.mark.parametrize(
    "more", ["proxy_terminates_tls = true", 'tls = { certificate = "c", key = "k" }']
)
def test_a_public_address_is_taken_where_tls_is_seen_to(tmp_path: Path, more: str) -> None:
    for name in ("c", "k"):
        (tmp_path / name).touch()

    server = taken(tmp_path, f'[server]\nlisten = "0.0.0.0:443"\n{more}\n{SOURCE}').server

    assert not server.listen.is_local


def test_the_peer_of_a_unix_socket_can_be_trusted(tmp_path: Path) -> None:
    text = '[server]\nlisten = "unix:/run/x.sock"\ntrusted_proxies = ["unix", "10.0.0.1"]\n'

    trusted = taken(tmp_path, text + SOURCE).server.trusted_proxies

    assert trusted == ("unix", ipaddress.ip_network("10.0.0.1"))


@pytest.mark.parametrize(
    ("written", "network"),
    [
        ("::ffff:203.0.113.0/120", "203.0.113.0/24"),
        ("::ffff:203.0.113.7", "203.0.113.7/32"),
        ("::/64", "::/64"),
    ],
)
def test_ipv4_networks_written_as_ipv6_are_what_peers_are_compared_with(
    tmp_path: Path, written: str, network: str
) -> None:
    settings = taken(tmp_path, SOURCE + f'allow_ips = ["{written}"]\n')

    assert settings.sources["stripe"].allow_ips == (ipaddress.ip_network(network),)


def test_sources_of_one_sender_may_share_an_identity(tmp_path: Path) -> None:
    second = SOURCE.replace("[sources.stripe]", '[sources.connect]\nidentity = "stripe"')

    settings = taken(tmp_path, SOURCE + second)

    assert settings.identities == ("stripe",)


def test_an_operation_may_have_two_rules_of_one_kind(tmp_path: Path) -> None:
    settings = taken(tmp_path, SOURCE + RULE + RULE.replace("100", "200"))

    assert settings.operations == ("initial-credit-grant",)


@pytest.mark.parametrize("effect", ["", 'handlers = "handlers.py"'])
def test_a_reversal_names_a_grant_or_a_function_that_grants(tmp_path: Path, effect: str) -> None:
    (tmp_path / "handlers.py").touch()
    rule = RULE
    if effect:
        rule = re.sub("(?m)^(grant|customer).*$", "", RULE) + 'call = "grant"\n'
    reverse = (
        '[[rules]]\noperation = "take-back"\nsource = "stripe"\non = ["a"]\n'
        'reverse = { operation = "initial-credit-grant", subject = "id" }\n'
    )

    assert len(taken(tmp_path, effect + SOURCE + rule + reverse).rules) == 2


# Which rules an event has


@pytest.mark.parametrize(
    ("pattern", "event_type", "fits"),
    [
        ("invoice.paid", "invoice.paid", True),
        ("invoice.paid", "invoice.paid.more", False),
        ("invoice.paid", "invoiceXpaid", False),
        ("invoice.*", "invoice.payment.failed", True),
        ("invoice.*", "invoice.", True),
        ("invoice.*", "invoice", False),
        ("*", "", True),
        ("*", "a.b\nc", True),
        ("*.paid", "invoice.paid", True),
        ("a*a", "a", False),
        ("a*a", "aa", True),
        ("a*b*c", "aXbYc", True),
        ("a*b*c", "aXcYb", False),
        ("a*bc*c", "abc", False),
        ("[ab].?", "a.b", False),
    ],
)
def test_a_star_crosses_dots_and_nothing_else_is_special(
    tmp_path: Path, pattern: str, event_type: str, fits: bool
) -> None:
    settings = taken(tmp_path, SOURCE + RULE.replace("invoice.paid", pattern))

    assert settings.rules[0].matches("stripe", event_type) is fits
    assert (settings.rules_for("stripe", event_type) == settings.rules) is fits


def test_link_rules_come_first_and_then_the_order_of_the_file(whole: Path) -> None:
    text = WHOLE.replace('"checkout.session.completed"', '"invoice.paid"')
    first, rest = text.split("[[rules]]", 1)[0], text.split("[[rules]]")[1:]
    reordered = first + "".join(f"[[rules]]{rule}" for rule in [*rest[1:], rest[0]])

    settings = load(write(whole, reordered), environment={})

    names = [rule.operation for rule in settings.rules_for("stripe", "invoice.paid")]
    assert names == ["link-customer", "initial-credit-grant", "plan-credit-grant", "welcome"]


def test_rules_are_those_of_the_source(whole: Path) -> None:
    settings = load(whole / "receiver.toml", environment={})

    assert [r.operation for r in settings.rules_for("feedback", "invoice.paid")] == ["welcome"]
    assert settings.rules_for("nobody", "invoice.paid") == ()


def test_what_is_remembered_of_types_is_bounded(tmp_path: Path) -> None:
    settings = taken(tmp_path, SOURCE + RULE)

    for i in range(3 * RULES_CACHED_MAX):
        settings.rules_for("stripe", f"type.{i}")
        settings.rules_for("stripe", "x" * 1_000 + str(i))
        settings.rules_for(f"nobody-{i}", "a")

    assert 0 < len(settings._rules_for) <= RULES_CACHED_MAX
    assert all(source == "stripe" and len(name) < 1_000 for source, name in settings._rules_for)
    assert settings.rules_for("stripe", "invoice.paid") == settings.rules


# What is refused


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    problems = refused(
        tmp_path,
        'databse = "x"\n[server]\nlisten = 5\n[sources.stripe]\nscheme = "strip"\n'
        '[[rules]]\noperation = "x"\nsource = "nobody"\non = ["a"]\n'
        'customer = "c"\ngrant = { unit = "credits", amount = "5" }\n',
    )

    assert [problem.partition(":")[0] for problem in problems] == [
        "databse",
        "server.listen",
        "sources.stripe.scheme",
        "rules[0].source",
        "rules[0].grant.amount",
    ]


def test_a_problem_names_its_key_path_and_the_kinds(tmp_path: Path) -> None:
    text = SOURCE + RULE + RULE + RULE.replace("amount = 100", 'amount = "100"')

    assert refused(tmp_path, text) == [
        "rules[2].grant.amount: expected an integer, got a string",
    ]


def test_a_missing_secret_says_what_where_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / ".env").touch()
    path = write(tmp_path, 'env_file = ".env"' + SOURCE)

    with pytest.raises(ConfigError) as caught:
        load(path, environment={})

    assert caught.value.problems == [
        "sources.stripe.secrets[0]: environment variable STRIPE_WEBHOOK_SECRET is not set "
        "(set it, or put it in .env)"
    ]


def without(line: str, text: str = RULE) -> str:
    """The text without the line that begins so."""
    changed = re.sub(f"(?m)^{line}.*$", "", text)
    assert changed != text
    return SOURCE + changed


def source(more: str, text: str = SOURCE) -> str:
    return text + more


def rule(more: str, *, effect: bool = False) -> str:
    """A rule with another line; that is its effect, or stands beside a grant."""
    return (without("grant") if effect else SOURCE + RULE) + more


def server(more: str) -> str:
    return f"[server]\n{more}\n{SOURCE}"


def unsigned(more: str) -> str:
    text = RULE.replace('"stripe"', '"github"').replace('subject = "data.object.id"\n', "")
    return GITHUB + text + more


BAD: list[tuple[str, str]] = [
    # keys
    ('databse = "x"\n' + SOURCE, "databse: unknown key (did you mean database?)"),
    ('"a b" = 1\n' + SOURCE, '"a b": unknown key (there are: database, handlers, env_file'),
    (server("admni = 1"), "server.admni: unknown key (did you mean admin?)"),
    (source("secret = 1"), "sources.stripe.secret: unknown key (did you mean secrets?)"),
    (source("api = {}"), "sources.stripe.api: unknown key"),
    (source("retention = {}"), "sources.stripe.retention: unknown key"),
    (rule("send = []"), "rules[0].send: unknown key"),
    (rule("project = {}"), "rules[0].project: unknown key"),
    (SOURCE + "[worker]\n", "worker: unknown key"),
    (SOURCE + "[destinations.a]\n", "destinations: unknown key"),
    # top
    ("database = 5" + SOURCE, "database: expected a string, got an integer"),
    ('database = ""' + SOURCE, "database: is empty or has a control character"),
    ('handlers = "no.py"' + SOURCE, "handlers: {}/no.py: no such file for this user (create it"),
    ('env_file = "no.env"' + SOURCE, "env_file: {}/no.env: no such file (create it, or"),
    ('public_url = "example.com"' + SOURCE, "public_url: is not the address of a web server"),
    ('public_url = "https://[x"' + SOURCE, "public_url: is not the address of a web server"),
    ('public_url = "https://a:b"' + SOURCE, "public_url: is not the address of a web server"),
    ('public_url = "https://a/?b"' + SOURCE, "public_url: may not have a user, a query"),
    ('public_url = "https://a:b@c"' + SOURCE, "public_url: may not have a user, a query"),
    ("sources = 5", "sources: expected a table, got an integer"),
    ("rules = {}" + SOURCE, "rules: expected a list, got a table"),
    ("rules = [1]" + SOURCE, "rules[0]: expected a table, got an integer; write [[rules]]"),
    # server
    ("server = 1" + SOURCE, "server: expected a table, got an integer"),
    (server('listen = "8080"'), "server.listen: is not an address with a port; write 127.0.0.1"),
    (server('listen = ":8080"'), "server.listen: is not an address with a port; write"),
    (server('listen = "127.0.0.1:http"'), "server.listen: has a port that is not 0 to 65535"),
    (server('listen = "127.0.0.1:65536"'), "server.listen: has a port that is not 0 to 65535"),
    (server('listen = "::1:80"'), "server.listen: an IPv6 address stands in brackets"),
    (server('listen = "a b:80"'), "server.listen: has no address before its port"),
    (server('listen = "unix:"'), "server.listen: names no socket"),
    (server(f'listen = "unix:/{"x" * 107}"'), "is longer than 107 bytes"),
    (server('listen = "0.0.0.0:80"'), "server.listen: 0.0.0.0:80 can be reached without TLS; "),
    (server('listen = "example.com:80"'), "or set proxy_terminates_tls = true if a proxy"),
    (server('listen = "[::]:80"'), "server.listen: [::]:80 can be reached without TLS"),
    (server('admin = "127.0.0.1:8080"'), "server.admin: 127.0.0.1:8080 is where listen is, too"),
    (server('listen = "unix:/a"\nadmin = "unix:/a"'), "server.admin: unix:/a is where listen is"),
    (
        server('listen = "0.0.0.0:8081"\nproxy_terminates_tls = true'),
        "server.admin: 127.0.0.1:8081 is where listen is, too",
    ),
    (server('trusted_proxies = "10.0.0.1"'), "server.trusted_proxies: expected a list, got a str"),
    (server('trusted_proxies = ["proxy"]'), "server.trusted_proxies: 'proxy' is no address or"),
    (server('trusted_proxies = ["10.0.0.1/8"]'), "is an address within a network; write 10.0.0.0/"),
    (server("tls = {}"), "server.tls.certificate: is missing; name the file"),
    (server('tls = { certificate = "c" }'), "server.tls.key: is missing; name the file"),
    (server('tls = { certificate = "c", key = "k" }'), "server.tls.key: {}/k: no such file"),
    (server("proxy_terminates_tls = 1"), "proxy_terminates_tls: expected true or false, got an in"),
    (server("body_bytes_max = 1023"), "server.body_bytes_max: expected 1024 to 67108864"),
    (server("body_bytes_max = 67108865"), "server.body_bytes_max: expected 1024 to 67108864"),
    (server("body_bytes_max = true"), "body_bytes_max: expected an integer, got true or false"),
    (server("pending_max = 0"), "server.pending_max: expected 1 to 100000"),
    (server("pending_max = 1.5"), "server.pending_max: expected an integer, got a float"),
    # sources
    ("[sources]\nstripe = 1", "sources.stripe: expected a table, got an integer"),
    ("[sources.Stripe]\nscheme = 'stripe'", "sources.Stripe: expected a name of at most 100 char"),
    (f"[sources.{'a' * 101}]\nscheme = 'stripe'", "expected a name of at most 100 characters"),
    ("[sources.'../x']\nscheme = 'stripe'", 'sources."../x": expected a name'),
    ("[sources.app]\nscheme = 'stripe'", "sources.app.identity: 'app' stands for"),
    (source('identity = "app"'), "sources.stripe.identity: 'app' stands for"),
    (source('identity = "operator"'), "sources.stripe.identity: 'operator' stands for"),
    (source('identity = "A b"'), "sources.stripe.identity: expected a name"),
    ("[sources.stripe]", "sources.stripe.scheme: is missing; name the sender (stripe, "),
    ("[sources.stripe]\nscheme = 1", "sources.stripe.scheme: expected a preset's name or a table"),
    ("[sources.stripe]\nscheme = 'strip'", "sources.stripe.scheme: no preset is called 'strip'"),
    ("[sources.stripe]\nscheme = 'strip'", "did you mean stripe?"),
    ("[sources.x]\nscheme = {}", "sources.x.scheme.algo: is missing"),
    ("[sources.x]\nscheme = { alg = 1 }", "sources.x.scheme.alg: is not a known key"),
    (source("tolerance_s = 0"), "tolerance_s: expected more than 0 and at most 86400 seconds"),
    (source("tolerance_s = 86401"), "tolerance_s: expected more than 0 and at most 86400 seconds"),
    (source("tolerance_s = nan"), "tolerance_s: expected more than 0 and at most 86400 seconds"),
    (source("tolerance_s = true"), "tolerance_s: expected a number of seconds, got true or false"),
    (source('livemode = "yes"', SOURCE.replace("livemode", "#")), "livemode: expected true or fal"),
    (source("account = 5"), "sources.stripe.account: expected a string, got an integer"),
    (source('account = " "'), "sources.stripe.account: is empty or has a control character"),
    (source(f'account = "{"x" * 501}"'), "account: is longer than 500 characters; shorten it"),
    (source('volatile = "a"'), "sources.stripe.volatile: expected a list, got a string"),
    (source('volatile = ["a..b"]'), "sources.stripe.volatile: 'a..b' is not a dotted path"),
    (source("gzip = 1"), "sources.stripe.gzip: expected true or false, got an integer"),
    (source('allow_ips = ["x"]'), "sources.stripe.allow_ips: 'x' is no address or network; write"),
    (source('public_url = "x"'), "sources.stripe.public_url: is not the address of a web server"),
    (source('mode = "queued"'), "mode: queued needs the worker, which this version does not have"),
    (source('mode = "async"'), 'sources.stripe.mode: expected "sync" or "queued", got \'async\''),
    # rules
    (without("operation"), "rules[0].operation: is missing; name the business change"),
    (without("source"), "rules[0].source: is missing; name a source"),
    (without("on"), "rules[0].on: is missing; list the event types"),
    (without("grant"), "rules[0]: has no effect; add one of grant, reverse, link, record, sql, c"),
    (rule('sql = ["select 1"]'), "rules[0]: has grant and sql; keep one, and write a rule"),
    (SOURCE + RULE.replace('"initial-credit-grant"', '"Grant it"'), "operation: expected a name"),
    (SOURCE + RULE.replace('"stripe"', '"strpe"'), "no source 'strpe' (did you mean stripe?)"),
    (SOURCE + RULE.replace('"stripe"', '["stripe", "x"]'), "there is no source 'x' (there are: st"),
    (SOURCE + RULE.replace('"stripe"', "[]"), "rules[0].source: is empty; name a source"),
    (SOURCE + RULE.replace('"stripe"', "5"), "rules[0].source: expected a list, got an integer"),
    (SOURCE + RULE.replace('["invoice.paid"]', "[]"), "rules[0].on: is empty; list the event ty"),
    (SOURCE + RULE.replace('["invoice.paid"]', '"a"'), "rules[0].on: expected a list, got a str"),
    (SOURCE + RULE.replace('["invoice.paid"]', "[1]"), "rules[0].on: expected a list of strings"),
    (
        SOURCE + RULE.replace('["invoice.paid"]', '["a", "b c"]'),
        "rules[0].on[1]: expected an event",
    ),
    (SOURCE + RULE.replace("invoice.paid", "x" * 201), "on[0]: expected an event type of at most"),
    (rule("when = 1"), "rules[0].when: expected a table, got an integer"),
    (rule("when = {}"), "rules[0].when: is empty; write {"),
    (rule('when = { "a.b" = { gte = 1 } }'), "rules[0].when.\"a.b\": 'gte' is not an operator; "),
    (rule('when = { "a.b" = { gte = 1 } }'), "(did you mean ge?)"),
    (rule('expect = { "a[" = 1 }'), "rules[0].expect.\"a[\": 'a[' is not a JMESPath (see column"),
    (rule("expect = { a = { gt = 2024-01-01 } }"), "expect.a: gt compares with a number or a te"),
    (
        without("(grant|customer)") + "sql = ['select {_workspce}']",
        "rules[0].sql[0]: _workspce is none of our names (did you mean _workspace?)",
    ),
    (
        without("(grant|customer)") + "record = { kind = 'a', data = ['{_event.tipe}'] }",
        "rules[0].record.data: _event has no tipe (did you mean type?)",
    ),
    (rule("when = { _workspace = 1 }"), "rules[0].when: _workspace is not known here yet"),
    (rule("expect = { _grant = 1 }"), "rules[0].expect: _grant is not known here; take the value"),
    (SOURCE + RULE.replace("data.object.id", "a["), "rules[0].subject: 'a[' is not a JMESPath"),
    (SOURCE + RULE.replace('"data.object.id"', "5"), "subject: expected a path or a list of paths"),
    (SOURCE + RULE.replace('"data.object.id"', "[1]"), "subject: expected a path or a list of pat"),
    (SOURCE + RULE.replace('"data.object.id"', "[]"), "rules[0].subject: needs at least one path"),
    (SOURCE + RULE.replace("data.object.customer", "_workspace"), "_workspace is not known here"),
    # effects
    (without("customer"), "rules[0].customer: is missing; a grant needs the path of the sender"),
    (rule("grant = 5", effect=True), "rules[0].grant: expected a table, got an integer"),
    (rule("grant = {}", effect=True), "rules[0].grant.unit: is missing; name what is granted"),
    (rule("grant = {}", effect=True), "rules[0].grant.amount: is missing; write a number, or by"),
    (rule("grant.unit = 'A B'", effect=True), "rules[0].grant.unit: expected a name"),
    (rule("grant.amount = 0", effect=True), "rules[0].grant.amount: expected 1 to 1000000000000"),
    (rule(f"grant.amount = {10**15 + 1}", effect=True), "grant.amount: expected 1 to 1000000000"),
    (rule("grant.amount = true", effect=True), "grant.amount: expected an integer, got true or"),
    (rule("grant.by = 'a'", effect=True), "rules[0].grant.amounts: is missing; by and amounts go"),
    (rule("grant.amounts.a = 1", effect=True), "rules[0].grant.by: is missing; by and amounts go"),
    (rule("grant.amounts = {}", effect=True), "rules[0].grant.amounts: is empty; write one"),
    (rule("grant.amounts.'a b' = -1", effect=True), 'rules[0].grant.amounts."a b": expected 1 to'),
    (
        rule("grant = { unit = 'a', amount = 1, by = 'a', amounts = { a = 1 } }", effect=True),
        "rules[0].grant.amount: stands beside by or amounts; keep amount, or",
    ),
    (rule("reverse = {}", effect=True), "rules[0].reverse.operation: is missing; name the oper"),
    (rule("reverse = {}", effect=True), "rules[0].reverse.subject: is missing; name the path"),
    (
        rule("reverse = { operation = 'x', subject = 'a' }", effect=True),
        "rules[0].reverse.operation: no rule of stripe grants x (there are: none)",
    ),
    (
        SOURCE
        + RULE
        + "[[rules]]\noperation = 'b'\nsource = 'stripe'\non = ['a']\n"
        + "reverse = { operation = 'initial-credit-grnt', subject = 'a' }",
        "rules[1].reverse.operation: no rule of stripe grants initial-credit-grnt (did you mean",
    ),
    (
        SOURCE
        + GITHUB
        + RULE
        + "[[rules]]\noperation = 'b'\nsource = 'github'\non = ['a']\n"
        + "reverse = { operation = 'initial-credit-grant', subject = 'a' }",
        "rules[1].reverse.operation: no rule of github grants initial-credit-grant",
    ),
    (rule("link = {}", effect=True), "rules[0].link.customer: is missing; name the path"),
    (rule("link = {}", effect=True), "rules[0].link.workspace: is missing; name the path"),
    (rule("link = {}", effect=True), "rules[0].customer: would wait for the link that this rule"),
    (rule("record = {}", effect=True), "rules[0].record.kind: is missing; name what is recorded"),
    (rule("record = {}", effect=True), "rules[0].record.data: is missing; write what is kept"),
    (rule("record = { kind = 'a', data = '{' }", effect=True), "record.data: has a { without its"),
    (
        rule("record = { kind = 'a', data = 2024-01-01 }", effect=True),
        "rules[0].record.data: holds something that JSON has no word for (write a date as text",
    ),
    (
        rule("record = { kind = 'a', data = '{_grant.amount}' }", effect=True),
        "rules[0].record.data: _grant is not known here; take the value from the event",
    ),
    (
        without("(grant|customer)") + "record = { kind = 'a', data = ['{_workspace}'] }",
        "rules[0].record.data: _workspace needs a customer; add the path of the customer id",
    ),
    (
        without("(grant|customer)") + "sql = ['select 1', 'select {_workspace}']",
        "rules[0].sql[1]: _workspace needs a customer; add the path of the customer id",
    ),
    (rule("sql = 'select 1'", effect=True), "rules[0].sql: expected a list, got a string"),
    (rule("sql = []", effect=True), "rules[0].sql: expected 1 to 20 statements; write a list"),
    (rule(f"sql = {['select 1'] * 21}", effect=True), "rules[0].sql: expected 1 to 20 statements"),
    (rule("sql = ['a', \"'{b}'\"]", effect=True), "rules[0].sql[1]: has a {...} within quotes"),
    (rule("call = 'f'", effect=True), "rules[0].call: needs a file of functions; set handlers ="),
    (rule("call = 'f()'", effect=True), "rules[0].call: is not a function's name; write that of"),
    # tables together
    (
        SOURCE + GITHUB.replace("scheme", 'identity = "stripe"\nscheme'),
        "sources.github.identity: stripe is that of sources.stripe, which has another scheme",
    ),
    (
        SOURCE + RULE + RULE.replace("grant = {", "sql = ['select 1'] #"),
        "rules[1].operation: initial-credit-grant is also that of rules[0], which has another eff",
    ),
    (unsigned('subject = "_event.id"'), "rules[0].subject: takes what github sends in headers "),
    (unsigned('subject = ["a", "_event.type"]'), "rules[0].subject: takes what github sends in"),
    (unsigned('subject = "_event.account"'), "name a path in the body, or leave subject out"),
    (unsigned('subject = "to_string(@)"'), "rules[0].subject: takes what github sends in headers"),
    (unsigned("subject = \"join('', [_event.id])\""), "rules[0].subject: takes what github sends"),
    (
        GITHUB
        + "[[rules]]\noperation = 'b'\nsource = 'github'\non = ['a']\n"
        + "reverse = { operation = 'a', subject = '_event.id' }",
        "rules[0].reverse.subject: takes what github sends in headers that it does not sign",
    ),
]


@pytest.mark.parametrize(("text", "problem"), BAD, ids=[problem[:60] for _, problem in BAD])
def test_it_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    problems = refused(tmp_path, text)

    assert any(problem.replace("{}/", f"{tmp_path}/") in one for one in problems), problems


def secrets(item: str, scheme: str = "stripe") -> str:
    return f'[sources.a]\nscheme = "{scheme}"\nsecrets = [{item}]\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (secrets(f'"{SECRET}"'), "secrets[0]: is not a reference: write env:NAME, file:/path or"),
        (secrets(f'"v1,{SECRET}"'), "remove the leading 'v1,' when you store it"),
        (secrets(f'"env:{SECRET}"'), "secrets[0]: has the secret itself behind env:"),
        (secrets(f'"env:A", "{SECRET}"'), "sources.a.secrets[1]: is not a reference"),
        (secrets(f'{{ secret = "{SECRET}" }}'), "sources.a.secrets[0].secret: is not a reference"),
        (secrets("5"), "secrets[0]: expected a reference or a table with one, got an integer"),
        (secrets("{}"), "sources.a.secrets[0].secret: is missing; write env:NAME"),
        (secrets('{ secret = "env:A", acount = "x" }'), "secrets[0].acount: unknown key (did you"),
        (secrets('{ secret = "env:A", livemode = 1 }'), "secrets[0].livemode: expected true or"),
        (secrets('{ secret = "env:A", account = 1 }'), "secrets[0].account: expected a string"),
        (secrets('{ secret = "env:A", name = "A b" }'), "secrets[0].name: expected a name"),
        (secrets(", ".join(['"env:A"'] * 21)), "sources.a.secrets: has more than 20; remove"),
        (secrets('"env:EMPTY"'), "secrets[0]: env:EMPTY is empty (store the secret there)"),
        (secrets('"file:none"'), "none: no such file (create it, or correct the path)"),
        (secrets('"file:."'), "is not a regular file (name a file)"),
        (secrets('"credential:a"'), "credential a: $CREDENTIALS_DIRECTORY is not set (start it"),
        (secrets('"env:V1"'), "secrets[0]: env:V1 begins with v1,whsec_; remove the leading 'v1,'"),
        (secrets('"env:V1"', "github"), "env:V1 begins with v1,whsec_; remove the leading 'v1,'"),
        (secrets('{ secret = "env:V1", name = "a" }', "github"), "remove the leading 'v1,'"),
        (secrets('"env:BAD64"', "standard-webhooks"), "secrets[0]: env:BAD64 must be base64"),
        (secrets('"env:BADKEY"', "standard-webhooks"), "secrets[0]: env:BADKEY must"),
    ],
)
def test_a_bad_secret_is_refused_without_being_shown(
    tmp_path: Path, text: str, problem: str
) -> None:
    problems = refused(
        tmp_path,
        text,
        A=SECRET,
        EMPTY=" ",
        V1=f"v1,{SECRET}",
        BAD64="whsec_bm90IGEgcmVhbCBzZWNyZXQ!",
        BADKEY="whpk_bm90IGEgcmVhbCBzZWNyZXQ=",
    )

    assert any(problem in one for one in problems), problems
    assert "bm90IGEgcmVhbCBzZWNyZXQ" not in "".join(problems)


@pytest.mark.parametrize("value", [SECRET, "whsec_" + "QUJD" * 8])
def test_a_secret_of_standard_webhooks_that_decodes_is_taken(tmp_path: Path, value: str) -> None:
    settings = taken(tmp_path, secrets('"env:A"', "standard-webhooks"), A=value)

    assert settings.warnings == ()


WARNED = [
    ("", "sources: there is none, so nothing is received; add [sources.NAME]"),
    (
        '[sources.a]\nscheme = "github"',
        "sources.a.secrets: is empty, so every delivery is rejected; add",
    ),
    (secrets("", "github"), "sources.a.secrets: is empty, so every delivery is rejected"),
    (
        SOURCE.replace("livemode = true", ""),
        "sources.stripe.livemode: is not set, so test events",
    ),
    (GITHUB + "livemode = true", "sources.github.livemode: has no effect, as github events have"),
    (secrets('"env:SPACED"'), "secrets[0]: env:SPACED: white space around the secret is left out"),
    (secrets('"env:PLAIN"'), "secrets[0]: env:PLAIN does not begin with whsec_, as Stripe's"),
    (server('admin = "0.0.0.0:8081"'), "server.admin: 0.0.0.0:8081 can be reached from other"),
    (server('trusted_proxies = ["0.0.0.0/0"]'), "server.trusted_proxies: 0.0.0.0/0 is everyone"),
    (source('allow_ips = ["10.0.0.1"]'), "sources.stripe.allow_ips: would be compared with the"),
    (
        '[sources.a]\nsecrets = ["env:PLAIN"]\nscheme = { sig = "header:X", algo = "sha256", '
        'enc = "hex", signed = "{url}{body}", event_id = "json:/id" }',
        "sources.a.public_url: is not set, but the sender signs its URL; set it",
    ),
]


@pytest.mark.parametrize(("text", "warning"), WARNED, ids=[warning[:50] for _, warning in WARNED])
def test_it_is_warned_of_and_taken(tmp_path: Path, text: str, warning: str) -> None:
    settings = taken(tmp_path, text, SPACED=f" {SECRET}", PLAIN="hunter2")

    assert any(warning in one for one in settings.warnings), settings.warnings
    assert "hunter2" not in "".join(settings.warnings)


def test_a_rule_of_an_unsigned_source_may_leave_its_subject_out(tmp_path: Path) -> None:
    assert taken(tmp_path, unsigned("")).rules[0].subject is None


def test_a_rule_of_a_signed_source_may_use_the_id_of_the_event(tmp_path: Path) -> None:
    settings = taken(tmp_path, SOURCE + RULE.replace("data.object.id", "_event.id"))

    assert settings.rules[0].subject is not None


def test_the_workspace_is_known_to_a_record_with_a_customer(tmp_path: Path) -> None:
    text = rule("record = { kind = 'a', data = '{_workspace}' }", effect=True)

    assert isinstance(taken(tmp_path, text).rules[0].effect, Record)


def test_one_mistake_does_not_cause_others(tmp_path: Path) -> None:
    broken = RULE.replace("amount = 100", "amount = 0")
    reverse = (
        '[[rules]]\noperation = "b"\nsource = "stripe"\non = ["a"]\n'
        'reverse = { operation = "initial-credit-grant", subject = "id" }\n'
    )

    problems = refused(tmp_path, SOURCE + broken.replace('unit = "credits"', "unit = 5") + reverse)

    assert [problem.partition(": ")[0] for problem in problems] == [
        "rules[0].grant.unit",
        "rules[0].grant.amount",
    ]


# The file itself


def test_a_syntax_error_names_the_file_the_line_and_the_column(tmp_path: Path) -> None:
    (problem,) = refused(tmp_path, "database = 'a'\nserver =\n")

    assert problem == (
        f"{tmp_path}/receiver.toml: not TOML: Invalid value (at line 2, column 9); correct it there"
    )


@pytest.mark.parametrize(
    ("octets", "problem"),
    [
        (b"a = '\xff'", "not UTF-8 text (byte 5); save it as UTF-8"),
        (b"a = " + b"[" * 5_000, "not TOML: a number is too long, or tables are nested too deep"),
        (b"a = " + b"9" * 5_000, "not TOML: a number is too long, or tables are nested too deep"),
        (b"#" * (CONFIG_BYTES_MAX + 1), f"is larger than {CONFIG_BYTES_MAX} bytes"),
    ],
    ids=["encoding", "depth", "number", "size"],
)
def test_a_file_that_can_not_be_read_is_refused(
    tmp_path: Path, octets: bytes, problem: str
) -> None:
    (tmp_path / "receiver.toml").write_bytes(octets)

    with pytest.raises(ConfigError, match=re.escape(problem)) as caught:
        load(tmp_path / "receiver.toml")

    assert caught.value.problems[0].startswith(f"{tmp_path}/receiver.toml")


def test_a_missing_file_or_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "receiver.toml")
    with pytest.raises(ConfigError, match="is not a regular file"):
        load(tmp_path)


def test_a_byte_order_mark_and_windows_line_ends_are_taken(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    path.write_bytes(b"\xef\xbb\xbf" + (SOURCE + RULE).replace("\n", "\r\n").encode())

    assert len(load(path, environment=ENVIRONMENT).rules) == 1


# Anything at all

KEYS = sorted(set(re.findall(r"[a-z_]{2,}", WHOLE)) | {"send", "app", "A b", "", "gt", "matches"})
TEXTS = [*KEYS, "env:A", "file:x", "127.0.0.1:1", "{a", "a[", "sql {a}", "unix:", "\0", "v1,whsec_"]
scalars = (
    st.booleans()
    | st.integers()
    | st.just(10**4000)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(TEXTS)
    | st.just(datetime.date(2024, 1, 1))
    | st.just(datetime.time(1, 2))
    | st.just(datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC))
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=20,
)


def places(node: object) -> Iterator[Callable[[object], None]]:
    """A setter for every place in nested tables and lists."""
    children: Iterator[tuple[Any, object]] = iter(())
    if isinstance(node, dict):
        children = iter(list(node.items()))
    elif isinstance(node, list):
        children = iter(list(enumerate(node)))
    for key, child in children:
        assert isinstance(node, dict | list)
        yield lambda new, node=node, key=key: node.__setitem__(key, new)  # type: ignore[misc]
        yield from places(child)


def check_outcome(document: dict[str, object]) -> None:
    try:
        build(document, Path("/nonexistent/receiver.toml"), environment={"A": SECRET})
    except ConfigError as error:
        problems = error.problems
    else:
        return
    assert problems
    for problem in problems:
        assert re.match(r"(?s)[^:]+.*: .+", problem), problem
        assert SECRET not in problem


@STEADY
@given(st.dictionaries(st.sampled_from(KEYS), values, max_size=6))
def test_any_structure_is_taken_or_refused(document: dict[str, object]) -> None:
    check_outcome(document)


@STEADY
@given(st.data())
def test_a_good_structure_with_anything_in_some_places_is_taken_or_refused(
    data: st.DataObject,
) -> None:
    document = deepcopy(tomllib.loads(WHOLE))
    for _ in range(data.draw(st.integers(1, 3))):
        found = list(places(document))
        found[data.draw(st.integers(0, len(found) - 1))](data.draw(values))

    check_outcome(document)


@pytest.mark.parametrize("key", ["server", "sources", "rules"])
def test_a_deeply_nested_structure_is_refused(key: str) -> None:
    deep: dict[str, object] = {"a": 1}
    for _ in range(100_000):
        deep = {"a": deep}
    document = tomllib.loads(WHOLE)
    document["sources"]["stripe"]["scheme"] = deep
    document["rules"][4]["record"]["data"] = deep
    document["rules"][1]["when"] = deep

    check_outcome(document)
    check_outcome(document | {key: deep})


def test_an_integer_too_long_to_write_out_is_refused(tmp_path: Path) -> None:
    huge = "0x" + "f" * 5_000
    text = SOURCE.replace("livemode = true", f"tolerance_s = {huge}") + RULE
    text += f"when = {{ a = {huge}, b = {{ gt = {huge} }} }}"

    problems = refused(tmp_path, text.replace("100", huge))

    assert [problem.partition(": ")[0] for problem in problems] == [
        "sources.stripe.tolerance_s",
        "rules[0].grant.amount",
    ]


@STEADY
@given(st.binary(max_size=200))
def test_any_file_is_taken_or_refused(
    tmp_path_factory: pytest.TempPathFactory, octets: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(octets)

    try:
        load(path, environment={})
    except ConfigError as error:
        problems = error.problems
    else:
        return
    assert all(problems)


def test_structures_are_msgspec_structs_that_compare(tmp_path: Path) -> None:
    settings = taken(tmp_path, SOURCE)

    changed = msgspec.structs.replace(settings.server, pending_max=1)

    assert changed != settings.server
    assert settings.server == taken(tmp_path, SOURCE).server
