"""Where a broadcasting consumer is in its queues: a file of its own (``LocalFileOffsetStore``).

::

    <offsets_dir>/<client id>/<group>/offsets.json       {"offsetTable":{{"brokerName":…,"queueId":0,"topic":…}:3}}
    <offsets_dir>/<client id>/<group>/offsets.json.bak   the same, one save earlier; read when the first is unreadable

A save merges into what the file holds, so that queues of other times and processes keep their offsets. A crash costs
what was consumed since the last save: those messages come again. Loop only; the disk is touched in a thread.
Source: behaviour.md §5.6, store.md §9.8.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from msgspec import Struct, field

from rmqkit.client.consumer.offsets import Offsets
from rmqkit.errors import BodyError, ClientError
from rmqkit.protocol import fastjson
from rmqkit.protocol.bodies.clients import MessageQueue

__all__ = ["LocalOffsets"]

_log = logging.getLogger(__name__)


class _OffsetFile(Struct, rename="camel"):
    offset_table: dict[MessageQueue, int] = field(default_factory=dict)


class LocalOffsets(Offsets):
    """The offsets of one group in the queues this client holds, saved in a file; see
    `rmqkit.client.consumer.offsets`."""

    def __init__(self, offsets_dir: str, client_id: str, group: str) -> None:
        super().__init__()
        root = Path(offsets_dir) if offsets_dir else Path.home() / ".rocketmq_offsets"
        self.path = root / client_id / group / "offsets.json"
        self._saved: dict[MessageQueue, int] = {}
        self._saving = asyncio.Lock()

    def forget(self, queue: MessageQueue) -> None:
        """The queue is not ours any more; the file keeps what was saved."""
        super().forget(queue)
        self._saved.pop(queue, None)

    async def fetch(self, queue: MessageQueue) -> int | None:
        """The offset in the file, remembered here; None when there is none.
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
                _log.warning("offsets in %s are not saved: %s", self.path, error)

    def _read(self) -> dict[MessageQueue, int]:
        """What is saved. Raises OSError: a file is there and cannot be read."""
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
            file.flush()
            os.fsync(file.fileno())
        if self.path.exists():
            self.path.replace(self.path.with_name("offsets.json.bak"))
        fresh.replace(self.path)
