"""Dead letters are replayed only to their own group, and each of them once."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit import Message, PopConsumer, Producer, PushConsumer, StartFrom
from rmqkit.admin import Admin
from rmqkit.admin.messages.sending import Stop
from rmqkit.admin.replay.memory import Memory, file_name
from rmqkit.admin.replay.replay import Replay
from rmqkit.admin.replay.retries import GroupProducer, Retries, retry_of
from rmqkit.admin.replay.selection import Selection
from rmqkit.admin.replay.sources import TopicSource
from rmqkit.admin.replay.state import State
from rmqkit.broker.settings import BrokerSettings
from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import PushConsumerSettings
from rmqkit.errors import SettingsError
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.names import dlq_topic
from rmqkit.standalone import Standalone
from tests.client.messages import received
from tests.ports import free_port
from tests.waiting import until


async def replay(namesrv: str, group: str, memory: Memory) -> Replay:
    """Replay the dead letters of a group as the command does."""
    runtime = ClientRuntime(namesrv)
    await runtime.start()
    async with (
        Admin(namesrv) as admin,
        Producer("replay", runtime=runtime) as producer,
        PullConsumer("tools", runtime=runtime) as consumer,
    ):
        topic = dlq_topic(group)
        await memory.forget_deleted(consumer, topic)
        source = TopicSource(consumer, topic, Selection(topic))
        state = await State.begin("task", source)
        state.replay_id = memory.replay_id
        retries = await Retries.find(admin, group)
        sender = GroupProducer(producer, runtime, admin, retries)
        job = Replay(source, sender, consumer, state, retries=retries, memory=memory, is_unsure=not memory.is_done)
        await job.run(Stop())
    await runtime.close()
    return job


class Group:
    """A member of a group that fails while ``is_broken``.

    Attributes:
        seen: topic and number of tries of each message, by its body.
    """

    def __init__(self, kind: type[PushConsumer], name: str, namesrv: str, *, is_broken: bool = False) -> None:
        self.is_broken = is_broken
        self.seen: dict[str, list[tuple[str, int]]] = {}
        settings = PushConsumerSettings(retries_max=0, start_from=StartFrom.FIRST_OFFSET)
        self.consumer = kind(name, namesrv, settings=settings)
        self.consumer.on("Orders")(self.handle)

    async def handle(self, message: ReceivedMessage) -> None:
        self.seen.setdefault(bytes(message.body).decode(), []).append((message.topic, message.reconsume_times))
        if self.is_broken:
            raise ValueError("card declined")


@pytest.mark.parametrize("kind", [PushConsumer, PopConsumer])
async def test_a_replay_reaches_only_the_group_of_the_dead_letters(tmp_path: Path, kind: type[PushConsumer]) -> None:
    async with Standalone(tmp_path) as both, Admin(both.namesrv_address) as admin:
        namesrv = both.namesrv_address
        await admin.topics.create("Orders", read_queues=2, write_queues=2)
        fails, works = Group(kind, "billing", namesrv, is_broken=True), Group(PushConsumer, "stock", namesrv)
        async with fails.consumer, works.consumer, Producer("shop", namesrv) as producer:
            for number in range(3):
                await producer.send(Message(topic="Orders", body=b"%d" % number, tags="T", properties={"a": "b"}))

            async def dead() -> int:
                return sum(one.count for one in await admin.dead.groups())

            while await dead() < 3 or len(works.seen) < 3:
                await asyncio.sleep(0.05)
            fails.is_broken = False
            memory = Memory.new("task")
            assert (await replay(namesrv, "billing", memory)).state.sent == 3
            await until(lambda: Counter(map(len, fails.seen.values())) == {2: 3}, "billing handles each again")
            again = await replay(namesrv, "billing", memory)
            assert (again.state.sent, again.remembered) == (0, 3)
            await asyncio.sleep(60)  # virtual: time for late deliveries
            assert set(map(len, works.seen.values())) == {1}, "stock handles each message once"
            assert {one for seen in fails.seen.values() for one in seen} == {("Orders", 0)}


async def test_a_repeat_sends_only_what_died_since(tmp_path: Path) -> None:
    from tests.admin.test_dead import die

    async with Standalone(tmp_path) as both, Admin(both.namesrv_address) as admin:
        await admin.groups.update("billing", {})
        await die(admin, "billing", 3)
        memory = Memory.new("task")
        assert (await replay(both.namesrv_address, "billing", memory)).state.sent == 3
        await die(admin, "billing", 2)
        job = await replay(both.namesrv_address, "billing", memory)
        assert (job.state.sent, job.remembered) == (2, 3)


async def test_a_topic_that_was_created_again_is_not_remembered(tmp_path: Path) -> None:
    from tests.admin.test_dead import die

    async with Standalone(tmp_path) as both, Admin(both.namesrv_address) as admin:
        await admin.groups.update("billing", {})
        await die(admin, "billing", 3)
        memory = Memory.new("task")
        await replay(both.namesrv_address, "billing", memory)
        await admin.topics.delete(dlq_topic("billing"))
        admin.calls.forget()
        await die(admin, "billing", 4)
        job = await replay(both.namesrv_address, "billing", memory)
        assert (job.state.sent, job.remembered) == (4, 0)


async def test_a_new_store_at_the_same_address_is_not_remembered(tmp_path: Path) -> None:
    from tests.admin.test_dead import die

    memory, port = Memory.new("task"), free_port(-2, 1)
    for folder in ("first", "second"):
        await asyncio.sleep(1)  # virtual
        broker = BrokerSettings(listen_port=port, bind_address="127.0.0.1")
        async with Standalone(tmp_path / folder, broker=broker) as both, Admin(both.namesrv_address) as admin:
            await admin.groups.update("billing", {})
            await die(admin, "billing", 3)
            job = await replay(both.namesrv_address, "billing", memory)
            assert (job.state.sent, job.remembered) == (3, 0)


async def test_a_group_that_consumes_in_order_is_named_and_nothing_is_sent(tmp_path: Path) -> None:
    async with Standalone(tmp_path) as both, Admin(both.namesrv_address) as admin:
        await admin.topics.create("Orders", read_queues=1, write_queues=1)
        consumer = PushConsumer("billing", both.namesrv_address, ordered=True)

        @consumer.on("Orders")
        async def handle(message: ReceivedMessage) -> None: ...

        async with consumer:
            with pytest.raises(SettingsError, match=r"consumes in order: .*rmq replay --dlq billing --to Orders"):
                await Retries.find(admin, "billing")


def test_a_retry_has_all_its_tries_and_says_where_it_was_first() -> None:
    properties = {"RETRY_TOPIC": "Orders", "ORIGIN_MESSAGE_ID": "first", "TAGS": "T", "KEYS": "k", "a": "b"}
    properties |= {"DELAY": "18", "MAX_RECONSUME_TIMES": "3", "__SHARDINGKEY": "s"}
    dead = received(7, topic="%DLQ%g", properties=properties, reconsume_times=17)
    retries = Retries(group="g", pops=False, is_online=True, known=set())
    message = retry_of(dead, "Orders", retries, "replay/b:0:7")
    assert (message.topic, message.msg_id, message.tags, message.keys) == ("%RETRY%g", "replay/b:0:7", "T", ["k"])
    assert message.own == {"RETRY_TOPIC": "Orders", "ORIGIN_MESSAGE_ID": "first", "__SHARDINGKEY": "s"}
    assert message.properties == {"a": "b"}
    assert not message.is_delayed


@pytest.mark.parametrize(
    ("pops", "known", "topic"),
    [
        (False, {"%RETRY%g+T"}, "%RETRY%g"),
        (True, set(), "%RETRY%g_T"),
        (True, {"%RETRY%g+T"}, "%RETRY%g+T"),
        (True, {"%RETRY%g+U"}, "%RETRY%g_T"),
    ],
)
def test_a_group_that_only_pops_has_a_retry_topic_for_each_topic(pops: bool, known: set[str], topic: str) -> None:
    assert Retries(group="g", pops=pops, is_online=True, known=known).topic("T") == topic


@given(st.lists(st.tuples(st.sampled_from(["a:0", "b:0"]), st.integers(0, 12))))
def test_the_memory_is_a_set_of_offsets(added: list[tuple[str, int]]) -> None:
    memory = Memory.new("task")
    for lane, offset in added:
        memory.add(lane, received(offset))
    for lane in ("a:0", "b:0"):
        assert {offset for offset in range(14) if memory.has(lane, offset)} == {at for of, at in added if of == lane}
        ranges = memory.places.get(lane, [])
        assert all(first[1] < second[0] for first, second in pairwise(ranges)), "apart and sorted"
    assert memory.marks == {
        lane: (top, f"{received(top).offset_msg_id} 0")
        for lane in dict(added)
        for top in [max(at for of, at in added if of == lane)]
    }


def test_the_memory_is_read_again_and_used_for_its_task_alone(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    memory = Memory.load(path, "task")
    memory.add("b:0", received(3))
    memory.save(path)
    assert Memory.load(path, "task") == memory
    with pytest.raises(SettingsError, match="is the state of another replay, task: name another file for other"):
        Memory.load(path, "other")
    path.write_text("x")
    with pytest.raises(SettingsError, match="is not the state of a replay of dead letters"):
        Memory.load(path, "task")


def test_one_replay_at_a_time_has_the_memory(tmp_path: Path) -> None:
    with (
        Memory.held(tmp_path / "memory"),
        pytest.raises(SettingsError, match="another replay uses"),
        Memory.held(tmp_path / "memory"),
    ):
        pass
    with Memory.held(tmp_path / "memory"):
        pass


def test_clusters_groups_and_targets_have_memories_of_their_own() -> None:
    names = [
        file_name("a:1;b:1", "g", None),
        file_name("a:1", "g", None),
        file_name("a:1;b:1", "h", None),
        file_name("a:1;b:1", "g", "T"),
        file_name("a:1;b:1", "g|", None),
    ]
    assert len(set(names)) == len(names)
    assert file_name("b:1;a:1", "g", None) == names[0]
