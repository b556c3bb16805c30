"""Hooks: functions that a client calls when it sends, consumes or ends a transaction (``SendMessageHook``,
``ConsumeMessageHook``).

A method of a `Hook` is called at the beginning of an operation. It may return a function, which is called with the
outcome. The methods are called in the order of the hooks, and the returned functions in reverse order. Both are called
on the loop in the task of the operation, so they must not block. An exception of a hook is logged and has no other
effect. The trace topic (`producer.trace`) and OpenTelemetry (`otel`) are hooks. Use this module only on the event loop.
Source: behaviour.md §7.6, §7.9, §7.11.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from msgspec import Struct, field

from rmqkit.protocol.message import Message, ReceivedMessage
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.trace import ConsumeReturn

A = TypeVar("A")
M = TypeVar("M", bound="Prepared")

_log = logging.getLogger(__name__)


class Sending(Struct):
    """A message or a batch that a producer is about to send.

    Attributes:
        group: the producer group.
        messages: the message, or the messages of the batch. In `Producer.send_many` the list begins with the first
            message, and the others are added as they arrive.
        is_batch: True if the messages are sent as a batch.
        is_half: True if the message is sent in a transaction.
        properties: the properties that hooks add; they are sent with every message.
    """

    group: str
    messages: list[Message]
    is_batch: bool = False
    is_half: bool = False
    properties: dict[str, str] = field(default_factory=dict)


class SendStatus(enum.Enum):
    """The durability of a stored message, as the broker confirmed it. With every status, the message is stored."""

    SEND_OK = "SEND_OK"
    """The message is stored, flushed and replicated as the broker is configured."""
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    """The message is stored, but the disk did not confirm it in time."""
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    """The message is stored on the master, but too few slaves confirmed it in time."""
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"
    """The message is stored on a 4.9 master that has too few slaves."""


class SendResult(Struct, gc=False):
    """The result of a send.

    Attributes:
        status: the durability of the stored message, as the broker confirmed it.
        msg_id: the unique key of the message. For a batch, the keys of all messages, separated by commas.
        offset_msg_id: the id that the broker assigned. It contains the broker's address and the position in its log.
            For a batch, the ids of all messages, separated by commas.
        queue: the queue of the message: topic, broker name and queue id.
        queue_offset: the position in the queue. For a batch, the position of its first message.
        transaction_id: the transaction id in the broker's response, or None.
        recall_handle: the handle for `Producer.recall`. Only messages with ``delay`` or ``deliver_at`` have one.
        lite_offset: the position in the lite topic. For a batch, the position of its first message. Apache's brokers do
            not return it: None.
        lite_epoch: the life of the lite topic, or None.
    """

    status: SendStatus
    msg_id: str
    offset_msg_id: str
    queue: MessageQueue
    queue_offset: int
    transaction_id: str | None = None
    recall_handle: str | None = None
    lite_offset: int | None = None
    lite_epoch: int | None = None


class SendOutcome(Struct):
    """The outcome of a send.

    Attributes:
        result: the result of the send; None after a failure or a one-way send.
        error: the error that the program gets; None after a success.
        address: the address of the broker of the last attempt, ``host:port``.
        tried_ms: the time when the last attempt began, in ms since the epoch.
        body_bytes: the size of the sent body, which may be compressed. For a batch, the size of the whole batch.
        region_id: the trace region in the broker's response.
        is_traced: True if the broker requests traces.
    """

    result: SendResult | None = None
    error: BaseException | None = None
    address: str | None = None
    tried_ms: int = 0
    body_bytes: int = 0
    region_id: str = "DefaultRegion"
    is_traced: bool = True


class Consumption(Struct):
    """Messages of one queue that a consumer is about to pass to a handler or to the program.

    Attributes:
        group: the consumer group.
        messages: the messages, all of one queue.
        is_polled: True if the program requested the messages, False if they go to a handler.
    """

    group: str
    messages: list[ReceivedMessage]
    is_polled: bool = False


class ConsumeOutcome(Struct):
    """The outcome of a handler call.

    Attributes:
        returned: SUCCESS; TIME_OUT if the handler exceeded the consume time-out; FAILED if it requested a later
            delivery; EXCEPTION if it raised another exception.
        error: the exception that the handler raised, or None.
    """

    returned: ConsumeReturn = ConsumeReturn.SUCCESS
    error: BaseException | None = None


class TransactionEnd(Struct):
    """The end of a transaction, as the producer reports it to the broker.

    Attributes:
        group: the producer group.
        message: the sent message. After a check by the broker, the stored message in the check.
        msg_id: the unique key of the message.
        transaction_id: the id of the transaction, or None if the broker assigned none.
        state: COMMIT_MESSAGE, ROLLBACK_MESSAGE or UNKNOW, as in Java's clients.
        address: the address of the broker, ``host:port``; None if it is unknown.
        is_checked: True if the broker checked the transaction.
    """

    group: str
    message: Message | ReceivedMessage
    msg_id: str
    transaction_id: str | None
    state: str
    address: str | None
    is_checked: bool


class Recall(Struct):
    """A recall: the attempt to cancel a message before its time.

    Attributes:
        group: the producer group.
        topic: the topic of the message.
        msg_id: the unique key of the message.
        error: the reason why the recall failed; None if the message is recalled.
    """

    group: str
    topic: str
    msg_id: str
    error: BaseException | None = None


class Hook:
    """Base class of hooks. Derive a class from it, and pass an object of this class to a client in ``hooks``::

    class SlowSends(Hook):
        def sending(self, sending: Sending) -> Callable[[SendOutcome], None]:
            begun = time.perf_counter()
            return lambda outcome: histogram.record(time.perf_counter() - begun)
    """

    def sending(self, sending: Sending) -> Callable[[SendOutcome], None] | None:
        """Handle the beginning of a send. This method is called before a message or a batch is prepared."""

    def consuming(self, consumption: Consumption) -> Callable[[ConsumeOutcome], None] | None:
        """Handle messages that are about to go to a handler or to the program."""

    def transaction_ended(self, end: TransactionEnd) -> None:
        """Handle the end of a transaction. This method is called before the end is sent to the broker."""

    def recalled(self, recall: Recall) -> None:
        """Handle a recall that has succeeded or failed."""


class BackgroundHook(Hook):
    """A hook that runs its own task. The client starts and closes this hook."""

    def start(self) -> None:
        """Start the hook. The client calls this after it has joined its group."""

    async def close(self) -> None:
        """Stop the hook after everything that was reported before is delivered. The client calls this after it has left
        its group.
        """


class Prepared(Protocol):
    """A prepared message. Its sender calls ``on_end`` once with the outcome."""

    on_end: Callable[[SendOutcome], None] | None


class Hooks(tuple[Hook, ...]):
    """The hooks of one client."""

    __slots__ = ()

    def prepare(self, sending: Sending, prepare: Callable[[dict[str, str]], M]) -> M:
        """Call ``prepare`` with the properties that the hooks add. The sender of the result must call ``on_end`` of the
        result once.
        Raises the errors of ``prepare``, after the hooks have received them."""
        if not self:
            return prepare({})
        on_end = self.sending(sending)
        try:
            prepared = prepare(sending.properties)
        # Do this after a cancellation, too. Each ``on_end`` must be called exactly once; otherwise spans and traces
        # remain open.
        except BaseException as error:
            on_end(SendOutcome(error=error))
            raise
        prepared.on_end = on_end
        return prepared

    def sending(self, sending: Sending) -> Callable[[SendOutcome], None]:
        """Call `Hook.sending` of all hooks. The caller must call the returned function once with the outcome."""
        return _begin([hook.sending for hook in self], sending)

    def consuming(self, consumption: Consumption) -> Callable[[ConsumeOutcome], None]:
        """Call `Hook.consuming` of all hooks. The caller must call the returned function once with the outcome."""
        return _begin([hook.consuming for hook in self], consumption)

    def polled(self, group: str, messages: list[ReceivedMessage]) -> None:
        """Report messages that the program polled. They count as consumed successfully."""
        if self and messages:
            self.consuming(Consumption(group, messages, is_polled=True))(ConsumeOutcome())

    def transaction_ended(self, end: TransactionEnd) -> None:
        for hook in self:
            _call(hook.transaction_ended, end)

    def recalled(self, recall: Recall) -> None:
        for hook in self:
            _call(hook.recalled, recall)


NO_HOOKS = Hooks(())


default_hooks: list[Hook] = []
"""The hooks of all clients that are created from now on, in addition to their own hooks. OpenTelemetry's instrumentor
uses this.
"""


def with_defaults(hooks: Sequence[Hook]) -> tuple[Hook, ...]:
    """Return the hooks of a client: its own hooks, and the default hooks. A default hook is omitted if one of the
    client's own hooks has the same class."""
    # Compare exact classes: a hook with its own tracer replaces the hook of the instrumentor. Both hooks would create
    # two spans for each send, and the second hook would overwrite the context of the first.
    return (*hooks, *(one for one in default_hooks if not any(type(given) is type(one) for given in hooks)))


def _begin(starts: list[Callable[[A], Callable[[Any], None] | None]], about: A) -> Callable[[Any], None]:
    # Call the returned functions in reverse order, as in nested blocks: the span of the first hook contains all others.
    ends = [end for start in starts if (end := _call(start, about)) is not None]

    def end_all(outcome: Any) -> None:
        for end in reversed(ends):
            _call(end, outcome)

    return end_all


def _call(function: Callable[[A], Any], argument: A) -> Any:
    try:
        return function(argument)
    except Exception as error:  # noqa: BLE001 - the outer edge of the program's code, which must not cost a message
        _log.warning("hook %r failed", function, exc_info=error)
        return None
