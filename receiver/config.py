"""Turns the configuration file into frozen structures, or names everything wrong with it."""

import ipaddress
import json
import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, cast
from urllib.parse import urlsplit

import msgspec

from receiver import presets, references, select
from receiver.extract import parse_mask
from receiver.presets import CryptographyMissing, Preset, PresetError
from receiver.references import References, Unresolved
from receiver.select import Condition, Statement, Template, nearest_or_all
from receiver.verify import Contract, Secret
from store.schema import AMOUNT_MAX

CONFIG_BYTES_MAX = 1_048_576
NAME_CHARS_MAX = 100
PATTERN_CHARS_MAX = 200
ACCOUNT_CHARS_MAX = 500
SECRETS_MAX = 20
STATEMENTS_MAX = 20
TOLERANCE_S_MAX = 86_400
BODY_BYTES_MIN, BODY_BYTES_DEFAULT, BODY_BYTES_MAX = 1_024, 1_048_576, 67_108_864
PENDING_DEFAULT, PENDING_MAX = 1_024, 100_000
PORT_MAX = 65_535
# What entries by the app itself, and corrections by hand, have in place of an identity.
RESERVED_IDENTITIES = ("app", "operator")
# The kernel's limit for the path of a unix socket, in bytes.
UNIX_PATH_BYTES_MAX = 107
# What is remembered of which rules a type has: entries, and characters of a type.
RULES_CACHED_MAX = 1_024
TYPE_CACHED_CHARS_MAX = 200

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class ConfigError(Exception):
    """The configuration can't be used; each of `problems` begins with its key path."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Address(msgspec.Struct, frozen=True):
    """Where a listener is: `host` and `port` (0: any free one), or a unix socket's path."""

    host: str = ""
    port: int = 0
    unix: Path | None = None

    def __str__(self) -> str:
        if self.unix is not None:
            return f"unix:{self.unix}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.unix is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


class Tls(msgspec.Struct, frozen=True):
    certificate: Path
    key: Path


class Server(msgspec.Struct, frozen=True):
    listen: Address = Address("127.0.0.1", 8080)
    admin: Address = Address("127.0.0.1", 8081)
    # "unix" stands for whoever connects to a unix socket.
    trusted_proxies: tuple[Network | Literal["unix"], ...] = ()
    tls: Tls | None = None
    proxy_terminates_tls: bool = False
    body_bytes_max: int = BODY_BYTES_DEFAULT
    pending_max: int = PENDING_DEFAULT


class Source(msgspec.Struct, frozen=True):
    name: str
    scheme: str
    contract: Contract
    mode: Literal["sync", "queued"] = "sync"
    body_gzip: bool = False
    allow_ips: tuple[Network, ...] = ()
    # The server's own, if the source has none; without a slash at its end.
    public_url: str | None = None


class Grant(msgspec.Struct, frozen=True):
    """Either `amount`, or the one of `amounts` that the value of `by` names."""

    unit: str
    amount: int | None = None
    by: select.Path | None = None
    amounts: Mapping[str, int] = {}


class Reverse(msgspec.Struct, frozen=True):
    """Takes back the entry of `operation` for that subject; without `amount`, all that is left."""

    operation: str
    subject: select.Path
    amount: select.Path | None = None


class Link(msgspec.Struct, frozen=True):
    customer: select.Path
    workspace: select.Path


class Record(msgspec.Struct, frozen=True):
    kind: str
    data: Template


class Sql(msgspec.Struct, frozen=True):
    statements: tuple[Statement, ...]


class Call(msgspec.Struct, frozen=True):
    function: str


Effect = Grant | Reverse | Link | Record | Sql | Call


class Rule(msgspec.Struct, frozen=True):
    operation: str
    sources: tuple[str, ...]
    on: tuple[str, ...]
    when: Condition | None = None
    expect: Condition | None = None
    subject: select.Path | None = None
    customer: select.Path | None = None
    effect: Effect | None = None

    def matches(self, source: str, event_type: str) -> bool:
        return source in self.sources and any(_fits(pattern, event_type) for pattern in self.on)


class Settings(msgspec.Struct, frozen=True):
    path: Path
    database: Path
    sources: Mapping[str, Source]
    rules: tuple[Rule, ...]
    server: Server = Server()
    handlers: Path | None = None
    env_file: Path | None = None
    public_url: str | None = None
    warnings: tuple[str, ...] = ()
    _rules_for: dict[tuple[str, str], tuple[Rule, ...]] = msgspec.field(default_factory=dict)

    def rules_for(self, source: str, event_type: str) -> tuple[Rule, ...]:
        """The rules for events of that type, `link` rules first, then in the file's order."""
        known = self._rules_for.get((source, event_type))
        if known is not None:
            return known
        matching = [rule for rule in self.rules if rule.matches(source, event_type)]
        found = tuple(sorted(matching, key=lambda rule: not isinstance(rule.effect, Link)))
        # Types are the sender's words, so what is remembered of them is bounded.
        if source in self.sources and len(event_type) <= TYPE_CACHED_CHARS_MAX:
            if len(self._rules_for) >= RULES_CACHED_MAX:
                self._rules_for.clear()
            self._rules_for[source, event_type] = found
        return found

    @property
    def operations(self) -> tuple[str, ...]:
        """The names of operations, each once, in the file's order."""
        return tuple(dict.fromkeys(rule.operation for rule in self.rules))

    @property
    def identities(self) -> tuple[str, ...]:
        """The identities of the sources, each once, in the file's order."""
        return tuple(dict.fromkeys(one.contract.identity for one in self.sources.values()))


