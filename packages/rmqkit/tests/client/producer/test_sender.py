"""The send loop against scripted brokers. Source: behaviour.md §7.5, §7.6; remoting.md §4.3.1, §9.4."""

from __future__ import annotations

import asyncio
import re

import pytest

from rmqkit.client.observe.hooks import SendStatus
from rmqkit.client.producer.encode import EncodedMessage
from rmqkit.client.producer.faults import PASSING, RETRYABLE
from rmqkit.client.producer.sender import Sender
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import ClientSettings, ProducerSettings
from rmqkit.errors import NoNameServer, NoRoute, PeerRefused, RequestTimedOut, SendFailed
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import reply
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.remoting.client import TRY_MS_MIN
from tests.client.peers import SECONDS, Cluster, refused, stored, until

MESSAGE = EncodedMessage("T", b"body", "a\x01b\x02", "UK", flag=3, sys_flag=0x301)
SEND = RequestCode.SEND_MESSAGE_V2


class Sending:
    """A cluster with topic T, a runtime and a sender."""

    def __init__(self, brokers: int = 1, **settings) -> None:
        self.cluster = Cluster(brokers)
        self.settings = ProducerSettings(**settings)

    async def __aenter__(self):
        await self.cluster.__aenter__()
        self.cluster.topic("T", queues=2)
        self.runtime = ClientRuntime(self.cluster.namesrv)
        self.sender = Sender(self.runtime, "PG", self.settings)
        return self

    async def __aexit__(self, *exc_info):
        await self.runtime.close()
        await self.cluster.__aexit__(*exc_info)

    def answer(self, *answers) -> None:
        """One answer to sends for each broker."""
        for broker, answer in zip(self.cluster.brokers, answers, strict=True):
            broker.answer(SEND, answer)

    def tries(self) -> list[int]:
        return [len(broker.asked(SEND)) for broker in self.cluster.brokers]


async def test_the_request_has_the_short_names_and_the_result_says_where_it_is():
    async with Sending() as it:
        result = await it.sender.send(MESSAGE, timeout_ms=30_000)
        (fields,) = it.cluster.broker.asked(SEND)
        born = int(fields.pop("g"))
        assert abs(born - it.runtime.clock.now_ms()) < 60_000
        queue_id = fields.pop("e")
        assert fields == {
            "a": "PG",
            "b": "T",
            "c": "TBW102",
            "d": "4",
            "f": "769",
            "h": "3",
            "i": "a\x01b\x02",
            "n": "broker-0",
        }
        assert it.cluster.broker.requests[0].body == b"body"
        assert result.status is SendStatus.SEND_OK
        assert result.msg_id == "UK"
        assert result.offset_msg_id == "7F0000010000559700000000000000AB"
        assert result.queue == MessageQueue("T", "broker-0", int(queue_id))
        assert result.queue_offset == 7


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ResponseCode.FLUSH_DISK_TIMEOUT, SendStatus.FLUSH_DISK_TIMEOUT),
        (ResponseCode.FLUSH_SLAVE_TIMEOUT, SendStatus.FLUSH_SLAVE_TIMEOUT),
        (ResponseCode.SLAVE_NOT_AVAILABLE, SendStatus.SLAVE_NOT_AVAILABLE),
    ],
)
async def test_stored_less_safely_is_a_result_and_no_reason_to_try_again(code, status):
    async with Sending() as it:
        it.answer(lambda command: stored(command, code))
        assert (await it.sender.send(MESSAGE, timeout_ms=30_000)).status is status
        assert it.tries() == [1]


async def test_stored_less_safely_is_sent_again_elsewhere_when_requested():
    async with Sending(2, retry_not_stored=True) as it:
        it.answer(*[lambda command: stored(command, ResponseCode.FLUSH_DISK_TIMEOUT)] * 2)
        assert (await it.sender.send(MESSAGE, timeout_ms=30_000)).status is SendStatus.FLUSH_DISK_TIMEOUT
        assert sorted(it.tries()) == [1, 2]


