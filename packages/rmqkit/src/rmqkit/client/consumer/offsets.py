"""Offset stores: the offsets of a group in its queues (``RemoteBrokerOffsetStore``, ``LocalFileOffsetStore``).

======================  ========================================================================================
saved at the brokers    how
======================  ========================================================================================
every 5 s               one-way for queues whose offset changed; with an answer, once, for unchanged offsets
when a queue is given   with an answer, so that the next owner of the queue reads the saved offset
up
when the client closes  with an answer
======================  ========================================================================================

A broker may refuse a one-way offset, for example after a crash, before the group has sent a heartbeat again. So an
offset that no longer changes is sent a second time, and counts as saved when the broker confirms it. After a crash of
the client, the messages that were consumed since the last save are delivered again. A sent offset counts only as long
as its connection: a new connection may lead to a slave instead of the master, or to the master in its state before a
crash. Offsets only rise, with two exceptions: a program or an operator moves them (`set_to`), and `freeze` replaces an
offset that the broker declared illegal.

In broadcasting, offsets are stored in a file of the member::

    <offsets_dir>/<client id>/<group>/offsets.json       {"offsetTable":{{"brokerName":…,"queueId":0,"topic":…}:3}}
    <offsets_dir>/<client id>/<group>/offsets.json.bak   the same, one save earlier; read when the first is unreadable

A save merges the offsets into the file, so that queues of other times and processes keep their offsets. After a crash,
the offsets since the last save are lost. Loop only; a thread reads and writes the disk.
Source: behaviour.md §5.6, §8.6; store.md §9.8.
"""

from __future__ import annotations

import asyncio
import logging
import os
from abc import ABC, abstractmethod
from pathlib import Path

from msgspec import Struct, field

from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.errors import BodyError, ClientError, ConnectFailed, ConnectionLost, RmqError
from rmqkit.protocol import fastjson
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.remoting.connection import Connection

_log = logging.getLogger(__name__)
_Sent = tuple[int, Connection | None]
"""An offset, and the connection over which it was sent to a broker."""


class OffsetStore(ABC):
    """Keeps the offsets of one group in the queues this client holds; an offset is the next message to consume."""

    def __init__(self) -> None:
        self._offsets: dict[MessageQueue, int] = {}
        self._frozen: set[MessageQueue] = set()

    def known(self, queue: MessageQueue) -> int | None:
        return self._offsets.get(queue)

    def raise_to(self, queue: MessageQueue, offset: int) -> None:
        """Raise an offset: everything before it is consumed. A smaller offset than the known one changes nothing."""
        known = self._offsets.get(queue, -1)
        if offset > known:
            self.set_to(queue, offset)
        assert self._offsets.get(queue, -1) >= known, "consumption never takes an offset back"

    def set_to(self, queue: MessageQueue, offset: int) -> None:
        """Move an offset, also back, because a program or an operator said so."""
        if queue not in self._frozen:
            self._offsets[queue] = offset

    def freeze(self, queue: MessageQueue, offset: int) -> None:
        """Set an offset that handlers still at work cannot change; `remove_offset` ends that."""
        self._offsets[queue] = offset
        self._frozen.add(queue)

    def remove_offset(self, queue: MessageQueue) -> None:
        """Stop keeping the offset of a queue that is given up."""
        self._offsets.pop(queue, None)
        self._frozen.discard(queue)

    @abstractmethod
    async def fetch(self, queue: MessageQueue) -> int | None:
        """Read the saved offset and keep it here; None when there is none.
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


class RemoteOffsetStore(OffsetStore):
    """Keeps offsets that the brokers save for the group (``RemoteBrokerOffsetStore``)."""

    def __init__(self, runtime: ClientRuntime, group: str) -> None:
        super().__init__()
        self._runtime = runtime
        self._group = group
        self._sent: dict[MessageQueue, _Sent] = {}
        self._confirmed: dict[MessageQueue, _Sent] = {}

    def remove_offset(self, queue: MessageQueue) -> None:
        super().remove_offset(queue)
        self._sent.pop(queue, None)
        self._confirmed.pop(queue, None)

    async def fetch(self, queue: MessageQueue) -> int | None:
        """Read the offset saved at the broker and cache it; None if the broker has no offset.
        Raises RemotingError, PeerRefused: the broker did not say."""
        offset = await self._runtime.calls.committed_offset(
            self._runtime.routes.broker_for(queue)[1], self._group, queue
        )
        if offset is not None:
            self._offsets[queue] = offset
            if offset:  # brokers also say 0 of a young queue when they have no offset of it: have them keep one
                self._sent[queue] = self._confirmed[queue] = self._over_connection(
                    self._runtime.routes.broker_for(queue)[1], offset
                )
        return offset

    async def save(self, queue: MessageQueue) -> None:
        """Save one queue's offset and wait for the broker's answer; a failure is logged."""
        offset = self._offsets.get(queue)
        if offset is None:
            return
        try:
            address = self._runtime.routes.broker_for(queue)[1]
            if self._confirmed.get(queue) == self._over_connection(address, offset):
                return
            await self._runtime.calls.commit_offset(address, self._group, queue, offset)
            self._sent[queue] = self._confirmed[queue] = self._over_connection(address, offset)
        except RmqError as error:
            self._not_saved(queue, offset, error)

    async def save_all(self) -> None:
        """`save` for every queue, of every topic one first: where a broker has nothing of the group and topic yet,
        Apache's makes a new table for each of the offsets that come at once, and keeps one of them."""
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
        """Save an offset one-way; returns True when it was sent before already, so that it came to rest."""
        offset = self._offsets.get(queue)
        if offset is None:
            return False  # given up during this round: its next owner may be further
        try:
            address = self._runtime.routes.broker_for(queue)[1]
            if self._sent.get(queue) == self._over_connection(address, offset):
                return True
            await self._runtime.calls.commit_offset_one_way(address, self._group, queue, offset)
            # After the write: a failed one has to be repeated by the next round.
            self._sent[queue] = self._over_connection(address, offset)
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

    def _over_connection(self, address: str, offset: int) -> _Sent:
        return offset, self._runtime.remoting.connected(address)