def load(
    path: Path, *, secrets: bool = True, environment: Mapping[str, str] = os.environ
) -> Settings:
    """Read the file at `path`; raises ConfigError with every problem.

    Without `secrets` nothing outside the file is looked at: secrets stay empty, and neither the
    env_file nor the files of handlers and TLS need to be there.
    """
    path = path.absolute()
    return build(_read(path), path, secrets=secrets, environment=environment)


def build(
    document: Mapping[str, object],
    path: Path,
    *,
    secrets: bool = True,
    environment: Mapping[str, str] = os.environ,
) -> Settings:
    """As `load`, of the decoded file; `path` is where relative paths begin."""
    return _Builder(path, secrets, environment).settings(document)


def _read(path: Path) -> dict[str, object]:
    try:
        text = references.read_bytes(path, CONFIG_BYTES_MAX).decode("utf-8-sig")
        return tomllib.loads(text)
    except Unresolved as error:
        raise ConfigError([str(error)]) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            [f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8"]
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"{path}: not TOML: {error}; correct it there"]) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            [f"{path}: not TOML: a number is too long, or tables are nested too deeply; shorten it"]
        ) from error


def _fits(pattern: str, text: str) -> bool:
    """Whether a text is what the pattern says, where each `*` stands for any characters."""
    first, *rest = pattern.split("*")
    if not rest:
        return text == pattern
    *middle, last = rest
    at, end = len(first), len(text) - len(last)
    if at > end or not text.startswith(first) or not text.endswith(last):
        return False
    for part in middle:
        at = text.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True


# Reading tables


class _Report:
    def __init__(self) -> None:
        self.problems: list[str] = []
        self.warnings: list[str] = []

    def problem(self, where: str, words: str) -> None:
        self.problems.append(f"{where}: {words}")

    def warning(self, where: str, words: str) -> None:
        self.warnings.append(f"{where}: {words}")


class _Table:
    """One table of the file; what is unknown or of the wrong kind is reported and left out."""

    def __init__(
        self, report: _Report, where: str, values: Mapping[str, object], known: Collection[str] = ()
    ) -> None:
        self.report = report
        self.where = where
        self.values = values
        for key in values if known else ():
            if key not in known:
                self.problem(key, f"unknown key{nearest_or_all(key, known)}")

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def at(self, key: str) -> str:
        key = key if _BARE_KEY.fullmatch(key) else json.dumps(_cut(key), ensure_ascii=False)
        return f"{self.where}.{key}" if self.where else key

    def problem(self, key: str, words: str) -> None:
        self.report.problem(self.at(key), words)

    def warning(self, key: str, words: str) -> None:
        self.report.warning(self.at(key), words)

    def require(self, key: str, words: str) -> None:
        if key not in self.values:
            self.problem(key, f"is missing; {words}")

    def _typed(self, key: str, wanted: type, words: str) -> object | None:
        value = self.values.get(key)
        if value is None or type(value) is wanted:
            return value
        self.problem(key, f"expected {words}, got {_kind(value)}")
        return None

    def text(self, key: str) -> str | None:
        """A text with something in it, and no control characters."""
        value = cast(str | None, self._typed(key, str, "a string"))
        if value is None or (value.strip() and value.isprintable()):
            return value
        self.problem(key, "is empty or has a control character; write one line of text")
        return None

    def name(self, key: str) -> str | None:
        value = cast(str | None, self._typed(key, str, "a string"))
        if value is None or _is_name(value):
            return value
        self.problem(key, _NAME_WORDS)
        return None

    def boolean(self, key: str) -> bool | None:
        return cast(bool | None, self._typed(key, bool, "true or false"))

    def integer(self, key: str, least: int, most: int) -> int | None:
        value = cast(int | None, self._typed(key, int, "an integer"))
        if value is None or least <= value <= most:
            return value
        self.problem(key, f"expected {least} to {most}")
        return None

    def items(self, key: str) -> list[object]:
        return cast(list[object], self._typed(key, list, "a list") or [])

    def texts(self, key: str) -> tuple[str, ...]:
        items = self.items(key)
        found = tuple(item for item in items if isinstance(item, str) and item)
        if len(found) < len(items):
            self.problem(key, "expected a list of strings, none of them empty")
        return found

    def table(self, key: str, known: Collection[str] = ()) -> "_Table | None":
        value = cast(dict[str, object] | None, self._typed(key, dict, "a table"))
        return None if value is None else _Table(self.report, self.at(key), value, known)

    def file(self, key: str, directory: Path) -> Path | None:
        text = self.text(key)
        return None if text is None else directory / text

    def path(self, key: str) -> select.Path | None:
        """A JMESPath, or a list of them."""
        value = self.values.get(key)
        several = isinstance(value, list) and all(isinstance(one, str) for one in value)
        if value is None or not (several or isinstance(value, str)):
            self._typed(key, str, "a path or a list of paths")
            return None
        try:
            return select.Path.compile(cast(str | list[str], value))
        except ValueError as error:
            self.problem(key, f"{error}; write a path such as data.object.id")
            return None

    def condition(self, key: str) -> Condition | None:
        table = self.table(key)
        if table is None:
            return None
        before = len(self.report.problems)
        if not table.values:
            self.problem(key, 'is empty; write { "data.object.status" = "paid" }, or leave it out')
        for path, want in table.values.items():
            # An operator at a time, so that each bad one is named.
            several = want.items() if isinstance(want, dict) and want else ()
            parts: list[object] = [{name: literal} for name, literal in several]
            for part in parts or [want]:
                try:
                    Condition.compile({path: part})
                except ValueError as error:
                    table.problem(path, str(error))
        if len(self.report.problems) > before:
            return None
        return Condition.compile(table.values)

    def networks(self, key: str) -> tuple[Network, ...]:
        found = (self._network(key, text) for text in self.texts(key))
        return tuple(network for network in found if network is not None)

    def _network(self, key: str, text: str) -> Network | None:
        try:
            around = ipaddress.ip_network(text, strict=False)
        except ValueError:
            self.problem(key, f"{_cut(text)!r} is no address or network; write 10.0.0.0/8")
            return None
        try:
            return _unmapped(ipaddress.ip_network(text))
        except ValueError:
            self.problem(key, f"{text!r} is an address within a network; write {around}")
            return None


