import base64
import functools
import re
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

from receiver import presets
from receiver.api import SenderApi
from receiver.presets import (
    PresetError,
    SecretError,
    Table,
    parse,
    secret_problem,
    secret_warning,
)

ROOT = Path(__file__).parents[1]
CUSTOM: Table = {
    "sig": "header:X-Signature",
    "algo": "sha256",
    "enc": "hex",
    "signed": "{body}",
    "event_id": "json:/id",
}


def problems_of(table: Table) -> tuple[str, ...]:
    with pytest.raises(PresetError) as caught:
        parse(table)
    return caught.value.problems


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_is_well_formed(name: str) -> None:
    preset = presets.get(name)

    assert preset.name == name
    assert preset.schemes
    assert preset.event_id


def test_an_unknown_preset_names_the_one_that_was_meant() -> None:
    with pytest.raises(PresetError, match=r"no preset is called 'strip' \(did you mean stripe\?\)"):
        presets.get("strip")


@pytest.mark.parametrize("name", ["../senders/stripe", "stripe.toml", "", "Stripe"])
def test_a_name_is_never_a_path(name: str) -> None:
    with pytest.raises(PresetError, match="no preset is called"):
        presets.get(name)


def test_the_names_are_known_without_reading_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", None)
    presets.names.cache_clear()

    assert "stripe" in presets.names()


def test_every_data_file_is_installed() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]

    patterns = declared["package-data"]["receiver"]

    installed = {path for pattern in patterns for path in (ROOT / "receiver").glob(pattern)}
    ours = (path for path in (ROOT / "receiver").rglob("*") if "__pycache__" not in path.parts)
    assert installed == {path for path in ours if path.is_file() and path.suffix != ".py"}


def test_every_problem_of_a_table_is_reported_with_its_key() -> None:
    table: Table = {
        "sgi": "header:X",
        "algo": "sha-256",
        "enc": 1,
        "signed": "{ts}.{bod}",
        "secret": ["utf8", "rot13"],
        "tolerance_s": -1,
        "event_id": ["id"],
        "event_type": 5,
        "livemode": "header:X-Live",
        "key": ["type"],
        "volatile": ["a..b"],
        "hex_any_case": "yes",
        "event_time": "at",
        "secret_shape": {"matches": "[a", "words": "x"},
        "deadline_s": "soon",
        "notes": [1],
    }

    problems = problems_of(table)

    named = [re.split("[:.]", problem)[0] for problem in problems]
    assert sorted(named) == sorted(table)
    assert "sgi: is not a known key (did you mean sig?)" in problems


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"sig": None}, "sig: is missing"),
        ({"algo": None}, "algo: is missing"),
        ({"enc": None}, "enc: is missing"),
        ({"signed": None}, "signed: is missing"),
        ({"signed": "body"}, "signed: covers nothing of the body"),
        ({"signed": "{header:X-Id}"}, "signed: covers nothing of the body"),
        ({"signed": "{body"}, "signed: has a brace without its other half"),
        ({"signed": "{ts}{body}"}, "signed: has {ts}, which needs ts or ts_key"),
        ({"signed": "{id}{body}"}, "signed: has {id}, which needs id"),
        ({"ts": "header:X-Time"}, "ts: proves nothing"),
        ({"id": "header:X-Id"}, "id: is not used"),
        ({"kv_sep": "="}, "kv_sep: needs sig_key"),
        ({"sig_key": "v1"}, "sig_key: needs kv_sep"),
        ({"ts_key": "t", "signed": "{ts}{body}"}, "ts_key: needs kv_sep and sig_key"),
        ({"kv_sep": "=", "sig_key": "v1", "ts_key": "t"}, "ts_key: proves nothing"),
        ({"tolerance_s": 300}, "tolerance_s: needs ts or ts_key"),
        ({"ts_unit": "ms"}, "ts_unit: needs ts or ts_key"),
        ({"algo": "token"}, "signed: has no use with this algo"),
        ({"algo": "none", "signed": None, "enc": None}, "sig: has no use with algo none"),
        ({"secret": "utf8:whsec_"}, "secret: 'utf8:whsec_' must be"),
        ({"schemes": []}, "sig: is not a known key"),
    ],
)
def test_what_does_not_fit_together_is_reported(change: Table, problem: str) -> None:
    table = {k: v for k, v in {**CUSTOM, **change}.items() if v is not None}

    problems = problems_of(table)

    assert any(p.startswith(problem) for p in problems), problems


