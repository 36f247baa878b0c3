"""Plays what senders do at their worst against a real server, and checks every result."""

import contextlib
import json
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from receiver.console import counted
from receiver.playground import SOURCE, Answer, Playground, PlaygroundError, wait_until
from store import conflicts, inbox, ledger

__all__ = ["CHECKOUT", "RULES", "PlaygroundError", "invoice", "run", "set_up", "signals_noted"]

#: Deliveries of one event at the same moment.
AT_ONCE = 50
#: Rows read of a table: more than the demo can make.
ROWS_MAX = 1_000

WORKSPACE = "acme"

RULES = """
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
expect = { "data.object.status" = "paid" }
subject = "data.object.id"
customer = "data.object.customer"
grant = { unit = "credits", amount = 100 }

# After the grant, in the same transaction.
[[rules]]
operation = "power-failure"
source = "stripe"
on = ["invoice.paid"]
subject = "data.object.id"
call = "power_failure"
"""

HANDLERS = '''"""Kills the server after a grant is made and before it is committed, when told to."""

import os
import signal
from pathlib import Path

FOLDER = Path(__file__).parent


def power_failure(event, tx):
    if (FOLDER / "fail-now").exists():
        made = tx.sql("select amount from receiver_ledger where subject = ?", (event.subject,))
        (FOLDER / "made-before-failure").write_text(" ".join(str(row[0]) for row in made))
        os.kill(os.getpid(), signal.SIGKILL)
'''

NEXT = (
    ("init", "writes a config in test mode"),
    ("serve", "runs it; then, elsewhere:"),
    ("send stripe checkout.session.completed", "links a customer"),
    ("send stripe invoice.paid", "grants credits, once"),
    ("balance", "shows them"),
)


class Check(NamedTuple):
    """One line of the table: what was done, what must come of it, and what did."""

    what: str
    expected: str
    happened: str


def run(
    say: Callable[[str], None],
    clock: Callable[[], int],
    *,
    keep: bool,
    program: str = "receiver",
    rules: str = RULES,
) -> int:
    """Play the story in a temporary folder; 1 if anything differs from what must happen.

    `clock` gives UTC milliseconds; the folder stays if `keep`; `program` is how to call the
    command line. Raises PlaygroundError, and
    KeyboardInterrupt once a signal has been heeded and everything is cleaned up.
    """
    with signals_noted() as interrupted:
        folder = Path(tempfile.mkdtemp(prefix="receiver-demo-"))
        try:
            with contextlib.closing(set_up(folder, clock, rules)) as play:
                different = _play(play, say, interrupted)
        finally:
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)
    if keep:
        say("")
        config = f"-c {folder}/receiver.toml"
        say(f"Kept, with the server's log: {program} events list {config}")
        say(f"To apply what is parked in step 6: {program} {FIX} {config}")
    elif different:
        say("")
        say("Run it again with --keep to look into the file and the server's log.")
    say("")
    say("Try next, in an empty folder:")
    for words, does in NEXT:
        say(f"  {f'{program} {words}':<{len(program) + 40}}  {does}")
    return 1 if different else 0


@contextlib.contextmanager
def signals_noted() -> Iterator[threading.Event]:
    """Set by a signal that would end us; heeded between two checks, so nothing is left behind."""
    noted = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: noted.set())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def set_up(folder: Path, clock: Callable[[], int], rules: str) -> Playground:
    """A playground in an empty folder, with a secret of its own and these rules."""
    secret = "whsec_" + secrets.token_hex(16)
    play = Playground(folder, secret.encode(), clock)
    listen, admin = ("{}:{}".format(*each.getsockname()) for each in (play.public, play.admin))
    (folder / "webhook-secret").write_text(secret)
    (folder / "handlers.py").write_text(HANDLERS)
    (folder / "receiver.toml").write_text(
        f"""# What `receiver demo` plays on.
database = "receiver.db"
handlers = "handlers.py"

[server]
listen = "{listen}"
admin = "{admin}"

[sources.{SOURCE}]
scheme = "stripe"
secrets = ["file:webhook-secret"]
livemode = false
{rules}"""
    )
    return play


