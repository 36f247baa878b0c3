"""Turns the configuration file into frozen structures, or names everything wrong with it."""

import ipaddress
import os
import re
import shutil
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import SplitResult, parse_qsl, urlsplit

import msgspec

from receiver import (
    caveats,
    letters,
    listing,
    mail,
    place,
    presets,
    projection,
    references,
    select,
    thresholds,
)
from receiver.api import SenderApi
from receiver.destinations import (
    HEADER_NAME,
    RESERVED_HEADERS,
    Command,
    Destination,
    Email,
    Http,
    Policy,
)
from receiver.extract import parse_mask
from receiver.place import CONFIG_BYTES_MAX
from receiver.presets import Preset, PresetError, SecretError
from receiver.projection import Needed
from receiver.projection import Project as Project
from receiver.references import References, Unresolved
from receiver.select import (
    Condition,
    Scope,
    Statement,
    Template,
    Unjudgeable,
    nearest,
    nearest_or_all,
)
from receiver.tables import NAME_CHARS_MAX, NAME_WORDS, Report, Table, cut, is_name, kind_of
from receiver.tables import Network as Network
from receiver.thresholds import Thresholds
from receiver.verify import Contract, Secret
from store.outbox import ALERTS
from store.schema import AMOUNT_MAX

PATTERN_CHARS_MAX = 200
ACCOUNT_CHARS_MAX = 500
SECRETS_MAX = 20
STATEMENTS_MAX = 20
SENDS_MAX = 20
TOLERANCE_S_MAX = 86_400
DAYS_MAX = 36_500
PAYLOAD_DAYS = 90
BACKUPS_KEPT, BACKUPS_KEPT_MAX = 7, 10_000
BODY_BYTES_MIN, BODY_BYTES_DEFAULT, BODY_BYTES_MAX = 1_024, 1_048_576, 67_108_864
PENDING_DEFAULT, PENDING_MAX = 1_024, 100_000
PORT_MAX = 65_535
WORKER_THREADS_MAX = 32
ATTEMPTS_MAX = 10_000
AGE_S_MIN, AGE_S_MAX = 60, 31_536_000
BACKOFF_S_MAX = 86_400
# How long a source may be silent before the worker looks what it missed.
SILENCE_S_MIN, SILENCE_S_MAX = 3_600, 2_592_000
URL_CHARS_MAX = 2_000
HEADERS_MAX = 20
ARGUMENTS_MAX = 100
HTTP_TIMEOUT_S, HTTP_TIMEOUT_S_MAX = 10, 300
EMAIL_TIMEOUT_S, EMAIL_TIMEOUT_S_MAX = 10, 300
COMMAND_TIMEOUT_S, COMMAND_TIMEOUT_S_MAX = 60, 3_600
IDEMPOTENT_S_MAX = 31_536_000
# Standard Webhooks asks for keys of at least so many bytes.
SIGNING_KEY_BYTES_MIN = 24
# What entries by the app itself, corrections by hand and alerts have in place of an identity.
RESERVED_IDENTITIES = ("app", "operator", ALERTS)
# The kernel's limit for the path of a unix socket, in bytes.
UNIX_PATH_BYTES_MAX = 107
# What is remembered of which rules a type has: entries, and characters of a type.
RULES_CACHED_MAX = 1_024
TYPE_CACHED_CHARS_MAX = 200


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
        return self.unix is not None or _is_loopback(self.host)


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


class Worker(msgspec.Struct, frozen=True):
    """Where the worker runs, and how long it goes on trying; an attempt is made at least once."""

    run: Literal["inside", "separate", "off"] = "inside"
    threads: int = 2
    # More than the pauses leave room for in three days: by default it is age that ends it.
    attempts_max: int = 200
    age_max_s: int = 259_200
    backoff_first_s: int = 5
    backoff_max_s: int = 3_600


class Retention(msgspec.Struct, frozen=True):
    """How long bodies are kept; without `ignored`, none of an event that no rule wants."""

    payload_days: int = PAYLOAD_DAYS
    ignored: bool = True


class Backup(msgspec.Struct, frozen=True):
    """The folder that backups go to (beside the database if None), and how many stay there."""

    path: Path | None = None
    keep: int = BACKUPS_KEPT


class Api(msgspec.Struct, frozen=True):
    """The sender's API: by which key it is read, and what it is like."""

    key: bytes
    base_url: str
    sender: SenderApi = SenderApi()
    # Of the API; the sender's own choice, if None.
    version: str | None = None
    # Where its events are listed; None: nowhere that is known.
    events: str | None = None
    # After so much silence the worker reconciles, by itself.
    silence_s: float | None = None

    def __repr__(self) -> str:
        return f"Api({self.base_url!r})"


class Source(msgspec.Struct, frozen=True):
    name: str
    scheme: str
    contract: Contract
    mode: Literal["sync", "queued"] = "sync"
    body_gzip: bool = False
    allow_ips: tuple[Network, ...] = ()
    # The server's own, if the source has none; without a slash at its end.
    public_url: str | None = None
    retention: Retention = Retention()
    api: Api | None = None
    # Whether bodies of deliveries that are not genuine are kept, to explain them.
    keep_rejected: bool = False
    # Of a sender that signs with certificates.
    certificates_url: str | None = None
    #: An alert opens when it was genuinely heard of before, but not for so long; None: never.
    silence_s: int | None = None

    def url_path(self, reveal: bool = False) -> str:
        """The path of its URL; a secret in it is shown only if `reveal`, with secrets read."""
        path = f"/webhooks/{self.name}"
        if not self.contract.preset.in_path:
            return path
        secret = next(iter(self.contract.signing), None) if reveal else None
        return f"{path}/<secret>" if secret is None else f"{path}/{secret.value.decode()}"


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


Effect = Grant | Reverse | Link | Record | Project | Sql | Call


class Send(msgspec.Struct, frozen=True):
    """A message that a rule owes to the destination `to`; `name` tells several apart."""

    to: str
    name: str = ""


class Rule(msgspec.Struct, frozen=True):
    """What one type of event causes: an effect, messages, or both."""

    operation: str
    sources: tuple[str, ...]
    on: tuple[str, ...]
    when: Condition | None = None
    expect: Condition | None = None
    subject: select.Path | None = None
    customer: select.Path | None = None
    effect: Effect | None = None
    send: tuple[Send, ...] = ()
    # The function of the handlers that the worker runs before `call`, outside any transaction.
    prepare: str | None = None
    # What the rule knows as `_resource`.
    resource: Needed | None = None

    def matches(self, source: str, event_type: str) -> bool:
        return source in self.sources and any(_fits(pattern, event_type) for pattern in self.on)

    @property
    def concrete_type(self) -> str | None:
        """The first of its types that is no pattern."""
        return next((one for one in self.on if "*" not in one), None)


