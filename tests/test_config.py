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

from receiver import tables
from receiver.config import (
    RULES_CACHED_MAX,
    Address,
    Call,
    ConfigError,
    Grant,
    Link,
    Record,
    Reverse,
    Send,
    Settings,
    Sql,
    Worker,
    build,
    load,
)
from receiver.destinations import Command, Email, Http, Policy
from receiver.place import CONFIG_BYTES_MAX
from receiver.select import Scope

# The first text of a fresh checkout builds tables of Unicode, and machines differ in speed.
STEADY = trials(deadline=None, suppress_health_check=[HealthCheck.too_slow])

SECRET = "whsec_bm90IGEgcmVhbCBzZWNyZXQ="
KEY = "whsec_" + "QUJD" * 8
SMTP = "smtp://mailer:hunter2@mail.example.com:587"
SLACK = "https://hooks.slack.com/services/T0/B0/hunter2"
ENVIRONMENT = {
    "STRIPE_WEBHOOK_SECRET": SECRET,
    "SMTP_URL": SMTP,
    "SLACK_WEBHOOK_URL": SLACK,
    "APP_WEBHOOK_SECRET": KEY,
}

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
WHOLE = '''
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
send = [{ to = "confirmation" }, { to = "app" }]

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
send = [{ to = "team", name = "announce" }, { to = "team", name = "second" }]

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

[worker]
run = "separate"
threads = 4
attempts_max = 20
age_max_s = 3600
backoff_first_s = 2
backoff_max_s = 60

[destinations.confirmation]
kind = "email"
smtp = "env:SMTP_URL"
from = "Billing <billing@example.com>"
to = "{data.object.customer_email}"
subject = "Invoice {data.object.number}"
text = """
{_grant.amount} {_grant.unit} were added
to your workspace.
"""
timeout_s = 20
ambiguous = "review"
attempts_max = 5

[destinations.team]
kind = "http"
url = "env:SLACK_WEBHOOK_URL"
method = "PUT"
json = { text = "New feedback: {feedback.text}" }
headers = { Title = "{_message.operation}" }

[destinations.app]
kind = "http"
url = "http://127.0.0.1:3000/internal/webhooks"
secret = "env:APP_WEBHOOK_SECRET"
idempotent_for_s = 86400
timeout_s = 2.5

[destinations.deploy]
kind = "command"
argv = ["/bin/sh", "{repository.full_name}", "a {{b}}"]
timeout_s = 600
attempts_max = 3
'''


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
    lines = (f"{name}={value}\n" for name, value in ENVIRONMENT.items())
    (tmp_path / ".env").write_text(f"VERIFY_TOKEN=token\n{''.join(lines)}")
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


def test_the_worker_is_parsed(whole: Path) -> None:
    worker = load(whole / "receiver.toml", environment={}).worker

    assert worker == Worker("separate", 4, 20, 3_600, 2, 60)


def test_a_worker_left_out_runs_inside_and_goes_on_for_three_days(tmp_path: Path) -> None:
    assert taken(tmp_path, SOURCE).worker == Worker("inside", 2, 200, 259_200, 5, 3_600)
    assert taken(tmp_path, "worker = {}" + SOURCE).worker == Worker()


def test_what_a_rule_sends_keeps_its_order_and_its_names(whole: Path) -> None:
    rules = {r.operation: r for r in load(whole / "receiver.toml", environment={}).rules}

    assert rules["initial-credit-grant"].send == (Send("confirmation"), Send("app"))
    assert rules["initial-alert"].send == (Send("team", "announce"), Send("team", "second"))
    assert rules["upgrade-plan"].send == ()


def test_an_email_destination_is_parsed(whole: Path) -> None:
    email = load(whole / "receiver.toml", environment={}).destinations["confirmation"]
    own: dict[str, object] = {"_grant": {"amount": 100, "unit": "credits"}}
    invoice = {"number": "A-1", "customer_email": "a@example.com"}
    scope = Scope({"data": {"object": invoice}}, own)

    assert isinstance(email, Email)
    assert (email.name, email.smtp) == ("confirmation", SMTP)
    assert email.from_ == "Billing <billing@example.com>"
    assert email.to.render(scope) == "a@example.com"
    assert email.subject.render(scope) == "Invoice A-1"
    assert email.text.render(scope) == "100 credits were added\nto your workspace.\n"
    assert email.timeout_s == 20
    assert email.policy == Policy("review", None, 5)


