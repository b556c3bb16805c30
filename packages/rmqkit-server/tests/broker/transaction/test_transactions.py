"""Transactions over the wire: half messages, END_TRANSACTION and its refusals, questions, restarts.

Codes and remarks are those of a 5.4.0 broker that was asked the same (behaviour.md §9.1, remoting.md §4.3.5).
"""

from __future__ import annotations

import asyncio
import errno

import pytest

from rmqkit.errors import RequestTimedOut
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header, request
from rmqkit.protocol.ids import decode_offset_id, offset_id
from rmqkit.protocol.message import read_messages
from rmqkit.protocol.names import HALF_TOPIC, OP_HALF_TOPIC
from rmqkit.protocol.record import iter_records, pack_host
from rmqkit.protocol.schemas.send import (
    CheckTransactionRequest,
    EndTransactionRequest,
    ResumeCheckRequest,
    SendMessageResponse,
)
from rmqkit.remoting.connection import Connection
from rmqkit.store.settings import FlushDiskType
from tests.broker.cluster import Cluster
from tests.store.inside import appender_of
from tests.virtual_time import run as run_virtual
from tests.waiting import SECONDS

HALF = "TRAN_MSG\x01true\x02PGROUP\x01p\x02UNIQ_KEY\x01K\x02"
COMMIT, ROLLBACK, UNKNOWN = 8, 12, 0
NO_REMARK = "not set any response code"
NOT_FOUND = "Find prepared transaction message failed"
NOTHING = (ResponseCode.PULL_RETRY_IMMEDIATELY, ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_OFFSET_MOVED)
KEPT = {"file_reserved_hours": 1_000_000}  # the messages here are born in 2023
OFTEN = {"transaction_check_interval_ms": 20, "transaction_timeout_ms": 0}


class Half:
    """A half message that was sent, and how to decide it."""

    def __init__(self, cluster, answer):
        self.cluster = cluster
        self.answer = decode_header(answer, SendMessageResponse)
        self.physical_offset = decode_offset_id(self.answer.msg_id)[2]

    def end(self, decision, **changes):
        fields = {
            "producerGroup": "p",
            "tranStateTableOffset": self.answer.queue_offset,
            "commitLogOffset": self.physical_offset,
            "commitOrRollback": decision,
            "fromTransactionCheck": "false",
            "msgId": "K",
        } | changes
        named = {name: str(value) for name, value in fields.items() if value is not None}
        return Command(RequestCode.END_TRANSACTION, fields=named)

    async def decide(self, decision, **changes):
        answer = await self.cluster.client.call(
            self.cluster.standalone.broker_address, self.end(decision, **changes), 10_000
        )
        return answer.code, answer.remark


async def send_half(cluster, properties=HALF, **fields):
    answer = await cluster.send(properties=properties, **fields)
    assert answer.code == 0, answer.remark
    return Half(cluster, answer)


async def stored(cluster, topic="T", queue_id=0):
    answer = await cluster.pull(topic=topic, queue_id=queue_id, suspend_ms=0)
    return list(iter_records(answer.payload)) if answer.code == 0 else []


async def until(condition):
    async with asyncio.timeout(SECONDS):
        while not (found := await condition()):
            await asyncio.sleep(0.01)
        return found


async def test_a_half_message_is_answered_but_not_seen_until_it_is_committed(cluster):
    await send_half(cluster, body=b"before")
    half = await send_half(cluster, HALF + "TAGS\x01a\x02", flag=7, queue_id=2)
    assert (half.answer.queue_id, half.answer.queue_offset, half.answer.transaction_id) == (2, 1, "K")
    assert await stored(cluster, queue_id=2) == []
    assert await half.decide(COMMIT) == (0, None)

    (record,) = await stored(cluster, queue_id=2)
    assert (record.body, record.flag, record.sys_flag, record.queue_offset) == (b"hello", 7, 8, 0)
    assert record.prepared_transaction_offset == half.physical_offset
    (message,) = read_messages((await cluster.pull(queue_id=2)).body)
    assert message.properties == {
        "TRAN_MSG": "true",
        "PGROUP": "p",
        "UNIQ_KEY": "K",
        "__transactionId__": "K",
        "TAGS": "a",
        "MSG_REGION": "DefaultRegion",
        "TRACE_ON": "true",
        "CLUSTER": "DefaultCluster",
    }


