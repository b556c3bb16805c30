"""Power cuts under a store at work: a workload on a disk that forgets, cut at many times, and the checks after each
cut.

After a cut the store is opened, which recovers it, and then:

- every message below ``durable_offset`` exists, unless retention deleted its log file (SYNC_FLUSH acknowledged these
  messages, ASYNC_FLUSH reported the offset);
- every message read is the one put at that offset of that queue, properties and all; offsets have no gap;
- `fsck.verify` finds no fault; another start changes no byte; the last saved configuration exists;
- further puts are stored at the next offsets, and read.

Recovery writes to the disk too: it and the puts after it are recorded, and cut again.
"""

from __future__ import annotations

import random
import shutil
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from rmqkit.protocol.record import Record, decode_record
from rmqkit.store.log import recovery
from rmqkit.store.message_store import MessageStore
from rmqkit.store.offline import check as fsck
from rmqkit.store.settings import FlushDiskType
from tests.faults.disk import CutStyle, Recorder
from tests.faults.workload import BATCHED, Key, Ledger, Stored, Work, greatest_at, quiet, random_settings
from tests.store.stores import tree

_BACKUP_ALONE = (fsck.Kind.FILE_MISSING, "numbers.json")

NEVER = 1 << 62


class PowerCuts:
    """One workload, and any number of cuts of it.

    Args:
        folder: an empty directory for the store and its copies after cuts.
    """

    def __init__(self, seed: int, folder: Path, **changes: Any) -> None:
        self.seed = seed
        self.folder = folder
        chance = random.Random(f"{seed} settings")
        self.settings = random_settings(chance, chance.choice(list(FlushDiskType)), **changes)
        self.bulk_from_bytes = random.Random(f"{seed} bulk").choice([0, 3000, recovery.BULK_FROM_BYTES])
        chance = random.Random(f"{seed} work")
        base = folder / "whole"
        base.mkdir()
        self.recorder = Recorder(base)
        with quiet(self.bulk_from_bytes), self.recorder:
            work = Work(base, self.settings, chance, self.recorder)
            work.open()
            for _ in range(chance.choice([60, 200, 350])):
                work.step()
            work.close()
        self.work = work
        assert self.recorder.live_tree() == _tree_of(base), "the recorder saw every operation"

    def cut(self, number: int) -> str:
        """Cut once, check, and cut the recovery too. Return a short description.

        Raises:
            AssertionError: a check fails.
        """
        chance = random.Random(f"{self.seed} cut {number}")
        return self._cut(self.work, chance, number, depth=0)

    def _cut(self, before: Work, chance: random.Random, number: int, depth: int) -> str:
        recorder = before.recorder
        time = _time_of_cut(recorder, chance)
        ledger = before.ledger_at(time)
        style = CutStyle.any(chance)
        base = self.folder / f"cut-{number}-{depth}"
        recorder.cut(time, style, chance, base)
        words = f"at {time} of {recorder.time}, {style.pages}{' loose' if style.is_loose else ''}"
        try:
            again = Recorder(base)
            with quiet(self.bulk_from_bytes), again:
                after = Work(base, self.settings, chance, again)
                after.clock.ms = before.clock.ms + 10_000
                after._number = before._number + 1_000_000
                after._saved = before._saved
                _check_recovered(after, ledger, time)
                for _ in range(chance.choice([5, 30])):
                    after.step()
                after.close()
                _check_at_rest(after)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            raise AssertionError(f"power cut {words}: {type(error).__name__} in {where}: {error}") from error
        deeper = ""
        try:
            if depth < 2 and chance.random() < 0.4:
                deeper = ", then " + self._cut(after, chance, number, depth + 1)
        except AssertionError as error:
            raise AssertionError(f"power cut {words}, then {error}") from error
        shutil.rmtree(base)
        return words + deeper


def _time_of_cut(recorder: Recorder, chance: random.Random) -> int:
    """Return a random time, or a time right after an important operation."""
    if recorder.of_interest and chance.random() < 0.6:
        return min(recorder.time, chance.choice(recorder.of_interest) + chance.choice([0, 0, 1, 2]))
    return chance.randint(0, recorder.time)


