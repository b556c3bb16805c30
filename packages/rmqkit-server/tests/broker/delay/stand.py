"""A store and a timer that does not run by itself, on a clock that stands still."""

from __future__ import annotations

from rmqkit.broker.delay.timer import Timer
from rmqkit.broker.pull.long_polling import LongPolling
from rmqkit.protocol.names import TIMER_TOPIC
from rmqkit.store.message_store import MessageStore, PutStatus
from rmqkit.testing.clock import StandingClock
from tests.store.stores import message, read_all, small_settings
from tests.waiting import until

NOW_MS = 1_800_000_000_000
STEP_MS = 10


class Stand:
    """A store and the timer on it, which does not run, on a clock that stands still."""

    def __init__(self, root, clock=None, **settings):
        self.clock = clock or StandingClock(NOW_MS)
        defaults = {"timer_precision_ms": STEP_MS, "timer_delay_seconds_max": 1000, "timer_roll_window_slots": 6000}
        self.settings = small_settings(timer_log_file_bytes=536, **defaults | settings)
        self.store = MessageStore(root, self.settings, clock=self.clock)
        self.copied = -1
        self.timer = Timer(
            self.store,
            self.settings,
            LongPolling(self.clock),
            self.clock,
            flushes=False,
            copied_offset=lambda: self.copied,
        )
        self.state = self.timer.state
        self.timer.load()
        self.store.open()
        self.timer.recover()

    def keep(self, time_ms, topic="T", body=b"hello", **properties):
        """Store a message for a time in the timer topic."""
        values = {"REAL_TOPIC": topic, "REAL_QID": 1, "TIMER_OUT_MS": time_ms, **properties}
        put = self.store.put(message(TIMER_TOPIC, 0, body, **values))
        assert put.status is PutStatus.OK
        return put

    async def deliver(self, until_ms=float("inf")):
        """Deliver the messages of all seconds that are over. Return whether there is more."""
        self.state.begin_second(self.state.floor(self.clock.now_ms()), is_follower=False)
        return await self.timer.dequeue.run(until_ms)

    def records(self, topic="T", queue=1):
        return read_all(self.store, topic, queue)

    def bodies(self, topic="T", queue=1):
        return [record.body for record in self.records(topic, queue)]

    async def on_disk(self):
        """Wait until the log is on the disk."""
        self.store.request_flush()
        await until(lambda: self.store.durable_offset == self.store.max_physical_offset)

    def close(self):
        self.store.close()
        self.timer.persist()