async def test_a_rolled_back_message_is_never_seen(tmp_path):
    async with Cluster(tmp_path / "store", broker={"transaction_op_interval_ms": 20, **OFTEN}) as cluster:
        half = await send_half(cluster)
        assert await half.decide(ROLLBACK) == (0, NO_REMARK)
        assert await stored(cluster) == []
        (op,) = await until(lambda: stored(cluster, OP_HALF_TOPIC))
        assert op.body == b"0,"


@pytest.mark.parametrize("queue_id", [0, 3])
async def test_one_way_decisions_are_carried_out(queue_id, cluster):
    half = await send_half(cluster, queue_id=queue_id)
    decision = half.end(COMMIT)
    decision.flag = 2
    await cluster.client.send_one_way(cluster.standalone.broker_address, decision, 60_000)
    assert len(await until(lambda: stored(cluster, queue_id=queue_id))) == 1


async def test_an_unknown_decision_is_not_answered(cluster):
    half = await send_half(cluster)
    with pytest.raises(RequestTimedOut):
        await cluster.client.call(cluster.standalone.broker_address, half.end(UNKNOWN), 200)
    assert await half.decide(COMMIT) == (0, None)


REFUSED = [
    ({"producerGroup": "q"}, "The producer group wrong"),
    ({"producerGroup": ""}, "The producer group wrong"),
    ({"producerGroup": None}, "The producer group wrong"),
    ({"tranStateTableOffset": 77}, "The transaction state table offset wrong"),
    ({"tranStateTableOffset": -1}, "The transaction state table offset wrong"),
    ({"commitLogOffset": -1}, NOT_FOUND),
    ({"commitLogOffset": 10**9}, NOT_FOUND),
    ({"commitLogOffset": 2**62}, NOT_FOUND),
    ({"commitOrRollback": 3}, "commitOrRollback field wrong"),
    ({"commitOrRollback": -8}, "commitOrRollback field wrong"),
]


@pytest.mark.parametrize("decision", [COMMIT, ROLLBACK])
async def test_a_decision_about_something_else_is_refused_and_changes_nothing(decision, cluster):
    await send_half(cluster, body=b"first")
    half = await send_half(cluster)
    for changes, remark in REFUSED:
        assert await half.decide(decision, **changes) == (ResponseCode.SYSTEM_ERROR, remark), changes
    assert await stored(cluster) == []
    assert await half.decide(COMMIT) == (0, None)
    assert [record.body for record in await stored(cluster)] == [b"hello"]


@pytest.mark.parametrize("name", ["commitLogOffset", "tranStateTableOffset", "commitOrRollback"])
async def test_a_field_that_is_missing_or_no_number_is_an_error(name, cluster):
    half = await send_half(cluster)
    for value in (None, "", "abc", str(2**63)):
        code, remark = await half.decide(COMMIT, **{name: value})
        assert (code, bool(remark)) == (ResponseCode.SYSTEM_ERROR, True), value
    assert await stored(cluster) == []
    assert await half.decide(COMMIT) == (0, None)


async def test_places_in_the_log_that_hold_no_half_message_are_refused(cluster):
    half = await send_half(cluster)
    normal = Half(cluster, await cluster.send(properties="PGROUP\x01p\x02UNIQ_KEY\x01N\x02"))
    forged = Half(cluster, await cluster.send(topic="Other", properties="PGROUP\x01p\x02REAL_TOPIC\x01T\x02"))
    for place in (half.physical_offset + 1, half.physical_offset + 4):
        assert await half.decide(COMMIT, commitLogOffset=place) == (1, NOT_FOUND)
    for message in (normal, forged):
        assert await message.decide(COMMIT) == (1, NOT_FOUND)
        assert await message.decide(ROLLBACK) == (1, NOT_FOUND)
    assert await half.decide(COMMIT) == (0, None)
    (plain, committed) = await stored(cluster)
    again = Half(cluster, await cluster.send(topic="Other"))
    again.physical_offset, again.answer.queue_offset = committed.physical_offset, committed.queue_offset
    assert await again.decide(COMMIT) == (1, NOT_FOUND)
    assert plain.sys_flag == 0


