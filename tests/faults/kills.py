"""SIGKILL under load: a child process puts messages and is killed at a random moment, and its store is checked.

The child reports through a pipe, with one write per event, the stored and the acknowledged messages: under SYNC_FLUSH
when ``durable_offset`` covers it, under ASYNC_FLUSH when the put returns (the page cache survives the process). Times
are real, so a seed repeats the settings and the load but not the moment of a kill.

`Store` is the same through many kills, so damage would accumulate.
"""

from __future__ import annotations

import os
import random
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rmqkit.protocol.record import BatchEntry, decode_record, encode_batch
from rmqkit.store.message_store import MessageStore, PutStatus
from rmqkit.store.offline import check as fsck
from rmqkit.store.settings import FlushDiskType, StoreSettings
from tests.faults.workload import read_everything
from tests.store.stores import message, opened

TOPICS = ["A", "B", "C"]
QUEUES = 3
_SECONDS_TO_START = 60


def kill_settings(flush_disk_type: FlushDiskType, **changes: Any) -> StoreSettings:
    """Return settings with small files and short background intervals, so that kills interrupt background work."""
    values: dict[str, Any] = {
        "commit_log_file_bytes": 65_536,
        "consume_queue_file_bytes": 2000,
        "consume_queue_ext_file_bytes": 4096,
        "hash_slot_count": 100,
        "index_entry_count": 400,
        "flush_disk_type": flush_disk_type,
        "flush_interval_ms": 5,
        "flush_thorough_interval_ms": 20,
        "queue_flush_interval_ms": 10,
        "queue_flush_least_pages": 0,
        "queue_flush_thorough_interval_ms": 40,
        "commit_interval_ms": 5,
        "commit_thorough_interval_ms": 5,
    }
    return StoreSettings(**(values | changes))


def body_of(topic: str, number: int) -> bytes:
    """Return the body of a message, which depends on its number."""
    return b"%s %d " % (topic.encode(), number) + random.Random(number).randbytes(number % 700)


def run_child(root: Path, settings: StoreSettings, first: int, seed: int) -> None:
    """Put numbered messages until the process is killed. Write ``t`` and the number when a message is stored, ``a``
    when it is acknowledged. A batch has the number of its last member."""
    chance = random.Random(seed)
    is_sync = settings.flush_disk_type is FlushDiskType.SYNC_FLUSH
    number = first
    os.write(1, b"o\n")
    store = MessageStore(root, settings)
    store.open()
    os.write(1, b"r\n")
    while True:
        topic, queue_id = TOPICS[number % 3], chance.randrange(QUEUES)
        count = chance.choice([1, 1, 1, 2, 5])
        bodies = [body_of(topic, number + i) for i in range(count)]
        if count == 1:
            put = store.put(message(topic, queue_id, bodies[0], KEYS=f"k{number}", TAGS="t"))
        else:
            entries = [BatchEntry(body, b"TAGS\x01t\x02") for body in bodies]
            put = store.put_batch(message(topic, queue_id, encode_batch(entries)))
        if put.status is PutStatus.OS_PAGE_CACHE_BUSY:
            os.sched_yield()
            continue
        assert put.status is PutStatus.OK, put
        number += count
        if is_sync and chance.random() < 0.7:
            store.request_flush()
            while store.durable_offset < put.end_offset:
                os.sched_yield()
            store.dispatch()
        elif is_sync or settings.transient_store_pool:
            os.write(1, b"t%d\n" % number)
            store.dispatch()
            continue
        os.write(1, b"a%d\n" % number)


_CHILD = """
import logging, sys
from pathlib import Path
import msgspec
from rmqkit.store.settings import StoreSettings
from tests.faults.kills import run_child
logging.getLogger("rmqkit").setLevel(logging.CRITICAL)
run_child(Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=StoreSettings), int(sys.argv[3]), int(sys.argv[4]))
"""


