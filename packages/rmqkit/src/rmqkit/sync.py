"""The clients for programs without an event loop. The names and the arguments are the same as for the asyncio clients,
but the methods block::

    from rmqkit import sync

    with sync.Producer("orders", name_servers="127.0.0.1:9876") as producer:
        producer.send("Orders", b"17")

Each class is a thin facade for the asyncio client with the same name. The client runs on an event loop in a thread
(`Portal`). Each method passes its arguments to the client and waits for the result. Several threads can call methods at
the same time. If the handler of a push consumer is a plain function, it runs in its own thread and can use the facade.
Coroutine functions run on the event loop and must not use the facade.

After ``os.fork``, a producer also works in the child: at its first use there, it creates a new client, new connections
and a new event loop. A consumer works only in the parent. Create a new consumer in the child.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator
from types import TracebackType
from typing import Any, Concatenate, NoReturn, ParamSpec, Self, TypeVar, cast

from rmqkit.client import connect as connected
from rmqkit.client.consumer import group as consumer
from rmqkit.client.consumer import pull as pull_consumer
from rmqkit.client.consumer import push as push_consumer
from rmqkit.client.consumer.poll import MessageStream
from rmqkit.client.consumer.subscribe import Subscribing
from rmqkit.client.pop import consumer as pop_consumer
from rmqkit.client.producer import producer, transaction
from rmqkit.client.runtime.lifecycle import Client
from rmqkit.client.runtime.process import (
    Portal,
    calling_on_signals,
    closing_order,
    portal,
    register_after_fork,
    starting_order,
)
from rmqkit.errors import ClientError
from rmqkit.protocol.message import ReceivedMessage

__all__ = [
    "ConnectedClients",
    "PopConsumer",
    "Producer",
    "PullConsumer",
    "PushConsumer",
    "TransactionProducer",
    "connect",
    "run",
]

P = ParamSpec("P")
T = TypeVar("T")
B = TypeVar("B", bound="_Blocking")
_POLL_SECONDS = 0.2
_Method = Callable[Concatenate[Any, P], T]


def _makes(client_type: Callable[P, Client]) -> Callable[[Callable[[Any], None]], Callable[Concatenate[Any, P], None]]:
    """Return a decorator that replaces an ``__init__``. The new function makes the asyncio client on the loop, and has
    the arguments of this client."""

    def init(self: _Blocking, /, *args: P.args, **kwargs: P.kwargs) -> None:
        self._begin(lambda: client_type(*args, **kwargs))

    def replace(declared: Callable[[Any], None]) -> Callable[Concatenate[Any, P], None]:
        return functools.update_wrapper(init, cast("type[Client]", client_type).__init__)

    return replace


def _adds(facade: type[B], method: _Method[P, Client]) -> _Method[P, B]:
    """Return a method that returns a facade. The asyncio method with the same name makes the client for the facade."""

    def call(self: ConnectedClients, /, *args: P.args, **kwargs: P.kwargs) -> B:
        added = facade.__new__(facade)
        added._begin(lambda: method(self._connected, *args, **kwargs))
        added._goes_on_after_fork = False  # the connection stays in the parent
        self._added.append(added)
        return added

    functools.update_wrapper(call, method)
    return call


def _waits(method: _Method[P, Awaitable[T]]) -> _Method[P, T]:
    """Return a method that calls the coroutine function with the same name and waits for its result."""

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        outcome: T = self._here().run(lambda: method(self._client, *args, **kwargs))
        return outcome

    functools.update_wrapper(call, method)
    return call


def _waits_unless_from_parent(method: _Method[P, Awaitable[None]]) -> _Method[P, None]:
    """Return a method like `_waits`. If the client belongs to a parent process, the method does nothing."""
    wait = _waits(method)

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if not self._client.is_from_parent:
            wait(self, *args, **kwargs)

    return functools.update_wrapper(call, method)


def _calls(method: _Method[P, T]) -> _Method[P, T]:
    """Return a method that calls the plain method with the same name on the loop."""

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        async def on_loop() -> T:
            return method(self._client, *args, **kwargs)

        outcome: T = self._here().run(on_loop)
        return outcome

    functools.update_wrapper(call, method)
    return call


def _iterates(method: _Method[P, MessageStream]) -> _Method[P, Iterator[ReceivedMessage]]:
    """Return a generator method for the messages of a stream, which the method ``_stream`` of the class returns."""

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[ReceivedMessage]:
        stream = self._stream(*args, **kwargs)
        while True:
            try:
                message = self._here().run(stream.__anext__)
            except StopAsyncIteration:
                return
            yield message

    functools.update_wrapper(call, method)
    return call


def _generates(method: _Method[P, AsyncGenerator[T]]) -> _Method[P, Generator[T]]:
    """Return a method that returns a generator for the values of the asynchronous generator with the same name."""

    def call(self: ConnectedClients, /, *args: P.args, **kwargs: P.kwargs) -> Generator[T]:
        async def make() -> AsyncGenerator[T]:
            return method(self._connected, *args, **kwargs)

        return _blocking(self._portal, self._portal.run(make))

    functools.update_wrapper(call, method)
    return call


def _blocking(portal: Portal, values: AsyncGenerator[T]) -> Generator[T]:
    try:
        while True:
            try:
                value = portal.run(values.__anext__)
            except StopAsyncIteration:
                return
            yield value
    finally:
        portal.run(values.aclose)


def run(*clients: _Blocking) -> None:
    """Run clients until SIGINT or SIGTERM or until all have closed, then close them, like `rmqkit.run`. This blocks.
    Raises ClientError: there are no clients, or the caller is not the main thread, the only thread that gets signals.
    Raises NoRoute: see `start` of the clients."""
    if not clients:
        raise ClientError("run() has no clients: give it at least one")
    asked = threading.Event()
    with calling_on_signals(asked.set):
        try:
            for client in starting_order(clients):
                if client.is_new and not asked.is_set():
                    client.start()
            # Use a timeout: a wait without a timeout blocks signals on Windows.
            while not asked.wait(_POLL_SECONDS) and not all(client.is_closed for client in clients):
                pass
        finally:
            for together in filter(None, closing_order(clients)):
                together[0]._here().run(functools.partial(_close_all, [one._client for one in together]))


def _runs(method: _Method[P, Awaitable[None]]) -> _Method[P, None]:
    """Return a method that runs the client with `run` of this module."""

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
        run(self)

    return functools.update_wrapper(call, method)


async def _close_all(clients: list[Client]) -> None:
    await asyncio.gather(*(client.close() for client in clients))


class _Blocking:
    """The base class of the facades."""

    _portal: Portal
    _client: Client
    _make: Callable[[], Awaitable[Client]]
    _move_lock: threading.Lock

    _goes_on_after_fork = False

    def _begin(self, make: Callable[[], Client]) -> None:
        async def make_here() -> Client:
            return make()

        self._make = make_here
        self._move_lock = threading.Lock()
        self._portal = portal()
        # Make the client in the loop's thread, because an asyncio client uses the running loop.
        self._client = self._portal.run(make_here)
        self._portal.close_at_exit(self._client)
        register_after_fork(self, _Blocking._forked)

    start = _waits(Client.start)
    ping = _waits(Client.ping)
    wait_closed = _waits(Client.wait_closed)
    run = _runs(Client.run)
    close = _waits_unless_from_parent(Client.close)

    @property
    def closes_last(self) -> bool:
        """The value of `Client.closes_last`."""
        return self._client.closes_last

    @property
    def is_new(self) -> bool:
        """Return True if the client has neither been started nor closed."""
        return self._client.is_new

    @property
    def is_closed(self) -> bool:
        """Return True if the client is completely closed."""
        return self._client.is_closed

    def _forked(self) -> bool:
        self._move_lock = threading.Lock()  # a thread of the parent may have held the lock during the fork
        return False

    def _here(self) -> Portal:
        """Return the portal of this process. After a fork, move the client to this process first.
        Raises ClientError: the client is a consumer that was started before the fork."""
        if self._portal.is_from_parent:
            # Check again with the lock, so that only one of several threads makes the new client after a fork.
            with self._move_lock:
                if self._portal.is_from_parent:
                    self._move_to_this_process()
        return self._portal

    def _move_to_this_process(self) -> None:
        own, client = portal(), self._client
        if client.is_from_parent:
            if self._goes_on_after_fork:
                client = own.run(self._make)
            own.run(client.start)
        own.close_at_exit(client)
        self._client, self._portal = client, own

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be sent to another process: make one there")

    def __enter__(self) -> Self:
        self._here().run(self._client.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._client.is_from_parent:
            self._here().run(lambda: self._client.__aexit__(kind, error, trace))


class Producer(_Blocking):
    """`rmqkit.Producer` for programs without an event loop: the same methods, but they block."""

    _goes_on_after_fork = True

    @_makes(producer.Producer)
    def __init__(self) -> None:
        """Create the client with the arguments of `rmqkit.client.producer.producer.Producer`."""

    send = _waits(producer.Producer.send)
    send_one_way = _waits(producer.Producer.send_one_way)
    send_batch = _waits(producer.Producer.send_batch)
    send_many = _waits(producer.Producer.send_many)
    request = _waits(producer.Producer.request)
    reply = _waits(producer.Producer.reply)
    recall = _waits(producer.Producer.recall)
    queues = _waits(producer.Producer.queues)
    status = _calls(producer.Producer.status)


class TransactionProducer(Producer):
    """`rmqkit.TransactionProducer` for programs without an event loop: the same methods, but they block."""

    @_makes(transaction.TransactionProducer)
    def __init__(self) -> None:
        """Create the client with the arguments of `rmqkit.client.producer.transaction.TransactionProducer`."""

    send_in_transaction = _waits(transaction.TransactionProducer.send_in_transaction)
    send_half = _waits(transaction.TransactionProducer.send_half)


class _Consumer(_Blocking):
    """The base class of the consumers' facades."""

    unsubscribe = _calls(consumer.Consumer.unsubscribe)
    pause = _calls(consumer.Consumer.pause)
    resume = _calls(consumer.Consumer.resume)
    on_queues_changed = _calls(consumer.Consumer.on_queues_changed)
    held_queues = _calls(consumer.Consumer.held_queues)
    status = _calls(consumer.Consumer.status)