class Settings(msgspec.Struct, frozen=True):
    path: Path
    database: Path
    sources: Mapping[str, Source]
    rules: tuple[Rule, ...]
    server: Server = Server()
    worker: Worker = Worker()
    backup: Backup = Backup()
    destinations: Mapping[str, Destination] = {}
    alerts: Thresholds = Thresholds()
    handlers: Path | None = None
    env_file: Path | None = None
    public_url: str | None = None
    warnings: tuple[str, ...] = ()
    _rules_for: dict[tuple[str, str], tuple[Rule, ...]] = msgspec.field(default_factory=dict)

    def source_of(self, name: str, identity: str, event_type: str) -> Source | None:
        """The source that judges a stored event: the one that it came in by.

        Where that is gone, the only one of its identity, if it has rules for such an event: it is
        the same sender's, under another name.
        """
        if name in self.sources:
            return self.sources[name]
        heirs = [one for one in self.sources.values() if one.contract.identity == identity]
        if len(heirs) == 1 and self.rules_for(heirs[0].name, event_type):
            return heirs[0]
        return None

    def rules_of_stored(self, name: str, identity: str, event_type: str) -> tuple[Rule, ...]:
        """The rules of the source that judges a stored event; none where there is no such one."""
        source = self.source_of(name, identity, event_type)
        return () if source is None else self.rules_for(source.name, event_type)

    def rules_for(self, source: str, event_type: str) -> tuple[Rule, ...]:
        """The rules for events of that type: those that link, those that project, the others."""
        known = self._rules_for.get((source, event_type))
        if known is not None:
            return known
        matching = [rule for rule in self.rules if rule.matches(source, event_type)]
        found = tuple(sorted(matching, key=_turn))
        # Types are the sender's words, so what is remembered of them is bounded.
        if source in self.sources and len(event_type) <= TYPE_CACHED_CHARS_MAX:
            if len(self._rules_for) >= RULES_CACHED_MAX:
                self._rules_for.clear()
            self._rules_for[source, event_type] = found
        return found

    def projection(self, identity: str, kind: str) -> Project:
        """How resources of a kind are projected for an identity; raises KeyError."""
        for rule in self.rules:
            if isinstance(rule.effect, Project) and rule.effect.kind == kind:
                names = (self.sources[name] for name in rule.sources if name in self.sources)
                if any(source.contract.identity == identity for source in names):
                    return rule.effect
        raise KeyError(kind)

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
    return build(read(path), path, secrets=secrets, environment=environment)


def load_again(old: Settings) -> Settings:
    """The file of a running process as it is now; one without any source is refused too."""
    new = load(old.path)
    if old.sources and not new.sources:
        raise ConfigError(["sources: there is none any more (was the file cut short?)"])
    return new


def build(
    document: Mapping[str, object],
    path: Path,
    *,
    secrets: bool = True,
    environment: Mapping[str, str] = os.environ,
) -> Settings:
    """As `load`, of the decoded file; `path` is where relative paths begin."""
    return _Builder(path, secrets, environment).settings(document)


def read(path: Path) -> dict[str, object]:
    """The file's TOML, decoded and not judged. Raises ConfigError."""
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


def _turn(rule: Rule) -> int:
    """Links and resources are facts, which other rules of the same event may need."""
    return 0 if isinstance(rule.effect, Link) else 1 if isinstance(rule.effect, Project) else 2


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


# Building


