"""The checkpoint file: store.md §8.1."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rmqkit.store.log.checkpoint import Checkpoint


def test_bytes(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "checkpoint")
    checkpoint.physic_timestamp, checkpoint.logics_timestamp, checkpoint.index_timestamp = 0x1A1, 0x1A2, 0x1A3
    checkpoint.master_flushed_offset, checkpoint.confirm_physical_offset = 0x1A4, 0x1A5
    checkpoint.logics_physical_offset = 0x1A6
    checkpoint.save()
    content = (tmp_path / "checkpoint").read_bytes()
    assert content == bytes.fromhex("".join(f"00000000000001a{i}" for i in range(1, 7))) + bytes(4096 - 48)


def test_round_trip(tmp_path: Path) -> None:
    one = Checkpoint(tmp_path / "checkpoint")
    one.physic_timestamp, one.confirm_physical_offset = 5, 6
    one.save()
    two = Checkpoint(tmp_path / "checkpoint")
    two.load()
    assert (two.physic_timestamp, two.confirm_physical_offset) == (5, 6)


@pytest.mark.parametrize("content", [None, b"", bytes(47)])
def test_missing_or_cut_off_file_means_from_the_front(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "checkpoint").write_bytes(content)
    checkpoint = Checkpoint(tmp_path / "checkpoint")
    checkpoint.load()
    assert checkpoint.min_timestamp == 0


def test_min_timestamp_is_three_seconds_before_the_smaller(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "checkpoint")
    checkpoint.physic_timestamp, checkpoint.logics_timestamp = 10_000, 8_000
    assert checkpoint.min_timestamp == 5_000
    checkpoint.logics_timestamp = 2_999
    assert checkpoint.min_timestamp == 0


def test_unchanged_numbers_are_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint(tmp_path / "checkpoint")
    checkpoint.physic_timestamp = 5
    synced: list[int] = []
    real = os.fdatasync
    monkeypatch.setattr(
        "rmqkit.system.disk.sync_data", lambda descriptor: (synced.append(descriptor), real(descriptor))
    )
    checkpoint.save()
    checkpoint.save()
    assert len(synced) == 1
    checkpoint.logics_timestamp = 6
    checkpoint.save()
    assert len(synced) == 2


def test_clock_set_back_lowers_what_counts_as_flushed_until_it_is_past_that_time(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "checkpoint")
    checkpoint.reach(physic=9000, logics=8000, index=8600)
    checkpoint.step_back(9500, 8500)
    checkpoint.reach(physic=9500, logics=8600, index=9500)
    again = Checkpoint(checkpoint.path)
    again.load()
    for one in (checkpoint, again):
        assert (one.physic_timestamp, one.logics_timestamp, one.index_timestamp) == (8499, 8000, 8499)
    checkpoint.reach(physic=9501, logics=9502)
    assert (checkpoint.physic_timestamp, checkpoint.logics_timestamp) == (9501, 9502)


@pytest.mark.parametrize(("log_end", "left"), [(99, 0), (100, 100), (101, 100)])
def test_a_cut_of_the_log_forgets_queues_that_were_further(tmp_path: Path, log_end: int, left: int) -> None:
    checkpoint = Checkpoint(tmp_path / "checkpoint")
    checkpoint.logics_physical_offset = 100
    checkpoint.save()
    checkpoint.before_cut(log_end)
    again = Checkpoint(checkpoint.path)
    again.load()
    assert again.logics_physical_offset == left