def _unmapped(network: Network) -> Network:
    """IPv4 within IPv6 as IPv4, which is how the peers' addresses are compared."""
    mapped = network.version == 6 and network.network_address.ipv4_mapped
    if not mapped or network.prefixlen < _MAPPED_PREFIX:
        return network
    return ipaddress.IPv4Network((mapped, network.prefixlen - _MAPPED_PREFIX))


def _kind(value: object) -> str:
    for wanted, words in _KINDS:
        if isinstance(value, wanted):
            return words
    return "a date or time"


def _cut(text: str) -> str:
    return text if len(text) <= NAME_CHARS_MAX else text[:NAME_CHARS_MAX] + "..."


def _is_name(text: str) -> bool:
    return len(text) <= NAME_CHARS_MAX and _NAME.fullmatch(text) is not None


# Building


class _Builder:
    """Builds the settings of one file, and collects what is wrong with it."""

    def __init__(self, path: Path, secrets: bool, environment: Mapping[str, str]) -> None:
        self.report = _Report()
        self.path = path
        self.directory = path.parent
        self.secrets = secrets
        self.environment = environment
        self.references = References(self.directory, environment)

    def settings(self, document: Mapping[str, object]) -> Settings:
        top = _Table(self.report, "", document, _TOP_KEYS)
        database = self._database(top)
        env_file = top.file("env_file", self.directory)
        if self.secrets and env_file is not None:
            self._read_env_file(top, env_file)
        handlers = self._existing(top, "handlers")
        public_url = _url(top, "public_url")
        server = self._server(top)
        sources = self._sources(top, public_url)
        rules = self._rules(top, sources)
        _check_allow_ips(self.report, sources, server)
        _check_identities(self.report, sources)
        _check_operations(self.report, rules)
        _check_reversals(self.report, rules, sources)
        if self.report.problems:
            raise ConfigError(self.report.problems)
        return Settings(
            path=self.path,
            database=database,
            sources=sources,
            rules=tuple(rules.values()),
            server=server,
            handlers=handlers,
            env_file=env_file,
            public_url=public_url,
            warnings=tuple(self.report.warnings),
        )

    def _database(self, top: _Table) -> Path:
        named = top.file("database", self.directory)
        if named is not None:
            return named
        # systemd names several, with colons between, where a unit has several.
        state = self.environment.get("STATE_DIRECTORY", "").partition(":")[0]
        return (Path(state) if state else self.directory) / "receiver.db"

    def _read_env_file(self, top: _Table, env_file: Path) -> None:
        try:
            lines, problems = references.read_env_file(env_file)
        except Unresolved as error:
            top.problem("env_file", str(error))
            return
        for problem in problems:
            top.problem("env_file", problem)
        self.references = References(self.directory, self.environment, lines, env_file)

    def _existing(self, table: _Table, key: str) -> Path | None:
        path = table.file(key, self.directory)
        if path is not None and self.secrets and not os.path.isfile(path):
            table.problem(
                key, f"{path}: no such file for this user (create it, or correct the path)"
            )
        return path

    def _server(self, top: _Table) -> Server:
        table = top.table("server", _SERVER_KEYS)
        if table is None:
            return Server()
        usual = Server()
        server = Server(
            listen=self._address(table, "listen") or usual.listen,
            admin=self._address(table, "admin") or usual.admin,
            trusted_proxies=_trusted(table),
            tls=self._tls(table),
            proxy_terminates_tls=table.boolean("proxy_terminates_tls") or False,
            body_bytes_max=table.integer("body_bytes_max", BODY_BYTES_MIN, BODY_BYTES_MAX)
            or usual.body_bytes_max,
            pending_max=table.integer("pending_max", 1, PENDING_MAX) or usual.pending_max,
        )
        _check_server(table, server)
        return server

    def _address(self, table: _Table, key: str) -> Address | None:
        text = table.text(key)
        if text is None:
            return None
        try:
            return _address(text, self.directory)
        except ValueError as error:
            table.problem(key, f"{error}; write 127.0.0.1:8080 or unix:/run/receiver/http.sock")
            return None

    def _tls(self, server: _Table) -> Tls | None:
        table = server.table("tls", ("certificate", "key"))
        if table is None:
            return None
        table.require("certificate", "name the file with the certificate and its chain")
        table.require("key", "name the file with the private key")
        certificate, key = self._existing(table, "certificate"), self._existing(table, "key")
        return None if certificate is None or key is None else Tls(certificate, key)

    def _sources(self, top: _Table, public_url: str | None) -> dict[str, Source]:
        sources: dict[str, Source] = {}
        tables = top.table("sources")
        if tables is None or not tables.values:
            top.warning("sources", "there is none, so nothing is received; add [sources.NAME]")
        for name in tables.values if tables is not None else ():
            assert tables is not None, "it has names"
            if not _is_name(name):
                tables.problem(name, _NAME_WORDS)
            table = tables.table(name, _SOURCE_KEYS)
            source = None if table is None else self._source(name, table, public_url)
            if source is not None:
                sources[name] = source
        return sources

    def _source(self, name: str, table: _Table, public_url: str | None) -> Source | None:
        preset = _preset(table)
        identity = _identity(name, table)
        account = _account(table)
        livemode = table.boolean("livemode")
        tolerance_s = _tolerance_s(table)
        volatile = _volatile(table)
        secrets = self._secrets(table, preset)
        url = _url(table, "public_url")
        _check_mode(table)
        allow_ips = table.networks("allow_ips")
        body_gzip = table.boolean("gzip")
        if preset is None or identity is None:
            return None
        _warn_of(table, preset, livemode, url or public_url)
        try:
            contract = Contract(
                source=name,
                identity=identity,
                preset=preset,
                secrets=secrets,
                account=account,
                livemode=livemode,
                tolerance_s=tolerance_s,
                volatile=tuple(dict.fromkeys((*preset.volatile, *volatile))),
            )
        except CryptographyMissing as error:
            table.problem("secrets", str(error))
            return None
        return Source(
            name=name,
            scheme=preset.name,
            contract=contract,
            body_gzip=body_gzip or False,
            allow_ips=allow_ips,
            public_url=url or public_url,
        )

    def _secrets(self, source: _Table, preset: Preset | None) -> tuple[Secret, ...]:
        items = source.items("secrets")
        if len(items) > SECRETS_MAX:
            source.problem("secrets", f"has more than {SECRETS_MAX}; remove those no longer used")
        unsigned = preset is not None and all(one.algo == "none" for one in preset.schemes)
        if not source.values.get("secrets") and not unsigned:
            source.warning(
                "secrets", 'is empty, so every delivery is rejected; add "env:NAME" or "file:/path"'
            )
        found = [
            self._secret(f"{source.at('secrets')}[{i}]", item, preset)
            for i, item in enumerate(items[:SECRETS_MAX])
        ]
        return tuple(secret for secret in found if secret is not None)

    def _secret(self, where: str, item: object, preset: Preset | None) -> Secret | None:
        values = item if isinstance(item, dict) else {"secret": item}
        table = _Table(self.report, where, values, _SECRET_KEYS)
        if not isinstance(item, str | dict):
            self.report.problem(
                where, f"expected a reference or a table with one, got {_kind(item)}"
            )
            return None
        table.require("secret", f"write {references.KINDS}")
        reference = table.text("secret")
        account, livemode, name = _account(table), table.boolean("livemode"), table.name("name")
        if reference is None:
            return None
        shape = preset if name is None else None
        value = self._value(
            where if isinstance(item, str) else table.at("secret"), reference, shape
        )
        if value is None:
            return None
        return Secret(
            reference=reference, value=value, account=account, livemode=livemode, name=name
        )

    def _value(self, where: str, reference: str, preset: Preset | None) -> bytes | None:
        try:
            references.check(reference)
            if not self.secrets:
                return b""
            value, warning = self.references.resolve(reference)
        except Unresolved as error:
            self.report.problem(where, str(error))
            return None
        if warning is not None:
            self.report.warning(where, warning)
        return value if _has_shape(self.report, where, reference, value, preset) else None

    def _rules(self, top: _Table, sources: Mapping[str, Source]) -> dict[str, Rule]:
        """The rules by where they stand, such as `rules[0]`."""
        rules: dict[str, Rule] = {}
        named = top.values.get("sources")
        declared = list(named) if isinstance(named, dict) else []
        for i, values in enumerate(top.items("rules")):
            where = f"rules[{i}]"
            if not isinstance(values, dict):
                self.report.problem(
                    where, f"expected a table, got {_kind(values)}; write [[rules]]"
                )
                continue
            table = _Table(self.report, where, values, _RULE_KEYS)
            rule = _rule(table, declared)
            _check_paths(table, rule, sources)
            _warn_of_subject(table, rule)
            if isinstance(rule.effect, Call) and "handlers" not in top:
                table.problem("call", 'needs a file of functions; set handlers = "handlers.py"')
            rules[where] = rule
        return rules


