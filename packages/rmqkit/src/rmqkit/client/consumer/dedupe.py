"""Idempotent consumers: a message that was handled is not handled again.

RocketMQ delivers a message at least once. It delivers a message again if the consumer stops before the offset is saved,
if an acknowledgement is late or lost, or if queues move between members. A producer may also retry a send after a lost
response. ``consumer.on("Orders", dedupe=…)`` looks up the key of each message before it calls the handler:

=====================  ==========================================================================================
``dedupe``             guarantee
=====================  ==========================================================================================
`SqliteDedupe`         the key and the writes of the handler are one transaction: both are applied once, even if the
                       process is killed
`RedisDedupe`          two members do not handle a key at the same time, and a key is not handled again after its
                       handler has returned. If a process is killed after the work and before the mark, the next
                       delivery is handled: at least once, as also while Redis does not answer
a function             the program decides: the function gets the message; if it returns true, the message is
                       acknowledged. The program marks messages itself, best in the transaction of the work
=====================  ==========================================================================================

The key is `ReceivedMessage.msg_id`, which is the same in all attempts of a send and in all deliveries. A program can
choose another ``key``. Each group and topic has its own keys. The keys are stored for ``keep_hours`` to limit the size
of the store. A message that is delivered after this time is handled again.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sqlite3
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterator
from os import PathLike, fspath
from typing import Any, cast

from rmqkit.client.consumer.consume import ConsumeLater
from rmqkit.client.consumer.subscribe import is_async
from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import ClientError, SettingsError
from rmqkit.protocol.message import ReceivedMessage

__all__ = ["RedisDedupe", "SqliteDedupe"]

KEEP_HOURS = 96.0
"""The default time for which keys are stored. It is longer than brokers retain messages (72 hours), so that a reset of
a group's offset does not cause a second handling.
"""

_EXPIRED_PER_MESSAGE = 100
_HOUR_MS = 3_600_000
_DONE = "done"
_RELEASE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"
_CREATE = (
    """CREATE TABLE IF NOT EXISTS rmqkit_seen (consumer_group TEXT NOT NULL, topic TEXT NOT NULL, key TEXT NOT NULL,
    seen_ms INTEGER NOT NULL, UNIQUE (consumer_group, topic, key))""",
    "CREATE INDEX IF NOT EXISTS rmqkit_seen_age ON rmqkit_seen (seen_ms)",
)
_EXPIRE = "DELETE FROM rmqkit_seen WHERE rowid IN (SELECT rowid FROM rmqkit_seen WHERE seen_ms < ? LIMIT ?)"
# A stored key that has expired counts as new.
_MARK = (
    "INSERT INTO rmqkit_seen VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET seen_ms = excluded.seen_ms WHERE seen_ms < ?"
)

_log = logging.getLogger(__name__)
_KeyOf = Callable[[ReceivedMessage], str]


class SqliteDedupe:
    """A store of the keys of handled messages in the SQLite database to which the handler writes, in the same
    transaction::

        orders = SqliteDedupe("orders.db")

        @consumer.on("Orders", body=Order, dedupe=orders)
        def bill(order: Order) -> None:
            orders.connection.execute("INSERT INTO bills VALUES (?, ?)", (order.id, order.amount))

    When the handler returns, its writes and the key are committed. If the handler raises, they are rolled back, and the
    message is delivered again. The handler must be a plain function, because SQLite blocks, and it must not commit. A
    database has one writer at a time, so the transactions of other threads and processes wait. Effects outside the
    database, such as a call to another service, are not undone. The database settings (``PRAGMA synchronous``) decide
    whether a commit survives a power cut.

    Args:
        path: the path of the database. The table ``rmqkit_seen`` is created in this database.
        key: a function that returns the key of a message; None means ``msg_id``.
        keep_hours: the time for which keys are stored.
        busy_seconds: the longest time that a transaction waits for others. After this time the handler fails and the
            message is delivered again.

    Raises SettingsError: the path is not a file, or a time is not positive.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        key: _KeyOf | None = None,
        keep_hours: float = KEEP_HOURS,
        busy_seconds: float = 30.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._path = fspath(path)
        if not self._path or ":memory:" in self._path:
            raise SettingsError(f"database {self._path!r} forgets its keys: give the path of a file")
        self._key_of = key or _msg_id
        self._keep_ms = _positive("keep_hours", keep_hours) * _HOUR_MS
        self._busy_seconds = _positive("busy_seconds", busy_seconds)
        self._clock = clock
        self._here = threading.local()

    @property
    def connection(self) -> sqlite3.Connection:
        """The connection of the current transaction. Only the handler can use it.
        Raises ClientError: this thread does not run a handler with this ``dedupe``."""
        connection: sqlite3.Connection | None = getattr(self._here, "connection", None)
        if connection is None:
            raise ClientError(f"no transaction of {self._path} here: use it in the handler, in the handler's thread")
        return connection

    def once(self, handler: Callable[..., object], group: str) -> Callable[..., object]:
        """Wrap a handler. The returned function gets the message before the arguments of the handler.
        Raises SettingsError: the handler is a coroutine function."""
        if is_async(handler):
            raise SettingsError(
                "SqliteDedupe blocks, so the handler must be a plain function: write def, not async def"
            )

        def call(message: ReceivedMessage, *arguments: object) -> None:
            with contextlib.closing(self._open()) as connection, _transaction(connection):
                if not self._mark(connection, group, message):
                    return
                self._here.connection = connection
                try:
                    outcome = handler(*arguments)
                finally:
                    self._here.connection = None
                if inspect.isawaitable(outcome):
                    raise ClientError("the handler returned an awaitable: SqliteDedupe needs it to end when it returns")
                if not connection.in_transaction:
                    raise ClientError(f"the handler ended the transaction of {self._path}: leave that to SqliteDedupe")

        return call

    def _open(self) -> sqlite3.Connection:
        # Open a connection for each message. This is cheap compared with a commit, and no thread or fork shares the
        # connection.
        uri = self._path.startswith("file:")
        return sqlite3.connect(self._path, timeout=self._busy_seconds, isolation_level=None, uri=uri)

    def _mark(self, connection: sqlite3.Connection, group: str, message: ReceivedMessage) -> bool:
        """Store a key and delete old keys. Return True if the key is new."""
        now_ms = self._clock.now_ms()
        oldest_ms = now_ms - self._keep_ms
        for statement in _CREATE:
            connection.execute(statement)
        connection.execute(_EXPIRE, (oldest_ms, _EXPIRED_PER_MESSAGE))
        key = _checked_key(self._key_of, message)
        return connection.execute(_MARK, (group, message.topic, key, now_ms, oldest_ms)).rowcount > 0


