"""The tries of a send: their number and duration, pauses, the budget, time in line, order of queues.

In these tests the pauses of a sender only move its clock, so that a restart of ten seconds takes no real time.
"""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import pytest
from msgspec import structs

from rmqkit.admin.replay.selection import Selection
from rmqkit.admin.replay.sources import PATIENCE_MS, TopicSource
from rmqkit.cli.frame.connected import sending_settings as of_command
from rmqkit.client.observe.hooks import SendStatus
from rmqkit.client.producer.faults import PASSING
from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.settings import ProducerSettings, SendLimits
from rmqkit.errors import ConnectionLost, NoRoute, PeerRefused, RequestTimedOut, SendFailed
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_fields
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.remoting.client import TRY_MS_MIN, Backoff, Permits
from rmqkit.spark.options import SinkOptions
from rmqkit.spark.sink.producer import sending_settings as of_sink
from rmqkit.testing.clock import LoopThread, StandingClock, VirtualClock
from tests.client.inside import sender_of
from tests.client.peers import Cluster, refused, stored, until
from tests.client.producer.test_sender import MESSAGE, SEND, Sending

DEFAULTS = ProducerSettings()


class InNoTime(Sending):
    """A sender whose pauses, and what `spend` says a try takes, pass on its own clock only."""

    async def __aenter__(self):
        await super().__aenter__()
        self.clock = StandingClock()
        self.pauses: list[float] = []
        self.tried_ms: list[float] = []
        self.sender._clock = self.clock
        self.sender._pause = self.pause
        await self.sender.queues("T")
        self.begun_ms = self.clock.ms
        return self

    async def pause(self, pause_ms, deadline_ms):
        self.pauses.append(pause_ms)
        self.clock.ms += max(0.0, min(pause_ms, deadline_ms - self.clock.ms))
        await asyncio.sleep(0)

    def spend(self, outcome):
        """Have tries end as ``outcome`` does, given the ms since the begin and what the try may take."""

        async def call(address, command, timeout_ms):
            self.tried_ms.append(self.clock.ms - self.begun_ms)
            answer = outcome(self.clock.ms - self.begun_ms, timeout_ms)
            if isinstance(answer, RequestTimedOut):
                self.clock.ms += timeout_ms
            if isinstance(answer, Exception):
                raise answer
            return stored(command)

        self.sender._remoting = type("Scripted", (), {"call": staticmethod(call)})()


def away_until(back_ms, error=None):
    def outcome(now_ms, timeout_ms):
        return None if now_ms >= back_ms else error or ConnectionLost("b:1", "refused")

    return outcome


@pytest.mark.parametrize("queue", [None, MessageQueue("T", "broker-0", 1)], ids=["any queue", "one queue"])
@pytest.mark.parametrize("error", [None, *(PeerRefused(code, "no", "b:1") for code in sorted(PASSING))], ids=str)
async def test_a_broker_that_is_away_for_ten_seconds_is_ridden_out_by_the_defaults(queue, error):
    async with InNoTime() as it:
        it.spend(away_until(10_000, error))
        result = await it.sender.send(MESSAGE, timeout_ms=DEFAULTS.send_timeout_ms, queue=queue)
        assert result.status is SendStatus.SEND_OK
        assert queue is None or result.queue == queue
        assert 10_000 <= it.clock.ms - it.begun_ms < 12_100
        assert 8 < len(it.tried_ms) < 24


@pytest.mark.parametrize(
    ("settings", "budget_ms", "try_ms"),
    [
        (of_command({"timeout_ms": 5000}, message_bytes_max=1 << 22), 20_000, 5000),  # rmq send, rmq replay
        (of_command({"timeout_ms": 30_000}, message_bytes_max=1 << 22), 30_000, 30_000),
        (of_sink(SinkOptions(name_servers="n:1", group="G")), 60_000, 3000),
        (of_sink(SinkOptions(name_servers="n:1", group="G", patience_ms=0)), 3000, 3000),
    ],
    ids=["command", "patient command", "sink", "impatient sink"],
)
@pytest.mark.parametrize("queue", [None, MessageQueue("T", "broker-0", 1)], ids=["any queue", "one queue"])
async def test_commands_and_the_sink_are_as_patient_as_a_producer(settings, budget_ms, try_ms, queue):
    assert (settings.send_timeout_ms, settings.try_timeout_ms, settings.retries) == (budget_ms, try_ms, -1)
    async with InNoTime(1, **structs.asdict(settings)) as it:
        it.spend(away_until(min(10_000, budget_ms - 2000)))
        result = await it.sender.send(MESSAGE, timeout_ms=settings.send_timeout_ms, queue=queue)
        assert result.status is SendStatus.SEND_OK
        assert len(it.tried_ms) > 3


