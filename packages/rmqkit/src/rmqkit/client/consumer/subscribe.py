"""Subscriptions with a handler. With the types of `on` and `subscribe`, type checkers check the handler's arguments.

=======================  ==============================  ===========================================================
``subscribe(...)`` with  a handler gets                  with two parameters it gets
=======================  ==============================  ===========================================================
nothing more             the message
``batch_max``            a list of messages
``body``                 the value                       the value and its message
both                     a list of values                a list of values and the list of their messages
=======================  ==============================  ===========================================================
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar, cast, overload

from rmqkit.client.consumer.retry import Retry
from rmqkit.errors import SettingsError
from rmqkit.filter import TAG
from rmqkit.protocol.bodies import decoder_of
from rmqkit.protocol.message import ReceivedMessage

Handler = Callable[[ReceivedMessage], Awaitable[object] | object]
BatchHandler = Callable[[list[ReceivedMessage]], Awaitable[object] | object]

T = TypeVar("T")
R = TypeVar("R")
H = TypeVar("H", bound=Handler)
B = TypeVar("B", bound=BatchHandler)

BodyHandler = Callable[[T], object] | Callable[[T, ReceivedMessage], object]
BodyBatchHandler = Callable[[list[T]], object] | Callable[[list[T], list[ReceivedMessage]], object]


Seen = Callable[[ReceivedMessage], object]


class Dedupe(Protocol):
    """A store of handled messages; see `rmqkit.client.consumer.dedupe`."""

    def once(self, handler: Callable[..., object], group: str) -> Callable[..., object]:
        """Wrap a handler so that it is called for new messages only. The returned function gets the message before the
        arguments of the handler. Raises SettingsError: the handler cannot be wrapped."""
        ...


class _OnBody(Protocol[T]):
    @overload
    def __call__(self, handler: Callable[[T], R]) -> Callable[[T], R]: ...
    @overload
    def __call__(self, handler: Callable[[T, ReceivedMessage], R]) -> Callable[[T, ReceivedMessage], R]: ...


class _OnBodies(Protocol[T]):
    @overload
    def __call__(self, handler: Callable[[list[T]], R]) -> Callable[[list[T]], R]: ...
    @overload
    def __call__(
        self, handler: Callable[[list[T], list[ReceivedMessage]], R]
    ) -> Callable[[list[T], list[ReceivedMessage]], R]: ...


class Subscribing:
    """The methods that register the handlers of a consumer."""

    @overload
    def subscribe(
        self,
        topic: str,
        expression: str = "*",
        handler: Handler | None = None,
        *,
        expression_type: str = TAG,
        body: None = None,
        batch_max: None = None,
        dedupe: Dedupe | Seen | None = None,
        retry: Retry | None = None,
    ) -> None: ...
    @overload
    def subscribe(
        self,
        topic: str,
        expression: str = "*",
        handler: BatchHandler | None = None,
        *,
        expression_type: str = TAG,
        body: None = None,
        batch_max: int,
        retry: Retry | None = None,
    ) -> None: ...
    @overload
    def subscribe(
        self,
        topic: str,
        expression: str = "*",
        handler: BodyHandler[T] | None = None,
        *,
        expression_type: str = TAG,
        body: type[T],
        batch_max: None = None,
        dedupe: Dedupe | Seen | None = None,
        retry: Retry | None = None,
    ) -> None: ...
    @overload
    def subscribe(
        self,
        topic: str,
        expression: str = "*",
        handler: BodyBatchHandler[T] | None = None,
        *,
        expression_type: str = TAG,
        body: type[T],
        batch_max: int,
        retry: Retry | None = None,
    ) -> None: ...
    def subscribe(
        self,
        topic: str,
        expression: str = "*",
        handler: Callable[..., object] | None = None,
        *,
        expression_type: str = TAG,
        body: Any = None,
        batch_max: int | None = None,
        dedupe: Dedupe | Seen | None = None,
        retry: Retry | None = None,
    ) -> None:
        """Subscribe to a topic, or replace its subscription. Call it before ``start`` or ``run``, which raise an error
        without a subscription, or in the ``with`` block of the consumer. Later calls are possible at any time.
        Raises SettingsError: the topic or the expression is not valid, ``batch_max`` is out of bounds, ``body`` cannot
        be read from JSON, ``dedupe`` does not fit the handler, or the handler is missing although ``body``, ``dedupe``,
        ``retry`` or ordered consumption needs it.

        Args:
            topic: the topic; it does not have to exist yet.
            expression: ``*`` for all messages, ``A || B`` for tags, or with ``expression_type="SQL92"`` a SQL92
                expression.
            handler: called with each message, possibly more than once. A coroutine function runs on the event loop,
                a plain function in a thread. Without a handler, read the messages with `messages`.
            expression_type: ``TAG`` or ``SQL92``. If a broker cannot filter by the SQL92 expression, `start` fails; for
                a subscription after the start, the error is only logged.
            body: the type of the value that the handler gets instead of the body, read from JSON: a
                msgspec Struct, a dataclass, a pydantic model, or another type that msgspec or pydantic
                supports, such as ``list[Order]``.
                A handler with two parameters receives the message, too. If a body does not fit, the handler is not
                called, and the message goes to the dead letters with the reason in the property ``rmqkit_reason``.
            batch_max: greatest number of messages in the list that the handler gets, all of one queue, 1 to 1024.
                If the handler raises, all of them are delivered again, or only those that `ConsumeLater` names.
            dedupe: acknowledges messages that were handled already, without calling the handler: a `SqliteDedupe`,
                a `RedisDedupe`, or a function that gets the message and returns true if
                your program has handled it.
                The function may be a coroutine function if the handler is one. You cannot combine ``dedupe`` with
                ``batch_max`` or broadcasting.
            retry: the number and the delays of retries after this handler fails. None means the delays of the broker
                and ``retries_max`` of the settings. A `ConsumeLater` with a delay or a level has priority.
                In ordered consumption, the queue waits for the delay.
        """
        self._subscribe(topic, expression, handler, expression_type, body, batch_max, dedupe, retry)

    @overload
    def on(
        self,
        topic: str,
        expression: str = "*",
        *,
        expression_type: str = TAG,
        body: None = None,
        batch_max: None = None,
        dedupe: Dedupe | Seen | None = None,
        retry: Retry | None = None,
    ) -> Callable[[H], H]: ...
    @overload
    def on(
        self,
        topic: str,
        expression: str = "*",
        *,
        expression_type: str = TAG,
        body: None = None,
        batch_max: int,
        retry: Retry | None = None,
    ) -> Callable[[B], B]: ...
    @overload
    def on(
        self,
        topic: str,
        expression: str = "*",
        *,
        expression_type: str = TAG,
        body: type[T],
        batch_max: None = None,
        dedupe: Dedupe | Seen | None = None,
        retry: Retry | None = None,
    ) -> _OnBody[T]: ...
    @overload
    def on(
        self,
        topic: str,
        expression: str = "*",
        *,
        expression_type: str = TAG,
        body: type[T],
        batch_max: int,
        retry: Retry | None = None,
    ) -> _OnBodies[T]: ...
    def on(
        self,
        topic: str,
        expression: str = "*",
        *,
        expression_type: str = TAG,
        body: Any = None,
        batch_max: int | None = None,
        dedupe: Dedupe | Seen | None = None,
        retry: Retry | None = None,
    ) -> Any:
        """Subscribe with the decorated function as the handler. Raises SettingsError: the same as for `subscribe`."""

        def decorate(handler: Callable[..., object]) -> Callable[..., object]:
            self._subscribe(topic, expression, handler, expression_type, body, batch_max, dedupe, retry)
            return handler

        return decorate

    def _subscribe(
        self,
        topic: str,
        expression: str,
        handler: Callable[..., object] | None,
        expression_type: str,
        body: Any,
        batch_max: int | None,
        dedupe: Dedupe | Seen | None,
        retry: Retry | None,
    ) -> None:
        raise NotImplementedError


def body_decoder(kind: Any, topic: str) -> Callable[[bytes], Any]:
    """Return the function that decodes the bodies of a subscription.

    Raises SettingsError: values of the type cannot be read from JSON.
    """
    try:
        return decoder_of(kind)
    except Exception as error:  # pydantic's and msgspec's errors about types have no common base
        raise SettingsError(
            f"subscription to topic {topic}: body {kind!r} cannot be read from JSON: {error}"
        ) from error


def handler_fault(handler: Callable[..., object], body: object, batch_max: int | None) -> str | None:
    """Return the reason why a handler cannot be called with its arguments, or None.
    Callables without a signature, such as some callables written in C, are not checked."""
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):
        return None
    counts = (1,) if body is None else (1, 2)
    for count in counts:
        with contextlib.suppress(TypeError):
            signature.bind(*[None] * count)
            return None
    message = "the message" if batch_max is None else "a list of messages"
    value = "the value" if batch_max is None else "a list of values"
    gets = message if body is None else f"{value}, or {value} and {message.replace('messages', 'their messages')}"
    name = getattr(handler, "__qualname__", repr(handler))
    return f"handler {name}{signature} cannot be called: it gets {gets}"


def is_async(handler: Callable[..., object]) -> bool:
    """Return True if a handler is a coroutine function. It is then called on the loop."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


def once(handler: Callable[..., object], dedupe: Dedupe | Seen, group: str) -> Callable[..., object]:
    """Wrap a handler in the same way as `Dedupe.once`.

    Raises SettingsError: ``dedupe`` is a coroutine function, but the handler is not.
    """
    if not callable(dedupe):
        return dedupe.once(handler, group)
    if is_async(dedupe) and not is_async(handler):
        raise SettingsError(
            "dedupe is a coroutine function and the handler is not: write both as async def, or neither"
        )

    def call(message: ReceivedMessage, *arguments: object) -> object:
        return None if dedupe(message) else handler(*arguments)

    async def call_async(message: ReceivedMessage, *arguments: object) -> None:
        seen = dedupe(message)
        if not (await seen if inspect.isawaitable(seen) else seen):
            await cast("Awaitable[object]", handler(*arguments))

    return call_async if is_async(handler) else call


def takes_two(handler: Callable[..., object]) -> bool:
    """Return True if a handler has two required positional parameters. It is then called with the value and the
    message.
    """
    try:
        parameters = inspect.signature(handler).parameters.values()
    except (TypeError, ValueError):  # some callables written in C have no signature
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [one for one in parameters if one.kind in positional and one.default is inspect.Parameter.empty]
    return len(needed) > 1
