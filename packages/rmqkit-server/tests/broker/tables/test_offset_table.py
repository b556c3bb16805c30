"""The table of consumer offsets: resets, copies from a master, and deletions of entries.

Source: behaviour.md §5, §10.1, §10.5; store.md §9.3.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rmqkit.broker.tables.offsets import OffsetTable
from rmqkit.protocol.fastjson import loads
from rmqkit.protocol.schemas.offsets import ConsumerOffsets
from rmqkit.protocol.schemas.topics import DataVersion
from rmqkit.testing.clock import StandingClock
from tests.set_clock import SetClock

QUEUE = ("g", "T", 0)
TARGET = 40


class Client:
    """The part of a connection that the table uses."""

    def __init__(self) -> None:
        self.is_open = True


def client() -> Any:
    return Client()


@pytest.fixture
def table(tmp_path: Path) -> OffsetTable:
    return OffsetTable(tmp_path, SetClock())


@pytest.fixture
def reset(table: OffsetTable) -> OffsetTable:
    table.reset(*QUEUE, TARGET)
    return table


# -- offsets


@pytest.mark.parametrize(("committed", "expected"), [(0, 0), (1, 1), (-1, None), (1 << 62, 1 << 62)])
def test_zero_is_an_offset_and_less_is_none(committed: int, expected: int | None, table: OffsetTable) -> None:
    table.commit(*QUEUE, committed)
    assert table.get(*QUEUE) == expected
    assert table.get("g", "T", 1) is None


def test_the_version_moves_with_each_500th_commit(table: OffsetTable) -> None:
    for number in range(499):
        table.commit(*QUEUE, number)
    before = table.contents.data_version
    table.commit(*QUEUE, 499)
    after = table.contents.data_version
    assert isinstance(before, DataVersion)
    assert isinstance(after, DataVersion)
    assert (before.counter, after.counter) == (0, 1)


def test_a_restart_continues_with_the_stored_offsets_and_their_version(table: OffsetTable, tmp_path: Path) -> None:
    table.merge(ConsumerOffsets(DataVersion(4, 0, 8), offset_table={"T@g": {0: 5, 3: 6}}), asked_ms=1)
    table.persist()
    again = OffsetTable(tmp_path, SetClock())
    again.load()
    assert again.contents == ConsumerOffsets(DataVersion(4, 0, 8), {"g": ["T"]}, {"T@g": {0: 5, 3: 6}})
    assert not again.is_dirty


def test_a_file_that_a_kill_removed_is_written_with_the_next_snapshot(table: OffsetTable, tmp_path: Path) -> None:
    """A kill between the two renames of a save leaves only the backup. A restoration would change the file's time."""
    table.commit(*QUEUE, 5)
    table.persist()
    (tmp_path / "consumerOffset.json").rename(tmp_path / "consumerOffset.json.bak")
    again = OffsetTable(tmp_path, SetClock())
    again.load()
    assert (again.get(*QUEUE), again.is_dirty) == (5, True)
    assert not (tmp_path / "consumerOffset.json").exists()
    again.persist()
    assert loads((tmp_path / "consumerOffset.json").read_bytes())["offsetTable"] == {"T@g": {"0": 5}}


def test_a_table_without_a_file_or_without_a_version_begins_with_the_first_version(
    table: OffsetTable, tmp_path: Path
) -> None:
    table.load()
    assert table.contents == ConsumerOffsets(DataVersion(0, 0, 0), {}, {})
    (tmp_path / "consumerOffset.json").write_text('{"offsetTable":{"T@g":{0:5}}}')  # 4.x, whose keys are numbers
    table.load()
    assert table.contents == ConsumerOffsets(DataVersion(0, 0, 0), {"g": ["T"]}, {"T@g": {0: 5}})


def test_a_commit_is_written_with_the_next_snapshot_and_a_snapshot_does_not_change(table: OffsetTable) -> None:
    assert not table.is_dirty
    table.commit(*QUEUE, 5)
    assert table.is_dirty
    snapshot = table.snapshot()
    assert not table.is_dirty
    table.commit(*QUEUE, 6)
    table.advance_version()
    assert snapshot == ConsumerOffsets(DataVersion(0, 0, 0), {"g": ["T"]}, {"T@g": {0: 5}})


def test_the_file_stays_as_it_is_while_the_log_cannot_be_flushed(table: OffsetTable, tmp_path: Path) -> None:
    path = tmp_path / "consumerOffset.json"
    table.commit(*QUEUE, 5)
    table.persist()
    before, table.flush_log = path.read_bytes(), lambda: False
    table.commit(*QUEUE, 6)
    table.persist()
    assert path.read_bytes() == before
    assert table.is_dirty
    table.flush_log = lambda: True
    table.persist()
    assert loads(path.read_bytes())["offsetTable"] == {"T@g": {"0": 6}}
    assert not table.is_dirty


