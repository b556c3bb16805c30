"""Handlers, and the fate of messages afterwards. Source: behaviour.md §8.8; remoting.md §4.3.5, §9.5."""

from __future__ import annotations

import asyncio
import logging
import threading
from datetime import timedelta

import pytest

from rmqkit.client.consumer.consume import ConcurrentConsumeService, ConsumeLater, Reject
from rmqkit.client.consumer.offsets import RemoteOffsetStore
from rmqkit.client.consumer.ordered import OrderlyConsumeService
from rmqkit.client.consumer.process_queue import ProcessQueue
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import PushConsumerSettings
from rmqkit.protocol.codes import RequestCode, version_number
from rmqkit.protocol.command import reply
from rmqkit.protocol.properties import decode_properties
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.system import threads
from tests.client.messages import received
from tests.client.peers import Cluster, refused, until

SEND_BACK = RequestCode.CONSUMER_SEND_MSG_BACK
QUEUE = MessageQueue("T", "broker-0", 0)


class Clock:
    """A wall clock that the test sets."""

    def __init__(self) -> None:
        self.at_ms = 1_700_000_000_000

    def now_ms(self) -> int:
        return self.at_ms

    def monotonic_ms(self) -> float:
        return asyncio.get_running_loop().time() * 1000.0


class Workers:
    """ConcurrentConsumeService for group G over one process queue, against a scripted broker."""

    def __init__(self, handler=None, kind=ConcurrentConsumeService, retry=None, **settings) -> None:
        self.cluster = Cluster()
        self.handler, self.kind, self.retry = handler, kind, retry
        self.settings = PushConsumerSettings(**settings)
        self.clock = Clock()

    async def __aenter__(self):
        await self.cluster.__aenter__()
        self.cluster.topic("T")
        self.cluster.topic("%RETRY%G", queues=1)
        self.cluster.broker.answer(SEND_BACK, reply)
        self.runtime = ClientRuntime(self.cluster.namesrv, clock=self.clock)
        await self.runtime.routes.refresh("T")
        self.offsets = RemoteOffsetStore(self.runtime, "G")
        self.consuming = self.kind(self.runtime, "G", self.offsets, self.settings, lambda topic: self._handler)
        self._handler = self.consuming.on_loop(self.handler, retry=self.retry)
        self.held = ProcessQueue(QUEUE, messages_max=1000, bytes_max=1 << 20, span_max=2000)
        self.consuming.start()
        return self

    async def __aexit__(self, *exc_info):
        await self.consuming.close()
        await self.runtime.close()
        await self.cluster.__aexit__(*exc_info)

    def put(self, *messages):
        self.consuming.put(self.held, self.held.put(messages))

    @property
    def offset(self):
        return self.offsets.known(QUEUE)

    def sent_back(self):
        return self.cluster.broker.asked(SEND_BACK)


async def test_a_message_is_consumed_when_its_coroutine_returns():
    seen = []

    async def handler(message):
        seen.append((message.queue_offset, message.properties["CONSUME_START_TIME"]))

    async with Workers(handler) as it:
        it.put(received(10), received(11))
        await until(lambda: it.offset == 12, "both consumed")
        assert seen == [(10, "1700000000000"), (11, "1700000000000")]
        assert it.sent_back() == []


async def test_a_plain_function_runs_in_a_thread_and_may_block():
    gate = threads.Event()
    names, running = set(), []

    def handler(message):
        names.add(threads.current_name())
        running.append(1)
        assert gate.wait(60)

    async with Workers(handler) as it:
        it.put(received(0), received(1))
        await until(lambda: running == [1, 1], "two handlers at the same time")
        assert threads.current_name() not in names
        assert it.offset is None
        gate.set()
        await until(lambda: it.offset == 2, "both consumed")


async def test_a_callable_that_returns_an_awaitable_is_awaited():
    done = []

    async def work(message):
        await asyncio.sleep(0)
        done.append(message)

    async with Workers(lambda message: work(message)) as it:
        it.put(received(0))
        await until(lambda: it.offset == 1, "consumed")
        assert len(done) == 1


async def test_an_object_with_a_coroutine_call_runs_on_the_loop():
    class Handler:
        thread = None

        async def __call__(self, message):
            self.thread = threading.current_thread()

    handler = Handler()
    async with Workers(handler) as it:
        it.put(received(0))
        await until(lambda: it.offset == 1, "consumed")
    assert handler.thread is threading.current_thread()


async def test_no_more_handlers_run_than_the_setting_says():
    gate, running = asyncio.Event(), []

    async def handler(message):
        running.append(message)
        await gate.wait()

    async with Workers(handler, handlers_max=3) as it:
        it.put(*[received(i) for i in range(10)])
        await until(lambda: len(running) == 3, "three handlers")
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(running) == 3
        gate.set()
        await until(lambda: it.offset == 10, "all consumed")


