"""Damages, deletes and exchanges segments of an archive under running consumers: no message is lost without an ERROR.

    python -m tests.faults.archive_damage --rounds 200 --seed 7

In a round two consumers read each queue from its first message to its last one while one to four things happen to
segments (`FAULTS`). Afterwards each message was delivered in order with the right body, or an ERROR names it: by its
queue and offsets, or by the missing bytes of the log. Only the oldest segments may be deleted without an ERROR. Then
the segments are put back, and the next round starts with the same broker, or with a new one in each tenth round.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_fields
from rmqkit.protocol.record import iter_records
from rmqkit.store.archive.segment import SegmentFile
from tests.broker.cluster import Cluster
from tests.broker.sealing import sealed_in_a_thread

FILE_BYTES, GROUP_BYTES = 64 << 10, 8 << 10
QUEUES, MESSAGES = 3, 600
RESTART_ROUNDS = 10

_NUMBERS = re.compile(r"messages (\d+) to (\d+) of queue (\d+) of topic T ")
_BYTES = re.compile(r"has no segment with the log from (\d+) to (\d+),")
_SEGMENT = re.compile(r"(\d{20})\.parquet .*the log from \d+ on is missing")
_FOREIGN = re.compile(r": (\d{20})\.parquet (belongs to another log|begins where)")


@dataclass
class Outcome:
    """The result of all rounds."""

    rounds: int = 0
    delivered: int = 0
    named: int = 0
    silent: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        return not self.silent and not self.wrong


class _Errors(logging.Handler):
    """A handler that collects ERROR lines and tracebacks."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage() + (" Traceback" if record.exc_info else ""))


# ---------------------------------------------------------------- faults


def _flip(choose: random.Random, paths: list[Path], foreign: list[Path]) -> None:
    path = choose.choice(paths)
    content = bytearray(path.read_bytes())
    for _ in range(choose.randint(1, 3)):
        content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
    path.write_bytes(content)


def _cut(choose: random.Random, paths: list[Path], foreign: list[Path]) -> None:
    path = choose.choice(paths)
    os.truncate(path, choose.randrange(path.stat().st_size))


def _delete(choose: random.Random, paths: list[Path], foreign: list[Path]) -> None:
    choose.choice(paths).unlink()


def _delete_oldest(choose: random.Random, paths: list[Path], foreign: list[Path]) -> None:
    for path in paths[: choose.randint(1, 3)]:
        path.unlink()


def _exchange(choose: random.Random, paths: list[Path], foreign: list[Path]) -> None:
    one, two = choose.sample(paths, 2)
    one.rename(one.with_suffix(".x"))
    two.rename(one)
    one.with_suffix(".x").rename(two)


def _replace(choose: random.Random, paths: list[Path], foreign: list[Path]) -> None:
    shutil.copy(choose.choice(foreign), choose.choice(paths))


def _copy_over(choose: random.Random, paths: list[Path], foreign: list[Path]) -> None:
    one, two = choose.sample(paths, 2)
    shutil.copy(one, two)


FAULTS: dict[str, Callable[[random.Random, list[Path], list[Path]], None]] = {
    "flip": _flip,
    "cut": _cut,
    "delete": _delete,
    "delete the oldest": _delete_oldest,
    "exchange": _exchange,
    "another log's": _replace,
    "copy over": _copy_over,
}


# ---------------------------------------------------------------- a broker and its consumers


