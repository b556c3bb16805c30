"""The pull loop of one queue. Source: behaviour.md §8.6, §8.9; remoting.md §4.3.2, §9.5."""

from __future__ import annotations

import asyncio
import zlib

import pytest

from rmqkit.client.consumer.allocate import averagely
from rmqkit.client.consumer.consume import ConcurrentConsumeService, Listener
from rmqkit.client.consumer.context import ConsumerContext
from rmqkit.client.consumer.loop import PullLoop
from rmqkit.client.consumer.offsets import RemoteOffsetStore
from rmqkit.client.consumer.process_queue import ProcessQueue
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import HoldLimits, Pulling, PushConsumerSettings, StartFrom
from rmqkit.filter import subscription
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_fields, reply
from rmqkit.protocol.properties import encode_properties
from rmqkit.protocol.record import BatchEntry, encode_batch
from rmqkit.protocol.schemas.clients import ConsumerData, MessageQueue
from tests.client.messages import record
from tests.client.peers import Cluster, offset, pulled, refused, until

PULL = RequestCode.PULL_MESSAGE
QUEUE = MessageQueue("T", "broker-0", 0)
FOUND, NOT_FOUND, AGAIN, MOVED = (
    ResponseCode.SUCCESS,
    ResponseCode.PULL_NOT_FOUND,
    ResponseCode.PULL_RETRY_IMMEDIATELY,
    ResponseCode.PULL_OFFSET_MOVED,
)


class PulledQueue:
    """A pull loop for group G on one queue; the answers are given out in order, then pulls are held."""

    def __init__(self, *answers, expression="*", queue=QUEUE, saved=0, **settings) -> None:
        self.cluster = Cluster()
        self.answers = list(answers)
        self.subscription = subscription(queue.topic, expression, version=77)
        self.queue = queue
        self.saved = saved
        self.settings = PushConsumerSettings(**{"pull": Pulling(error_pause_ms=1), **settings})
        self.illegal: list[int] = []
        self.gate = asyncio.Event()
        self.seen = []

    async def __aenter__(self):
        await self.cluster.__aenter__()
        self.cluster.topic(self.queue.topic)
        broker = self.cluster.broker
        broker.answer(PULL, self.pull)
        broker.answer(RequestCode.CONSUMER_SEND_MSG_BACK, reply)
        broker.answer(
            RequestCode.QUERY_CONSUMER_OFFSET,
            refused(22) if self.saved is None else lambda command: offset(command, self.saved),
        )
        self.runtime = ClientRuntime(self.cluster.namesrv)
        await self.runtime.routes.refresh(self.queue.topic)
        self.offsets = RemoteOffsetStore(self.runtime, "G")
        self.consuming = ConcurrentConsumeService(
            self.runtime, "G", self.offsets, self.settings, lambda topic: Listener(self.handle)
        )
        self.consuming.start()
        self.held = ProcessQueue(
            self.queue, messages_max=self.settings.limits.held_messages_max, bytes_max=1 << 20, span_max=2000
        )
        context = ConsumerContext(
            self.runtime, "G", self.settings, self.offsets, self.consuming, averagely, "CONSUME_PASSIVELY"
        )
        loop = PullLoop(context, self.held, lambda topic: self.subscription, self.on_illegal)
        self.task = asyncio.create_task(loop.run(0))
        return self

    async def __aexit__(self, *exc_info):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.consuming.close()
        await self.runtime.close()
        await self.cluster.__aexit__(*exc_info)

    def pull(self, command):
        return self.answers.pop(0)(command) if self.answers else None

    async def handle(self, message):
        if "wait" in message.properties:
            await self.gate.wait()
        self.seen.append(message)

    async def on_illegal(self, process_queue, wanted):
        process_queue.drop()
        self.illegal.append(wanted)

    @property
    def pulls(self):
        return self.cluster.broker.asked(PULL)

    async def until_pulls(self, count):
        await until(lambda: len(self.pulls) == count, f"{count} pulls")


def found(next_offset, *records, **options):
    return lambda command: pulled(command, FOUND, next_offset, b"".join(records), **options)


def nothing(code, next_offset):
    return lambda command: pulled(command, code, next_offset)