def _play(play: Playground, say: Callable[[str], None], interrupted: threading.Event) -> int:
    """Print each check as it is made, then the totals; how many of them differ."""
    started = time.monotonic()
    play.load()
    play.start()
    say(f"A real server on {play.url}, a real file, signed deliveries.")
    say("")
    say(_line("", Check("step", "expected", "happened"), ""))
    results = []
    for number, check in _checks(play):
        results.append(check.expected == check.happened)
        say(_line(number, check, "ok" if results[-1] else "DIFFERENT"))
        if interrupted.is_set():
            raise KeyboardInterrupt
    say("")
    say(_totals(play, results, time.monotonic() - started))
    return results.count(False)


def _checks(play: Playground) -> Iterator[tuple[str, Check]]:
    """The checks of all steps, the first of each with its number."""
    for number, step in enumerate(STEPS, 1):
        for position, check in enumerate(step(play)):
            yield "" if position else str(number), check


def _line(number: str, check: Check, verdict: str) -> str:
    cells = [f"{text:<23}" for text in check]
    return "  ".join([f"{number:1} {cells[0]}", *cells[1:], verdict]).rstrip()


def _totals(play: Playground, results: Sequence[bool], seconds: float) -> str:
    differing = results.count(False)
    verdict = f"{differing} DIFFERENT" if differing else "all as expected"
    return (
        f"{len(play.answers)} requests, {_events(play)} events, {_grants(play)} grants in "
        f"{seconds:.1f} s; {len(results)} checks, {verdict}."
    )


# What is sent: Stripe events, as far as the rules look at them.


def _event(event_id: str, type: str, **of: object) -> bytes:
    event = {"id": event_id, "object": "event", "type": type, "livemode": False}
    return json.dumps(event | {"data": {"object": of}}).encode()


def invoice(
    event_id: str, invoice: str, customer: str = "cus_1", type: str = "invoice.paid"
) -> bytes:
    return _event(
        event_id,
        type,
        id=invoice,
        customer=customer,
        status="paid",
        currency="usd",
        amount_paid=4900,
    )


EARLY = invoice("evt_1", "in_1")
CHECKOUT = _event(
    "evt_2", "checkout.session.completed", customer="cus_1", client_reference_id=WORKSPACE
)
CROWDED = invoice("evt_3", "in_2")
SECOND = invoice("evt_4", "in_2", type="invoice.payment_succeeded")
TAMPERED_ID = "evt_5"
STRANGER = invoice("evt_6", "in_3", customer="cus_2")
KILLED = invoice("evt_7", "in_4")
GENUINE = (EARLY, CHECKOUT, CROWDED, SECOND, STRANGER, KILLED)

FIX = f"links add {SOURCE} cus_2 WORKSPACE"


# The steps


def _link_comes_late(play: Playground) -> Iterator[Check]:
    answer = play.send(EARLY)
    yield Check(
        "invoice before its link", "200 parked, balance 0", f"{answer}, balance {_balance(play)}"
    )
    answer = play.send(CHECKOUT)
    wait_until(lambda: _state(play, "evt_1") == "done")
    yield Check("  then the link", "200 done, balance 100", f"{answer}, balance {_balance(play)}")


def _fifty_at_once(play: Playground) -> Iterator[Check]:
    before = _events(play)
    answers = play.send_at_once(CROWDED, AT_ONCE)
    statuses = ", ".join(f"{n} x {each}" for each, n in Counter(a.status for a in answers).items())
    repeated = sum(answer.word == "duplicate" for answer in answers)
    yield Check(
        f"invoice, {AT_ONCE} at once",
        f"{AT_ONCE} x 200, {AT_ONCE - 1} duplicate",
        f"{statuses}, {repeated} duplicate",
    )
    made = f"{counted(_events(play) - before, 'event')}, {counted(_grants(play, 'in_2'), 'grant')}"
    yield Check("  in the file", "1 event, 1 grant", made)


