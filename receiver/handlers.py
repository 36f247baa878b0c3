"""Runs the founder's Python effects inside the event's transaction."""

import importlib.util
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import msgspec

from receiver import effects
from receiver.verify import Event
from store import founder, links
from store.database import Tx
from store.errors import TransactionLost
from store.founder import Value
from store.operations import Key

#: JSON text of one record, in bytes.
RECORD_BYTES_MAX = 65_536
#: What the founder's module is called in Python.
MODULE = "receiver_handlers"


#: Owes a message: destination, name, and what the handler says in it.
Owe = Callable[[str, str, object], bool]


class HandlersError(Exception):
    """handlers.py can't be used; the message says why."""


class HandlerEvent(msgspec.Struct, frozen=True):
    """The event as a handler sees it; `body` is the decoded JSON.

    `subject` and `workspace` are what the rule found (workspace: None without a `customer`;
    a prepare function runs before both). `prepared` is what the prepare function gave.
    """

    source: str
    account: str
    id: str
    type: str
    received_ms: int
    body: Any
    subject: str = ""
    workspace: str | None = None
    prepared: Any = None


class HandlerTx:
    """The open transaction as a handler sees it: dead once the handler has returned.

    A grant is made under the rule's own operation if it names no other; what else the handler
    does needs a name of its own. The subject is the rule's if none is given. Each method returns
    False where its change was made before, and raises Park or Quarantine as a rule would.
    """

    __slots__ = ("_key", "_owe", "_row", "_thread", "_tx", "_until")

    def __init__(self, tx: Tx, key: Key, row: int, owe: Owe) -> None:
        self._tx: Tx | None = tx
        self._owe = owe
        self._key = key
        self._row = row
        self._thread = threading.get_ident()
        self._until = founder.deadline()

    def grant(
        self,
        unit: str,
        amount: int,
        *,
        workspace: str,
        operation: str | None = None,
        subject: str | None = None,
    ) -> bool:
        """Grant `amount` of `unit` to a workspace, once for (subject, operation)."""
        if isinstance(amount, bool) or not isinstance(amount, int):
            raise TypeError("amount: expected a whole number")
        effects.check_name("unit", unit)
        effects.check_name("workspace", workspace)
        key = self._key_for(subject, operation)
        tx = self._open()
        # All of it or nothing, even where the handler goes on after a refusal.
        with tx.attempt:
            return effects.grant(tx, key, workspace, unit, amount, self._row)

    def reverse(
        self,
        target_operation: str,
        target_subject: str,
        *,
        amount: int | None = None,
        operation: str,
        subject: str | None = None,
    ) -> bool:
        """Take back a grant, by default all that is left of it."""
        target = self._key_for(target_subject, target_operation)
        key = self._key_for(subject, operation)
        tx = self._open()
        with tx.attempt:
            return effects.reverse(tx, key, target, amount, self._row)

    def record(
        self,
        kind: str,
        data: object,
        *,
        workspace: str | None = None,
        operation: str,
        subject: str | None = None,
    ) -> bool:
        """Write `data` as JSON for the app to read."""
        text = msgspec.json.encode(data).decode()
        if len(text) > RECORD_BYTES_MAX:
            raise ValueError(f"data: more than {RECORD_BYTES_MAX} bytes of JSON")
        key = self._key_for(subject, operation)
        effects.check_name("kind", kind)
        tx = self._open()
        with tx.attempt:
            return effects.record(tx, key, kind, workspace, text, self._row)

    def link(self, customer: str, workspace: str) -> bool:
        """Link a customer of this source and account to a workspace."""
        effects.check_name("customer", customer)
        effects.check_name("workspace", workspace)
        key = self._key
        return effects.link(self._open(), key.source, key.account, customer, workspace)

    def workspace(self, customer: str) -> str | None:
        """The workspace linked to a customer of this source and account, or None."""
        return links.workspace(self._open(), self._key.source, self._key.account, customer)

    def send(self, to: str, *, name: str = "", data: object = None) -> bool:
        """Owe a message to a destination, once for (subject, operation, destination, name).

        Its templates see `data` as `_message.data`. It is sent after the commit, by the worker.
        """
        self._open()
        return self._owe(to, name and effects.check_name("name", name), data)

    def sql(self, statement: str, parameters: Sequence[Value] = ()) -> list[tuple[Value, ...]]:
        """Run a statement on the app's own tables, `?` bound to `parameters`; all its rows."""
        return founder.execute(self._open(), statement, parameters, self._until)

    def _key_for(self, subject: str | None, operation: str | None) -> Key:
        return Key(
            self._key.source,
            self._key.account,
            effects.check_name("subject", self._key.subject if subject is None else subject),
            effects.check_name("operation", operation or self._key.operation),
        )

    def _open(self) -> Tx:
        if self._tx is None or threading.get_ident() != self._thread:
            raise RuntimeError("tx is the handler's, on its thread, until it returns")
        if not self._tx.is_open:
            raise TransactionLost("an earlier statement ended the transaction")
        return self._tx

    def _end(self) -> None:
        self._tx = None


