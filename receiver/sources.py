"""What a source demands, where it is reached and what came last, for the operator to read."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from receiver import batch, caveats, console, duties
from receiver.captures import reference, secrets_of
from receiver.config import ConfigError, Rule, Settings, Source, build, read
from receiver.destinations import Destination
from receiver.handshakes import Rule as HandshakeRule
from receiver.presets import CODED, Part, Preset, Scheme
from receiver.references import References, Unresolved, read_env_file
from receiver.shown import times
from receiver.verify import Contract, Secret
from store import captured, inbox, rejections, secrets
from store.captured import Armed, Captured
from store.database import Snapshot
from store.rejections import Rejection
from store.secrets import SecretUse

HEADINGS = ("source", "scheme", "mode", "url", "last event", "rejected")
NO_URL = "set public_url"

#: A secret that did not match for so long, while another one did, can be retired: longer than a
#: sender that changes secrets goes on with the old one.
IDLE_MS = 86_400_000


class Last(msgspec.Struct, frozen=True):
    """The newest event, in UTC milliseconds; what was refused, the newest reason first; uses.

    Also until when a secret is awaited, and those that were handed over.
    """

    event_ms: int | None = None
    rejections: Sequence[Rejection] = ()
    secrets: Sequence[SecretUse] = ()
    armed: Armed | None = None
    captured: Sequence[Captured] = ()

    def use_of(self, secret: Secret) -> SecretUse | None:
        """When it last proved a delivery of the source."""
        return next((one for one in self.secrets if one.reference == secret.reference), None)


def last(snapshot: Snapshot, source: str) -> Last:
    return Last(
        inbox.latest(snapshot, source),
        rejections.of_source(snapshot, source),
        [one for one in secrets.last_used(snapshot) if one.source == source],
        captured.armed(snapshot).get(source),
        captured.listed(snapshot).get(source, ()),
    )


def idle(source: Source, uses: Sequence[SecretUse]) -> list[SecretUse]:
    """Secrets that can be retired: long after their last use another one took their place.

    `uses` may be those of all sources. One that was never used may be the one to come.
    """
    own = {one.reference: one for one in uses if one.source == source.name}
    signing = [one for one in source.contract.signing if one.reference in own]
    found = []
    for secret in signing:
        use, bound = own[secret.reference], (secret.account, secret.livemode)
        others = (one for one in signing if (one.account, one.livemode) == bound)
        if max(own[one.reference].last_ms for one in others) - use.last_ms >= IDLE_MS:
            found.append(use)
    return found


def with_secrets(source: Source, path: Path) -> Source:
    """The source with its own secrets, which are all that it takes to sign or to verify.

    `path` is the configuration's, which must be valid. Raises ConfigError.
    """
    document = read(path)
    sources = document["sources"]
    assert isinstance(sources, dict), "the configuration is valid"
    alone: dict[str, object] = {"sources": {source.name: sources[source.name]}}
    shared = {key: document[key] for key in ("env_file", "public_url") if key in document}
    return build(alone | shared, path.absolute()).sources[source.name]


def others_with_secrets(settings: Settings, source: Source) -> list[Contract]:
    """The contracts of the other sources whose secrets can be read here."""
    found = []
    for other in settings.sources.values():
        if other.name != source.name:
            with contextlib.suppress(ConfigError):
                found.append(with_secrets(other, settings.path).contract)
    return found


def resolved(reference: str, settings: Settings) -> bytes:
    """The value behind a reference given by hand, looked up as the configuration's are.

    Raises ValueError in words that do not hold it.
    """
    lines: dict[str, str] = {}
    try:
        if settings.env_file is not None:
            lines, _ = read_env_file(settings.env_file)
        return References(settings.path.parent, os.environ, lines).resolve(reference)[0]
    except Unresolved as error:
        raise ValueError(str(error)) from error


def url_of(source: Source, reveal: bool = False) -> str | None:
    """The URL to enter at the sender; None without a public_url."""
    return None if source.public_url is None else source.public_url + source.url_path(reveal)


def rules_of(settings: Settings, source: str) -> list[Rule]:
    return [rule for rule in settings.rules if source in rule.sources]


def effect_of(rule: Rule) -> str:
    """The effect's word in the config; `send` for a rule that owes messages and nothing else."""
    return "send" if rule.effect is None else type(rule.effect).__name__.lower()


def destinations_of(settings: Settings, source: str) -> list[Destination]:
    """Where the source's rules send, in the config's order."""
    wanted = {send.to for rule in rules_of(settings, source) for send in rule.send}
    return [one for name, one in settings.destinations.items() if name in wanted]