def test_an_http_destination_is_parsed(whole: Path) -> None:
    destinations = load(whole / "receiver.toml", environment={}).destinations
    own: dict[str, object] = {"_message": {"operation": "initial-alert"}}
    scope = Scope({"feedback": {"text": "hi"}}, own)

    team, app = destinations["team"], destinations["app"]

    assert isinstance(team, Http)
    assert (team.url, team.method, team.secret) == (SLACK, "PUT", None)
    assert team.json is not None
    assert team.json.render(scope) == {"text": "New feedback: hi"}
    assert {name: one.render(scope) for name, one in team.headers.items()} == {
        "Title": "initial-alert"
    }
    assert (team.timeout_s, team.policy) == (10, Policy())
    assert isinstance(app, Http)
    assert (app.url, app.method) == ("http://127.0.0.1:3000/internal/webhooks", "POST")
    assert (app.json, app.headers, app.timeout_s) == (None, {}, 2.5)
    assert app.secret == b"ABC" * 8


def test_a_command_destination_is_parsed(whole: Path) -> None:
    deploy = load(whole / "receiver.toml", environment={}).destinations["deploy"]
    scope = Scope({"repository": {"full_name": "a/b"}}, {})

    assert isinstance(deploy, Command)
    assert [one.render(scope) for one in deploy.argv] == ["/bin/sh", "a/b", "a {b}"]
    assert (deploy.timeout_s, deploy.policy) == (600, Policy(attempts_max=3))


@pytest.mark.parametrize(
    ("lines", "policy"),
    [
        ("", Policy("retry")),
        ('ambiguous = "retry"', Policy("retry")),
        ('ambiguous = "review"', Policy("review")),
        ("idempotent_for_s = 60", Policy("retry", 60)),
        ('idempotent_for_s = 60\nambiguous = "review"', Policy("review", 60)),
    ],
)
def test_an_unknown_outcome_is_retried_unless_the_destination_says_otherwise(
    tmp_path: Path, lines: str, policy: Policy
) -> None:
    assert taken(tmp_path, http(lines)).destinations["a"].policy == policy


def test_a_rule_may_only_send(tmp_path: Path) -> None:
    settings = taken(tmp_path, sending())

    assert settings.warnings == ()
    assert settings.rules[0].effect is None
    assert settings.rules[0].send == (Send("a"),)


def test_a_queued_rule_may_prepare(tmp_path: Path) -> None:
    (tmp_path / "handlers.py").touch()

    settings = taken(tmp_path, preparing("queued"))

    assert settings.sources["stripe"].mode == "queued"
    assert settings.rules[0].prepare == "fetch"
    assert settings.rules[0].effect == Call("f")


def test_without_secrets_what_is_referenced_stays_empty_and_the_rest_is_there(
    tmp_path: Path,
) -> None:
    found = load(write(tmp_path, WHOLE), secrets=False, environment={}).destinations
    email, team, app = found["confirmation"], found["team"], found["app"]

    assert isinstance(email, Email)
    assert isinstance(team, Http)
    assert isinstance(app, Http)
    assert (email.smtp, team.url, app.secret) == ("", "", b"")
    assert app.url == "http://127.0.0.1:3000/internal/webhooks"


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


def test_a_database_that_is_a_link_is_the_file_that_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "a.db").symlink_to("disk/real.db")

    found = taken(tmp_path, 'database = "a.db"' + SOURCE)

    assert found.database == tmp_path / "disk" / "real.db"


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
    assert warning.endswith('(operation "initial-credit-grant")')
    assert one == ()


def test_settings_are_frozen(tmp_path: Path) -> None:
    settings = taken(tmp_path, SOURCE)

    with pytest.raises(AttributeError):
        settings.database = Path("/")  # type: ignore[misc]


def test_nothing_that_settings_print_holds_a_secret(whole: Path) -> None:
    settings = load(whole / "receiver.toml", environment={})

    assert SECRET not in repr(settings)
    assert SECRET not in repr(settings.sources["stripe"].contract.checks)
    assert "hunter2" not in repr(settings)
    assert "ABCABC" not in repr(settings)


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

    (problem,) = refused(tmp_path, text)

    assert problem.startswith("rules[2].grant.amount: expected an integer, got a string")


def test_a_problem_of_a_rule_names_its_operation(tmp_path: Path) -> None:
    wrong = RULE.replace("initial-", "other-").replace("amount = 100", 'amount = "100"')

    (problem,) = refused(tmp_path, SOURCE + RULE + wrong)

    assert problem.startswith("rules[1].grant.amount: ")
    assert problem.endswith(' (operation "other-credit-grant")')


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


def worker(more: str) -> str:
    return f"[worker]\n{more}\n{SOURCE}"