async def test_the_request_is_the_reference_one():
    async with PulledQueue(saved=0) as it:
        await it.until_pulls(1)
        assert it.pulls == [
            {
                "consumerGroup": "G",
                "topic": "T",
                "queueId": "0",
                "queueOffset": "0",
                "maxMsgNums": "32",
                "sysFlag": "2",
                "commitOffset": "0",
                "suspendTimeoutMillis": "15000",
                "subVersion": "77",
                "expressionType": "TAG",
                "maxMsgBytes": "262144",
                "bname": "broker-0",
            }
        ]


async def test_pulls_follow_each_other_and_carry_the_offset_to_commit():
    async with PulledQueue(found(12, record(10), record(11)), saved=10) as it:
        await it.until_pulls(2)
        first, second = it.pulls
        assert (first["queueOffset"], first["sysFlag"], first["commitOffset"]) == ("10", "3", "10")
        assert second["queueOffset"] == "12"
        await until(lambda: it.offsets.known(QUEUE) == 12, "both consumed")


async def test_messages_know_the_limits_of_their_queue():
    async with PulledQueue(found(1, record(0, CONSUME_START_TIME="1", TAGS="A"))) as it:
        await until(lambda: it.seen, "the message")
        properties = it.seen[0].properties
        assert (properties["MIN_OFFSET"], properties["MAX_OFFSET"]) == ("0", "100")
        assert properties["CONSUME_START_TIME"] != "1"
        assert it.seen[0].broker_name == "broker-0"


async def test_tags_are_compared_exactly_and_what_does_not_match_is_consumed():
    records = [record(i, TAGS=tag) for i, tag in enumerate(["A", "B", "AB"])]
    async with PulledQueue(found(4, *records, record(3)), expression="A || C") as it:
        await it.until_pulls(2)
        await until(lambda: it.seen, "the matching message")
        assert [message.queue_offset for message in it.seen] == [0]


async def test_with_nothing_under_way_the_offset_follows_what_does_not_match():
    async with PulledQueue(found(2, record(0, TAGS="B"), record(1, TAGS="B")), expression="A") as it:
        await it.until_pulls(2)
        assert it.offsets.known(QUEUE) == 2


@pytest.mark.parametrize("answer", [found(2, record(0, TAGS="A")), nothing(NOT_FOUND, 2)])
async def test_an_answer_filtered_by_a_replaced_subscription_is_requested_again(answer):
    async with PulledQueue(expression="A") as it:

        def replaced_meanwhile(command):
            it.subscription = subscription("T", "B", version=78)
            return answer(command)

        it.answers = [replaced_meanwhile, found(2, record(1, TAGS="B"))]
        await it.until_pulls(3)
        await until(lambda: it.seen, "the message wanted now")
        assert [(pull["queueOffset"], pull["subVersion"]) for pull in it.pulls[:2]] == [("0", "77"), ("0", "78")]
        assert [message.queue_offset for message in it.seen] == [1]


@pytest.mark.parametrize("code", [NOT_FOUND, AGAIN])
async def test_nothing_new_moves_on_at_once(code):
    async with PulledQueue(nothing(code, 30)) as it:
        await it.until_pulls(2)
        assert it.pulls[1]["queueOffset"] == "30"
        assert it.offsets.known(QUEUE) == 30


async def test_nothing_new_does_not_move_the_offset_past_messages_under_way():
    async with PulledQueue(found(1, record(0, wait="yes")), nothing(AGAIN, 30)) as it:
        await it.until_pulls(3)
        assert it.offsets.known(QUEUE) == 0
        it.gate.set()
        await until(lambda: it.offsets.known(QUEUE) == 30, "consumed, and nothing else is wanted before 30")


async def test_an_illegal_offset_gives_the_queue_up():
    async with PulledQueue(nothing(MOVED, 7), saved=3) as it:
        await it.task
        assert it.illegal == [7]
        assert len(it.pulls) == 1


