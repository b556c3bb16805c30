"""Answers under SYNC_MASTER, and GET_BROKER_HA_STATUS, over the wire (store.md §21.5, behaviour.md §10.3)."""

from __future__ import annotations

import asyncio
import json

import pytest

from rmqkit.broker.ha_addresses import HaAddresses
from rmqkit.broker.settings import BrokerRole
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_fields, decode_header, request
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.ids import decode_offset_id
from rmqkit.protocol.record import BatchEntry, encode_batch
from rmqkit.protocol.schemas.brokers import HaConnectionInfo, HaRuntimeInfo, RegisterBrokerResponse
from rmqkit.protocol.schemas.send import ConsumerSendBackRequest, EndTransactionRequest, SendMessageResponse
from rmqkit.store.settings import FlushDiskType
from tests.broker.cluster import Cluster
from tests.broker.ha_links import Slave, until
from tests.namesrv.running import register_header, registration_body
from tests.waiting import SECONDS

SLAVE_TIMEOUT_MS = 80
SYNC_MASTER = {
    "broker_role": BrokerRole.SYNC_MASTER,
    "in_sync_replicas": 2,
    "slave_timeout_ms": SLAVE_TIMEOUT_MS,
}
PATIENT = {**SYNC_MASTER, "slave_timeout_ms": 60_000}
SYNC_FLUSH = {"flush_disk_type": FlushDiskType.SYNC_FLUSH}
KEYED = "UNIQ_KEY\x01K\x02WAIT\x01true\x02"
NO_WAIT = "UNIQ_KEY\x01K\x02WAIT\x01false\x02"
HALF = "TRAN_MSG\x01true\x02PGROUP\x01p\x02UNIQ_KEY\x01K\x02WAIT\x01true\x02"


class Follower(Slave):
    """A slave that reports the received offset unless it is ``frozen``."""

    frozen = False

    def data_received(self, data):
        super().data_received(data)
        if self.frames and not self.frozen:
            offset, one = self.frames[-1]
            self.report(offset + len(one))


async def ha_address(cluster):
    """Return the HA address that a slave gets when it registers."""
    header = register_header(broker_name="broker-a", broker_id=1, broker_addr="127.0.0.1:1")
    command = request(RequestCode.REGISTER_BROKER, header, registration_body())
    answer = await cluster.client.call(cluster.standalone.namesrv_address, command, 60_000)
    return decode_header(answer, RegisterBrokerResponse).ha_server_addr


async def follower(cluster):
    host, _, port = (await ha_address(cluster)).rpartition(":")
    # Its copies count at once, not when the master has asked the name server who its members are.
    cluster.standalone.broker.context.settings.ha_addresses = HaAddresses(host)
    _, slave = await asyncio.get_running_loop().create_connection(Follower, host, int(port))
    slave.report(0)
    async with asyncio.timeout(SECONDS):
        while not (await status(cluster)).ha_connection_info:
            await asyncio.sleep(0.002)
    return slave


def freeze(cluster, slave):
    """Stop the slave's reports, and shorten the broker's wait for it."""
    slave.frozen = True
    cluster.standalone.broker.context.settings.slave_timeout_ms = SLAVE_TIMEOUT_MS


async def status(cluster):
    return decode_as((await cluster.call(RequestCode.GET_BROKER_HA_STATUS)).payload, HaRuntimeInfo)


def store(cluster):
    return cluster.standalone.broker.context.store


async def test_a_master_without_slaves(cluster):
    answer = await cluster.call(RequestCode.GET_BROKER_HA_STATUS)
    assert json.loads(answer.payload) == {
        "master": True,
        "masterCommitLogMaxOffset": 0,
        "inSyncSlaveNums": 0,
        "haConnectionInfo": [],
        "haClientRuntimeInfo": {
            "masterAddr": None,
            "transferredByteInSecond": 0,
            "maxOffset": 0,
            "lastReadTimestamp": 0,
            "lastWriteTimestamp": 0,
            "masterFlushOffset": 0,
        },
    }


async def test_a_slave_is_in_the_status_with_its_position(cluster):
    slave = await follower(cluster)
    await cluster.send(properties=KEYED)
    end = store(cluster).max_physical_offset
    await slave.has(end)
    async with asyncio.timeout(SECONDS):
        while (now := await status(cluster)).ha_connection_info[0].slave_ack_offset < end:
            await asyncio.sleep(0.002)
    addr = "{}:{}".format(*slave.transport.get_extra_info("sockname"))
    assert (now.master, now.master_commit_log_max_offset, now.in_sync_slave_nums) == (True, end, 1)
    rate = now.ha_connection_info[0].transferred_byte_in_second
    assert now.ha_connection_info == [
        HaConnectionInfo(
            addr=addr,
            slave_ack_offset=end,
            in_sync=True,
            transfer_from_where=end,
            transferred_byte_in_second=rate,
            lag_ms=0,
        )
    ]