RULE_THAT_SENDS = """
[[rules]]
operation = "initial-credit-grant"
source = "stripe"
on = ["invoice.paid"]
send = [{ to = "a" }]
"""
HTTP = """
[destinations.a]
kind = "http"
url = "https://example.com/in"
"""
EMAIL = """
[destinations.a]
kind = "email"
smtp = "smtp://127.0.0.1:25"
from = "billing@example.com"
to = "team@example.com"
subject = "Invoice"
text = "Paid."
"""
COMMAND = """
[destinations.a]
kind = "command"
argv = ["/bin/sh"]
"""


def sending(send: str = 'send = [{ to = "a" }]') -> str:
    """A rule with this line and no effect, and the destination `a`."""
    return SOURCE + HTTP + RULE_THAT_SENDS.replace('send = [{ to = "a" }]', send)


def destination(table: str, more: str, without: str, values: dict[str, str]) -> str:
    """A destination that a rule sends to, with other values, another line, or without one."""
    lines = []
    for line in table.splitlines():
        key = line.partition(" = ")[0]
        if key != without:
            lines.append(f"{key} = {values[key]}" if key in values else line)
    return "\n".join([SOURCE, RULE_THAT_SENDS, *lines, more])


def http(more: str = "", *, url: str = "", without: str = "") -> str:
    return destination(HTTP, more, without, {"url": url} if url else {})


def email(more: str = "", *, without: str = "", sender: str = "", **texts: str) -> str:
    texts |= {"from": sender} if sender else {}
    return destination(EMAIL, more, without, {key: f'"{text}"' for key, text in texts.items()})


def command(more: str = "", *, argv: str = "", without: str = "") -> str:
    return destination(COMMAND, more, without, {"argv": argv} if argv else {})


def preparing(mode: str, more: str = "") -> str:
    return (
        f'handlers = "handlers.py"{SOURCE}mode = "{mode}"\n{GITHUB}'
        f'[[rules]]\noperation = "a"\nsource = ["stripe"{more}]\non = ["*"]\n'
        'prepare = "fetch"\ncall = "f"\n'
    )


def unsigned(more: str) -> str:
    text = RULE.replace('"stripe"', '"github"').replace('subject = "data.object.id"\n', "")
    return GITHUB + text + more