@dataclass
class Kills:
    """One store, and the processes that are killed over it.

    Attributes:
        acknowledged: every message below this number must be in the store.
        kills, in_start: number of killed processes, and of those killed while they opened the store.
    """

    root: Path
    settings: StoreSettings
    chance: random.Random
    acknowledged: int = 0
    first: int = 0
    kills: int = 0
    in_start: int = 0
    lost: set[int] = field(default_factory=set)

    def kill(self) -> str:
        """Start a process, kill it, and check; return a short description.

        Raises:
            AssertionError: an acknowledged message is lost, or the store is damaged.
        """
        begun = self.first
        is_open = self._run_and_kill()
        self.kills += 1
        self.in_start += not is_open
        if is_open and self.chance.random() < 0.3:  # if this start is killed too, it finds the store unchanged
            self._run_and_kill()
            self.kills += 1
        with opened(self.root, self.settings) as store:
            numbers = sorted(self._numbers(store))
        report = fsck.verify(self.root, self.settings)
        assert report.is_sound, "\n".join(map(str, report.findings[:5]))
        known = set(numbers)
        missing = [number for number in range(self.acknowledged) if number not in known and number not in self.lost]
        assert not missing, f"{len(missing)} acknowledged messages are lost, the first is number {missing[0]}"
        end = numbers[-1] + 1 if numbers else 0
        self.lost.update(number for number in range(end) if number not in known)
        # messages that survived without an acknowledgement are durable from now on; numbers continue after the highest
        # number ever put
        self.acknowledged = max(self.acknowledged, end)
        self.first = max(self.first, end)
        return f"{end - begun} messages{'' if is_open else ', killed while starting'}"

    def _numbers(self, store: MessageStore) -> Iterator[int]:
        for one in read_everything(store).values():
            topic, number, _ = one.body.split(b" ", 2)
            assert one.body == body_of(topic.decode(), int(number)), f"{one.key}: body of number {number!r} is changed"
            assert topic.decode() == one.key[0], f"{one.key} holds a message of {topic!r}"
            raw = store.log.record_at(one.physical_offset)
            assert raw is not None and decode_record(raw).queue_offset == one.key[2]
            yield int(number)

    def _run_and_kill(self) -> bool:
        """Start a process and kill it. Return whether it had opened the store."""
        import msgspec

        seed = self.chance.randrange(1 << 32)
        arguments = [str(self.root), msgspec.json.encode(self.settings).decode(), str(self.first), str(seed)]
        with subprocess.Popen(
            [sys.executable, "-c", _CHILD, *arguments], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
        ) as child:
            assert child.stdout is not None
            text = self._read_until(child.stdout, b"o\n", 0)
            if self.chance.random() < 0.85:
                text = self._read_until(child.stdout, b"r\n", 0, text)
                text += self._read_for(
                    child.stdout, self.chance.choice([0.002, 0.02, 0.1, 0.25]) * self.chance.random()
                )
            else:
                text += self._read_for(child.stdout, 0.01 * self.chance.random())
            child.send_signal(signal.SIGKILL)
            text += child.stdout.read()
        whole = text[: text.rfind(b"\n") + 1].splitlines()
        told = [int(line[1:]) for line in whole if line[:1] in b"at" and len(line) > 1]
        acknowledged = [int(line[1:]) for line in whole if line[:1] == b"a"]
        self.first = max([self.first, *told])
        self.acknowledged = max([self.acknowledged, *acknowledged])
        return b"r" in whole

    @staticmethod
    def _read_until(pipe: Any, wanted: bytes, size: int, text: bytes = b"") -> bytes:
        deadline = time.monotonic() + _SECONDS_TO_START
        while wanted not in text:
            assert time.monotonic() < deadline, "the process has started"
            more = os.read(pipe.fileno(), 65_536)
            assert more, f"the process ended by itself after {text!r}"
            text += more
        return text

    @staticmethod
    def _read_for(pipe: Any, seconds: float) -> bytes:
        """Return the data that arrives through a pipe within some time."""
        text, deadline = b"", time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                if selector.select(left):
                    text += os.read(pipe.fileno(), 65_536)
        return text