# The parts of the server


def _address(text: str, directory: Path) -> Address:
    if text.startswith("unix:"):
        path = directory / text.removeprefix("unix:")
        if path == directory:
            raise ValueError("names no socket")
        if len(os.fsencode(path)) > UNIX_PATH_BYTES_MAX:
            raise ValueError(f"{path} is longer than {UNIX_PATH_BYTES_MAX} bytes")
        return Address(unix=path)
    host, _, port = text.rpartition(":")
    if not host:
        raise ValueError("is not an address with a port")
    if ":" in host and not (host[0] == "[" and host[-1] == "]"):
        raise ValueError("an IPv6 address stands in brackets, as in [::1]:8080")
    host = host.removeprefix("[").removesuffix("]")
    if not _HOST.fullmatch(host):
        raise ValueError("has no address before its port")
    if not _PORT.fullmatch(port) or int(port) > PORT_MAX:
        raise ValueError(f"has a port that is not 0 to {PORT_MAX}")
    return Address(host, int(port))


def _trusted(table: _Table) -> tuple[Network | Literal["unix"], ...]:
    key = "trusted_proxies"
    values = table.values.get(key)
    if not isinstance(values, list) or "unix" not in values:
        return table.networks(key)
    others = {key: [value for value in values if value != "unix"]}
    return ("unix", *_Table(table.report, table.where, others).networks(key))


