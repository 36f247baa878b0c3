"""The schemes that data can't express: what each of them looks at, and who judges it."""

from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple, Protocol

import msgspec

from receiver.extract import Locator, Reading

Verifier = Callable[[bytes, bytes], bool]


class Certificate(msgspec.Struct, frozen=True):
    """A sender's certificate whose chain was proved; the times are UTC milliseconds."""

    not_before_ms: int
    not_after_ms: int
    # (signature, content) -> whether it is good
    verify: Verifier


class Certificates(Protocol):
    """What is known of certificates; `receiver.certificate_book.Book`, or a dict."""

    def get(self, url: str, /) -> Certificate | str | None:
        """The certificate at a URL, in words why what is there is none, or None: not known yet."""


NO_CERTIFICATES: Certificates = MappingProxyType[str, Certificate | str]({})


class Request(msgspec.Struct, frozen=True):
    """A delivery as a coded scheme sees it."""

    reading: Reading
    received_ms: int
    certificates: Certificates = NO_CERTIFICATES
    #: In place of all these.
    certificate: Certificate | None = None


class Unproved(Exception):
    """No key could prove the delivery; the message is for the operator and holds nothing secret."""


class CertificateMissing(Exception):
    """The delivery can't be judged before the certificate at `url` is known."""

    def __init__(self, url: str) -> None:
        super().__init__(f"the certificate at {url} is not known yet; the server fetches it")
        self.url = url


#: Whether a key proves the delivery that the test was made for.
Test = Callable[[bytes], bool]


class Coded(NamedTuple):
    """One scheme.

    `judge` reads a delivery and gives the test of a key; it raises Unproved, or CertificateMissing.
    """

    #: How it signs, for people.
    about: str
    judge: Callable[[Request], Test]
    #: Whether a good delivery proves what stands at a place.
    vouches_for: Callable[[Locator], bool]
    signs_url: bool = False


def single(reading: Reading, name: str) -> bytes:
    """The value of a header that has to be there once. Raises Unproved."""
    values = reading.header(name.lower().encode())
    if len(values) != 1:
        raise Unproved(f"header:{name} is {'there twice' if values else 'missing'}")
    return values[0]
