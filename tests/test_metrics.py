"""What Prometheus scrapes from a real server, and the rules that are shipped for it."""

import http.client
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from receiver.commands.status import RULES
from receiver.counters import Histogram
from tests import canary
from tests.conftest import stripe_body
from tests.far_side import unused_port
from tests.processes import Place, Running, destination, placing
from tests.service import until

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

#: What a rule's expression calls and compares with, beside metrics and labels.
PROMETHEUS = frozenset(
    ("sum", "by", "rate", "increase", "time", "histogram_quantile", "source", "le", "up")
)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with placing(tmp_path) as make:
        team = destination("team", f"http://127.0.0.1:{unused_port()}/")
        yield make(team, run="inside")


def scrape(place: Place, running: Running) -> Samples:
    host, _, port = place.address(running, "admin").partition(":")
    client = http.client.HTTPConnection(host, int(port), timeout=20)
    client.request("GET", "/metrics")
    answer = client.getresponse()
    text = answer.read().decode()
    client.close()
    assert answer.status == 200
    assert canary.found_in(text) == []
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((name, tuple(sorted(labels.items()))), 0.0)


def busy(place: Place, running: Running) -> None:
    """Something of every kind."""
    owed = stripe_body("evt_1", "owe", id="s", to="team", messages=2)
    for _ in range(3):
        place.post(running, "stripe", owed)
    place.post(running, "stripe", stripe_body("evt_1", "owe", id="other"))
    place.post(running, "stripe", stripe_body("evt_2", "owe", envelope={"livemode": None}))
    place.post(running, "queue", stripe_body("evt_3", "a.b"))
    host, _, port = place.address(running).partition(":")
    for path in ("/webhooks/stripe", "/webhooks/nobody", "/x" * 50):
        client = http.client.HTTPConnection(host, int(port), timeout=20)
        client.request("POST", path, b"{}", {"Stripe-Signature": f"t={int(time.time())},v1=00"})
        client.getresponse().read()
        client.close()


def test_a_scrape_tells_what_happened_and_how_things_are(place: Place) -> None:
    running = place.serve(before="from receiver import metrics; metrics.FRESH_S = 0")
    busy(place, running)
    until(lambda: value(scrape(place, running), "receiver_attempts_total", outcome="ignored") == 1)

    found = scrape(place, running)
    deliveries = {
        labels["outcome"]: count
        for (name, pairs), count in found.items()
        if name == "receiver_deliveries_total" and (labels := dict(pairs))["source"] == "stripe"
    }
    assert deliveries == {"done": 1, "duplicate": 2, "conflict": 1, "quarantined": 1}
    refused = {
        tuple(dict(pairs).values()): count
        for (name, pairs), count in found.items()
        if name == "receiver_rejections_total"
    }
    assert refused == {("bad-signature", "stripe"): 1, ("unknown", "other"): 2}
    assert value(found, "receiver_ready") == 1
    assert value(found, "receiver_conflicts") == 1
    assert value(found, "receiver_events", state="quarantined") == 1
    assert value(found, "receiver_events", state="settled") == 2
    assert value(found, "receiver_messages", destination="team", state="pending") == 2
    assert value(found, "receiver_database_bytes") > 0
    assert value(found, "receiver_wal_bytes") > 0
    commits = value(found, "receiver_commit_seconds_count")
    assert commits == value(found, "receiver_commit_jobs_count") > 5
    assert value(found, "receiver_commit_seconds_bucket", le="+Inf") == commits
    sent = ("receiver_sends_total", (("destination", "team"), ("outcome", "failed")))
    until(lambda: scrape(place, running).get(sent, 0) > 0)
    assert running.stop() == 0


def test_every_metric_that_a_shipped_rule_names_is_in_a_scrape(place: Place) -> None:
    running = place.serve(
        before="from receiver import metrics, watch; watch.LOOK_S = 0.05; metrics.FRESH_S = 0"
    )
    busy(place, running)
    place.store.write(
        lambda tx: tx.db.execute(
            "insert into receiver_backups (at_ms, path, bytes, verified_ms) values (1, 'b', 1, 1);"
            "insert into receiver_reconciles (source, started_ms, ended_ms, gap, note, about,"
            " asked, place) values ('stripe', 1, 2, 3, '', 'events', '', '')"
        )
    )
    place.wait_for(
        2, "select count(*) from receiver_alerts where name in ('reconcile-gap', 'backup-age')"
    )
    last = ("receiver_last_delivery_timestamp_seconds", (("source", "stripe"),))
    until(lambda: last in scrape(place, running))
    found = scrape(place, running)
    names = {name for name, _ in found}
    labels = {label for _, pairs in found for label, _ in pairs}

    text = RULES.read_text()
    expressions = re.findall(r"^ +expr: (?:>-\n((?: {10,}.*\n)+)|(.*)\n)", text, re.MULTILINE)
    assert len(expressions) == text.count("- alert:")
    for expression in ("".join(each) for each in expressions):
        bare = re.sub(r'"[^"]*"|\[\d+[mh]\]', "", expression)
        words = set(re.findall(r"[a-z_]{2,}", bare)) - PROMETHEUS
        metrics = {word for word in words if word.startswith("receiver_")}
        assert metrics or "up{" in expression
        assert metrics <= names, expression
        assert words - metrics <= labels | {"job"}, expression
    assert text.count("summary:") == len(expressions)


def test_names_that_the_config_does_not_have_are_counted_together(place: Place) -> None:
    for number in range(300):
        place.owe("team", f"s{number}")
    place.store.write(
        lambda tx: tx.db.execute("update receiver_outbox set destination = 'gone-' || id")
    )
    running = place.serve()

    found = scrape(place, running)
    gone = [pairs for name, pairs in found if name == "receiver_messages"]
    assert [dict(pairs) for pairs in gone] == [{"destination": "other", "state": "pending"}]
    assert len(found) < 100


def test_scraping_reads_the_file_once_in_five_seconds(place: Place) -> None:
    running = place.serve()
    before = scrape(place, running)
    place.owe("team", "new")
    again = scrape(place, running)

    key = ("receiver_messages", (("destination", "team"), ("state", "pending")))
    assert before.get(key) is again.get(key) is None


def test_a_file_that_cant_be_read_leaves_the_counters(place: Place) -> None:
    running = place.serve(before="from receiver import metrics; metrics.FRESH_S = 0")
    assert any(name == "receiver_events" for name, _ in scrape(place, running))
    place.store.write(lambda tx: tx.db.execute("insert into receiver_schema values (99, 1)"))

    names = {name for name, _ in scrape(place, running)}
    assert "receiver_events" not in names
    assert "receiver_ready" in names


def test_a_histogram_counts_each_value_below_its_bound() -> None:
    histogram = Histogram((1, 2))
    for number in (0.5, 1, 1.5, 2, 3):
        histogram.add(number)

    assert (histogram.counts, histogram.sum) == ([2, 2, 1], 8.0)