class _Broker(Cluster):
    """A broker with an archive of a dozen segments."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "archive" / "broker-a"
        store = {"archive": str(root / "archive"), "commit_log_file_bytes": FILE_BYTES}
        super().__init__(root / "store", store=store)

    @property
    def context(self):
        return self.standalone.broker.context

    @property
    def segments(self) -> list[Path]:
        return sorted(self.folder.glob("*.parquet"))

    async def fill(self) -> None:
        """Store and archive messages whose body is the number in their queue."""
        for number in range(MESSAGES):
            body = b"%d " % (number // QUEUES) + os.urandom(1000)
            answer = await self.send(body=body, queue_id=number % QUEUES, properties=f"KEYS\x01k{number}\x02")
            assert answer.code == ResponseCode.SUCCESS, answer.remark
        store = self.context.store
        store.flusher.flush_log()
        await self.context.archive.round()
        for path in (store.root / "commitlog").iterdir():
            os.utime(path, (0, 0))
        store.retention.request()
        store.retention_round()
        assert store.min_physical_offset > 5 * FILE_BYTES

    async def list_again(self) -> None:
        """Make the archive list its folder again, and read everything from there."""
        archive = self.context.archive
        archive._archive._contents.clear()
        archive._archive._open.clear()
        archive._archive._said.clear()
        archive._gaps.clear()
        archive._rounds_to_list = archive._changes = 0
        await archive.round()

    async def consume(self, queue_id: int, pause: Callable[[], int]) -> dict[int, int]:
        """Pull a queue to its end as a client does. Return the number in each body, by queue offset."""
        found: dict[int, int] = {}
        offset, tries = 0, 0
        while offset < MESSAGES // QUEUES:
            answer = await self.pull(offset, queue_id=queue_id, count=8)
            following = int(decode_fields(answer)["nextBeginOffset"]) if answer.fields else offset
            if answer.code == ResponseCode.SYSTEM_BUSY or (answer.code == _AGAIN and following == offset):
                tries += 1  # the segment that the pull read was removed meanwhile
                assert tries < 100, f"queue {queue_id} is refused at {offset} for ever: {answer.remark}"
                continue
            assert answer.code in _GOING_ON, f"queue {queue_id} at {offset}: {answer.code} {answer.remark}"
            assert following > offset, f"queue {queue_id} stays at {offset}: {answer.remark}"
            for record in iter_records(answer.body) if answer.body else ():
                assert record.queue_offset not in found, "no message is delivered twice"
                found[record.queue_offset] = int(record.body.split(b" ")[0])
            offset = following
            for _ in range(pause()):
                await asyncio.sleep(0)
        return found

    async def look_up(self, key: str) -> int:
        """Query a key. Return the number of records found."""
        header = {"topic": "T", "key": key, "maxNum": 8, "beginTimestamp": 0, "endTimestamp": 1 << 60}
        answer = await self.ask(RequestCode.QUERY_MESSAGE, **header)
        return len(list(iter_records(answer.body))) if answer.body else 0


_AGAIN = ResponseCode.PULL_RETRY_IMMEDIATELY
_GOING_ON = (ResponseCode.SUCCESS, _AGAIN, ResponseCode.PULL_OFFSET_MOVED)


def _contents(path: Path) -> dict[int, range]:
    """Return the numbers of each queue that a segment holds."""
    content = path.read_bytes()
    segment = SegmentFile(path.name, lambda at, size: content[at : at + size], len(content))
    return {queue.queue_id: range(queue.first, queue.end) for queue in segment.directory.queues if queue.topic == "T"}


def _named(lines: list[str], pristine: dict[int, dict[int, range]]) -> set[tuple[int, int]]:
    """Return queue and number of the messages that ERROR lines name."""
    named: set[tuple[int, int]] = set()

    def add_segment(start: int) -> None:
        for queue_id, numbers in pristine.get(start, {}).items():
            named.update((queue_id, number) for number in numbers)

    for line in lines:
        for first, last, queue_id in _NUMBERS.findall(line):
            named.update((int(queue_id), number) for number in range(int(first), int(last) + 1))
        for first, end in _BYTES.findall(line):
            for start in range(int(first), int(end), FILE_BYTES):
                add_segment(start)
        for start in _SEGMENT.findall(line):
            add_segment(int(start))
        for start, _ in _FOREIGN.findall(line):
            add_segment(int(start))
    return named


async def _round(broker: _Broker, foreign: list[Path], choose: random.Random, outcome: Outcome) -> None:
    archive_start = [int(path.name.partition(".")[0]) for path in broker.segments]
    pristine = dict(zip(archive_start, map(_contents, broker.segments), strict=True))
    names: list[str] = []

    async def harm() -> None:
        for _ in range(choose.randint(1, 4)):
            for _ in range(choose.randint(0, 60)):
                await asyncio.sleep(0)
            name = choose.choice(list(FAULTS))
            if len(paths := broker.segments) > 4:
                FAULTS[name](choose, paths, foreign)
                names.append(name)

    consumers = [broker.consume(queue_id, lambda: choose.randint(0, 3)) for queue_id in range(QUEUES) for _ in "ab"]
    *found, _ = await asyncio.gather(*consumers, harm())
    errors = next(one for one in logging.getLogger().handlers if isinstance(one, _Errors))
    assert await broker.look_up(f"k{MESSAGES - 1}") == 1, "a query finds a message that is in the log"
    await broker.look_up(f"k{choose.randrange(MESSAGES)}")
    named = _named(errors.lines, pristine)
    left = [int(path.name.partition(".")[0]) for path in broker.segments]
    deleted = [start for start in archive_start if start < min(left)]
    free = {(queue_id, one) for start in deleted for queue_id, numbers in pristine[start].items() for one in numbers}
    for number, one in enumerate(found):
        queue_id = number // 2
        outcome.delivered += len(one)
        outcome.wrong += [f"{outcome.rounds}: queue {queue_id} {k} has {v}" for k, v in one.items() if k != v]
        if list(one) != sorted(one):
            outcome.wrong.append(f"{outcome.rounds}: queue {queue_id} is out of order")
        lost = {(queue_id, at) for at in range(MESSAGES // QUEUES) if at not in one}
        outcome.named += len(lost & named)
        if silent := lost - named - free:
            outcome.silent.append(f"{outcome.rounds}: {names}: queue {queue_id}: {sorted(silent)[:3]} ({len(silent)})")
    outcome.wrong += [f"{outcome.rounds}: {line}" for line in errors.lines if "Traceback" in line]
    for name in names:
        outcome.faults[name] = outcome.faults.get(name, 0) + 1
    outcome.rounds += 1
    errors.lines.clear()


async def _run(root: Path, rounds: int, seed: int) -> Outcome:
    choose, outcome = random.Random(seed), Outcome()
    for name in ("other", "own"):
        async with _Broker(root / name) as broker:
            await broker.fill()
    foreign = _Broker(root / "other").segments
    folder, safe = _Broker(root / "own").folder, root / "safe"
    shutil.copytree(folder, safe)
    while outcome.rounds < rounds:
        shutil.rmtree(folder)
        shutil.copytree(safe, folder)
        async with _Broker(root / "own") as broker:
            for _ in range(min(RESTART_ROUNDS, rounds - outcome.rounds)):
                for path in folder.iterdir():
                    path.unlink()
                for path in safe.iterdir():
                    shutil.copy(path, folder)
                await broker.list_again()
                await _round(broker, foreign, choose, outcome)
    return outcome


def run(root: Path, rounds: int, seed: int) -> Outcome:
    """Run ``rounds`` rounds."""
    errors = _Errors()
    logging.getLogger().addHandler(errors)
    try:
        with mock.patch("rmqkit.store.archive.writing.GROUP_BYTES", GROUP_BYTES), sealed_in_a_thread():
            return asyncio.run(_run(root, rounds, seed))
    finally:
        logging.getLogger().removeHandler(errors)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rmq-archive-damage-") as folder:
        outcome = run(Path(folder), options.rounds, options.seed)
    print(outcome)
    return 0 if outcome.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
