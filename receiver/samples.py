"""Makes deliveries as the senders make them, to try a set-up out."""

import itertools
import json
import re
import uuid
from collections.abc import Sequence
from hashlib import sha256
from shlex import quote
from typing import Any

import msgspec

from receiver import batch, bodies, paypal, signing
from receiver.bodies import CUSTOMER, WORKSPACE
from receiver.bodies import Wish as Wish  # belongs to what samples offers
from receiver.config import Grant, Link, Record, Reverse, Rule, Settings, Source
from receiver.extract import Locator, Reading, find, look_up
from receiver.presets import Preset
from receiver.rules import why_none_applied
from receiver.select import Scope, Unjudgeable
from receiver.sending import Target
from receiver.signing import Signer
from receiver.tables import cut

#: Characters of a `--set` path.
PATH_CHARS_MAX = 500

#: From when on samples with a given id say that they were made: 2026-01-01, in UTC milliseconds.
MADE_MS = 1_767_225_600_000

SHOP = "example.myshopify.com"
ACCOUNT = "sample"

Json = dict[str, Any]

_STEP = re.compile(r"([^.\[\]]+)((?:\[\d{1,2}\])*)")


class Sample(msgspec.Struct, frozen=True):
    """One delivery, signed: its headers, its body, and what the receiver reads in them."""

    event_id: str
    type: str
    headers: list[tuple[str, str]]
    body: bytes
    document: object


def make(source: Source, wish: Wish, url: str, private_key: bytes | None = None) -> Sample:
    """The delivery, signed with the source's first secret, or with a private key in PEM.

    `url` is that of the source. Raises ValueError in words when the body can't be changed or
    nobody but the sender can sign.
    """
    preset = source.contract.preset
    by = _signer(source, private_key)
    event_id = wish.event_id or _event_id(preset, wish.token)
    sent_ms, wish = wish.now_ms, wish if wish.event_id is None else _repeatable(wish, event_id)
    if wish.exact and wish.body is not None:
        _check_exact(preset, wish)
        body = wish.body
    else:
        document = _document(source, wish, event_id)
        signing.seal(document, preset, by, now_ms=sent_ms, token=wish.token)
        body = signing.encode(preset, document)
    account = source.contract.account or (SHOP if preset.name == "shopify" else "")
    said = body
    if preset.batch is not None and not wish.exact:
        body = batch.wrap(preset.batch, said, account)
    headers = signing.sign(
        preset,
        _key(source),
        body,
        now_ms=sent_ms,
        event_id=event_id,
        type=wish.type,
        account=account,
        url=url,
        private_key=private_key,
    )
    sample = _sample(preset, headers, said, url, wish.now_ms)
    return msgspec.structs.replace(sample, body=body)


def place_of(source: Source, target: Target) -> Target:
    """Where to post it: the sender's secret ends the path, if it can show it nowhere else."""
    url = signing.url_with_secret(source.contract.preset, _key(source), target.url)
    return msgspec.structs.replace(target, url=url)


def _repeatable(wish: Wish, event_id: str) -> Wish:
    digest = sha256(event_id.encode(errors="replace")).digest()
    made_ms = MADE_MS + int.from_bytes(digest[:4], "big")
    return msgspec.structs.replace(wish, token=digest.hex()[:24], now_ms=made_ms)


def _check_exact(preset: Preset, wish: Wish) -> None:
    fixed = any(locator.kind != "header" for locator in preset.event_id)
    given = {"--customer": wish.customer, "--set": wish.changes, "--id": fixed and wish.event_id}
    for option, value in given.items():
        if value:
            raise ValueError(f"--exact sends the file as it is: {option} can't change it")


def _sample(
    preset: Preset, headers: list[tuple[str, str]], body: bytes, url: str, now_ms: int
) -> Sample:
    """What a body says, of a batch the one element of it."""
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers]
    reading = Reading(pairs, body, preset.payload, preset.forms, url, now_ms)
    event_id = find(reading, preset.event_id, "id").text
    # What has no id is stored by its digest.
    event_id = event_id or f"sha256:{sha256(body).hexdigest()}"
    type = find(reading, preset.event_type, "type").text
    return Sample(event_id, type, headers, body, reading.document.value)