class PullConsumer(_Consumer):
    """`rmqkit.PullConsumer` for programs without an event loop: the same methods, but they block."""

    @_makes(pull_consumer.PullConsumer)
    def __init__(self) -> None:
        """Create the client with the arguments of `rmqkit.client.consumer.pull.PullConsumer`."""

    subscribe = _calls(pull_consumer.PullConsumer.subscribe)
    assign = _calls(pull_consumer.PullConsumer.assign)
    schedule = _calls(pull_consumer.PullConsumer.schedule)
    poll = _waits(pull_consumer.PullConsumer.poll)
    seek = _waits(pull_consumer.PullConsumer.seek)
    seek_to_begin = _waits(pull_consumer.PullConsumer.seek_to_begin)
    seek_to_end = _waits(pull_consumer.PullConsumer.seek_to_end)
    seek_to_time = _waits(pull_consumer.PullConsumer.seek_to_time)
    queues = _waits(pull_consumer.PullConsumer.queues)
    pull = _waits(pull_consumer.PullConsumer.pull)
    min_offset = _waits(pull_consumer.PullConsumer.min_offset)
    max_offset = _waits(pull_consumer.PullConsumer.max_offset)
    search_offset = _waits(pull_consumer.PullConsumer.search_offset)
    committed = _waits(pull_consumer.PullConsumer.committed)
    commit = _waits(pull_consumer.PullConsumer.commit)
    view_message = _waits(pull_consumer.PullConsumer.view_message)
    query_messages = _waits(pull_consumer.PullConsumer.query_messages)
    _stream = _calls(pull_consumer.PullConsumer.messages)
    messages = _iterates(pull_consumer.PullConsumer.messages)


