"""Where a group is in its queues: kept here, saved at the brokers (``RemoteBrokerOffsetStore``).

======================  ========================================================================================
saved                   how
======================  ========================================================================================
every 5 s               one-way, the queues whose offset changed; with an answer, those where it did not, once
when a queue is let go  with an answer, so that the next owner of the queue reads what we wrote
when the client closes  with an answer
======================  ========================================================================================

A broker may refuse what nobody waits for, as one that came back from a crash before it has heard of the group again:
so an offset that came to rest is said once more, and counts as saved when the broker says so. Between two rounds a
crash costs at most what was consumed since; those messages are delivered again. What a broker was told counts as long
as the connection it was told over: behind a new one may be a slave in place of its master, or the master again, as it
was when it crashed. Offsets only rise, except where a program or an operator moves them (`set_to`) and that `freeze`
sets one that a broker declared illegal. Broadcasting keeps offsets in a file instead (`local_offsets`). Loop only.
Source: behaviour.md §5.6, §8.6.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod

from rmqkit.client.runtime.routes import NOT_REGISTERED
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.errors import ConnectFailed, ConnectionLost, RmqError
from rmqkit.protocol.bodies.clients import MessageQueue
from rmqkit.remoting.connection import Connection

__all__ = ["GroupOffsets", "Offsets"]

_Told = tuple[int, Connection | None]
"""An offset, and over which connection a broker was told it."""

_log = logging.getLogger(__name__)


class Offsets(ABC):
    """The offsets of one group in the queues this client holds; an offset is the next message to consume."""

    def __init__(self) -> None:
        self._offsets: dict[MessageQueue, int] = {}
        self._frozen: set[MessageQueue] = set()

    def known(self, queue: MessageQueue) -> int | None:
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
        self._sent: dict[MessageQueue, _Told] = {}
        self._confirmed: dict[MessageQueue, _Told] = {}

    def forget(self, queue: MessageQueue) -> None:
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
                self._sent[queue] = self._confirmed[queue] = self._told(self._address(queue), offset)
        return offset

    async def save(self, queue: MessageQueue) -> None:
        """Save one queue's offset and wait for the broker's answer; a failure is logged."""
        offset = self._offsets.get(queue)
        if offset is None:
            return
        try:
            address = self._address(queue)
            if self._confirmed.get(queue) == self._told(address, offset):
                return
            await self._runtime.calls.commit_offset(address, self._group, queue, offset)
            self._sent[queue] = self._confirmed[queue] = self._told(address, offset)
        except RmqError as error:
            self._not_saved(queue, offset, error)

    async def save_all(self) -> None:
        """`save` for every queue, of every topic one first: where a broker has nothing of the group and topic yet,
        Apache's makes a new table for each offset it is told at once, and keeps one of them."""
        firsts = {(queue.broker_name, queue.topic): queue for queue in self._offsets}
        rest = self._offsets.keys() - firsts.values()
        await asyncio.gather(*(self.save(queue) for queue in firsts.values()))
        await asyncio.gather(*(self.save(queue) for queue in rest))

    async def send_changed(self) -> None:
        """Save what changed since the last round, one-way, and what came to rest, with an answer; a failure is logged
        and made good by the next round. A broker that cannot be reached keeps none of the others waiting."""
        queues = list(self._offsets)
        are_at_rest = await asyncio.gather(*map(self._send, queues))
        await asyncio.gather(
            *(self.save(queue) for queue, is_at_rest in zip(queues, are_at_rest, strict=True) if is_at_rest)
        )

    async def _send(self, queue: MessageQueue) -> bool:
        """Save an offset one-way, unless the broker was told it: then it is at rest."""
        offset = self._offsets.get(queue)
        if offset is None:
            return False  # given up during this round: its next owner may be further
        try:
            address = self._address(queue)
            if self._sent.get(queue) == self._told(address, offset):
                return True
            await self._runtime.calls.commit_offset_one_way(address, self._group, queue, offset)
            self._sent[queue] = self._told(address, offset)
        except RmqError as error:
            self._not_saved(queue, offset, error)
        return False

    def _not_saved(self, queue: MessageQueue, offset: int, error: RmqError) -> None:
        what = f"offset {offset} of group {self._group} in {queue} is not saved"
        if isinstance(error, ConnectFailed | ConnectionLost):
            routes = self._runtime.routes
            self._runtime.absences.lost(routes.address(routes.broker_of(queue)) or error.address, error, what)
        else:
            _log.warning("%s: %s", what, error)

    def _told(self, address: str, offset: int) -> _Told:
        return offset, self._runtime.remoting.connected(address)

    def _address(self, queue: MessageQueue) -> str:
        found = self._runtime.routes.any_address(self._runtime.routes.broker_of(queue))
        if found is None:
            raise ConnectFailed(queue.broker_name, "no route names a broker of that name", NOT_REGISTERED)
        return found[1]