@pytest.mark.parametrize("code", sorted(RETRYABLE))
async def test_some_refusals_lead_to_another_broker(code):
    async with Sending(2) as it:
        it.answer(refused(code), stored)
        for _ in range(4):
            result = await it.sender.send(MESSAGE, timeout_ms=30_000)
            assert result.queue.broker_name == "broker-1"
        assert it.tries()[1] == 4


@pytest.mark.parametrize("code", sorted(RETRYABLE - PASSING))
async def test_a_refusal_that_time_does_not_mend_is_tried_three_times(code):
    async with Sending() as it:
        it.answer(refused(code))
        with pytest.raises(SendFailed, match="not stored after 3 tries on broker-0: "):
            await it.sender.send(MESSAGE, timeout_ms=600_000)
        assert it.tries() == [3]


@pytest.mark.parametrize("fields", [None, {}, {"msgId": "A", "queueId": "many", "queueOffset": "7"}])
async def test_an_answer_without_its_fields_counts_as_none(fields):
    async with Sending(2) as it:
        it.answer(lambda command: reply(command, fields=fields), stored)
        for _ in range(4):
            assert (await it.sender.send(MESSAGE, timeout_ms=30_000)).queue.broker_name == "broker-1"
        it.answer(*[lambda command: reply(command, fields=fields)] * 2)
        with pytest.raises(SendFailed, match="SendMessageResponse"):
            await it.sender.send(MESSAGE, timeout_ms=30_000)


async def test_other_refusals_are_raised_at_once_with_code_and_remark():
    async with Sending(2) as it:
        it.answer(*[refused(ResponseCode.MESSAGE_ILLEGAL, "the message is illegal")] * 2)
        with pytest.raises(
            PeerRefused, match=r"^127\.0\.0\.1:\d+ answered with code 13: the message is illegal; change"
        ):
            await it.sender.send(MESSAGE, timeout_ms=30_000)
        assert sum(it.tries()) == 1


async def test_after_the_last_try_the_error_names_the_brokers_and_the_cause():
    async with Sending(2, retries=2) as it:
        it.answer(*[refused(ResponseCode.SYSTEM_BUSY, "busy")] * 2)
        with pytest.raises(SendFailed) as caught:
            await it.sender.send(MESSAGE, timeout_ms=30_000)
        first, second, third = caught.value.brokers
        assert first == third != second
        assert isinstance(caught.value.cause, PeerRefused)
        assert "not stored after 3 tries" in str(caught.value)
        assert "code 2: busy" in str(caught.value)


FULL = refused(ResponseCode.SERVICE_NOT_AVAILABLE, "the disk is full")


def after(count, first, then):
    """Answer the first requests in one way and the others in another."""
    answers = iter([first] * count)
    return lambda command: next(answers, then)(command)


@pytest.mark.parametrize(("refusals", "is_cause"), [(4, True), (2, True), (0, False)])
async def test_the_error_names_the_cause_of_most_tries_and_then_the_others(refusals, is_cause):
    """The last try has little time: its own time-out would hide what is wrong with the broker."""
    async with Sending(try_timeout_ms=800) as it:
        await it.sender.queues("T")
        it.answer(after(refusals, FULL, lambda command: None))
        with pytest.raises(SendFailed) as caught:
            await it.sender.send(MESSAGE, timeout_ms=1500)
        text = str(caught.value)
        assert isinstance(caught.value.cause, PeerRefused if is_cause else RequestTimedOut)
        assert ("the disk is full" in text) is is_cause
        assert ("(other tries: " in text) is is_cause
        assert caught.value.__cause__ is caught.value.cause


@pytest.mark.parametrize("is_chosen", [False, True])
async def test_no_further_try_begins_with_almost_no_time_left(is_chosen):
    async with Sending() as it:
        await it.sender.queues("T")
        it.answer(FULL)
        started_ms = it.runtime.clock.monotonic_ms()
        timeouts = []
        call = it.runtime.remoting.call

        async def noted(address, command, timeout_ms):
            timeouts.append(timeout_ms)
            return await call(address, command, timeout_ms)

        it.runtime.remoting.call = noted
        queue = MessageQueue("T", "broker-0", 0) if is_chosen else None
        with pytest.raises(SendFailed) as caught:
            await it.sender.send(MESSAGE, timeout_ms=700, queue=queue)
        assert len(timeouts) > 3
        assert min(timeouts) > TRY_MS_MIN / 2
        assert it.runtime.clock.monotonic_ms() - started_ms <= 700
        assert "code 14: the disk is full" in str(caught.value)
        assert "did not answer" not in str(caught.value)


