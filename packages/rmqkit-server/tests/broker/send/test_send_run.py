"""Many sends in one read: the same as one by one (behaviour.md §3.1, remoting.md §4.3.1)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import re
import time

import msgspec
import pytest

from rmqkit.broker.durability import Durability, Outcome
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.core import CORE
from rmqkit.metrics import ExporterType
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, FrameSplitter, decode_command, decode_fields, encode_command, header_fields
from rmqkit.protocol.core import CoreFault
from rmqkit.protocol.ids import decode_offset_id
from rmqkit.protocol.message import read_messages
from rmqkit.protocol.names import TIMER_TOPIC, lite_queue
from rmqkit.protocol.record import BatchEntry, decode_record, encode_batch, has_sound_crc
from rmqkit.protocol.schemas.pull import PullFlag
from rmqkit.protocol.schemas.send import SendMessageV2Request
from rmqkit.remoting import connection
from rmqkit.store.message_store import StoredSends
from rmqkit.store.put import Appender
from rmqkit.store.settings import FlushDiskType
from rmqkit.system import threads
from tests.broker.cluster import Cluster
from tests.broker.lite.lite_peer import PARENT, LitePeer, make_group, make_parent
from tests.broker.pops import context_of
from tests.store.stores import read_all
from tests.virtual_time import run as run_virtual
from tests.waiting import SECONDS

pytestmark = pytest.mark.virtual_time


def frame(number, properties=None, body=b"hello", code=RequestCode.SEND_MESSAGE_V2, one_way=False, **fields):
    """A send whose opaque is its number."""
    if properties is None:
        properties = f"UNIQ_KEY\x01K{number}\x02WAIT\x01true\x02TAGS\x01t{number % 2}\x02"
    sent = SendMessageV2Request("p", "T", "TBW102", 4, number % 2, 0, 1_700_000_000_000 + number, 0, properties)
    command = Command(code, number, 2 if one_way else 0, header_fields(msgspec.structs.replace(sent, **fields)), body)
    return b"".join(encode_command(command))


@pytest.fixture(autouse=True, params=["compiled core", "plain Python"])
def core(request, monkeypatch):
    """All of this holds with the compiled core and without."""
    if request.param == "plain Python":
        monkeypatch.setattr(CORE, "fault", request.param)
    elif CORE.fault:
        pytest.skip(CORE.fault)
    return request.param


class Peer:
    """A connection on which reads are what was written at once."""

    def __init__(self, reader, writer):
        self.reader, self.writer, self.splitter = reader, writer, FrameSplitter()

    @classmethod
    async def of(cls, cluster):
        host, _, port = cluster.standalone.broker_address.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def ask(self, *frames):
        """The answers to some requests written at once, by opaque."""
        self.writer.write(b"".join(frames))
        answers = {}
        async with asyncio.timeout(SECONDS):
            while len(answers) < len(frames):
                for each in self.splitter.feed(await self.reader.read(1 << 16)):
                    answer = decode_command(each)
                    answers[answer.opaque] = answer
        return answers


@contextlib.asynccontextmanager
async def warm(cluster):
    """A connection, with the topic and its queues known to the broker."""
    peer = await Peer.of(cluster)
    try:
        for number in range(4):
            answers = await peer.ask(frame(number))
            assert answers[number].code == 0
        yield peer
    finally:
        peer.writer.close()
        with contextlib.suppress(ConnectionResetError):
            await peer.writer.wait_closed()


@pytest.fixture
def runs(monkeypatch):
    """Return the list of message counts of the runs that were put. A refused run has a negative count."""
    seen = []

    def noted(real):
        def put(appender, messages, *hosts):
            stored = real(appender, messages, *hosts)
            seen.append(len(messages) if stored is not None else -len(messages))
            return stored

        return put

    for name in ("put_run", "put_sends"):
        monkeypatch.setattr(Appender, name, noted(getattr(Appender, name)))
    return seen


@pytest.fixture
def one_by_one(monkeypatch):
    """Has brokers that start from now on read no plain sends together: each goes through all checks alone."""

    def without(*arguments, sends=None, **others):
        return FrameSplitter(*arguments, **others)

    return lambda: monkeypatch.setattr(connection, "FrameSplitter", without)


def told(answer):
    fields = decode_fields(answer)
    remark = answer.remark and answer.remark.partition("Producer:")[0]
    return answer.code, remark, {name: value for name, value in fields.items() if name != "msgId"}


async def stored(cluster):
    messages = []
    for queue_id in (0, 1):
        messages += read_messages((await cluster.pull(queue_id=queue_id)).body)
    return [(m.queue_id, m.queue_offset, m.body, m.properties, m.born_timestamp, m.flag) for m in messages]


LATER_MS = (int(time.time()) + 10_000) * 1000
ODD = {
    "batch": {"code": RequestCode.SEND_BATCH_MESSAGE, "body": b"no batch", "batch": True},
    "no body": {"body": b""},
    "no key": {"properties": "TAGS\x01t\x02"},
    "delayed": {"properties": "UNIQ_KEY\x01D\x02DELAY\x013\x02"},
    "timed": {"properties": f"UNIQ_KEY\x01D\x02TIMER_DELIVER_MS\x01{LATER_MS}\x02"},
    "queue after the last": {"queue_id": 4},
    "any queue": {"queue_id": -1},
    "flag": {"flag": 7},
    "other topic": {"topic": "U"},
    "illegal topic": {"topic": "a b"},
    "long properties": {"properties": f"UNIQ_KEY\x01L\x02a\x01{'x' * 600}\x02"},
    "large": {"body": bytes(5000)},
}


@pytest.mark.parametrize("odd", ODD)
def test_sends_of_one_read_are_answered_and_stored_as_one_by_one(tmp_path, runs, one_by_one, odd):
    frames = [frame(number, **(ODD[odd] if number == 7 else {})) for number in range(4, 12)]

    async def outcome(name, reads):
        small = Cluster(tmp_path / name, store={"message_bytes_max": 4999})
        async with small as cluster, warm(cluster) as peer:
            runs.clear()
            answered = {}
            for requests in reads:
                answered |= await peer.ask(*requests)
            if odd == "no key":
                answered.pop(7)  # the broker makes one
            return {opaque: told(answer) for opaque, answer in answered.items()}, await stored(cluster), [*runs]

    *together, run_sizes = run_virtual(outcome("together", [frames]))
    one_by_one()
    *single, single_sizes = run_virtual(outcome("single", [[one] for one in frames]))
    assert single_sizes == []
    is_no_run = odd in ("large", "timed", "queue after the last", "other topic", "illegal topic")  # each is put alone
    assert max(run_sizes) >= 3 or is_no_run, "some were stored together"
    if odd == "any queue":
        return  # the broker takes one at random
    if odd == "no key":
        for messages in (together[1], single[1]):
            messages[:] = [(*one[:3], one[3] | {"UNIQ_KEY": ""}, *one[4:]) for one in messages]
    assert together == single


TIMED = [
    f"TIMER_DELIVER_MS\x01{LATER_MS}\x02",
    f"TIMER_DELIVER_MS\x01{LATER_MS + 1}\x02TAGS\x01t\x02",
    f"TIMER_DELIVER_MS\x01{LATER_MS + 999}\x02WAIT\x01false\x02a%b\x01%\x02TIMER_ROLL_TIMES\x017\x02",
]
TIMED_ODD = [
    "TIMER_DELIVER_MS\x011\x02",
    "TIMER_DELIVER_MS\x01-5\x02",
    f"TIMER_DELIVER_MS\x01{LATER_MS * 2}\x02",
    f"TIMER_DELIVER_MS\x01{LATER_MS}\x02TIMER_DEL_UNIQKEY\x01K1\x02",
    f"TIMER_DELIVER_MS\x01{LATER_MS}\x02TIMER_OUT_MS\x015\x02",
    f"TIMER_DELIVER_MS\x01{LATER_MS}\x02REAL_TOPIC\x01X\x02",
    f"TIMER_DELIVER_MS\x01{LATER_MS}\x02DELAY\x013\x02",
]


@pytest.mark.parametrize("flush", FlushDiskType)
def test_timed_sends_of_one_read_are_kept_as_one_by_one(tmp_path, runs, one_by_one, flush):
    def timed(number, properties):
        return frame(number, f"UNIQ_KEY\x01K{number}\x02{properties}")

    frames = [timed(number, one) for number, one in enumerate([*TIMED, *TIMED_ODD, *TIMED], 10)] + [frame(30)]
    timers_own = frame(32, f"UNIQ_KEY\x01K32\x02{TIMED[0]}", topic=TIMER_TOPIC)

    async def outcome(name, reads):
        async with Cluster(tmp_path / name, store={"flush_disk_type": flush}) as cluster, warm(cluster) as peer:
            await peer.ask(
                *(timed(number, one) for number, one in enumerate(TIMED * 40, 100))
            )  # the shapes are learned
            runs.clear()
            answers = {}
            for requests in reads:
                answers |= await peer.ask(*requests)
            store = cluster.standalone.broker.context.store
            kept = [(one.body, one.properties, one.sys_flag) for one in read_all(store, TIMER_TOPIC)]
            return {opaque: told(answer) for opaque, answer in answers.items()}, kept, await stored(cluster), [*runs]

    *together, run_sizes = run_virtual(outcome("together", [frames, [timers_own]]))
    one_by_one()
    *single, single_sizes = run_virtual(outcome("single", [[one] for one in [*frames, timers_own]]))
    assert single_sizes == []
    # Under SYNC_FLUSH one that asks not to wait has its run put one by one.
    assert max(run_sizes) >= (2 if flush is FlushDiskType.ASYNC_FLUSH else 1), "those in a row were stored together"
    assert together == single


def lite(number, name, more="", queue_id=0, topic=PARENT, **fields):
    """A send to a lite topic."""
    properties = f"UNIQ_KEY\x01K{number}\x02WAIT\x01true\x02TAGS\x01t{number % 2}\x02__LITE_TOPIC\x01{name}\x02{more}"
    return frame(number, properties, topic=topic, queue_id=queue_id, **fields)


def lite_outcome(cluster, answers):
    """Return the answers, and the messages of all queues and lite topics, with all that is stored of them."""
    context = cluster.standalone.broker.context
    store = context.store
    table = store.lite.table
    names = {name: lite_queue(parent.name, name) for parent in table.parents.values() for name in parent.slots}
    places = [(light, 0) for light in names.values()] + [(PARENT, at) for at in range(4)] + [("T", 0), ("T", 1)]
    kept = {
        place: [
            (one.topic, one.queue_offset, one.body, one.properties.partition(b"__CRC32#")[0], one.physical_offset)
            for one in read_all(store, *place)
        ]
        for place in places
    }
    lives = {name: (table.epochs[slot], table.nexts[slot], table.ends[slot]) for _, name, slot in rows(table)}
    said = {opaque: told(answer) for opaque, answer in sorted(answers.items())}
    keys = [len(store.query(PARENT, f"K{at}", 9, 0, 1 << 62).physical_offsets) for at in range(100, 130)]
    return said, kept, lives, keys, [*counted(context)]


def rows(table):
    return [(parent.name, name, slot) for parent in table.parents.values() for name, slot in parent.slots.items()]


LITE_ODD = {
    "none": {},
    "illegal name": {"name": "a b"},
    "long name": {"name": "n" * 65},
    "delayed": {"more": "DELAY\x013\x02"},
    "timed": {"more": f"TIMER_DELIVER_MS\x01{LATER_MS}\x02"},
    "with priority": {"more": "_SYS_MSG_PRIORITY_\x013\x02"},
    "dispatched": {"more": f"INNER_MULTI_DISPATCH\x01%LMQ%${PARENT}$z\x02"},
    "numbered": {"more": "INNER_MULTI_QUEUE_OFFSET\x0177\x02"},
    "with a life": {"more": "__LITE_EPOCH\x017\x02"},
    "in another topic": {"topic": "T"},
    "long": {"more": f"a\x01{'x' * 330}\x02"},
}


@pytest.mark.parametrize("flush", FlushDiskType)
def test_sends_to_lite_topics_are_answered_stored_and_counted_as_one_by_one(tmp_path, runs, one_by_one, flush):
    def sends(start, odd):
        mixed = [lite(at, "abcaab"[at % 6], queue_id=at % 2) for at in range(start, start + 6)]
        mixed += [frame(start + 6), lite(start + 7, **{"name": "a", **odd}), frame(start + 8)]
        return [*mixed, *[lite(at, f"new{at}") for at in range(start + 9, start + 12)], lite(start + 12, "a")]

    reads = [sends(100 + 20 * at, odd) for at, odd in enumerate(LITE_ODD.values())]

    async def outcome(name, split):
        settings = {"exporter_type": ExporterType.PROM, "exporter_port": 0}
        store = {"flush_disk_type": flush}
        async with Cluster(tmp_path / name, broker=settings, store=store) as cluster, warm(cluster) as peer:
            await make_parent(cluster, PARENT)
            for queue_id in range(4):
                await peer.ask(frame(50 + queue_id, topic=PARENT, queue_id=queue_id))
            lite = cluster.standalone.broker.context.store.lite
            runs.clear()
            answers = {}
            for at, read in enumerate(reads):
                if at in (3, 4):  # the next message begins a life of the lite topic
                    lite.remove(lite.table.find(PARENT, "a"))
                for requests in split(read):
                    answers |= await peer.ask(*requests)
            return *lite_outcome(cluster, answers), [*runs]

    *together, run_sizes = run_virtual(outcome("together", lambda read: [read]))
    one_by_one()
    *single, single_sizes = run_virtual(outcome("single", lambda read: [[one] for one in read]))
    assert single_sizes == []
    assert run_sizes.count(13) == 1 and run_sizes.count(7) >= 6, "most were stored together"
    assert together == single


@pytest.mark.parametrize("seed", range(2))
def test_any_mix_of_sends_to_lite_topics_is_stored_as_one_by_one(tmp_path, runs, one_by_one, seed):
    choose = random.Random(seed)

    def one(number):
        kind = choose.random()
        if kind < 0.2:
            return frame(number)
        if kind < 0.3:
            return frame(number, f"UNIQ_KEY\x01K{number}\x02TIMER_DELIVER_MS\x01{LATER_MS}\x02")
        more = choose.choice(["", "", "", "a\x01b\x02", "KEYS\x01x y\x02", "__SHARDINGKEY\x01s\x02", "DELAY\x011\x02"])
        name = choose.choice(["a", "b", "c", f"n{choose.randrange(40)}", "größe"])
        return lite(number, name, more, queue_id=choose.randrange(2))

    reads = [[one(100 + 20 * at + each) for each in range(choose.randrange(1, 19))] for at in range(12)]

    async def outcome(name, reads):
        settings = {"exporter_type": ExporterType.PROM, "exporter_port": 0}
        store = {"lite_topic_count_max": 20, "append_property_crc": bool(seed)}
        async with Cluster(tmp_path / name, broker=settings, store=store) as cluster, warm(cluster) as peer:
            await make_parent(cluster, PARENT)
            for queue_id in range(4):
                await peer.ask(frame(50 + queue_id, topic=PARENT, queue_id=queue_id))
            runs.clear()
            answers = {}
            for requests in reads:
                answers |= await peer.ask(*requests)
            return *lite_outcome(cluster, answers), [*runs]

    *together, run_sizes = run_virtual(outcome("together", reads))
    one_by_one()
    *single, _ = run_virtual(outcome("single", [[each] for read in reads for each in read]))
    assert max(run_sizes) >= 3, "some were stored together"
    assert any(answer[0] != 0 for answer in single[0].values()), "the limit of lite topics was reached"
    assert together == single


def test_a_run_wakes_the_readers_of_its_lite_topics(tmp_path, runs):
    async def main():
        async with Cluster(tmp_path) as cluster, warm(cluster) as peer:
            await make_parent(cluster, PARENT)
            await make_group(cluster, "LG", PARENT)
            await peer.ask(frame(50, topic=PARENT, queue_id=0))
            consumer = LitePeer(cluster)
            await consumer.subscribe("a", "b")
            waiting = asyncio.create_task(consumer.pop(wait_ms=15_000))
            await asyncio.sleep(1)
            runs.clear()
            await peer.ask(lite(10, "a"), lite(12, "other"), lite(14, "a"))
            assert [(one.lite, one.number) for one in await waiting] == [("a", 0), ("a", 1)]
            assert runs == [3]

    run_virtual(main())


async def test_a_run_that_cannot_be_written_leaves_no_lite_topics_and_uses_no_numbers(runs, monkeypatch, cluster):
    async with warm(cluster) as peer:
        await make_parent(cluster, PARENT)
        await peer.ask(frame(50, topic=PARENT, queue_id=0))
        await peer.ask(lite(10, "a"))
        store = context_of(cluster).store
        table = store.lite.table

        def fail(data, now_ms):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(store.log, "append", fail)
        answers = await peer.ask(lite(11, "a"), lite(12, "b"), lite(13, "c"))
        assert {one.code for one in answers.values()} == {ResponseCode.SERVICE_NOT_AVAILABLE}
        assert (len(table), table.find(PARENT, "b")) == (1, None)
        monkeypatch.undo()
        answers = await peer.ask(lite(11, "a"), lite(12, "b"), lite(13, "a"))
        assert [decode_fields(answers[at])["liteOffset"] for at in (11, 12, 13)] == ["1", "0", "2"]


def batch(number, properties=None, count=3, **fields):
    """A batch to a queue; its members have the keys of sends."""
    own = [f"UNIQ_KEY\x01M{number}{at}\x02TAGS\x01t{at}\x02".encode() for at in range(count)]
    body = encode_batch([BatchEntry(b"m" * at, one, at) for at, one in enumerate(own)])
    return frame(number, properties, body, RequestCode.SEND_BATCH_MESSAGE, batch=True, **fields)


def lite_batch(number, names=("a", "a", "a"), more="", count=1, **fields):
    """A batch to lite topics, with ``count`` messages for each name; None is no lite topic."""
    texts = [f"UNIQ_KEY\x01K{number}{at}\x02TAGS\x01t{at}\x02" for at in range(len(names) * count)]
    lites = ["" if name is None else f"__LITE_TOPIC\x01{name}\x02" for name in names] * count
    entries = [
        BatchEntry(b"m" * (at % 50), (text + one + more * (at == 1)).encode(), at)
        for at, (text, one) in enumerate(zip(texts, lites, strict=True))
    ]
    given = {"topic": PARENT, "queue_id": 0, **fields}
    return frame(number, body=encode_batch(entries), code=RequestCode.SEND_BATCH_MESSAGE, batch=True, **given)


LITE_BATCHES = {
    "in one lite topic": {},
    "in a new one": {"names": ("new",) * 4},
    "of one": {"names": ("a",)},
    "in several": {"names": ("a", "b")},
    "half in none": {"names": ("a", None)},
    "in none": {"names": (None, None)},
    "illegal name": {"names": ("a b", "a b")},
    "some illegal": {"names": ("a", "a b")},
    "in another topic": {"topic": "T"},
    "in another queue": {"queue_id": 3},
    "queue after the last": {"queue_id": 4},
    "delayed": {"more": "DELAY\x013\x02"},
    "timed": {"more": f"TIMER_DELIVER_MS\x01{LATER_MS}\x02"},
    "with priority": {"more": "_SYS_MSG_PRIORITY_\x013\x02"},
    "dispatched": {"more": f"INNER_MULTI_DISPATCH\x01%LMQ%${PARENT}$z\x02"},
    "numbered": {"more": "INNER_MULTI_QUEUE_OFFSET\x0177\x02"},
    "with a life": {"more": "__LITE_EPOCH\x017\x02"},
    "with keys": {"more": "KEYS\x01x y\x02größe\x01é\x02"},
    "long": {"more": f"a\x01{'x' * 400}\x02"},
    "retried": {"reconsume_times": 3, "flag": 5},
    "many": {"count": 150},
    "too many": {"count": 683},
    "that wait not": {"properties": "UNIQ_KEY\x01B\x02WAIT\x01false\x02"},
}


@pytest.mark.parametrize("flush", FlushDiskType)
def test_batches_in_lite_topics_are_answered_stored_and_counted_as_one_by_one(tmp_path, runs, one_by_one, flush):
    kinds = list(LITE_BATCHES.values())
    reads = [
        [
            lite_batch(20 * at + 101),
            lite(20 * at + 102, "a"),
            lite_batch(20 * at + 103, **kind),
            lite(20 * at + 104, "b"),
        ]
        for at, kind in enumerate(kinds)
    ]

    async def outcome(name, split):
        settings = {"exporter_type": ExporterType.PROM, "exporter_port": 0}
        store = {"flush_disk_type": flush, "commit_log_file_bytes": 1 << 21, "message_bytes_max": 1_500_000}
        async with Cluster(tmp_path / name, broker=settings, store=store) as cluster, warm(cluster) as peer:
            await make_parent(cluster, PARENT)
            for queue_id in range(4):
                await peer.ask(frame(50 + queue_id, topic=PARENT, queue_id=queue_id))
            lite_queues = context_of(cluster).store.lite
            runs.clear()
            answers = {}
            for at, read in enumerate(reads):
                if at in (3, 4):  # the next message begins a life of the lite topic
                    lite_queues.remove(lite_queues.table.find(PARENT, "a"))
                for requests in split(read):
                    answers |= await peer.ask(*requests)
            return *lite_outcome(cluster, answers), [*found(context_of(cluster).store, answers)], [*runs]

    *together, run_sizes = run_virtual(outcome("together", lambda read: [read]))
    one_by_one()
    *single, single_sizes = run_virtual(outcome("single", lambda read: [[one] for one in read]))
    assert single_sizes == []
    assert run_sizes.count(3) >= len(kinds), "batches in lite topics were stored together"
    assert (run_sizes.count(450), run_sizes.count(4)) == (1, 1)
    codes = [answer[0] for answer in single[0].values()]
    assert codes.count(ResponseCode.MESSAGE_ILLEGAL) == 7, "several names, bad names and other types are refused"
    assert together == single


@pytest.mark.parametrize("seed", range(2))
def test_any_mix_of_batches_to_lite_topics_is_stored_as_one_by_one(tmp_path, runs, one_by_one, seed):
    choose = random.Random(seed)

    def one(number):
        if choose.random() < 0.4:
            return lite(number, choose.choice("abc"))
        name, more = choose.choice(["a", "b", f"n{choose.randrange(9)}"]), choose.choice(["", "", "KEYS\x01x\x02"])
        names = (name,) * choose.randrange(1, 9) if choose.random() < 0.8 else ("a", choose.choice(["b", None]))
        return lite_batch(number, names, more, queue_id=choose.randrange(2))

    reads = [[one(100 + 20 * at + each) for each in range(choose.randrange(1, 9))] for at in range(12)]

    async def outcome(name, reads):
        settings = {"exporter_type": ExporterType.PROM, "exporter_port": 0}
        store = {"lite_topic_count_max": 8, "append_property_crc": bool(seed)}
        async with Cluster(tmp_path / name, broker=settings, store=store) as cluster, warm(cluster) as peer:
            await make_parent(cluster, PARENT)
            for queue_id in range(4):
                await peer.ask(frame(50 + queue_id, topic=PARENT, queue_id=queue_id))
            runs.clear()
            answers = {}
            for requests in reads:
                answers |= await peer.ask(*requests)
            return *lite_outcome(cluster, answers), [*runs]

    *together, run_sizes = run_virtual(outcome("together", reads))
    one_by_one()
    *single, _ = run_virtual(outcome("single", [[each] for read in reads for each in read]))
    assert max(run_sizes) >= 3, "some were stored together"
    assert together == single


def test_a_batch_wakes_a_reader_of_its_lite_topic_once(tmp_path, runs):
    async def main():
        async with Cluster(tmp_path) as cluster, warm(cluster) as peer:
            await make_parent(cluster, PARENT)
            await make_group(cluster, "LG", PARENT)
            await peer.ask(frame(50, topic=PARENT, queue_id=0))
            consumer = LitePeer(cluster)
            await consumer.subscribe("a", "b")
            waiting = asyncio.create_task(consumer.pop(wait_ms=15_000))
            await asyncio.sleep(1)
            runs.clear()
            answers = await peer.ask(lite_batch(10, ("other",) * 2), lite_batch(11))
            assert [(one.lite, one.number) for one in await waiting] == [("a", 0), ("a", 1), ("a", 2)]
            assert runs == [2, 3]
            fields = decode_fields(answers[11])
            assert (fields["liteOffset"], fields["liteEpoch"]) == ("0", "1")

    run_virtual(main())


def test_a_run_answers_the_pulls_of_its_light_queues_and_no_others(tmp_path, runs):
    async def main():
        async with Cluster(tmp_path) as cluster, warm(cluster) as peer:
            await make_parent(cluster, PARENT)
            await peer.ask(frame(50, topic=PARENT, queue_id=0))
            await peer.ask(lite(51, "a"), lite(52, "b"), lite(53, "c"))
            flags = PullFlag.SUBSCRIPTION | PullFlag.SUSPEND
            places = [*[(lite_queue(PARENT, name), 1) for name in "abc"], (PARENT, 4)]
            for _ in range(2):  # the second time after an answer to each pull
                waiting = {
                    topic: asyncio.create_task(cluster.pull(offset, topic, flags=flags)) for topic, offset in places
                }
                await asyncio.sleep(1)
                runs.clear()
                await peer.ask(lite_batch(60, ("a",) * 2), lite(62, "b"))
                await asyncio.sleep(1)
                found = {topic: read_messages(one.result().body) for topic, one in waiting.items() if one.done()}
                assert {topic: len(several) for topic, several in found.items()} == {
                    lite_queue(PARENT, "a"): 2,
                    lite_queue(PARENT, "b"): 1,
                    PARENT: 2,
                }
                assert runs == [2, 1]
                await peer.ask(lite(63, "c"))
                assert len(read_messages((await waiting[lite_queue(PARENT, "c")]).body)) == 1
                places = [(lite_queue(PARENT, "a"), 3), (lite_queue(PARENT, "b"), 2)]
                places += [(lite_queue(PARENT, "c"), 2), (PARENT, 8)]

    run_virtual(main())


BATCHES = {
    "plain": {},
    "of one": {"count": 1},
    "in order": {"properties": "UNIQ_KEY\x01B\x02__SHARDINGKEY\x01s\x02"},
    "that waits not": {"properties": "UNIQ_KEY\x01B\x02WAIT\x01false\x02"},
    "without a key": {"properties": "WAIT\x01true\x02"},
    "delayed": {"properties": "UNIQ_KEY\x01B\x02DELAY\x013\x02"},
    "of a transaction": {"properties": "UNIQ_KEY\x01B\x02TRAN_MSG\x01true\x02", "sys_flag": 4},
    "large": {"count": 150},
    "many": {"count": 2049},
    "queue after the last": {"queue_id": 4},
    "retried": {"topic": "%RETRY%g"},
}


@pytest.mark.parametrize("flush", FlushDiskType)
@pytest.mark.parametrize("kind", BATCHES)
def test_batches_are_answered_stored_and_counted_as_one_by_one(tmp_path, runs, one_by_one, kind, flush):
    frames = [frame(4), batch(5, **BATCHES[kind]), batch(6), frame(7), frame(8), batch(9, topic="U"), batch(10)]
    settings = {"exporter_type": ExporterType.PROM, "exporter_port": 0}

    async def outcome(name, reads):
        store = {"flush_disk_type": flush, "message_bytes_max": 200_000 if kind == "many" else 9_999}
        async with Cluster(tmp_path / name, broker=settings, store=store) as cluster, warm(cluster) as peer:
            runs.clear()
            answers = {}
            for requests in reads:
                answers |= await peer.ask(*requests)
            said = {opaque: told(answer) for opaque, answer in answers.items()}
            context = cluster.standalone.broker.context
            return said, await stored(cluster), [*found(context.store, answers)], [*counted(context)], [*runs]

    *together, run_sizes = run_virtual(outcome("together", [frames]))
    one_by_one()
    *single, single_sizes = run_virtual(outcome("single", [[one] for one in frames]))
    assert single_sizes == []
    assert run_sizes.count(3) >= 2, "batches were stored together"
    assert together == single


def found(store, answers):
    """Yield the records that the message ids of the answers name, and the number of messages of some keys."""
    for _, answer in sorted(answers.items()):
        for one in decode_fields(answer).get("msgId", "").split(","):
            at = decode_offset_id(one)[-1] if one else -1
            record = decode_record(store.log.record_at(at)) if at >= 0 else None
            yield record and (record.topic, record.queue_offset, record.body, record.properties, record.sys_flag)
    for key in ("K4", "M60", "M91", "M100"):
        yield len(store.query("T", key, 9, 0, 1 << 62).physical_offsets)


def counted(context):
    """Yield the values of metrics and statistics."""
    counts, statistics = context.counts, context.statistics
    counts.fold()
    yield {key: (one.messages, one.bytes, one.sizes.counts) for key, one in counts.came.items()}
    yield {key: sum(one.counts) for key, one in counts.meter.gather().items()}
    yield statistics.put_count, statistics.put_bytes
    for name, key in (("TOPIC_PUT_NUMS", "T"), ("TOPIC_PUT_SIZE", "T"), ("TOPIC_PUT_NUMS", "U")):
        statistic = statistics.get(name, key)
        yield statistic and statistic.stats_day.sum


def test_records_of_one_read_end_with_their_checksum_as_single_ones_do(tmp_path, runs, one_by_one):
    keyed = "UNIQ_KEY\x01K{}\x02"
    frames = [
        *[frame(number, keyed.format(number) + "TAGS\x01t") for number in (4, 5)],
        frame(6, keyed.format(6) + "__CRC32#\x010000000000\x02"),
        *[frame(number) for number in (7, 8)],
        batch(9),
        frame(10, keyed.format(10) + f"TIMER_DELIVER_MS\x01{LATER_MS}\x02"),
    ]

    async def outcome(name, reads):
        async with Cluster(tmp_path / name, store={"append_property_crc": True}) as cluster, warm(cluster) as peer:
            runs.clear()
            answers = {}
            for requests in reads:
                answers |= await peer.ask(*requests)
            store = cluster.standalone.broker.context.store
            records = [
                one for topic, queue in (("T", 0), ("T", 1), (TIMER_TOPIC, 0)) for one in read_all(store, topic, queue)
            ]
            sound = [has_sound_crc(store.log.record_at(one.physical_offset)) for one in records]
            assert len(sound) == 13 and all(sound)
            said = {opaque: told(answer) for opaque, answer in answers.items()}
            return said, [(one.body, one.properties[:-20]) for one in records], [*runs]

    *together, run_sizes = run_virtual(outcome("together", [frames]))
    one_by_one()
    *single, _ = run_virtual(outcome("single", [[one] for one in frames]))
    assert max(run_sizes) >= 2, "some were stored together"
    assert together == single


async def test_a_run_that_cannot_be_put_fails_exactly_the_sends_that_fail(runs, monkeypatch, cluster):
    async with warm(cluster) as peer:
        store = context_of(cluster).store
        monkeypatch.setattr(store, "put_run", lambda messages: None)
        monkeypatch.setattr(store, "put_sends", lambda sends, *hosts: None)
        calls = itertools.count()
        real = store.put

        def put(message):
            if message.topic == "T" and next(calls) == 1:
                return real(msgspec.structs.replace(message, string=b"\0"))
            return real(message)

        monkeypatch.setattr(store, "put", put)
        answers = await peer.ask(*(frame(number) for number in range(4, 8)))
        assert [answers[number].code for number in range(4, 8)] == [0, ResponseCode.MESSAGE_ILLEGAL, 0, 0]


async def test_one_way_sends_are_stored_without_an_answer(cluster):
    async with warm(cluster) as peer:
        peer.writer.write(frame(4, one_way=True) + frame(6, one_way=True))
        answers = await peer.ask(frame(8))
        assert list(answers) == [8]
        assert decode_fields(answers[8])["queueOffset"] == "4"


NO_WAIT = "UNIQ_KEY\x01K9\x02WAIT\x01false\x02TAGS\x01t1\x02"


async def test_under_sync_flush_a_run_waits_for_the_disk_as_one(runs, monkeypatch, tmp_path):
    may_flush, fdatasync = threads.Event(), os.fdatasync
    may_flush.set()
    monkeypatch.setattr("rmqkit.system.disk.sync_data", lambda fd: may_flush.wait(60) and fdatasync(fd))

    async with (
        Cluster(tmp_path / "store", store={"flush_disk_type": FlushDiskType.SYNC_FLUSH}) as cluster,
        warm(cluster) as peer,
    ):
        runs.clear()
        may_flush.clear()
        waiting = asyncio.create_task(peer.ask(*(frame(number) for number in range(4, 12))))
        others = await Peer.of(cluster)
        at_once = await others.ask(frame(20, NO_WAIT))
        assert (at_once[20].code, waiting.done(), runs) == (0, False, [8])
        may_flush.set()
        answers = await waiting
        assert sorted(answers) == list(range(4, 12))
        assert {answer.code for answer in answers.values()} == {0}
        others.writer.close()
        await others.writer.wait_closed()


async def test_under_sync_flush_nothing_is_made_for_single_messages(runs, monkeypatch, tmp_path):
    """They wait for the disk as they were stored, and are dispatched as a run."""
    settings = {"flush_disk_type": FlushDiskType.SYNC_FLUSH, "message_index_enable": False}  # the twin's index looks
    async with Cluster(tmp_path / "store", store=settings) as cluster, warm(cluster) as peer:
        runs.clear()
        made = []
        monkeypatch.setattr(StoredSends, "made", property(lambda sends: made.append(len(sends)) or []))
        others = await Peer.of(cluster)
        answered = await asyncio.gather(
            peer.ask(*(frame(number) for number in range(4, 12))), others.ask(*(frame(number) for number in (20, 21)))
        )
        assert {answer.code for each in answered for answer in each.values()} == {0}
        assert sorted(runs) == [2, 8] and not made
        assert [len(await stored(cluster))] == [14]
        others.writer.close()
        await others.writer.wait_closed()


def test_under_sync_flush_sends_of_one_read_are_answered_as_one_by_one(tmp_path, runs, one_by_one):
    frames = [frame(number, NO_WAIT if number == 9 else None) for number in range(4, 12)]

    async def outcome(name, reads):
        async with (
            Cluster(tmp_path / name, store={"flush_disk_type": FlushDiskType.SYNC_FLUSH}) as cluster,
            warm(cluster) as peer,
        ):
            answered = {}
            for requests in reads:
                answered |= await peer.ask(*requests)
            return {opaque: told(answer) for opaque, answer in answered.items()}, await stored(cluster)

    together = run_virtual(outcome("together", [frames]))
    assert max(runs) == 1, "a run of which one waits not is put one by one"
    one_by_one()
    assert together == run_virtual(outcome("single", [[one] for one in frames]))


@pytest.mark.parametrize(
    ("outcome", "code", "remark"),
    [
        (Outcome.DURABLE, ResponseCode.SUCCESS, None),
        (Outcome.TIMED_OUT, ResponseCode.FLUSH_DISK_TIMEOUT, None),
        (Outcome.REPLICA_TIMED_OUT, ResponseCode.FLUSH_SLAVE_TIMEOUT, None),
        (Outcome.FAILED, ResponseCode.SYSTEM_ERROR, "the disk"),
    ],
)
def test_a_run_that_waited_is_answered_like_single_sends(
    tmp_path, runs, one_by_one, monkeypatch, outcome, code, remark
):
    async def answers_of(name, reads):
        async with (
            Cluster(tmp_path / name, store={"flush_disk_type": FlushDiskType.SYNC_FLUSH}) as cluster,
            warm(cluster) as peer,
        ):
            monkeypatch.setattr(Durability, "hold", lambda it, end, release, answers=1: release(outcome, remark or ""))
            answered = {}
            for requests in reads:
                answered |= await peer.ask(*requests)
            monkeypatch.undo()
            return {opaque: told(answer) for opaque, answer in answered.items()}

    frames = [frame(number) for number in range(4, 8)]
    together = run_virtual(answers_of("together", [frames]))
    one_by_one()
    assert together == run_virtual(answers_of("single", [[one] for one in frames]))
    assert {(one[0], one[1]) for one in together.values()} == {(code, remark)}


async def test_a_queue_that_its_topic_has_no_longer_takes_no_plain_sends(runs, cluster):
    async with warm(cluster) as peer:
        topics, runs[:] = context_of(cluster).topics, []
        config = topics.get("T")
        topics.put(msgspec.structs.replace(config, read_queue_nums=1, write_queue_nums=1))
        answers = await peer.ask(frame(4, queue_id=0), frame(5, queue_id=1))
        assert [answers[number].code for number in (4, 5)] == [ResponseCode.SUCCESS, ResponseCode.INVALID_PARAMETER]
        assert runs == [1], "the send to queue 0 is stored on the fast path"


async def test_runs_are_refused_while_too_many_answers_wait(runs, monkeypatch, tmp_path):
    async with (
        Cluster(tmp_path / "store", store={"flush_disk_type": FlushDiskType.SYNC_FLUSH}) as cluster,
        warm(cluster) as peer,
    ):
        runs.clear()
        monkeypatch.setattr(Durability, "is_full", True)
        answers = await peer.ask(*(frame(number) for number in range(4, 8)))
        assert ({one.code for one in answers.values()}, runs) == ({ResponseCode.SYSTEM_BUSY}, [])


async def test_a_fault_of_the_store_is_reported_to_every_sender(monkeypatch, caplog, cluster):
    def fail(messages, *hosts):
        raise ZeroDivisionError

    async with warm(cluster) as peer:
        monkeypatch.setattr(context_of(cluster).store, "put_run", fail)
        monkeypatch.setattr(context_of(cluster).store, "put_sends", fail)
        monkeypatch.setattr(context_of(cluster).store, "put", fail)
        answers = await peer.ask(*(frame(number) for number in range(4, 8)))
        assert {answer.code for answer in answers.values()} == {ResponseCode.SYSTEM_ERROR}
        assert "4 sends" in caplog.text


async def test_a_fault_of_the_core_closes_its_connection_and_no_other(core, monkeypatch, caplog, cluster):
    if core == "plain Python":
        return
    async with warm(cluster) as peer, warm(cluster) as other:
        monkeypatch.setattr(context_of(cluster).store, "put_sends", panic)
        peer.writer.write(frame(4))
        async with asyncio.timeout(SECONDS):
            with contextlib.suppress(ConnectionResetError):
                assert await peer.reader.read() == b""
        monkeypatch.undo()
        assert (await other.ask(frame(8)))[8].code == 0
        lines = [record.message for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
        assert len(lines) == 1
        assert re.fullmatch(r"closing connection of \S+: a fault of the compiled core: boom", lines[0])


def panic(*arguments):
    raise CoreFault("boom")


async def test_a_topic_that_cannot_be_made_is_reported_to_every_sender(monkeypatch, cluster):
    def fail(topics, *names, **fields):
        raise OSError(28, "No space left on device")

    async with warm(cluster) as peer:
        monkeypatch.setattr(TopicTable, "get", lambda topics, name: None)
        monkeypatch.setattr(TopicTable, "create_for_send", fail)
        answers = await peer.ask(*(frame(number) for number in range(4, 8)))
        assert {answer.code for answer in answers.values()} == {ResponseCode.SYSTEM_ERROR}