def _check_recovered(after: Work, ledger: Ledger, time: int) -> None:
    """Open the store after a cut, and compare it with the ledger of the store before the cut."""
    fresh = after.ledger
    # until the store is open, the earlier ledger is valid
    safe = {one.key for one in ledger.safe_at(time)}
    fresh.stored = {key: replace(one, time=0 if key in safe else NEVER) for key, one in ledger.stored.items()}
    fresh.durable = [(0, greatest_at(ledger.durable, time))]
    fresh.deleted = [(0, greatest_at(ledger.deleted, time))]
    low, high = ledger.saved_at(time)
    fresh.saved, fresh.begun = [(0, low)], [(0, high)]
    store = after.open()
    found = read_everything(store)
    for one in found.values():
        known = ledger.stored.get(one.key)
        assert known is not None, f"{one.key} was never put: {one.body[:40]!r}"
        assert (one.body, one.count) == (known.body, known.count), f"{one.key} has another body: {one.body[:40]!r}"
        assert one.properties.startswith(known.properties), f"{one.key} has other properties: {one.properties!r}"
        assert one.physical_offset == known.physical_offset, f"{one.key} lies elsewhere"
    lost = sorted(safe - set(found))
    assert not lost, f"{len(lost)} durable messages are lost, the first is {lost[0]}; durable to {fresh.durable[0][1]}"
    value = after.config.load(dict)
    number = 0 if value is None else value["number"]
    assert low <= number <= high, f"configuration {number}, expected {low} to {high}"
    # from here on the ledger is the content that was read
    after.restart_ledger(found, number)


def read_everything(store: MessageStore) -> dict[Key, Stored]:
    """Return every readable message of every queue, compared with the log."""
    found: dict[Key, Stored] = {}
    for topic, queue_id in list(store.queues.table):
        offset, end = store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)
        while offset < end:
            result = store.get(topic, queue_id, offset, count_max=32)
            assert result.records, f"{topic}-{queue_id}: nothing at {offset} of {end}: {result.status}"
            for raw in result.records:
                record = decode_record(raw, 0, verify_crc=True)
                one = _stored(record)
                assert one.key == (topic, queue_id, offset), f"{topic}-{queue_id} has {one.key} at {offset}"
                found[one.key] = one
                offset += one.count
            following = result.next_begin_offset
            assert offset == following, f"{topic}-{queue_id}: read up to {offset}, next is {following} of {end}"
        assert offset == end, f"{topic}-{queue_id}: read up to {offset} of {end}"
    return found


def _stored(record: Record) -> Stored:
    key = record.topic, record.queue_id, record.queue_offset
    is_inner = record.topic == BATCHED
    count = int(record.properties.split(b"INNER_NUM\x01")[1].split(b"\x02")[0]) if is_inner else 1
    end = record.physical_offset + record.size
    return Stored(key, record.physical_offset, end, bytes(record.body), bytes(record.properties), count)


def _check_at_rest(after: Work) -> None:
    """Check that a closed store is sound by every check, and that another start changes nothing."""
    root = after.base / "store"
    report = fsck.verify(root, after.settings)
    # a cut between the two renames of a save leaves only the backup, until the next save
    findings = [one for one in report.findings if (one.kind, Path(one.path).name) != _BACKUP_ALONE]
    assert not findings and not report.is_unclean, "\n".join(map(str, findings[:5]))
    closed = tree(root)
    store = after.open()
    found = read_everything(store)
    missing = [one.key for one in after.ledger.safe_at(after.recorder.time) if one.key not in found]
    assert not missing, f"{missing[0]} is gone after a clean stop"
    after.close()
    changed = {name for name, _ in tree(root).items() ^ closed.items()}
    # the checkpoint has the place of recovery's last record; queueends lists queues in the order of opening
    allowed = {"checkpoint", "queueends"}
    if after.settings.transient_store_pool:
        allowed.add(max(name for name in closed if name.startswith("commitlog/")))  # an empty last file is removed
    assert changed <= allowed, f"a clean start and stop changes {changed}"


def _tree_of(base: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(base)): None if path.is_dir() else path.read_bytes() for path in base.rglob("*")}