def tolerance_of(source: Source) -> float | None:
    """Seconds that a delivery may be old; None for any age, as where the sender signs no time."""
    preset = source.contract.preset
    if not preset.signs_time:
        return None
    own = next((one.tolerance_s for one in preset.schemes if one.tolerance_s is not None), None)
    return own if source.contract.tolerance_s is None else source.contract.tolerance_s


def _tolerance(source: Source) -> str | None:
    seconds = tolerance_of(source)
    if seconds is not None:
        return f"{seconds:g} s, in both directions"
    return "none: a time is signed, and any is taken" if source.contract.preset.signs_time else None


def signed_by(scheme: Scheme) -> str:
    """How a scheme signs, as in `sha256 over {ts}.{body}, hex in header:Stripe-Signature`."""
    if scheme.algo == "none":
        return "not signed"
    if scheme.algo in CODED:
        return CODED[scheme.algo].about
    where = "" if scheme.sig is None else f" in {scheme.sig.text}"
    if scheme.algo in ("token", "basic"):
        return f"{scheme.algo}{where}"
    return f"{scheme.algo} over {''.join(map(_shown, scheme.signed))}, {scheme.enc}{where}"


def handshake_words(rule: HandshakeRule) -> str:
    """As in `GET with query:hub.mode, query:hub.verify_token: 200`."""
    places = ", ".join(condition.place.text for condition in rule.when)
    when = f"{rule.method} with {places}" if places else rule.method
    return f"{when}{', signed' if rule.after_verify else ''}: {rule.status}"


def _batch(preset: Preset) -> str | None:
    if preset.batch is None:
        return None
    return f"each of {', '.join(batch.text_of(path) for path in preset.batch.at)} is an event"


def described(
    settings: Settings, source: Source, recent: Last, reveal: bool = False
) -> dict[str, object]:
    """What `--json` prints; secrets only by reference."""
    contract, refused = source.contract, [_described_rejection(one) for one in recent.rejections]
    return {
        "source": source.name,
        "identity": contract.identity,
        "scheme": source.scheme,
        "url": url_of(source, reveal),
        "mode": source.mode,
        "livemode": contract.livemode,
        "account": contract.account,
        "tolerance_s": tolerance_of(source),
        "volatile": list(contract.volatile),
        "told_apart_by": caveats.told_apart_by(contract.preset),
        "gzip": source.body_gzip,
        "allow_ips": [str(network) for network in source.allow_ips],
        "signatures": [signed_by(scheme) for scheme in contract.preset.schemes],
        "secrets": [_described_secret(secret, recent) for secret in _secrets(source, recent)],
        "captured": [described_captured(one) for one in recent.captured],
        "armed_until": console.rfc3339(None if recent.armed is None else recent.armed.until_ms),
        "handshakes": [handshake_words(rule) for rule in contract.preset.handshakes],
        "batch": _batch(contract.preset),
        "rules": [
            {
                "operation": rule.operation,
                "on": list(rule.on),
                "effect": effect_of(rule),
                "send": [{"to": send.to, "name": send.name} for send in rule.send],
            }
            for rule in rules_of(settings, source.name)
        ],
        "worker": settings.worker.run,
        "last_event_at": console.rfc3339(recent.event_ms),
        "last_rejection": refused[0] if refused else None,
        "rejections": refused,
    }


def row(source: Source, recent: Last, now_ms: int) -> list[console.Cell]:
    """What a line of the list shows, under HEADINGS."""
    return [
        source.name,
        source.scheme,
        _mode(source),
        url_of(source) or NO_URL,
        console.when(recent.event_ms, now_ms),
        _refused(recent.rejections, now_ms),
    ]