BAD: list[tuple[str, str]] = [
    # keys
    ('databse = "x"\n' + SOURCE, "databse: unknown key (did you mean database?)"),
    ('"a b" = 1\n' + SOURCE, '"a b": unknown key (known here: database, handlers, env_file'),
    (server("admni = 1"), "server.admni: unknown key (did you mean admin?)"),
    (source("secret = 1"), "sources.stripe.secret: unknown key (did you mean secrets?)"),
    (source("api = {}"), "sources.stripe.api.key: is missing"),
    (source('api = { key = "sk_live_1" }'), "sources.stripe.api.key"),
    (source('api = { key = "env:NOT_SET" }'), "sources.stripe.api.key: environment variable"),
    (source("retention = { days = 1 }"), "sources.stripe.retention.days: unknown key"),
    (source("retention = { payload_days = 0 }"), "sources.stripe.retention.payload_days"),
    (source("retention = { ignored = 1 }"), "sources.stripe.retention.ignored"),
    (rule("sned = []"), "rules[0].sned: unknown key (did you mean send?)"),
    (worker("thread = 2"), "worker.thread: unknown key (did you mean threads?)"),
    (http("jsn = {}"), "destinations.a.jsn: unknown key (did you mean json?)"),
    (http('argv = ["a"]'), "destinations.a.argv: unknown key (known here: kind, url, method, "),
    (email('url = "x"'), "destinations.a.url: unknown key (known here: kind, smtp, from, to, sub"),
    (email("idempotent_for_s = 5"), "destinations.a.idempotent_for_s: unknown key"),
    (command('secret = "env:A"'), "destinations.a.secret: unknown key (known here: kind, argv, "),
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
    ("[sources.stripe]", "sources.stripe.scheme: is missing; name the sender, as in "),
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
    (source('mode = "async"'), 'sources.stripe.mode: expected "sync" or "queued", got \'async\''),
    # rules
    (without("operation"), "rules[0].operation: is missing; name the business change"),
    (without("source"), "rules[0].source: is missing; name a source"),
    (without("on"), "rules[0].on: is missing; list the event types"),
    (without("grant"), "rules[0]: needs an effect or send; add one of grant, reverse, link, reco"),
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
    # what is sent
    (rule("send = []"), 'rules[0].send: expected 1 to 20 tables; write [{ to = "NAME" }]'),
    (rule('send = "a"'), "rules[0].send: expected a list, got a string"),
    (sending("send = ['a']"), "rules[0].send[0]: expected a table, got a string; write { to = "),
    (sending("send = [{}]"), "rules[0].send[0].to: is missing; name a destination"),
    (sending("send = [{ to = 5 }]"), "rules[0].send[0].to: expected a string, got an integer"),
    (sending('send = [{ to = "a", nme = "b" }]'), "rules[0].send[0].nme: unknown key (did you"),
    (sending('send = [{ to = "a", name = "" }]'), "rules[0].send[0].name: expected a name of"),
    (sending(f"send = {'[' + '{ to = `a` },' * 21 + ']'}".replace("`", '"')), "expected 1 to 20 t"),
    (sending('send = [{ to = "a" }, { to = "aa" }]'), "send[1].to: there is no destination 'aa' ("),
    (rule('send = [{ to = "b" }]'), "there is no destination 'b' (there are: none); add [destin"),
    (rule("prepare = 'f'"), "rules[0].prepare: hands its result to a function; add call, or"),
    (rule("prepare = 'f()'"), "rules[0].prepare: is not a function's name; write that of one"),
    (rule("prepare = 5"), "rules[0].prepare: expected a string, got an integer"),
    # worker
    ("worker = 5" + SOURCE, "worker: expected a table, got an integer"),
    (worker('run = "on"'), 'worker.run: expected "inside", "separate" or "off", got \'on\''),
    (worker("threads = 0"), "worker.threads: expected 1 to 32"),
    (worker("threads = 33"), "worker.threads: expected 1 to 32"),
    (worker("attempts_max = 0"), "worker.attempts_max: expected 1 to 10000"),
    (worker("attempts_max = 10001"), "worker.attempts_max: expected 1 to 10000"),
    (worker("age_max_s = 59"), "worker.age_max_s: expected 60 to 31536000"),
    (worker("age_max_s = 31536001"), "worker.age_max_s: expected 60 to 31536000"),
    (worker("backoff_first_s = 0"), "worker.backoff_first_s: expected 1 to 86400"),
    (worker("backoff_max_s = 86401"), "worker.backoff_max_s: expected 1 to 86400"),
    (worker("backoff_max_s = 4"), "worker.backoff_first_s: 5 is more than backoff_max_s, 4; low"),
    # destinations
    ("destinations = 5" + SOURCE, "destinations: expected a table, got an integer"),
    (SOURCE + "[destinations]\na = 5", "destinations.a: expected a table, got an integer"),
    (SOURCE + "[destinations.'A b']\nkind = 'http'", 'destinations."A b": expected a name of at'),
    (SOURCE + "[destinations.a]", 'destinations.a.kind: is missing; write "http", "email" or "c'),
    (
        SOURCE + '[destinations.a]\nkind = "slack"',
        'a.kind: expected "http", "email" or "command", got \'slack\'',
    ),
    (http(without="url"), "destinations.a.url: is missing; write https://example.com/path, or env"),
    (http(url="5"), "destinations.a.url: expected a string, got an integer"),
    (http(url='"example.com/in"'), "destinations.a.url: is not the address of a web server; write"),
    (http(url='"ftp://example.com"'), "destinations.a.url: is not the address of a web server"),
    (http(url='"https://"'), "destinations.a.url: is not the address of a web server"),
    (http(url='"https://a b.com/"'), "destinations.a.url: is not the address of a web server"),
    (http(url='"https://[x/"'), "destinations.a.url: is not the address of a web server"),
    (http(url='"https://a:70000/"'), "destinations.a.url: is not the address of a web server"),
    (http(url='"https://{host}/"'), "destinations.a.url: is not the address of a web server"),
    (http(url='"https://a.com/{id}"'), "destinations.a.url: can't take anything from the event"),
    (http(url='"https://a.com/#b"'), "destinations.a.url: may not have a fragment"),
    (http(url='"unix:/run/app.sock"'), "destinations.a.url: names a unix socket, which is not"),
    (http(url=f'"https://a.com/{"x" * 2_000}"'), "a.url: is longer than 2000 characters; shorten"),
    (http('method = "GET"'), 'destinations.a.method: expected "POST" or "PUT", got \'GET\''),
    (http("json = 5"), "destinations.a.json: expected a table, got an integer; write what is sent"),
    (http('json = { a = "{b" }'), "destinations.a.json: has a { without its }"),
    (http("json = { a = 2024-01-01 }"), "destinations.a.json: holds something that JSON has no"),
    (http("headers = []"), "destinations.a.headers: expected a table, got a list"),
    (http("headers = { a = 5 }"), "destinations.a.headers.a: expected a string, got an integer"),
    (http('headers = { a = "{b" }'), "destinations.a.headers.a: has a { without its }"),
    (http('headers = { a = "b\\r\\nc" }'), "destinations.a.headers.a: is empty or has a control"),
    (http('headers = { "a b" = "c" }'), 'a.headers."a b": is not the name of a header; write'),
    (
        http('headers = { Host = "c" }'),
        "destinations.a.headers.Host: is written by Receiver itself",
    ),
    (http('headers = { idempotency-key = "c" }'), "a.headers.idempotency-key: is written by Rece"),
    (http('headers = { X-A = "b", x-a = "c" }'), "destinations.a.headers.x-a: stands there twice"),
    (
        http(f"headers = {{ {', '.join(f'a{i} = `b`' for i in range(21))} }}".replace("`", '"')),
        "destinations.a.headers: has more than 20; remove some",
    ),
    (http("timeout_s = 0"), "a.timeout_s: expected more than 0 and at most 300 seconds"),
    (http("timeout_s = 301"), "a.timeout_s: expected more than 0 and at most 300 seconds"),
    (http("timeout_s = true"), "a.timeout_s: expected a number of seconds, got true or false"),
    (email("timeout_s = 301"), "a.timeout_s: expected more than 0 and at most 300 seconds"),
    (command("timeout_s = 3601"), "a.timeout_s: expected more than 0 and at most 3600 seconds"),
    (http('ambiguous = "maybe"'), 'a.ambiguous: expected "retry" or "review", got \'maybe\''),
    (http("idempotent_for_s = 0"), "destinations.a.idempotent_for_s: expected 1 to 31536000"),
    (
        http('idempotent_for_s = 5\nambiguous = "retry"'),
        "destinations.a.ambiguous: retry goes on for ever, idempotent_for_s only so long; leave",
    ),
    (http("attempts_max = 0"), "destinations.a.attempts_max: expected 1 to 10000"),
    (email(without="smtp"), "destinations.a.smtp: is missing; write env:NAME, file:/path or cred"),
    (email(without="from"), "destinations.a.from: is missing; write the address that mail comes"),
    (email(without="to"), "destinations.a.to: is missing; write an address, or {a.path} to one in"),
    (email(without="subject"), "destinations.a.subject: is missing; write the line that the mail"),
    (email(without="text"), "destinations.a.text: is missing; write what the mail says"),
    (email(smtp="mail.example.com:587"), "a.smtp: is not the address of a mail server; write smtp"),
    (email(smtp="https://example.com"), "destinations.a.smtp: is not the address of a mail server"),
    (email(smtp="smtp://user:a/b@example.com"), "destinations.a.smtp: is not the address of a ma"),
    (email(smtp="smtp://example.com/x"), "destinations.a.smtp: has something behind the host"),
    (email(smtp="smtp://example.com?x"), "destinations.a.smtp: has something behind the host"),
    (email(smtp="smtp://user@example.com"), "a.smtp: has a user or a password without the other"),
    (email(smtp="smtp://:b@example.com"), "a.smtp: has a user or a password without the other"),
    (email(smtp=f"smtp://{'x' * 2_000}"), "a.smtp: is longer than 2000 characters; shorten"),
    (email(sender="billing"), "destinations.a.from: is no mail address (write one, as in"),
    (email(sender="a@b.com, c@d.com"), "destinations.a.from: is no mail address (write one"),
    (email(sender="{data.email}"), "destinations.a.from: can't take anything from the event"),
    (email(sender="env:SENDER"), "destinations.a.from: is no mail address (write one"),
    (email(sender="a@b.com\\n"), "destinations.a.from: is empty or has a control character"),
    (email(sender=f"{'a' * 64}@{'b' * 63}.{'c.' * 70}com"), "a.from: is an address of more than"),
    (email(to="Ann <>"), "destinations.a.to: is no mail address"),
    (email(to="team"), "destinations.a.to: is no mail address (write one, as in ann@"),
    (email(to="{a"), "destinations.a.to: has a { without its }"),
    (email(to="env:TEAM"), "destinations.a.to: is no mail address (write one"),
    (email(subject="a\\nBcc: x@y.com"), "a.subject: is empty or has a control character"),
    (email(text=" \\n"), "destinations.a.text: is empty; write a text"),
    (email(subject="x" * 501), "destinations.a.subject: is longer than 500 characters; shorten"),
    (email(text="{a"), "destinations.a.text: has a { without its }"),
    (command(without="argv"), 'destinations.a.argv: is missing; write ["/path/to/program", "an'),
    (command(argv="'deploy'"), "destinations.a.argv: expected a list, got a string"),
    (command(argv="[]"), "destinations.a.argv: expected 1 to 100 texts, the program and its"),
    (command(argv=f"{['a'] * 101}"), "destinations.a.argv: expected 1 to 100 texts"),
    (command(argv="['a', 5]"), "destinations.a.argv: expected a list of strings, none of them"),
    (command(argv="['a', '{b']"), "destinations.a.argv[1]: has a { without its }"),
    (command(argv='["a", "b\\u0000"]'), "destinations.a.argv[1]: has a character that no program"),
    (command(argv="['/bin/{a}']"), "destinations.a.argv[0]: is the program, which no event may"),
    (command(argv="['{a}']"), "destinations.a.argv[0]: is the program, which no event may choose"),
    (command(argv="['./deploy']"), "a.argv[0]: is neither a program's name nor a path from / on"),
    (command(argv="['bin/deploy']"), "a.argv[0]: is neither a program's name nor a path from / on"),
    (command(argv="['deploy --now']"), "and each argument as an item of its own"),
    (command(argv="['/usr/bin/']"), "a.argv[0]: is neither a program's name nor a path from / on"),
    # tables together
    (
        worker('run = "off"') + 'mode = "queued"',
        'sources.stripe.mode: queued needs the worker, but worker.run is "off"; write "sync"',
    ),
    (
        preparing("sync"),
        "rules[0].prepare: runs before the event is applied, and stripe applies its events at on",
    ),
    (
        preparing("queued", more=', "github"'),
        'and github applies its events at once; write mode = "queued" in [sources.github]',
    ),
    (
        sending('send = [{ to = "a" }, { to = "a" }]'),
        "rules[0].send: initial-credit-grant sends to a already, in rules[0]; a second message",
    ),
    (
        sending('send = [{ to = "a", name = "b" }]')
        + RULE_THAT_SENDS.replace("}", ', name = "b" }'),
        "rules[1].send: initial-credit-grant sends to a under the name b already, in rules[0]; a",
    ),
    (
        sending("link = { customer = 'a', workspace = 'b' }\nsend = [{ to = 'a' }]"),
        "rules[0].send: can't stand beside link; write a rule with send of its own",
    ),
    (
        SOURCE + RULE + RULE_THAT_SENDS + HTTP,
        "rules[1].operation: initial-credit-grant is also that of rules[0], which has another eff",
    ),
    (
        sending()
        + "[[rules]]\noperation = 'b'\nsource = 'stripe'\non = ['a']\n"
        + "reverse = { operation = 'initial-credit-grant', subject = 'a' }",
        "rules[1].reverse.operation: no rule of stripe grants initial-credit-grant (there are: no",
    ),
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


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (http('secret = "hunter2"'), "destinations.a.secret: is not a reference: write env:NAME"),
        (http(f'secret = "{KEY}"'), "destinations.a.secret: is not a reference: write env:NAME"),
        (http(f'secret = "env:{KEY}"'), "destinations.a.secret: has the secret itself behind env:"),
        (http('secret = "env:NONE"'), "a.secret: environment variable NONE is not set (set it, or"),
        (
            http('secret = "env:PLAIN"'),
            "destinations.a.secret: env:PLAIN must start with whsec_; w",
        ),
        (http('secret = "env:V1"'), "destinations.a.secret: env:V1 must start with whsec_: v1, st"),
        (http("secret = 5"), "destinations.a.secret: expected a string, got an integer"),
        (http(url='"env:NONE"'), "destinations.a.url: environment variable NONE is not set"),
        (http(url='"env:PLAIN"'), "destinations.a.url: is not the address of a web server; write"),
        (http(url='"env:LINES"'), "destinations.a.url: is not the address of a web server; write"),
        (http(url='"evn:hunter2"'), "destinations.a.url: is not the address of a web server"),
        (http(url='"https://a.com/hunter2#x"'), "destinations.a.url: may not have a fragment"),
        (email(smtp="env:NONE"), "destinations.a.smtp: environment variable NONE is not set"),
        (email(smtp="env:PLAIN"), "destinations.a.smtp: is not the address of a mail server"),
        (email(smtp="env:SLASH"), "destinations.a.smtp: is not the address of a mail server"),
        (email(smtp="env:HASH"), "destinations.a.smtp: is not the address of a mail server; wri"),
    ],
)
def test_a_bad_secret_of_a_destination_is_refused_without_being_shown(
    tmp_path: Path, text: str, problem: str
) -> None:
    problems = refused(
        tmp_path,
        text,
        PLAIN="hunter2!",
        V1=f"v1,{KEY}",
        LINES="https://a.com/hunter2\nx",
        SLASH="smtp://user:hunter2/x@example.com",
        HASH="smtp://user:hunter2#x@example.com",
    )

    assert any(problem in one for one in problems), problems
    assert not re.search("hunter2|QUJD", "".join(problems))


