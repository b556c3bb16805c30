"""The pull consumer against our own name server and broker. Source: behaviour.md §4.3, §5.2."""

from __future__ import annotations

import pytest

from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.producer.encode import EncodedMessage
from rmqkit.client.producer.producer import Producer
from rmqkit.errors import ClientError, NoRoute, PeerRefused
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.rpc import PullStatus
from rmqkit.standalone import Standalone
from tests.client.inside import sender_of


class Reading:
    """Ten messages with tags A and B in turn in one queue, and a consumer."""

    def __init__(self, root) -> None:
        self.cluster = Standalone(root / "store")

    async def __aenter__(self):
        await self.cluster.__aenter__()
        async with Producer("PG", self.cluster.namesrv_address) as producer:
            self.queue = (await producer.queues("T"))[1]
            for i in range(10):
                await producer.send(Message(topic="T", body=b"%d" % i, tags="AB"[i % 2]), queue=self.queue)
        self.consumer = PullConsumer("CG", self.cluster.namesrv_address)
        await self.consumer.start()
        return self

    async def __aexit__(self, *exc_info):
        await self.consumer.close()
        await self.cluster.__aexit__(*exc_info)


async def test_queues_and_their_limits(tmp_path):
    async with Reading(tmp_path) as it:
        queues = await it.consumer.queues("T")
        assert [queue.queue_id for queue in queues] == [0, 1, 2, 3]
        assert it.queue in queues
        assert await it.consumer.min_offset(it.queue) == 0
        assert await it.consumer.max_offset(it.queue) == 10
        assert await it.consumer.max_offset(queues[0]) == 0


async def test_a_time_leads_to_an_offset(tmp_path):
    async with Reading(tmp_path) as it:
        messages = (await it.consumer.pull(it.queue, 0)).messages
        assert await it.consumer.search_offset(it.queue, 0) == 0
        at = next(i for i, message in enumerate(messages) if message.store_timestamp == messages[-1].store_timestamp)
        assert await it.consumer.search_offset(it.queue, messages[-1].store_timestamp / 1000) == at
        assert await it.consumer.search_offset(it.queue, (messages[-1].store_timestamp + 10_000) / 1000) == 10


async def test_pulls_give_messages_and_where_to_continue(tmp_path):
    async with Reading(tmp_path) as it:
        result = await it.consumer.pull(it.queue, 3, max_count=4)
        assert result.status is PullStatus.FOUND
        assert [message.body for message in result.messages] == [b"3", b"4", b"5", b"6"]
        assert (result.next_begin_offset, result.min_offset, result.max_offset) == (7, 0, 10)


async def test_tags_choose(tmp_path):
    async with Reading(tmp_path) as it:
        result = await it.consumer.pull(it.queue, 0, "B || C")
        assert [message.body for message in result.messages] == [b"1", b"3", b"5", b"7", b"9"]
        nothing = await it.consumer.pull(it.queue, 0, "C")
        assert (nothing.status, nothing.next_begin_offset) == (PullStatus.NO_MATCHED_MESSAGE, 10)
        with pytest.raises(ClientError, match="contains no tag"):
            await it.consumer.pull(it.queue, 0, "||")


async def test_a_body_that_cannot_be_unpacked_is_passed_with_the_next_offset(tmp_path, caplog):
    async with Reading(tmp_path) as it, Producer("PG", it.cluster.namesrv_address) as producer:
        properties = "UNIQ_KEY\x01BAD\x02TAGS\x01A\x02"
        await producer.queues("T")
        await sender_of(producer).send(
            EncodedMessage("T", b"no zlib", properties, "BAD", sys_flag=0x301), timeout_ms=30_000, queue=it.queue
        )
        await producer.send(Message(topic="T", body=b"after", tags="A"), queue=it.queue)
        result = await it.consumer.pull(it.queue, 9)
        assert [message.body for message in result.messages] == [b"9", b"after"]
        assert [(one.msg_id, one.body, one.queue_offset) for one in result.unreadable] == [("BAD", b"no zlib", 10)]
        assert result.next_begin_offset == 12
        others = await it.consumer.pull(it.queue, 9, "B")
        assert (others.unreadable, others.next_begin_offset) == ([], 12)
        assert "cannot unpack offset 10 in queue 1 of T" in caplog.text


async def test_an_id_of_an_address_that_no_broker_has_says_so(tmp_path):
    async with Reading(tmp_path) as it:
        (first, *_) = (await it.consumer.pull(it.queue, 0)).messages
        found = await it.consumer.view_message("T", first.offset_msg_id)
        assert found is not None and found.body == b"0"
        gone = "7F000001" + f"{9:08X}" + first.offset_msg_id[16:]
        with pytest.raises(ClientError, match=r"is of 127\.0\.0\.1:9, which no broker of topic T has now \(they have "):
            await it.consumer.view_message("T", gone)
        found = await it.consumer.view_message("T", first.msg_id)
        assert found is not None and found.body == b"0"
        unknown_key = first.msg_id[:-4] + "FFFF"
        assert await it.consumer.view_message("T", unknown_key) is None


async def test_the_end_and_beyond(tmp_path):
    async with Reading(tmp_path) as it:
        assert (await it.consumer.pull(it.queue, 10)).status is PullStatus.NO_NEW_MESSAGE
        beyond = await it.consumer.pull(it.queue, 99)
        assert (beyond.status, beyond.next_begin_offset) == (PullStatus.OFFSET_ILLEGAL, 10)


async def test_offsets_are_saved_for_the_group(tmp_path):
    async with Reading(tmp_path) as it:
        with pytest.raises(PeerRefused, match="code 26: Group CG not exist!"):
            await it.consumer.commit(it.queue, 7)
        await it.consumer.pull(it.queue, 0)  # makes the group
        await it.consumer.commit(it.queue, 7)
        assert await it.consumer.committed(it.queue) == 7
        await it.consumer.commit(it.queue, 2)
        assert await it.consumer.committed(it.queue) == 2
        async with PullConsumer("other", it.cluster.namesrv_address) as other:
            assert await other.committed(MessageQueue("T", it.queue.broker_name, 0)) is None


async def test_what_does_not_exist_is_reported(tmp_path):
    async with Reading(tmp_path) as it:
        with pytest.raises(NoRoute, match="no broker lets topic Missing be read"):
            await it.consumer.queues("Missing")
        with pytest.raises(ClientError, match="contains illegal characters"):
            await it.consumer.queues("a b")
        with pytest.raises(PeerRefused, match="queueId"):
            await it.consumer.pull(MessageQueue("T", it.queue.broker_name, 99), 0)