async def test_refusals_and_lost_connections_are_followed_by_another_try(caplog):
    def lose(command):
        it.cluster.broker.connections[0].abort()

    async with PulledQueue(refused(2, "busy"), refused(215, "slow down"), found(1, record(0))) as it:
        it.answers.insert(1, lose)
        await until(lambda: it.seen, "the message")
        assert {fields["queueOffset"] for fields in it.pulls[:4]} == {"0"}
    assert "code 2: busy" in caplog.text
    assert "slow down" not in caplog.text, "flow control is no warning"


@pytest.mark.parametrize("rest", [record(1)[:-3], b"\0" * 40, record(1)[:4] + bytes(200)])
async def test_an_answer_that_ends_in_no_record_is_requested_again_whole(rest):
    async with PulledQueue(found(2, record(0), rest), found(2, record(0), record(1))) as it:
        await until(lambda: len(it.seen) == 2, "both messages")
        assert [fields["queueOffset"] for fields in it.pulls[:2]] == ["0", "0"]
        assert [message.queue_offset for message in it.seen] == [0, 1]


async def test_a_pull_that_overtook_its_heartbeat_is_repeated_at_once():
    async with PulledQueue(refused(25), found(1, record(0)), pull=Pulling(error_pause_ms=60_000)) as it:
        await until(lambda: len(it.seen) == 1, "the message")


@pytest.mark.parametrize("code", [24, 25])
async def test_a_broker_that_does_not_know_the_subscription_gets_a_heartbeat(code):
    class Group:
        def consumer_data(self):
            return ConsumerData(group_name="G")

        def rebalance_soon(self):
            pass

    async with PulledQueue(pull=Pulling(error_pause_ms=60_000)) as it:
        it.runtime.register_consumer("G", Group())
        await it.until_pulls(1)
        await it.runtime.start()
        await until(lambda: it.cluster.heartbeats, "the first heartbeat")
        beats = len(it.cluster.heartbeats)
        command = next(command for command in it.cluster.broker.requests if command.code == PULL)
        it.cluster.broker.connections[0].send(reply(command, code, "not known"))
        await until(lambda: len(it.cluster.heartbeats) > beats, "another heartbeat")


async def test_a_full_queue_is_not_pulled_until_there_is_room():
    records = [record(i, wait="yes") for i in range(3)]
    async with PulledQueue(found(3, *records), limits=HoldLimits(held_messages_max=3)) as it:
        await until(lambda: len(it.held) == 3, "three messages under way")
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(it.pulls) == 1
        it.gate.set()
        await it.until_pulls(2)


async def test_the_suggested_broker_is_asked_next_and_sent_no_offset():
    async with PulledQueue(found(12, record(11), broker_id=1), saved=11) as it:
        slave = it.cluster.name_server  # any other listening peer
        slave.answer(PULL, lambda command: None)
        it.runtime.routes.brokers["broker-0"][1] = slave.address
        await until(lambda: slave.asked(PULL), "a pull at the slave")
        (fields,) = slave.asked(PULL)
        assert (fields["queueOffset"], fields["sysFlag"]) == ("12", "2")


@pytest.mark.parametrize(
    ("start_from", "topic", "first"),
    [
        (StartFrom.LAST_OFFSET, "T", 500),
        (StartFrom.LAST_OFFSET, "%RETRY%G", 0),
        (StartFrom.FIRST_OFFSET, "T", 0),
        (StartFrom.FIRST_OFFSET, "%RETRY%G", 0),
        (StartFrom.NEW_MESSAGES, "T", 500),
        (StartFrom.NEW_MESSAGES, "%RETRY%G", 0),
        (StartFrom.TIMESTAMP, "T", 44),
        (StartFrom.TIMESTAMP, "%RETRY%G", 500),
    ],
)
async def test_a_group_without_offset_begins_where_the_settings_say(start_from, topic, first):
    queue = MessageQueue(topic, "broker-0", 0)
    async with PulledQueue(queue=queue, saved=None, start_from=start_from, start_timestamp_ms=123) as it:
        it.cluster.broker.answer(RequestCode.GET_MAX_OFFSET, lambda command: offset(command, 500))
        it.cluster.broker.answer(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, lambda command: offset(command, 44))
        await it.until_pulls(1)
        assert it.pulls[0]["queueOffset"] == str(first)
        for fields in it.cluster.broker.asked(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP):
            assert fields["timestamp"] == "123"