def change(document: Json, path: str, value: object) -> None:
    """Set what stands at a path such as `data.object.lines.data[0].amount`, made where missing.

    Raises ValueError in words.
    """
    steps = _steps(path)
    place: Any = document
    for step, following in itertools.pairwise(steps):
        place = _descend(place, step, [] if isinstance(following, int) else {}, path)
    _descend(place, steps[-1], value, path, replace=True)


def parse_change(text: str) -> tuple[str, object]:
    """`path=value` of the command line; the value is JSON where it can be, otherwise text."""
    path, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{cut(text)}: write PATH=VALUE, as in data.object.id=in_1")
    _steps(path)
    try:
        found = json.loads(value)
        json.dumps(found)
    except RecursionError as error:
        raise ValueError(f"the value of {path} is nested too deeply; use --file") from error
    except ValueError:
        return path, value
    return path, found


# What to try next


def advice(settings: Settings, source: str, sample: Sample, status: int, word: str) -> str:
    """What to do after a sample was answered so: words with a command in them."""
    rules = settings.rules_for(source, sample.type)
    if word == "done":
        return _after_done(settings, source, rules, sample)
    if word == "parked":
        return _after_parked(settings, source, rules, sample)
    if word == "pending":
        return _after_pending(settings, source, sample)
    if word == "ignored":
        return _after_ignored(settings.sources[source], rules, sample)
    if word == "rejected":
        return "the server has another secret or clock; restart it, or run `receiver check`"
    if word == "duplicate":
        return f"nothing new was done, this event was here before: {_show(sample)}"
    # Some senders want words of their own, or none.
    if status < 300:
        return _show(sample)
    return "the server's log says more"


def _after_ignored(source: Source, rules: Sequence[Rule], sample: Sample) -> str:
    mode = source.contract.preset.livemode
    said = None if mode is None else look_up(sample.document, mode.at.pointer or ())
    if source.contract.livemode and mode is not None and said == mode.test:
        return "a test event on a live source is ignored; send it to one with livemode = false"
    why = why_none_applied(rules, sample.type, _scope(sample))
    return f"{why}; compare [[rules]] with {_show(sample)}"


def _after_done(settings: Settings, source: str, rules: Sequence[Rule], sample: Sample) -> str:
    effects = [rule.effect for rule in rules]
    if any(isinstance(effect, Grant | Reverse) for effect in effects):
        return "`receiver balance`"
    if any(isinstance(effect, Record) for effect in effects):
        return "`receiver records`"
    if any(rule.send for rule in rules):
        return "`receiver outbox list`"
    customer = next((_customer(rule, sample) for rule in rules), None)
    for rule in settings.rules:
        event_type = rule.concrete_type
        if source in rule.sources and rule.customer is not None and event_type is not None:
            return _send(source, event_type, customer=customer)
    return _show(sample)


def _after_pending(settings: Settings, source: str, sample: Sample) -> str:
    if settings.sources[source].mode != "queued":
        return f"a handler failed: {_show(sample)} has its error"
    if settings.worker.run == "separate":
        return f"`receiver work` applies it, if it is running: {_show(sample)}"
    return f"the worker applies it: {_show(sample)}"


def _after_parked(settings: Settings, source: str, rules: Sequence[Rule], sample: Sample) -> str:
    for rule in rules:
        if isinstance(rule.effect, Reverse):
            granting = _granting(settings, source, rule.effect.operation)
            subject = _value(rule.effect.subject, sample)
            if granting is not None and subject is not None:
                return f"send what it takes back first: {_send_subject(source, granting, subject)}"
    customer = next(filter(None, (_customer(rule, sample) for rule in rules)), None)
    linking = next((rule for rule in settings.rules if _links(rule, source)), None)
    event_type = None if linking is None else linking.concrete_type
    if customer is None:
        named = f"{quote(sample.event_id)} --workspace {WORKSPACE}"
        return f"it names no customer: `receiver parked attribute {named}`"
    if event_type is None:
        return f"link it: `receiver links add {source} {quote(customer)} {WORKSPACE}`"
    return f"send the link first: {_send(source, event_type, customer=customer)}"