@pytest.mark.parametrize("value", [SECRET, "whsec_" + "QUJD" * 8])
def test_a_secret_of_standard_webhooks_that_decodes_is_taken(tmp_path: Path, value: str) -> None:
    settings = taken(tmp_path, secrets('"env:A"', "standard-webhooks"), A=value)

    assert settings.warnings == ()


@pytest.mark.parametrize(
    ("on", "end"),
    [
        ('"push"', 'that only this kind has, as in { "pusher" = { exists = true } }'),
        # Nothing that each of these has is known.
        ('"star"', "that only this kind has"),
        ('"push", "release"', "that only this kind has"),
        ('"*"', "that only this kind has"),
    ],
)
def test_the_field_that_is_advised_is_one_that_all_of_the_types_have(
    tmp_path: Path, on: str, end: str
) -> None:
    rule = f'[[rules]]\noperation = "o"\nsource = "github"\non = [{on}]\nsubject = "ref"\n'
    settings = taken(tmp_path, GITHUB + rule + 'record = { kind = "k", data = "d" }')

    (advice,) = [one for one in settings.warnings if ".when: " in one]
    assert advice.endswith(f'{end} (operation "o")')


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
    (
        secrets("", "shopify"),
        "sources.a.account: is not set, and Shopify names it where no signature covers it "
        "(header:X-Shopify-Shop-Domain)",
    ),
    (
        GITHUB
        + '[[rules]]\noperation = "o"\nsource = "github"\non = ["push"]\n'
        + 'record = { kind = "k", data = "{ref}" }',
        "rules[0].when: is not set, and GitHub says what an event is where no signature",
    ),
    (secrets("", "fillout"), "sources.a.scheme: Fillout signs nothing"),
    (secrets('"env:PLAIN"', "twitch"), "env:PLAIN does not look like a secret of Twitch"),
    (secrets('"env:SPACED"'), "secrets[0]: env:SPACED: white space around the secret is left out"),
    (
        secrets('"env:PLAIN"'),
        "secrets[0]: env:PLAIN does not look like a secret of Stripe, which begins",
    ),
    (server('admin = "0.0.0.0:8081"'), "server.admin: 0.0.0.0:8081 can be reached from other"),
    (server('trusted_proxies = ["0.0.0.0/0"]'), "server.trusted_proxies: 0.0.0.0/0 is everyone"),
    (source('allow_ips = ["10.0.0.1"]'), "sources.stripe.allow_ips: would be compared with the"),
    (
        '[sources.a]\nsecrets = ["env:PLAIN"]\nscheme = { sig = "header:X", algo = "sha256", '
        'enc = "hex", signed = "{url}{body}", event_id = "json:/id" }',
        "sources.a.public_url: is not set, but the sender signs its URL; set it",
    ),
    (http(url='"http://example.com/"'), "destinations.a.url: is http:// to another machine"),
    (http(url='"http://10.0.0.1/"'), "destinations.a.url: is http:// to another machine"),
    (http(url='"env:HTTP"'), "destinations.a.url: is http:// to another machine, so anyone on"),
    (http(url='"https://u:hunter2@a.com/"'), "destinations.a.url: seems to hold a secret; keep"),
    (http(url='"https://a.com/?key=hunter2"'), "destinations.a.url: seems to hold a secret; keep"),
    (http(url='"https://a.com/?a=hunter2hunter2hunter2"'), "a.url: seems to hold a secret; keep"),
    (http(url='"https://a.com/T0/hunter2hunter2hunter2"'), "a.url: seems to hold a secret; keep"),
    (email(smtp="smtp://u:hunter2@a.com:587"), "destinations.a.smtp: seems to hold a secret; keep"),
    (http('secret = "env:STRIPE_WEBHOOK_SECRET"'), "is a key of 17 bytes, which is short; make"),
    (http('headers = { Authorization = "hunter2" }'), "a.headers.Authorization: is kept in the d"),
    (command(argv="['/no/such']"), "destinations.a.argv[0]: /no/such is no program that this user"),
    (command(argv="['no-such-program']"), "a.argv[0]: no-such-program is no program that this us"),
    (worker('run = "off"') + HTTP, "worker.run: is off, so messages wait in the outbox; turn it"),
    (SOURCE + HTTP, "destinations.a: no rule sends to it; name it in a rule's send, or remove it"),
    (
        email(text="{_grant.amount} more"),
        "rules[0].send: destinations.a takes _grant, but this rule grants nothing",
    ),
    (
        http('json = { a = "{_workspace}" }'),
        "rules[0].send: destinations.a takes _workspace, but this rule has no customer",
    ),
]