async def test_a_send_with_little_time_has_one_try():
    async with Sending() as it:
        await it.sender.queues("T")
        assert (await it.sender.send(MESSAGE, timeout_ms=50)).status is SendStatus.SEND_OK
        it.answer(FULL)
        with pytest.raises(SendFailed, match="the disk is full"):
            await it.sender.send(MESSAGE, timeout_ms=50)
        assert it.tries() == [2]


async def test_the_number_of_tries_is_a_setting():
    async with Sending(1, retries=0) as it:
        it.answer(refused(ResponseCode.SYSTEM_BUSY))
        with pytest.raises(SendFailed):
            await it.sender.send(MESSAGE, timeout_ms=30_000)
        assert it.tries() == [1]


async def test_a_chosen_queue_gets_one_try_where_the_setting_says_so():
    async with Sending(2, retry_chosen_queue=False) as it:
        await it.sender.queues("T")
        it.answer(*[refused(ResponseCode.SYSTEM_BUSY)] * 2)
        with pytest.raises(SendFailed):
            await it.sender.send(MESSAGE, timeout_ms=30_000, queue=MessageQueue("T", "broker-1", 1))
        assert it.tries() == [0, 1]
        assert it.cluster.brokers[1].asked(SEND)[0]["e"] == "1"


async def test_a_broker_that_is_gone_is_avoided_and_the_routes_are_looked_at():
    async with Sending(2) as it:
        await it.sender.queues("T")
        await it.runtime.start()
        await until(lambda: len(it.cluster.name_server.requests) == 2, "the refresh of the start")
        await it.cluster.brokers[0].stop()
        asked = 2
        for _ in range(4):
            assert (await it.sender.send(MESSAGE, timeout_ms=30_000)).queue.broker_name == "broker-1"
        await until(lambda: len(it.cluster.name_server.requests) > asked, "the route is asked for again")


async def test_no_answer_uses_up_the_time_and_names_the_broker():
    async with Sending(1) as it:
        await it.sender.queues("T")  # the route takes none of the time
        it.answer(lambda command: None)
        with pytest.raises(SendFailed) as caught:
            await it.sender.send(MESSAGE, timeout_ms=1000)
        assert it.tries() == [1]
        assert isinstance(caught.value.cause, RequestTimedOut)
        assert it.cluster.broker.address in str(caught.value)


async def test_a_limit_for_each_try_leaves_time_for_the_next():
    async with Sending(2, try_timeout_ms=1500) as it:
        it.answer(lambda command: None, stored)
        for _ in range(3):
            assert (await it.sender.send(MESSAGE, timeout_ms=20_000)).queue.broker_name == "broker-1"
        assert it.tries()[0] >= 1


async def test_an_unknown_topic_takes_the_template_and_says_so_to_the_broker():
    async with Sending() as it:
        it.cluster.topic("TBW102", queues=8, perm=7)
        message = EncodedMessage("New", b"x", "", "UK")
        sent = {(await it.sender.send(message, timeout_ms=30_000)).queue.queue_id for _ in range(20)}
        assert sent == {0, 1, 2, 3}
        assert it.cluster.broker.asked(SEND)[0]["c"] == "TBW102"
        assert [fields["topic"] for fields in it.cluster.name_server.asked(RequestCode.GET_ROUTEINFO_BY_TOPIC)] == [
            "New",
            "TBW102",
        ]


async def test_no_route_names_topic_name_servers_and_remedy():
    async with Sending() as it:
        with pytest.raises(NoRoute) as caught:
            await it.sender.send(EncodedMessage("New", b"x", "", "UK"), timeout_ms=30_000)
        assert str(caught.value) == (
            f"no broker accepts messages for topic New, asked name servers {it.cluster.namesrv}: create the topic, or "
            "start a broker with autoCreateTopicEnable=true"
        )


