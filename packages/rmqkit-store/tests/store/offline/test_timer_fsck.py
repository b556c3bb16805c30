"""Damaged files of timed messages, without a broker: `verify` names them, `repair` makes them whole."""

from __future__ import annotations

import pytest

from rmqkit.protocol.names import TIMER_TOPIC
from rmqkit.protocol.properties import java_hash
from rmqkit.protocol.schemas.brokers import TimerCheckpoint
from rmqkit.protocol.schemas.topics import DataVersion
from rmqkit.store.offline.check import verify
from rmqkit.store.offline.findings import Kind
from rmqkit.store.offline.repair import repair
from rmqkit.store.timer.files import TimerFiles
from rmqkit.store.timer.log import NONE, UNIT_BYTES, Unit
from rmqkit.store.timer.wheel import SLOT_COUNT, WHEEL_BYTES
from tests.golden_stores import unpack_golden
from tests.store.stores import golden_settings, message, opened, put_all, small_settings

NOW_MS = 1_795_226_025_000
SETTINGS = small_settings(timer_log_file_bytes=12 * UNIT_BYTES)


def made(root):
    """Return a store with 25 timed messages in three log files."""
    timed = {"REAL_TOPIC": "TopicTest", "REAL_QID": 0, "TIMER_OUT_MS": NOW_MS}
    with opened(root) as store:
        records = put_all(store, *[message(TIMER_TOPIC, **timed)] * 25)
    files = TimerFiles(root, log_file_bytes=SETTINGS.timer_log_file_bytes, precision_ms=1000)
    for number, one in enumerate(records):
        size = one.end_offset - one.physical_offset
        unit = Unit(NONE, 1, NOW_MS, (1 + number % 5) * 1000, one.physical_offset, size, java_hash("TopicTest"))
        assert files.add([unit]) == 1
    version = DataVersion(1, 0, NOW_MS)
    offsets = {"last_timer_queue_offset": 25, "master_timer_queue_offset": 25}
    files.take(TimerCheckpoint(last_read_time_ms=NOW_MS, data_version=version, **offsets))
    files.write()
    files.close()
    (root / "config" / "timermetrics").write_bytes(b'{"timingCount":{}}')
    return root


def put_at(path, position, data):
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(data)


def empty(path):
    size = path.stat().st_size
    with open(path, "wb") as file:
        file.truncate(size)


def shorten(path):
    with open(path, "r+b") as file:
        file.truncate(55)


def zero_slot(path):
    put_at(path, (NOW_MS // 1000 + 3) % SLOT_COUNT * 32, bytes(32))


LOG = f"timerlog/{0:020d}"
DAMAGES = [
    ("timerwheel", empty, Kind.TIMER),
    ("timerwheel", zero_slot, Kind.TIMER),
    ("timerwheel", shorten, Kind.FILE_SIZE),
    (LOG, empty, Kind.TIMER),
    (LOG, shorten, Kind.FILE_SIZE),
    (LOG, lambda path: put_at(path, 3 * UNIT_BYTES, bytes(4)), Kind.TIMER),
    (LOG, lambda path: path.rename(path.with_name("copy")), Kind.FILE_NAME),
    ("config/timercheck", empty, Kind.TIMER),
    ("config/timercheck", shorten, Kind.FILE_SIZE),
    ("config/timercheck", lambda path: put_at(path, 0, b"\x7f"), Kind.CHECKPOINT),
    ("config/timermetrics", empty, Kind.CONFIG),
]


@pytest.mark.parametrize(("name", "damage", "kind"), DAMAGES)
def test_damage_is_named_and_mended(tmp_path, name, damage, kind):
    root = made(tmp_path)
    assert verify(root, SETTINGS).findings == []
    damage(root / name)
    assert kind.value in verify(root, SETTINGS).counts
    assert repair(root, SETTINGS, is_dry_run=True).remaining == []
    repaired = repair(root, SETTINGS, is_dry_run=False)
    assert repaired.steps
    assert repaired.remaining == []
    assert verify(root, SETTINGS).is_sound
    files = TimerFiles(root, log_file_bytes=SETTINGS.timer_log_file_bytes, precision_ms=1000)
    files.load()
    at = files.recover(lambda unit: unit.physical_offset // unit.size)
    pending = files.wheel.pending(NOW_MS, NOW_MS + 10_000)
    assert (files.fault, (at, pending) in {(0, 0), (25, 25)}) == ("", True)  # read again from the topic, or all there
    files.close()


def test_a_wheel_that_is_missing_is_named_and_made(tmp_path):
    root = made(tmp_path)
    wheel = (root / "timerwheel").read_bytes()
    (root / "timerwheel").unlink()
    assert [one.kind for one in verify(root, SETTINGS).findings] == [Kind.TIMER]
    assert repair(root, SETTINGS, is_dry_run=False).remaining == []
    assert (root / "timerwheel").read_bytes() == wheel
    assert len(wheel) == WHEEL_BYTES


def test_the_files_of_the_reference_are_sound(tmp_path):
    golden = unpack_golden("5.4.0", tmp_path)
    assert Kind.TIMER.value not in verify(golden.root, golden_settings(golden)).counts
    empty(golden.root / "timerwheel")
    assert verify(golden.root, golden_settings(golden)).counts[Kind.TIMER.value] == 1
