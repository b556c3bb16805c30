"""A flush cycle of queues and index: the times that the checkpoint may have. Source: store.md §8.1, §13."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.store.flush import Flusher
from rmqkit.store.log.mapped_file import BytesLost
from tests.store.stores import small_settings

DISPATCHED_MS, DISPATCHED, DURABLE = 77, 500, 400
REFUSED = OSError(errno.EIO, "refused", "consumequeue/T/0")


class Parts:
    """A stand-in for the log, the queues, the index and the checkpoint. It records the order of their use."""

    def __init__(self, folder: Path) -> None:
        self.steps: list[Any] = []
        self.is_written = True
        self.error: OSError | None = None
        self.is_index_behind = False
        self.is_index_entered = True
        self.queues = SimpleNamespace(write_held=lambda: self.is_written, sync=self._sync)
        self.index = SimpleNamespace(
            directory=folder / "s/index",
            failure=None,
            is_behind=False,
            sync_full=lambda durable: ("full", durable),
            retry=lambda: self.is_index_entered,
            sync=lambda durable: self._sync(("index", durable)),
        )
        self.checkpoint = SimpleNamespace(reach=self._reach, save=lambda: self.steps.append("save"))
        self.flusher = self._made(self.index)

    def _made(self, index: Any) -> Flusher:
        parts: Any = self
        flusher = Flusher(
            SimpleNamespace(pool=None),  # type: ignore[arg-type]
            parts.queues,
            index,
            parts.checkpoint,
            small_settings(),
            SYSTEM_CLOCK,
            dispatched_timestamp=lambda: DISPATCHED_MS,
            dispatched_offset=lambda: DISPATCHED,
            on_durable=None,
            note_queues=lambda: self.steps.append("note"),
        )
        flusher.durable_offset = DURABLE
        return flusher

    def without_index(self) -> Flusher:
        return self._made(None)

    def _sync(self, what: Any) -> None:
        if self.error is not None:
            raise self.error
        self.steps.append(("sync", what))

    def _reach(self, **reached: Any) -> None:
        self.steps.append(reached)


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return Parts(tmp_path)


INDEX = {"index": ("full", DURABLE)}


def test_a_thorough_round_notes_the_queues_before_the_checkpoint_has_their_time(parts: Parts) -> None:
    parts.flusher.flush_queues()
    assert parts.steps == [("sync", 0), INDEX, "note", {"logics": DISPATCHED_MS}, "save"]
    assert parts.checkpoint.logics_physical_offset == DURABLE, (
        "the checkpoint does not cover messages that the log may lose"
    )


def test_the_checkpoint_claims_no_more_than_is_dispatched(parts: Parts) -> None:
    parts.flusher.durable_offset = DISPATCHED + 1
    parts.flusher.flush_queues()
    assert parts.checkpoint.logics_physical_offset == DISPATCHED


def test_without_an_index_the_rest_is_the_same(parts: Parts) -> None:
    parts.without_index().flush_queues()
    assert parts.steps == [("sync", 0), "note", {"logics": DISPATCHED_MS}, "save"]


def test_a_round_of_some_queues_leaves_their_time(parts: Parts) -> None:
    parts.flusher.flush_queues(4096)
    assert parts.steps == [("sync", 4096), INDEX, "save"]


def test_while_the_log_or_the_index_fails_the_time_of_queues_stays(parts: Parts) -> None:
    parts.flusher.failure = REFUSED
    parts.flusher.flush_queues()
    parts.flusher.failure = None
    parts.index.is_behind = True
    parts.flusher.flush_queues()
    assert parts.steps == [("sync", 0), INDEX, "save"] * 2


def test_nothing_is_claimed_while_held_entries_are_not_written(parts: Parts) -> None:
    parts.is_written = False
    parts.flusher.flush_queues()
    assert parts.steps == []


def test_a_refusal_is_logged_once_and_ends_with_the_next_good_round(
    parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    parts.error = REFUSED
    parts.flusher.flush_queues()
    assert len(caplog.records) == 1, "the first refusal is logged"
    parts.flusher.flush_queues()
    assert (parts.steps, parts.flusher.behind, parts.flusher.failure) == ([], REFUSED, None)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "consumequeue/T/0, so a start after a crash takes longer" in caplog.text
    parts.error = None
    parts.flusher.flush_queues()
    parts.flusher.flush_queues()
    assert parts.flusher.behind is None
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING]


def test_after_lost_bytes_nothing_is_flushed_any_more(parts: Parts) -> None:
    parts.error = BytesLost("consumequeue/T/0")
    parts.flusher.flush_queues()
    assert isinstance(parts.flusher.failure, BytesLost)
    parts.error = None
    parts.flusher.flush_queues()
    parts.flusher.flush_index()
    assert parts.steps == []


# -- the index at a stop


def test_a_stop_makes_the_index_durable(parts: Parts) -> None:
    parts.flusher.flush_index()
    assert (parts.steps, parts.flusher.behind) == ([("sync", ("index", DURABLE))], None)
    parts.without_index().flush_index()


@pytest.mark.parametrize(("is_entered", "is_behind"), [(False, False), (True, True), (False, True)])
def test_an_index_without_all_keys_is_named_with_the_command_that_rebuilds_it(
    is_entered: bool, is_behind: bool, parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    parts.is_index_entered, parts.index.is_behind = is_entered, is_behind
    parts.flusher.flush_index()
    assert parts.steps == []
    assert isinstance(parts.flusher.behind, OSError)
    assert "messages wait for the index" in caplog.text
    assert f"run: rmq store rebuild {parts.index.directory.parent} --index" in caplog.text


def test_the_cause_of_an_index_that_fails_is_kept(parts: Parts, caplog: pytest.LogCaptureFixture) -> None:
    parts.is_index_entered, parts.index.failure = False, REFUSED
    parts.flusher.flush_index()
    assert parts.flusher.behind is REFUSED
    parts.is_index_entered, parts.error = True, OSError(errno.ENOSPC, "full")
    parts.flusher.flush_index()
    assert parts.flusher.behind is parts.error
    assert "full" in caplog.text
