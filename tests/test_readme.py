"""The README: each of the six questions prints what it shows, and its blocks are whole."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from receiver.config import load
from tests.service import (
    SECRETS,
    STRIPE_CONFIG,
    Service,
    by_stripe,
    checkout,
    invoice,
    services,
    until,
)

README = (Path(__file__).parents[1] / "README.md").read_text()
SECTION = "## Six questions"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A server that a paid invoice, one of an unknown customer and a forged one have come to."""
    folder = tmp_path_factory.mktemp("story")
    (folder / ".env").write_text(f"STRIPE_WEBHOOK_SECRET={SECRETS['STRIPE']}\n")
    config = STRIPE_CONFIG.replace("env:STRIPE", "env:STRIPE_WEBHOOK_SECRET")
    with services(folder) as start:
        service = start('env_file = ".env"\n' + config)
        service.deliver(checkout("evt_1Nq", "cus_9s6"))
        service.deliver(invoice("evt_1Nr", "in_1Nr", "cus_9s6"))
        service.deliver(invoice("evt_1Nr", "in_1Nr", "cus_9s6"))
        service.deliver(invoice("evt_1Ns", "in_1Ns", "cus_new"))
        forged = invoice("evt_1Nt", "in_1Nt", "cus_9s6")
        assert service.post("stripe", forged, by_stripe(forged, secret="GITHUB")).status == 401
        until(lambda: service.value("select count(*) from receiver_rejected") == 1)
        yield service


def shown() -> list[tuple[str, str]]:
    """Each command of the section, with what the README says that it prints."""
    section = README.partition(SECTION)[2].partition("\n## ")[0]
    blocks = re.findall(r"```console\n(.*?)```", section, re.DOTALL)
    return [
        (command, output)
        for block in blocks
        for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
    ]


def test_six_questions_are_answered_by_one_command_each() -> None:
    section = README.partition(SECTION)[2].partition("\n## ")[0]

    assert len(re.findall(r"^\*\*.*\?\*\*", section, re.MULTILINE)) == 6
    assert len(shown()) == 6


@pytest.mark.parametrize(("command", "output"), shown(), ids=[command for command, _ in shown()])
def test_the_readme_shows_what_the_command_prints(
    service: Service, command: str, output: str
) -> None:
    ran = service.command(*shlex.split(command)[1:])

    assert ran.stderr == ""
    assert alike(ran.stdout) == alike(output), f"\n$ {command}\n{ran.stdout}"


def alike(output: str) -> str:
    """The output without what differs from run to run: times, ids of requests, widths."""
    for pattern, word in (
        (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d, \S+ \S+ ago", "TIME"),
        (r"[0-9a-f]{11}-[0-9a-f]{8}-[0-9a-f]+", "REQUEST"),
        (r", written after \d+ ms", ""),
        # Counted beside the deliveries, and written within a second or so.
        (r"^(last hour|last day) .*", r"\1 COUNTS"),
        (r"^file .*", "file SIZES"),
        (r"( -c \S+receiver\.toml)", ""),
        (r"[ ]+", " "),
        (r" +$", ""),
    ):
        output = re.sub(pattern, word, output, flags=re.MULTILINE)
    return output.strip()


def test_each_block_is_closed() -> None:
    marks = re.findall(r"^```(.*)$", README, re.MULTILINE)

    assert all(marks[::2]), "a block begins with its language"
    assert not any(marks[1::2]), "a block goes on where the next one begins"


def test_the_tables_of_another_sender_are_taken_one_after_the_other(tmp_path: Path) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    path = tmp_path / "receiver.toml"
    path.write_text("".join(block for block in blocks if "[sources.billing.scheme" in block))

    settings = load(path, environment={"BILLING_SECRET": "a secret of thirty-two characters"})

    assert settings.warnings == ()
    assert settings.sources["billing"].contract.preset.batch is not None