async def test_many_first_sends_ask_for_the_route_once():
    async with Sending() as it:
        await asyncio.gather(*(it.sender.send(MESSAGE, timeout_ms=30_000) for _ in range(50)))
        assert len(it.cluster.name_server.requests) == 1


async def test_many_first_sends_wait_for_a_silent_name_server_together_and_not_one_after_the_other():
    async with Sending() as it:
        it.cluster.name_server.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, lambda command: None)
        it.runtime = ClientRuntime(it.cluster.namesrv, settings=ClientSettings(api_timeout_ms=1000))
        it.sender = Sender(it.runtime, "PG", it.settings)
        sends = [it.sender.send(EncodedMessage("New", b"x", "", "UK"), timeout_ms=30_000) for _ in range(50)]
        failures = await asyncio.gather(*sends, return_exceptions=True)
        assert {type(failure) for failure in failures} == {NoNameServer}
        assert len(it.cluster.name_server.requests) == 1


async def test_one_way_is_written_once_and_not_answered():
    async with Sending() as it:
        await it.sender.send_one_way(MESSAGE, timeout_ms=30_000)
        await until(lambda: it.tries() == [1], "the request arrives")
        assert it.cluster.broker.requests[0].is_one_way


async def test_one_way_sends_wait_for_a_broker_that_does_not_read():
    held, taken = [], 0

    async def hold(reader, writer):
        writer.transport.pause_reading()
        held.append((reader, writer))

    async def read(reader):
        while await reader.read(1 << 20):
            pass

    async with Sending() as it, await asyncio.start_server(hold, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        it.cluster.routes["T"].broker_datas[0].broker_addrs = {0: address}
        large = EncodedMessage("T", bytes(1 << 16), "", "UK")

        async def send():
            nonlocal taken
            for _ in range(600):
                await it.sender.send_one_way(large, timeout_ms=30_000)
                taken += 1

        sending = asyncio.create_task(send())
        await until(lambda: held, "the connection")
        connection = await it.runtime.remoting.connection(address)
        before = -1
        while before != taken:  # the kernels of both sides take some of it, now and then more
            await until(lambda: not connection.is_writable, "more is sent than is taken")
            before = taken
            for _ in range(100):
                await asyncio.sleep(0)
        assert taken < 600
        ((reader, writer),) = held
        writer.transport.resume_reading()
        reading = asyncio.create_task(read(reader))
        await sending
        assert taken == 600
        await it.runtime.close()
        await reading
        writer.close()


async def test_retry_topics_carry_their_count_in_the_header():
    async with Sending() as it:
        it.cluster.topic("%RETRY%G", queues=1)
        await it.sender.send(
            EncodedMessage("%RETRY%G", b"x", "", "UK", reconsume_times=3, retries_max=16), timeout_ms=30_000
        )
        (fields,) = it.cluster.broker.asked(SEND)
        assert (fields["j"], fields["l"]) == ("3", "16")


async def test_batches_have_their_own_code_and_flag():
    async with Sending() as it:
        await it.sender.send(EncodedMessage("T", b"x", "", "U1,U2", is_batch=True), timeout_ms=30_000)
        (fields,) = it.cluster.broker.asked(RequestCode.SEND_BATCH_MESSAGE)
        assert fields["m"] == "true"


async def test_a_silent_name_server_does_not_hold_a_send_beyond_its_time():
    async with Sending() as it:
        it.runtime.routes._name_servers._timeout_ms = 500.0 * SECONDS
        asked = []
        it.cluster.name_server.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, asked.append)
        text = (
            rf"^no name server returned the route of topic T in \d+ ms, asked {re.escape(it.cluster.namesrv)}: check "
        )
        with pytest.raises(NoRoute, match=text):
            await it.sender.send(MESSAGE, timeout_ms=10)
        with pytest.raises(NoRoute, match=text):
            await it.sender.send_one_way(MESSAGE, timeout_ms=10)
        await until(lambda: asked, "the question, for which both had no time to wait")
        assert len(asked) == 1