@pytest.mark.parametrize(("text", "warning"), WARNED, ids=[warning[:50] for _, warning in WARNED])
def test_it_is_warned_of_and_taken(tmp_path: Path, text: str, warning: str) -> None:
    settings = taken(
        tmp_path, text, SPACED=f" {SECRET}", PLAIN="hunter2", HTTP="http://hunter2.example.com"
    )

    assert any(warning in one for one in settings.warnings), settings.warnings
    assert "hunter2" not in "".join(settings.warnings)


@pytest.mark.parametrize(
    "text",
    [
        http(url='"http://127.0.0.1:3000/in"'),
        http(url='"http://[::1]:3000/in"'),
        http(url='"http://localhost/in"'),
        http(url='"https://ntfy.sh"'),
        http(url='"https://api.example.com/v1/customers?source=receiver"'),
        http(url='"env:SLACK_WEBHOOK_URL"'),
        http('json = ["{id}", true, 1]'),
        http('json = "{data.object}"'),
        http('headers = { X-A = "{id}" }\nmethod = "PUT"\ntimeout_s = 300'),
        email(smtp="smtps://mail.example.com:465"),
        email(smtp="env:SMTP_URL"),
        email(sender="Jörg, Acme <a@b.com>"),
        email(to="Team <team@example.com>"),
        email(to="{data.object.email}", text="a\\nb"),
        command(argv="['sh', '-c', 'exit']"),
        command(argv="['/bin/sh', '{a.b}', 'a b']", more="idempotent_for_s = 60"),
        worker('run = "off"'),
    ],
)
def test_it_is_taken_without_a_warning(tmp_path: Path, text: str) -> None:
    assert taken(tmp_path, text).warnings == ()