class PushConsumer(Subscribing, _Consumer):
    """`rmqkit.PushConsumer` for programs without an event loop: the same methods, but they block."""

    @_makes(push_consumer.PushConsumer)
    def __init__(self) -> None:
        """Create the client with the arguments of `rmqkit.client.consumer.push.PushConsumer`."""

    _subscribe = _calls(push_consumer.PushConsumer._subscribe)
    unsubscribe = _calls(push_consumer.PushConsumer.unsubscribe)
    _stream = _calls(push_consumer.PushConsumer.messages)
    messages = _iterates(push_consumer.PushConsumer.messages)


class PopConsumer(PushConsumer):
    """`rmqkit.PopConsumer` for programs without an event loop: the same methods, but they block."""

    @_makes(pop_consumer.PopConsumer)
    def __init__(self) -> None:
        """Create the client with the arguments of `rmqkit.client.pop.consumer.PopConsumer`."""

    pop = _waits(pop_consumer.PopConsumer.pop)
    ack = _waits(pop_consumer.PopConsumer.ack)
    ack_many = _waits(pop_consumer.PopConsumer.ack_many)
    change_invisible_time = _waits(pop_consumer.PopConsumer.change_invisible_time)


class ConnectedClients:
    """`rmqkit.ConnectedClients` for programs without an event loop. It makes the clients of this module.
    It works only in its own process. After ``os.fork``, connect again in the child."""

    def __init__(self, open_clients: Callable[[], connected.ConnectedClients]) -> None:
        async def make() -> connected.ConnectedClients:
            return open_clients()

        self._portal = portal()
        self._connected = self._portal.run(make)
        self._added: list[_Blocking] = []

    producer = _adds(Producer, connected.ConnectedClients.producer)
    transaction_producer = _adds(TransactionProducer, connected.ConnectedClients.transaction_producer)
    consumer = _adds(PushConsumer, connected.ConnectedClients.consumer)
    pop_consumer = _adds(PopConsumer, connected.ConnectedClients.pop_consumer)
    pull_consumer = _adds(PullConsumer, connected.ConnectedClients.pull_consumer)
    read = _generates(connected.ConnectedClients.read)

    def __enter__(self) -> Self:
        self._portal.run(self._connected.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._portal.run(lambda: self._connected.__aexit__(kind, error, trace))

    def ping(self) -> None:
        """Check the connection to a name server.

        Raises NoRoute: no name server responds. Raises ClientError: this object is not open.
        """
        self._portal.run(self._connected.ping)

    def run(self) -> None:
        """Start the producers and consumers that this object made, and run them with `run` of this module."""
        run(*self._added)


def _connects(method: Callable[P, connected.ConnectedClients]) -> Callable[P, ConnectedClients]:
    def call(*args: P.args, **kwargs: P.kwargs) -> ConnectedClients:
        return ConnectedClients(lambda: method(*args, **kwargs))

    return functools.update_wrapper(call, method)


connect = _connects(connected.connect)
