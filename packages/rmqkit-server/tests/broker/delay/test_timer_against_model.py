"""The timer against a model of dictionaries, under random times, recalls, clocks that are set, kills and restarts.

The model knows when each message is due and whether it was delivered. A message is delivered once, not before its time,
and in the order of times. A recalled message is not delivered. If the clock is set back, waiting messages wait longer
and no message is repeated. While the broker runs, a step back of less than five seconds changes nothing, and a message
for a time that was reached already is delivered at once. A start always continues at the present time.

A kill leaves the files unchanged (the page cache survives the process). It takes the timer back to the state that was
last written. Each record of the timer topic that was stored or delivered since then may be delivered again, and no
message is lost. A message that waits for longer than the roll window has a record for each stage, and after a kill each
of them leads to a delivery. So it may be repeated as often as it has records from after the written state.

The tests recall only messages that are due within the roll window. A message with a longer delay is put into the timer
topic again after each window, and so is its marker. If the clock jumps past that point and past the delivery time, the
message is delivered at once, as by Apache's broker, and after messages that were due later. After the clock was set
back, a start may find a message and its marker outside the roll window, although they were within the window before.
After a kill, the timer jumps from the time of the written state to the present time.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rmqkit.protocol.names import TIMER_TOPIC
from rmqkit.testing.clock import StandingClock
from tests.broker.timed import STEP_MS, Timed
from tests.examples import examples
from tests.store.stores import read_all
from tests.virtual_world import VirtualWorld

WINDOW_SLOTS = 40
SET_BACK_MS = 5000
STAGE_MS_MIN = WINDOW_SLOTS // 3 * STEP_MS
"""A step of the clock by this time does not pass both the end of a stage and the time of the message."""


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmqkit.system.disk.sync_data", lambda fd: None)
    monkeypatch.setattr("rmqkit.system.disk.sync_file", lambda fd: None)


class TimerMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.clock = StandingClock()
        self.world = VirtualWorld(0).__enter__()
        self.generation = self.count = 0
        self.waiting: dict[str, int] = {}
        self.live: Counter[str] = Counter()
        self.written: tuple[Counter[str], Counter[str]] = Counter(), Counter()
        self.rolled: set[str] = set()
        self.overtaken: set[str] = set()
        self.recalled: dict[str, int] = {}
        self.reached_ms = self.written_ms = self.clock.ms
        self.read = 0
        self.start()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self.world.run(work)

    def start(self) -> None:
        async def start() -> None:
            self.timed = Timed(
                self.folder / str(self.generation),
                clock=self.clock,
                timer_roll_window_slots=WINDOW_SLOTS,
                flush_interval_ms=3_600_000,
                queue_flush_interval_ms=3_600_000,
            )
            self.timed.timer.load()
            self.timed.store.open()
            self.timed.timer.recover()
            self.timed.timer.start()
            await self.timed.until(self.is_quiet)

        # The wheel of an earlier process may be lost. Then the messages are sorted by the present time.
        self.reached_ms = self.clock.ms
        self.rolled |= {key for key, at_ms in (self.waiting | self.recalled).items() if not self.is_in_window(at_ms)}
        self.run(start())

    def teardown(self) -> None:
        self.timed.timer.stop()
        self.timed.store.close()
        self.timed.timer.state.files.close()
        self.world.__exit__()
        shutil.rmtree(self.folder)

    def is_quiet(self) -> bool:
        timer = self.timed.timer
        return timer.read_behind_ms == 0 and timer.offset_behind == 0 and not timer.state.needs_survey

    def due(self, at_ms: float) -> int:
        """Return the time at which a message for ``at_ms`` is delivered: the end of its slot."""
        return -int(-at_ms // STEP_MS) * STEP_MS

    # ---- rules

    @rule(ahead_ms=st.sampled_from([1, 15, 100, 395, 405, 1500]))
    def schedule(self, ahead_ms: int) -> None:
        self.count += 1
        key = f"k{self.count}"
        at_ms = int(self.clock.ms) + ahead_ms

        async def put() -> None:
            self.timed.put(key.encode(), TIMER_DELIVER_MS=at_ms, UNIQ_KEY=key)
            await self.timed.until(self.is_quiet)

        self.run(put())
        self.waiting[key] = at_ms
        self.live[key] = 1
        if not self.is_in_window(at_ms):
            self.rolled.add(key)

    def is_in_window(self, at_ms: int) -> bool:
        return at_ms - self.reached_ms < (WINDOW_SLOTS - 1) * STEP_MS

    @property
    def recallable(self) -> list[str]:
        return sorted(
            key
            for key, at_ms in self.waiting.items()
            if key not in self.rolled
            and at_ms > self.clock.ms  # a marker of the past is refused
            and self.due(at_ms) > self.reached_ms
            and self.is_in_window(at_ms)
        )

    @precondition(lambda self: self.recallable)
    @rule(data=st.data())
    def recall(self, data: st.DataObject) -> None:
        self.recall_one(data.draw(st.sampled_from(self.recallable)))

    def recall_one(self, key: str) -> None:
        at_ms = self.waiting.pop(key)

        async def put() -> None:
            self.timed.put(b"marker", TIMER_DELIVER_MS=at_ms, UNIQ_KEY="m" + key, TIMER_DEL_UNIQKEY="T+" + key)
            await self.timed.until(self.is_quiet)

        self.run(put())
        self.recalled[key] = at_ms

    @rule(ms=st.sampled_from([1, 10, 95, 400, 3000]))
    def pass_time(self, ms: int) -> None:
        self.set_clock(ms)

    @rule(ms=st.sampled_from([40, 800, 6000, 20_000]))
    def set_clock_back(self, ms: int) -> None:
        self.set_clock(-ms)

    def set_clock(self, ms: int) -> None:
        before_ms = self.clock.ms

        async def go_on() -> None:
            self.clock.ms += ms
            is_far_back = self.clock.ms < self.reached_ms - SET_BACK_MS - STEP_MS
            self.reached_ms = self.clock.ms if is_far_back else max(self.reached_ms, self.clock.ms)
            await asyncio.sleep(1.1)  # of the loop, as long as the timer sleeps at most
            await self.timed.until(self.is_quiet)

        self.run(go_on())
        self.jump_from(before_ms)

    def jump_from(self, before_ms: float) -> None:
        """Note the messages that are overtaken because the timer jumps from a time to the present time."""
        if self.clock.ms - before_ms > STAGE_MS_MIN:
            times = {key: at_ms for key, at_ms in (self.waiting | self.recalled).items() if key in self.rolled}
            self.overtaken |= {key for key, at_ms in times.items() if before_ms < self.due(at_ms) <= self.clock.ms}

    @property
    def records(self) -> Counter[str]:
        """The numbers of records in the timer topic by key. A message has one record for each of its stages."""
        return Counter([record.body.decode() for record in read_all(self.timed.store, TIMER_TOPIC, 0)])

    @rule()
    def write_state(self) -> None:
        self.run(self.timed.flushed())
        self.note_written()

    def note_written(self) -> None:
        self.written, self.written_ms = (self.live.copy(), self.records), self.clock.ms

    @rule()
    def restart(self) -> None:
        self.note_written()
        self.timed.timer.stop()
        self.timed.long_polling.close()
        self.timed.store.close()
        self.timed.timer.persist()
        self.start()

    @rule()
    def kill(self) -> None:
        before = self.timed.root
        live, records = self.written
        self.live = live + self.records - records
        self.jump_from(self.written_ms)
        self.timed.timer.stop()
        self.generation += 1
        shutil.copytree(before, self.folder / str(self.generation))
        self.timed.store.close()
        self.timed.timer.state.files.close()
        shutil.rmtree(before)
        self.start()

    # ---- what holds after each

    @invariant()
    def what_is_due_has_come(self) -> None:
        records = read_all(self.timed.store, "T", 1)
        new, self.read = records[self.read :], len(records)
        times: list[int] = []
        for record in new:
            key = record.body.decode()
            assert key not in self.recalled or key in self.overtaken, f"{key} was recalled"
            assert self.live[key], f"{key} is repeated"
            self.live[key] -= 1
            if key in self.waiting:
                due_ms = self.due(self.waiting.pop(key))
                assert due_ms <= self.reached_ms, f"{key} comes {due_ms - self.clock.ms} ms before its time"
                if key not in self.overtaken:
                    times.append(due_ms)
        late = [key for key, at_ms in self.waiting.items() if self.due(at_ms) <= self.clock.ms]
        assert not late, f"{late} are due and did not come"
        assert times == sorted(times)


TestTimer = TimerMachine.TestCase
TestTimer.settings = examples(12, stateful_step_count=15)


@pytest.fixture
def machine() -> Iterator[TimerMachine]:
    machine = TimerMachine()
    machine.begin()
    yield machine
    machine.teardown()


@pytest.mark.parametrize("is_on_wheel", [True, False], ids=["on the wheel", "not on the wheel"])
@pytest.mark.parametrize("away_ms", [300, 400, 3000])
def test_a_recall_holds_when_a_killed_broker_was_off_for_longer_than_the_window(
    is_on_wheel: bool, away_ms: int, machine: TimerMachine
) -> None:
    machine.schedule(395)
    if is_on_wheel:
        machine.schedule(100)
    machine.restart()
    if not is_on_wheel:
        machine.schedule(100)
    machine.recall_one("k2")
    machine.pass_time(away_ms)
    machine.what_is_due_has_come()
    machine.kill()
    machine.what_is_due_has_come()


def test_a_recall_holds_when_a_kill_loses_the_step_back_of_the_clock(machine: TimerMachine) -> None:
    machine.schedule(1)
    machine.write_state()
    machine.set_clock_back(6000)
    machine.schedule(1)
    machine.recall_one("k2")
    machine.pass_time(10)
    machine.kill()
    machine.what_is_due_has_come()


@pytest.mark.parametrize("ends", ["kill", "restart"])
@pytest.mark.parametrize("back_ms", [40, 3000, 6000])
def test_no_message_is_early_when_the_clock_is_set_back_before_a_start(
    back_ms: int, ends: str, machine: TimerMachine
) -> None:
    machine.schedule(1)
    machine.pass_time(10)
    machine.what_is_due_has_come()
    machine.write_state()
    machine.set_clock_back(6000)
    machine.pass_time(6000 - back_ms)
    machine.schedule(15)
    (machine.kill if ends == "kill" else machine.restart)()
    machine.what_is_due_has_come()
    machine.pass_time(back_ms)
    machine.what_is_due_has_come()