def fields(
    settings: Settings, source: Source, recent: Last, now_ms: int, reveal: bool = False
) -> list[tuple[str, console.Cell]]:
    """The whole contract, name by name, for people."""
    contract = source.contract
    return [
        ("source", source.name),
        ("url", url_of(source, reveal) or f"<public_url>{source.url_path(reveal)} ({NO_URL})"),
        ("scheme", source.scheme),
        *(("signature", signed_by(scheme)) for scheme in contract.preset.schemes),
        *(("handshake", handshake_words(rule)) for rule in contract.preset.handshakes),
        ("batch", _batch(contract.preset)),
        ("tolerance", _tolerance(source)),
        *(
            ("secret", _secret(source, secret, recent, now_ms))
            for secret in _secrets(source, recent)
        ),
        *(("captured", captured_words(one, now_ms)) for one in recent.captured),
        ("armed", _armed(source, recent.armed, now_ms)),
        ("identity", contract.identity),
        ("account", contract.account),
        ("mode", _mode(source)),
        ("told apart", caveats.told_apart_by(contract.preset)),
        ("volatile", ", ".join(contract.volatile) or None),
        ("gzip", "accepted" if source.body_gzip else None),
        ("allowed", ", ".join(map(str, source.allow_ips)) or None),
        *(("rule", _rule(rule)) for rule in rules_of(settings, source.name)),
        *(
            ("destination", f"{one.name}: {duties.place_of(one)}")
            for one in destinations_of(settings, source.name)
        ),
        *caveats.advice(contract.preset),
        ("worker", duties.worker_of(settings)),
        ("last event", console.moment(recent.event_ms, now_ms)),
        *(("rejected", _rejection(one, now_ms)) for one in recent.rejections),
        ("rejected", None if recent.rejections else "nothing"),
    ]


def described_captured(one: Captured) -> dict[str, object]:
    """What `--json` prints of a captured secret; never the secret."""
    return {
        "number": one.id,
        "secret": reference(one.id),
        "captured_at": console.rfc3339(one.captured_ms),
        "address": one.address,
        "request_id": one.request_id,
    }


def captured_words(one: Captured, now_ms: int) -> str:
    when = console.moment(one.captured_ms, now_ms)
    return f"{reference(one.id)}: {when}, handed over by {one.address} in {one.request_id}"


def _armed(source: Source, armed: Armed | None, now_ms: int) -> str | None:
    if not source.contract.preset.captures:
        return None
    if armed is None or not armed.is_open(now_ms):
        return "no: a handshake that brings a new secret is refused"
    return (
        f"until {console.moment(armed.until_ms, now_ms)}, by {armed.actor}: "
        "the first handshake is taken, whoever sends it"
    )


def _secrets(source: Source, recent: Last) -> tuple[Secret, ...]:
    return (*source.contract.secrets, *secrets_of(recent.captured))


def _described_secret(secret: Secret, recent: Last) -> dict[str, object]:
    use = recent.use_of(secret)
    return {
        "secret": secret.reference,
        "account": secret.account,
        "livemode": secret.livemode,
        "name": secret.name,
        "last_used_at": console.rfc3339(None if use is None else use.last_ms),
        "deliveries": 0 if use is None else use.count,
    }


def _described_rejection(refused: Rejection) -> dict[str, object]:
    return {
        "at": console.rfc3339(refused.last_ms),
        "reason": refused.reason,
        "detail": refused.detail,
        "count": refused.count,
        "request_id": refused.request_id,
    }


def _rule(rule: Rule) -> str:
    words = f"{rule.operation}: {effect_of(rule)} on {', '.join(rule.on)}"
    messages = (f"{send.to} ({send.name})" if send.name else send.to for send in rule.send)
    return f"{words}; messages to {', '.join(messages)}" if rule.send else words


def _mode(source: Source) -> str:
    word = _MODES[source.contract.livemode]
    return source.mode if word is None else f"{source.mode}, {word}"


def _secret(source: Source, secret: Secret, recent: Last, now_ms: int) -> str:
    bound = (secret.name, secret.account, _MODES[secret.livemode])
    limits = ", ".join(one for one in bound if one is not None)
    words = f"{secret.reference} ({limits})" if limits else secret.reference
    use = recent.use_of(secret)
    if secret.name is not None:
        return words
    if use is None:
        return f"{words}, not used yet"
    words += f", last used {console.age(now_ms - use.last_ms)}, {times(use.count)}"
    return f"{words}: retire it" if use in idle(source, recent.secrets) else words


def _refused(rejections: Sequence[Rejection], now_ms: int) -> str:
    if not rejections:
        return "-"
    count, newest = sum(one.count for one in rejections), rejections[0]
    return f"{times(count)}, last {console.age(now_ms - newest.last_ms)}: {newest.reason}"


def _rejection(refused: Rejection, now_ms: int) -> str:
    when = console.moment(refused.last_ms, now_ms)
    return f"{refused.reason} {times(refused.count)}, last {when}: {refused.detail}"


def _shown(part: Part) -> str:
    if part.kind == "text":
        return part.text.decode(errors="replace")
    return f"{{{part.kind if part.at is None else part.at.text}}}"


_MODES = {True: "live", False: "test", None: None}
