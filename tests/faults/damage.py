"""Random damage to stopped stores, ``make damage``: nothing is lost in silence, nothing is served that is none.

    python -m tests.faults.damage [--rounds 500] [--seed S] [--keep FOLDER]

A round takes a copy of a stopped or killed store with several topics, queues, log files, keys, delays, timed messages
and configuration files, does one damage to one of its files (bytes flipped, zeros, cut, missing, exchanged with another
file of its kind), asks `fsck.verify`, starts it, reads everything and lets all timed messages come due. What has to
hold:

- every message that is missing or has another body is told of at WARNING or ERROR with a number, or the start is
  refused in one line that says what to do;
- every record read is whole and one of the queue that was asked;
- no traceback: nothing is raised but a `StoreError`, nothing is logged with an exception;
- where messages are lost or the start is refused, ``verify`` found something.

Not judged: changes that no checksum of the format covers and no other file contradicts, such as a property's text.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from rmqkit.errors import RecordCorrupt, StoreError
from rmqkit.protocol.record import decode_record
from rmqkit.store.json_files import JsonFile
from rmqkit.store.message_store import MessageStore
from rmqkit.store.offline import check as fsck
from rmqkit.testing.clock import StandingClock
from tests.broker.timed import NOW_MS, STEP_MS, Timed
from tests.store.stores import message, put_all

ROUNDS = 500
TIMED_COUNT = 24
HOWS = ("flip", "flip", "zero", "zero all", "cut", "missing", "exchange")
_TOLD = re.compile(r"\d")
_NO_NEWS = "was not closed in order"
_CONFIG = ("topics.json", "consumerOffset.json")

Key = tuple[str, int, int]


class Sound(Struct):
    """A stopped store and what is in it: bodies by topic, queue id and queue offset; timed ones that are to come."""

    root: Path
    bodies: dict[Key, bytes]
    timed: Counter[bytes]
    is_clean: bool


class Round(Struct):
    """What came of one damage."""

    seed: int
    what: str = ""
    verdict: str = ""
    outcome: str = ""
    lost: int = 0
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"--seed {self.seed} --rounds 1: {self.what}; verify: {self.verdict}; start: {self.outcome}"


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[str] = []
        self.tracebacks: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())
        if record.exc_info:
            self.tracebacks.append(record.getMessage())


@contextmanager
def heard() -> Iterator[_Heard]:
    """What is logged at WARNING or above meanwhile, and nowhere else."""
    logger, handler = logging.getLogger("rmqkit"), _Heard()
    before = logger.propagate, logger.level
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.WARNING)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.propagate, logger.level = before


# ---- sound stores


async def sound_store(folder: Path, *, is_clean: bool) -> Sound:
    """Write a store, and stop or kill it."""
    root = folder / ("stopped" if is_clean else "killed")
    one = Timed(folder / "live", clock=StandingClock(NOW_MS), timer_log_file_bytes=1040)
    one.timer.load()
    one.store.open()
    one.timer.recover()
    one.timer.start()
    for number in range(60):
        topic, queue_id = "AB"[number % 2], number // 2 % 3
        put_all(one.store, message(topic, queue_id, b"%04d" % number * 60, KEYS=f"k{number}", TAGS=f"t{number % 3}"))
        one.clock.ms += 7
    for number in range(6):
        put_all(one.store, message("SCHEDULE_TOPIC_XXXX", 2, b"delayed %d" % number, DELAY=3))
    for number in range(TIMED_COUNT):
        one.at(400 + number // 2 * STEP_MS, b"timed %d" % number, UNIQ_KEY=f"U{number}")
    await one.on_wheel(TIMED_COUNT)
    await one.pass_ms(400 + 3 * STEP_MS)
    await one.flushed()
    for name in _CONFIG:
        for version in range(2):
            JsonFile(one.root / "config" / name).save({"table": {f"name{i}": i for i in range(20)}, "version": version})
    bodies = dict(_read_all(one.store, []))
    waiting = Counter(b"timed %d" % number for number in range(TIMED_COUNT))
    waiting -= Counter(one.bodies())
    one.timer.stop()
    one.long_polling.close()
    if not is_clean:
        shutil.copytree(one.root, root)
    one.store.close()
    one.timer.persist()
    if is_clean:
        one.root.rename(root)
    else:
        shutil.rmtree(one.root)
    return Sound(root, bodies, waiting, is_clean)


def _read_all(store: MessageStore, failures: list[str]) -> Iterator[tuple[Key, bytes]]:
    """Every message as a consumer gets it."""
    for topic, queue_id in list(store._queues.table):
        offset, end = store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)
        while offset < end:
            result = store.get(topic, queue_id, offset, count_max=32)
            for raw in result.records:
                try:
                    record = decode_record(raw)
                except RecordCorrupt as error:
                    failures.append(f"an answer of {topic}-{queue_id} cannot be parsed: {error}")
                    continue
                if (record.topic, record.queue_id) != (topic, queue_id):
                    failures.append(f"{topic}-{queue_id} is answered with a record of {record.topic}")
                    continue
                yield (topic, queue_id, record.queue_offset), record.body
            if result.next_begin_offset <= offset:
                failures.append(f"{topic}-{queue_id}: a reader does not come on from {offset} of {end}")
                break
            offset = result.next_begin_offset


# ---- damage


def damage_one(root: Path, chance: random.Random) -> str:
    """Do one damage to one file; says what."""
    kinds: dict[str, list[Path]] = {}
    for path in sorted(path for path in root.rglob("*") if path.is_file() and path.name != "lock"):
        kinds.setdefault(path.relative_to(root).parts[0], []).append(path)
    kind = chance.choice(sorted(kinds) + ["commitlog"] * 3)
    path = chance.choice(kinds[kind])
    how = chance.choice(HOWS)
    name = path.relative_to(root)
    content = path.read_bytes()
    used = max(1, len(content.rstrip(b"\0")))
    if how == "missing":
        path.unlink()
    elif how == "exchange" and len(kinds[kind]) > 1:
        other = chance.choice([one for one in kinds[kind] if one != path])
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
        return f"{name} exchanged with {other.relative_to(root)}"
    elif how == "cut":
        at = chance.randrange(len(content)) if content else 0
        path.write_bytes(content[:at])
        return f"{name} cut at {at}"
    elif how == "zero all":
        path.write_bytes(bytes(len(content)))
    elif how == "zero":
        at, size = chance.randrange(used), chance.choice([1, 20, 512, 4096])
        zeros = bytes(min(size, len(content) - at))
        path.write_bytes(content[:at] + zeros + content[at + len(zeros) :])
        return f"{len(zeros)} zeros in {name} at {at}"
    else:
        at, bit = chance.randrange(used), chance.randrange(8)
        changed = bytearray(content or b"\0")
        changed[at] ^= 1 << bit
        path.write_bytes(changed)
        return f"bit {bit} of {name} flipped at {at}"
    return f"{name}: {how}"


# ---- a round


async def judge(sound: Sound, root: Path, seed: int) -> Round:
    """Damage a copy of a store, start it and judge."""
    done = Round(seed)
    shutil.copytree(sound.root, root)
    chance = random.Random(f"{seed} damage")
    done.what = f"{sound.root.name}: {damage_one(root, chance)}"
    is_found = _verify(root, done)
    with heard() as ears:
        await _start(sound, root, done, ears)
    done.failures += [f"a traceback: {text}" for text in ears.tracebacks]
    told = [text for text in ears.told if _NO_NEWS not in text]
    if done.lost and not any(_TOLD.search(text) for text in told):
        done.failures.append(f"{done.lost} messages are lost in silence")
    if (done.lost or done.outcome.startswith("refused")) and not is_found:
        done.failures.append("verify said that the store is sound")
    return done


def _verify(root: Path, done: Round) -> bool:
    one = Timed(root, timer_log_file_bytes=1040)
    try:
        report = fsck.verify(root, one.settings)
    except StoreError as error:
        done.verdict = f"refused: {error}"
        return True
    except Exception as error:  # noqa: BLE001 - anything else is what is looked for
        done.failures.append(f"verify raised {_place(error)}")
        return True
    finally:
        one.long_polling.close()
    done.verdict = "sound" if report.is_sound else f"{report.counts.total()} findings, {report.findings[0]}"
    return not report.is_sound


async def _start(sound: Sound, root: Path, done: Round, ears: _Heard) -> None:
    one = Timed(root, clock=StandingClock(NOW_MS + 10_000), timer_log_file_bytes=1040)
    try:
        for name in _CONFIG:
            JsonFile(root / "config" / name).load(dict[str, Any])
        one.timer.load()
        one.store.open()
        try:
            one.timer.recover()
            one.timer.start()
            await one.pass_ms(60_000)
            found = dict(_read_all(one.store, done.failures))
            lost = [key for key, body in sound.bodies.items() if found.get(key) != body]
            delivered = Counter(body for (topic, _, _), body in found.items() if topic == "T")
            late = sound.timed - delivered
            done.lost = len(lost) + late.total()
            done.outcome = f"{done.lost} lost ({lost[:2]}, {late.total()} timed), told: {ears.told[:3]}"
        finally:
            one.timer.stop()
            one.store.close()
    except StoreError as error:
        done.outcome = f"refused: {error}"
        if len(str(error).splitlines()) != 1 or ":" not in str(error):
            done.failures.append("a refusal is one line with a remedy")
    except Exception as error:  # noqa: BLE001 - anything else is what is looked for
        done.outcome = "raised"
        done.failures.append(f"the start raised {_place(error)}")
    finally:
        one.long_polling.close()


def _place(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(frame.filename).name}:{frame.lineno}: {error}"


async def rounds(seeds: list[int], folder: Path) -> list[Round]:
    """A round for each seed, over a stopped and a killed store."""
    stores = [await sound_store(folder, is_clean=is_clean) for is_clean in (True, False)]
    results = []
    for seed in seeds:
        root = folder / f"round-{seed}"
        results.append(await judge(random.Random(seed).choice(stores), root, seed))
        shutil.rmtree(root, ignore_errors=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.faults.damage", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seed", type=int, help="first seed (random)")
    given = parser.parse_args()
    seed = random.randrange(1 << 30) if given.seed is None else given.seed
    print(f"damage: {given.rounds} rounds from --seed {seed} on", flush=True)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results = asyncio.run(rounds(list(range(seed, seed + given.rounds)), Path(folder)))
    bad = [one for one in results if one.failures]
    for one in bad:
        print(f"FAILED {one}\n  " + "\n  ".join(one.failures))
    if given.rounds == 1:
        print(results[0])
    refused = sum(one.outcome.startswith("refused") for one in results)
    losing = sum(one.lost > 0 for one in results)
    print(
        f"damage: {len(results)} rounds, {refused} refused, {losing} lost messages and said so, {len(bad)} FAILED, "
        f"{time.monotonic() - begun:.0f} s"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