class RedisDedupe:
    """A store of the keys of handled messages in Redis::

        seen = RedisDedupe(redis.asyncio.Redis())

        @consumer.on("Orders", dedupe=seen)
        async def bill(message: ReceivedMessage) -> None: ...

    The key is set before the handler is called, and marked as done when the handler has returned. If the handler
    raises, the key is removed. If another member handles the same key, the message is delivered again later. If a
    member is killed, its key remains until the lease ends.

    Args:
        client: a ``redis.asyncio.Redis`` for coroutine functions, a ``redis.Redis`` for plain functions.
        key: a function that returns the key of a message; None means ``msg_id``.
        keep_hours: the time for which keys are stored.
        lease_seconds: the longest time that a handler should take. If it takes longer and the message is delivered
            again, the message is handled again.
        prefix: the prefix of all names in Redis.

    Raises SettingsError: a time is not positive.
    """

    def __init__(
        self,
        client: Any,
        *,
        key: _KeyOf | None = None,
        keep_hours: float = KEEP_HOURS,
        lease_seconds: float = 900.0,
        prefix: str = "rmqkit:seen:",
    ) -> None:
        self._client = client
        self._is_async = hasattr(type(client), "__aenter__")
        self._key_of = key or _msg_id
        self._keep_ms = round(_positive("keep_hours", keep_hours) * _HOUR_MS)
        self._lease_ms = round(_positive("lease_seconds", lease_seconds) * 1000)
        self._prefix = prefix

    def once(self, handler: Callable[..., object], group: str) -> Callable[..., object]:
        """Wrap a handler. The returned function gets the message before the arguments of the handler.
        Raises SettingsError: the client is asynchronous and the handler is not, or vice versa."""
        client, lease_ms, keep_ms = self._client, self._lease_ms, self._keep_ms
        if is_async(handler) is not self._is_async:
            kind = "a coroutine function (async def)" if self._is_async else "a plain function (def)"
            raise SettingsError(f"RedisDedupe with a client of {type(client).__module__} needs {kind} as handler")

        def name_of(message: ReceivedMessage) -> str:
            return f"{self._prefix}{group}:{message.topic}:{_checked_key(self._key_of, message)}"

        def call(message: ReceivedMessage, *arguments: object) -> None:
            name, token = name_of(message), uuid.uuid4().hex
            if not client.set(name, token, nx=True, px=lease_ms):
                _check_done(client.get(name), name)
                return
            try:
                handler(*arguments)
            except BaseException:
                with _reported(name):
                    client.eval(_RELEASE, 1, name, token)
                raise
                # A failure here must not cause another delivery, because the message is handled.
            with _reported(name):
                client.set(name, _DONE, px=keep_ms)

        async def call_async(message: ReceivedMessage, *arguments: object) -> None:
            name, token = name_of(message), uuid.uuid4().hex
            if not await client.set(name, token, nx=True, px=lease_ms):
                _check_done(await client.get(name), name)
                return
            try:
                await cast("Awaitable[object]", handler(*arguments))
            except BaseException:
                with _reported(name):
                    await client.eval(_RELEASE, 1, name, token)
                raise
            with _reported(name):
                await client.set(name, _DONE, px=keep_ms)

        return call_async if self._is_async else call


def _check_done(value: str | bytes | None, name: str) -> None:
    """Check that a key is marked as done. Raises ConsumeLater: it is not, so another member handles the message."""
    if value not in (_DONE, _DONE.encode()):
        _log.info("key %s is being handled elsewhere: the message is delivered again later", name)
        raise ConsumeLater


@contextlib.contextmanager
def _reported(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - any exception of the client: the handler's result is certain without it
        _log.warning("cannot mark key %s: %s; if it is delivered again, it is handled again", name, error)


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    # Lock the database now, not with the first write: two deliveries of a message must not both find that its key is
    # new.
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _msg_id(message: ReceivedMessage) -> str:
    return message.msg_id


def _checked_key(key_of: _KeyOf, message: ReceivedMessage) -> str:
    """Return the key of a message. Raises ClientError: the key is not text, or it is empty."""
    key: object = key_of(message)
    if not isinstance(key, str) or not key:
        raise ClientError(f"key of message {message.msg_id} is {key!r}: it must be text, and not empty")
    return key


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise SettingsError(f"{name} is {value}: it must be positive")
    return value
