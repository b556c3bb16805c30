"""Offset stores: the offsets of a group in its queues (``RemoteBrokerOffsetStore``, ``LocalFileOffsetStore``).

======================  ========================================================================================
saved on the brokers    how
======================  ========================================================================================
every 5 s               one-way for queues whose offset changed; with a response, once, for unchanged offsets
when a queue is given   with a response, so that the next owner of the queue reads the saved offset
up
when the client closes  with a response
======================  ========================================================================================

A broker may refuse a one-way offset, for example after a crash, before the group has sent a heartbeat again. Therefore
an offset that no longer changes is sent a second time, and it counts as saved when the broker confirms it. After a
crash of the client, the messages that were consumed since the last save are delivered again. A sent offset is valid
only for its connection: a new connection may lead to a slave instead of the master, or to the master in its state
before a crash. Offsets only rise, with two exceptions: a program or an operator sets them (`set_to`), and `freeze`
replaces an offset that the broker declared illegal.

In broadcasting, offsets are stored in a file of the member::

    <offsets_dir>/<client id>/<group>/offsets.json       {"offsetTable":{{"brokerName":…,"queueId":0,"topic":…}:3}}
    <offsets_dir>/<client id>/<group>/offsets.json.bak   the previous save; read if the first is unreadable

A save merges the offsets into the file, so that queues of earlier runs and other processes retain their offsets. A
crash loses the offsets since the last save. Use this module only on the event loop; a thread reads and writes the disk.
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
from rmqkit.system import disk

_log = logging.getLogger(__name__)
_Sent = tuple[int, Connection | None]
"""An offset, and the connection over which it was sent to a broker."""


class OffsetStore(ABC):
    """The offsets of one group in the queues that this client owns. Each offset belongs to the next message to
    consume."""

    def __init__(self) -> None:
        self._offsets: dict[MessageQueue, int] = {}
        self._frozen: set[MessageQueue] = set()

    def known(self, queue: MessageQueue) -> int | None:
        return self._offsets.get(queue)

    def raise_to(self, queue: MessageQueue, offset: int) -> None:
        """Raise an offset: all messages before it are consumed. An offset that is not greater than the known offset
        changes nothing.
        """
        known = self._offsets.get(queue, -1)
        if offset > known:
            self.set_to(queue, offset)
        assert self._offsets.get(queue, -1) >= known, "consumption never moves an offset backwards"

    def set_to(self, queue: MessageQueue, offset: int) -> None:
        """Set an offset to a greater or a smaller value, for a program or an operator."""
        if queue not in self._frozen:
            self._offsets[queue] = offset

    def freeze(self, queue: MessageQueue, offset: int) -> None:
        """Set an offset that running handlers cannot change until `remove_offset` is called."""
        self._offsets[queue] = offset
        self._frozen.add(queue)

    def remove_offset(self, queue: MessageQueue) -> None:
        """Remove the offset of a queue that is given up."""
        self._offsets.pop(queue, None)
        self._frozen.discard(queue)

    @abstractmethod
    async def fetch(self, queue: MessageQueue) -> int | None:
        """Read, cache and return the saved offset, or None if there is no saved offset.
        Raises RemotingError, PeerRefused: the broker did not return the offset."""

    @abstractmethod
    async def save(self, queue: MessageQueue) -> None:
        """Save one queue's offset and wait until it is saved. A failure is logged."""

    @abstractmethod
    async def save_all(self) -> None:
        """Save the offset of every queue in the same way as `save`."""

    @abstractmethod
    async def send_changed(self) -> None:
        """Save the offsets that changed since the last call. A failure is logged, and the next call tries again."""