async def test_a_group_that_begins_behind_the_last_message_saves_that_at_once():
    def of_young_queue(command):
        """0, which stands for no offset; asked for the stored one the broker says that there is none."""
        is_stored = decode_fields(command).get("setZeroIfNotFound") == "false"
        return refused(22, "not found")(command) if is_stored else offset(command, 0)

    async with PulledQueue(saved=None, start_from=StartFrom.NEW_MESSAGES) as it:
        it.cluster.broker.answer(RequestCode.GET_MAX_OFFSET, lambda command: offset(command, 500))
        it.cluster.broker.answer(RequestCode.QUERY_CONSUMER_OFFSET, of_young_queue)
        await it.until_pulls(1)
        assert it.pulls[0]["queueOffset"] == "500" and it.offsets.known(QUEUE) == 500


async def test_a_saved_offset_wins_over_the_settings():
    async with PulledQueue(saved=9, start_from=StartFrom.FIRST_OFFSET) as it:
        await it.until_pulls(1)
        assert it.pulls[0]["queueOffset"] == "9"


async def test_as_long_as_the_saved_offset_cannot_be_read_nothing_is_pulled():
    async with PulledQueue(saved=None) as it:
        it.cluster.broker.answer(RequestCode.QUERY_CONSUMER_OFFSET, refused(1, "broken"))
        asked = RequestCode.QUERY_CONSUMER_OFFSET
        await until(lambda: len(it.cluster.broker.asked(asked)) >= 3, "it is asked again and again")
        assert it.pulls == []
        it.cluster.broker.answer(asked, lambda command: offset(command, 5))
        await it.until_pulls(1)


async def test_a_body_that_cannot_be_unpacked_goes_to_the_dead_letters():
    damaged = record(1, zlib.compress(b"x" * 100)[:-3], sys_flag=0x301)
    async with PulledQueue(found(3, record(0), damaged, record(2))) as it:
        await it.until_pulls(2)
        await until(lambda: it.offsets.known(QUEUE) == 3, "the others are consumed")
        assert [message.queue_offset for message in it.seen] == [0, 2]
        (fields,) = it.cluster.broker.asked(RequestCode.CONSUMER_SEND_MSG_BACK)
        assert (fields["delayLevel"], fields["offset"], fields["originMsgId"]) == ("-1", "1001", "id-1")


async def test_while_the_dead_letters_cannot_be_reached_the_same_messages_are_pulled_again():
    damaged = record(0, b"no zlib", sys_flag=0x301)
    async with PulledQueue(found(1, damaged), found(1, damaged)) as it:
        answers = [refused(16, "not writable"), reply]
        it.cluster.broker.answer(RequestCode.CONSUMER_SEND_MSG_BACK, lambda command: answers.pop(0)(command))
        await it.until_pulls(3)
        assert [fields["queueOffset"] for fields in it.pulls] == ["0", "0", "1"]


async def test_members_of_an_inner_batch_are_messages_of_their_own():
    entries = [BatchEntry(b"%d" % i, encode_properties({"UNIQ_KEY": f"m{i}"})) for i in range(3)]
    batch = record(5, encode_batch(entries), sys_flag=0xC0)
    async with PulledQueue(found(8, batch), saved=5) as it:
        await until(lambda: it.offsets.known(QUEUE) == 8, "all three")
        assert [(message.queue_offset, message.body, message.msg_id) for message in it.seen] == [
            (5, b"0", "m0"),
            (6, b"1", "m1"),
            (7, b"2", "m2"),
        ]


async def test_messages_that_the_broker_left_out_behind_the_last_one_count_as_consumed():
    """Without this a group showed a lag until its next held pull ended, after 15 s."""
    async with PulledQueue(found(50, record(3))) as it:
        await it.until_pulls(2)  # the second one is held
        await until(lambda: it.offsets.known(QUEUE) is not None, "the message is handled")
        await until(lambda: len(it.seen) == 1 and it.offsets.known(QUEUE) == 50, "the offset of the next pull")
        assert it.pulls[1]["queueOffset"] == "50"
