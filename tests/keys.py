"""Secrets of the form that each sender has, and the private keys behind those that are public."""

import base64
import functools
from dataclasses import dataclass
from datetime import UTC, datetime

from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from receiver.presets import Preset, Scheme
from tests import authority


@dataclass(frozen=True)
class Keys:
    """What the operator stores, and what only the sender has."""

    secret: bytes
    private: bytes | None = None
    #: A certificate that is stored beside the secret.
    certificate: bytes | None = None


def keys_of(preset: Preset, seed: bytes = b"1") -> Keys:
    """Keys that fit the first scheme; others for another seed of one byte."""
    return _keys_of(preset.schemes[0], seed)


@functools.cache
def _keys_of(scheme: Scheme, seed: bytes) -> Keys:
    raw = seed * 32
    match scheme.algo:
        case "ed25519":
            return _pair(scheme, ed25519.Ed25519PrivateKey.from_private_bytes(raw))
        case "ecdsa-p256-sha256":
            return _pair(scheme, ec.derive_private_key(int.from_bytes(raw), ec.SECP256R1()))
        case "paypal":
            now = datetime.now(UTC)
            issued = authority.leaf(authority.root(now), "sample.example", now, days=3_650)
            return Keys(b"WEBHOOK" + seed, issued.key_pem, issued.pem)
        case "basic":
            return Keys(b"user:password" + seed)
    return Keys(_text(scheme, raw))


def _text(scheme: Scheme, raw: bytes) -> bytes:
    way = scheme.secret[0]
    if way.kind == "hex":
        return raw.hex().encode()
    if way.kind == "base64":
        return way.prefix + base64.b64encode(raw)
    return b"whsec_" + raw


def _pair(scheme: Scheme, private: ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> Keys:
    public = private.public_key()
    if isinstance(public, ed25519.Ed25519PublicKey):
        raw = public.public_bytes_raw()
    else:
        raw = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Keys(_text(scheme, raw), pem)