class _Builder:
    """Builds the settings of one file, and collects what is wrong with it."""

    def __init__(self, path: Path, secrets: bool, environment: Mapping[str, str]) -> None:
        self.report = Report()
        self.path = path
        self.directory = path.parent
        self.secrets = secrets
        self.environment = environment
        self.references = References(self.directory, environment)
        # The rules whose effect is missing or wrong, which is said once.
        self.broken: set[str] = set()

    def settings(self, document: Mapping[str, object]) -> Settings:
        top = Table(self.report, "", document, _TOP_KEYS)
        database = self._database(top)
        env_file = top.file("env_file", self.directory)
        if self.secrets and env_file is not None:
            self._read_env_file(top, env_file)
        handlers = self._existing(top, "handlers")
        public_url = _url(top, "public_url")
        server = self._server(top)
        worker = _worker(top)
        backup = _backup(top, self.directory)
        sources = self._sources(top, public_url)
        rules = self._rules(top, sources)
        destinations = self._destinations(top)
        alerts = thresholds.parse(top.table("alerts"))
        _check_alerts(self.report, alerts, _declared(top, "destinations"), destinations)
        _check_allow_ips(self.report, sources, server)
        _check_identities(self.report, sources)
        _check_modes(self.report, sources, worker)
        _check_sends(self.report, rules)
        _check_projections(self.report, rules, sources, worker)
        self._check_effects(rules, sources)
        _warn_of_messages(self.report, rules, destinations, worker, alerts)
        if self.report.problems:
            raise ConfigError(_with_operations(self.report.problems, top))
        return Settings(
            path=self.path,
            database=database,
            sources=sources,
            rules=tuple(rules.values()),
            server=server,
            worker=worker,
            backup=backup,
            destinations=destinations,
            alerts=alerts,
            handlers=handlers,
            env_file=env_file,
            public_url=public_url,
            warnings=tuple(_with_operations(self.report.warnings, top)),
        )

    def _database(self, top: Table) -> Path:
        return place.of(top.file("database", self.directory), self.directory, self.environment)

    def _read_env_file(self, top: Table, env_file: Path) -> None:
        try:
            lines, problems = references.read_env_file(env_file)
        except Unresolved as error:
            top.problem("env_file", str(error))
            return
        for problem in problems:
            top.problem("env_file", problem)
        self.references = References(self.directory, self.environment, lines, env_file)

    def _existing(self, table: Table, key: str) -> Path | None:
        path = table.file(key, self.directory)
        if path is not None and self.secrets and not os.path.isfile(path):
            table.problem(
                key, f"{path}: no such file for this user (create it, or correct the path)"
            )
        return path

    def _server(self, top: Table) -> Server:
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

    def _address(self, table: Table, key: str) -> Address | None:
        text = table.text(key)
        if text is None:
            return None
        try:
            return _address(text, self.directory)
        except ValueError as error:
            table.problem(key, f"{error}; write 127.0.0.1:8080 or unix:/run/receiver/http.sock")
            return None

    def _tls(self, server: Table) -> Tls | None:
        table = server.table("tls", ("certificate", "key"))
        if table is None:
            return None
        table.require("certificate", "name the file with the certificate and its chain")
        table.require("key", "name the file with the private key")
        certificate, key = self._existing(table, "certificate"), self._existing(table, "key")
        return None if certificate is None or key is None else Tls(certificate, key)

    def _sources(self, top: Table, public_url: str | None) -> dict[str, Source]:
        sources: dict[str, Source] = {}
        tables = top.table("sources")
        if tables is None or not tables.values:
            top.warning("sources", "there is none, so nothing is received; add [sources.NAME]")
        for name in tables.values if tables is not None else ():
            assert tables is not None, "it has names"
            if not is_name(name):
                tables.problem(name, NAME_WORDS)
            table = tables.table(name, _SOURCE_KEYS)
            source = None if table is None else self._source(name, table, public_url)
            if source is not None:
                sources[name] = source
        return sources

    def _source(self, name: str, table: Table, public_url: str | None) -> Source | None:
        preset = _preset(table)
        identity = _identity(name, table)
        account = _account(table)
        livemode = table.boolean("livemode")
        tolerance_s = table.seconds("tolerance_s", TOLERANCE_S_MAX)
        volatile = _volatile(table)
        secrets = self._secrets(table, preset)
        url = _url(table, "public_url")
        mode = table.choice("mode", _MODES) if "mode" in table else "sync"
        allow_ips = table.networks("allow_ips")
        body_gzip, keep_rejected = table.boolean("gzip"), table.boolean("keep_rejected")
        silence_s = thresholds.limit(table, "silence_s", thresholds.SECONDS_MAX)
        retention, certificates_url = _retention(table), _certificates_url(table, preset)
        if preset is None:
            return None
        reach_by = None if preset.by_certificate else self._api(table, preset, livemode)
        if identity is None or mode is None:
            return None
        _warn_of(table, preset, livemode, url or public_url)
        _warn_of_names(table, preset, secrets)
        _warn_of_unsigned(table, preset, account)
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
        except SecretError as error:
            table.problem("secrets", str(error))
            return None
        return Source(
            name=name,
            scheme=preset.name,
            contract=contract,
            mode=mode,
            body_gzip=body_gzip or False,
            allow_ips=allow_ips,
            public_url=url or public_url,
            retention=retention,
            api=reach_by,
            keep_rejected=keep_rejected or False,
            certificates_url=certificates_url,
            silence_s=silence_s,
        )

    def _api(self, source: Table, preset: Preset, livemode: bool | None) -> Api | None:
        table = source.table("api", _API_KEYS)
        if table is None:
            return None
        sender = presets.api_of(preset)
        table.require("key", f"write {references.KINDS}")
        reference, version = table.text("key"), table.text("version")
        base_url = _url(table, "base_url") or sender.base_url
        if base_url is None and "base_url" not in table:
            table.problem("base_url", "is missing; write the address of the sender's API")
        if version is not None and sender.version is None:
            table.problem("version", "can't be asked of this sender; leave it out")
        events, silence_s = _events(table, sender), _silence_s(table)
        key = None if reference is None else self._resolved(table.at("key"), reference)
        if key is None or base_url is None:
            return None
        _check_key(table, sender.mode_of(key), livemode)
        parts = _split(base_url)
        if parts is not None:
            _warn_of_url(table, "base_url", parts, True)
        return Api(
            key=key,
            base_url=base_url,
            sender=sender,
            version=version,
            events=events,
            silence_s=silence_s,
        )

    def _secrets(self, source: Table, preset: Preset | None) -> tuple[Secret, ...]:
        items = source.items("secrets")
        if len(items) > SECRETS_MAX:
            source.problem("secrets", f"has more than {SECRETS_MAX}; remove those no longer used")
        unsigned = preset is not None and all(one.algo == "none" for one in preset.schemes)
        captures = preset is not None and preset.captures
        if not source.values.get("secrets") and not unsigned and not captures:
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
        table = Table(self.report, where, values, _SECRET_KEYS)
        if not isinstance(item, str | dict):
            self.report.problem(
                where, f"expected a reference or a table with one, got {kind_of(item)}"
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
        value = self._resolved(where, reference)
        if not value:
            return value
        return value if _has_shape(self.report, where, reference, value, preset) else None

    def _resolved(self, where: str, reference: str) -> bytes | None:
        """The value behind a reference; empty without secrets, None where there is a problem."""
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
        return value

    def _check_effects(self, rules: Mapping[str, Rule], sources: Mapping[str, Source]) -> None:
        whole = {where: rule for where, rule in rules.items() if where not in self.broken}
        broken = {rules[where].operation for where in self.broken}
        _check_operations(self.report, whole)
        _check_reversals(self.report, whole, sources, broken)

    def _rules(self, top: Table, sources: Mapping[str, Source]) -> dict[str, Rule]:
        """The rules by where they stand, such as `rules[0]`."""
        rules: dict[str, Rule] = {}
        declared, destinations = _declared(top, "sources"), _declared(top, "destinations")
        for i, values in enumerate(top.items("rules")):
            where = f"rules[{i}]"
            if not isinstance(values, dict):
                self.report.problem(
                    where, f"expected a table, got {kind_of(values)}; write [[rules]]"
                )
                continue
            table = Table(self.report, where, values, _RULE_KEYS)
            rule = _rule(table, declared, destinations)
            if rule.effect is None and (not rule.send or any(key in table for key in _EFFECTS)):
                self.broken.add(where)
            _check_paths(table, rule, sources)
            _check_prepare(table, rule, sources)
            for name in rule.sources:
                if name in sources:
                    _warn_of_unsigned_types(self.report, where, rule, sources[name])
            _warn_of_subject(table, rule)
            if isinstance(rule.effect, Call) and "handlers" not in top:
                table.problem("call", 'needs a file of functions; set handlers = "handlers.py"')
            rules[where] = rule
        return rules

    def _destinations(self, top: Table) -> dict[str, Destination]:
        destinations: dict[str, Destination] = {}
        tables = top.table("destinations")
        for name in tables.values if tables is not None else ():
            assert tables is not None, "it has names"
            if not is_name(name):
                tables.problem(name, NAME_WORDS)
            table = tables.table(name)
            destination = None if table is None else self._destination(name, table)
            if destination is not None:
                destinations[name] = destination
        return destinations

    def _destination(self, name: str, table: Table) -> Destination | None:
        table.require("kind", 'write "http", "email" or "command"')
        match table.choice("kind", _DESTINATION_KINDS):
            case "http":
                return self._http(name, table)
            case "email":
                return self._email(name, table)
            case "command":
                return self._command(name, table)
        return None

    def _http(self, name: str, table: Table) -> Http | None:
        table.allow(_HTTP_KEYS)
        table.require("url", f"write https://example.com/path, or {references.KINDS}")
        url = self._reach(table, "url", _web_problem)
        method = table.choice("method", _METHODS)
        json = _json(table)
        headers = _headers(table)
        secret = self._signing_key(table)
        timeout_s = table.seconds("timeout_s", HTTP_TIMEOUT_S_MAX)
        policy = _policy(table)
        if url is None:
            return None
        return Http(
            name=name,
            url=url,
            method=method or "POST",
            json=json,
            headers=headers,
            secret=secret,
            timeout_s=timeout_s or HTTP_TIMEOUT_S,
            policy=policy,
        )

    def _email(self, name: str, table: Table) -> Email | None:
        table.allow(_EMAIL_KEYS)
        table.require("smtp", f"write {references.KINDS} for smtp://user:password@host:587")
        table.require("from", "write the address that mail comes from")
        table.require("to", "write an address, or {a.path} to one in the event")
        table.require("subject", "write the line that the mail is shown with")
        table.require("text", "write what the mail says")
        smtp = self._reach(table, "smtp", _smtp_problem)
        sender, to = _mail_sender(table), _mail_recipient(table)
        subject = _mail_subject(table)
        text = None if table.lines("text") is None else table.template("text")
        timeout_s = table.seconds("timeout_s", EMAIL_TIMEOUT_S_MAX)
        policy = _policy(table)
        if smtp is None or sender is None or to is None or subject is None or text is None:
            return None
        return Email(
            name=name,
            smtp=smtp,
            from_=sender,
            to=to,
            subject=subject,
            text=text,
            timeout_s=timeout_s or EMAIL_TIMEOUT_S,
            policy=policy,
        )

    def _command(self, name: str, table: Table) -> Command | None:
        table.allow(_COMMAND_KEYS)
        table.require("argv", 'write ["/path/to/program", "an argument"]')
        argv = _argv(table)
        timeout_s = table.seconds("timeout_s", COMMAND_TIMEOUT_S_MAX)
        policy = _policy(table)
        if argv is None:
            return None
        self._check_program(table, argv[0])
        return Command(
            name=name, argv=argv, timeout_s=timeout_s or COMMAND_TIMEOUT_S, policy=policy
        )

    def _reach(self, table: Table, key: str, problem_of: "_Judge") -> str | None:
        """The URL there, or behind the reference there: then '' while secrets aren't looked up."""
        text = table.text(key)
        if text is None:
            return None
        referenced = text.partition(":")[0] in _REFERENCES
        if referenced:
            value = self._resolved(table.at(key), text)
            if not value:
                return None if value is None else ""
            text = value.decode("utf-8", "replace")
        parts = _split(text)
        problem = problem_of(text, parts)
        if parts is None or problem is not None:
            table.problem(key, problem or "is not a URL")
            return None
        _warn_of_url(table, key, parts, referenced)
        return text

    def _signing_key(self, table: Table) -> bytes | None:
        reference = table.text("secret")
        value = None if reference is None else self._resolved(table.at("secret"), reference)
        if not value:
            return value
        try:
            key = presets.keys(presets.get("standard-webhooks").schemes[0], value)[0].value
        except SecretError as error:
            table.problem("secret", f"{reference} {error}; write whsec_ and base64 there")
            return None
        if len(key) < SIGNING_KEY_BYTES_MIN:
            table.warning(
                "secret",
                f"{reference} is a key of {len(key)} bytes, which is short; "
                f"make one of {SIGNING_KEY_BYTES_MIN} or more",
            )
        return key

    def _check_program(self, table: Table, first: Template) -> None:
        """Whether a command names a program; where to find it is the machine's business."""
        where = f"{table.at('argv')}[0]"
        if first.paths:
            self.report.problem(where, "is the program, which no event may choose; write its path")
            return
        program = _literal(first)
        if not program.isprintable() or not _PROGRAM.fullmatch(program):
            self.report.problem(
                where,
                "is neither a program's name nor a path from / on; write /usr/local/bin/deploy, "
                "and each argument as an item of its own",
            )
        elif self.secrets and shutil.which(program, path=self.environment.get("PATH")) is None:
            self.report.warning(where, f"{program} is no program that this user can run")


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


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _trusted(table: Table) -> tuple[Network | Literal["unix"], ...]:
    key = "trusted_proxies"
    values = table.values.get(key)
    if not isinstance(values, list) or "unix" not in values:
        return table.networks(key)
    others = {key: [value for value in values if value != "unix"]}
    return ("unix", *Table(table.report, table.where, others).networks(key))


def _check_server(table: Table, server: Server) -> None:
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


def _worker(top: Table) -> Worker:
    usual = Worker()
    table = top.table("worker", usual.__struct_fields__)
    if table is None:
        return usual
    worker = Worker(
        run=table.choice("run", _RUNS) or usual.run,
        threads=table.integer("threads", 1, WORKER_THREADS_MAX) or usual.threads,
        attempts_max=table.integer("attempts_max", 1, ATTEMPTS_MAX) or usual.attempts_max,
        age_max_s=table.integer("age_max_s", AGE_S_MIN, AGE_S_MAX) or usual.age_max_s,
        backoff_first_s=table.integer("backoff_first_s", 1, BACKOFF_S_MAX) or usual.backoff_first_s,
        backoff_max_s=table.integer("backoff_max_s", 1, BACKOFF_S_MAX) or usual.backoff_max_s,
    )
    if worker.backoff_first_s > worker.backoff_max_s:
        table.problem(
            "backoff_first_s",
            f"{worker.backoff_first_s} is more than backoff_max_s, {worker.backoff_max_s}; "
            "lower one, or raise the other",
        )
    return worker


# The parts of a source


def _preset(table: Table) -> Preset | None:
    value = table.values.get("scheme")
    if value is None:
        table.problem(
            "scheme",
            'is missing; name the sender, as in "stripe" (`receiver sources presets` lists them), '
            "or write a table",
        )
        return None
    if not isinstance(value, str | dict):
        table.problem("scheme", f"expected a preset's name or a table, got {kind_of(value)}")
        return None
    try:
        return presets.get(value) if isinstance(value, str) else presets.parse(value)
    except PresetError as error:
        for one in error.problems:
            # A table's problems begin with its keys.
            key, _, words = ("", "", one) if isinstance(value, str) else one.partition(": ")
            table.report.problem(".".join(filter(None, (table.at("scheme"), key))), words)
        return None


def _identity(name: str, table: Table) -> str | None:
    identity = table.name("identity") if "identity" in table else name
    if identity in RESERVED_IDENTITIES:
        table.problem(
            "identity", f"{identity!r} stands for what is written without a sender; set another"
        )
        return None
    return identity


def _account(table: Table) -> str | None:
    account = table.text("account")
    if account is not None and len(account) > ACCOUNT_CHARS_MAX:
        table.problem("account", f"is longer than {ACCOUNT_CHARS_MAX} characters; shorten it")
    return account


def _volatile(table: Table) -> tuple[str, ...]:
    fields = table.texts("volatile")
    for field in fields:
        try:
            parse_mask(field)
        except ValueError as error:
            table.problem("volatile", str(error))
    return fields


def _warn_of(table: Table, preset: Preset, livemode: bool | None, url: str | None) -> None:
    if preset.livemode is not None and livemode is None:
        table.warning(
            "livemode", "is not set, so test events count like live ones; write true or false"
        )
    if preset.livemode is None and livemode is not None:
        table.warning("livemode", f"has no effect, as {preset.name} events have no mode")
    if url is None and any(scheme.signs_url for scheme in preset.schemes):
        table.warning(
            "public_url", "is not set, but the sender signs its URL; set it as the sender has it"
        )


def _warn_of_names(table: Table, preset: Preset, secrets: Sequence[Secret]) -> None:
    for name in preset.named_secrets:
        if all(secret.name != name for secret in secrets):
            table.warning(
                "secrets",
                f"has none named {name}, so the sender's handshake is refused; choose one, enter "
                f'it at the sender too, and add {{ secret = "env:NAME", name = "{name}" }}',
            )


def _certificates_url(source: Table, preset: Preset | None) -> str | None:
    """Where the sender's certificates are fetched in place of its own hosts: for tests."""
    if preset is None or not preset.by_certificate:
        return None
    table = source.table("api", ("base_url",))
    return None if table is None else _url(table, "base_url")


def _events(table: Table, sender: SenderApi) -> str | None:
    """Where a source's events are listed: by the sender's data, or as the config names it."""
    path = table.text("events")
    if path is None:
        return None if sender.events is None else sender.events.path
    if sender.events is None:
        table.problem("events", "can't be listed: how this sender lists them is not known")
    elif (problem := listing.path_problem(path)) is not None:
        table.problem("events", problem)
    return path


def _silence_s(table: Table) -> float | None:
    silence_s = table.seconds("reconcile_after_silence_s", SILENCE_S_MAX)
    if silence_s is not None and silence_s < SILENCE_S_MIN:
        table.problem("reconcile_after_silence_s", f"must be at least {SILENCE_S_MIN}")
    return silence_s


def _check_key(table: Table, live: bool | None, livemode: bool | None) -> None:
    if live is not None and livemode is not None and live is not livemode:
        table.problem(
            "key",
            f"is a key for {'live' if live else 'test'} data, but the source has "
            f"livemode = {str(livemode).lower()}; use a key of that mode",
        )


def _warn_of_unsigned(table: Table, preset: Preset, account: str | None) -> None:
    if preset.in_path:
        table.warning(
            "scheme",
            f"{preset.title} signs nothing: whoever learns the URL can send what they like, so "
            "confirm by its API what matters; the logs of a proxy before this server have it, too",
        )
    places = caveats.unsigned(preset, preset.account)
    if account is None and len(places) == len(preset.account) > 0:
        table.warning(
            "account",
            f"is not set, and {preset.title} names it where no signature covers it "
            f"({places[0]}); write yours, so that what is for another is refused",
        )


def _warn_of_unsigned_types(report: Report, where: str, rule: Rule, source: Source) -> None:
    preset = source.contract.preset
    places = caveats.unsigned(preset, preset.event_type)
    if places and not caveats.first_is_signed(preset) and not (rule.when or rule.expect):
        from receiver.bodies import TELLING

        fields = {TELLING.get((preset.name, one)) for one in rule.on}
        field = fields.pop() if len(fields) == 1 else None
        report.warning(
            f"{where}.when",
            f"is not set, and {preset.title} says what an event is where no signature covers it "
            f"({places[0]}); confirm a field of the body that only this kind has"
            + (f", as in {{ {field} }}" if field else ""),
        )


def _retention(source: Table) -> Retention:
    table = source.table("retention", ("payload_days", "ignored"))
    if table is None:
        return Retention()
    days, ignored = table.integer("payload_days", 1, DAYS_MAX), table.boolean("ignored")
    return Retention(days or PAYLOAD_DAYS, ignored is not False)


def _backup(top: Table, directory: Path) -> Backup:
    table = top.table("backup", ("path", "keep"))
    if table is None:
        return Backup()
    keep = table.integer("keep", 1, BACKUPS_KEPT_MAX)
    return Backup(table.file("path", directory), keep or BACKUPS_KEPT)


def _url(table: Table, key: str) -> str | None:
    text = table.text(key)
    if text is None:
        return None
    example = "write it as https://hooks.example.com"
    parts = _split(text)
    if parts is None or parts.scheme not in ("http", "https"):
        table.problem(key, f"is not the address of a web server; {example}")
        return None
    if parts.query or parts.fragment or parts.username is not None or text[-1] in "?#":
        table.problem(key, f"may not have a user, a query or a fragment; {example}")
        return None
    return text.rstrip("/")


def _split(text: str) -> SplitResult | None:
    """The parts of a URL; None unless it has a host."""
    try:
        parts = urlsplit(text)
        valid = _HOST.fullmatch(parts.hostname or "") is not None and parts.port != 0
    except ValueError:
        return None
    # The library leaves out what can't be printed.
    return parts if valid and text.isascii() and text.isprintable() and " " not in text else None


def _has_shape(
    report: Report, where: str, reference: str, value: bytes, preset: Preset | None
) -> bool:
    """Whether a secret can be one of that sender's; says why not."""
    if value.startswith(b"v1,whsec_") and not (preset and presets.takes_versioned(preset)):
        report.problem(where, f"{reference} begins with v1,whsec_; remove the leading 'v1,'")
        return False
    if preset is None:
        return True
    wrong = presets.secret_problem(preset, value)
    if wrong is not None:
        what = "" if preset.in_path else "; copy it from the sender again"
        report.problem(where, f"{reference} {wrong}{what}")
        return False
    doubt = presets.secret_warning(preset, value)
    if doubt is not None:
        report.warning(where, f"{reference} {doubt}")
    return True


# The parts of a rule


def _with_operations(lines: Sequence[str], top: Table) -> list[str]:
    """The same lines, those about a rule with its operation: nobody counts to rules[13]."""
    rules = top.values.get("rules")

    def told(line: str) -> str:
        found = _RULE_PLACE.match(line)
        rule = rules[int(found[1])] if found and isinstance(rules, list) else None
        name = rule.get("operation") if isinstance(rule, dict) else None
        return f'{line} (operation "{name}")' if isinstance(name, str) and is_name(name) else line

    return list(map(told, lines))


def _declared(top: Table, key: str) -> list[str]:
    """The names of all that the file has of a kind, whatever is wrong with them."""
    named = top.values.get(key)
    return list(named) if isinstance(named, dict) else []


def _rule(table: Table, declared: Sequence[str], destinations: Sequence[str]) -> Rule:
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
        send=_sends(table, destinations),
        prepare=_function(table, "prepare"),
        resource=projection.read_needed(table),
    )


