"""Deliveries as their senders make them, each with the verdict that it must get."""

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from receiver.verify import Delivery, Secret

Vector = Mapping[str, Any]

VECTORS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "vectors.json").read_text()
)
# The sender's name for one delivery of an event, of which ours knows nothing.
NO_FACT = {"delivery_id"}


def named(name: str) -> dict[str, Any]:
    return next(vector for vector in VECTORS if vector["id"] == name)


def facts(vector: Vector) -> dict[str, str]:
    """What must be read in a delivery, or in the first event of a batch: id, type, account."""
    wanted: dict[str, Any] = vector.get("extract", {})
    first = {"event_id": wanted["event_ids"][0]} if "event_ids" in wanted else {}
    return first | {
        name: value for name, value in wanted.items() if name not in {*NO_FACT, "event_ids"}
    }


def secrets(vector: Vector) -> tuple[Secret, ...]:
    return tuple(
        Secret(f"env:SECRET_{i}", text.encode(), name=name)
        for i, (text, name) in enumerate(_texts(vector["secret"]))
    )


def _texts(secret: object) -> list[tuple[str, str | None]]:
    """The texts of a vector's secrets, with their names; user and password are one text."""
    match secret:
        case str():
            return [(secret, None)]
        case list():
            return [(text, None) for text in secret]
        case {"username": str(user), "password": str(password)}:
            return [(f"{user}:{password}", None)]
        case {"signing_secret": str(text)}:
            return [(text, None)]
        case dict():
            return [(text, name) for name, text in secret.items()]
    return []


def body(vector: Vector) -> bytes:
    text: str = vector["body"]
    return base64.b64decode(text) if vector["body_encoding"] == "base64" else text.encode()


def delivery(vector: Vector) -> Delivery:
    pairs = tuple(
        (name.lower().encode(), value.encode())
        for name, values in vector["headers"].items()
        for value in ([values] if isinstance(values, str) else values)
    )
    at_ms = vector["now"] * 1000
    return Delivery(vector["method"], vector["url"], pairs, body(vector), at_ms)


def config(vector: Vector) -> tuple[str, str]:
    """A config file with the vector's sender as source x, and the .env beside it."""
    found = secrets(vector)
    tables = [
        f'{{ secret = "{one.reference}"' + (f', name = "{one.name}" }}' if one.name else " }")
        for one in found
    ]
    lines = (f"SECRET_{i}={json.dumps(one.value.decode())}\n" for i, one in enumerate(found))
    text = (
        'env_file = ".env"\n[sources.x]\n'
        f'scheme = "{vector["provider"]}"\nsecrets = [{", ".join(tables)}]\n'
    )
    return text, "".join(lines)