async def test_the_offset_waits_for_the_slowest_handler():
    gate = asyncio.Event()

    async def handler(message):
        if message.queue_offset == 5:
            await gate.wait()

    async with Workers(handler) as it:
        it.put(*[received(i) for i in range(5, 9)])
        await until(lambda: len(it.held) == 1, "three of four consumed")
        assert it.offset == 5
        gate.set()
        await until(lambda: it.offset == 9, "all consumed")


def ours(caplog):
    """Return the log entries of the consume module, without those of clients of other tests."""
    return [entry for entry in caplog.records if entry.name == "rmqkit.client.consumer.consume"]


async def test_a_failed_message_is_sent_back_and_counts_as_consumed(caplog):
    async def handler(message):
        raise ValueError("no stock")

    async with Workers(handler) as it:
        it.put(received(10))
        await until(lambda: it.offset == 11, "sent back")
        assert it.sent_back() == [
            {
                "offset": "1010",
                "group": "G",
                "delayLevel": "0",
                "originMsgId": "id-10",
                "originTopic": "T",
                "unitMode": "false",
                "maxReconsumeTimes": "16",
                "bname": "broker-0",
            }
        ]
    (logged,) = [entry for entry in ours(caplog) if entry.levelno == logging.WARNING]
    assert "handler failed on message id-10 of T, offset 10 in queue 0 of broker-0, try 1" in logged.getMessage()
    assert "no stock" in (logged.exc_text or "")


@pytest.mark.parametrize("level", [0, 5])
async def test_a_handler_may_choose_the_delay_level(level, caplog):
    async def handler(message):
        raise ConsumeLater(level)

    async with Workers(handler) as it:
        it.put(received(0))
        await until(lambda: it.offset == 1, "sent back")
        assert it.sent_back()[0]["delayLevel"] == str(level)
    assert ours(caplog) == [], "what a handler chooses is no warning"


@pytest.mark.parametrize(("error", "tries"), [(Reject(), 0), (ConsumeLater(5), 16), (ValueError(), 16)])
async def test_the_last_try_is_sent_with_its_reason_as_beyond_the_limit(error, tries, caplog):
    async def handler(message):
        raise error

    async with Workers(handler) as it:
        it.put(received(0, reconsume_times=tries, born_timestamp=17))
        await until(lambda: it.offset == 1, "sent back")
        assert it.sent_back() == []
        (sent,) = it.cluster.broker.asked(RequestCode.SEND_MESSAGE_V2)
    assert (sent["b"], sent["g"], sent["j"], sent["l"]) == ("%RETRY%G", "17", str(tries + 1), "0")
    assert decode_properties(sent["i"].encode())["rmqkit_tries"] == str(tries + 1)


@pytest.mark.parametrize(("error", "tries"), [(Reject(), 0), (ConsumeLater(), 16)])
async def test_a_dead_letter_that_the_broker_refuses_goes_there_without_its_reason(error, tries, caplog):
    async def handler(message):
        raise error

    async with Workers(handler) as it:
        it.cluster.broker.answer(RequestCode.SEND_MESSAGE_V2, refused(13, "too long"))
        it.put(received(0, reconsume_times=tries))
        await until(lambda: it.offset == 1, "sent back")
        (sent,) = it.sent_back()
    assert (sent["delayLevel"], sent["maxReconsumeTimes"]) == (str(error.delay_level), "16")
    assert "goes to the dead letters without its reason, its handler gave it up without a reason" in caplog.text


OLD, NEW = version_number(4, 9, 7), version_number(5, 0, 0)


@pytest.mark.parametrize(
    ("delay", "version", "tries", "level", "timed_ms"),
    [
        (7, NEW, 0, None, "7000"),
        (timedelta(days=1), NEW, 0, None, "86400000"),
        (7, NEW, 15, None, "7000"),
        (7, None, 0, "3", None),  # no heartbeat was answered yet
        (7, NEW - 1, 0, "3", None),
        (5, OLD, 0, "2", None),
        (5.001, OLD, 0, "3", None),
        (0, OLD, 0, "1", None),
        (7200, OLD, 0, "18", None),
        (timedelta(days=1), OLD, 0, "18", None),
    ],
)
async def test_a_handler_may_choose_the_time(delay, version, tries, level, timed_ms):
    async def handler(message):
        raise ConsumeLater(delay=delay)

    async with Workers(handler) as it:
        it.runtime.broker_versions |= {} if version is None else {it.cluster.broker.address: version}
        it.put(received(0, reconsume_times=tries))
        await until(lambda: it.offset == 1, "sent back")
        assert [one["delayLevel"] for one in it.sent_back()] == ([] if level is None else [level])
        sent = it.cluster.broker.asked(RequestCode.SEND_MESSAGE_V2)
        assert [decode_properties(one["i"].encode())["TIMER_DELAY_MS"] for one in sent] == [timed_ms] * len(sent)
        assert [(one["b"], one["j"], one["l"]) for one in sent] == [("%RETRY%G", str(tries + 1), "16")] * (
            level is None
        )