def _check_server(table: _Table, server: Server) -> None:
    listen, admin = server.listen, server.admin
    if not listen.is_local and server.tls is None and not server.proxy_terminates_tls:
        table.problem(
            "listen",
            f"{listen} can be reached without TLS; listen on 127.0.0.1, set tls, or set "
            "proxy_terminates_tls = true if a proxy in front does TLS",
        )
    if not admin.is_local:
        table.warning(
            "admin",
            f"{admin} can be reached from other machines, and asks nobody who they are; "
            "use 127.0.0.1 or a firewall",
        )
    if _collide(listen, admin):
        table.problem("admin", f"{admin} is where listen is, too; give it an address of its own")
    for network in server.trusted_proxies:
        if not isinstance(network, str) and network.prefixlen == 0:
            table.warning(
                "trusted_proxies",
                f"{network} is everyone, so anyone can claim any address; name your proxies",
            )


def _collide(one: Address, other: Address) -> bool:
    if one.unix is not None or other.unix is not None:
        return one.unix == other.unix
    everywhere = {"0.0.0.0", "::"} & {one.host, other.host}  # noqa: S104  compared, not bound
    return one.port == other.port != 0 and (one.host == other.host or bool(everywhere))


# The parts of a source


def _preset(table: _Table) -> Preset | None:
    value = table.values.get("scheme")
    if value is None:
        names = ", ".join(presets.PRESETS)
        table.problem("scheme", f"is missing; name the sender ({names}), or write a table")
        return None
    if not isinstance(value, str | dict):
        table.problem("scheme", f"expected a preset's name or a table, got {_kind(value)}")
        return None
    try:
        return presets.get(value) if isinstance(value, str) else presets.parse(value)
    except PresetError as error:
        # A table's problems begin with its keys.
        joint = ": " if isinstance(value, str) else "."
        table.report.problems += [f"{table.at('scheme')}{joint}{one}" for one in error.problems]
        return None


def _identity(name: str, table: _Table) -> str | None:
    identity = table.name("identity") if "identity" in table else name
    if identity in RESERVED_IDENTITIES:
        table.problem(
            "identity", f"{identity!r} stands for ledger entries made without a sender; set another"
        )
        return None
    return identity


def _account(table: _Table) -> str | None:
    account = table.text("account")
    if account is not None and len(account) > ACCOUNT_CHARS_MAX:
        table.problem("account", f"is longer than {ACCOUNT_CHARS_MAX} characters; shorten it")
    return account


def _tolerance_s(table: _Table) -> float | None:
    value = table.values.get("tolerance_s")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        table.problem("tolerance_s", f"expected a number of seconds, got {_kind(value)}")
        return None
    if not 0 < value <= TOLERANCE_S_MAX:
        table.problem("tolerance_s", f"expected more than 0 and at most {TOLERANCE_S_MAX} seconds")
        return None
    return value


