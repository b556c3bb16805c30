"""The real watchdog thread names a handler that blocks the loop, with its place in the code."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import time
from pathlib import Path

import pytest

import rmqkit
from rmqkit import Message, Producer, PushConsumer, PushConsumerSettings, StartFrom
from rmqkit.client.consumer import watch as watchdog
from rmqkit.client.consumer.watch import LoopWatchdog, _places
from rmqkit.standalone import Standalone
from tests.client.peers import SECONDS, until

FIRST = PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET, take_over_pause_ms=0)


def told(caplog):
    return [record.getMessage() for record in caplog.records if "was blocked for" in record.getMessage()]


def told_of_handler(caplog):
    """Return the log lines about the handler. On a slow machine there can also be lines about the start."""
    return [text for text in told(caplog) if "handle), now " in text]


def block_until_told(caplog):
    until_ = time.monotonic() + SECONDS
    while not told_of_handler(caplog) and time.monotonic() < until_:
        time.sleep(0.005)


@pytest.mark.real_time
async def test_a_handler_that_blocks_is_reported_with_its_place_and_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(watchdog, "STILL_SECONDS", 0.2)
    handled = []

    async def handle(message):
        block_until_told(caplog)
        handled.append(message)

    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        await producer.send(Message(topic="T", body=b"x"))
        consumer = PushConsumer("CG", cluster.namesrv_address, settings=FIRST)
        consumer.subscribe("T", "*", handle)
        async with consumer:
            await until(lambda: handled, "the message")
    _, first = inspect.getsourcelines(handle)
    (text,) = told_of_handler(caplog)
    assert f" s in {__file__}:{first + 1} (" in text
    assert f"handle), now {__file__}:" in text
    assert "(block_until_told): make a blocking handler a plain function, which runs in a thread, or await " in text
    assert not [thread for thread in threading.enumerate() if thread.name == "rmqkit watchdog"]


@pytest.mark.real_time
async def test_a_loop_that_continues_is_not_reported_of(caplog):
    one = LoopWatchdog(0.05)
    beaten = one._beaten
    await until(lambda: one._beaten > beaten, "the loop beats")
    one.stop()
    assert not one._thread.is_alive()
    assert told(caplog) == []


@pytest.mark.real_time
async def test_a_loop_has_one_watchdog_however_many_consumers_there_are():
    watchdog.watch_loop()
    watchdog.watch_loop()
    (one,) = [watchdog._watchdogs[loop] for loop in watchdog._watchdogs if loop is asyncio.get_running_loop()]
    watchdog.unwatch_loop()
    assert one._thread.is_alive()
    watchdog.unwatch_loop()
    assert not one._thread.is_alive()
    watchdog.unwatch_loop()  # of nobody


def test_a_loop_that_rmqkit_itself_keeps_busy_is_at_no_place_of_the_program():
    package = Path(rmqkit.__file__).parent
    for file in ("remoting/connection.py", "protocol/record.py", "client/consumer/consume.py"):
        assert str(package / file).startswith(watchdog._LIBRARY), file


def test_an_idle_loop_is_at_no_place_of_the_program():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(SECONDS)
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            frame = sys._current_frames()[thread.ident]
            if "select" in frame.f_code.co_name:
                break
        assert list(_places(frame)) == []
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_a_thread_that_is_gone_has_no_place():
    assert list(_places(None)) == []