def _rule_sources(table: Table, declared: Sequence[str]) -> tuple[str, ...]:
    value = table.values.get("source")
    names = (value,) if isinstance(value, str) else table.texts("source")
    if value == []:
        table.problem("source", "is empty; name a source, or a list of them")
    for name in names:
        if name not in declared:
            hint = nearest_or_all(name, declared)
            table.problem("source", f"there is no source {cut(name)!r}{hint}")
    return names


def _patterns(table: Table) -> tuple[str, ...]:
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


def _effect(table: Table) -> Effect | None:
    named = [key for key in _EFFECTS if key in table]
    if len(named) > 1:
        words = f"has {' and '.join(named)}; keep one, and write a rule for each other"
        table.report.problem(table.where, words)
    if not named and "send" not in table:
        words = f"needs an effect or send; add one of {', '.join(_EFFECTS)}, or send"
        table.report.problem(table.where, words)
    effects = [_EFFECTS[key](table) for key in named]
    return effects[0] if len(effects) == 1 else None


def _grant(rule: Table) -> Grant | None:
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


def _amounts(grant: Table) -> dict[str, int]:
    table = grant.table("amounts")
    if table is None:
        return {}
    if not table.values:
        grant.problem("amounts", "is empty; write one amount for each value of by")
    found = ((name, table.integer(name, 1, AMOUNT_MAX)) for name in table.values)
    return {name: amount for name, amount in found if amount is not None}