async def test_a_time_that_the_broker_refuses_becomes_a_delay_level(caplog):
    async def handler(message):
        raise ConsumeLater(delay=timedelta(days=30))

    async with Workers(handler) as it:
        it.runtime.broker_versions[it.cluster.broker.address] = NEW
        it.cluster.broker.answer(RequestCode.SEND_MESSAGE_V2, refused(13, "timer message illegal"))
        it.put(received(0))
        await until(lambda: it.offset == 1, "sent back")
        assert it.sent_back()[0]["delayLevel"] == "18"
    assert "is redelivered after a delay level instead of 2592000000 ms" in caplog.text


@pytest.mark.parametrize(
    "arguments", [{"delay": -1}, {"delay": "7s"}, {"delay": 7, "delay_level": 3}, {"delay_level": -1}]
)
def test_a_delay_that_is_none_is_refused_where_it_is_made(arguments):
    with pytest.raises(ValueError, match="delay"):
        ConsumeLater(**arguments)


async def test_the_largest_number_of_retries_is_a_setting():
    async def handler(message):
        raise ValueError

    async with Workers(handler, retries_max=3) as it:
        it.put(received(0))
        await until(it.sent_back, "sent back")
        assert it.sent_back()[0]["maxReconsumeTimes"] == "3"


async def test_when_sending_back_fails_the_message_is_sent_to_the_retry_topic():
    async def handler(message):
        raise ValueError

    async with Workers(handler) as it:
        it.cluster.broker.answer(SEND_BACK, refused(1, "look message by offset failed, 1000"))
        it.put(received(0, reconsume_times=1))
        await until(lambda: it.offset == 1, "sent to the retry topic")
        (fields,) = it.cluster.broker.asked(RequestCode.SEND_MESSAGE_V2)
        assert (fields["a"], fields["b"], fields["j"], fields["l"]) == ("CLIENT_INNER_PRODUCER", "%RETRY%G", "2", "16")
        assert decode_properties(fields["i"].encode())["DELAY"] == "4"


async def test_when_that_fails_too_the_message_stays_and_is_handled_again():
    times = []

    async def handler(message):
        times.append(message.reconsume_times)
        if len(times) < 3:
            raise ValueError

    async with Workers(handler, local_retry_ms=1) as it:
        it.cluster.broker.answer(SEND_BACK, refused(1))
        it.cluster.broker.answer(RequestCode.SEND_MESSAGE_V2, refused(1))
        it.put(received(0), received(1))
        await until(lambda: it.offset == 2, "consumed at last")
        assert sorted(times) == [0, 0, 1, 1]


async def test_the_offset_is_held_while_a_message_stays_here():
    failing = {0}

    async def handler(message):
        if message.queue_offset in failing:
            raise ValueError

    async with Workers(handler, local_retry_ms=60_000) as it:
        it.cluster.broker.answer(SEND_BACK, refused(1))
        it.cluster.broker.answer(RequestCode.SEND_MESSAGE_V2, refused(1))
        it.put(received(0), received(1))
        await until(lambda: len(it.cluster.broker.asked(RequestCode.SEND_MESSAGE_V2)) == 3, "every way was tried")
        await until(lambda: it.offset == 0, "the other message is consumed")
        assert len(it.held) == 1


async def test_retry_messages_have_their_own_topic_again():
    seen = []

    async def handler(message):
        seen.append(message.topic)

    async with Workers(handler) as it:
        it.put(received(0, topic="%RETRY%G", properties={"RETRY_TOPIC": "Orders"}))
        it.put(received(1, properties={"RETRY_TOPIC": "Other"}))
        await until(lambda: it.offset == 2, "consumed")
        assert seen == ["Orders", "T"]


async def test_messages_of_a_dropped_queue_are_not_handled():
    seen = []

    async def handler(message):
        seen.append(message)

    async with Workers(handler) as it:
        it.held.drop()
        it.put(received(0))
        other = ProcessQueue(MessageQueue("T", "broker-0", 1), messages_max=9, bytes_max=999, span_max=9)
        it.consuming.put(other, other.put([received(5)]))
        await until(lambda: seen, "the other queue's message")
        assert [message.queue_offset for message in seen] == [5]
        assert it.offset is None