def test_the_time_of_the_file_is_that_before_the_flush_of_the_log(tmp_path: Path) -> None:
    clock, path = StandingClock(), tmp_path / "consumerOffset.json"

    def flush() -> bool:
        clock.ms += 3_600_000
        return True

    table = OffsetTable(tmp_path, clock)
    table.commit(*QUEUE, 5)
    table.persist()
    without_wait = path.stat().st_mtime
    table.flush_log = flush
    table.persist()
    assert without_wait - 3700 < path.stat().st_mtime < without_wait - 2400


def test_a_table_that_is_no_longer_copied_has_a_newer_version(tmp_path: Path) -> None:
    clock = StandingClock()
    clock.ms = 77
    table = OffsetTable(tmp_path, clock)
    table.merge(ConsumerOffsets(DataVersion(4, 0, 8)), asked_ms=1)
    table.advance_version()
    assert table.contents.data_version == DataVersion(5, 0, 77)


def test_topics_and_groups_are_those_of_both_sides_of_a_key(table: OffsetTable) -> None:
    for group, topic in (("g", "T"), ("g", "U"), ("h", "T")):
        table.commit(group, topic, 0, 1)
    assert (table.all_topics, table.all_groups) == ({"T", "U"}, {"g", "h"})
    assert (table.topics("g"), table.groups("T")) == (["T", "U"], ["g", "h"])
    assert table.topics_by_group == {"g": ["T", "U"], "h": ["T"]}


def test_a_clone_has_offsets_of_its_own(table: OffsetTable) -> None:
    table.commit(*QUEUE, 5)
    table.snapshot()
    table.clone("T", source="nobody", target="h")
    assert (table.get("h", "T", 0), table.is_dirty) == (None, False)
    table.clone("T", source="g", target="h")
    table.commit(*QUEUE, 6)
    assert (table.get("h", "T", 0), table.is_dirty) == (5, True)


@pytest.mark.parametrize(
    ("remove", "left"),
    [
        (lambda table: table.remove("g", "T"), {("g", "U"), ("h", "T"), ("h", "U")}),
        (lambda table: table.remove_group("g"), {("h", "T"), ("h", "U")}),
        (lambda table: table.remove_topic("T"), {("g", "U"), ("h", "U")}),
    ],
)
def test_a_removal_leaves_what_others_have(remove: Any, left: set[tuple[str, str]], table: OffsetTable) -> None:
    every = [(group, topic) for group in "gh" for topic in "TU"]
    for group, topic in every:
        table.reset(group, topic, 0, 3)
        table.pulled(group, topic, 0, 4)
    table.snapshot()
    remove(table)
    assert {one for one in every if table.get(*one, 0) == 3} == left
    assert {one for one in every if table.has_reset(*one, 0)} == left
    assert {one for one in every if table.pull_offset(*one, 0) == 4} == left
    assert table.is_dirty


def test_pulls_of_some_groups_are_forgotten(table: OffsetTable) -> None:
    table.pulled("g", "T", 0, 4)
    table.pulled("h", "T", 0, 5)
    table.forget_pulls({"g"})
    assert table.pulls == {("h", "T", 0): 5}
    assert table.pull_offset("g", "T", 0) == 0


def test_a_removal_of_what_is_missing_changes_nothing(table: OffsetTable) -> None:
    table.commit(*QUEUE, 5)
    table.snapshot()
    table.remove_group("T")
    table.remove_topic("g")
    assert (table.get(*QUEUE), table.is_dirty) == (5, False)


# -- resets


@pytest.mark.parametrize(("offset", "is_refused"), [(-1, True), (0, False)])
def test_a_reset_to_less_than_zero_is_a_mistake_of_the_caller(
    offset: int, is_refused: bool, table: OffsetTable
) -> None:
    if is_refused:
        with pytest.raises(AssertionError, match="the offset of a reset, -1, is not negative"):
            table.reset(*QUEUE, offset)
    else:
        table.reset(*QUEUE, offset)
    assert table.has_reset(*QUEUE) is not is_refused
    assert table.redirect(client(), *QUEUE, 7, is_new=True) == (None if is_refused else 0)