@pytest.mark.parametrize(("back_s", "is_whole"), [(10, True), (60, False)])
def test_a_replay_waits_for_the_broker_it_reads_from(back_s, is_whole):
    thread = LoopThread("replay")
    clock = VirtualClock(thread)

    class Away:
        async def pull(self, queue, offset, tags, *, max_count):
            if thread.loop.passed_seconds < back_s:
                raise ConnectionLost("b:1", "refused")
            return SimpleNamespace(messages=[], unreadable=[], next_begin_offset=offset + 1)

    async def begun():
        source = TopicSource(Away(), "T", Selection("T"), lambda *what: told.append(what))
        return asyncio.ensure_future(anext(source.read({"b:0": (0, 1)}), "whole"))

    async def ended():
        return await asyncio.gather(reading, return_exceptions=True)

    told = []
    reading = thread.run(begun)
    for _ in range(25):
        clock.advance(seconds=1)
    (outcome,) = thread.run(ended)
    assert outcome == "whole" if is_whole else isinstance(outcome, ConnectionLost)
    assert told == [("broker b", PATIENCE_MS)]
    thread.close()


@pytest.mark.parametrize("queue", [None, MessageQueue("T", "broker-0", 1)], ids=["any queue", "one queue"])
async def test_tries_last_as_long_as_the_budget_and_the_error_says_how_many_there_were(queue):
    async with InNoTime() as it:
        it.spend(away_until(60_000))
        with pytest.raises(SendFailed, match=r"^message for topic T not stored after \d\d tries on broker-0: "):
            await it.sender.send(MESSAGE, timeout_ms=20_000, queue=queue)
        assert 20_000 - 2 * TRY_MS_MIN <= it.clock.ms - it.begun_ms <= 20_000


async def test_pauses_grow_and_differ():
    async with InNoTime() as it:
        it.spend(away_until(60_000))
        with pytest.raises(SendFailed):
            await it.sender.send(MESSAGE, timeout_ms=20_000)
        bounds = [min(20.0 * 2**n, 2000.0) for n in range(len(it.pauses))]
        assert all(bound / 2 <= pause <= bound for pause, bound in zip(it.pauses, bounds, strict=True))
    random.seed(1)
    assert len({Backoff(20, 2000).next_ms() for _ in range(20)}) > 10


async def test_another_broker_is_tried_without_a_pause():
    async with InNoTime(2) as it:
        it.spend(lambda now_ms, timeout_ms: ConnectionLost("b:1", "x") if len(it.tried_ms) < 4 else None)
        await it.sender.send(MESSAGE, timeout_ms=20_000)
        assert len(it.tried_ms) == 4 and len(it.pauses) == 1


async def test_a_message_without_an_answer_is_tried_three_times_in_twenty_seconds_and_not_more_often():
    async with InNoTime() as it:
        allowed = []
        it.spend(lambda now_ms, timeout_ms: allowed.append(timeout_ms) or RequestTimedOut("b:1", 310, timeout_ms))
        with pytest.raises(SendFailed):
            await it.sender.send(MESSAGE, timeout_ms=DEFAULTS.send_timeout_ms)
        assert allowed[:2] == [3000, 6000]
        assert len(allowed) == 3 and sum(allowed) <= 20_000


async def test_sends_to_a_queue_keep_their_order_through_an_outage():
    async with InNoTime() as it:
        queue, log, is_away = MessageQueue("T", "broker-0", 1), [], True

        async def call(address, command, timeout_ms):
            await asyncio.sleep(0)
            if is_away:
                raise ConnectionLost("b:1", "gone")
            log.append(command.body)
            return stored(command)

        async def pause(pause_ms, deadline_ms):
            await asyncio.sleep(0)

        it.sender._remoting = type("Scripted", (), {"call": staticmethod(call)})()
        it.sender._pause = pause

        def send(number):
            message = MESSAGE.__class__("T", b"%d" % number, "", "UK")
            return asyncio.create_task(it.sender.send(message, timeout_ms=20_000, queue=queue))

        sends = [send(number) for number in range(20)]
        for _ in range(30):
            await asyncio.sleep(0)
        sends += [send(number) for number in range(20, 30)]
        for _ in range(30):
            await asyncio.sleep(0)
        is_away = False
        await asyncio.gather(*sends)
        assert log == [b"%d" % number for number in range(30)]
        assert not it.sender._queue_retries


async def test_the_master_of_a_known_topic_is_waited_for():
    async with InNoTime() as it:
        it.spend(away_until(0))
        broker = it.cluster.routes["T"].broker_datas[0]
        broker.broker_addrs[1] = broker.broker_addrs.pop(0)
        await it.runtime.routes.refresh("T")
        assert it.runtime.routes.lacks_master("T")

        async def pause(pause_ms, deadline_ms):
            it.clock.ms += pause_ms
            if it.clock.ms - it.begun_ms > 4000 and 1 in broker.broker_addrs:
                broker.broker_addrs[0] = broker.broker_addrs.pop(1)
            await asyncio.sleep(0)

        it.sender._pause = pause
        assert (await it.sender.send(MESSAGE, timeout_ms=20_000)).status is SendStatus.SEND_OK
        assert it.clock.ms - it.begun_ms > 4000


async def test_a_master_that_does_not_come_is_reported_as_the_reason():
    async with InNoTime() as it:
        broker = it.cluster.routes["T"].broker_datas[0]
        broker.broker_addrs[1] = broker.broker_addrs.pop(0)
        await it.runtime.routes.refresh("T")
        with pytest.raises(NoRoute, match="no broker accepts messages for topic T"):
            await it.sender.send(MESSAGE, timeout_ms=20_000)
        assert it.clock.ms - it.begun_ms >= 20_000


