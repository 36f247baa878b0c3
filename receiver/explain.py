"""Says in plain words why a delivery was refused; a guess that matches explains, never proves."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from receiver import presets, variations
from receiver.coded import CertificateMissing
from receiver.console import rfc3339
from receiver.extract import Locator, Reading
from receiver.presets import BEARERS, HMACS, CryptographyMissing, Derivation, Preset, SecretError
from receiver.verify import EXPIRED, Contract, Delivery, Rejected, Secret, verify

#: Senders named for headers that look like theirs.
ALIKE_MAX = 3
#: Two clocks are off alike within so many seconds, or that part of what they are off.
ALIKE_S = 60
ALIKE_PART = 0.1


class Finding(NamedTuple):
    """One thing found out: a `cause` in one word, and words that say what to do, too."""

    cause: str
    words: str


class Clocks(msgspec.Struct, frozen=True):
    """What tells which clock is off: what else came within minutes of the delivery.

    `skews` are sources and seconds of lateness of genuine deliveries that were refused for
    their time; `accepted` counts by source those that passed, of senders that sign the time.
    """

    now_ms: int
    skews: Sequence[tuple[str, int]] = ()
    accepted: Mapping[str, int] = {}


def explain(
    contract: Contract,
    delivery: Delivery,
    others: Sequence[Contract] = (),
    clocks: Clocks | None = None,
) -> tuple[Finding, ...]:
    """Why the delivery is refused; `others` are the contracts of other sources."""
    try:
        verify(contract, delivery)
    except CertificateMissing as missing:
        return (Finding("certificate", str(missing)),)
    except Rejected as rejected:
        if rejected.reason == EXPIRED:
            return tuple(_of_time(contract, delivery, rejected, clocks))
        return tuple(_of_signature(contract, delivery, others))
    return (
        Finding("valid", "signature and time are right: under the config as it is it is accepted"),
    )


def explain_unkept(preset: Preset, names: Sequence[str], body_bytes: int | None) -> list[Finding]:
    """The same of a request whose body and header values were not kept, from what was."""
    given = [name.encode("latin-1", "replace") for name in names]
    found = list(_missing(preset, Reading([(name, b"?") for name in given], b"")))
    if not found and body_bytes == 0:
        found.append(
            Finding("body-changed", "the body was empty: see what in front of Receiver drops it")
        )
    return found


# The time


def _of_time(
    contract: Contract, delivery: Delivery, rejected: Rejected, clocks: Clocks | None
) -> Iterator[Finding]:
    skew_s = rejected.skew_s or 0
    late = skew_s > 0
    how = "late" if late else "early"
    received = rfc3339(delivery.received_ms)
    yield Finding(
        "late" if late else "early",
        f"the signature is right, only the time is not: received at {received} by this machine's "
        f"clock, {abs(skew_s)} s {how} by the time that the sender signed ({rejected.detail})",
    )
    if clocks is not None:
        yield _which_clock(contract.source, skew_s, clocks)
        yield Finding("clock-now", f"this machine's clock says now: {rfc3339(clocks.now_ms)}")


def _which_clock(source: str, skew_s: int, clocks: Clocks) -> Finding:
    ours = "ahead" if skew_s > 0 else "behind"
    theirs = "behind" if skew_s > 0 else "ahead"
    alike = [name for name, other_s in clocks.skews if _alike(skew_s, other_s)]
    others = sorted(set(alike) - {source})
    if others:
        return Finding(
            "our-clock",
            f"deliveries of {', '.join(others)} were off alike at that time: this machine's clock "
            f"is (or was) {ours} by about {abs(skew_s)} s; set it (`timedatectl set-ntp true`)",
        )
    passed = {name: count for name, count in clocks.accepted.items() if count}
    if passed:
        words = ", ".join(f"{count} of {name}" for name, count in sorted(passed.items()))
        agrees = f"this machine's clock is right by others that passed at that time ({words})"
        if source not in passed and alike.count(source) > 1:
            return Finding(
                "their-clock",
                f"{agrees}, and {alike.count(source)} of {source} are off alike: the sender's "
                f"clock is {theirs}; tell the sender",
            )
        held = "held up on the way or sent again by somebody" if skew_s > 0 else "signed ahead"
        return Finding("this-delivery", f"{agrees}: this delivery alone was {held}")
    return Finding(
        "some-clock",
        f"nothing else came at that time to compare with: either this machine's clock is {ours} "
        f"or the sender's is {theirs}"
        + (", or the delivery was held up" if skew_s > 0 else "")
        + "; compare `date -u` with another clock",
    )


def _alike(skew_s: int, other_s: int) -> bool:
    room_s = max(ALIKE_S, abs(skew_s) * ALIKE_PART)
    return (skew_s > 0) == (other_s > 0) and abs(skew_s - other_s) <= room_s


# The signature


def _of_signature(
    contract: Contract, delivery: Delivery, others: Sequence[Contract]
) -> Iterator[Finding]:
    name = contract.source
    if not contract.signing:
        yield Finding(
            "no-secret", f"sources.{name}.secrets is empty: add the sender's signing secret"
        )
        return
    missing = list(_missing(contract.preset, Reading(delivery.headers, b"")))
    if missing:
        yield from missing
        return
    found = next(_guesses(contract, delivery, others), None)
    if found is not None:
        yield found
        return
    varied = "body, URL or secret" if contract.preset.signs_url else "body or secret"
    yield Finding(
        "unexplained",
        f"no variation of {varied} would match either: most likely it is another "
        "endpoint's secret, or one of the other mode (test, live): copy it from the sender again; "
        "else something in front of Receiver changed the body",
    )


def _guesses(
    contract: Contract, delivery: Delivery, others: Sequence[Contract]
) -> Iterator[Finding]:
    """Findings whose variation matches, the cheapest to find out first."""
    yield from _secrets_of_others(contract, delivery, others)
    yield from _forms_of_secret(contract, delivery)
    yield from _urls(contract, delivery)
    yield from _encodings(contract, delivery)
    yield from _bodies(contract, delivery)
    yield from _senders(contract, delivery, others)


def _missing(preset: Preset, reading: Reading) -> Iterator[Finding]:
    """That headers which every scheme needs are not there."""
    lacking = []
    for scheme in preset.schemes:
        needed = [at for at in (scheme.sig, scheme.ts, scheme.id) if at is not None]
        lacking.append([at.text for at in needed if at.kind == "header" and not reading.raw(at)])
    if not lacking or not all(lacking):
        return
    words = " or ".join(" and ".join(dict.fromkeys(texts)) for texts in lacking[:ALIKE_MAX])
    alike = _alike_senders(preset, reading)
    what = (
        f"; its headers look like those of {' or '.join(alike)}: is this the URL of another sender?"
        if alike
        else "; either the request is not from the sender, or something in front removed it"
    )
    yield Finding("missing-header", f"{words} is missing{what}")


def _alike_senders(preset: Preset, reading: Reading) -> list[str]:
    found = []
    for name in presets.names():
        sigs = [scheme.sig for scheme in presets.get(name).schemes]
        if name != preset.name and any(_is_telling(at) and reading.raw(at) for at in sigs if at):
            found.append(name)
    return found[:ALIKE_MAX]


def _is_telling(locator: Locator) -> bool:
    return locator.kind == "header" and locator.name != b"authorization"


def _secrets_of_others(
    contract: Contract, delivery: Delivery, others: Sequence[Contract]
) -> Iterator[Finding]:
    for other in others:
        for secret in other.signing:
            if _matches(contract, delivery, secrets=(secret,)):
                yield Finding(
                    "other-secret",
                    f"it is signed with {secret.reference}, a secret of source {other.source}: "
                    f"the two are swapped, or the sender posts to the wrong URL; give "
                    f"sources.{contract.source}.secrets the right one",
                )


def _forms_of_secret(contract: Contract, delivery: Delivery) -> Iterator[Finding]:
    if all(scheme.algo == "none" for scheme in contract.preset.schemes):
        return
    plain = _with_plain_keys(contract)
    for secret in contract.signing:
        for how, key in variations.secrets(secret.value):
            if _matches(plain, delivery, secrets=(Secret(secret.reference, key),)):
                yield Finding(
                    "secret-form",
                    f"it matches with {secret.reference} {how}: the secret has the wrong form; "
                    "copy it from the sender again as it stands there, or correct `secret` in a "
                    "scheme of your own",
                )


def _with_plain_keys(contract: Contract) -> Contract:
    """The contract with each secret's own bytes as its key, whatever its schemes make of it."""
    schemes = tuple(
        msgspec.structs.replace(scheme, secret=(Derivation("utf8"),))
        for scheme in contract.preset.schemes
    )
    return msgspec.structs.replace(
        contract, preset=msgspec.structs.replace(contract.preset, schemes=schemes)
    )