def test_a_reset_is_committed_and_stands_for_its_queue_only(reset: OffsetTable) -> None:
    one = client()
    assert reset.get(*QUEUE) == TARGET
    for other in (("g", "T", 1), ("g", "U", 0), ("h", "T", 0)):
        assert not reset.has_reset(*other)
        assert reset.redirect(one, *other, 7, is_new=True) is None
        assert reset.take_reset(*other) is None
    assert reset.has_reset(*QUEUE)


def test_a_pop_takes_a_reset_once(reset: OffsetTable) -> None:
    assert (reset.take_reset(*QUEUE), reset.take_reset(*QUEUE)) == (TARGET, None)
    assert reset.redirect(client(), *QUEUE, 7, is_new=True) is None


@pytest.mark.parametrize("offset", [7, TARGET])
def test_a_new_pull_of_a_client_that_a_new_pull_was_sent_ends_the_reset(offset: int, reset: OffsetTable) -> None:
    one = client()
    assert reset.redirect(one, *QUEUE, 7, is_new=True) == TARGET
    assert reset.redirect(one, *QUEUE, offset, is_new=True) is None
    assert not reset.has_reset(*QUEUE)


def test_after_a_held_pull_only_a_pull_at_the_target_ends_the_reset(reset: OffsetTable) -> None:
    one = client()
    assert reset.redirect(one, *QUEUE, 7, is_new=False) == TARGET
    assert reset.redirect(one, *QUEUE, TARGET, is_new=False) == TARGET, "a held pull never ends a reset"
    assert reset.has_reset(*QUEUE)
    assert reset.redirect(one, *QUEUE, TARGET, is_new=True) is None
    assert not reset.has_reset(*QUEUE)


def test_a_client_whose_held_pull_was_sent_is_sent_again_from_elsewhere(reset: OffsetTable) -> None:
    one = client()
    assert reset.redirect(one, *QUEUE, 7, is_new=False) == TARGET
    assert reset.redirect(one, *QUEUE, 8, is_new=True) == TARGET
    assert reset.has_reset(*QUEUE)


@pytest.mark.parametrize("offset", [7, TARGET])
def test_a_client_that_was_not_sent_yet_is_sent(offset: int, reset: OffsetTable) -> None:
    assert reset.redirect(client(), *QUEUE, 7, is_new=True) == TARGET
    assert reset.redirect(client(), *QUEUE, offset, is_new=True) == TARGET
    assert reset.has_reset(*QUEUE)


@pytest.mark.parametrize(("was_new", "ends"), [(True, True), (False, False)])
def test_a_closed_connection_ends_the_reset_if_its_new_pull_was_sent(
    was_new: bool, ends: bool, reset: OffsetTable
) -> None:
    gone = client()
    assert reset.redirect(gone, *QUEUE, 7, is_new=was_new) == TARGET
    gone.is_open = False
    assert reset.redirect(client(), *QUEUE, 7, is_new=False) == TARGET, "a held pull never ends a reset"
    assert reset.redirect(client(), *QUEUE, 7, is_new=True) == (None if ends else TARGET)
    assert reset.has_reset(*QUEUE) is not ends


# -- copies


def test_a_slave_takes_what_its_master_has_and_keeps_the_rest(table: OffsetTable) -> None:
    table.commit(*QUEUE, 9)
    table.commit("own", "T", 0, 3)
    copied = ConsumerOffsets(DataVersion(4, 0, 8), offset_table={"T@g": {0: 5, 1: 6}})
    table.snapshot()
    table.merge(copied, asked_ms=1)
    assert (table.get(*QUEUE), table.get("g", "T", 1), table.get("own", "T", 0)) == (5, 6, 3)
    assert (table.contents.data_version, table.is_dirty) == (DataVersion(4, 0, 8), True)
    table.snapshot()
    table.merge(copied, asked_ms=2)
    assert not table.is_dirty, "nothing changed"
    table.merge(ConsumerOffsets(), asked_ms=3)
    assert table.contents.data_version == DataVersion(4, 0, 8), "4.x sends no version"


@pytest.mark.parametrize(("timestamp", "expected"), [(9, (9, None)), (10, (9, 2)), (11, (9, 2))])
def test_a_member_takes_offsets_that_are_further_unless_they_are_older(
    timestamp: int, expected: tuple[int, int | None], table: OffsetTable
) -> None:
    table.merge(ConsumerOffsets(DataVersion(1, 0, 10)), asked_ms=1)
    table.commit(*QUEUE, 9)
    table.merge_forward(ConsumerOffsets(DataVersion(1, 0, timestamp), offset_table={"T@g": {0: 5, 1: 2}}))
    assert (table.get(*QUEUE), table.get("g", "T", 1)) == expected


