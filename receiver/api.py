"""What a sender's API is like, as data: where it is, how a key is shown, where a resource is."""

from collections.abc import Mapping
from urllib.parse import quote

import msgspec

from receiver import listing
from receiver.described import Described
from receiver.destinations import HEADER_NAME, RESERVED_HEADERS
from receiver.select import Condition, Path, Unjudgeable

# The table `api` of senders/NAME.toml, or of a `scheme` that a founder writes:
#   base_url     https://..., without a slash at its end
#   auth         how the key is shown: bearer, basic (as the user name), or header:NAME
#   account      header:NAME that names the account, for an event that has one
#   version      header:NAME that names the version of the API, where the source asks for one
#   headers      others that the sender wants
#   test_keys, live_keys   how the keys of each mode begin
#   says         path of the short word for what went wrong, in an answer that refuses
#   missing      what a 404 says of a resource that is not there (without it: any 404)
#   misplaced    what it says of one that is there, but not for this key
#   id, livemode, deleted   of a resource: the path of its id and of its mode, and what one says
#                that is deleted, although it can be read
#   resources    KIND = "/path/{id}"
#   events       the list of events, and books those of what is paid: see receiver/listing.py
KEYS = (
    *("base_url", "auth", "account", "version", "headers", "test_keys", "live_keys", "says"),
    *("missing", "misplaced", "id", "livemode", "deleted", "resources", "events", "books"),
)

PATH_CHARS_MAX = 500

#: The headers of a request that are ours, in lower case.
_OURS = RESERVED_HEADERS | {"accept-encoding", "authorization", "user-agent"}


class SenderApi(msgspec.Struct, frozen=True):
    """One sender's API; the fields are those of the table."""

    base_url: str | None = None
    auth: str = "bearer"
    account: str | None = None
    version: str | None = None
    headers: Mapping[str, str] = {}
    test_keys: tuple[str, ...] = ()
    live_keys: tuple[str, ...] = ()
    says: Path | None = None
    missing: Condition | None = None
    misplaced: Condition | None = None
    id: Path | None = None
    livemode: Path | None = None
    deleted: Condition | None = None
    resources: Mapping[str, str] = {}
    events: listing.Listing | None = None
    books: listing.Books | None = None

    def mode_of(self, key: bytes) -> bool | None:
        """Whether a key is for live data, as far as its beginning tells."""
        text = key.decode("utf-8", "replace")
        if text.startswith(self.test_keys):
            return False
        return True if text.startswith(self.live_keys) else None


def parse(reader: Described) -> SenderApi:
    """Check and compile the table."""
    reader.unknown(KEYS)
    return SenderApi(
        base_url=_base_url(reader),
        auth=_auth(reader),
        account=_header(reader, "account"),
        version=_header(reader, "version"),
        headers=_headers(reader),
        test_keys=reader.texts("test_keys"),
        live_keys=reader.texts("live_keys"),
        says=reader.path("says"),
        missing=reader.condition("missing"),
        misplaced=reader.condition("misplaced"),
        id=reader.path("id"),
        livemode=reader.path("livemode"),
        deleted=reader.condition("deleted"),
        resources=_resources(reader),
        events=listing.parse(reader, "events"),
        books=listing.parse_books(reader, "books"),
    )


def path_problem(path: str) -> str | None:
    """Why a resource can't be there."""
    if len(path) > PATH_CHARS_MAX or not path.isascii() or not path.isprintable() or " " in path:
        return f"expected at most {PATH_CHARS_MAX} printable ASCII characters without spaces"
    if not path.startswith("/") or path.startswith("//") or "#" in path:
        return "is not the path of a resource; write /v1/things/{id}"
    if path.count("{id}") != 1 or path.count("{") + path.count("}") != 2:
        return "has no {id}, or something else in braces; write /v1/things/{id}"
    return None


def filled(path: str, resource_id: str) -> str:
    """The path of one resource. Raises Unjudgeable for an id that would name another place."""
    if not resource_id.strip("."):
        raise Unjudgeable("id", "has dots alone, which no path can hold")
    return path.replace("{id}", quote(resource_id, safe=""))


def _base_url(reader: Described) -> str | None:
    found = reader.line("base_url")
    if found is not None and not found.startswith(("https://", "http://")):
        reader.fail("base_url", "is not the address of a web server; write https://host")
    return None if found is None else found.rstrip("/")


def _auth(reader: Described) -> str:
    found = reader.line("auth") or "bearer"
    if found in ("bearer", "basic"):
        return found
    return _header(reader, "auth") or "bearer"


def _header(reader: Described, key: str) -> str | None:
    """`header:NAME` as it is; the name is what the client needs."""
    found = reader.line(key)
    if found is None:
        return None
    kind, _, name = found.partition(":")
    if kind == "header" and HEADER_NAME.fullmatch(name) and name.lower() not in _OURS:
        return name
    reader.fail(key, "must be header:NAME, and no header that is written anyway")
    return None


def _headers(reader: Described) -> dict[str, str]:
    found = reader.table.get("headers", {})
    if isinstance(found, dict) and all(
        HEADER_NAME.fullmatch(name)
        and name.lower() not in _OURS
        and isinstance(one, str)
        and one.isascii()
        and one.isprintable()
        for name, one in found.items()
    ):
        return dict(found)
    reader.fail("headers", "must be a table of headers, each one line of ASCII")
    return {}


def _resources(reader: Described) -> dict[str, str]:
    found = reader.table.get("resources", {})
    if not isinstance(found, dict):
        reader.fail("resources", 'must be a table of KIND = "/path/{id}"')
        return {}
    for kind, path in found.items():
        problem = path_problem(path) if isinstance(path, str) else "must be a path"
        if problem is not None:
            reader.fail(f"resources.{kind}", problem)
    return {kind: path for kind, path in found.items() if isinstance(path, str)}