def _send(source: str, event_type: str, *, customer: str | None) -> str:
    option = "" if customer in (None, CUSTOMER) else f" --customer {quote(customer or '')}"
    return f"`receiver send {source} {event_type}{option}`"


def _send_subject(source: str, granting: Rule, subject: str) -> str:
    event_type = granting.concrete_type or "TYPE"
    path = "_event.id" if granting.subject is None else granting.subject.text
    option = f"--id {quote(subject)}"
    if path != "_event.id":
        option = f"--set {quote(f'{path}={subject}')}"
    return f"`receiver send {source} {event_type} {option}`"


def _show(sample: Sample) -> str:
    return f"`receiver events show {quote(sample.event_id)}`"


def _granting(settings: Settings, source: str, operation: str) -> Rule | None:
    for rule in settings.rules:
        if rule.operation == operation and source in rule.sources and rule.concrete_type:
            return rule
    return None


def _links(rule: Rule, source: str) -> bool:
    return (
        isinstance(rule.effect, Link) and source in rule.sources and rule.concrete_type is not None
    )


def _customer(rule: Rule, sample: Sample) -> str | None:
    path = rule.effect.customer if isinstance(rule.effect, Link) else rule.customer
    return None if path is None else _value(path, sample)


def _value(path: Any, sample: Sample) -> str | None:
    try:
        found = path.value(_scope(sample))
    except Unjudgeable:
        return None
    return None if found is None else str(found)


def _scope(sample: Sample) -> Scope:
    return Scope(sample.document, {"_event": {"id": sample.event_id, "type": sample.type}})


# Building a body


def _document(source: Source, wish: Wish, event_id: str) -> Any:
    preset = source.contract.preset
    document = _sample_of(preset, wish) if wish.body is None else _read(preset, wish.body)
    _stamp(document, source, wish, event_id)
    if wish.customer is not None:
        change(document, bodies.customer_at(source.scheme, wish.type), wish.customer)
    for path, value in wish.changes:
        change(document, path, value)
    return document


def _read(preset: Preset, body: bytes) -> Any:
    found = _decoded(body)
    if not isinstance(found, type(_empty(preset))):
        what = "object" if isinstance(_empty(preset), dict) else "list"
        raise ValueError(f"the file is not a JSON {what}; send it unchanged with --exact")
    return found


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _sample_of(preset: Preset, wish: Wish) -> Any:
    made = bodies.SENDERS.get(preset.name)
    if made is not None:
        return made(wish)
    document = _empty(preset)
    if any(locator.kind == "key" for locator in preset.event_type):
        # The first name that it has is its type.
        return document
    about = {"customer": wish.customer or CUSTOMER, "created_at": bodies.iso(wish.now_ms)}
    if isinstance(document, dict):
        document |= about
    for locator, value in (
        *signing.spread(preset.event_time, bodies.iso(wish.now_ms)),
        *signing.spread(preset.account, ACCOUNT),
    ):
        signing.place(document, locator, value)
    if preset.event_id and preset.event_id[0].kind == "body":
        # Nothing else makes it another event.
        document["sample"] = wish.token
    return document


def _empty(preset: Preset) -> Any:
    """The body without anything in it: a list, where the sender sends several events at once."""
    first = [place for locator in preset.event_id[:1] for place in locator.places]
    return [{}] if any(at.pointer and at.pointer[0].isdecimal() for at in first) else {}