class _OffsetFile(Struct, rename="camel"):
    offset_table: dict[MessageQueue, int] = field(default_factory=dict)


class LocalOffsetStore(OffsetStore):
    """Keeps offsets in a file of the client's own (``LocalFileOffsetStore``)."""

    def __init__(self, offsets_dir: str, client_id: str, group: str) -> None:
        super().__init__()
        root = Path(offsets_dir) if offsets_dir else Path.home() / ".rocketmq_offsets"
        self.path = root / client_id / group / "offsets.json"
        self._saved: dict[MessageQueue, int] = {}
        self._saving = asyncio.Lock()

    def remove_offset(self, queue: MessageQueue) -> None:
        """Stop keeping an offset here; the file keeps what was saved."""
        super().remove_offset(queue)
        self._saved.pop(queue, None)

    async def fetch(self, queue: MessageQueue) -> int | None:
        """Read the offset in the file and keep it here; None when there is none.
        Raises ClientError: the system does not let it be read just now."""
        try:
            offset = (await asyncio.to_thread(self._read)).get(queue)
        except OSError as error:
            raise ClientError(f"offsets in {self.path} cannot be read: {error.strerror}") from None
        if offset is not None:
            self._offsets[queue] = self._saved[queue] = offset
        return offset

    async def save(self, queue: MessageQueue) -> None:
        """`save_all`: there is one file."""
        await self.save_all()

    async def send_changed(self) -> None:
        """`save_all`."""
        await self.save_all()

    async def save_all(self) -> None:
        """Write what changed since the last time; a failure is logged and made good by the next round."""
        async with self._saving:
            changed = {queue: offset for queue, offset in self._offsets.items() if self._saved.get(queue) != offset}
            if not changed:
                return
            writing = asyncio.create_task(asyncio.to_thread(self._write, changed))
            try:
                await asyncio.shield(writing)
                self._saved.update(changed)
            except asyncio.CancelledError:
                await asyncio.gather(writing, return_exceptions=True)  # two threads would write over each other
                raise
            except OSError as error:
                _log.warning("cannot save offsets in %s: %s", self.path, error)

    def _read(self) -> dict[MessageQueue, int]:
        """Read the file, or its backup. Raises OSError: a file is there and cannot be read."""
        for path in (self.path, self.path.with_name("offsets.json.bak")):
            try:
                return fastjson.decode_as(path.read_bytes(), _OffsetFile).offset_table
            except FileNotFoundError:
                continue
            except BodyError as error:
                _log.warning("offsets in %s cannot be read: %s", path, error)
        return {}

    def _write(self, changed: dict[MessageQueue, int]) -> None:
        merged = self._read() | changed
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_name("offsets.json.tmp")
        with fresh.open("wb") as file:
            file.write(fastjson.dumps(_OffsetFile(merged)))
            # Durable before it replaces the old one; a rename alone may reach the disk before the bytes do.
            file.flush()
            os.fsync(file.fileno())
        # Backup first: at every moment one of the two files is whole, and `_read` takes either.
        if self.path.exists():
            self.path.replace(self.path.with_name("offsets.json.bak"))
        fresh.replace(self.path)