def _volatile(table: _Table) -> tuple[str, ...]:
    fields = table.texts("volatile")
    for field in fields:
        try:
            parse_mask(field)
        except ValueError as error:
            table.problem("volatile", str(error))
    return fields


def _warn_of(table: _Table, preset: Preset, livemode: bool | None, url: str | None) -> None:
    if preset.livemode is not None and livemode is None:
        table.warning(
            "livemode", "is not set, so test events count like live ones; write true or false"
        )
    if preset.livemode is None and livemode is not None:
        table.warning("livemode", f"has no effect, as {preset.name} events have no mode")
    if url is None and any(scheme.has("url") for scheme in preset.schemes):
        table.warning(
            "public_url", "is not set, but the sender signs its URL; set it as the sender has it"
        )


def _check_mode(table: _Table) -> None:
    mode = table.text("mode")
    if mode == "queued":
        table.problem(
            "mode",
            "queued needs the worker, which this version does not have yet; "
            'write "sync", or leave it out',
        )
    elif mode not in (None, "sync"):
        table.problem("mode", f'expected "sync" or "queued", got {_cut(mode or "")!r}')


def _url(table: _Table, key: str) -> str | None:
    text = table.text(key)
    if text is None:
        return None
    example = "write it as https://hooks.example.com"
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or " " in text or not text.isascii():
        table.problem(key, f"is not the address of a web server; {example}")
        return None
    if parts.query or parts.fragment or parts.username is not None or text[-1] in "?#":
        table.problem(key, f"may not have a user, a query or a fragment; {example}")
        return None
    return text.rstrip("/")


def _has_shape(
    report: _Report, where: str, reference: str, value: bytes, preset: Preset | None
) -> bool:
    """Whether a secret can be one of that sender's; says why not."""
    if value.startswith(b"v1,whsec_"):
        report.problem(where, f"{reference} begins with v1,whsec_; remove the leading 'v1,'")
        return False
    if preset is None:
        return True
    if preset.name == "stripe" and not value.startswith(b"whsec_"):
        report.warning(
            where,
            f"{reference} does not begin with whsec_, as Stripe's signing secrets do; "
            "copy the endpoint's signing secret, not an API key",
        )
    wrong = presets.secret_problem(preset, value)
    if wrong is not None:
        report.problem(where, f"{reference} {wrong}; copy it from the sender again")
    return wrong is None


# The parts of a rule


def _rule(table: _Table, declared: Sequence[str]) -> Rule:
    table.require("operation", "name the business change, as in initial-credit-grant")
    table.require("source", "name a source, or a list of them")
    table.require("on", 'list the event types, or ["*"] for all')
    return Rule(
        operation=table.name("operation") or "",
        sources=_rule_sources(table, declared),
        on=_patterns(table),
        when=table.condition("when"),
        expect=table.condition("expect"),
        subject=table.path("subject"),
        customer=table.path("customer"),
        effect=_effect(table),
    )


def _rule_sources(table: _Table, declared: Sequence[str]) -> tuple[str, ...]:
    value = table.values.get("source")
    names = (value,) if isinstance(value, str) else table.texts("source")
    if value == []:
        table.problem("source", "is empty; name a source, or a list of them")
    for name in names:
        if name not in declared:
            hint = nearest_or_all(name, declared)
            table.problem("source", f"there is no source {_cut(name)!r}{hint}")
    return names


def _patterns(table: _Table) -> tuple[str, ...]:
    patterns = table.texts("on")
    if table.values.get("on") == []:
        table.problem("on", 'is empty; list the event types, or ["*"] for all')
    for i, pattern in enumerate(patterns):
        if len(pattern) > PATTERN_CHARS_MAX or not pattern.isprintable() or " " in pattern:
            table.report.problem(
                f"{table.at('on')}[{i}]",
                f"expected an event type of at most {PATTERN_CHARS_MAX} characters without spaces",
            )
    return patterns


def _effect(table: _Table) -> Effect | None:
    named = [key for key in _EFFECTS if key in table]
    if len(named) != 1:
        words = f"has {' and '.join(named)}; keep one, and write a rule for each other"
        none = f"has no effect; add one of {', '.join(_EFFECTS)}"
        table.report.problem(table.where, words if named else none)
    effects = [_EFFECTS[key](table) for key in named]
    return effects[0] if len(effects) == 1 else None


def _grant(rule: _Table) -> Grant | None:
    table = rule.table("grant", ("unit", "amount", "by", "amounts"))
    if "customer" not in rule:
        rule.problem("customer", "is missing; a grant needs the path of the sender's customer id")
    if table is None:
        return None
    table.require("unit", "name what is granted, as in credits")
    unit = table.name("unit")
    amount = table.integer("amount", 1, AMOUNT_MAX)
    by = table.path("by")
    amounts = _amounts(table)
    if "amount" in table and ("by" in table or "amounts" in table):
        table.problem("amount", "stands beside by or amounts; keep amount, or keep the other two")
    elif "amount" not in table and "by" not in table and "amounts" not in table:
        table.problem("amount", "is missing; write a number, or by and amounts")
    elif ("by" in table) != ("amounts" in table):
        missing = "amounts" if "by" in table else "by"
        table.problem(missing, "is missing; by and amounts go together")
    return None if unit is None else Grant(unit, amount, by, amounts)