def _second_event(play: Playground) -> Iterator[Check]:
    answer = play.send(SECOND)
    granted = counted(_grants(play, "in_2"), "grant")
    yield Check("second event for it", "200 done, 1 grant", f"{answer}, {granted}")


def _tampered(play: Playground) -> Iterator[Check]:
    body = invoice(TAMPERED_ID, "in_5")
    answer = play.send(body, tampered=body.replace(b"4900", b"9900"))
    row = _seen(_state(play, TAMPERED_ID) is not None, "event")
    yield Check("tampered body", "401 rejected, no event", f"{answer}, {row}")


def _same_id(play: Playground) -> Iterator[Check]:
    answer = play.send(CROWDED.replace(b"4900", b"9900"))
    yield Check("same id, other content", "200 conflict", str(answer))
    with play.file() as seen:
        row = inbox.by_key(seen, SOURCE, "", "evt_3")
        assert row is not None, "step 2 has stored it"
        kept = "first kept" if inbox.payload(seen, row.id) == CROWDED else "first changed"
        aside = len(conflicts.of_event(seen, row.id))
    yield Check("  in the file", "first kept, 1 set aside", f"{kept}, {aside} set aside")


def _unknown_customer(play: Playground) -> Iterator[Check]:
    answer = play.send(STRANGER)
    granted = _seen(_grants(play, "in_3") > 0, "grant")
    yield Check("customer without a link", "200 parked, no grant", f"{answer}, {granted}")


def _killed_before_commit(play: Playground) -> Iterator[Check]:
    order = play.folder / "fail-now"
    order.touch()
    answer = play.send(KILLED)
    made = play.folder / "made-before-failure"
    amount = made.read_text() if made.exists() else "nothing"
    yield Check("kill -9 before commit", "100 made, no answer", f"{amount} made, {answer}")
    order.unlink()
    play.restart()
    event = _seen(_state(play, "evt_7") is not None, "event")
    granted = _seen(_grants(play, "in_4") > 0, "grant")
    yield Check("  server started again", "no event, no grant", f"{event}, {granted}")
    answer = play.send(KILLED)
    granted = counted(_grants(play, "in_4"), "grant")
    yield Check("  the sender retries", "200 done, 1 grant", f"{answer}, {granted}")


def _all_again(play: Playground) -> Iterator[Check]:
    events, grants = _events(play), _grants(play)
    answers = [play.send(body) for body in GENUINE]
    yield Check("everything once more", "5 duplicate, 1 parked", _tally(answers))
    more = f"{_events(play) - events} events, {_grants(play) - grants} grants"
    yield Check("  new in the file", "0 events, 0 grants", more)
    with play.file() as seen:
        total = sum(entry.amount for entry in ledger.listed(seen, limit=ROWS_MAX))
        balance = sum(one.balance for one in ledger.totals(seen, limit=ROWS_MAX))
    yield Check(
        "  do the books balance?", "balance 300, ledger 300", f"balance {balance}, ledger {total}"
    )


STEPS = (
    _link_comes_late,
    _fifty_at_once,
    _second_event,
    _tampered,
    _same_id,
    _unknown_customer,
    _killed_before_commit,
    _all_again,
)


# What is seen in the file


def _state(play: Playground, event_id: str) -> str | None:
    with play.file() as seen:
        row = inbox.by_key(seen, SOURCE, "", event_id)
    return None if row is None else row.state


def _events(play: Playground) -> int:
    with play.file() as seen:
        return len(inbox.listed(seen, limit=ROWS_MAX))


def _grants(play: Playground, subject: str | None = None) -> int:
    with play.file() as seen:
        return len(ledger.listed(seen, subject=subject, limit=ROWS_MAX))


def _balance(play: Playground) -> int:
    with play.file() as seen:
        return ledger.balance(seen, WORKSPACE, "credits")


# Words


def _seen(there: bool, noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}" if there else f"no {noun}"


def _tally(answers: Sequence[Answer]) -> str:
    """The words alone where the status is 200."""
    words = Counter(each.word if each.status == 200 else str(each) for each in answers)
    return ", ".join(f"{number} {word}" for word, number in words.most_common())
