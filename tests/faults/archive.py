"""Kills of a broker's store and its archive at random moments. Afterwards every message that was reported as stored is
read back from the archive and the log: none is lost, none is there twice, all are in order.

    python -m tests.faults.archive --kills 200 --seed 7

Each kill is of a new process. It opens the store, puts messages, reports each message that is on the disk, and archives
and deletes full files (another process writes each segment). It is killed after a random number of iterations and some
ms. The process that writes a segment survives it, as it would survive a killed broker.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rmqkit.broker.archive import LogArchive
from rmqkit.errors import StoreError
from rmqkit.protocol.record import decode_record
from rmqkit.store.archive.archive import Archive
from rmqkit.store.archive.places import place_of
from rmqkit.store.inner_message import InnerMessage, PutStatus
from rmqkit.store.message_store import MessageStore
from rmqkit.store.settings import StoreSettings
from tests.store.stores import message

TOPIC, QUEUES = "Archived", 3
FILE_BYTES = 192 << 10
PUTS_OF_A_TURN = 40
AHEAD_FILES = 2
"""Number of files that may be put before the archive must follow, so that the test archives on slow machines too."""


@dataclass
class Outcome:
    """The result of all kills."""

    kills: int
    told: int
    found: int
    archived: int
    segments: int
    lost: list[int]
    twice: list[int]
    is_ordered: bool

    @property
    def is_good(self) -> bool:
        return not self.lost and not self.twice and self.is_ordered


def settings(root: Path) -> StoreSettings:
    return StoreSettings(commit_log_file_bytes=FILE_BYTES, archive=str(root / "archive"), file_reserved_hours=0)


def one(number: int) -> InnerMessage:
    made = message(topic=TOPIC, queue_id=number % QUEUES, body=b"%d %s" % (number, bytes(number * 37 % 3000)))
    assert isinstance(made, InnerMessage)
    return made


async def work(root: Path, number: int) -> None:
    """Put numbered messages until the process is killed. Print each number that is on the disk."""
    store = MessageStore(root / "store", settings(root))
    store.open()
    archive = LogArchive(store, settings(root), "b", writes=True)
    store.kept_from = lambda: archive.kept_from
    working = asyncio.create_task(archive.round())
    while True:
        first = number
        for number in range(first, first + PUTS_OF_A_TURN):
            assert store.put(one(number)).status is PutStatus.OK
        number += 1
        store.flusher.flush_log()
        print(number, flush=True)  # all messages below the number are stored
        await asyncio.sleep(0)
        if working.done() or store.max_physical_offset - archive.kept_from > AHEAD_FILES * FILE_BYTES:
            with suppress(StoreError):  # a leftover process was faster, or the next process starts the segment again
                await working
            working = asyncio.create_task(archive.round())
        store.retention.request()
        store.retention_round()


def read_back(root: Path) -> tuple[list[list[int]], int, int]:
    """Return the numbers of every queue, read from the archive and then from the log, the count of those from the
    archive, and the count of segments.
    """
    archive = Archive(place_of(str(root / "archive"), "b"))
    archive.refresh()
    store = MessageStore(root / "store", settings(root))
    store.open()
    try:
        archive.check(lambda start: _bytes(store.log.record_at(start)), store.max_physical_offset)
        found, archived = [], 0
        for queue_id in range(QUEUES):
            numbers: list[int] = []
            low, end = store.bounds(TOPIC, queue_id)
            offset = archive.min_offset(TOPIC, queue_id, low)
            while offset < end:
                if offset < low:
                    part = archive.get(TOPIC, queue_id, offset, count_max=32, bytes_max=1 << 18)
                    archived += len(part.records)
                else:
                    part = store.get(TOPIC, queue_id, offset, count_max=32)
                assert part.next_begin_offset > offset, f"{TOPIC}-{queue_id} cannot be read on from {offset}"
                numbers += [int(decode_record(record).body.split(b" ")[0]) for record in part.records]
                offset = part.next_begin_offset
            found.append(numbers)
        return found, archived, archive.segment_count
    finally:
        store.close()


def _bytes(record: memoryview | None) -> bytes | None:
    return None if record is None else bytes(record)


def run(root: Path, kills: int, seed: int, *, most_turns: int = 12) -> Outcome:
    """Kill ``kills`` processes, then read everything back."""
    choose, number, expected = random.Random(seed), 0, set[int]()
    for _ in range(kills):
        command = [sys.executable, "-m", "tests.faults.archive", "--work", str(root), "--number", str(number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            told = b"".join(process.stdout.readline() for _ in range(choose.randint(1, most_turns)))
            time.sleep(choose.random() * 0.05)
            process.send_signal(signal.SIGKILL)
            told += process.stdout.read()
        if lines := told.split(b"\n")[:-1]:
            expected.update(range(number, int(lines[-1])))
            number = int(lines[-1])
        number += PUTS_OF_A_TURN  # messages that were put but not reported may exist too, so no number is used twice
    queues, archived, segments = read_back(root)
    numbers = [one for queue in queues for one in queue]
    once = set(numbers)
    return Outcome(
        kills=kills,
        told=len(expected),
        found=len(numbers),
        archived=archived,
        segments=segments,
        lost=sorted(expected - once),
        twice=sorted(one for one in once if numbers.count(one) > 1) if len(once) < len(numbers) else [],
        is_ordered=all(queue == sorted(queue) for queue in queues),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        asyncio.run(work(options.work, options.number))
    with tempfile.TemporaryDirectory(prefix="rmq-archive-") as folder:
        outcome = run(Path(folder), options.kills, options.seed)
    print(outcome)
    return 0 if outcome.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