async def test_a_topic_that_may_only_be_read_is_refused_at_once():
    async with InNoTime() as it:
        it.cluster.topic("T", queues=2, perm=4)
        await it.runtime.routes.refresh("T")
        with pytest.raises(NoRoute, match="no broker accepts messages for topic T"):
            await it.sender.send(MESSAGE, timeout_ms=20_000)
        assert not it.pauses


async def test_time_in_line_is_not_the_send_s_own():
    async with Cluster() as cluster:
        cluster.topic("T")
        held = []
        cluster.broker.answer(SEND, held.append)
        settings = ProducerSettings(limits=SendLimits(sends_max=10), retries=0)
        async with Producer("PG", cluster.namesrv, settings=settings) as producer:
            clock = sender_of(producer)._clock = StandingClock()
            sends = [
                asyncio.create_task(producer.send(Message(topic="T", body=b"%d" % number), timeout=30))
                for number in range(30)
            ]
            for _ in range(3):
                await until(lambda: len(held) == 10, "ten under way")
                clock.ms += 31_000  # for those in line the budget would be over
                answered, held[:] = list(held), []
                for command in answered:
                    cluster.broker.connections[0].send(stored(command))
            assert {result.status for result in await asyncio.gather(*sends)} == {SendStatus.SEND_OK}


async def test_a_loop_that_stood_still_beyond_the_time_out_does_not_cost_the_answers():
    async with Sending(retries=0) as it:
        await it.sender.send(MESSAGE, timeout_ms=30_000)
        clock = it.runtime.remoting._clock
        connection = await it.runtime.remoting.connection(it.cluster.broker.address)
        connection._clock = ahead = StandingClock(clock.monotonic_ms())
        sends = [asyncio.create_task(it.sender.send(MESSAGE, timeout_ms=30_000)) for _ in range(200)]
        await asyncio.sleep(0)
        # As if what the loop was busy with had ended only now, and the timer came late.
        ahead.ms += 40_000
        connection._sweep_due -= 40.0
        connection._expire_calls()
        assert {result.status for result in await asyncio.gather(*sends)} == {SendStatus.SEND_OK}


async def test_an_answer_in_the_socket_wins_over_the_timer():
    async with Sending(retries=0) as it:
        await it.sender.send(MESSAGE, timeout_ms=30_000)
        connection = await it.runtime.remoting.connection(it.cluster.broker.address)
        connection._clock = ahead = StandingClock(connection._clock.monotonic_ms())
        sends = [asyncio.create_task(it.sender.send(MESSAGE, timeout_ms=30_000)) for _ in range(20)]
        answered = []
        it.cluster.broker.answer(SEND, lambda command: answered.append(1) or stored(command))
        transport = connection._transport
        await asyncio.sleep(0)
        transport.pause_reading()  # what comes now lies in the socket
        await until(lambda: len(answered) == 20, "all are answered")
        await asyncio.sleep(0.01)
        ahead.ms += 40_000
        transport.resume_reading()
        connection._expire_calls()  # before anything was read
        assert {result.status for result in await asyncio.gather(*sends)} == {SendStatus.SEND_OK}


async def test_a_call_that_is_not_answered_still_ends():
    async with Sending(retries=0) as it:
        await it.sender.send(MESSAGE, timeout_ms=30_000)
        connection = await it.runtime.remoting.connection(it.cluster.broker.address)
        connection._clock = ahead = StandingClock(connection._clock.monotonic_ms())
        asked = []
        it.cluster.broker.answer(SEND, asked.append)
        send = asyncio.create_task(it.sender.send(MESSAGE, timeout_ms=30_000))
        await until(lambda: asked, "the request")
        for _ in range(2):  # the loop stands still twice
            ahead.ms += 40_000
            connection._sweep_due = asyncio.get_running_loop().time() - 40.0
            connection._expire_calls()
        with pytest.raises(SendFailed) as caught:
            await send
        assert isinstance(caught.value.cause, RequestTimedOut)


async def test_a_line_without_end_is_waited_in():
    permits = Permits(1)
    assert permits.take_now()
    waiting = asyncio.create_task(permits.take(None))
    await asyncio.sleep(0)
    assert not waiting.done()
    permits.give_back()
    assert await waiting


async def test_a_reply_to_somebody_who_is_gone_is_not_tried_for_long():
    async with Sending() as it:
        it.cluster.broker.answer(RequestCode.SEND_REPLY_MESSAGE_V2, refused(ResponseCode.SYSTEM_BUSY))
        message = MESSAGE.__class__("T", b"x", "", "UK", is_reply=True)
        with pytest.raises(SendFailed):
            await it.sender.send(message, timeout_ms=600_000)
        assert len(it.cluster.broker.asked(RequestCode.SEND_REPLY_MESSAGE_V2)) == 3
        assert decode_fields(it.cluster.broker.requests[-1])["b"] == "T"
