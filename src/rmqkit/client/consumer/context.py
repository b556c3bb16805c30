"""A member of a group as its parts see it: who it is, what it works with, and where its messages go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rmqkit.client.consumer.allocate import Allocate
from rmqkit.client.consumer.locks import QueueLocks
from rmqkit.client.consumer.offsets import Offsets
from rmqkit.client.consumer.process_queue import ProcessQueue
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import ConsumerSettings
from rmqkit.protocol.bodies.consumers import ConsumeMessageDirectlyResult
from rmqkit.protocol.message import ReceivedMessage

if TYPE_CHECKING:
    from rmqkit.client.pop.session import Pops

__all__ = ["Member", "Sink"]


class Sink(Protocol):
    """Where pulled messages go."""

    def put(self, process_queue: ProcessQueue, messages: list[ReceivedMessage]) -> None:
        """Messages that the process queue holds now are to be consumed."""
        ...

    def let_go(self) -> None:
        """What waits of queues that were dropped is not wanted any more."""
        ...

    def passed(self, process_queue: ProcessQueue, offset: int) -> None:
        """Nothing is under way and nothing before an offset is wanted."""
        ...

    async def unreadable(self, message: ReceivedMessage) -> None:
        """A body cannot be unpacked. Raises RemotingError, PeerRefused: it could not be put elsewhere, try again."""
        ...

    def waits_for(self, message: ReceivedMessage) -> str:
        """Whose turn it is with a message that is held and that no handler has begun with."""
        ...

    async def consume_directly(self, message: ReceivedMessage) -> ConsumeMessageDirectlyResult:
        """Consume a message that an operator chose. Raises ClientError: there is no handler."""
        ...


@dataclass(slots=True)
class Member:
    """``locks`` in ordered consumption, unless nothing is shared. ``pops`` where brokers share out the queues and may
    have them popped, as ``only_pops`` has all of them."""

    runtime: ClientRuntime
    group: str
    settings: ConsumerSettings
    offsets: Offsets
    sink: Sink
    allocate: Allocate
    consume_type: str
    locks: QueueLocks | None = None
    is_ordered: bool = False
    pops: Pops | None = None
    only_pops: bool = False
