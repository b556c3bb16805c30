"""Pops and pulls of messages that the log has deleted: changes during the fetch, and fetches that fail."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from rmqkit.errors import PeerRefused, StoreError
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_fields, request
from rmqkit.protocol.record import iter_records
from rmqkit.protocol.schemas.offsets import ResetOffsetRequest
from rmqkit.protocol.schemas.pop import PopMessageRequest
from rmqkit.protocol.schemas.topics import DeleteTopicRequest
from rmqkit.store.message_store import GetResult, GetStatus
from tests.broker.cluster import Cluster
from tests.broker.pops import ack, now_ms, pop
from tests.waiting import until

FILE_BYTES = 16 << 10
BODY = bytes(1000)
BUSY = PeerRefused(ResponseCode.SYSTEM_BUSY, "ask again", "place")


class Place:
    """A source of older messages, as the archive is. A test controls which fetches wait and fail.

    Attributes:
        fetches: topic, queue id and offset of each fetch.
        gate: fetches wait for it.
        failures: fetches raise these, the first one first; None lets a fetch succeed.
        step: the number of messages that a fetch reads.
        is_generous: True if fetches return more messages than requested.
    """

    def __init__(self, store):
        self._store = store
        self._records: dict[tuple[str, int], dict[int, bytes]] = {}
        self.fetches: list[tuple[str, int, int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures: list[Exception | None] = []
        self.step = 100
        self.is_generous = False
        self.is_known = True

    def copy(self, topic, queue_id):
        self._records[topic, queue_id] = {
            number: bytes(self._store.get(topic, queue_id, number, count_max=1).records[0])
            for number in range(self._store.max_offset(topic, queue_id))
        }

    def lose(self, topic, queue_id):
        del self._records[topic, queue_id]

    def min_offset(self, topic, queue_id):
        return min([self._store.min_offset(topic, queue_id), *self._records.get((topic, queue_id), ())])

    def first_offset(self, topic, queue_id):
        if not self.is_known:
            raise BUSY
        return self.min_offset(topic, queue_id)

    def has(self, topic, queue_id, queue_offset):
        return queue_offset < max(self._records.get((topic, queue_id), (-1,))) + 1

    async def get(self, connection, topic, queue_id, queue_offset, *, count_max, codes=None, accept=None):
        self.fetches.append((topic, queue_id, queue_offset))
        failure = self.failures.pop(0) if self.failures else None
        await self.gate.wait()
        if failure is not None:
            raise failure
        high = self._store.max_offset(topic, queue_id)
        result = GetResult(GetStatus.NO_MATCHED_MESSAGE, queue_offset, self.min_offset(topic, queue_id), high)
        records = self._records.get((topic, queue_id), {})
        count_max = 1000 if self.is_generous else count_max
        for number in range(queue_offset, min(queue_offset + self.step, len(records))):
            if len(result.records) == count_max:
                break
            result.next_begin_offset = number + 1
            if codes is None:
                result.records.append(memoryview(records[number]))
                result.size += len(records[number])
                result.status = GetStatus.FOUND
        return result


class Deleted(Cluster):
    """A broker whose log has deleted the first messages of queue 0, and a source that has them."""

    def __init__(self, root: Path, **settings):
        super().__init__(root, store={"commit_log_file_bytes": FILE_BYTES}, **settings)

    @property
    def context(self):
        return self.standalone.broker.context

    @property
    def low(self):
        return self.context.store.min_offset("T", 0)

    @property
    def offset(self):
        return self.context.offsets.get("g", "T", 0)

    async def __aenter__(self):
        await super().__aenter__()
        store = self.context.store
        for number in range(50):
            assert (await self.send(body=b"%d " % number + BODY)).code == 0
        self.place = Place(store)
        self.place.copy("T", 0)
        self.context.archive = store.older = self.place
        store.flusher.flush_log()
        for path in (store.root / "commitlog").iterdir():
            os.utime(path, (0, 0))
        store.retention.request()
        assert store.retention_round().log_files and self.low > 20
        return self

    async def __aexit__(self, *exc_info):
        self.context.archive = None  # it has no threads to close
        await super().__aexit__(*exc_info)

    def asking(self, **fields):
        return asyncio.ensure_future(pop(self, **{"queue_id": 0, "max_msg_nums": 4} | fields))

    async def fetching(self, count=1):
        await until(lambda: len(self.place.fetches) == count, f"fetch {count}")

    async def reset(self, offset, queue_id=0):
        header = ResetOffsetRequest(topic="T", group="g", timestamp=-1, is_force=True, queue_id=queue_id, offset=offset)
        assert (await self.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header)).code == ResponseCode.SUCCESS


@pytest.fixture
async def broker(tmp_path):
    async with Deleted(tmp_path) as broker:
        yield broker


def numbers(popped):
    return [int(body.split(" ")[0]) for body in popped]


# ---------------------------------------------------------------- bounds


async def test_a_pop_takes_as_many_as_it_may_and_the_next_one_begins_behind_them(broker):
    broker.place.is_generous = True
    assert numbers(await broker.asking()) == [0, 1, 2, 3]
    assert broker.offset == 4
    assert numbers(await broker.asking(max_msg_nums=32)) == list(range(4, 36))
    assert broker.place.fetches == [("T", 0, 0), ("T", 0, 4)]


async def test_a_filter_that_matches_nothing_fetches_so_often_and_no_more(broker):
    broker.place.step = 2
    popped = await broker.asking(exp="nothing", poll_time=30_000)
    assert (popped.code, popped.remark) == (ResponseCode.POLLING_TIMEOUT, "NO_MESSAGE_IN_QUEUE")
    assert broker.place.fetches == [("T", 0, 2 * number) for number in range(8)]
    assert broker.offset == 16, "the group does not read the same messages again"
    assert len(broker.context.pop.waiting) == 0


async def test_a_filter_that_matches_nothing_old_is_held_for_what_is_new(broker):
    held = broker.asking(exp="new", poll_time=30_000)
    await until(lambda: len(broker.context.pop.waiting) == 1)
    assert len(broker.place.fetches) == 1
    await broker.send(body=b"50 ", properties="TAGS\x01new\x02")
    assert numbers(await held) == [50]


async def test_of_several_queues_the_one_with_deleted_messages_is_popped_alone_and_first(broker):
    for queue_id in (1, 2, 3):
        await broker.send(body=b"%d " % (100 * queue_id), queue_id=queue_id)
    first = await broker.asking(queue_id=-1, max_msg_nums=32)
    assert numbers(first) == list(range(32)), "no fetched message is left over because of messages of other queues"
    await broker.reset(broker.low)
    then = await broker.asking(queue_id=-1, max_msg_nums=32)
    assert {100, 200, 300} < set(numbers(then)) and len(broker.place.fetches) == 1


async def test_a_pop_of_another_queue_fetches_nothing(broker):
    await broker.send(body=b"100 ", queue_id=1)
    assert numbers(await broker.asking(queue_id=1)) == [100]
    assert broker.place.fetches == []


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize(
    "failure",
    [BUSY, StoreError("the segment is damaged"), OSError("the place is away")],
    ids=["busy", "damage", "away"],
)
async def test_a_second_fetch_that_fails_is_an_answer_and_hides_nothing(broker, failure, caplog):
    broker.place.step, broker.place.failures = 2, [None, failure]
    popped = await broker.asking(exp="nothing")
    expected = ResponseCode.SYSTEM_BUSY if failure is BUSY else ResponseCode.SYSTEM_ERROR
    assert popped.code == expected and str(failure.remark if failure is BUSY else failure) in popped.remark
    assert broker.offset == 2 and broker.context.pop.check_points.pending == {}
    assert numbers(await broker.asking()) == [2, 3], "the source is called again"
    caplog.clear()


async def test_two_failures_in_a_row_leave_the_group_where_it_is(broker):
    broker.place.failures = [BUSY, BUSY]
    assert [(await broker.asking()).code for _ in range(2)] == [ResponseCode.SYSTEM_BUSY] * 2
    assert numbers(await broker.asking()) == [0, 1, 2, 3]


async def test_messages_that_are_gone_when_they_are_fetched_are_passed_over_by_the_log(broker):
    broker.place.gate.clear()
    popping = broker.asking()
    await broker.fetching()
    broker.place.lose("T", 0)
    broker.place.gate.set()
    assert numbers(await popping) == list(range(broker.low, broker.low + 4))
    assert len(broker.place.fetches) == 1


async def test_while_it_is_not_known_where_a_queue_begins_nothing_changes(broker):
    broker.place.is_known = False
    popped = await broker.asking()
    assert (popped.code, popped.remark) == (ResponseCode.SYSTEM_BUSY, "ask again")
    assert broker.offset is None and broker.place.fetches == []


# ---------------------------------------------------------------- changes while messages are fetched


async def test_of_two_pops_that_fetch_the_same_messages_one_gets_them(broker):
    broker.place.gate.clear()
    popping = [broker.asking() for _ in range(2)]
    await broker.fetching(2)
    assert broker.place.fetches == [("T", 0, 0)] * 2
    broker.place.gate.set()
    first, second = await asyncio.gather(*popping)
    assert sorted(numbers(first) + numbers(second)) == list(range(8))
    assert broker.place.fetches[2:] == [("T", 0, 4)], "the slower one fetches the next messages"


async def test_a_group_that_is_moved_meanwhile_gets_messages_from_there(broker):
    broker.place.gate.clear()
    popping = broker.asking()
    await broker.fetching()
    await broker.reset(2)  # into the middle of the fetched messages
    broker.place.gate.set()
    assert numbers(await popping) == [2, 3, 4, 5]
    assert broker.place.fetches == [("T", 0, 0), ("T", 0, 2)]


async def test_a_topic_that_is_deleted_meanwhile_is_refused(broker):
    broker.place.gate.clear()
    popping = broker.asking()
    await broker.fetching()
    assert (await broker.call(RequestCode.DELETE_TOPIC_IN_BROKER, DeleteTopicRequest("T"))).code == 0
    broker.place.gate.set()
    assert (await popping).code == ResponseCode.TOPIC_NOT_EXIST
    assert broker.context.pop.check_points.pending == {}


async def test_for_a_consumer_that_goes_away_nothing_is_hidden(broker):
    gone = broker.new_client()
    broker.place.gate.clear()
    fields = {"queue_id": 0, "max_msg_nums": 4, "invisible_time": 60_000, "poll_time": 0, "init_mode": 0}
    header = PopMessageRequest(consumer_group="g", topic="T", born_time=now_ms(), exp_type="TAG", exp="*", **fields)
    connection = await gone.connection(broker.standalone.broker_address)
    connection.send(request(RequestCode.POP_MESSAGE, header))
    await broker.fetching()
    clients = len(broker.standalone.broker.context.clients.all_consumers)
    assert clients == 0 and broker.offset is None
    await gone.close()
    await asyncio.sleep(1)  # virtual: the broker has seen the end of the connection by then
    broker.place.gate.set()
    await asyncio.sleep(1)
    assert broker.context.pop.check_points.pending == {} and broker.offset is None
    assert numbers(await broker.asking()) == [0, 1, 2, 3]


# ---------------------------------------------------------------- held pops


async def test_a_held_pop_that_is_moved_back_to_deleted_messages_gets_them(broker):
    broker.context.offsets.commit("g", "T", 0, 50)
    held = broker.asking(poll_time=30_000)
    await until(lambda: len(broker.context.pop.waiting) == 1)
    assert broker.place.fetches == []
    await broker.reset(7)
    assert numbers(await held) == [7, 8, 9, 10]
    assert broker.place.fetches == [("T", 0, 7)] and len(broker.context.pop.fetching) == 0


async def test_a_held_pop_whose_messages_cannot_be_fetched_is_answered(broker):
    broker.context.offsets.commit("g", "T", 0, 50)
    held = broker.asking(poll_time=30_000)
    await until(lambda: len(broker.context.pop.waiting) == 1)
    broker.place.failures = [BUSY]
    await broker.reset(7)
    assert (await held).code == ResponseCode.SYSTEM_BUSY
    assert numbers(await broker.asking()) == [7, 8, 9, 10]


async def test_a_held_pop_is_answered_while_it_is_not_known_where_a_queue_begins(broker):
    broker.context.offsets.commit("g", "T", 0, 50)
    held = broker.asking(queue_id=-1, poll_time=30_000)
    await until(lambda: len(broker.context.pop.waiting) == 1)
    # The group is new in the fifth queue.
    fields = {"topic": "T", "defaultTopic": "TBW102", "perm": 6, "topicFilterType": "SINGLE_TAG"}
    made = await broker.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, readQueueNums=5, writeQueueNums=5, **fields)
    assert made.code == ResponseCode.SUCCESS
    broker.place.is_known = False
    await broker.send(body=b"50 ")
    assert (await held).code == ResponseCode.SYSTEM_BUSY
    assert broker.place.fetches == [] and broker.context.pop.check_points.pending == {}


async def test_a_held_pop_that_fetches_when_its_time_is_over_is_not_held_again(broker):
    broker.context.offsets.commit("g", "T", 0, 50)
    held = broker.asking(poll_time=30_000, exp="nothing")
    await until(lambda: len(broker.context.pop.waiting) == 1)
    broker.context.offsets.commit("g", "T", 0, 7)  # no reset, so nothing wakes it before its time is over
    assert (await held).code == ResponseCode.POLLING_TIMEOUT
    assert len(broker.place.fetches) == 1 and len(broker.context.pop.waiting) == 0


async def test_a_stop_ends_held_pops_that_fetch_and_hides_nothing(tmp_path, caplog):
    async with Deleted(tmp_path) as broker:
        broker.context.offsets.commit("g", "T", 0, 50)
        held = broker.asking(poll_time=30_000)
        await until(lambda: len(broker.context.pop.waiting) == 1)
        broker.place.gate.clear()
        await broker.reset(7)
        await broker.fetching()
        pending, fetching = broker.context.pop.check_points.pending, broker.context.pop.fetching
        await broker.standalone.stop()
        assert len(fetching) == 0 and pending == {}
        held.cancel()
    assert [record.message for record in caplog.records if "error" in record.message] == []


async def test_a_pop_in_order_fetches_nothing_while_its_queue_is_blocked(broker):
    first = await broker.asking(order=True)
    held = broker.asking(order=True, poll_time=30_000)
    await until(lambda: len(broker.context.pop.waiting) == 1)
    assert numbers(first) == [0, 1, 2, 3] and len(broker.place.fetches) == 1
    for handle in first.handles.values():
        assert (await ack(broker, handle)).code == ResponseCode.SUCCESS
    assert numbers(await held) == [4, 5, 6, 7]
    assert broker.place.fetches == [("T", 0, 0), ("T", 0, 4)]


# ---------------------------------------------------------------- pulls


async def test_a_pull_fetches_once_and_commits_once(broker):
    broker.place.gate.clear()
    pulling = asyncio.ensure_future(broker.pull(3, count=2, flags=5, commit=1))
    await broker.fetching()
    broker.context.offsets.commit("g", "T", 0, 2)  # by another connection of the group
    broker.place.gate.set()
    answer = await pulling
    assert [int(record.body.split(b" ")[0]) for record in iter_records(answer.body)] == [3, 4]
    assert decode_fields(answer)["minOffset"] == "0"
    assert broker.offset == 2 and broker.place.fetches == [("T", 0, 3)]


async def test_a_pull_whose_messages_are_gone_asks_again_at_the_same_offset(broker):
    broker.place.gate.clear()
    pulling = asyncio.ensure_future(broker.pull(3))
    await broker.fetching()
    broker.place.lose("T", 0)
    broker.place.gate.set()
    answer = await pulling
    assert (answer.code, answer.remark) == (ResponseCode.PULL_RETRY_IMMEDIATELY, "NO_MATCHED_MESSAGE")
    assert decode_fields(answer)["nextBeginOffset"] == "3"
    assert (await broker.pull(3)).code == ResponseCode.PULL_OFFSET_MOVED


async def test_a_peek_fetches_nothing_and_moves_nobody(broker):
    header = {"consumerGroup": "g", "topic": "T", "queueId": 0, "maxMsgNums": 4}
    answer = await broker.ask(RequestCode.PEEK_MESSAGE, **header)
    assert answer.code == ResponseCode.PULL_NOT_FOUND
    assert broker.place.fetches == [] and broker.offset is None
