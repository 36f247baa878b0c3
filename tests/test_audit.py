"""What is done by hand is written down for ever, by whom and why."""

import os
import pwd

import apsw
import pytest

from receiver import caller
from tests.command import Command
from tests.conftest import World


@pytest.fixture
def command(world: World, monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(world, monkeypatch)


USER = pwd.getpwuid(os.getuid()).pw_name


def acted(world: World, command: Command) -> None:
    """One act of each kind that there is beside messages."""
    command("links", "add", "stripe", "cus_1", "acme", "--reason", "asked them")
    world.invoice("evt_1", "in_1")
    world.clock.now_ms += 60_000
    command("ledger", "adjust", "--workspace", "acme", "--unit", "credits", "--amount", "-5",
            "--key", "k", "--reason", "a mistake")  # fmt: skip
    command("ledger", "revert", "stripe/in_1/initial-credit-grant", "--reason", "charged back",
            "--amount", "10")  # fmt: skip
    world.clock.now_ms += 60_000
    command("replay", "evt_1", "--reason", "to see")


def test_acts_are_listed_newest_first_with_who_what_and_why(world: World, command: Command) -> None:
    acted(world, command)

    listed = command.objects("audit")
    out = command("audit").out

    assert [(one["action"], one["target"], one["reason"]) for one in listed] == [
        ("replay", "event 1", "to see"),
        ("ledger revert", "stripe/in_1/initial-credit-grant", "charged back"),
        ("ledger adjust", "operator/k/adjustment", "a mistake"),
        ("links add", "link stripe/cus_1", "asked them"),
    ]
    assert {one["actor"] for one in listed} == {USER}
    assert listed[0]["at"] == "2027-01-15T08:02:00.000Z"
    assert listed[0]["detail"] == {"was": "done", "became": "done"}
    assert "ledger adjust" in out


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        (["--action", "ledger"], ["ledger revert", "ledger adjust"]),
        (["--action", "ledger adjust"], ["ledger adjust"]),
        (["--action", "led%"], []),
        (["--action", "link_"], []),
        (["--since", "90s"], ["replay", "ledger revert", "ledger adjust"]),
        (["--actor", USER, "--limit", "1"], ["replay"]),
        (["--actor", "nobody else"], []),
    ],
)
def test_acts_are_filtered(
    world: World, command: Command, filters: list[str], found: list[str]
) -> None:
    acted(world, command)

    assert [one["action"] for one in command.objects("audit", *filters)] == found


def test_who_called_sudo_is_written_down_too(
    world: World, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUDO_USER", "ada")

    command("links", "add", "stripe", "cus_1", "acme")

    assert [one["actor"] for one in command.objects("audit")] == [f"ada as {USER}"]
    assert caller.actor() == f"ada as {USER}"


@pytest.mark.parametrize(
    "statement",
    [
        "update receiver_audit set reason = 'other'",
        "delete from receiver_audit",
        "delete from receiver_audit where id = 1",
        "insert or replace into receiver_audit values (1, 1, 'me', 'x', '', '', '{}')",
        "insert into receiver_audit values (1, 1, 'me', 'x', '', '', '{}')"
        " on conflict (id) do update set reason = 'other'",
        "insert into receiver_audit values (9223372036854775807, 1, 'me', 'x', '', '', '{}')",
    ],
)
def test_the_audit_log_is_only_added_to_whatever_library_asks(
    world: World, command: Command, statement: str
) -> None:
    command("links", "add", "stripe", "cus_1", "acme", "--reason", "asked them")
    before = world.query("select * from receiver_audit")
    # As the app would open it: with SQLite's own defaults.
    app = apsw.Connection(str(world.folder / "receiver.db"))
    app.execute("pragma recursive_triggers = off")

    with pytest.raises(apsw.ConstraintError, match="only added to"):
        app.execute(statement)

    app.close()
    assert world.query("select * from receiver_audit") == before


@pytest.mark.parametrize("number", [-1, 0])
def test_no_row_of_the_audit_log_stands_in_the_way_of_the_next(
    world: World, command: Command, number: int
) -> None:
    """A trigger sees -1 for a row whose number is still to be chosen."""
    app = apsw.Connection(str(world.folder / "receiver.db"))
    with pytest.raises(apsw.ConstraintError):
        app.execute("insert into receiver_audit values (?, 1, 'me', 'x', '', '', '{}')", (number,))
    app.close()

    assert command("links", "add", "stripe", "cus_1", "acme").code == 0


@pytest.mark.parametrize("detail", ["not json", "[1]", '{"released": 1}', "[" * 5000])
def test_an_act_that_another_program_wrote_is_listed_whatever_its_detail(
    world: World, command: Command, detail: str
) -> None:
    world.invoice("evt_1", "in_1")
    world.link()
    app = apsw.Connection(str(world.folder / "receiver.db"))
    app.execute(
        "insert into receiver_audit (at_ms, actor, action, target, reason, detail) "
        "values (1, 'me', 'x', 'link stripe//cus_1', '', ?)",
        (detail,),
    )
    app.close()

    assert command.objects("audit")[0]["actor"] == "me"
    assert command("export", "audit").code == 0
    assert command("events", "show", "evt_1").code == 0


def test_an_act_that_fails_leaves_no_trace_and_one_that_is_done_always_does(
    world: World, command: Command
) -> None:
    world.query(
        """
        create trigger no_audit before insert on receiver_audit
          begin select raise(abort, 'full'); end
        """
    )

    ran = command("links", "add", "stripe", "cus_1", "acme")

    assert ran.code == 1
    assert world.query("select count(*) from receiver_links") == [(0,)]
