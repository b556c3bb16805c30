"""What push, pull and pop consumers have in common: queues they hold, and streams of messages."""

from __future__ import annotations

from types import TracebackType

from rmqkit.client.consumer.group import Membership, QueueListener
from rmqkit.client.consumer.poll import MessageStream, StreamSource
from rmqkit.client.observe.status import MemberStatus
from rmqkit.client.runtime.lifecycle import Client
from rmqkit.protocol.bodies.clients import MessageQueue

__all__ = ["Consumer"]


class Consumer(Client):
    """A member of a group that gets messages."""

    _reserved_group = "DEFAULT_CONSUMER"
    _membership: Membership
    _streams: list[MessageStream]

    def unsubscribe(self, topic: str) -> None:
        """Give up a topic; its queues go with the next rebalance, at once."""
        self._membership.unsubscribe(topic)

    def on_queues_changed(self, topic: str, listener: QueueListener) -> None:
        """Call ``listener(queues, held)`` on the loop when the queues of a topic change that is subscribed or assigned,
        or which of them are held here."""
        self._membership.listen(topic, listener)

    def held_queues(self) -> set[MessageQueue]:
        """The queues that are assigned, or that this consumer has of its group's."""
        return self._membership.held_queues()

    def pause(self, *queues: MessageQueue) -> None:
        """Take in nothing more of some queues, or of all now and later; what was pulled before still comes."""
        self._membership.held.pause(queues, is_paused=True)

    def resume(self, *queues: MessageQueue) -> None:
        """Go on with some queues, also when all were paused, or end every pause."""
        self._membership.held.pause(queues, is_paused=False)

    def status(self) -> MemberStatus:
        """What every queue is doing, and why those that stand still do; its text is a table."""
        return self._membership.status(self._state.value)

    def _stream_of(self, source: StreamSource) -> MessageStream:
        stream = MessageStream(source, lambda message: self._hooks.polled(self.group, [message]))
        self._streams.append(stream)
        return stream

    def _abandon(self) -> None:
        """What was given last is not consumed."""
        for stream in self._streams:
            stream.abandon()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._abandon()
        await self.close()
