"""The memory of a replay of dead letters: a file with the offsets that were sent to a target.

The next replay skips these offsets. `TaskFile` is the common base of this file and of the state of a replay. Only one
process at a time uses the file. Source: behaviour.md §4.8.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import fcntl
import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Self

import msgspec
from msgspec import Struct, field

from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.errors import SettingsError
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.sentences import _, plain
from rmqkit.store.files import naming

__all__ = ["Memory", "TaskFile", "file_name", "new_id", "refuse_device"]


class TaskFile(Struct, kw_only=True):
    """The file of a replay.

    Attributes:
        task: a description of the messages to replay. A file of another task is refused.
        replay_id: the prefix of the unique keys of the sent copies.
    """

    kind: ClassVar[str]
    task: str
    replay_id: str

    @classmethod
    def load(cls, path: Path, task: str) -> Self | None:
        """Return the content of a file; None if the file does not exist.
        Raises SettingsError: the file has another format, or belongs to another replay."""
        refuse_device(path)
        try:
            found = msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            text = _("{path} is not {kind} ({error}): name another file", path=path, kind=cls.kind, error=error)
            raise SettingsError(text) from None
        if found.task != task:
            raise SettingsError(
                _(
                    "{path} is the state of another replay, {task}: name another file for {wanted}",
                    path=path,
                    task=found.task,
                    wanted=task,
                )
            )
        return found

    def save(self, path: Path) -> None:
        """Replace the whole file, without fsync. After a power failure, the file may have its former content."""
        whole = path.with_name(path.name + ".tmp")
        with naming(path):
            whole.write_bytes(msgspec.json.format(msgspec.json.encode(self, enc_hook=plain)))
            whole.replace(path)


class Memory(TaskFile, kw_only=True):
    """The dead letters of a group that were sent to one target. All runs use the same ``replay_id``.

    Attributes:
        places: sorted half-open ranges of the sent queue offsets, by lane (``broker:queue``).
        marks: the highest sent offset and the identity of its message (`_mark`), by lane. A mark shows if the topic or
            the whole store was later deleted and created again.
        is_done: False while a run is in progress, and after an interrupted run.
    """

    kind = _("the state of a replay of dead letters")
    places: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    marks: dict[str, tuple[int, str]] = field(default_factory=dict)
    is_done: bool = True

    @classmethod
    def new(cls, task: str) -> Self:
        """Return an empty memory with a new id."""
        return cls(task=task, replay_id=new_id())

    @classmethod
    def load(cls, path: Path, task: str) -> Self:
        """Return the memory in a file (see `TaskFile.load`); an empty memory if the file does not exist."""
        return super().load(path, task) or cls.new(task)

    @staticmethod
    @contextlib.contextmanager
    def held(path: Path) -> Iterator[None]:
        """Lock the file against other processes. Raises SettingsError: another process has locked the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with naming(path), open(path.with_name(path.name + ".lock"), "wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise SettingsError(_("another replay uses {path} now: wait until it has stopped", path=path)) from None
            yield

    def has(self, lane: str, offset: int) -> bool:
        """Return True if the dead letter at an offset was sent."""
        ranges = self.places.get(lane, [])
        at = bisect.bisect_right(ranges, offset, key=lambda one: one[0])
        return at > 0 and offset < ranges[at - 1][1]

    def add(self, lane: str, message: ReceivedMessage) -> None:
        """Add a sent dead letter to the memory."""
        offset = message.queue_offset
        if self.has(lane, offset):
            return
        ranges = self.places.setdefault(lane, [])
        at = bisect.bisect_right(ranges, offset, key=lambda one: one[0])
        begin, end = offset, offset + 1
        if at < len(ranges) and ranges[at][0] == end:
            end = ranges.pop(at)[1]
        if at and ranges[at - 1][1] == begin:
            at -= 1
            begin = ranges.pop(at)[0]
        ranges.insert(at, (begin, end))
        if offset >= self.marks.get(lane, (0, ""))[0]:
            self.marks[lane] = offset, _mark(message)

    async def forget_deleted(self, consumer: PullConsumer, topic: str) -> None:
        """Remove the lanes of queues that were deleted and created again. Their offsets now belong to other
        messages."""
        for lane, (offset, mark) in list(self.marks.items()):
            broker_name, __, queue_id = lane.rpartition(":")
            queue = MessageQueue(topic, broker_name, int(queue_id))
            if queue not in await consumer.queues(topic):
                continue  # the broker is offline: its queue has not changed
            first, end = await asyncio.gather(consumer.min_offset(queue), consumer.max_offset(queue))
            is_other = end <= offset
            if first <= offset < end:
                found = (await consumer.pull(queue, offset, max_count=1)).messages
                is_other = bool(found) and found[0].queue_offset == offset and _mark(found[0]) != mark
            if is_other:
                del self.marks[lane], self.places[lane]


def _mark(message: ReceivedMessage) -> str:
    # The store time is needed: a new store at the same address may have the same offset message ids.
    return f"{message.offset_msg_id} {message.store_timestamp}"


def file_name(name_servers: str, group: str, target: str | None) -> str:
    """Return the name of the memory file for a cluster, a group and a target."""
    cluster = ";".join(sorted(name_servers.replace(",", ";").split(";")))
    digest = hashlib.sha256("\n".join((cluster, group, target or "")).encode()).hexdigest()[:12]
    legible = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in group)
    return f"{legible}-{digest}"


def new_id() -> str:
    """Return a new replay id."""
    return f"replay-{random.getrandbits(40):010x}"


def refuse_device(path: Path) -> None:
    """Raise SettingsError if a path is a device or a pipe, because a read from such a file may block forever."""
    if path.exists() and not path.is_file():
        raise SettingsError(_("{path} is not a regular file, and may never end: name another", path=path))
