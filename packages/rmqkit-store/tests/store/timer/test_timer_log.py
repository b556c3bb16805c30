"""The timer log: units and files byte by byte, as Apache's broker wrote them (store.md §18.3)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.protocol.properties import java_hash
from rmqkit.store.timer.log import DELETE, NONE, ROLL, UNIT_BYTES, TimerLog, Unit
from tests.examples import examples

FILE_BYTES = 10 * UNIT_BYTES + 16
UNIT = Unit(NONE, 1, 1795226025000, 2000, 383367, 370, java_hash("GoldTimer"))
WAITED_MS = UNIT.write_ms + 1
UNIT_HEX = "00000034ffffffffffffffff00000001000001a1fbcf3c28000007d0000000000005d987000001722a33f2a50000000000000000"
BLANK_HEX = "000000100000000000000000cbd43194"


@pytest.fixture
def log(tmp_path):
    log = TimerLog(tmp_path, FILE_BYTES)
    yield log
    log.close()


def put(log, unit):
    position, room = log.place()
    assert room > 0
    log.append([unit])
    return position


def reopened(tmp_path, file_bytes=FILE_BYTES):
    log = TimerLog(tmp_path, file_bytes)
    log.queue.load()
    return log


def test_a_unit_has_the_bytes_of_the_reference(log, tmp_path):
    assert put(log, UNIT) == 0
    content = (tmp_path / "timerlog" / f"{0:020d}").read_bytes()
    assert content[:UNIT_BYTES].hex() == UNIT_HEX
    assert content[UNIT_BYTES:] == bytes(FILE_BYTES - UNIT_BYTES)


def test_a_file_ends_with_a_blank_unit_and_positions_count_on(log, tmp_path):
    positions = [put(log, UNIT._replace(size=i)) for i in range(21)]
    assert positions == [*range(0, 520, 52), *range(536, 536 + 520, 52), 1072]
    assert (tmp_path / "timerlog" / f"{0:020d}").read_bytes()[520:].hex() == BLANK_HEX
    assert [log.unit(position).size for position in positions] == list(range(21))
    assert log.end == 1072 + 52


@pytest.mark.parametrize("position", [-1, 520, 1, 52 * 3, 536, 10**9])
def test_where_no_unit_is_there_is_none(log, position):
    put(log, UNIT)
    assert log.unit(position) is None


@pytest.mark.parametrize("begin", [0, 52, 468, 520, 536, 1072, 1124, 5000])
def test_a_scan_passes_the_ends_of_files(log, tmp_path, begin):
    positions = [put(log, UNIT._replace(size=i)) for i in range(21)]
    found = list(reopened(tmp_path).scan(begin))
    assert found == [(at, UNIT._replace(size=i)) for i, at in enumerate(positions) if at >= begin]


@examples(30)
@given(st.integers(0, 20), st.sampled_from([(0, 53), (12, 16), (12, -1)]))
def test_a_scan_ends_at_the_first_unit_that_is_none(tmp_path_factory, number, damage):
    folder = tmp_path_factory.mktemp("log")
    log = TimerLog(folder, FILE_BYTES)
    positions = [put(log, UNIT) for _ in range(21)]
    file = log.queue.find(positions[number])
    file.write(positions[number] - file.start + damage[0], damage[1].to_bytes(4, "big", signed=True))
    assert [position for position, _ in log.scan(0)] == positions[:number]
    log.close()


def test_what_is_cut_off_is_rewritten(log):
    positions = [put(log, UNIT) for _ in range(21)]
    log.truncate(positions[9])
    assert put(log, UNIT) == positions[9]
    assert put(log, UNIT) == positions[10]


def test_files_go_when_all_their_messages_have_left_the_commit_log(log):
    positions = [put(log, UNIT._replace(physical_offset=i * 100)) for i in range(21)]
    log.drop_before(10**6, UNIT.write_ms)
    log.drop_before(900, WAITED_MS)
    assert log.queue.min_offset == 0
    log.drop_before(901, WAITED_MS)
    assert log.queue.min_offset == positions[10]
    log.drop_before(10**6, WAITED_MS)
    assert log.queue.min_offset == positions[20], "the last file stays"


def test_a_marker_deletes_only_in_its_own_slot():
    kinds = [UNIT._replace(magic=1 | more).is_delete for more in (0, ROLL, DELETE, ROLL | DELETE)]
    assert kinds == [False, False, True, False]
    assert UNIT.time_ms == 1795226027000


@examples(30)
@given(st.lists(st.integers(1, 25), max_size=6))
def test_a_file_takes_as_many_units_at_once_as_one_by_one(tmp_path_factory, counts):
    folder = tmp_path_factory.mktemp("log")
    logs = [TimerLog(folder / name, FILE_BYTES) for name in ("runs", "singles")]
    for number, count in enumerate(counts):
        units = [UNIT._replace(size=number)] * count
        while units:
            _, room = logs[0].place()
            logs[0].append(units[:room])
            units = units[room:]
        for _ in range(count):
            put(logs[1], UNIT._replace(size=number))
    assert list(logs[0].scan(0)) == list(logs[1].scan(0))
    for log in logs:
        log.close()
