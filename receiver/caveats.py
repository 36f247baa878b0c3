"""What people are told of a sender: what proves its events, what tells them apart, what to mind."""

from collections.abc import Iterator, Sequence

from receiver.extract import Locator
from receiver.presets import Preset, Scheme

HEADINGS = ("scheme", "sender", "proved by", "event id", "waits")

_PROOFS = {
    "sha1": "HMAC-SHA1",
    "sha256": "HMAC-SHA256",
    "sha512": "HMAC-SHA512",
    "ed25519": "Ed25519",
    "ecdsa-p256-sha256": "ECDSA",
    "basic": "a password",
    "twilio": "HMAC-SHA1 or HMAC-SHA256",
    "adyen": "HMAC-SHA256",
    "paypal": "RSA, a certificate",
    "none": "nothing",
}


def proof_of(preset: Preset) -> str:
    """What proves its deliveries, as in `HMAC-SHA256, time`."""
    return " or ".join(dict.fromkeys(map(_proof, preset.schemes)))


def _proof(scheme: Scheme) -> str:
    if scheme.algo == "token":
        in_path = scheme.sig is not None and scheme.sig.kind == "path"
        return "a secret in the URL" if in_path else "a token"
    word = _PROOFS.get(scheme.algo, scheme.algo)
    return word if scheme.tolerance_s is None else f"{word}, time"


def id_of(preset: Preset) -> str:
    """What the id of its events is, in few words."""
    kinds = {at.kind for place in preset.event_id for at in place.places}
    if "received" in kinds:
        return "time of receipt"
    if any(place.kind == "joined" for place in preset.event_id):
        return "joined"
    if kinds <= {"body"}:
        return "the body"
    signed = all(scheme.vouches_for(at) for scheme in preset.schemes for at in preset.ids(scheme))
    return "sent" if signed else "sent, unsigned"


def told_apart_by(preset: Preset) -> str | None:
    """How events without an id of the sender's are told apart; None where it sends one."""
    made = [at for at in preset.event_id if at.kind in ("joined", "body")]
    if not made and preset.event_id:
        return None
    some = len(made) < len(preset.event_id)
    lead = "not every event has an id" if some else "no event id is sent"
    known = ", else ".join(
        "the digest of its body" if at.kind == "body" else at.text for at in made
    )
    if any("{received}" in at.text for at in made):
        return f"{lead}: each delivery counts as new, as {known}"
    last = not made or made[-1].kind == "body"
    same = "; two with the same body are one" if last else ""
    return f"{lead}: one is known by {known or 'the digest of its body'}{same}"


def unsigned(preset: Preset, places: Sequence[Locator]) -> list[str]:
    """Those of the places that not every scheme proves."""
    return [at.text for at in places if not all(s.vouches_for(at) for s in preset.schemes)]


def first_is_signed(preset: Preset) -> bool:
    """Whether the place that is looked at first for the type is proved by every scheme."""
    return not unsigned(preset, preset.event_type[:1])


def fields(preset: Preset) -> Iterator[tuple[str, str | None]]:
    """All of it, name by name."""
    yield "sender", preset.title
    yield "docs", preset.docs
    yield "proved by", proof_of(preset)
    for name, places in (
        ("id", preset.event_id),
        ("type", preset.event_type),
        ("account", preset.account),
        ("time", preset.event_time),
    ):
        yield name, ", else ".join(at.text for at in places) or None
    yield "told apart", told_apart_by(preset)
    yield "mode", None if preset.livemode is None else preset.livemode.at.text
    yield "volatile", ", ".join(preset.volatile) or None
    yield "secret", None if preset.secret_shape is None else preset.secret_shape.words
    yield from advice(preset)


def advice(preset: Preset) -> Iterator[tuple[str, str | None]]:
    """What to expect of the sender, and what to mind."""
    yield "waits", None if preset.deadline_s is None else f"{preset.deadline_s:g} s"
    yield "retries", preset.retry
    yield "recover by", preset.recover
    for note in preset.notes:
        yield "note", note


def described(preset: Preset) -> dict[str, object]:
    """What `--json` prints."""
    mode = preset.livemode
    return {
        "scheme": preset.name,
        "sender": preset.title,
        "docs": preset.docs,
        "proved_by": proof_of(preset),
        "event_id": [at.text for at in preset.event_id],
        "event_type": [at.text for at in preset.event_type],
        "account": [at.text for at in preset.account],
        "event_time": [at.text for at in preset.event_time],
        "livemode": None if mode is None else mode.at.text,
        "told_apart_by": told_apart_by(preset),
        "volatile": list(preset.volatile),
        "secret": None if preset.secret_shape is None else preset.secret_shape.words,
        "deadline_s": preset.deadline_s,
        "retry": preset.retry,
        "recover": preset.recover,
        "notes": list(preset.notes),
    }


def row(preset: Preset) -> list[str]:
    """What a line of the list shows, under HEADINGS."""
    waits = "-" if preset.deadline_s is None else f"{preset.deadline_s:g} s"
    return [preset.name, preset.title, proof_of(preset), id_of(preset), waits]