def _urls(contract: Contract, delivery: Delivery) -> Iterator[Finding]:
    for url in variations.urls(delivery.url, delivery.headers):
        if not _matches(contract, msgspec.structs.replace(delivery, url=url)):
            continue
        if contract.preset.in_path:
            # The URL that is right ends in the secret.
            yield Finding(
                "url-differs",
                "the secret is right but not at the end of the path as it stands in the config: "
                "let the proxy pass the path on as it is",
            )
        else:
            ours, theirs = urlsplit(delivery.url), urlsplit(url)
            parts = ("scheme", "netloc", "path", "query")
            names = ("scheme", "host or port", "path", "query")
            differ = [
                name
                for part, name in zip(parts, names, strict=True)
                if getattr(ours, part) != getattr(theirs, part)
            ]
            yield Finding(
                "url-differs",
                f"the sender signed another URL: {_bare(url)}, while this was judged as "
                f"{_bare(delivery.url)} ({', '.join(differ)} differ); set "
                f"sources.{contract.source}.public_url so that it is what the sender has, and let "
                "the proxy pass path and query on as they are",
            )


def _encodings(contract: Contract, delivery: Delivery) -> Iterator[Finding]:
    """What a founder's own scheme may have got wrong."""
    for algo, enc in itertools.product(HMACS, ("hex", "base64")):
        schemes = tuple(
            msgspec.structs.replace(scheme, algo=algo, enc=enc, hex_any_case=enc == "hex")
            for scheme in contract.preset.schemes
            if scheme.algo in HMACS
        )
        preset = msgspec.structs.replace(contract.preset, schemes=schemes)
        if _matches(msgspec.structs.replace(contract, preset=preset), delivery):
            yield Finding(
                "encoding-differs",
                f"the signature is {algo} in {enc}, not as the scheme says: correct algo, enc or "
                "hex_any_case of the scheme",
            )


