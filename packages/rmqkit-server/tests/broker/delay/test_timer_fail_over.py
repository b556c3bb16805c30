"""Timed messages of a master that is gone: delivered by its slave, as master of its copy or acting for it.

Source: behaviour.md §9.3, §10.5; store.md §18.6.
"""

from __future__ import annotations

import asyncio
import shutil

import pytest

from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.names import TIMER_TOPIC
from tests.broker.groups_of_brokers import Brokers
from tests.broker.replication.test_fail_over import ACTING, back, create, gone, on_brokers
from tests.client.peers import until
from tests.store.stores import read_all

STORE = {"timer_precision_ms": 50, "timer_flush_interval_ms": 50}
COUNT = 20


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("rmqkit.broker.replication.acting_master._LOOK_MS", 50)
    monkeypatch.setattr("rmqkit.broker.replication.tables._PERIOD_MS", 100.0)
    monkeypatch.setattr("rmqkit.broker.replication.tables._TIMER_PERIOD_MS", 50.0)


async def send(brokers, name, seconds):
    """Timed messages, due one after the other from a time on."""
    for number in range(COUNT):
        at_ms = SYSTEM_CLOCK.now_ms() + int(seconds * 1000) + number * 20
        fields = {"a": "p", "b": "T", "c": "TBW102", "d": 2, "e": 0, "f": 0, "g": 1, "h": 0, "j": 0, "k": "false"}
        properties = f"TIMER_DELIVER_MS\x01{at_ms}\x02"
        answer = await brokers.ask(name, RequestCode.SEND_MESSAGE_V2, b"%d" % number, i=properties, **fields)
        assert answer.code == 0, answer.remark


async def deliver_nothing(until_ms):
    """A delivery loop for a master that stops before its messages are due."""
    return False


def delivered(brokers, name):
    store = brokers.context(name).store
    return sorted(int(record.body) for queue_id in (0, 1) for record in read_all(store, "T", queue_id))


async def known_to_the_slave(brokers):
    """The slave has the messages on its wheel, and the master's counts."""
    slave = brokers.context("a-1").timer
    await until(lambda: slave.state.queue_offset == COUNT, "the slave's wheel")
    await until(lambda: slave.pending == COUNT, "the master's counts")
    assert brokers.context("a-1").store.max_offset(TIMER_TOPIC, 0) == COUNT


@on_brokers
async def test_a_slave_that_becomes_master_delivers_every_message_once(tmp_path):
    async with Brokers(tmp_path, store=STORE) as brokers:
        for name in ("a-0", "a-1"):
            await brokers.start(name)
        await create(brokers, "a-0")
        brokers.context("a-0").timer.dequeue.run = deliver_nothing  # however slow the machine is
        await send(brokers, "a-0", 2)
        await known_to_the_slave(brokers)
        await brokers.crash("a-0")
        await brokers.crash("a-1")
        shutil.rmtree(tmp_path / "a-0")
        (tmp_path / "a-1").rename(tmp_path / "a-0")
        await brokers.start("a-0")
        await until(lambda: len(delivered(brokers, "a-0")) >= COUNT, "all messages")
        assert delivered(brokers, "a-0") == list(range(COUNT))


@on_brokers
async def test_an_acting_master_puts_them_at_another_broker_and_they_are_not_redelivered(tmp_path):
    async with Brokers(tmp_path, store=STORE, remote_escape=True, **ACTING) as brokers:
        for name in ("a-0", "a-1", "b-0"):
            await brokers.start(name)
        await create(brokers, "a-0", "b-0")
        brokers.context("a-0").timer.dequeue.run = deliver_nothing
        await send(brokers, "a-0", 1)
        await known_to_the_slave(brokers)
        await brokers.crash("a-0")
        await gone(brokers)
        await until(lambda: len(delivered(brokers, "b-0")) >= COUNT, "all messages")
        await brokers.start("a-0")
        await back(brokers)
        master = brokers.context("a-0").timer
        await until(lambda: master.read_behind_ms < 1000 and not master.offset_behind, "the master's wheel")
        await asyncio.sleep(0)
        assert (delivered(brokers, "a-0"), delivered(brokers, "b-0")) == ([], list(range(COUNT)))