def _amounts(grant: _Table) -> dict[str, int]:
    table = grant.table("amounts")
    if table is None:
        return {}
    if not table.values:
        grant.problem("amounts", "is empty; write one amount for each value of by")
    found = ((name, table.integer(name, 1, AMOUNT_MAX)) for name in table.values)
    return {name: amount for name, amount in found if amount is not None}


def _reverse(rule: _Table) -> Reverse | None:
    table = rule.table("reverse", ("operation", "subject", "amount"))
    if table is None:
        return None
    table.require("operation", "name the operation of the grant")
    table.require("subject", "name the path of what was granted for, as in data.object.invoice")
    operation = table.name("operation")
    subject, amount = table.path("subject"), table.path("amount")
    return None if operation is None or subject is None else Reverse(operation, subject, amount)


def _link(rule: _Table) -> Link | None:
    table = rule.table("link", ("customer", "workspace"))
    if "customer" in rule:
        rule.problem(
            "customer", "would wait for the link that this rule makes; keep link.customer alone"
        )
    if table is None:
        return None
    table.require("customer", "name the path of the sender's customer id")
    table.require("workspace", "name the path of your own id for the tenant")
    customer, workspace = table.path("customer"), table.path("workspace")
    return None if customer is None or workspace is None else Link(customer, workspace)


def _record(rule: _Table) -> Record | None:
    table = rule.table("record", ("kind", "data"))
    if table is None:
        return None
    table.require("kind", "name what is recorded, as in feedback-alert")
    table.require("data", 'write what is kept, as in { text = "{feedback.text}" }')
    kind = table.name("kind")
    if kind is None or "data" not in table:
        return None
    try:
        return Record(kind, Template.compile(table.values["data"]))
    except ValueError as error:
        table.problem("data", f"{error}; correct the template")
        return None


def _sql(rule: _Table) -> Sql | None:
    texts = rule.texts("sql")
    if rule.values["sql"] == [] or len(texts) > STATEMENTS_MAX:
        rule.problem("sql", f"expected 1 to {STATEMENTS_MAX} statements; write a list of texts")
        return None
    statements = []
    for i, text in enumerate(texts):
        try:
            statements.append(Statement.compile(text))
        except ValueError as error:
            rule.report.problem(f"{rule.at('sql')}[{i}]", str(error))
    return Sql(tuple(statements)) if len(statements) == len(texts) else None


def _call(rule: _Table) -> Call | None:
    function = rule.text("call")
    if function is None or function.isidentifier():
        return None if function is None else Call(function)
    rule.problem("call", "is not a function's name; write that of one in the handlers file")
    return None


# Checks of one table against another


def _check_paths(table: _Table, rule: Rule, sources: Mapping[str, Source]) -> None:
    """Whether our own names are used only where they are known, and may be trusted."""
    for where, path in _early_paths(rule):
        _check_own(table, where, path, known=False)
    for where, path in _late_paths(rule):
        _check_own(table, where, path, known=True)
    keys = [("subject", rule.subject)]
    if isinstance(rule.effect, Reverse):
        keys.append(("reverse.subject", rule.effect.subject))
    unsigned = [name for name in rule.sources if name in sources and not _signs_ids(sources[name])]
    for where, key in keys:
        if unsigned and key is not None and (key.uses_own("_event") or key.shows_root):
            table.report.problem(
                f"{table.where}.{where}",
                f"takes what {unsigned[0]} sends in headers that it does not sign; "
                "name a path in the body, or leave subject out: then it is the body's digest",
            )


def _warn_of_subject(table: _Table, rule: Rule) -> None:
    if len(set(rule.on)) > 1 and rule.subject is None and not isinstance(rule.effect, Link | None):
        table.warning(
            "subject",
            f"is not set, so each event does this again, and {rule.on[1]} as well as {rule.on[0]}; "
            "name the path of what it may happen once for",
        )


def _check_own(table: _Table, where: str, path: select.Path, *, known: bool) -> None:
    where = f"{table.where}.{where}"
    for name in ("_grant", "_message"):
        if path.uses_own(name):
            table.report.problem(where, f"{name} is not known here; take the value from the event")
    if not path.uses_own("_workspace"):
        return
    if not known:
        table.report.problem(where, "_workspace is not known here yet; take it from the event")
    elif "customer" not in table:
        table.report.problem(where, "_workspace needs a customer; add the path of the customer id")