def _reverse(rule: Table) -> Reverse | None:
    table = rule.table("reverse", ("operation", "subject", "amount"))
    if table is None:
        return None
    table.require("operation", "name the operation of the grant")
    table.require("subject", "name the path of what was granted for, as in data.object.invoice")
    operation = table.name("operation")
    subject, amount = table.path("subject"), table.path("amount")
    return None if operation is None or subject is None else Reverse(operation, subject, amount)


def _link(rule: Table) -> Link | None:
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


def _record(rule: Table) -> Record | None:
    table = rule.table("record", ("kind", "data"))
    if table is None:
        return None
    table.require("kind", "name what is recorded, as in feedback-alert")
    table.require("data", 'write what is kept, as in { text = "{feedback.text}" }')
    kind = table.name("kind")
    data = table.template("data")
    return None if kind is None or data is None else Record(kind, data)


def _sql(rule: Table) -> Sql | None:
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


def _call(rule: Table) -> Call | None:
    function = _function(rule, "call")
    return None if function is None else Call(function)


def _function(rule: Table, key: str) -> str | None:
    function = rule.text(key)
    if function is None or function.isidentifier():
        return function
    rule.problem(key, "is not a function's name; write that of one in the handlers file")
    return None


def _sends(rule: Table, destinations: Sequence[str]) -> tuple[Send, ...]:
    items = rule.items("send")
    if rule.values.get("send") == [] or len(items) > SENDS_MAX:
        rule.problem("send", f'expected 1 to {SENDS_MAX} tables; write [{{ to = "NAME" }}]')
    found = [
        _send(rule.report, f"{rule.at('send')}[{i}]", item, destinations)
        for i, item in enumerate(items[:SENDS_MAX])
    ]
    return tuple(send for send in found if send is not None)


