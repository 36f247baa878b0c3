"""A sample of every sender, signed as it signs: judged here, and sent to a real server."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from receiver import config, presets, samples, sending, signing
from receiver.config import Source
from receiver.presets import BEARERS, Preset
from receiver.samples import Sample, Wish
from receiver.sending import Answer, Target
from receiver.verify import Delivery, verify
from store import inbox
from store.database import snapshot
from tests.keys import Keys, keys_of
from tests.service import Service, services

NAMES = presets.names()
each_sender = pytest.mark.parametrize("name", NAMES)
PUBLIC_URL = "https://hooks.example.com"
NOW_MS = 1_800_000_000_000
TYPE = "invoice.paid"
# When it came is a part of their ids, so no delivery is a duplicate of another.
BY_RECEIPT = {"dropbox", "mollie-classic"}


class Place:
    """A folder with a source for each sender, and the server on it."""

    def __init__(self, folder: Path, service: Service) -> None:
        self.folder = folder
        self.service = service
        self.sources = config.load(folder / "receiver.toml").sources

    def post(self, name: str, sample: Sample, secret: bytes | None = None) -> Answer:
        """Send a sample; with another secret, one that shows it in the URL shows that one."""
        host, port = self.service.public.getsockname()
        target = Target(f"http://{host}:{port}/webhooks/{name}")
        place = samples.place_of(self.sources[name], target)
        if secret is not None:
            url = signing.url_with_secret(presets.get(name), secret, target.url)
            place = Target(url)
        return sending.post(place, sample.headers, sample.body)

    def states(self, name: str) -> list[tuple[str, int]]:
        """State and redeliveries of each event that a source has."""
        with snapshot(self.service.database) as seen:
            rows = inbox.listed(seen, endpoint=name)
        return [(row.state, row.duplicates) for row in reversed(rows)]


def told(preset: Preset, word: str) -> tuple[int, str]:
    """The status and the body that a sender is told of an outcome."""
    wished = dict(preset.statuses or ()).get(word)
    if wished is None:
        return 200, word
    return wished.status, word if wished.body is None else wished.body


def write_sources(folder: Path) -> str:
    """A config with a source for each sender, and the files of their secrets."""
    lines = [f'public_url = "{PUBLIC_URL}"']
    for name in NAMES:
        keys = keys_of(presets.get(name))
        (folder / f"{name}.secret").write_bytes(keys.secret)
        (folder / f"{name}.private").write_bytes(keys.private or b"")
        secrets = [f'"file:{name}.secret"']
        if keys.certificate is not None:
            (folder / f"{name}.pem").write_bytes(keys.certificate)
            secrets.append(f'{{ secret = "file:{name}.pem", name = "cert_pem" }}')
        lines += [f"[sources.{name}]", f'scheme = "{name}"', f"secrets = [{', '.join(secrets)}]"]
    rule = ['operation = "note"', f"source = {json.dumps(list(NAMES))}", 'on = ["*"]']
    effect = 'record = { kind = "note", data = { id = "{_event.id}" } }'
    return "\n".join([*lines, "[[rules]]", *rule, effect, ""])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("every")
    with services(folder) as start:
        yield Place(folder, start(write_sources(folder)))


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def sample_of(source: Source, keys: Keys, token: str, now_ms: int) -> Sample:
    wish = Wish(type=TYPE, token=token, now_ms=now_ms)
    return samples.make(source, wish, f"{PUBLIC_URL}/webhooks/{source.name}", keys.private)


def signed_by(source: Source, keys: Keys) -> Source:
    """The source as it would be with other keys."""
    own = [one for one in source.contract.secrets if one.name is None]
    secrets = [replace(own[0], value=keys.secret)]
    if keys.certificate is not None:
        secrets.append(replace(own[0], value=keys.certificate, name="cert_pem"))
    return replace(source, contract=replace(source.contract, secrets=tuple(secrets)))


def covers_body(preset: Preset) -> bool:
    return all(one.algo not in BEARERS and one.has("body", "payload") for one in preset.schemes)


@each_sender
def test_a_sample_is_taken_once_and_nothing_that_was_changed_or_signed_by_another(
    place: Place, name: str
) -> None:
    preset, source = presets.get(name), place.sources[name]
    sample, before = sample_of(source, keys_of(preset), "a1" * 12, now_ms()), place.states(name)

    answer = place.post(name, sample)
    assert (answer.status, answer.word) == told(preset, "done"), answer
    again = place.post(name, sample)
    second = "done" if name in BY_RECEIPT else "duplicate"
    assert (again.status, again.word) == told(preset, second), again
    stored = [("done", 0), ("done", 0)] if second == "done" else [("done", 1)]
    assert place.states(name) == before + stored

    other = keys_of(preset, b"2")
    forged = sample_of(signed_by(source, other), other, "b2" * 12, now_ms())
    assert place.post(name, forged, other.secret).status == 401
    if covers_body(preset):
        changed = Sample(sample.event_id, sample.type, sample.headers, sample.body + b" ", None)
        assert place.post(name, changed).status == 401


@each_sender
def test_a_sample_says_its_id_and_type_where_the_sender_says_them(place: Place, name: str) -> None:
    preset, source = presets.get(name), place.sources[name]
    keys = keys_of(preset)
    sample = sample_of(source, keys, "c3" * 12, NOW_MS)
    url = signing.url_with_secret(preset, keys.secret, f"{PUBLIC_URL}/webhooks/{name}")
    headers = tuple((n.lower().encode(), v.encode()) for n, v in sample.headers)

    judged = verify(source.contract, Delivery("POST", url, headers, sample.body, NOW_MS))
    assert isinstance(judged, tuple), judged
    (event,) = judged

    assert event.defect is None
    assert (event.event_id, event.type) == (sample.event_id, sample.type)
    assert event.type == (TYPE if preset.event_type else "")


@each_sender
def test_two_samples_are_two_events(place: Place, name: str) -> None:
    preset, source = presets.get(name), place.sources[name]
    keys = keys_of(preset)

    first = sample_of(source, keys, "d4" * 12, NOW_MS)
    second = sample_of(source, keys, "e5" * 12, NOW_MS)

    assert first.event_id != second.event_id


def send(place: Place, name: str, *options: str) -> tuple[int, str]:
    host, port = place.service.public.getsockname()
    url = f"http://{host}:{port}/webhooks/{name}"
    done = place.service.command("send", name, TYPE, "--url", url, *options)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["discord", "sendgrid", "paypal"])
def test_the_command_signs_with_a_private_key_that_is_named(place: Place, name: str) -> None:
    code, said = send(place, name, "--private-key", f"file:{name}.private")

    assert code == 0, said
    assert told(presets.get(name), "done")[1] in said


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("discord", [], "name the other by --private-key"),
        ("discord", ["--private-key", "file:sendgrid.private"], "of another kind than ed25519"),
        ("sendgrid", ["--private-key", "file:other.private"], "not that of the public key"),
        ("paypal", ["--private-key", "file:discord.private"], "of another kind than paypal"),
        ("discord", ["--private-key", "file:discord.secret"], "none in PEM form"),
        ("discord", ["--private-key", "file:missing"], "no such file"),
        ("discord", ["--private-key", "-----BEGIN"], "is not a reference"),
    ],
)
def test_a_private_key_that_can_not_sign_is_said(
    place: Place, name: str, options: list[str], words: str
) -> None:
    other = keys_of(presets.get("sendgrid"), b"7").private
    (place.folder / "other.private").write_bytes(other or b"")

    code, said = send(place, name, *options)

    assert code == 2
    assert words in said