def _stamp(document: Any, source: Source, wish: Wish, event_id: str) -> None:
    """Say the id, type, mode and account where that sender has them in the body."""
    contract, preset = source.contract, source.contract.preset
    of_type = signing.spread(_suiting(preset.event_type, document), wish.type)
    for at, text in (*of_type, *_id_pieces(document, preset, event_id, of_type)):
        signing.place(document, at, text)
    if contract.account is not None:
        for at, text in signing.spread(preset.account, contract.account):
            signing.place(document, at, text)
    if preset.livemode is not None:
        livemode, mode = contract.livemode or False, preset.livemode
        signing.place(document, mode.at, mode.live if livemode else mode.test)
        if isinstance(document, dict) and isinstance(document.get("data"), dict):
            inner = document["data"].get("object")
            if isinstance(inner, dict):
                inner["livemode"] = livemode


_Pieces = Sequence[tuple[Locator, str]]


def _id_pieces(document: Any, preset: Preset, event_id: str, of_type: _Pieces) -> _Pieces:
    """What stands where for an id: of a joined one, the first place that is not the type's."""
    for first in _suiting(preset.event_id, document)[:1]:
        pieces = signing.cut(first, event_id)
        if pieces is None:
            places = [one for one in first.places if one.kind in ("json", "form")]
            free = [one for one in places if not any(one.same(at) for at, _ in of_type)]
            told = [*preset.account, *preset.event_time]
            free.sort(key=lambda one: any(one.same(at) for at in told))
            others = [(one, "1") for one in free[1:] if not signing.has(document, one)]
            pieces = [(free[0], event_id), *others] if free else []
        return [(one, t) for one, t in pieces if not any(one.same(at) for at, _ in of_type)]
    return ()


def _suiting(locators: Sequence[Locator], document: Any) -> Sequence[Locator]:
    """The locators from the first on whose places the body has; all of them if it has none."""
    for number, locator in enumerate(locators):
        if all(signing.has(document, one) for one in locator.places):
            return locators[number:]
    return locators


def _steps(path: str) -> list[str | int]:
    steps: list[str | int] = []
    if len(path) > PATH_CHARS_MAX:
        raise ValueError(f"a path of more than {PATH_CHARS_MAX} characters")
    for part in path.split("."):
        found = _STEP.fullmatch(part)
        if found is None:
            raise ValueError(f"{path!r} is not a path; write names and dots, as in data.object.id")
        steps.append(found[1])
        steps.extend(int(index) for index in re.findall(r"\d+", found[2]))
    return steps


def _descend(
    place: Any, step: str | int, value: object, path: str, *, replace: bool = False
) -> Any:
    if isinstance(step, str):
        if not isinstance(place, dict):
            raise ValueError(f"{path}: {step} would stand in what is not an object")
        if replace or place.get(step) is None:
            place[step] = value
        return place[step]
    if not isinstance(place, list) or step > len(place):
        raise ValueError(f"{path}: there is no [{step}] to set")
    if step == len(place):
        place.append(value)
    elif replace or place[step] is None:
        place[step] = value
    return place[step]


def _key(source: Source) -> bytes:
    secrets = source.contract.signing
    unsigned = all(scheme.algo == "none" for scheme in source.contract.preset.schemes)
    if unsigned:
        return b""
    if not secrets:
        raise ValueError(f"sources.{source.name}.secrets is empty, so nothing can be signed")
    return secrets[0].value


def _signer(source: Source, private_key: bytes | None) -> Signer:
    contract = source.contract
    by = signing.signer(contract.preset, _key(source), private_key)
    if by.scheme.algo == "paypal":
        known, signature = contract.certificate, signing.raw(by, b"")
        if known is None or not known.verify(signature, b""):
            raise ValueError(
                f"sources.{source.name}.secrets has no secret named {paypal.PINNED} with the "
                "certificate of the private key; without it the server asks PayPal for one"
            )
    return by


def _event_id(preset: Preset, token: str) -> str:
    if preset.name == "stripe":
        return f"evt_{token}"
    if preset.name in ("github", "shopify"):
        return str(uuid.uuid5(uuid.NAMESPACE_URL, token))
    return f"msg_{token}"