def _send(report: Report, where: str, item: object, destinations: Sequence[str]) -> Send | None:
    if not isinstance(item, dict):
        report.problem(where, f'expected a table, got {kind_of(item)}; write {{ to = "NAME" }}')
        return None
    table = Table(report, where, item, ("to", "name"))
    table.require("to", "name a destination")
    to = table.text("to")
    name = table.name("name") if "name" in table else ""
    if to is not None and to not in destinations:
        hint = nearest(to, destinations) or f" (there are: {', '.join(destinations) or 'none'})"
        table.problem("to", f"there is no destination {cut(to)!r}{hint}; add [destinations.NAME]")
        return None
    return None if to is None or name is None else Send(to, name)


# The parts of a destination


def _web_problem(text: str, parts: SplitResult | None) -> str | None:
    if text.startswith(("unix:", "http+unix:")):
        return "names a unix socket, which is not supported; let it listen on a port of 127.0.0.1"
    if len(text) > URL_CHARS_MAX:
        return f"is longer than {URL_CHARS_MAX} characters; shorten it"
    if parts is None or parts.scheme not in ("http", "https"):
        return f"is not the address of a web server; write https://host/path, or {references.KINDS}"
    if "#" in text:
        return "may not have a fragment; leave out what begins with #"
    if "{" in text or "}" in text:
        return "can't take anything from the event; write it out, and put values into json"
    return None


def _smtp_problem(text: str, parts: SplitResult | None) -> str | None:
    example = (
        "write smtp://user:password@host:587 or smtps://user:password@host:465, "
        "in a password %2F %3F %23 %40 for / ? # @"
    )
    if len(text) > URL_CHARS_MAX:
        return f"is longer than {URL_CHARS_MAX} characters; shorten it"
    if parts is None or parts.scheme not in ("smtp", "smtps"):
        return f"is not the address of a mail server; {example}"
    if parts.path not in ("", "/") or "?" in text or "#" in text:
        return f"has something behind the host; {example}"
    if parts.username is not None and not (parts.username and parts.password):
        return f"has a user or a password without the other; {example}"
    return None


def _warn_of_url(table: Table, key: str, parts: SplitResult, referenced: bool) -> None:
    if parts.scheme == "http" and not _is_loopback(parts.hostname or ""):
        table.warning(
            key, "is http:// to another machine, so anyone on the way can read it; use https://"
        )
    if not referenced and _shows_secret(parts):
        table.warning(
            key, "seems to hold a secret; keep it out of this file, in .env, and write env:NAME"
        )


def _shows_secret(parts: SplitResult) -> bool:
    given = parse_qsl(parts.query)
    words = [parts.path, *(value for _, value in given)]
    named = any(re.search(_KEY_NAME, name) for name, _ in given)
    return parts.username is not None or named or any(re.search(_KEY_LIKE, word) for word in words)


def _json(table: Table) -> Template | None:
    value = table.values.get("json")
    if isinstance(value, str | list | dict):
        return table.template("json")
    if value is not None:
        table.problem("json", f"expected a table, got {kind_of(value)}; write what is sent")
    return None


def _headers(http: Table) -> dict[str, Template]:
    table = http.table("headers")
    names = list(table.values) if table is not None else []
    if len(names) > HEADERS_MAX:
        http.problem("headers", f"has more than {HEADERS_MAX}; remove some")
    found: dict[str, Template] = {}
    for name in names[:HEADERS_MAX]:
        assert table is not None, "it has names"
        problem = _header_problem(name, [other for other in found if other != name])
        if problem is not None:
            table.problem(name, problem)
            continue
        template = None if table.text(name) is None else table.template(name)
        if template is not None:
            found[name] = template
        if name.lower() in _SECRET_HEADERS:
            table.warning(
                name, "is kept in the database with each message, and stands here for all to read"
            )
    return found


def _header_problem(name: str, others: Collection[str]) -> str | None:
    if len(name) > NAME_CHARS_MAX or not HEADER_NAME.fullmatch(name):
        return "is not the name of a header; write letters, digits and -"
    if name.lower() in RESERVED_HEADERS:
        return "is written by Receiver itself; leave it out"
    if name.lower() in {other.lower() for other in others}:
        return "stands there twice; keep one"
    return None


def _mail_sender(table: Table) -> str | None:
    text = table.text("from")
    if text is None:
        return None
    templated = "can't take anything from the event; write one address, as in billing@example.com"
    problem = templated if "{" in text else _mailbox_problem(text)
    if problem is not None:
        table.problem("from", problem)
    return text if problem is None else None


def _mail_recipient(table: Table) -> Template | None:
    to = None if table.text("to") is None else table.template("to")
    if to is None or to.paths:
        return to
    problem = _mailbox_problem(_literal(to))
    if problem is not None:
        table.problem("to", problem)
    return to if problem is None else None


def _mailbox_problem(text: str) -> str | None:
    try:
        mail.address(text, "")
    except Unjudgeable as error:
        return error.why
    return None


def _mail_subject(table: Table) -> Template | None:
    subject = None if table.text("subject") is None else table.template("subject")
    if subject is None or subject.paths or len(_literal(subject)) <= mail.SUBJECT_CHARS_MAX:
        return subject
    table.problem("subject", f"is longer than {mail.SUBJECT_CHARS_MAX} characters; shorten it")
    return None


def _literal(template: Template) -> str:
    """What a text without placeholders says."""
    return str(template.render(Scope(None, {})))


