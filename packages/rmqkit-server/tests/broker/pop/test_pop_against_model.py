"""The POP service against a model of dictionaries, under random pops, acks, changes, refusals, kills and restarts.

The model knows for each message of each queue whether it is ready, in flight until a time, or finished. Every answer of
the handlers has to have the messages, the order, the number of messages left and the delivery counts that the model
expects. A kill leaves the files unchanged (the page cache survives the process), with offsets and groups as they were
last written. No message may be lost by a kill. Only acks that were not yet stored (``enablePopBufferMerge``) and
redeliveries that the store refused to record may be repeated.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rmqkit.broker.handlers import OwnAddress
from rmqkit.broker.pop.handlers import PopAckHandlers, PopHandlers
from rmqkit.broker.pop.service import PopService
from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.statistics import Statistics
from rmqkit.broker.tables.groups import GroupTable
from rmqkit.broker.tables.offsets import OffsetTable
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, FrameSplitter, decode_command, decode_header, encode_command, request
from rmqkit.protocol.ids import decode_pop_handle
from rmqkit.protocol.names import pop_retry_topic
from rmqkit.protocol.schemas.pop import (
    AckMessageRequest,
    ChangeInvisibleTimeRequest,
    ChangeInvisibleTimeResponse,
    PopMessageRequest,
)
from rmqkit.protocol.templates import success_frames
from rmqkit.store.message_store import InnerMessage, MessageStore, PutResult, PutStatus
from rmqkit.store.table_journal import journal_of
from rmqkit.testing.clock import StandingClock
from tests.broker.pops import Popped, named
from tests.examples import examples
from tests.store.stores import HOST, message, read_all, small_settings

TOPIC, GROUP, BROKER, QUEUES = "T", "g", "broker-a", 2
REVIVE = "rmq_sys_REVIVE_LOG_DefaultCluster"
RETRY = {False: pop_retry_topic(GROUP, TOPIC, "_"), True: pop_retry_topic(GROUP, TOPIC, "+")}
SLOT_MS = 100
"""Messages come again in slots: at the end of the one in which their time is over."""

Queue = tuple[str, int]
Place = tuple[str, int, int]
"""Topic, queue id and queue offset."""


@dataclass
class InFlight:
    """A popped message in the model: its place, and the time of its redelivery."""

    place: Place
    due_ms: int


@dataclass
class Model:
    """Messages by queue, the next message to pop of each queue, and the messages in flight.

    Attributes:
        messages: body and number of earlier deliveries, by queue, in the order of their offsets.
        in_flight: by handle. A message has two entries when a kill lost the change of its invisible time.
        unwritten: acknowledged or redelivered without a record in the store. A kill repeats these messages.
    """

    messages: dict[Queue, list[tuple[str, int]]] = field(default_factory=dict)
    next: dict[Queue, int] = field(default_factory=dict)
    in_flight: dict[str, InFlight] = field(default_factory=dict)
    unwritten: dict[str, InFlight] = field(default_factory=dict)

    def ready(self, queue: Queue) -> int:
        return len(self.messages.get(queue, [])) - self.next.get(queue, 0)

    def due(self, now_ms: int) -> list[str]:
        return [handle for handle, one in self.in_flight.items() if one.due_ms // SLOT_MS < now_ms // SLOT_MS]


class Peer:
    """A connection that records the sent commands."""

    peer = "127.0.0.1:1"

    def __init__(self) -> None:
        self.answers: list[Command] = []

    def send(self, command: Command) -> None:
        self.answers.append(decoded(command))

    def send_frame(self, frame: bytes) -> None:
        self.answers.append(from_wire(frame))

    def send_successes(self, opaques: list[int]) -> None:
        for opaque in opaques:
            self.send_frame(success_frames([opaque]))

    def cork(self) -> None: ...

    def flush(self) -> None: ...


def decoded(command: Command) -> Command:
    """Return a command as the other side decodes it."""
    return from_wire(b"".join(encode_command(command)))


def from_wire(data: bytes) -> Command:
    (frame,) = FrameSplitter().feed(data)
    return decode_command(frame)


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmqkit.system.disk.sync_data", lambda fd: None)
    monkeypatch.setattr("rmqkit.system.disk.sync_file", lambda fd: None)


class PopMachine(RuleBasedStateMachine):
    @initialize(merge=st.booleans(), v2=st.booleans())
    def begin(self, merge: bool, v2: bool) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.clock = StandingClock()
        self.loop = asyncio.new_event_loop()
        self.settings = BrokerSettings(
            broker_name=BROKER, revive_queue_count=2, pop_buffer_merge=merge, retry_topic_v2=v2, pop_retry_percent=50
        )
        self.store_settings = small_settings(
            consume_queue_file_bytes=20_000,  # a read ends at the end of its file, and the model has no files
            flush_interval_ms=3_600_000,
            queue_flush_interval_ms=3_600_000,
        )
        self.model = Model()
        self.retry = RETRY[v2]
        self.bodies = self.generation = 0
        self.start()

    def start(self) -> None:
        self.loop.run_until_complete(self.open())

    async def open(self) -> None:
        root = self.folder / str(self.generation)
        folder = root / "config"
        clock, settings = self.clock, self.settings
        self.store = MessageStore(root, self.store_settings, clock=clock)
        self.topics = TopicTable(folder, settings, clock, lambda topics: None)
        self.groups = GroupTable(folder, settings, clock)
        self.offsets = OffsetTable(folder, clock)
        self.service = PopService(folder, self.store, self.topics, self.groups, self.offsets, settings, clock, HOST)
        for table in (self.topics, self.groups, self.offsets):
            table.load()
        self.store.open()
        self.topics.ensure(TOPIC, QUEUES)
        self.service.load()
        context: Any = SimpleNamespace(
            older=None,
            first_offset=self.store.min_offset,
            clients=SimpleNamespace(compensate=lambda *fields: None),
            clock=clock,
            counts=None,
            durability=None,
            groups=self.groups,
            identity=OwnAddress("127.0.0.1", HOST),
            offsets=self.offsets,
            pop=self.service,
            settings=settings,
            statistics=Statistics(self.store, "DefaultCluster", clock, lambda topic: False),
            store=self.store,
            topics=self.topics,
        )
        self.pops, self.acks = PopHandlers(context), PopAckHandlers(context)

    def teardown(self) -> None:
        self.store.close()
        self.loop.close()
        shutil.rmtree(self.folder)

    def ask(self, *asked: tuple[Callable[..., Any], RequestCode, Any]) -> list[Command]:
        """Send requests in one loop tick and return their answers."""
        peers = [Peer() for _ in asked]
        for peer, (handler, code, header) in zip(peers, asked, strict=True):
            if (answer := handler(peer, decoded(request(code, header)))) is not None:
                peer.send(answer)
        self.service.batch.end()
        assert [len(peer.answers) for peer in peers] == [1] * len(asked)
        return [peer.answers[0] for peer in peers]

    # ---- rules

    @rule(queue_id=st.integers(0, QUEUES - 1), count=st.integers(1, 4))
    def publish(self, queue_id: int, count: int) -> None:
        for _ in range(count):
            self.bodies += 1
            body = str(self.bodies)
            assert self.store.put(message(TOPIC, queue_id, body.encode())).status is PutStatus.OK
            self.model.messages.setdefault((TOPIC, queue_id), []).append((body, 0))

    @rule(
        queue_id=st.sampled_from([-1, -1, *range(QUEUES)]),
        counts=st.lists(st.integers(1, 5), min_size=1, max_size=3),
        invisible_ms=st.sampled_from([50, 1000, 60_000]),
        refused=st.sampled_from([False] * 5 + [True]),
    )
    def pop(self, queue_id: int, counts: list[int], invisible_ms: int, refused: bool) -> None:
        """Pop several times in one loop tick."""
        headers = [
            PopMessageRequest(
                consumer_group=GROUP,
                topic=TOPIC,
                queue_id=queue_id,
                max_msg_nums=count,
                invisible_time=invisible_ms,
                poll_time=0,
                born_time=self.clock.now_ms(),
                init_mode=0,
                exp_type="TAG",
                exp="*",
            )
            for count in counts
        ]
        with self.refusing(refused):
            answers = self.ask(*((self.pops.pop, RequestCode.POP_MESSAGE, header) for header in headers))
        queues = [(TOPIC, one) for one in (range(QUEUES) if queue_id < 0 else [queue_id])] + [(self.retry, 0)]
        model = self.model
        ready = sum(map(model.ready, queues))
        for answer, count in zip(answers, counts, strict=True):
            taken = min(count, ready)
            ready -= taken
            found = ResponseCode.SYSTEM_ERROR if refused else ResponseCode.SUCCESS
            assert answer.code == (found if taken else ResponseCode.POLLING_TIMEOUT)
            if refused:
                continue
            popped = Popped(answer, BROKER)
            assert (len(popped.messages), popped.header.rest_num) == (taken, ready)
            for body, one in popped.messages.items():
                fields = named(popped.handles[body])
                queue = fields["topic"], fields["queue_id"]
                at = model.next.get(queue, 0)
                assert queue in queues
                assert (fields["offset"], body, one.reconsume_times) == (at, *model.messages[queue][at])
                model.next[queue] = at + 1
                due_ms = popped.header.pop_time + invisible_ms
                model.in_flight[popped.handles[body]] = InFlight((*queue, at), due_ms)

    @precondition(lambda self: self.model.in_flight)
    @rule(data=st.data(), refused=st.sampled_from([False] * 5 + [True]))
    def ack(self, data: st.DataObject, refused: bool) -> None:
        """Acknowledge messages in one loop tick, also redelivered ones, for which an ack changes nothing."""
        handles = data.draw(st.lists(st.sampled_from(sorted(self.model.in_flight)), max_size=4, unique=True))
        asked = [(self.acks.ack, RequestCode.ACK_MESSAGE, AckMessageRequest(**named(handle))) for handle in handles]
        with self.refusing(refused):
            answers = self.ask(*asked)
        is_taken = not refused or self.settings.pop_buffer_merge
        assert {answer.code for answer in answers} <= {ResponseCode.SUCCESS if is_taken else ResponseCode.SYSTEM_ERROR}
        for handle in handles if is_taken else ():
            self.done(handle)

    @precondition(lambda self: self.model.in_flight)
    @rule(
        data=st.data(), invisible_ms=st.sampled_from([10, 1000, 100_000]), refused=st.sampled_from([False] * 3 + [True])
    )
    def change_invisible_time(self, data: st.DataObject, invisible_ms: int, refused: bool) -> None:
        self.change(data.draw(st.sampled_from(sorted(self.model.in_flight))), invisible_ms, refused)

    def change(self, handle: str, invisible_ms: int, refused: bool) -> None:
        place = self.model.in_flight[handle].place
        header = ChangeInvisibleTimeRequest(**named(handle), invisible_time=invisible_ms)
        with self.refusing(refused):
            (answer,) = self.ask((self.acks.change, RequestCode.CHANGE_MESSAGE_INVISIBLETIME, header))
        assert answer.code == (ResponseCode.SYSTEM_ERROR if refused else ResponseCode.SUCCESS)
        if refused:
            return
        changed = decode_header(answer, ChangeInvisibleTimeResponse)
        words = handle.split(" ")
        words[:4] = map(str, (place[2], changed.pop_time, changed.invisible_time, changed.revive_qid))
        assert decode_pop_handle(" ".join(words)).check_point_offset == place[2]
        self.done(handle)
        self.model.in_flight[" ".join(words)] = InFlight(place, changed.pop_time + invisible_ms)

    @rule(ms=st.sampled_from([1, 60, 1100, 70_000]), refused=st.sampled_from([False] * 5 + [True]))
    def revive(self, ms: int, refused: bool) -> None:
        """Let time pass, and check that the due messages are redelivered."""
        self.clock.ms += ms
        model, now_ms = self.model, self.clock.now_ms()
        due = model.due(now_ms)
        with self.refusing(refused):
            self.loop.run_until_complete(self.service.revive.round())
        if not refused:
            model.unwritten.clear()
        come = read_all(self.store, self.retry)[len(model.messages.get((self.retry, 0), [])) :]
        places = [model.in_flight[handle].place for handle in due]
        expected = [(body, tries + 1) for *queue, at in places for body, tries in [model.messages[tuple(queue)][at]]]
        assert sorted((record.body.decode(), record.reconsume_times) for record in come) == sorted(expected)
        for handle in due:
            one = model.in_flight.pop(handle)
            if refused:
                model.unwritten[handle] = one
        again = model.messages.setdefault((self.retry, 0), [])
        again += [(record.body.decode(), record.reconsume_times) for record in come]

    @rule(groups=st.booleans())
    def write_tables(self, groups: bool) -> None:
        """Write one of the tables. A broker writes each table every few seconds."""
        if groups:
            self.loop.run_until_complete(self.groups.write_new())
            self.date("subscriptionGroup.json")
        else:
            self.write_offsets()

    @rule()
    def restart(self) -> None:
        """Stop the broker in order and start it again: no message is repeated."""
        self.loop.run_until_complete(self.service.close())
        self.service.persist()
        self.model.unwritten.clear()
        self.store.close()
        self.groups.persist()
        self.date("subscriptionGroup.json")
        self.write_offsets()
        self.start()

    @rule()
    def kill(self) -> None:
        before = self.folder / str(self.generation)
        self.generation += 1
        shutil.copytree(before, self.folder / str(self.generation))
        self.store.close()
        shutil.rmtree(before)
        self.model.in_flight |= self.model.unwritten
        self.model.unwritten.clear()
        self.start()

    # ---- invariants after each rule

    @invariant()
    def in_flight_is_what_the_model_says(self) -> None:
        check_points = self.service.check_points
        left = Counter(
            [(key[0], key[2], offset) for key, offsets in check_points.pending.items() for offset in offsets]
        )
        assert left == Counter([one.place for one in self.model.in_flight.values()])
        by_queue = Counter([(topic, GROUP, queue_id) for topic, queue_id, _ in left.elements()])
        assert check_points.in_flight == by_queue

    @invariant()
    def offsets_are_behind_what_was_popped(self) -> None:
        for queue, offset in self.model.next.items():
            assert self.offsets.get(GROUP, *queue) == offset

    # ---- inside

    def done(self, handle: str) -> None:
        one = self.model.in_flight.pop(handle)
        if self.settings.pop_buffer_merge:
            self.model.unwritten[handle] = one

    def write_offsets(self) -> None:
        self.offsets.persist()
        self.date("consumerOffset.json")

    def date(self, name: str) -> None:
        """Give a table's file the time of the model's clock."""
        file = self.folder / str(self.generation) / "config" / name
        for path in (file, journal_of(file)):
            if path.exists():
                os.utime(path, ns=(int(self.clock.ms * 1_000_000),) * 2)

    @contextmanager
    def refusing(self, is_refusing: bool) -> Iterator[None]:
        """Let the store refuse check points and acks inside the context."""
        put = self.store.put

        def refuse(one: InnerMessage) -> PutResult:
            is_revive = one.topic == REVIVE
            return PutResult(PutStatus.SERVICE_NOT_AVAILABLE, reason="no space") if is_revive else put(one)

        with pytest.MonkeyPatch.context() as patch:
            if is_refusing:
                patch.setattr(self.store, "put", refuse)
                patch.setattr(self.store, "put_run", lambda messages: None)
            yield


@pytest.fixture
def machine() -> Iterator[PopMachine]:
    one = PopMachine()
    one.begin(merge=True, v2=False)
    yield one
    one.in_flight_is_what_the_model_says()
    one.teardown()


def test_a_message_that_is_redelivered_while_the_disk_is_full_comes_once(machine: PopMachine) -> None:
    machine.publish(0, 1)
    machine.pop(-1, [1], 50, refused=False)
    machine.revive(1100, refused=True)
    machine.restart()
    machine.revive(1100, refused=False)


def test_a_pop_does_not_take_the_key_of_one_whose_acks_are_not_stored(machine: PopMachine) -> None:
    """Three changes in one ms: the stored ack of the first check point would count for the third."""
    machine.publish(0, 1)
    machine.pop(-1, [1], 60_000, refused=False)
    for _ in range(3):
        machine.change(next(iter(machine.model.in_flight)), 1000, refused=False)
    machine.restart()


def test_a_new_group_that_was_not_written_before_a_kill_gets_its_messages_again(machine: PopMachine) -> None:
    machine.publish(0, 1)
    machine.pop(-1, [1], 60_000, refused=False)
    machine.revive(1100, refused=False)
    machine.write_tables(groups=False)
    machine.kill()
    machine.revive(70_000, refused=False)


TestPop = PopMachine.TestCase
TestPop.settings = examples(40, stateful_step_count=25)