def _early_paths(rule: Rule) -> Iterator[tuple[str, select.Path]]:
    """The paths that are read before the workspace is known."""
    for where, condition in (("when", rule.when), ("expect", rule.expect)):
        for path in condition.paths if condition else ():
            yield where, path
    for where, one in (("subject", rule.subject), ("customer", rule.customer)):
        if one is not None:
            yield where, one
    if isinstance(rule.effect, Link):
        yield "link.customer", rule.effect.customer
        yield "link.workspace", rule.effect.workspace


def _late_paths(rule: Rule) -> Iterator[tuple[str, select.Path]]:
    match rule.effect:
        case Grant(by=path) if path is not None:
            yield "grant.by", path
        case Reverse(subject=subject, amount=amount):
            yield "reverse.subject", subject
            if amount is not None:
                yield "reverse.amount", amount
        case Record(data=template):
            yield from (("record.data", path) for path in template.paths)
        case Sql(statements=statements):
            for i, statement in enumerate(statements):
                yield from ((f"sql[{i}]", path) for path in statement.paths)


def _signs_ids(source: Source) -> bool:
    preset = source.contract.preset
    return all(
        scheme.vouches_for(locator)
        for scheme in preset.schemes
        for locator in (*preset.event_id, *preset.event_type)
    )


def _check_allow_ips(report: _Report, sources: Mapping[str, Source], server: Server) -> None:
    if server.trusted_proxies or not server.listen.is_local:
        return
    for name, source in sources.items():
        if source.allow_ips:
            report.warning(
                f"sources.{name}.allow_ips",
                "would be compared with the address of the proxy before this server; "
                "name the proxy in server.trusted_proxies",
            )


def _check_identities(report: _Report, sources: Mapping[str, Source]) -> None:
    first: dict[str, Source] = {}
    for name, source in sources.items():
        other = first.setdefault(source.contract.identity, source)
        if other.contract.preset != source.contract.preset:
            report.problem(
                f"sources.{name}.identity",
                f"{source.contract.identity} is that of sources.{other.name}, which has another "
                "scheme; sources of one identity are one sender, so give one of them another",
            )


def _check_operations(report: _Report, rules: Mapping[str, Rule]) -> None:
    first: dict[str, tuple[str, Effect]] = {}
    for where, rule in rules.items():
        if rule.effect is None or not rule.operation:
            continue
        there, effect = first.setdefault(rule.operation, (where, rule.effect))
        if type(effect) is not type(rule.effect):
            report.problem(
                f"{where}.operation",
                f"{rule.operation} is also that of {there}, which has another effect; "
                "an operation does one thing, so name one of them otherwise",
            )


def _check_reversals(
    report: _Report, rules: Mapping[str, Rule], sources: Mapping[str, Source]
) -> None:
    granted = {
        (identity, rule.operation)
        for rule in rules.values()
        # A function may grant under the key of its rule.
        if isinstance(rule.effect, Grant | Call)
        for identity in _identities(rule, sources)
    }
    # What is wrong with these is said already.
    broken = {rule.operation for rule in rules.values() if rule.effect is None}
    for where, rule in rules.items():
        if not isinstance(rule.effect, Reverse) or rule.effect.operation in broken:
            continue
        operation = rule.effect.operation
        for identity in _identities(rule, sources):
            if (identity, operation) not in granted:
                names = [name for theirs, name in sorted(granted) if theirs == identity]
                hint = nearest_or_all(operation, names)
                report.problem(
                    f"{where}.reverse.operation", f"no rule of {identity} grants {operation}{hint}"
                )


def _identities(rule: Rule, sources: Mapping[str, Source]) -> list[str]:
    found = (sources[name].contract.identity for name in rule.sources if name in sources)
    return list(dict.fromkeys(found))


_TOP_KEYS = ("database", "handlers", "env_file", "public_url", "server", "sources", "rules")
_SERVER_KEYS = (
    *("listen", "admin", "trusted_proxies", "tls", "proxy_terminates_tls"),
    *("body_bytes_max", "pending_max"),
)
_SOURCE_KEYS = (
    *("scheme", "identity", "secrets", "livemode", "account", "mode", "tolerance_s"),
    *("volatile", "gzip", "allow_ips", "public_url"),
)
_SECRET_KEYS = ("secret", "account", "livemode", "name")
_EFFECTS = {
    "grant": _grant,
    "reverse": _reverse,
    "link": _link,
    "record": _record,
    "sql": _sql,
    "call": _call,
}
_RULE_KEYS = ("operation", "source", "on", "when", "expect", "subject", "customer", *_EFFECTS)
_KINDS: tuple[tuple[type, str], ...] = (
    (bool, "true or false"),
    (str, "a string"),
    (int, "an integer"),
    (float, "a float"),
    (list, "a list"),
    (dict, "a table"),
)
# Bits of an IPv6 address before the IPv4 one in it.
_MAPPED_PREFIX = 96
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*", re.ASCII)
_NAME_WORDS = (
    f"expected a name of at most {NAME_CHARS_MAX} characters: "
    "a-z, 0-9, then also . _ and - (it is part of keys and addresses)"
)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9.:%_-]+", re.ASCII)
_PORT = re.compile(r"[0-9]{1,5}", re.ASCII)