def _argv(table: Table) -> tuple[Template, ...] | None:
    texts = table.texts("argv")
    if table.values.get("argv") == [] or len(texts) > ARGUMENTS_MAX:
        table.problem("argv", f"expected 1 to {ARGUMENTS_MAX} texts, the program and its arguments")
        return None
    templates = []
    for i, text in enumerate(texts):
        where = f"{table.at('argv')}[{i}]"
        try:
            templates.append(Template.compile(text))
        except ValueError as error:
            table.report.problem(where, f"{error}; correct the template")
        if "\0" in text:
            table.report.problem(
                where, "has a character that no program can be given; remove \\u0000"
            )
    whole = len(templates) == len(table.items("argv"))
    return tuple(templates) if templates and whole else None


def _policy(table: Table) -> Policy:
    ambiguous = table.choice("ambiguous", _AMBIGUOUS)
    idempotent_for_s = table.integer("idempotent_for_s", 1, IDEMPOTENT_S_MAX)
    if ambiguous == "retry" and idempotent_for_s is not None:
        table.problem(
            "ambiguous",
            "retry goes on for ever, idempotent_for_s only so long; leave one of them out",
        )
    return Policy(
        ambiguous=ambiguous or "retry",
        idempotent_for_s=idempotent_for_s,
        attempts_max=table.integer("attempts_max", 1, ATTEMPTS_MAX),
    )


# Checks of one table against another


def _check_paths(table: Table, rule: Rule, sources: Mapping[str, Source]) -> None:
    """Whether our own names are used only where they are known, and may be trusted."""
    for where, path in _early_paths(rule):
        _check_own(table, where, path, known=False)
    for where, path in _late_paths(rule):
        _check_own(table, where, path, known=True)
    keys = [("subject", rule.subject)]
    if isinstance(rule.effect, Project):
        keys.append(("project.id", rule.effect.id))
    if rule.resource is not None:
        keys.append(("resource.id", rule.resource.id))
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


def _warn_of_subject(table: Table, rule: Rule) -> None:
    if (
        len(set(rule.on)) > 1
        and rule.subject is None
        and not isinstance(rule.effect, Link | Project | None)
    ):
        table.warning(
            "subject",
            f"is not set, so each event does this again, and {rule.on[1]} as well as {rule.on[0]}; "
            "name the path of what it may happen once for",
        )


def _check_own(table: Table, where: str, path: select.Path, *, known: bool) -> None:
    where = f"{table.where}.{where}"
    for name in ("_grant", "_message", "_alert"):
        if path.uses_own(name):
            table.report.problem(where, f"{name} is not known here; take the value from the event")
    if path.uses_own("_resource") and "resource" not in table:
        table.report.problem(
            where, 'is about a resource; say which with resource = { kind = "...", id = "..." }'
        )
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
    if isinstance(rule.effect, Project):
        yield "project.id", rule.effect.id


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
        for locator in (*preset.ids(scheme), *preset.event_type)
    )


def _check_allow_ips(report: Report, sources: Mapping[str, Source], server: Server) -> None:
    if server.trusted_proxies or not server.listen.is_local:
        return
    for name, source in sources.items():
        if source.allow_ips:
            report.warning(
                f"sources.{name}.allow_ips",
                "would be compared with the address of the proxy before this server; "
                "name the proxy in server.trusted_proxies",
            )


def _check_identities(report: Report, sources: Mapping[str, Source]) -> None:
    first: dict[str, Source] = {}
    for name, source in sources.items():
        other = first.setdefault(source.contract.identity, source)
        if other.contract.preset != source.contract.preset:
            report.problem(
                f"sources.{name}.identity",
                f"{source.contract.identity} is that of sources.{other.name}, which has another "
                "scheme; sources of one identity are one sender, so give one of them another",
            )


def _check_prepare(table: Table, rule: Rule, sources: Mapping[str, Source]) -> None:
    if rule.prepare is None:
        return
    if rule.resource is not None:
        table.problem("prepare", "runs before the resource is known; leave one of them out")
    if "call" not in table:
        table.problem("prepare", "hands its result to a function; add call, or leave it out")
    for name in rule.sources:
        if name in sources and sources[name].mode != "queued":
            table.problem(
                "prepare",
                f"runs before the event is applied, and {name} applies its events at once; "
                f'write mode = "queued" in [sources.{name}]',
            )


def _check_modes(report: Report, sources: Mapping[str, Source], worker: Worker) -> None:
    for name, source in sources.items():
        if source.mode == "queued" and worker.run == "off":
            report.problem(
                f"sources.{name}.mode",
                'queued needs the worker, but worker.run is "off"; write "sync", or turn it on',
            )
        if source.api is not None and source.api.silence_s is not None and worker.run == "off":
            report.warning(
                f"sources.{name}.api.reconcile_after_silence_s",
                'does nothing while worker.run is "off"; turn it on, or run '
                f"`receiver reconcile {name}` by a timer",
            )


def _check_sends(report: Report, rules: Mapping[str, Rule]) -> None:
    first: dict[tuple[str, Send], str] = {}
    for where, rule in rules.items():
        if rule.send and isinstance(rule.effect, Link):
            report.problem(
                f"{where}.send", "can't stand beside link; write a rule with send of its own"
            )
        for send in rule.send:
            if (rule.operation, send) in first:
                there = first[rule.operation, send]
                known = f" under the name {send.name}" if send.name else ""
                report.problem(
                    f"{where}.send",
                    f"{rule.operation} sends to {send.to}{known} already, in {there}; "
                    "a second message needs a name of its own",
                )
            first.setdefault((rule.operation, send), where)


def _check_projections(
    report: Report, rules: Mapping[str, Rule], sources: Mapping[str, Source], worker: Worker
) -> None:
    first: dict[tuple[str, str], str] = {}
    for where, rule in rules.items():
        if not isinstance(rule.effect, Project):
            continue
        for identity in _identities(rule, sources):
            there = first.setdefault((identity, rule.effect.kind), where)
            if there != where:
                report.problem(
                    f"{where}.project.kind",
                    f"{rule.effect.kind} of {identity} is projected by {there} already; "
                    "let one rule do it, with a list of paths where they differ",
                )
        for name in rule.sources:
            if name in sources:
                _check_order(report, f"{where}.project", rule.effect, sources[name], worker)
    _check_needed(report, rules, sources, first)


def _check_needed(
    report: Report,
    rules: Mapping[str, Rule],
    sources: Mapping[str, Source],
    projected: Collection[tuple[str, str]],
) -> None:
    for where, rule in rules.items():
        for identity in _identities(rule, sources) if rule.resource is not None else ():
            assert rule.resource is not None, "it was asked for"
            if (identity, rule.resource.kind) not in projected:
                kinds = [kind for theirs, kind in projected if theirs == identity]
                hint = nearest_or_all(rule.resource.kind, kinds)
                report.problem(
                    f"{where}.resource.kind",
                    f"no rule of {identity} projects {rule.resource.kind}{hint}",
                )


def _check_order(
    report: Report, where: str, project: Project, source: Source, worker: Worker
) -> None:
    """Whether there is something by which it can be told which state is the later one."""
    by = project.by(None if source.api is None else source.api.sender)
    if by == "rank" and project.created is None:
        asked = "a path to it in fetch" if source.api else f"api in [sources.{source.name}]"
        report.problem(
            where,
            "events come in any order, so it needs version, the path of a number that only "
            f"grows; or {asked}; or created and terminal, a ranking",
        )
    if by == "fetch" and worker.run == "off":
        report.problem(
            where,
            'is fetched by the worker, but worker.run is "off"; turn it on, or set created and '
            f"terminal, and remove api from [sources.{source.name}]",
        )


