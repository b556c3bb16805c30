"""A store with timed messages, on a clock that is set by hand."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import asynccontextmanager

from rmqkit.broker.delay.timer import Timer, schedule_timed
from rmqkit.broker.pull.long_polling import LongPolling
from rmqkit.protocol.names import TIMER_TOPIC
from rmqkit.store.message_store import MessageStore, PutStatus
from rmqkit.store.retention import used_percent
from rmqkit.store.settings import FlushDiskType
from rmqkit.testing.clock import StandingClock
from tests.store.stores import message, read_all, small_settings
from tests.waiting import until

STEP_MS = 10
"""The precision in these tests, so that a round comes every 10 ms of the loop's time."""
MAX_SECONDS = 1000
NOW_MS = 1_800_000_000_000


class Timed:
    """A store with timed messages, on a clock that is set by hand."""

    def __init__(self, root, *, clock=None, golden=None, percent=used_percent, **settings):
        self.root = root
        self.clock = clock or StandingClock(NOW_MS)
        self.long_polling = LongPolling(self.clock)
        sizes = {
            "timer_log_file_bytes": 536,
            "timer_precision_ms": STEP_MS,
            "timer_delay_seconds_max": MAX_SECONDS,
            "timer_roll_window_slots": 20_000,
        }
        self.settings = golden or small_settings(**(sizes | settings))
        is_sync = self.settings.flush_disk_type is FlushDiskType.SYNC_FLUSH
        loop = asyncio.get_running_loop()
        self.store = MessageStore(
            root,
            self.settings,
            clock=self.clock,
            is_batch_topic=lambda topic: topic == "GoldInnerBatch",
            on_arrival=self.long_polling.arrived,
            on_durable=lambda *_: loop.call_soon_threadsafe(self.store.dispatch),
            disk_used_percent=percent,
        )
        self.timer = Timer(self.store, self.settings, self.long_polling, self.clock, flushes=is_sync)

    def put(self, body=b"x", *, topic="T", **properties):
        one = message(topic, 1, body, **properties)
        kept = schedule_timed(self.timer, one)
        assert not isinstance(kept, tuple)
        one = kept
        assert self.store.put(one).status is PutStatus.OK
        self.store.request_flush()
        return one

    def at(self, ahead_ms, body=b"x", **properties):
        return self.put(body, TIMER_DELIVER_MS=self.clock.ms + ahead_ms, **properties)

    def bodies(self, topic="T"):
        return [record.body for record in read_all(self.store, topic, 1)]

    def kept(self):
        return self.store.max_offset(TIMER_TOPIC, 0)

    async def until(self, condition):
        await until(condition)

    async def on_wheel(self, count=None):
        await self.until(lambda: self.timer.offset_behind == 0 and self.kept() >= (count or 0))

    async def flushed(self):
        """Write the state, and let the timer log follow the log."""
        await self.timer.flush_round()
        await self.until(lambda: self.store.durable_offset == self.store.max_physical_offset)
        await self.timer.flush_round()

    async def pass_ms(self, ms):
        """Advance the clock, and let the timer follow it."""
        self.clock.ms += ms
        await self.until(lambda: self.timer.read_behind_ms == 0 and self.timer.offset_behind == 0)


@asynccontextmanager
async def timed(root, *, killed=False, follows=False, **options):
    """``killed``: nothing is written at the end, as after SIGKILL. ``follows``: as at a slave."""
    one = Timed(root, **options)
    one.timer.load()
    one.store.open()
    one.timer.recover()
    (one.timer.follow if follows else one.timer.start)()
    try:
        yield one
    finally:
        one.timer.stop()
        one.long_polling.close()
        if killed:
            shutil.copytree(root, root.with_name("killed"))
        one.store.close()
        one.timer.persist()


def now_of(one):
    return int(one.clock.ms)