class RemoteOffsetStore(OffsetStore):
    """Offsets that the brokers save for the group (``RemoteBrokerOffsetStore``)."""

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
        """Read, cache and return the offset saved at the broker, or None if the broker has no offset.
        Raises RemotingError, PeerRefused: the broker did not return the offset."""
        offset = await self._runtime.calls.committed_offset(
            self._runtime.routes.broker_for(queue)[1], self._group, queue
        )
        if offset is not None:
            self._offsets[queue] = offset
            if offset:  # brokers also return 0 for a new queue without an offset: the first save must reach them
                self._sent[queue] = self._confirmed[queue] = self._over_connection(
                    self._runtime.routes.broker_for(queue)[1], offset
                )
        return offset

    async def save(self, queue: MessageQueue) -> None:
        """Save one queue's offset and wait for the broker's response. A failure is logged."""
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
        """Save the offset of every queue: first one queue of each topic and broker, then all others.

        If Apache's broker has no offset of the group and topic, it creates a new table for each of several concurrent
        offsets, and only one table remains.
        """
        firsts = {(queue.broker_name, queue.topic): queue for queue in self._offsets}
        rest = self._offsets.keys() - firsts.values()
        await asyncio.gather(*(self.save(queue) for queue in firsts.values()))
        await asyncio.gather(*(self.save(queue) for queue in rest))

    async def send_changed(self) -> None:
        """Save the offsets that changed since the last call one-way. If an offset is unchanged but not confirmed yet,
        send it with a request that waits for the broker's response. A failure is logged, and the next call tries again.
        An unreachable broker does not delay the others."""
        queues = list(self._offsets)
        are_at_rest = await asyncio.gather(*map(self._send, queues))
        await asyncio.gather(
            *(self.save(queue) for queue, is_at_rest in zip(queues, are_at_rest, strict=True) if is_at_rest)
        )

    async def _send(self, queue: MessageQueue) -> bool:
        """Save an offset one-way. Return True if the same offset was already sent and only needs a confirmation."""
        offset = self._offsets.get(queue)
        if offset is None:
            return False  # given up meanwhile: its next owner may have a greater offset
        try:
            address = self._runtime.routes.broker_for(queue)[1]
            if self._sent.get(queue) == self._over_connection(address, offset):
                return True
            await self._runtime.calls.commit_offset_one_way(address, self._group, queue, offset)
            # Set this after the write, so that the next call repeats a failed write.
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
    """Offsets in a file of this client (``LocalFileOffsetStore``)."""

    def __init__(self, offsets_dir: str, client_id: str, group: str) -> None:
        super().__init__()
        root = Path(offsets_dir) if offsets_dir else Path.home() / ".rocketmq_offsets"
        self.path = root / client_id / group / "offsets.json"
        self._saved: dict[MessageQueue, int] = {}
        self._saving = asyncio.Lock()

    def remove_offset(self, queue: MessageQueue) -> None:
        """Remove an offset from memory, but not from the file."""
        super().remove_offset(queue)
        self._saved.pop(queue, None)

    async def fetch(self, queue: MessageQueue) -> int | None:
        """Read, cache and return the offset in the file, or None if the file has no offset.
        Raises ClientError: the file cannot be read now."""
        try:
            offset = (await asyncio.to_thread(self._read)).get(queue)
        except OSError as error:
            raise ClientError(f"offsets in {self.path} cannot be read: {error.strerror}") from None
        if offset is not None:
            self._offsets[queue] = self._saved[queue] = offset
        return offset

    async def save(self, queue: MessageQueue) -> None:
        """Save all offsets, because they are in one file."""
        await self.save_all()

    async def send_changed(self) -> None:
        """Save all offsets."""
        await self.save_all()

    async def save_all(self) -> None:
        """Write the offsets that changed since the last call. A failure is logged, and the next call tries again."""
        async with self._saving:
            changed = {queue: offset for queue, offset in self._offsets.items() if self._saved.get(queue) != offset}
            if not changed:
                return
            writing = asyncio.create_task(asyncio.to_thread(self._write, changed))
            try:
                await asyncio.shield(writing)
                self._saved.update(changed)
            except asyncio.CancelledError:
                await asyncio.gather(writing, return_exceptions=True)  # two threads would clash
                raise
            except OSError as error:
                _log.warning("cannot save offsets in %s: %s", self.path, error)

    def _read(self) -> dict[MessageQueue, int]:
        """Read the file, or its backup. Raises OSError: a file exists but cannot be read."""
        for path in (self.path, self.path.with_name("offsets.json.bak")):
            try:
                return fastjson.decode_as(disk.read_file(path), _OffsetFile).offset_table
            except FileNotFoundError:
                continue
            except BodyError as error:
                _log.warning("offsets in %s cannot be read: %s", path, error)
        return {}

    def _write(self, changed: dict[MessageQueue, int]) -> None:
        merged = self._read() | changed
        disk.make_directories(self.path.parent)
        fresh = self.path.with_name("offsets.json.tmp")
        _write_synced(fresh, fastjson.dumps(_OffsetFile(merged)))
        # Move the old file to the backup first. Then one of the two files is always complete, and `_read` accepts
        # either.
        if disk.exists(self.path):
            disk.rename(self.path, self.path.with_name("offsets.json.bak"))
        disk.rename(fresh, self.path)


def _write_synced(path: Path, content: bytes) -> None:
    """Write a file and sync it, before it replaces the old file. Otherwise the rename may reach the disk before the
    bytes do."""
    descriptor = disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        disk.write_all(descriptor, content, 0)
        disk.sync_file(descriptor)
    finally:
        disk.close(descriptor)