def _warn_of_messages(
    report: Report,
    rules: Mapping[str, Rule],
    destinations: Mapping[str, Destination],
    worker: Worker,
    alerts: Thresholds,
) -> None:
    if destinations and worker.run == "off":
        report.warning(
            "worker.run", "is off, so messages wait in the outbox; turn it on to have them sent"
        )
    used = {send.to for rule in rules.values() for send in rule.send} | {alerts.to}
    calls = any(isinstance(rule.effect, Call) for rule in rules.values())
    for name in destinations:
        if name not in used and not calls:
            report.warning(
                f"destinations.{name}",
                "no rule sends to it; name it in a rule's send, or remove it",
            )
    for where, rule in rules.items():
        for send in rule.send:
            for words in _unknown_names(rule, destinations.get(send.to)):
                report.warning(f"{where}.send", f"destinations.{send.to} {words}")


def _check_alerts(
    report: Report,
    alerts: Thresholds,
    declared: Sequence[str],
    destinations: Mapping[str, Destination],
) -> None:
    """Whether a message about an alert can be written for its destination."""
    if alerts.to is None:
        return
    if alerts.to not in declared:
        hint = nearest_or_all(alerts.to, declared)
        report.problem("alerts.to", f"there is no destination {cut(alerts.to)!r}{hint}")
    elif alerts.to in destinations:
        try:
            letters.body_of(destinations[alerts.to], letters.SAMPLE)
        except Unjudgeable as error:
            report.problem(
                "alerts.to",
                f"{error}; an alert has no event, so write {{_alert.text}} there, "
                "or name a destination of its own",
            )
            return
        if not _tells_alerts(destinations[alerts.to]):
            report.warning(
                "alerts.to",
                f"what destinations.{alerts.to} sends would not say what is wrong; write "
                "{_alert.text} there, or {_alert.text || _event.type} to send events there, too",
            )


def _tells_alerts(destination: Destination) -> bool:
    """Whether its messages say of an alert which one it is."""
    match destination:
        case Http(json=None) | Command():
            return True  # the whole alert is sent
    return any(path.uses_own("_alert") for path in _message_paths(destination))


def _unknown_names(rule: Rule, destination: Destination | None) -> Iterator[str]:
    """What a destination's texts take from a rule that does not have it."""
    paths = [] if destination is None else list(_message_paths(destination))
    granted = isinstance(rule.effect, Grant | Reverse | Call)
    if not granted and any(path.uses_own("_grant") for path in paths):
        yield "takes _grant, but this rule grants nothing; take the value from the event"
    if rule.customer is None and any(path.uses_own("_workspace") for path in paths):
        yield "takes _workspace, but this rule has no customer; add the path of the customer id"


def _message_paths(destination: Destination) -> Iterator[select.Path]:
    match destination:
        case Http(json=json, headers=headers):
            templates = [*headers.values(), *([] if json is None else [json])]
        case Email(to=to, subject=subject, text=text):
            templates = [to, subject, text]
        case Command(argv=argv):
            templates = list(argv)
    for template in templates:
        yield from template.paths


def _check_operations(report: Report, rules: Mapping[str, Rule]) -> None:
    first: dict[str, tuple[str, Effect | None]] = {}
    for where, rule in rules.items():
        if not rule.operation:
            continue
        there, effect = first.setdefault(rule.operation, (where, rule.effect))
        if type(effect) is not type(rule.effect):
            report.problem(
                f"{where}.operation",
                f"{rule.operation} is also that of {there}, which has another effect; "
                "an operation does one thing, so name one of them otherwise",
            )


def _check_reversals(
    report: Report,
    rules: Mapping[str, Rule],
    sources: Mapping[str, Source],
    broken: Collection[str],
) -> None:
    granted = {
        (identity, rule.operation)
        for rule in rules.values()
        # A function may grant under the key of its rule.
        if isinstance(rule.effect, Grant | Call)
        for identity in _identities(rule, sources)
    }
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


_TOP_KEYS = (
    *("database", "handlers", "env_file", "public_url", "server", "worker", "backup"),
    *("sources", "rules", "destinations", "alerts"),
)
_SERVER_KEYS = (
    *("listen", "admin", "trusted_proxies", "tls", "proxy_terminates_tls"),
    *("body_bytes_max", "pending_max"),
)
_SOURCE_KEYS = (
    *("scheme", "identity", "secrets", "livemode", "account", "mode", "tolerance_s"),
    *("volatile", "gzip", "allow_ips", "public_url", "retention", "api", "keep_rejected"),
    "silence_s",
)
_MODES: tuple[Literal["sync", "queued"], ...] = ("sync", "queued")
_RUNS: tuple[Literal["inside", "separate", "off"], ...] = ("inside", "separate", "off")
_DESTINATION_KINDS: tuple[Literal["http", "email", "command"], ...] = ("http", "email", "command")
_METHODS: tuple[Literal["POST", "PUT"], ...] = ("POST", "PUT")
_AMBIGUOUS: tuple[Literal["retry", "review"], ...] = ("retry", "review")
_POLICY_KEYS = ("timeout_s", "ambiguous", "attempts_max")
_HTTP_KEYS = (
    *("kind", "url", "method", "json", "headers", "secret"),
    *(*_POLICY_KEYS, "idempotent_for_s"),
)
_EMAIL_KEYS = ("kind", "smtp", "from", "to", "subject", "text", *_POLICY_KEYS)
_COMMAND_KEYS = ("kind", "argv", *_POLICY_KEYS, "idempotent_for_s")
_SECRET_KEYS = ("secret", "account", "livemode", "name")
_EFFECTS = {
    "grant": _grant,
    "reverse": _reverse,
    "link": _link,
    "record": _record,
    "project": projection.read,
    "sql": _sql,
    "call": _call,
}
_RULE_KEYS = (
    *("operation", "source", "on", "when", "expect", "subject", "customer"),
    *_EFFECTS,
    *("send", "prepare", "resource"),
)
_HOST = re.compile(r"[A-Za-z0-9.:%_-]+", re.ASCII)
_REFERENCES = ("env", "file", "credential")
_PROGRAM = re.compile(r"/.*[^/]|[^/\s]+")
# Made by a machine: long, and letters and digits mixed.
_KEY_LIKE = r"(?a)(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{16,}"
_KEY_NAME = r"(?i)key|token|secret|passw|auth|sig"
_API_KEYS = ("key", "base_url", "version", "events", "reconcile_after_silence_s")
_SECRET_HEADERS = frozenset({"authorization", "cookie", "x-api-key", "api-key", "x-auth-token"})
_Judge = Callable[[str, SplitResult | None], str | None]
_RULE_PLACE = re.compile(r"rules\[(\d+)\]", re.ASCII)
_PORT = re.compile(r"[0-9]{1,5}", re.ASCII)