Handler = Callable[..., object]


class Handlers:
    """The functions of a handlers.py, by name."""

    def __init__(self, functions: dict[str, Handler]) -> None:
        self.functions = MappingProxyType(functions)

    @classmethod
    def load(cls, path: Path | None) -> "Handlers":
        """Import the file by its place, its own folder importable. Raises HandlersError."""
        if path is None:
            return cls({})
        module = _import(path)
        functions: dict[str, Handler] = {
            name: value
            for name, value in vars(module).items()
            if inspect.isfunction(value) and not name.startswith("_")
        }
        return cls(functions)

    def problem(self, name: str, parameters: Sequence[str]) -> str | None:
        """Why a rule can't call this function with these parameters, or None."""
        function = self.functions.get(name)
        if function is None:
            known = ", ".join(sorted(self.functions)) or "none"
            return f"no function {name} in handlers.py (there are: {known})"
        if inspect.iscoroutinefunction(function):
            return f"{name} is async: a handler runs inside the transaction, so it can't wait"
        try:
            inspect.signature(function).bind(*parameters)
        except TypeError:
            return f"{name} must take ({', '.join(parameters)})"
        return None

    def prepare(self, name: str, event: Event) -> object:
        """Run a prepare function; raises whatever it raises."""
        return self.functions[name](_seen(event))

    def call(
        self,
        name: str,
        tx: Tx,
        event: Event,
        key: Key,
        workspace: str | None,
        row: int,
        *,
        prepared: object,
        owe: Owe,
    ) -> None:
        """Run a function on the event; raises whatever it raises."""
        handler_tx = HandlerTx(tx, key, row, owe)
        process = os.getpid()
        try:
            seen = _seen(event, key.subject, workspace, prepared)
            result = self.functions[name](seen, handler_tx)
        finally:
            if os.getpid() != process:
                # A fork came back: it shares our sockets and SQLite's locks, and may use neither.
                os._exit(1)
            handler_tx._end()
        if not tx.is_open:
            raise TransactionLost("a statement of the handler ended the transaction")
        if inspect.isgenerator(result) or inspect.isasyncgen(result) or inspect.isawaitable(result):
            raise TypeError(f"{name} returned a {type(result).__name__}: none of it has run")


def _seen(
    event: Event, subject: str = "", workspace: str | None = None, prepared: object = None
) -> HandlerEvent:
    return HandlerEvent(
        event.source,
        event.account,
        event.event_id,
        event.type,
        event.received_ms,
        event.document,
        subject,
        workspace,
        prepared,
    )


def place_of(error: BaseException, *, own: bool = False) -> str:
    """` at file:line` of the founder's last own line in an error, or else of the last of all.

    With `own`, nothing is said of lines that are not the founder's.
    """
    calls = list(traceback.walk_tb(error.__traceback__))
    founders = [call for call in calls if call[0].f_globals.get("__name__") == MODULE]
    for frame, line in reversed(founders or ([] if own else calls)):
        return f" at {Path(frame.f_code.co_filename).name}:{line}"
    return ""


def _import(path: Path) -> ModuleType:
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec is not None, "a file name always gives a spec"
    assert spec.loader is not None, "and a loader"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except FileNotFoundError as error:
        raise HandlersError(f"handlers: {path} is not there") from error
    except BaseException as error:
        # The file is the founder's: anything may come out of it, and none of it may end us.
        raise HandlersError(f"handlers: {path} can't be imported: {_words(error)}"[:500]) from error
    return module


def _words(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:
        return type(error).__name__
