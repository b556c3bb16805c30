"""SIGKILL in the middle of transactions: what was committed arrives, what was rolled back does not, nothing is stuck.

A producer with four kinds of transactions, committed or rolled back at once or only when asked, talks to
a broker process that is killed again and again; the last broker is left to finish. At least once: a crash that loses an
op message commits twice, never not at all.
"""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.errors import RemotingError
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import decode_fields, decode_header, request
from rmqkit.protocol.ids import decode_offset_id
from rmqkit.protocol.names import HALF_TOPIC
from rmqkit.protocol.record import iter_records
from rmqkit.protocol.schemas.clients import HeartbeatData, ProducerData
from rmqkit.protocol.schemas.offsets import QueryConsumerOffsetRequest, QueueRequest
from rmqkit.protocol.schemas.pull import PullFlag, PullMessageRequest, PullMessageResponse
from rmqkit.protocol.schemas.send import (
    CheckTransactionRequest,
    EndTransactionRequest,
    SendMessageResponse,
    SendMessageV2Request,
)
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.router import Router
from tests.examples import chosen_seed
from tests.interop.standalone import run_standalone

KILLS = 3
IN_FLIGHT = 8
ACKNOWLEDGED_MAX = 150
SECONDS_MAX = 150
COMMIT, ROLLBACK = 8, 12
BROKER_CONF = """
transactionTimeOut=100
transactionCheckInterval=50
transactionCheckMax=1000000
transactionOpBatchInterval=100
mappedFileSizeCommitLog=1048576
flushDiskType={flush_disk_type}
"""


class TransactionProducer:
    """Sends half messages ``<kind> <number>``: a kind with ``c`` is to be committed, with ``!`` at once."""

    def __init__(self, address):
        self.address = address
        dispatch = Router()
        dispatch.register(RequestCode.CHECK_TRANSACTION_STATE, self.asked)
        self.client = RemotingClient(dispatch)

    def asked(self, connection, command):
        header = decode_header(command, CheckTransactionRequest)
        (record,) = iter_records(command.payload)
        place = (header.tran_state_table_offset, header.commit_log_offset)
        connection.send(_decision(record.body, *place, from_check=True))

    async def call(self, code, header=None, body=b""):
        return await self.client.call(self.address, request(code, header, body), 60_000)

    async def introduce(self):
        data = HeartbeatData(clientID="me", consumerDataSet=[], producerDataSet=[ProducerData("p")])
        await self.call(RequestCode.HEART_BEAT, body=msgspec.json.encode(data))

    async def send(self, body):
        header = SendMessageV2Request(
            producer_group="p",
            topic="T",
            default_topic="TBW102",
            default_topic_queue_nums=1,
            queue_id=0,
            sys_flag=4,
            born_timestamp=SYSTEM_CLOCK.now_ms(),
            flag=0,
            properties="TRAN_MSG\x01true\x02PGROUP\x01p\x02",
        )
        answer = await self.call(RequestCode.SEND_MESSAGE_V2, header, body)
        assert answer.code == 0, answer.remark
        sent = decode_header(answer, SendMessageResponse)
        if b"!" in body:
            decision = _decision(body, sent.queue_offset, decode_offset_id(sent.msg_id)[2])
            await self.client.send_one_way(self.address, decision, 60_000)

    async def bodies(self, topic="T"):
        found, offset = [], 0
        while True:
            header = PullMessageRequest(
                consumer_group="g",
                topic=topic,
                queue_id=0,
                queue_offset=offset,
                max_msg_nums=32,
                sys_flag=PullFlag.SUBSCRIPTION,
                commit_offset=0,
                suspend_timeout_millis=0,
                sub_version=0,
                subscription="*",
            )
            answer = await self.call(RequestCode.PULL_MESSAGE, header)
            if answer.code != 0:
                return found
            found += [record.body for record in iter_records(answer.payload)]
            offset = decode_header(answer, PullMessageResponse).next_begin_offset

    async def is_settled(self):
        """Return True if the checks have passed every half message. The end is read last: a check may put one back."""
        position = await self.call(
            RequestCode.QUERY_CONSUMER_OFFSET, QueryConsumerOffsetRequest("CID_RMQ_SYS_TRANS", HALF_TOPIC, 0)
        )
        end = await self.call(RequestCode.GET_MAX_OFFSET, QueueRequest(HALF_TOPIC, 0))
        return decode_fields(end)["offset"] == decode_fields(position).get("offset")


def _decision(body, queue_offset, physical_offset, *, from_check=False):
    header = EndTransactionRequest(
        producer_group="p",
        tran_state_table_offset=queue_offset,
        commit_log_offset=physical_offset,
        commit_or_rollback=COMMIT if b"c" in body else ROLLBACK,
        from_transaction_check=from_check,
    )
    return request(RequestCode.END_TRANSACTION, header, one_way=True)


async def _send_until_killed(running, bodies, acknowledged, after):
    """Send from several tasks; after so many acknowledgements the broker is killed, and all end."""
    producer = TransactionProducer(running.broker_addr)
    await producer.introduce()
    first = len(acknowledged)

    async def sender():
        try:
            while True:
                body = next(bodies)
                await producer.send(body)
                acknowledged.append(body)
                if len(acknowledged) - first == after:
                    running.process.kill()
        except RemotingError:
            return

    await asyncio.gather(*(sender() for _ in range(IN_FLIGHT)))
    await producer.client.close()


async def _finish(running, acknowledged):
    producer = TransactionProducer(running.broker_addr)
    await producer.introduce()
    async with asyncio.timeout(SECONDS_MAX):
        while not await producer.is_settled():
            await asyncio.sleep(0.05)
    arrived = await producer.bodies()
    given_up = await producer.bodies("TRANS_CHECK_MAX_TIME_TOPIC")
    await producer.client.close()
    assert not given_up
    assert {body for body in acknowledged if b"c" in body} <= set(arrived)
    assert not [body for body in arrived if b"c" not in body]


@pytest.mark.faults
@pytest.mark.parametrize("flush_disk_type", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_transactions_survive_kills(tmp_path, flush_disk_type):
    seed = chosen_seed()
    chance = random.Random(seed)
    conf = tmp_path / "broker.conf"
    conf.write_text(BROKER_CONF.format(flush_disk_type=flush_disk_type))
    bodies = (f"{chance.choice(['c!', 'c', 'r!', 'r'])} {number}".encode() for number in range(1_000_000))
    acknowledged = []
    for _ in range(KILLS):
        with run_standalone(tmp_path / "store", tmp_path, "--config", str(conf)) as running:
            asyncio.run(_send_until_killed(running, bodies, acknowledged, chance.randrange(1, ACKNOWLEDGED_MAX)))
    assert len(acknowledged) >= KILLS
    with run_standalone(tmp_path / "store", tmp_path, "--config", str(conf)) as running:
        asyncio.run(_finish(running, acknowledged))
        running.stop()