def _bare(url: str) -> str:
    """Without what the query says."""
    return url.partition("?")[0] + ("?..." if "?" in url else "")


def _bodies(contract: Contract, delivery: Delivery) -> Iterator[Finding]:
    # A bearer's secret says nothing of the body.
    if all(scheme.algo in BEARERS for scheme in contract.preset.schemes):
        return
    body = delivery.body if delivery.inflated is None else delivery.inflated
    for how, guess in variations.bodies(body, contract.preset.payload):
        changed = msgspec.structs.replace(delivery, body=guess, inflated=None)
        if _matches(contract, changed):
            yield Finding(
                "body-changed",
                f"the body was changed on the way: it matches {how}; whatever stands in front "
                "must hand on the bytes as they came",
            )


def _senders(
    contract: Contract, delivery: Delivery, others: Sequence[Contract]
) -> Iterator[Finding]:
    for other in others:
        if other.preset.name != contract.preset.name and _matches(other, delivery):
            yield Finding(
                "other-source",
                f"it is genuine for source {other.source}: the sender posts to the wrong URL",
            )


def _matches(
    contract: Contract, delivery: Delivery, secrets: tuple[Secret, ...] | None = None
) -> bool:
    """Whether the signature would be right, whatever the time."""
    try:
        timeless = msgspec.structs.replace(
            contract,
            tolerance_s=math.inf,
            secrets=contract.secrets if secrets is None else secrets,
        )
        verify(timeless, delivery)
    except (Rejected, CertificateMissing, CryptographyMissing, SecretError):
        return False
    return True