@pytest.mark.parametrize("flush", [{}, SYNC_FLUSH], ids=["async flush", "sync flush"])
async def test_an_answer_means_that_the_slave_has_the_message(flush, tmp_path):
    async with Cluster(tmp_path / "store", broker=PATIENT, store=flush) as cluster:
        slave = await follower(cluster)
        for number in range(20):
            assert (await cluster.send(properties=KEYED, body=b"%d" % number)).code == 0
            end = store(cluster).max_physical_offset
            assert slave.frames[-1][0] + len(slave.frames[-1][1]) == end
            assert (await status(cluster)).ha_connection_info[0].slave_ack_offset == end


@pytest.mark.parametrize("flush", [{}, SYNC_FLUSH], ids=["async flush", "sync flush"])
@pytest.mark.parametrize("has_slave", [True, False])
async def test_a_slave_that_is_frozen_or_not_there_makes_sends_end_as_flush_slave_timeout(flush, has_slave, tmp_path):
    async with Cluster(tmp_path / "store", broker=SYNC_MASTER, store=flush) as cluster:
        await cluster.send(properties=NO_WAIT)
        if has_slave:
            (await follower(cluster)).frozen = True
        answer = await cluster.send(properties=KEYED)
        assert (answer.code, answer.remark) == (ResponseCode.FLUSH_SLAVE_TIMEOUT, None)
        assert decode_header(answer, SendMessageResponse).queue_offset == 1
        assert {"MSG_REGION", "TRACE_ON", "transactionId"} <= decode_fields(answer).keys()
        batch = encode_batch([BatchEntry(b"a", b"", 0), BatchEntry(b"b", b"", 0)])
        answer = await cluster.send(body=batch, properties="", code=RequestCode.SEND_BATCH_MESSAGE, batch=True)
        assert answer.code == ResponseCode.FLUSH_SLAVE_TIMEOUT
        assert (await cluster.send(properties=NO_WAIT)).code == 0
        await until(lambda: store(cluster).max_offset("T", 0) == 5)


async def test_a_sync_master_that_is_content_with_its_own_copy_waits_for_nobody(tmp_path):
    async with Cluster(tmp_path / "store", broker={**PATIENT, "in_sync_replicas": 1}) as cluster:
        (await follower(cluster)).frozen = True
        assert (await cluster.send(properties=KEYED)).code == 0
        assert cluster.standalone.broker.context.durability is None


async def test_a_commit_waits_for_the_slave(tmp_path):
    async def commit(cluster):
        half = decode_header(await cluster.send(properties=HALF), SendMessageResponse)
        header = EndTransactionRequest(
            producer_group="p",
            tran_state_table_offset=half.queue_offset,
            commit_log_offset=decode_offset_id(half.msg_id)[2],
            commit_or_rollback=8,
            msg_id="K",
        )
        return (await cluster.call(RequestCode.END_TRANSACTION, header)).code

    async with Cluster(tmp_path / "store", broker=PATIENT, store={"file_reserved_hours": 1_000_000}) as cluster:
        slave = await follower(cluster)
        assert await commit(cluster) == 0
        assert store(cluster).max_physical_offset == slave.frames[-1][0] + len(slave.frames[-1][1])
        freeze(cluster, slave)
        assert await commit(cluster) == ResponseCode.FLUSH_SLAVE_TIMEOUT


async def test_a_message_that_is_sent_back_waits_for_the_slave_and_is_not_refused_when_it_is_late(tmp_path):
    async with Cluster(tmp_path / "store", broker=PATIENT) as cluster:
        slave = await follower(cluster)
        sent = decode_header(await cluster.send(properties=KEYED), SendMessageResponse)
        back = ConsumerSendBackRequest(offset=decode_offset_id(sent.msg_id)[2], group="g", delay_level=5)
        assert (await cluster.call(RequestCode.CONSUMER_SEND_MSG_BACK, back)).code == 0
        freeze(cluster, slave)
        assert (await cluster.call(RequestCode.CONSUMER_SEND_MSG_BACK, back)).code == 0
        assert store(cluster).max_offset("SCHEDULE_TOPIC_XXXX", 4) == 2


GROUP = {**PATIENT, "acts_as_master": True, "skip_pre_online": True}


async def test_in_an_acting_master_group_nothing_is_stored_with_too_few_replicas(tmp_path):
    async with Cluster(tmp_path / "store", broker=GROUP) as cluster:
        for fields in ({}, {"code": RequestCode.SEND_BATCH_MESSAGE, "batch": True}):
            answer = await cluster.send(properties="", body=encode_batch([BatchEntry(b"a", b"", 0)]), **fields)
            assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, "in-sync replicas not enough")
        assert store(cluster).max_physical_offset == 0
        assert (await cluster.send(properties=NO_WAIT)).code == 0
        await follower(cluster)
        assert (await cluster.send(properties=KEYED)).code == 0


async def test_an_acting_master_group_may_make_do_with_what_is_there(tmp_path):
    async with Cluster(
        tmp_path / "store", broker={**GROUP, "slave_timeout_ms": SLAVE_TIMEOUT_MS, "auto_in_sync_replicas": True}
    ) as cluster:
        assert (await cluster.send(properties=KEYED)).code == 0
        (await follower(cluster)).frozen = True
        assert (await cluster.send(properties=KEYED)).code == ResponseCode.FLUSH_SLAVE_TIMEOUT
