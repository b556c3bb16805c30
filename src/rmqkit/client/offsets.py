"""Where a group is in its queues: kept here, saved at the brokers (``RemoteBrokerOffsetStore``).

======================  ========================================================================================
saved                   how
======================  ========================================================================================
every 5 s               one-way, the queues whose offset changed
when a queue is let go  with an answer, so that the next owner of the queue reads what we wrote
when the client closes  with an answer
======================  ========================================================================================

Between two rounds a crash costs at most what was consumed since; those messages are delivered again. Offsets only
rise, except where a program or an operator moves them (`set_to`) and that `freeze` sets one that a broker declared
illegal. Broadcasting keeps offsets in a file instead (`local_offsets`). Loop only. Source: behaviour.md §5.6, §8.6.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod

from rmqkit.client.routes import NOT_REGISTERED
from rmqkit.client.runtime import ClientRuntime
from rmqkit.errors import ConnectFailed, RmqError
from rmqkit.protocol.bodies.clients import MessageQueue

__all__ = ["GroupOffsets", "Offsets"]

_log = logging.getLogger(__name__)


class Offsets(ABC):
    """The offsets of one group in the queues this client holds; an offset is the next message to consume."""

    def __init__(self) -> None:
        self._offsets: dict[MessageQueue, int] = {}
        self._frozen: set[MessageQueue] = set()

    def known(self, queue: MessageQueue) -> int | None:
        """The offset as it is known here."""
        return self._offsets.get(queue)

    def raise_to(self, queue: MessageQueue, offset: int) -> None:
        """Everything before ``offset`` is consumed; a smaller offset than the known one changes nothing."""
        if offset > self._offsets.get(queue, -1):
            self.set_to(queue, offset)

    def set_to(self, queue: MessageQueue, offset: int) -> None:
        """The next message is the one at ``offset``, also when that is further back."""
        if queue not in self._frozen:
            self._offsets[queue] = offset

    def freeze(self, queue: MessageQueue, offset: int) -> None:
        """Set an offset that nothing changes until `forget`."""
        self._offsets[queue] = offset
        self._frozen.add(queue)

    def forget(self, queue: MessageQueue) -> None:
        """The queue is not ours any more."""
        self._offsets.pop(queue, None)
        self._frozen.discard(queue)

    @abstractmethod
    async def fetch(self, queue: MessageQueue) -> int | None:
        """The saved offset, remembered here; None when there is none.
        Raises RemotingError, PeerRefused: the broker did not say."""

    @abstractmethod
    async def save(self, queue: MessageQueue) -> None:
        """Save one queue's offset and wait until it is; a failure is logged."""

    @abstractmethod
    async def save_all(self) -> None:
        """`save` for every queue."""

    @abstractmethod
    async def send_changed(self) -> None:
        """Save what changed since the last round; a failure is logged and made good by the next round."""


class GroupOffsets(Offsets):
    """Offsets that the brokers keep for the group."""

    def __init__(self, runtime: ClientRuntime, group: str) -> None:
        super().__init__()
        self._runtime = runtime
        self._group = group
        self._sent: dict[MessageQueue, int] = {}
        self._confirmed: dict[MessageQueue, int] = {}

    def forget(self, queue: MessageQueue) -> None:
        """The queue is not ours any more."""
        super().forget(queue)
        self._sent.pop(queue, None)
        self._confirmed.pop(queue, None)

    async def fetch(self, queue: MessageQueue) -> int | None:
        """The offset saved at the broker, remembered here; None when there is none.
        Raises RemotingError, PeerRefused: the broker did not say."""
        offset = await self._runtime.calls.committed_offset(self._address(queue), self._group, queue)
        if offset is not None:
            self._offsets[queue] = offset
            if offset:  # brokers also say 0 of a young queue when they have no offset of it: have them keep one
                self._sent[queue] = self._confirmed[queue] = offset
        return offset

    async def save(self, queue: MessageQueue) -> None:
        """Save one queue's offset and wait for the broker's answer; a failure is logged."""
        offset = self._offsets.get(queue)
        if offset is None or offset == self._confirmed.get(queue):
            return
        try:
            await self._runtime.calls.commit_offset(self._address(queue), self._group, queue, offset)
            self._sent[queue] = self._confirmed[queue] = offset
        except RmqError as error:
            _log.warning("offset %d of group %s in %s is not saved: %s", offset, self._group, queue, error)

    async def save_all(self) -> None:
        """`save` for every queue."""
        await asyncio.gather(*(self.save(queue) for queue in list(self._offsets)))

    async def send_changed(self) -> None:
        """Save what changed since the last round, one-way; a failure is logged and made good by the next round."""
        for queue, offset in list(self._offsets.items()):
            if self._sent.get(queue) != offset:
                try:
                    await self._runtime.calls.commit_offset_one_way(self._address(queue), self._group, queue, offset)
                    self._sent[queue] = offset
                except RmqError as error:
                    _log.warning("offset %d of group %s in %s is not saved: %s", offset, self._group, queue, error)

    def _address(self, queue: MessageQueue) -> str:
        found = self._runtime.routes.any_address(queue.broker_name)
        if found is None:
            raise ConnectFailed(queue.broker_name, "no route names a broker of that name", NOT_REGISTERED)
        return found[1]