async def test_a_half_message_without_a_group_belongs_to_nobody(cluster):
    half = await send_half(cluster, "TRAN_MSG\x01TRUE\x02UNIQ_KEY\x01K\x02")
    assert await half.decide(COMMIT) == (1, "The producer group wrong")
    assert await half.decide(COMMIT, producerGroup=None) == (1, "The producer group wrong")


async def test_a_missing_message_id_is_not_missed(cluster):
    half = await send_half(cluster)
    assert await half.decide(COMMIT, msgId=None) == (0, None)


async def test_past_its_own_immunity_only_the_answer_to_a_question_counts(cluster):
    half = await send_half(cluster, HALF + "CHECK_IMMUNITY_TIME_IN_SECONDS\x013\x02")  # born long ago
    for decision in (COMMIT, ROLLBACK):
        assert await half.decide(decision) == (ResponseCode.ILLEGAL_OPERATION, NO_REMARK)
    assert await stored(cluster) == []
    assert await half.decide(COMMIT, fromTransactionCheck="true") == (0, None)
    assert len(await stored(cluster)) == 1


async def test_within_its_own_immunity_a_decision_counts(cluster):
    properties = HALF + "CHECK_IMMUNITY_TIME_IN_SECONDS\x019999999999\x02"
    assert await (await send_half(cluster, properties)).decide(COMMIT) == (0, None)


async def test_half_messages_may_be_forbidden(tmp_path):
    async with Cluster(tmp_path / "store", broker={"reject_transactions": True}) as cluster:
        answer = await cluster.send(properties=HALF)
        assert (answer.code, answer.remark) == (
            ResponseCode.NO_PERMISSION,
            "the broker[127.0.0.1] sending transaction message is forbidden",
        )
        assert (await cluster.send()).code == 0


async def test_a_missing_unique_key_becomes_the_transaction_id(cluster):
    half = await send_half(cluster, "TRAN_MSG\x01true\x02PGROUP\x01p\x02")
    await half.decide(COMMIT)
    (message,) = read_messages((await cluster.pull()).body)
    assert message.properties["__transactionId__"] == message.properties["UNIQ_KEY"] == half.answer.transaction_id


async def test_the_delay_of_a_half_message_begins_at_its_commit(cluster):
    half = await send_half(cluster, HALF + "DELAY\x0118\x02")
    assert len(await stored(cluster, HALF_TOPIC)) == 1
    assert await half.decide(COMMIT) == (0, None)
    assert await stored(cluster) == []
    (delayed,) = await stored(cluster, "SCHEDULE_TOPIC_XXXX", 17)
    assert delayed.sys_flag == 8


async def test_a_commit_the_store_does_not_take_may_be_redelivered(monkeypatch, cluster):
    half = await send_half(cluster)
    store = cluster.standalone.broker.context.store
    appender_of(store).refusal = "the disk is full"
    code, remark = await half.decide(COMMIT)
    assert (code, "the disk is full" in remark) == (ResponseCode.SERVICE_NOT_AVAILABLE, True)
    appender_of(store).refusal = ""
    assert await half.decide(COMMIT) == (0, None)
    assert len(await stored(cluster)) == 1


async def test_under_sync_flush_an_answered_commit_is_on_the_disk(tmp_path):
    async with Cluster(tmp_path / "store", store={"flush_disk_type": FlushDiskType.SYNC_FLUSH}) as cluster:
        half = await send_half(cluster)
        assert await half.decide(COMMIT) == (0, None)
        store = cluster.standalone.broker.context.store
        (record,) = await stored(cluster)
        assert store.durable_offset >= record.physical_offset + record.size


async def test_a_commit_whose_flush_fails_is_no_success(monkeypatch, tmp_path):
    async with Cluster(tmp_path / "store", store={"flush_disk_type": FlushDiskType.SYNC_FLUSH}) as cluster:
        half = await send_half(cluster)

        def refuse(fd):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr("rmqkit.system.disk.sync_data", refuse)
        code, remark = await half.decide(COMMIT)
        monkeypatch.undo()
        assert (code, remark) == (ResponseCode.SYSTEM_ERROR, f"flush failed: errno {errno.EIO} Input/output error")