async def test_what_finishes_after_the_release_does_not_count():
    gate = asyncio.Event()

    async def handler(message):
        await gate.wait()

    async with Workers(handler) as it:
        it.put(received(0))
        await asyncio.sleep(0)
        it.held.release()
        gate.set()
        assert await it.held.wait_for_handlers(10_000)
        assert it.offset is None


async def test_a_cancellation_inside_the_handler_is_a_failure_and_the_worker_continues():
    async def handler(message):
        if message.queue_offset == 0:
            raise asyncio.CancelledError

    async with Workers(handler, handlers_max=1) as it:
        it.put(received(0), received(1))
        await until(lambda: it.offset == 2, "both are done with")
        assert len(it.sent_back()) == 1


@pytest.mark.parametrize("kind", [ConcurrentConsumeService, OrderlyConsumeService])
async def test_an_outcome_that_cannot_be_dealt_with_is_reported_and_the_worker_continues(kind, caplog):
    seen = []

    async def handler(message):
        seen.append(message.queue_offset)
        if seen == [0]:
            raise ConsumeLater(messages=message)  # it has to be a collection

    async with Workers(handler, kind, handlers_max=1, local_retry_ms=1) as it:
        it.put(received(0), received(1))
        await until(lambda: it.offset == 2, "both consumed")
    assert sorted(seen) == [0, 0, 1]
    assert f"messages of {QUEUE} are handled again in 1 ms, because their results could not be processed" in caplog.text


async def test_a_handler_that_takes_too_long_has_its_message_sent_back():
    gate = asyncio.Event()

    async def handler(message):
        if message.queue_offset < 2:
            await gate.wait()
            raise ValueError("too late to matter")

    async with Workers(handler, handlers_max=2, consume_timeout_minutes=15) as it:
        it.put(received(0), received(1), received(2))
        await until(lambda: "CONSUME_START_TIME" in it.held.lowest(2)[1].properties, "both handlers run")
        it.clock.at_ms += 15 * 60_000 - 1
        await it.consuming.expire(it.held)
        assert it.sent_back() == []
        it.clock.at_ms += 1
        await it.consuming.expire(it.held)
        assert [fields["delayLevel"] for fields in it.sent_back()] == ["3", "3"]
        gate.set()
        await until(lambda: it.offset == 3, "the last message is consumed")
        assert len(it.sent_back()) == 2


async def test_messages_without_handler_are_taken_by_hand():
    async with Workers(None) as it:
        it.put(received(0), received(1))
        first = await it.consuming.next()
        assert first is not None
        assert it.offset is None
        it.consuming.consumed(*first)
        assert it.offset == 1
        await it.consuming.close()
        assert (await it.consuming.next())[1].queue_offset == 1
        assert await it.consuming.next() is None
        assert await it.consuming.next() is None


async def test_a_batch_handler_gets_lists_of_one_queue_in_order():
    calls = []

    async def handler(messages):
        calls.append([message.queue_offset for message in messages])

    async with Workers(handler, handlers_max=1) as it:
        it._handler = it.consuming.on_loop(handler, 4)
        it.put(*[received(i) for i in range(10)])
        await until(lambda: it.offset == 10, "all consumed")
        assert calls == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


async def test_a_batch_fails_together():
    async def handler(messages):
        raise ValueError("no stock")

    async with Workers(handler) as it:
        it._handler = it.consuming.on_loop(handler, 4)
        it.put(received(0), received(1))
        await until(lambda: it.offset == 2, "sent back")
        assert sorted(fields["originMsgId"] for fields in it.sent_back()) == ["id-0", "id-1"]


async def test_only_the_named_messages_of_a_batch_are_redelivered():
    async def handler(messages):
        raise ConsumeLater(5, messages=[messages[1]])

    async with Workers(handler) as it:
        it._handler = it.consuming.on_loop(handler, 4)
        it.put(received(0), received(1), received(2))
        await until(lambda: it.offset == 3, "done with")
        assert [(fields["originMsgId"], fields["delayLevel"]) for fields in it.sent_back()] == [("id-1", "5")]


async def test_a_batch_has_messages_of_one_topic():
    calls = []

    async def handler(messages):
        calls.append({message.topic for message in messages})

    async with Workers(handler, handlers_max=1) as it:
        it._handler = it.consuming.on_loop(handler, 10)
        it.put(*[received(i, topic="%RETRY%G", properties={"RETRY_TOPIC": "TU"[i // 2]}) for i in range(4)])
        await until(lambda: it.offset == 4, "consumed")
        assert calls == [{"T"}, {"U"}]