def test_a_member_that_has_no_offset_of_a_queue_adopts_the_copied_one(table: OffsetTable) -> None:
    """Go and Node clients commit -1 for an empty queue: a copy of it is no offset either."""
    table.commit("g", "U", 0, -1)
    table.commit("g", "U", 1, 3)
    copied = {"T@g": {0: 0, 1: -1, 2: 1}, "U@g": {0: 4, 1: -1}}
    table.snapshot()
    table.merge_forward(ConsumerOffsets(DataVersion(3, 0, 12), offset_table=copied))
    assert table.is_dirty
    assert table.contents == ConsumerOffsets(
        DataVersion(3, 0, 12), {"g": ["U", "T"]}, {"U@g": {0: 4, 1: 3}, "T@g": {0: 0, 1: -1, 2: 1}}
    )
    assert table.get("g", "T", 1) is None


def test_a_table_that_is_older_is_not_adopted_at_all(table: OffsetTable) -> None:
    table.merge(ConsumerOffsets(DataVersion(1, 0, 10)), asked_ms=1)
    table.snapshot()
    table.merge_forward(ConsumerOffsets(offset_table={"T@g": {0: 5}}))
    assert (table.contents, table.is_dirty) == (ConsumerOffsets(DataVersion(1, 0, 10), {}, {}), False)


def test_a_copy_that_changes_nothing_leaves_a_changed_table_dirty(table: OffsetTable) -> None:
    table.commit(*QUEUE, 5)
    table.merge(ConsumerOffsets(offset_table={"T@g": {0: 5}}), asked_ms=1)
    assert table.is_dirty


def test_the_file_of_a_master_has_the_time_of_its_write(table: OffsetTable, tmp_path: Path) -> None:
    path = tmp_path / "consumerOffset.json"
    path.touch()
    os.utime(path, ns=(0, 0))
    table.persist()
    assert path.stat().st_mtime_ns > 0


def test_a_slave_without_a_copy_keeps_the_time_of_its_file(table: OffsetTable, tmp_path: Path) -> None:
    table.persist()
    path = tmp_path / "consumerOffset.json"
    os.utime(path, ns=(0, 1_700_000_000_123_456_789))
    table.begin_copying()
    table.persist()
    assert path.stat().st_mtime_ns == 1_700_000_000_123_000_000
    path.unlink()
    table.begin_copying()
    table.persist()
    assert path.stat().st_mtime_ns == 0, "no copy has ever arrived"


def test_a_copy_that_arrives_during_a_write_does_not_change_the_time_of_the_file(
    table: OffsetTable, tmp_path: Path
) -> None:
    table.begin_copying()
    table.merge(ConsumerOffsets(offset_table={"T@g": {0: 5}}), asked_ms=1000)
    snapshot = table.snapshot()
    table.merge(ConsumerOffsets(offset_table={"T@g": {0: 6}}), asked_ms=2000)
    table.write(snapshot)
    assert (tmp_path / "consumerOffset.json").stat().st_mtime_ns == 1_000_000_000
    table.persist()
    assert (tmp_path / "consumerOffset.json").stat().st_mtime_ns == 2_000_000_000


def test_the_file_of_a_slave_has_the_time_when_the_master_was_asked(table: OffsetTable, tmp_path: Path) -> None:
    table.begin_copying()
    table.merge(ConsumerOffsets(offset_table={"T@g": {0: 5}}), asked_ms=1_700_000_000_123)
    table.persist()
    status = (tmp_path / "consumerOffset.json").stat()
    assert status.st_mtime_ns == status.st_atime_ns == 1_700_000_000_123_000_000


def test_light_groups_have_a_table_of_their_own(tmp_path: Path) -> None:
    plain = OffsetTable(tmp_path, SetClock())
    plain.commit("g", "T", 1, 5)
    plain.persist()
    assert [path.name for path in tmp_path.iterdir()] == ["consumerOffset.json"]
    first = OffsetTable(tmp_path, SetClock(), has_light=True)
    first.load()
    first.commit("%LMQ%a", "%LMQ%a", 0, 7)
    first.commit("%LMQ%b", "%LMQ%b", 1, 8)
    first.persist()
    stored = loads((tmp_path / "lmqConsumerOffset.json").read_bytes())
    assert stored["offsetTable"] == {"T@g": {"1": 5}}
    assert stored["lmqOffsetTable"] == {"%LMQ%a@%LMQ%a": 7, "%LMQ%b@%LMQ%b": 0}
    second = OffsetTable(tmp_path, SetClock(), has_light=True)
    second.load()
    assert (second.get("g", "T", 1), second.get("%LMQ%a", "%LMQ%a", 0)) == (5, 7)
