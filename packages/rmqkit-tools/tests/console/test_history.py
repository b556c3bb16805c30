"""Figures over time: how blocks are stored, resolutions, the cap, a kill, a damaged file; and what charts show."""

from __future__ import annotations

import asyncio
import itertools
import lzma
import re
import shutil
import sqlite3
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.admin import Admin
from rmqkit.admin.cluster.clusters import BrokerRow
from rmqkit.admin.diagnosis.health import BrokerState, GroupState, Snapshot, TopicState
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.console import Console
from rmqkit.console.html.charts import Line, Mark, line_chart, sparkline
from rmqkit.console.views import history as history_view
from rmqkit.console.watch import history
from rmqkit.console.watch.figures import FIGURES, values_of
from rmqkit.console.watch.history import DAY_MS, HOUR_MS, History, packed, unpacked
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.brokers import HaConnectionInfo, HaRuntimeInfo
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.standalone import Standalone
from tests.admin.things import send
from tests.console.asgi import Browser
from tests.console.inside import oldest_of, rows_of
from tests.console.test_pages import shop

START = 1_800_000_000_000 - 1_800_000_000_000 % DAY_MS


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power is cut here, and a disk that many share takes long."""
    monkeypatch.setattr(history, "SYNCHRONOUS", "OFF")
    monkeypatch.setattr(history, "LOCK_S", 0.01)


class At:
    """A clock that stands where it is put."""

    def __init__(self, now_ms: int = START) -> None:
        self.ms = now_ms

    def now_ms(self) -> int:
        return self.ms

    def monotonic_ms(self) -> float:
        return float(self.ms)


# -- blocks


def stored(slots: int, **series: list[int]) -> bytes:
    """A chunk with series at places given by their names."""
    chunk = array("q", [history.MISSING]) * (slots * 64)
    for name, values in series.items():
        place = int(name[1:])
        chunk[place * slots : (place + 1) * slots] = array("q", values)
    return packed(chunk)


def test_a_chunk_is_an_xz_stream_of_all_its_slots() -> None:
    plain = lzma.decompress(stored(2, s0=[1000, 1001], s63=[-2, 0]))
    values = array("q", plain)
    assert (len(values), list(values[:2]), list(values[-2:])) == (128, [1000, 1001], [-2, 0])
    assert set(values[2:-2]) == {history.MISSING}


def test_a_figure_that_stays_costs_next_to_nothing() -> None:
    assert len(packed(array("q", [5]) * (60 * 64))) <= 2 * 64


@given(st.lists(st.integers(-2, 1 << 61), min_size=1, max_size=96), st.integers(0, 63))
def test_a_block_comes_back(values: list[int], place: int) -> None:
    slots, other = len(values), (place + 1) % 64
    chunk = unpacked(stored(slots, **{f"s{place}": values}), slots)
    assert list(chunk[place * slots : (place + 1) * slots]) == values
    assert list(chunk[other * slots : (other + 1) * slots]) == [history.MISSING] * slots


WHOLE = stored(60, s3=list(range(60)))


@given(
    st.binary(max_size=40)
    | st.binary(max_size=9).map(lzma.compress)
    | st.integers(0, len(WHOLE) - 1).map(lambda at: WHOLE[:at])
    | st.integers(0, len(WHOLE) - 1).map(lambda at: WHOLE[:at] + bytes([WHOLE[at] ^ 0x55]) + WHOLE[at + 1 :])
)
def test_a_damaged_chunk_is_an_error_of_its_own(damaged: bytes) -> None:
    try:
        assert unpacked(damaged, 60) == unpacked(WHOLE, 60), "a checksum covers the slots"
    except ValueError:
        pass


# -- a file


@asynccontextmanager
async def opened(path: Path | None, clock: At) -> AsyncIterator[History]:
    found = History(path, clock)
    await found.open()
    try:
        yield found
    finally:
        await found.close()


async def test_resolutions_unknown_and_gaps(tmp_path: Path) -> None:
    clock = At()
    async with opened(tmp_path / "h", clock) as kept:
        for second in range(0, 600, 10):
            clock.ms = START + second * 1000
            kept.put(clock.ms, "lag", "billing", second, is_fine=True)
        clock.ms = START + 600_000
        kept.put(clock.ms, "lag", "billing", history.UNKNOWN, is_fine=True)
        clock.ms = START + 1_200_000  # the console was away for ten minutes
        kept.put(clock.ms, "lag", "billing", 5, is_fine=True)
        step, points = await kept.read("lag", "billing", START, clock.ms)
        assert step == 10_000
        assert points[:3] == [(START, 0), (START + 10_000, 10), (START + 20_000, 20)]
        assert points[-2:] == [(START + 600_000, None), (START + 1_200_000, 5)]
        clock.ms = START + 7 * HOUR_MS
        step, points = await kept.read("lag", "billing", START, clock.ms)
        assert (step, points[:2]) == (60_000, [(START, 50), (START + 60_000, 110)])  # the last of each minute
        clock.ms = START + 8 * DAY_MS
        step, points = await kept.read("lag", "billing", START, clock.ms)
        assert (step, points) == (900_000, [(START, 590), (START + 900_000, 5)])  # the highest of each quarter
        assert (await kept.read("lag", "nobody", START, clock.ms))[1] == []


async def test_the_last_hour_is_read_from_memory_over_the_end_of_a_block(tmp_path: Path) -> None:
    clock = At()
    async with opened(tmp_path / "h", clock) as kept:
        for minute in range(30, 75):  # the block of the first hour ends at minute 60
            clock.ms = START + minute * 60_000
            kept.put(clock.ms, "put", "Orders", -1 if minute == 50 else 100 * minute)
            if minute == 62:
                await kept.write(clock.ms)
        found = kept.last_hour("put", "Orders")
        assert len(found) == 60
        assert found[:15] == [None] * 15
        assert found[15:] == [None if minute == 50 else float(minute) for minute in range(30, 75)]
        assert kept.last_hour("put", "Other") == [None] * 60
        clock.ms = START + 3 * HOUR_MS
        kept.put(clock.ms, "put", "Orders", 700)
        assert kept.last_hour("put", "Orders") == [None] * 59 + [7.0], "a gap of hours is not closed"


async def test_time_in_which_nobody_asked_breaks_the_line() -> None:
    clock = At()
    async with opened(None, clock) as kept:
        for minute in (0, 1, 2, 20, 21):
            clock.ms = START + minute * 60_000
            kept.put(clock.ms, "lag", "g", minute)
        _, points = await kept.read("lag", "g", START, clock.ms)
        values = [value for _, value in points]
        assert values == [0, 1, 2, None, 20, 21]


async def test_a_console_that_ends_continues_where_it_was(tmp_path: Path) -> None:
    clock = At()
    for round_ in range(3):
        async with opened(tmp_path / "h", clock) as kept:
            for minute in range(10):
                clock.ms = START + (10 * round_ + minute) * 60_000
                kept.put(clock.ms, "lag", "g", 100 * round_ + minute)
    async with opened(tmp_path / "h", clock) as kept:
        _, points = await kept.read("lag", "g", START, clock.ms)
        assert [value for _, value in points] == [100 * (n // 10) + n % 10 for n in range(30)]
        assert kept.names("lag") == ["g"]
        assert kept.trouble == ""


async def test_a_kill_loses_what_was_not_written(tmp_path: Path) -> None:
    """A kill leaves the file and its log as they are at that moment."""
    clock = At()
    async with opened(tmp_path / "h", clock) as kept:
        for minute in range(8):
            clock.ms = START + minute * 60_000
            kept.put(clock.ms, "lag", "g", minute)
            if minute == 4:
                await kept.write(clock.ms)
        for file in sorted(tmp_path.glob("h*")):  # noqa: ASYNC240
            shutil.copy(file, tmp_path / file.name.replace("h", "killed", 1))
    async with opened(tmp_path / "killed", clock) as kept:
        _, points = await kept.read("lag", "g", START, START + 480_000)
        assert [value for _, value in points] == [0, 1, 2, 3, 4]
        assert kept.trouble == ""


async def test_ninety_days_stay_within_the_cap(tmp_path: Path) -> None:
    """5 series that change all the time, and a cap that they are over; `measure_history` does it at full size."""
    clock, series = At(), 5
    async with opened(tmp_path / "h", clock) as kept:
        kept.bytes_max = history.ROOM_BYTES + (56 << 10)
        largest = 0
        for hour in range(2, 90 * 24, 3):
            for quarter in range(4):
                clock.ms = START + hour * HOUR_MS + quarter * 900_000
                for number in range(series):
                    kept.put(clock.ms, "lag", f"g{number}", (hour * 7919 + quarter * 104_729 + number * 31) % 1_000_000)
            if hour % 24 == 23:
                await kept.write(clock.ms)
                largest = max(largest, (tmp_path / "h").stat().st_size)
        assert largest <= 120 << 10
        assert len(kept.levels[0].current) == 0
        assert [len(level.finished) for level in kept.levels] == [0, 0, 0]
        (minutes, _), (quarters, _) = await oldest_of(kept)
        assert clock.ms - 3 * DAY_MS < minutes < clock.ms - DAY_MS  # they went first, until a day was left
        assert START < quarters < START + 40 * DAY_MS
        assert (await kept.kept()).oldest_ms == quarters
        _, points = await kept.read("lag", "g3", clock.ms - 6 * HOUR_MS, clock.ms)
        assert [value for _, value in points if value is not None][-1:] == [
            (hour * 7919 + 3 * 104_729 + 3 * 31) % 1_000_000
        ]
        assert kept.trouble == ""


async def test_old_blocks_go_when_their_time_is_over(tmp_path: Path) -> None:
    clock = At()
    async with opened(tmp_path / "h", clock) as kept:
        kept.put(clock.ms, "lag", "g", 1, is_fine=True)
        await kept.write(clock.ms)
        for days, steps in ((0.3, {60_000, 900_000}), (7.1, {900_000}), (92, set())):
            clock.ms = START + int(days * DAY_MS)
            kept.put(clock.ms, "lag", "other", 1)
            await kept.write(clock.ms)
            rows = await rows_of(kept, "SELECT step FROM block WHERE start = ?", START)
            assert {step for (step,) in rows} == steps
        clock.ms += DAY_MS
        kept.put(clock.ms, "lag", "other", 1)
        await kept.write(clock.ms)
        assert kept.names("lag") == ["other"]  # nothing of the other name is left


async def test_a_clock_that_steps_back_overwrites_nothing(tmp_path: Path) -> None:
    clock = At()
    async with opened(tmp_path / "h", clock) as kept:
        for hour, minute in ((0, 1), (0, 2), (3, 0), (0, 3), (0, 4)):
            clock.ms = START + hour * HOUR_MS + minute * 60_000
            kept.put(clock.ms, "lag", "g", 10 * hour + minute)
            await kept.write(clock.ms)
        _, points = await kept.read("lag", "g", START, START + HOUR_MS)
        assert [value for _, value in points] == [1, 2, 3, 4]


@pytest.mark.parametrize("where", ["head", "middle"])
async def test_a_damaged_file_is_kept_aside_and_said(tmp_path: Path, where: str) -> None:
    path, clock = tmp_path / "h", At()
    async with opened(path, clock) as kept:
        for number in range(500):
            kept.put(clock.ms, "lag", f"group-{number}", number)
    whole = bytearray(path.read_bytes())
    at = 0 if where == "head" else 4096
    whole[at : at + 4096] = bytes(range(256)) * 16
    path.write_bytes(whole)
    async with opened(path, clock) as kept:
        assert "was damaged" in kept.trouble
        (aside,) = tmp_path.glob("h.damaged-*")  # noqa: ASYNC240
        assert aside.read_bytes()[at + 100 : at + 4096] == bytes(whole)[at + 100 : at + 4096]
        kept.put(clock.ms, "lag", "g", 3)
        await kept.write(clock.ms)
        assert (await kept.read("lag", "g", START, clock.ms))[1] == [(START, 3)]


async def test_damage_that_shows_later_is_kept_aside_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, clock = tmp_path / "h", At()
    async with opened(path, clock) as kept:
        kept.put(clock.ms, "lag", "g", 3)
        await kept.write(clock.ms)

        def broken(*_: object) -> None:
            error = sqlite3.DatabaseError("database disk image is malformed")
            error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise error

        with monkeypatch.context() as now:
            now.setattr(kept, "_store", broken)
            await kept.write(clock.ms)
        assert "was damaged" in kept.trouble
        assert len(list(tmp_path.glob("h.damaged-*"))) == 1  # noqa: ASYNC240
        await kept.write(clock.ms)  # what is in memory goes into the new file
    async with opened(path, clock) as kept:
        assert (await kept.read("lag", "g", START, clock.ms))[1] == [(START, 3)]


async def test_a_second_console_keeps_its_figures_in_memory(tmp_path: Path) -> None:
    clock = At()
    async with opened(tmp_path / "h", clock) as first:
        first.put(clock.ms, "lag", "g", 3)
        await first.write(clock.ms)
        async with opened(tmp_path / "h", clock) as second:
            assert "locked" in second.trouble
            second.put(clock.ms, "lag", "g", 4)
            assert (await second.read("lag", "g", START, clock.ms))[1] == [(START, 4)]
            assert (await second.kept()).file == ""
        assert not list(tmp_path.glob("h.damaged-*"))  # noqa: ASYNC240


async def test_series_are_bounded() -> None:
    clock = At()
    async with opened(None, clock) as kept:
        kept.put(clock.ms, "put", "first", 1)
        for number in range(history.SERIES_MAX - 1):
            kept.levels[1].current["put", str(number)] = array("q")
        assert not kept.put(clock.ms, "put", "one more", 1)
        await kept.follow(Snapshot(at_ms=clock.ms, topics={"t": TopicState(name="t", in_tps=1.0)}))
        assert "more than 20,000 series" in kept.trouble


async def test_a_series_begins_with_its_first_known_figure() -> None:
    clock = At()
    async with opened(None, clock) as kept:
        for in_tps in (None, 2.0, None):
            await kept.follow(Snapshot(at_ms=clock.ms, topics={"t": TopicState(name="t", in_tps=in_tps)}))
            assert kept.names("put") == ([] if clock.ms == START else ["t"])
            clock.ms += 60_000
        _, points = await kept.read("put", "t", START, clock.ms)
        assert points == [(START + 60_000, 2.0), (START + 120_000, None)]


async def test_many_figures_are_kept_in_many_turns() -> None:
    topics = {str(number): TopicState(name=str(number), in_tps=1.0) for number in range(3 * history.STEP)}
    async with opened(None, At()) as kept:
        following = asyncio.create_task(kept.follow(Snapshot(at_ms=START, topics=topics)))
        turns = 0
        while not following.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns >= 3
        assert len(kept.names("put")) == len(topics)


# -- figures of a snapshot


def snapshot(
    at_ms: int = START, *, trouble: str = "", lag: int | None = 5, disk: float = 0.5, diff: int = 7
) -> Snapshot:
    """A broker with a slave, a group, a topic."""
    row = BrokerRow(cluster_name="c", broker_name="b", broker_id=0, addr="10.0.0.1:1", disk_ratio=disk, in_tps=1.25)
    slave = HaConnectionInfo(addr="10.0.0.2:40001", diff=diff, in_sync=diff < 100)
    state = BrokerState(
        row=row,
        figures={"bootTimestamp": "1000", "timerReadBehind": "3"},
        ha=HaRuntimeInfo(master=True, ha_connection_info=[slave]),
        trouble=trouble,
        since_ms=at_ms,
        half_since_ms=at_ms - 9_000,
    )
    group = GroupState(
        name="g", lag=lag, behind_since_ms=at_ms - 4_000, members=0, dead=2, dead_grew=0,
        configs={"b": SubscriptionGroupConfig(group_name="g")},
    )  # fmt: skip
    topic = TopicState(name="t", brokers=["b"], in_tps=2.5)
    return Snapshot(at_ms=at_ms, brokers=[state], groups={"g": group}, topics={"t": topic})


def test_figures_of_a_snapshot() -> None:
    found = {(figure, name): value for figure, name, value in values_of(snapshot())}
    assert found == {
        ("disk", "b"): 0.5, ("boot", "b"): 1000, ("in", "b"): 1.25, ("out", "b"): 0.0, ("timer", "b"): 3.0,
        ("half", "b"): 9.0,
        ("unsynced", "b"): 0, ("slave", "b@10.0.0.2"): 7, ("lag", "g"): 5, ("age", "g"): 4.0, ("dead", "g"): 2,
        ("members", "g"): 0, ("offline", "g"): 1.0, ("put", "t"): 2.5,
    }  # fmt: skip


def test_the_slave_with_the_most_missing_bytes_counts_for_its_host() -> None:
    several = snapshot()
    assert several.brokers[0].ha is not None
    several.brokers[0].ha.ha_connection_info = [
        HaConnectionInfo(addr=f"10.0.0.{host}:{port}", diff=diff)
        for host, port, diff in ((2, 40001, 5), (2, 40002, 9), (3, 40003, 11), (2, 40004, 7))
    ]
    found = {name: value for figure, name, value in values_of(several) if figure == "slave"}
    assert found == {"b@10.0.0.2": 9, "b@10.0.0.3": 11}


def test_what_a_silent_broker_reported_last_is_unknown() -> None:
    found = {(figure, name): value for figure, name, value in values_of(snapshot(trouble="no answer within 3 s"))}
    silent = {key for key, value in found.items() if value is None}
    assert silent >= {("disk", "b"), ("in", "b"), ("lag", "g"), ("age", "g"), ("dead", "g"), ("put", "t")}
    assert ("slave", "b@10.0.0.2") not in found
    asked = snapshot()
    asked.troubles["lags of b"] = "no answer within 3 s"
    assert {figure: value for figure, _, value in values_of(asked)}["lag"] is None


def test_a_figure_that_is_no_number_is_unknown() -> None:
    odd = snapshot()
    odd.brokers[0].row.in_tps, odd.brokers[0].row.out_tps = float("nan"), float("inf")
    odd.groups["g"].lag = 1 << 80
    found = {figure: value for figure, _, value in values_of(odd)}
    assert (found["in"], found["out"], found["lag"]) == (None, None, None)


async def test_a_console_that_ends_at_once_overwrites_nothing(tmp_path: Path) -> None:
    clock = At()
    async with opened(tmp_path / "h", clock) as kept:
        kept.put(clock.ms, "lag", "g", 3)
    clock.ms += 60_000
    brief = History(tmp_path / "h", clock)
    brief.start()
    await asyncio.sleep(0)
    brief.put(clock.ms, "lag", "g", 4)
    await brief.close()
    async with opened(tmp_path / "h", clock) as kept:
        assert (await kept.read("lag", "g", START, clock.ms))[1][0] == (START, 3)


def test_axes_end_at_figures_that_can_be_halved() -> None:
    tops = {name: [FIGURES[name].top(value) for value in (0, 1, 3, 70, 5_000)] for name in ("lag", "age", "slave")}
    assert tops["lag"] == [2, 2, 4, 100, 10_000]
    assert tops["age"] == [10, 10, 10, 120, 7200]
    assert tops["slave"] == [1024, 1024, 1024, 1024, 8192]
    assert FIGURES["age"].top(200_000) == 4 * 86_400


def test_a_chart_breaks_where_it_knows_nothing_and_marks_what_happened() -> None:
    points = [
        (START, 1.0),
        (START + 60_000, 2.0),
        (START + 120_000, None),
        (START + 300_000, 3.0),
        (START + 360_000, 1),
    ]
    known = FIGURES["lag"]
    text = line_chart(
        known.title, known.unit, [Line("<g>", points)], known.show, top_of=known.top, span=(START, START + HOUR_MS),
        marks=[Mark(START + 240_000, "b started")],
    )  # fmt: skip
    assert text.count("<polyline") == 2
    assert 'class="mark"' in text
    assert "00:04:00 UTC: b started" in text
    assert "&lt;g&gt;" in text
    assert "01:00:00 UTC" in text


def test_a_small_line_is_broken_where_it_knows_nothing() -> None:
    drawn = str(sparkline([None, 1.0, 2.0, None, 3.0, None, 0.0, 4.0]))
    assert re.findall(r'points="([^"]*)"', drawn) == ["0,11.5 1,8.0", "5,15.0 6,1.0"]
    assert 'viewBox="0 0 6 16"' in drawn and 'aria-hidden="true"' in drawn
    assert sparkline([None, 1.0, None]) == sparkline([]) == ""
    assert 'points="0,15.0 1,15.0"' in sparkline([0.0, 0.0])


async def test_lists_draw_the_last_hour_and_a_group_has_the_spread_of_its_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with shop(tmp_path) as (_, _, browser):
        assert (await browser.json("/local/groups/billing"))["ageShares"] is None, "too few samples"
        monkeypatch.setattr(history_view, "SAMPLES_MIN", 4)
        await asyncio.sleep(360)  # nobody looks: a sample a minute
        for path in ("topics", "groups"):
            page = (await browser.get(f"/local/{path}")).text
            assert page.count('<svg class="spark"') == 1, path
        half, most, all_ = (await browser.json("/local/groups/billing"))["ageShares"]
        assert 60 < half < most <= all_ < 600


def test_an_axis_leaves_room_for_its_longest_text() -> None:
    lefts = []
    for highest in (5.0, 900_000.0):
        line = Line("vm", [(START, 0.0), (START + HOUR_MS, highest)])
        text = line_chart("In", "messages", [line], "{:,.0f}".format, top_of=lambda value: value)
        (left,) = re.findall(r'data-left="(\d+)"', text)
        assert f'points="{left}.0,' in text
        lefts.append(int(left))
    assert lefts[0] < 60 < lefts[1]


# -- a cluster


async def test_lag_over_a_restart_of_console_and_broker(tmp_path: Path) -> None:
    """The line has one hole, the time in which they were down, and ends at what the command line says."""
    holes: list[tuple[int, int]] = []
    path = "/local/history/lag/billing"
    for turn in range(2):
        async with Standalone(tmp_path / "store") as both, Admin(both.namesrv_address) as admin:
            if turn == 0:
                await admin.topics.create("Orders", read_queues=1, write_queues=1)
                await admin.groups.update("billing", {})
                await send(admin, *(Message(topic="Orders", body=b"x") for _ in range(8)))
                await admin.offsets.reset("billing", "Orders", 0)
            async with Console({"local": both.namesrv_address}, state=tmp_path / "state") as console:
                browser = Browser(console)
                await asyncio.sleep(90)  # nobody looks: it asks once a minute
                values = await browser.json(path)
                assert values["trouble"] == ""
                progress = await admin.groups.progress("billing")
                assert values["points"][-1][1] == progress.diff_total == 8 + 3 * turn
                if turn == 0:
                    await send(admin, *(Message(topic="Orders", body=b"x") for _ in range(3)))
                    down = SYSTEM_CLOCK.now_ms()
        if turn == 0:
            await asyncio.sleep(600)
    at = [at for at, value in values["points"] if value is not None]
    holes = [(one, other) for one, other in itertools.pairwise(at) if other - one > history.GAP_MS]
    assert len(holes) == 1
    begin, end = holes[0]
    assert down - 80_000 <= begin <= down
    assert 590_000 <= end - down <= 610_000  # a point stands at the beginning of its 10 s
    assert [value for _, value in values["points"]].count(None) == 1
    assert any("started" in one["text"] for one in values["marks"])


def modes_in(folder: Path) -> set[int]:
    return {file.stat().st_mode & 0o777 for file in folder.iterdir()}


async def test_the_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    (tmp_path / "h").touch(0o644)
    async with opened(tmp_path / "h", At()):
        assert modes_in(tmp_path) == {0o600}