def test_a_handler_may_send_where_no_rule_does(tmp_path: Path) -> None:
    (tmp_path / "handlers.py").touch()

    settings = taken(tmp_path, preparing("queued") + HTTP)

    assert settings.warnings == ()


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


def test_a_broken_destination_is_told_once_and_whole(tmp_path: Path) -> None:
    text = SOURCE + RULE_THAT_SENDS + '[destinations.a]\nkind = "email"\nfrom = 5\ntimeout_s = 0'

    problems = refused(tmp_path, text)

    assert [problem.partition(": ")[0] for problem in problems] == [
        f"destinations.a.{key}" for key in ("smtp", "to", "subject", "text", "from", "timeout_s")
    ]


def test_a_broken_effect_beside_send_is_told_once(tmp_path: Path) -> None:
    text = SOURCE + RULE + HTTP + RULE.replace('unit = "credits"', "unit = 5")
    text += 'send = [{ to = "a" }]\n'

    problems = refused(tmp_path, text)

    assert [problem.partition(": ")[0] for problem in problems] == ["rules[1].grant.unit"]


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
TEXTS = [
    *KEYS,
    "env:A",
    "https://a/",
    "smtp://a",
    "a@b",
    "{_grant.a}",
    "file:x",
    "127.0.0.1:1",
    "{a",
    "a[",
    "sql {a}",
    "unix:",
    "\0",
    "v1,whsec_",
]
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


