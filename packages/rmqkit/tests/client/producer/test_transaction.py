"""Transactions against our own broker, and against scripted ones. Source: behaviour.md §7.9, §9.1."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime, timedelta

import pytest

from rmqkit.broker.settings import BrokerSettings
from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.client.producer.transaction import TransactionProducer, TransactionState
from rmqkit.client.runtime.settings import ProducerSettings
from rmqkit.errors import MessageIllegal, SendFailed
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_fields, request
from rmqkit.protocol.message import Message
from rmqkit.protocol.properties import decode_properties
from rmqkit.protocol.record import decode_record
from rmqkit.protocol.schemas.send import CheckTransactionRequest
from rmqkit.standalone import Standalone
from rmqkit.system import threads
from tests.client.messages import record
from tests.client.peers import Cluster, refused, stored, until
from tests.waiting import SECONDS

COMMIT, ROLLBACK, UNKNOWN = TransactionState.COMMIT, TransactionState.ROLLBACK, TransactionState.UNKNOWN
END = RequestCode.END_TRANSACTION


def never(*arguments):
    raise AssertionError(f"called with {arguments}")


def standalone(root):
    quick = BrokerSettings(
        listen_port=0,
        bind_address="127.0.0.1",
        transaction_timeout_ms=100,
        transaction_check_interval_ms=100,
        transaction_checks_max=1_000_000,
    )
    return Standalone(root / "store", broker=quick)


async def visible(namesrv, topic="T"):
    """Return the bodies that consumers see."""
    async with PullConsumer("CG", namesrv) as consumer:
        found = [(await consumer.pull(queue, 0)).messages for queue in await consumer.queues(topic)]
    return sorted(message.body for messages in found for message in messages)


async def until_visible(namesrv, count):
    async with asyncio.timeout(SECONDS):
        while len(bodies := await visible(namesrv)) < count:
            await asyncio.sleep(0.01)
    return bodies


async def test_committed_messages_are_seen_and_rolled_back_ones_are_not(tmp_path):
    executed = []

    async def execute(message, argument):
        executed.append((message.msg_id, message.body))
        return argument

    async with standalone(tmp_path) as cluster:
        async with TransactionProducer("TG", cluster.namesrv_address, execute=execute, check=never) as producer:
            sent = [
                await producer.send_in_transaction(Message(topic="T", body=b"%d" % i, tags="A"), argument)
                for i, argument in enumerate((COMMIT, ROLLBACK, COMMIT))
            ]
            await producer.send(Message(topic="T", body=b"plain"))
            bodies = await until_visible(cluster.namesrv_address, 3)
        assert bodies == [b"0", b"2", b"plain"]
    assert [result.state for result in sent] == [COMMIT, ROLLBACK, COMMIT]
    assert executed == [(result.sent.msg_id, b"%d" % i) for i, result in enumerate(sent)]


@pytest.mark.parametrize("outcome", [UNKNOWN, None, RuntimeError("database is down"), "COMMIT"], ids=repr)
async def test_what_is_not_known_is_checked_until_it_is(tmp_path, outcome, caplog):
    caplog.set_level(logging.CRITICAL)
    checked = []

    async def execute(message, argument):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def check(message):
        checked.append(message)
        if len(checked) == 1:
            raise RuntimeError("database is still down")
        return COMMIT

    async with (
        standalone(tmp_path) as cluster,
        TransactionProducer("TG", cluster.namesrv_address, execute=execute, check=check) as producer,
    ):
        result = await producer.send_in_transaction(Message(topic="T", body=b"x", tags="A", keys=["k"]))
        assert await until_visible(cluster.namesrv_address, 1) == [b"x"]
    assert result.state is UNKNOWN
    assert isinstance(result.error, ValueError) if outcome == "COMMIT" else result.error in (outcome, None)
    assert {message.msg_id for message in checked} == {result.sent.msg_id}
    assert (checked[0].topic, checked[0].body, checked[0].tags, checked[0].keys) == ("T", b"x", "A", ["k"])


async def test_another_producer_of_the_group_is_asked_when_the_first_is_gone(tmp_path):
    async with standalone(tmp_path) as cluster:
        first = TransactionProducer("TG", cluster.namesrv_address, execute=lambda message, argument: None, check=never)
        async with first:
            sent = await first.send_in_transaction(Message(topic="T", body=b"x"))
        asked = []

        def check(message):
            asked.append((message.msg_id, threads.current_name()))
            return COMMIT

        async with TransactionProducer("TG", cluster.namesrv_address, execute=never, check=check) as second:
            await second.queues("T")  # knows the brokers from now on, and they it
            assert await until_visible(cluster.namesrv_address, 1) == [b"x"]
        assert asked[0][0] == sent.sent.msg_id
        assert asked[0][1].startswith("rmqkit TG"), "a plain function has a thread"


async def test_the_end_is_reported_one_way_with_the_place_of_the_half_message():
    async def execute(message, argument):
        raise ValueError(argument)

    async with Cluster() as cluster:
        cluster.topic("T", queues=1)
        async with TransactionProducer("TG", cluster.namesrv, execute=execute, check=never) as producer:
            result = await producer.send_in_transaction(Message(topic="T", body=b"x"), "no stock")
            await until(lambda: cluster.broker.asked(END), "the end of the transaction")
        (half,) = cluster.broker.asked(RequestCode.SEND_MESSAGE_V2)
        assert int(half["f"]) & 0xC == 4
        assert "TRAN_MSG\x01true\x02PGROUP\x01TG\x02" in half["i"]
        (command,) = (command for command in cluster.broker.requests if command.code == END)
        assert (command.is_one_way, command.remark) == (True, "ValueError: no stock")
        assert decode_fields(command) == {
            "topic": "T",
            "producerGroup": "TG",
            "tranStateTableOffset": "7",
            "commitLogOffset": str(0xAB),
            "commitOrRollback": "0",
            "fromTransactionCheck": "false",
            "msgId": result.sent.msg_id,
            "transactionId": "T",
            "bname": "broker-0",
        }


async def test_a_half_message_that_is_not_stored_safely_is_rolled_back_without_the_transaction():
    async with Cluster() as cluster:
        cluster.topic("T", queues=1)
        cluster.broker.answer(
            RequestCode.SEND_MESSAGE_V2, lambda command: stored(command, ResponseCode.FLUSH_DISK_TIMEOUT)
        )
        async with TransactionProducer("TG", cluster.namesrv, execute=never, check=never) as producer:
            assert (await producer.send_in_transaction(Message(topic="T", body=b"x"))).state is ROLLBACK
            await until(lambda: cluster.broker.asked(END), "the end of the transaction")
            assert cluster.broker.asked(END)[0]["commitOrRollback"] == "12"


async def test_without_a_stored_half_message_nothing_runs_and_nothing_ends():
    async with Cluster() as cluster:
        cluster.topic("T", queues=1)
        cluster.broker.answer(RequestCode.SEND_MESSAGE_V2, refused(ResponseCode.SYSTEM_BUSY))
        settings = ProducerSettings(retries=0)
        producer = TransactionProducer("TG", cluster.namesrv, execute=never, check=never, settings=settings)
        async with producer:
            with pytest.raises(SendFailed):
                await producer.send_in_transaction(Message(topic="T", body=b"x"))
            for delay in ({"delay_level": 1}, {"delay": 1}, {"deliver_at": datetime.now(UTC)}):
                with pytest.raises(MessageIllegal, match="in a transaction cannot have a delay, brokers drop it"):
                    await producer.send_in_transaction(Message(topic="T", body=b"x", **delay))
            with pytest.raises(MessageIllegal, match="in a transaction cannot have a priority"):
                await producer.send_in_transaction(Message(topic="T", body=b"x", priority=1))
        assert cluster.broker.asked(END) == []


async def test_an_end_that_cannot_be_reported_is_left_to_the_checks(caplog):
    async with Cluster() as cluster:
        cluster.topic("T", queues=1)

        async def execute(message, argument):
            await cluster.broker.stop()
            await asyncio.sleep(1)  # a one-way command on a connection that closes is lost without a sign
            return COMMIT

        async with TransactionProducer("TG", cluster.namesrv, execute=execute, check=never) as producer:
            assert (await producer.send_in_transaction(Message(topic="T", body=b"x"))).state is COMMIT
        assert ", the broker will check it: cannot connect to" in caplog.text


async def test_checks_that_cannot_be_kept_are_dropped(caplog):
    caplog.set_level(logging.WARNING)
    go_on = asyncio.Event()

    async def check(message):
        await go_on.wait()
        return COMMIT

    async with Cluster() as cluster:
        cluster.topic("T", queues=1)
        async with TransactionProducer("TG", cluster.namesrv, execute=never, check=check) as producer:
            await producer.send(Message(topic="T", body=b"x"))
            for offset in range(2010):
                header = CheckTransactionRequest(tran_state_table_offset=offset, commit_log_offset=0)
                body = record(offset, PGROUP="TG")
                question = request(RequestCode.CHECK_TRANSACTION_STATE, header, body, one_way=True)
                cluster.broker.connections[0].send(question)
            await until(lambda: "id-2009: 2000 checks wait, the broker will check again" in caplog.text, "the last one")
            go_on.set()
            dropped = caplog.text.count("2000 checks wait")
            await until(lambda: len(cluster.broker.asked(END)) == 2010 - dropped, "the answers to all others")
            assert 0 < dropped <= 10


async def test_checks_whose_own_waiting_was_cancelled_are_not_known_and_others_continue():
    async def check(message):
        if message.queue_offset < 10:
            raise asyncio.CancelledError  # as a pool of connections that closes
        return COMMIT

    async with Cluster() as cluster:
        cluster.topic("T", queues=1)
        async with TransactionProducer("TG", cluster.namesrv, execute=never, check=check) as producer:
            await producer.send(Message(topic="T", body=b"x"))
            for offset in range(11):
                header = CheckTransactionRequest(tran_state_table_offset=offset, commit_log_offset=0)
                question = request(
                    RequestCode.CHECK_TRANSACTION_STATE, header, record(offset, PGROUP="TG"), one_way=True
                )
                cluster.broker.connections[0].send(question)
            await until(lambda: len(cluster.broker.asked(END)) == 11, "all answers")
    assert sorted(one["commitOrRollback"] for one in cluster.broker.asked(END)) == ["0"] * 10 + ["8"]


async def test_a_check_is_answered_with_the_places_it_came_with():
    async with Cluster() as cluster:
        cluster.topic("T", queues=1)
        header = CheckTransactionRequest(
            tran_state_table_offset=5, commit_log_offset=9, transaction_id="tid", bname="broker-0"
        )
        async with (
            TransactionProducer("TG", cluster.namesrv, execute=never, check=lambda message: ROLLBACK) as producer,
            Producer("other", cluster.namesrv) as other,
        ):
            for one in (other, producer):
                await one.send(Message(topic="T", body=b"x"))
            for connection in cluster.broker.connections:
                body = record(3, PGROUP="TG", TRAN_MSG="true")
                connection.send(request(RequestCode.CHECK_TRANSACTION_STATE, header, body, one_way=True))
            await until(lambda: cluster.broker.asked(END), "the answer")
        (answer,) = cluster.broker.asked(END)  # the other producer is not of the group and says nothing
        assert answer == {
            "topic": "T",
            "producerGroup": "TG",
            "tranStateTableOffset": "5",
            "commitLogOffset": "9",
            "commitOrRollback": "12",
            "fromTransactionCheck": "true",
            "msgId": "id-3",
            "transactionId": "tid",
            "bname": "broker-0",
        }


async def half_message(root, properties=None, **arguments):
    """Send a half message; return the properties with which it is stored."""
    async with standalone(root) as cluster:
        producer = TransactionProducer("TG", cluster.namesrv_address, execute=never, check=lambda message: None)
        async with producer:
            await producer.send_half(Message(topic="T", body=b"x", properties=properties or {}), **arguments)
        context = cluster.broker.context
        (raw,) = context.store.get("RMQ_SYS_TRANS_HALF_TOPIC", 0, 0, count_max=1).records
        return decode_properties(decode_record(raw).properties)


@pytest.mark.parametrize(("seconds", "stored_seconds"), [(1, "1"), (0.2, "1"), (90.5, "91"), (31_536_000, "31536000")])
async def test_check_after_is_how_long_nobody_is_asked(seconds, stored_seconds, tmp_path):
    found = await half_message(tmp_path, check_after=seconds)
    assert found["CHECK_IMMUNITY_TIME_IN_SECONDS"] == stored_seconds


async def test_check_after_may_be_a_property_as_in_java(tmp_path):
    found = await half_message(tmp_path, {"CHECK_IMMUNITY_TIME_IN_SECONDS": "15"})
    assert found["CHECK_IMMUNITY_TIME_IN_SECONDS"] == "15"


@pytest.mark.parametrize("seconds", [0, -1, 31_536_001, float("nan"), timedelta(days=366)])
async def test_check_after_has_bounds(seconds, tmp_path):
    with pytest.raises(
        MessageIllegal,
        match=r"check_after=.+ of a message for topic T must be more than 0",
    ):
        await half_message(tmp_path, check_after=seconds)