@pytest.mark.parametrize(
    ("livemode", "problem"),
    [
        ({"at": "json:/mode", "live": "live"}, "livemode.test: must be true, false or a text"),
        ({"live": "live", "test": "test"}, "livemode.at: is missing"),
        ({"at": "header:X", "live": "a", "test": "b"}, "livemode: must be in the signed body"),
        ({"at": "json:/m", "live": "a", "test": "b", "tst": 1}, "livemode.tst: is not a known key"),
    ],
)
def test_what_a_mode_lacks_is_reported(livemode: Table, problem: str) -> None:
    assert any(p.startswith(problem) for p in problems_of({**CUSTOM, "livemode": livemode}))


def test_a_secret_that_looks_like_another_senders_is_named_but_not_shown() -> None:
    shape = {"matches": "lin_wh_.+", "words": "begins with lin_wh_"}
    preset = parse({**CUSTOM, "title": "Linear", "secret_shape": shape})

    assert secret_warning(preset, b"lin_wh_abc") is None
    assert secret_warning(preset, b"whsec_QUJD") == (
        "does not look like a secret of Linear, which begins with lin_wh_"
    )


@pytest.mark.parametrize("secret", [b"short", b"has a / in it, that is", b"\xff" * 20, b""])
def test_a_secret_that_can_not_stand_in_a_url_is_refused(secret: bytes) -> None:
    assert secret_problem(presets.get("gumroad"), b"a" * 16) is None
    assert "must be at least 16 letters" in str(secret_problem(presets.get("gumroad"), secret))


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_tells_people_what_they_need(name: str) -> None:
    preset = presets.get(name)

    assert preset.title != name or name == "svix"
    assert preset.docs is not None
    assert preset.docs.startswith("https://")
    assert preset.retry
    assert preset.recover
    assert bool(preset.event_id), "what has no id says `body`"


def test_problems_of_one_of_several_schemes_name_it() -> None:
    good = {k: v for k, v in CUSTOM.items() if k != "event_id"}

    assert problems_of({"schemes": [good, {**good, "algo": "md5"}, 7]}) == (
        "schemes[2]: must be a table",
        "schemes[1].algo: 'md5' must be one of sha256, sha1, sha512, ed25519, "
        "ecdsa-p256-sha256, token, basic, none, twilio, adyen, paypal",
        "schemes[2].algo: is missing; for example sha256",
    )
    assert problems_of({"schemes": []}) == ("schemes: must be a list of tables, at least one",)


def test_a_custom_table_is_read_like_a_preset() -> None:
    parsed, preset = parse(presets.table("stripe"), "stripe"), presets.get("stripe")

    # Compiled paths are never equal.
    plain = functools.partial(msgspec.structs.replace, api=SenderApi())
    assert plain(parsed) == plain(preset)
    assert parse(CUSTOM).schemes[0].signed[0].kind == "body"


def test_the_time_ahead_is_the_time_back_unless_it_is_given() -> None:
    table = {**CUSTOM, "ts": "header:T", "signed": "{ts}.{body}", "tolerance_s": 60}

    assert parse(table).schemes[0].future_s == 60
    assert parse({**table, "future_s": 5}).schemes[0].future_s == 5


@pytest.mark.parametrize(
    "timed",
    [
        {"ts": "header:T", "signed": "{ts}.{body}"},
        {"kv_sep": "=", "sig_key": "v1", "ts_key": "t", "signed": "{ts}.{body}"},
        {"ts": "json:/at"},
    ],
)
def test_a_time_that_is_signed_is_looked_at_unless_any_age_is_asked_for(timed: Table) -> None:
    (scheme,) = parse({**CUSTOM, **timed}).schemes
    (ageless,) = parse({**CUSTOM, **timed, "tolerance_s": False}).schemes

    assert (scheme.tolerance_s, scheme.future_s) == (300, 300)
    assert (ageless.tolerance_s, ageless.future_s) == (None, None)
    assert parse(CUSTOM).schemes[0].tolerance_s is None


def test_only_senders_that_document_no_age_have_none_though_they_sign_a_time() -> None:
    found = {
        name
        for name in presets.names()
        for scheme in presets.get(name).schemes
        if (scheme.ts or scheme.ts_key) and scheme.tolerance_s is None
    }

    assert found == {"discord", "sendgrid", "zendesk"}


def keys_of(derivation: str, secret: bytes) -> list[bytes]:
    scheme = parse({**CUSTOM, "secret": derivation}).schemes[0]
    return [key.value for key in presets.keys(scheme, secret)]


