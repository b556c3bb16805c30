"""Stores for `tests.faults.damage`: written by a whole broker, started again with it or with store and timer alone."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from rmqkit.broker.context import BrokerContext
from rmqkit.broker.server import Broker
from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.transaction.check_back import CheckBack
from rmqkit.errors import RecordCorrupt
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_fields, decode_header, request
from rmqkit.protocol.ids import decode_offset_id
from rmqkit.protocol.names import HALF_TOPIC, OP_HALF_TOPIC, RETRY_PREFIX, SCHEDULE_TOPIC, TIMER_TOPIC
from rmqkit.protocol.properties import encode_properties
from rmqkit.protocol.record import TRANSACTION_COMMIT, TRANSACTION_ROLLBACK, Record, decode_record
from rmqkit.protocol.schemas.offsets import QueryConsumerOffsetRequest, UpdateConsumerOffsetRequest
from rmqkit.protocol.schemas.pull import PullFlag, PullMessageRequest, PullMessageResponse, QueryMessageRequest
from rmqkit.protocol.schemas.send import EndTransactionRequest, SendMessageResponse, SendMessageV2Request
from rmqkit.remoting.client import RemotingClient
from rmqkit.store.index.index import full_files
from rmqkit.store.message_store import MessageStore
from rmqkit.store.settings import StoreSettings
from rmqkit.testing.clock import StandingClock
from tests.broker.pops import ack, pop
from tests.broker.timed import NOW_MS, STEP_MS, Timed
from tests.store.stores import small_settings
from tests.waiting import until

TIMED_COUNT = 24
LATER_MS = 600_000
"""The time between the stop of a store and its next start: all messages are due then."""

_DELAYED_COUNT = 6
_POPPED_COUNT = 6
_TURNS_MAX = 100
_TRIED = 20
_TRY_AGAIN_MS = 11_000
_GROUP = "g"
_CHUNK_BYTES = 1 << 16
_SYSTEM = (SCHEDULE_TOPIC, TIMER_TOPIC, HALF_TOPIC, OP_HALF_TOPIC, "TRANS_CHECK_MAX_TIME_TOPIC")

Key = tuple[str, int, int]
Coming = tuple[bool, bytes]
"""A body that must be delivered, and True if in a retry topic."""


class Half(Struct):
    """A half message without a decision."""

    body: bytes
    physical_offset: int
    queue_offset: int


class Sound(Struct):
    """A stopped store and its content.

    Attributes:
        bodies: by topic, queue id and queue offset, as consumers see them.
        coming: the messages that must be delivered after a start.
        half: the half message that can be committed after it.
        keys: a message's body by its key.
        offsets: of the group by queue id.
    """

    root: Path
    is_clean: bool
    bodies: dict[Key, bytes]
    coming: Counter[Coming]
    half: Half
    keys: dict[str, bytes]
    offsets: dict[int, int]


class Found(Struct):
    """The content of a started store."""

    bodies: dict[Key, bytes]
    coming: Counter[Coming]
    missing_keys: list[str] = []
    offsets: dict[int, int] = {}


def settings() -> StoreSettings:
    """Return settings with small files, so that there are several of each kind."""
    return small_settings(
        queue_flush_interval_ms=20,
        timer_log_file_bytes=1040,
        timer_precision_ms=STEP_MS,
        timer_delay_seconds_max=1000,
        timer_roll_window_slots=20_000,
        # the test calls the flush itself: a broker's own flush beside it would write the same state at the same time
        timer_flush_interval_ms=3_600_000,
    )


class Served:
    """A broker over a store, with a client."""

    def __init__(self, root: Path, clock: StandingClock) -> None:
        self.root = root
        self.clock = clock
        own = BrokerSettings(listen_port=0, bind_address="127.0.0.1", broker_name="b", transaction_timeout_ms=1000)
        self._broker = Broker(own, settings(), root, clock=clock)
        self.client = RemotingClient()

    @property
    def parts(self) -> BrokerContext:
        return self._broker.context

    async def start(self) -> None:
        await self._broker.start()

    async def stop(self) -> None:
        await self.client.close()
        await self._broker.stop()

    async def call(self, code: int, header: Any = None, body: bytes = b"", client: None = None) -> Command:
        return await self.client.call(self._broker.address, request(code, header, body), 30_000)

    async def send(self, topic: str, queue_id: int, body: bytes, **properties: str | int) -> SendMessageResponse:
        text = encode_properties({name: str(value) for name, value in properties.items()}).decode()
        header = SendMessageV2Request("p", topic, "TBW102", 3, queue_id, 0, self.clock.now_ms(), 0, properties=text)
        answer = await self.call(RequestCode.SEND_MESSAGE_V2, header, body)
        assert answer.code == 0, answer.remark
        return decode_header(answer, SendMessageResponse)

    async def send_half(self, body: bytes) -> Half:
        sent = await self.send("H", 0, body, TRAN_MSG="true", PGROUP="p", UNIQ_KEY=body.decode())
        return Half(body, decode_offset_id(sent.msg_id)[2], sent.queue_offset)

    async def end(self, half: Half, decision: int) -> int:
        header = EndTransactionRequest(
            producer_group="p",
            tran_state_table_offset=half.queue_offset,
            commit_log_offset=half.physical_offset,
            commit_or_rollback=decision,
            msg_id=half.body.decode(),
        )
        return (await self.call(RequestCode.END_TRANSACTION, header)).code

    async def settled(self) -> None:
        """Deliver all messages that are due, until no more follow."""
        parts = self.parts
        assert parts.timer is not None and parts.pop is not None
        for turn in range(1, _TURNS_MAX):
            await parts.pop.revive.round()
            await asyncio.sleep(0.004)
            behind = parts.timer.read_behind_ms, parts.timer.offset_behind, len(parts.pop.check_points), _delayed(parts)
            if not any(behind):
                return
            if turn % _TRIED == 0:  # failed deliveries are retried after seconds
                self.clock.ms += _TRY_AGAIN_MS

    async def bodies(self, failures: list[str]) -> dict[Key, bytes]:
        """Return all messages of applications, as consumers get them."""
        found = {}
        for topic, queue_id in list(self.parts.store.queue_ends()):
            if topic not in _SYSTEM and not topic.startswith("rmq_sys_"):
                async for record in self._pulled(topic, queue_id, failures):
                    found[topic, queue_id, record.queue_offset] = record.body
        return found

    async def _pulled(self, topic: str, queue_id: int, failures: list[str]) -> AsyncIterator[Record]:
        offset = 0
        while True:
            header = PullMessageRequest(
                consumer_group=_GROUP,
                topic=topic,
                queue_id=queue_id,
                queue_offset=offset,
                max_msg_nums=32,
                sys_flag=PullFlag.SUBSCRIPTION,
                commit_offset=0,
                suspend_timeout_millis=0,
                sub_version=0,
                subscription="*",
            )
            answer = await self.call(RequestCode.PULL_MESSAGE, header)
            if answer.code not in (0, *_EMPTY):
                return  # the topic is missing, and with it all its messages
            told = decode_header(answer, PullMessageResponse)
            for record in records_of(bytes(answer.payload), f"a pull of {topic}-{queue_id}", failures):
                if check(record, topic, queue_id, failures):
                    yield record
            if told.next_begin_offset <= offset:
                if answer.code == 0:
                    failures.append(f"{topic}-{queue_id}: a reader does not come on from {offset}")
                return
            offset = told.next_begin_offset

    async def missing_keys(self, keys: dict[str, bytes], failures: list[str]) -> list[str]:
        """Return the keys by which their message is not found."""
        missing = []
        for key, body in keys.items():
            header = QueryMessageRequest(topic="A", key=key, max_num=32, begin_timestamp=0, end_timestamp=1 << 60)
            answer = await self.call(RequestCode.QUERY_MESSAGE, header)
            records = (
                list(records_of(bytes(answer.payload), f"a query for {key}", failures)) if answer.code == 0 else []
            )
            if body not in [one.body for one in records]:
                missing.append(key)
        return missing

    async def offsets(self) -> dict[int, int]:
        """Return the consumed offsets of topic A."""
        found = {}
        for queue_id in range(3):
            answer = await self.call(
                RequestCode.QUERY_CONSUMER_OFFSET, QueryConsumerOffsetRequest(_GROUP, "A", queue_id)
            )
            found[queue_id] = int(decode_fields(answer).get("offset", -1)) if answer.code == 0 else -1
        return found


_EMPTY = (ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_RETRY_IMMEDIATELY, ResponseCode.PULL_OFFSET_MOVED)


def _delayed(parts: BrokerContext) -> int:
    """Return the number of delayed messages that are not delivered."""
    ends = {queue: end for (topic, queue), end in parts.store.queue_ends().items() if topic == SCHEDULE_TOPIC}
    done = parts.schedule.offsets().offset_table
    return sum(max(0, end - done.get(queue + 1, 0)) for queue, end in ends.items())


def records_of(payload: bytes, what: str, failures: list[str]) -> list[Record]:
    """Return the records of an answer. The answer must consist of whole records."""
    found, at = [], 0
    while at < len(payload):
        try:
            found.append(decode_record(payload, at, verify_crc=True))
        except RecordCorrupt as error:
            failures.append(f"the answer to {what} cannot be parsed: {error}")
            break
        at += found[-1].size
    return found


def check(record: Record, topic: str, queue_id: int, failures: list[str]) -> bool:
    """Return True if a record belongs to the requested queue."""
    is_own = (record.topic, record.queue_id) == (topic, queue_id)
    if not is_own:
        failures.append(f"{topic}-{queue_id} is answered with a record of {record.topic}-{record.queue_id}")
    return is_own


def copy_sparsely(root: Path, to: Path) -> None:
    """Copy a store without the holes of its files: the timer wheel has megabytes of them."""
    shutil.copytree(root, to, copy_function=_copy_file)


def _copy_file(file: str, to: str) -> None:
    with open(file, "rb") as source, open(to, "wb") as copy:
        while chunk := source.read(_CHUNK_BYTES):
            if chunk.strip(b"\0"):
                copy.write(chunk)
            else:
                copy.seek(len(chunk), os.SEEK_CUR)
        copy.truncate(source.tell())


# ---- sound stores


async def sound_store(folder: Path, *, is_clean: bool) -> Sound:
    """Let a broker write a store, and stop or kill it."""
    root = folder / ("stopped" if is_clean else "killed")
    one = Served(folder / "live", StandingClock(NOW_MS))
    await one.start()
    keys = await _fill(one)
    half = await _decide(one)
    popped = await _pop(one)
    await _time_passes(one)
    offsets = {queue_id: 4 + queue_id for queue_id in range(3)}
    for number in (1, 0):  # write each file twice, so that it has a backup
        for queue_id, offset in offsets.items():
            header = UpdateConsumerOffsetRequest(_GROUP, "A", queue_id, offset - number)
            assert (await one.call(RequestCode.UPDATE_CONSUMER_OFFSET, header)).code == 0
        await _written(one)
        await one.send("late", 0, b"new topic %d" % number)
    failures: list[str] = []
    bodies = await one.bodies(failures)
    assert not failures, failures
    here = set(bodies.values())
    coming = Counter((False, body) for body in _delayed_bodies() if body not in here)
    coming += Counter((True, body) for body in popped)
    if not is_clean:
        await _written(one)
        copy_sparsely(one.root, root)
    await one.stop()
    if is_clean:
        one.root.rename(root)
    else:
        shutil.rmtree(one.root)
    return Sound(root, is_clean, bodies, coming, half, keys, offsets)


async def _fill(one: Served) -> dict[str, bytes]:
    keys = {}
    for number in range(60):
        topic, queue_id, body = "AB"[number % 2], number // 2 % 3, b"%04d" % number * 60
        await one.send(topic, queue_id, body, KEYS=f"k{number}", TAGS=f"t{number % 3}", UNIQ_KEY=f"ID{number}")
        if topic == "A":
            keys[f"k{number}"] = body
        one.clock.ms += 7
    for number in range(_DELAYED_COUNT):
        await one.send("D", 0, b"delayed %d" % number, DELAY=1 + number % 2 * 2)
    for number in range(TIMED_COUNT):
        due = NOW_MS + 4000 + number // 2 * STEP_MS
        await one.send("T", 1, b"timed %d" % number, UNIQ_KEY=f"U{number}", TIMER_DELIVER_MS=due)
    return keys


def _delayed_bodies() -> list[bytes]:
    return [b"delayed %d" % n for n in range(_DELAYED_COUNT)] + [b"timed %d" % n for n in range(TIMED_COUNT)]


async def _decide(one: Served) -> Half:
    """Store half messages: committed, rolled back, and one that waits."""
    for number, decision in enumerate((TRANSACTION_COMMIT, TRANSACTION_ROLLBACK, TRANSACTION_COMMIT)):
        await one.end(await one.send_half(b"decided %d" % number), decision)
    return await one.send_half(b"undecided")


async def _pop(one: Served) -> list[bytes]:
    """Pop messages and acknowledge the first. Return the bodies that will be redelivered."""
    for number in range(_POPPED_COUNT):
        await one.send("P", 0, b"popped %d" % number)
    found: dict[str, str] = {}
    for _ in range(_POPPED_COUNT * 4):
        popped = await pop(one, "b", topic="P", max_msg_nums=2, invisible_time=60_000, born_time=one.clock.now_ms())
        found |= popped.handles
        if len(found) == _POPPED_COUNT:
            break
    assert len(found) == _POPPED_COUNT, found
    (_, handle), *rest = found.items()
    assert (await ack(one, handle, topic="P")).code == 0
    return [body.encode() for body, _ in rest]


async def _time_passes(one: Served) -> None:
    """Advance the time until the first delay level and a part of the timed messages are due."""
    timer = one.parts.timer
    assert timer is not None
    await until(lambda: timer.offset_behind == 0)
    one.clock.ms = NOW_MS + 4000 + 3 * STEP_MS
    await until(lambda: timer.read_behind_ms == 0 and _delayed(one.parts) == _DELAYED_COUNT // 2)
    one.parts.ops.write()
    await timer.flush_round()


async def _written(one: Served) -> None:
    """Write all data to the disk that is written periodically."""
    store, timer = one.parts.store, one.parts.timer
    assert timer is not None
    store.request_flush()
    await until(lambda: store.durable_offset == store.dispatched_offset == store.max_physical_offset)
    # A later periodic flush records full index files. Without this record nothing shows that a file is missing.
    index = one.root / "index"
    await until(lambda: len(full_files(index)) >= len(list(index.iterdir())) - 1)
    await timer.flush_round()
    await one.parts.topics.write_new()
    await one.parts.groups.write_new()
    one.parts.persist()
    await one.parts.schedule.persist_round()


# ---- a start


@asynccontextmanager
async def served(root: Path) -> AsyncIterator[Served]:
    """Start a broker over a store that was stopped ten minutes ago."""
    one = Served(root, StandingClock(NOW_MS + LATER_MS))
    await one.start()
    try:
        yield one
    finally:
        await one.stop()


async def found_by_broker(sound: Sound, root: Path, failures: list[str]) -> Found:
    """Start a broker over a store, deliver all due messages, and read everything as clients do.
    Raises StoreError: the start is refused."""
    async with served(root) as one:
        await one.settled()
        await CheckBack(one.parts).round()
        await one.end(sound.half, TRANSACTION_COMMIT)
        bodies = await one.bodies(failures)
        return Found(bodies, _coming(bodies), await one.missing_keys(sound.keys, failures), await one.offsets())


async def found_by_store(root: Path, failures: list[str]) -> Found:
    """Start store and timer alone, and read all queues. Raises StoreError: the start is refused."""
    one = Timed(root, clock=StandingClock(NOW_MS + LATER_MS), golden=settings())
    try:
        one.timer.load()
        one.store.open()
        try:
            one.timer.recover()
            one.timer.start()
            await one.pass_ms(60_000)
            bodies = dict(_read_all(one.store, failures))
        finally:
            one.timer.stop()
            one.store.close()
    finally:
        one.long_polling.close()
    return Found(bodies, _coming(bodies))


def _coming(bodies: dict[Key, bytes]) -> Counter[Coming]:
    return Counter((topic.startswith(RETRY_PREFIX), body) for (topic, _, _), body in bodies.items())


def _read_all(store: MessageStore, failures: list[str]) -> list[tuple[Key, bytes]]:
    found = []
    for topic, queue_id in list(store.queue_ends()):
        offset, end = store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)
        while offset < end:
            result = store.get(topic, queue_id, offset, count_max=32)
            for raw in result.records:
                records = records_of(bytes(raw), f"a read of {topic}-{queue_id}", failures)
                own = [one for one in records if check(one, topic, queue_id, failures) and topic not in _SYSTEM]
                found += [((topic, queue_id, one.queue_offset), one.body) for one in own]
            if result.next_begin_offset <= offset:
                failures.append(f"{topic}-{queue_id}: a reader does not come on from {offset} of {end}")
                break
            offset = result.next_begin_offset
    return found
