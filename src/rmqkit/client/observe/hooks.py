"""Hooks are called when a client sends, consumes or ends a transaction (``SendMessageHook``, ``ConsumeMessageHook``).

A `Hook` is called when something begins and may return a function, which is called with the outcome. Begins are called
in the order of the hooks, ends in the opposite one, on the loop and within the task whose work it is; so they must not
block. What a hook raises is logged and changes nothing. The trace topic (`producer.trace`) and OpenTelemetry (`otel`)
are hooks; a client without hooks skips all of this. Loop only. Source: behaviour.md §7.6, §7.9, §7.11.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from msgspec import Struct, field

from rmqkit.protocol.message import Message, ReceivedMessage
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.trace import ConsumeReturn

A = TypeVar("A")
M = TypeVar("M", bound="Prepared")

_log = logging.getLogger(__name__)


class Sending(Struct):
    """A message, or a batch, that is about to be prepared and sent.

    Attributes:
        messages: one, or those of a batch; in `Producer.send_many` the first, and the others as they come.
        is_half: whether it is sent in a transaction.
        properties: what hooks put here is sent with every message.
    """

    group: str
    messages: list[Message]
    is_batch: bool = False
    is_half: bool = False
    properties: dict[str, str] = field(default_factory=dict)


class SendStatus(enum.Enum):
    """How safely a broker stored a message; every status counts as sent."""

    SEND_OK = "SEND_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"


class SendResult(Struct, gc=False):
    """Where a message was stored.

    Attributes:
        msg_id: the unique key the client gave; of a batch those of its messages, joined by commas.
        offset_msg_id: the id the broker gave: its address and the place in its log; of a batch joined by commas.
        queue_offset: position in the queue; of a batch that of its first message.
        transaction_id: as the broker answered it.
        recall_handle: what `Producer.recall` takes; only of messages with a time of delivery.
    """

    status: SendStatus
    msg_id: str
    offset_msg_id: str
    queue: MessageQueue
    queue_offset: int
    transaction_id: str | None = None
    recall_handle: str | None = None


class SendOutcome(Struct):
    """How a send ended.

    Attributes:
        result: where it was stored; None after a failure or a one-way send.
        error: what the program gets instead.
        address: of the broker that was tried last, ``host:port``.
        tried_ms: when that try began, in ms since the epoch.
        body_bytes: as sent, that is compressed; a batch's whole body.
        region_id, is_traced: what the broker said of traces.
    """

    result: SendResult | None = None
    error: BaseException | None = None
    address: str | None = None
    tried_ms: int = 0
    body_bytes: int = 0
    region_id: str = "DefaultRegion"
    is_traced: bool = True


class Consumption(Struct):
    """Messages of one queue that a handler is about to be called with; ``is_polled`` when they go to the program."""

    group: str
    messages: list[ReceivedMessage]
    is_polled: bool = False


class ConsumeOutcome(Struct):
    """How a handler ended: ``TIME_OUT`` is one that took longer than the consume time-out, ``FAILED`` one that asked
    for a later delivery, ``error`` what it raised."""

    returned: ConsumeReturn = ConsumeReturn.SUCCESS
    error: BaseException | None = None


class TransactionEnd(Struct):
    """How a transaction ended, as reported to the broker at ``address``; ``is_checked`` when the broker had asked.
    ``state`` is the reference's name, ``message`` the one that was sent, or what came with the broker's question."""

    group: str
    message: Message | ReceivedMessage
    msg_id: str
    transaction_id: str | None
    state: str
    address: str | None
    is_checked: bool


class Recall(Struct):
    """A message that was called back, unless ``error`` says why not."""

    group: str
    topic: str
    msg_id: str
    error: BaseException | None = None


class Hook:
    """Base class of hooks: give an object of a class of your own to a client, as one of its ``hooks``::

    class SlowSends(Hook):
        def sending(self, sending: Sending) -> Callable[[SendOutcome], None]:
            begun = time.perf_counter()
            return lambda outcome: histogram.record(time.perf_counter() - begun)
    """

    def sending(self, sending: Sending) -> Callable[[SendOutcome], None] | None:
        """Called before a message or batch is prepared."""

    def consuming(self, consumption: Consumption) -> Callable[[ConsumeOutcome], None] | None:
        """Called before a handler is called."""

    def transaction_ended(self, end: TransactionEnd) -> None:
        """Called before the end of a transaction is sent to its broker."""

    def recalled(self, recall: Recall) -> None:
        """Called after a broker answered, or did not answer, a recall."""


class BackgroundHook(Hook):
    """A hook with a task of its own, which its client starts and closes with itself."""

    def start(self) -> None:
        """Begin, once the client has joined its group."""

    async def close(self) -> None:
        """End after the client has left its group; what was reported before is not lost."""


class Prepared(Protocol):
    """A prepared message; whoever sends it calls ``on_end`` once with the outcome."""

    on_end: Callable[[SendOutcome], None] | None


class Hooks(tuple[Hook, ...]):
    """The hooks of one client."""

    __slots__ = ()

    def prepare(self, sending: Sending, prepare: Callable[[dict[str, str]], M]) -> M:
        """Call ``prepare`` with the properties that hooks add. Whoever sends the result calls its ``on_end`` once.
        Raises what ``prepare`` raises, after the hooks have seen it."""
        if not self:
            return prepare({})
        on_end = self.sending(sending)
        try:
            prepared = prepare(sending.properties)
        except BaseException as error:
            on_end(SendOutcome(error=error))
            raise
        prepared.on_end = on_end
        return prepared

    def sending(self, sending: Sending) -> Callable[[SendOutcome], None]:
        """Call `Hook.sending` of all; the caller calls the result once, with the outcome."""
        return _begin([hook.sending for hook in self], sending)

    def consuming(self, consumption: Consumption) -> Callable[[ConsumeOutcome], None]:
        """Call `Hook.consuming` of all; the caller calls the result once, with the outcome."""
        return _begin([hook.consuming for hook in self], consumption)

    def polled(self, group: str, messages: list[ReceivedMessage]) -> None:
        """Report messages that go to the program, which counts as consuming them."""
        if self and messages:
            self.consuming(Consumption(group, messages, is_polled=True))(ConsumeOutcome())

    def transaction_ended(self, end: TransactionEnd) -> None:
        for hook in self:
            _call(hook.transaction_ended, end)

    def recalled(self, recall: Recall) -> None:
        for hook in self:
            _call(hook.recalled, recall)


NO_HOOKS = Hooks(())


def _begin(starts: list[Callable[[A], Callable[[Any], None] | None]], about: A) -> Callable[[Any], None]:
    # In the opposite order at the end, as with nested blocks: the span of the first hook encloses all others.
    ends = [end for start in starts if (end := _call(start, about)) is not None]

    def end_all(outcome: Any) -> None:
        for end in reversed(ends):
            _call(end, outcome)

    return end_all


def _call(function: Callable[[A], Any], argument: A) -> Any:
    try:
        return function(argument)
    except Exception as error:  # noqa: BLE001 - the outer edge of a program's part: no message is lost for it
        _log.warning("hook %r failed", function, exc_info=error)
        return None