def test_secrets_are_decoded_only_as_the_scheme_says() -> None:
    assert keys_of("utf8", b"whsec_QUJD") == [b"whsec_QUJD"]
    assert keys_of("hex", b"00ff") == [b"\x00\xff"]
    assert keys_of("base64", b"QUJDRA==") == [b"ABCD"]
    assert keys_of("base64:whsec_", b"whsec_QUJDRA") == [b"ABCD"]
    assert keys_of("base64:whsec_", b"QUJDRA") == [b"ABCD"]


@pytest.mark.parametrize(
    ("derivation", "secret", "problem"),
    [
        ("utf8", b"", "is empty"),
        ("hex", b"", "is empty"),
        ("base64:whsec_", b"whsec_", "is empty"),
        ("base64", b"====", "is empty"),
        ("hex", b"0g", "must be hexadecimal"),
        ("base64", b"QUJ!", "must be base64"),
        ("base64:whsec_", b"v1,whsec_QUJDRA==", "v1, stands before it"),
        ("base64:whsec_", b"Bearer whsec_QUJDRA==", "something stands before it"),
    ],
)
def test_a_secret_that_makes_no_key_is_refused_without_being_shown(
    derivation: str, secret: bytes, problem: str
) -> None:
    with pytest.raises(SecretError, match=problem) as caught:
        keys_of(derivation, secret)

    assert "QUJ" not in str(caught.value)


def test_a_key_without_its_prefix_never_stands_in_for_a_public_one() -> None:
    preset = presets.get("standard-webhooks")
    public = b"1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4="

    assert secret_problem(preset, b"whpk_" + public) is None
    assert secret_problem(preset, b"whsec_" + public) is None
    assert secret_problem(preset, public) == "must start with whsec_, or must start with whpk_"
    with pytest.raises(SecretError):
        presets.keys(preset.schemes[0], b"whpk_" + public)


def test_a_public_key_of_the_wrong_kind_is_refused() -> None:
    short = b"whpk_" + base64.b64encode(b"x" * 31)
    ecdsa = parse({**CUSTOM, "algo": "ecdsa-p256-sha256", "enc": "base64", "secret": "base64"})

    assert "Ed25519 public key" in str(secret_problem(presets.get("standard-webhooks"), short))
    assert "DER" in str(secret_problem(ecdsa, base64.b64encode(b"no key")))


def test_a_public_key_without_cryptography_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    scheme = presets.get("standard-webhooks").schemes[1]
    public = b"whpk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4="

    with pytest.raises(presets.CryptographyMissing, match="pip install cryptography"):
        presets.keys(scheme, public)
    assert "pip install" in str(secret_problem(presets.get("standard-webhooks"), public))
    assert secret_problem(presets.get("standard-webhooks"), b"whsec_QUJD") is None


def test_a_sender_that_does_not_sign_needs_no_secret() -> None:
    assert secret_problem(parse({"algo": "none", "event_id": "json:/id"}), b"") is None


def test_a_key_is_not_shown() -> None:
    assert "whsec" not in repr(presets.keys(presets.get("stripe").schemes[0], b"whsec_x"))


PUBLIC: Table = {"sig": "header:X-Ed", "algo": "ed25519", "enc": "hex", "signed": "{body}"}


@pytest.mark.parametrize(
    ("secret", "public"),
    [
        ("utf8", "hex"),
        ("base64:whsec_", "hex"),
        ("base64:whsec_", "base64"),
        ("base64", "base64:whpk_"),
        (["base64:whsec_", "utf8"], "base64:whpk_"),
        ("base64:wh", "base64:whpk_"),
        ("base64:whpk_", "base64:whpk_"),
    ],
)
def test_a_public_key_can_never_be_the_key_of_an_hmac(secret: object, public: str) -> None:
    hmac = {key: value for key, value in CUSTOM.items() if key != "event_id"} | {"secret": secret}
    table = {"schemes": [hmac, {**PUBLIC, "secret": public}], "event_id": "json:/id"}

    (problem,) = problems_of(table)

    assert problem.startswith("schemes: a public key is no secret")


def test_schemes_whose_secrets_differ_by_their_prefixes_may_stand_together() -> None:
    hmac = {key: value for key, value in CUSTOM.items() if key != "event_id"}
    schemes = [{**hmac, "secret": "base64:whsec_"}, {**PUBLIC, "secret": "base64:whpk_"}]

    assert len(parse({"schemes": schemes, "event_id": "json:/id"}).schemes) == 2