def test_an_api_and_a_retention_are_read(tmp_path: Path) -> None:
    settings = taken(
        tmp_path,
        source(
            'api = { key = "env:STRIPE_WEBHOOK_SECRET", base_url = "http://127.0.0.1:9" }\n'
            "retention = { payload_days = 90, ignored = false }"
        ),
    )

    stripe = settings.sources["stripe"]
    assert stripe.api is not None
    assert stripe.api.base_url == "http://127.0.0.1:9"
    assert (stripe.retention.payload_days, stripe.retention.ignored) == (90, False)


@pytest.mark.parametrize("wrong", ["x" * 10_000, "a b " * 2_500])
@pytest.mark.parametrize(
    "text",
    [
        '"{}" = 1',
        'handlers = "{}"',
        '[sources."{}"]',
        '[sources.s]\nscheme = "{}"',
        '[sources.s]\n"{}" = 1',
        '[sources.s]\nscheme = {{ sig = "{}", algo = "{}", enc = "{}", signed = "{{{}}}" }}',
        '[sources.s]\nscheme = {{ "{}" = 1 }}',
        '[sources.s]\nscheme = "stripe"\nsecrets = ["file:{}"]',
        '[[rules]]\noperation = "{}"',
        '[[rules]]\nwhen = {{ "{}[" = 1 }}',
        '[destinations."{}"]\nkind = "{}"',
    ],
)
def test_a_problem_is_a_line_that_can_be_read_however_long_what_is_wrong(
    tmp_path: Path, text: str, wrong: str
) -> None:
    path = tmp_path / "receiver.toml"
    path.write_text(text.replace("{}", wrong).replace("{{", "{").replace("}}", "}"))

    with pytest.raises(ConfigError) as raised:
        load(path, environment={})

    assert raised.value.problems
    assert max(map(len, raised.value.problems)) <= tables.LINE_CHARS_MAX