def answering(cluster, decisions):
    """Answers the broker's questions about a body with what ``decisions`` says; returns the list of bodies asked."""
    asked = []

    def answer(connection: Connection, command: Command) -> None:
        header = decode_header(command, CheckTransactionRequest)
        (record,) = iter_records(command.payload)
        asked.append(record.body)
        decision = EndTransactionRequest(
            producer_group="p",
            tran_state_table_offset=header.tran_state_table_offset,
            commit_log_offset=header.commit_log_offset,
            commit_or_rollback=decisions.get(record.body, UNKNOWN),
            from_transaction_check=True,
            msg_id=header.msg_id,
        )
        connection.send(request(RequestCode.END_TRANSACTION, decision, one_way=True))

    cluster.client._router.register(RequestCode.CHECK_TRANSACTION_STATE, answer)
    return asked


@pytest.mark.parametrize("flush_disk_type", list(FlushDiskType))
async def test_a_producer_that_answers_questions_decides(flush_disk_type, tmp_path):
    async with Cluster(
        tmp_path / "store",
        broker={"transaction_checks_max": 3, **OFTEN},
        store={"flush_disk_type": flush_disk_type, **KEPT},
    ) as cluster:
        asked = answering(cluster, {b"yes": COMMIT, b"no": ROLLBACK})
        await cluster.heartbeat("me")
        for body in (b"yes", b"no", b"maybe"):
            await send_half(cluster, body=body)

        async def given_up():
            return await stored(cluster, "TRANS_CHECK_MAX_TIME_TOPIC")

        (record,) = await until(given_up)
        assert record.body == b"maybe"
        assert [record.body for record in await stored(cluster)] == [b"yes"]
        assert sorted(asked) == [b"maybe"] * 3 + [b"no", b"yes"]


@pytest.mark.virtual_time
def test_what_is_open_at_a_stop_is_asked_about_after_the_next_start(tmp_path):
    async def first():
        async with Cluster(tmp_path / "store") as cluster:
            await send_half(cluster, body=b"open")
            await (await send_half(cluster, body=b"committed")).decide(COMMIT)
            await (await send_half(cluster, body=b"dropped")).decide(ROLLBACK)

    async def second():
        async with Cluster(tmp_path / "store", broker=OFTEN, store=KEPT) as cluster:
            asked = answering(cluster, {b"open": COMMIT})
            await cluster.heartbeat("me")

            async def both():
                return len(await stored(cluster)) == 2

            await until(both)
            assert [record.body for record in await stored(cluster)] == [b"committed", b"open"]
            assert set(asked) == {b"open"}

    run_virtual(first())
    run_virtual(second())


async def test_a_half_message_that_was_given_up_can_be_asked_about_again(cluster):
    half = await send_half(cluster)
    normal = Half(cluster, await cluster.send())
    resumed = await cluster.call(RequestCode.RESUME_CHECK_HALF_MESSAGE, ResumeCheckRequest(msg_id=half.answer.msg_id))
    assert (resumed.code, resumed.remark) == (0, None)
    first, again = await stored(cluster, HALF_TOPIC)
    assert (again.body, again.queue_offset) == (first.body, 1)
    assert b"TRANSACTION_CHECK_TIMES\x010\x02" in again.properties

    beyond = offset_id(pack_host("127.0.0.1", 1), 1 << 40)
    for msg_id in ("zz", "", beyond, normal.answer.msg_id):
        answer = await cluster.call(RequestCode.RESUME_CHECK_HALF_MESSAGE, ResumeCheckRequest(msg_id=msg_id))
        assert (answer.code, answer.remark) == (
            ResponseCode.SYSTEM_ERROR,
            "Exception was thrown when putting message back to RMQ_SYS_TRANS_HALF_TOPIC.",
        )


@pytest.mark.parametrize("decision", [COMMIT, ROLLBACK])
async def test_half_message_can_be_decided_while_it_waits_in_the_transient_store_pool(tmp_path, decision):
    hour = 3_600_000
    waits = {"commit_interval_ms": hour, "flush_interval_ms": hour, "flush_disk_type": FlushDiskType.ASYNC_FLUSH}
    async with Cluster(tmp_path, store=waits | {"transient_store_pool": True}) as cluster:
        half = await send_half(cluster)
        assert await half.decide(decision) == (0, None if decision == COMMIT else NO_REMARK)
        assert await half.decide(COMMIT if decision == ROLLBACK else ROLLBACK) != (0, None)
        store = cluster.standalone.broker.context.store
        store.flusher.commit()
        store.dispatch()
        assert len(await stored(cluster)) == (decision == COMMIT)
