"""Files of a broker's log, what expires, and when a disk is full."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit import Message, Producer
from rmqkit.admin import Admin
from rmqkit.admin.cluster.stores import Segment, forecast, segments, store_of, usable
from rmqkit.cli.admin import servers as command
from rmqkit.standalone import Standalone
from rmqkit.store.offline import check
from rmqkit.store.settings import StoreSettings
from tests.admin.test_waiting import printed

HOUR_MS = 3_600_000
NOW_MS = 1_800_000_000_000
FIGURES = {
    "commitLogMinOffset": "1024",
    "commitLogMaxOffset": "2500",
    "earliestMessageTimeStamp": str(NOW_MS - HOUR_MS),
    "commitLogDirCapacity": "Total : 100.0 GiB, Free : 60.0 GiB.",
    "commitLogDiskRatio": "0.4",
    "putTps": "90.0 80.0 1024.0",
    "putMessageAverageSize": "1024.0",
}
CONFIG = {
    "mappedFileSizeCommitLog": "1024",
    "fileReservedTime": "72",
    "deleteWhen": "04",
    "diskMaxUsedSpaceRatio": "70",
}


def test_segments_between_two_offsets() -> None:
    assert segments(1500, 3072, 1024) == [
        Segment(name="00000000000000001024", bytes=548),
        Segment(name="00000000000000002048", bytes=1024),
    ]
    assert segments(0, 0, 1024) == []


@pytest.mark.parametrize(
    ("total", "free", "ratio", "size", "left"),
    [
        (475, 199, 0.875, 315, 39),  # 276 are used, which is 87.5 % of what is not kept for root
        (100, 60, 0.4, 100, 60),
        (100, 60, 0.39, 100, 60),  # a share that does not fit
        (100, 60, None, 100, 60),
        (100, 60, 0.0, 100, 60),
        (100, 100, 1.0, 100, 100),
    ],
)
def test_what_only_root_may_use_is_not_free(total: int, free: int, ratio: float | None, size: int, left: int) -> None:
    assert usable(total, free, ratio) == (size, left)


def test_free_and_used_and_the_forecast_agree() -> None:
    figures = FIGURES | {"commitLogDirCapacity": "Total : 475.0 GiB, Free : 199.0 GiB.", "commitLogDiskRatio": "0.875"}
    found = store_of("a", "x:1", figures, CONFIG, NOW_MS)
    assert found.disk_bytes is not None
    assert found.free_bytes is not None
    assert abs(1 - found.free_bytes / found.disk_bytes - 0.875) < 1e-6
    assert found.free_bytes < 40 << 30
    assert found.full is not None
    assert found.full.at_ms - NOW_MS < 9 * 1024 * 1000, "2.5 % of 315 GiB at 1 MiB/s"


def test_a_store_from_figures_and_settings() -> None:
    found = store_of("a", "x:1", FIGURES, CONFIG, NOW_MS)
    assert (found.segment_count, [one.bytes for one in found.segments]) == (2, [1024, 452])
    assert (found.oldest_ms, found.expires_ms) == (NOW_MS - HOUR_MS, NOW_MS + 71 * HOUR_MS)
    assert [(one.setting, one.ratio) for one in found.limits] == [
        ("diskMaxUsedSpaceRatio", 0.7),
        ("diskSpaceCleanForciblyRatio", 0.85),
        ("diskSpaceWarningLevelRatio", 0.9),
    ]
    assert found.put_bytes == 1 << 20
    assert found.full is not None
    assert found.full.at_ms == NOW_MS + 50 * 1024 * 1000  # 50 GiB at 1 MiB/s


@pytest.mark.parametrize("figures", [{}, {"commitLogMinOffset": "x", "putTps": "nan", "commitLogDiskRatio": ""}])
def test_what_a_broker_does_not_report_is_unknown(figures: dict[str, str]) -> None:
    found = store_of("a", "x:1", figures, {}, NOW_MS)
    assert (found.segment_count, found.oldest_ms, found.disk_bytes, found.put_bytes, found.full) == (None,) * 5
    assert [one.ratio for one in found.limits] == [0.75, 0.85, 0.9]


@given(st.floats(0.05, 0.6), st.floats(0.04, 0.25), st.integers(24, 1_500), st.integers(0, 1 << 32), st.booleans())
def test_a_forecast_is_right_within_a_tenth(start: float, grown: float, count: int, seed: int, rounded: bool) -> None:
    """A disk fills at a known rate for a day. Its figures are whole percents, as brokers report them, or have noise."""
    rng, step_ms = random.Random(seed), 24 * HOUR_MS // count
    points: list[tuple[int, float | None]] = []
    for number in range(count):
        used = start + grown * number / count
        told = math.ceil(used * 100) / 100 if rounded else used + rng.gauss(0, grown / 200)
        points.append((NOW_MS - (count - number) * step_ms, None if rng.random() < 0.1 else told))
    found = forecast(points, 0.9, NOW_MS)
    assert found is not None
    true_ms = (0.9 - start - grown) / grown * 24 * HOUR_MS
    assert abs(found.at_ms - NOW_MS - true_ms) <= 0.1 * true_ms


@pytest.mark.parametrize(
    "values",
    [
        [],
        [0.5] * 5,
        [0.5] * 100,
        [0.6 - number / 1000 for number in range(100)],
        [0.5, 0.51] * 50,
        [None] * 100,
        [0.95 + number / 10_000 for number in range(100)],
    ],
)
def test_a_disk_that_does_not_fill_has_no_forecast(values: list[float | None]) -> None:
    points = [(NOW_MS + number * 60_000, value) for number, value in enumerate(values)]
    assert forecast(points, 0.9, NOW_MS + 100 * 60_000) is None


async def test_segments_are_those_of_rmq_store_stat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = StoreSettings(commit_log_file_bytes=64 << 10)
    async with Standalone(tmp_path, store=settings) as both, Admin(both.namesrv_address) as admin:
        await admin.topics.create("Orders", read_queues=1, write_queues=1)
        async with Producer("p", both.namesrv_address) as producer:
            for _ in range(60):
                await producer.send(Message(topic="Orders", body=b"x" * 4000))
        (found,) = await admin.stores.of()
        view = await command.store(admin)
    stat = check.stat(tmp_path, settings)
    assert (found.segment_count, found.min_offset, found.oldest_ms) == (
        stat.segments,
        stat.min_offset,
        stat.first_store_timestamp,
    )
    assert found.segment_count == len(found.segments) > 2
    assert 0 <= stat.max_offset - (found.max_offset or 0) < 4096  # what the broker wrote for itself when it stopped
    text, _ = printed(view, capsys)
    assert "segments" in text and "messages are refused" in text
