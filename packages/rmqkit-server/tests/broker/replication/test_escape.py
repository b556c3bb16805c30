"""Messages that an acting master stores at other brokers: the sends, and the delivery and check-back that send them.

Source: behaviour.md §9.1 (7), §10.5.
"""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.broker.registration import Registration
from rmqkit.broker.replication.escape import EscapeBridge
from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.transaction.check_back import CheckBack
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.protocol.names import HALF_TOPIC, OP_HALF_TOPIC, SCHEDULE_TOPIC
from rmqkit.protocol.properties import decode_properties
from rmqkit.protocol.record import COMPRESSED, TRANSACTION_COMMIT
from rmqkit.store.settings import FlushDiskType
from tests.broker.cluster import Cluster
from tests.broker.delay.test_schedule import Delays, running
from tests.broker.half_messages import HalfMessages
from tests.store.stores import message, read_all
from tests.virtual_time import run as run_virtual
from tests.waiting import SECONDS, until

pytestmark = pytest.mark.virtual_time

STAMPS = {"CLUSTER": "DefaultCluster", "MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}


class Other(Cluster):
    """A name server and a second broker, at which the first broker stores messages."""

    def __init__(self, root, *, own_name="broker-0", **settings):
        super().__init__(root, **settings)
        self.own = BrokerSettings(broker_name=own_name)

    async def __aenter__(self):
        await super().__aenter__()
        self.own.namesrv_addr = self.standalone.namesrv_address
        registration = Registration(self.own, None, self.client, address="127.0.0.1:1", ha_address="127.0.0.1:2")
        self.escape = EscapeBridge(self.own, registration, self.client, SYSTEM_CLOCK)
        return self

    async def stored(self, topic="T", queue_id=0):
        """Return the records of a queue, each with its decoded properties."""
        records = read_all(self.standalone.broker.context.store, topic, queue_id)
        return [(record, decode_properties(record.properties)) for record in records]

    async def all_stored(self, topic="T"):
        return [found for queue_id in range(4) for found in await self.stored(topic, queue_id)]


@pytest.fixture
def other(tmp_path):
    def runner(scenario, **settings):
        async def main():
            async with asyncio.timeout(SECONDS), Other(tmp_path / "other", **settings) as opened:
                await scenario(opened)

        run_virtual(main())

    return runner


def delivered(body=b"hello", topic="T", **fields):
    """Return a due delayed message as the delivery puts it."""
    kept = {"DELAY": "3", "REAL_TOPIC": topic, "REAL_QID": "1", "UNIQ_KEY": "K", "KEYS": "k", "TAGS": "a", **STAMPS}
    return message(topic, 1, body, **(kept | fields))


def test_a_due_message_is_stored_by_the_other_broker_as_a_plain_one(other):
    async def scenario(cluster):
        assert (await cluster.send("T")).code == 0
        fields = {"flag": 9, "reconsume_times": 20, "WAIT": "false", "TRAN_MSG": "true"}
        sent = delivered(sys_flag=COMPRESSED | TRANSACTION_COMMIT, born_timestamp=1_650_000_000_000, **fields)
        assert await cluster.escape.put(sent)
        ((record, named),) = [found for found in await cluster.all_stored() if found[1].get("KEYS")]
        assert named == {"UNIQ_KEY": "K", "KEYS": "k", "TAGS": "a", **STAMPS}
        assert (record.body, record.flag, record.sys_flag) == (b"hello", 9, COMPRESSED)
        assert (record.born_timestamp, record.reconsume_times) == (1_650_000_000_000, 20)

    other(scenario)


def test_messages_go_round_the_queues_of_a_topic(other):
    async def scenario(cluster):
        await cluster.send("T")
        for _ in range(8):
            assert await cluster.escape.put(delivered())
        assert [len(await cluster.stored(queue_id=queue_id)) for queue_id in range(4)] == [3, 2, 2, 2]

    other(scenario)


def test_a_retried_message_is_taken_however_often_it_was_tried(other):
    async def scenario(cluster):
        await cluster.heartbeat("c", ("T", "*"), group="g")
        assert await cluster.escape.put(delivered(topic="%RETRY%g", reconsume_times=99))
        ((record, _),) = await cluster.stored("%RETRY%g")
        assert record.reconsume_times == 99

    other(scenario)


def test_a_half_message_is_a_half_message_there(other):
    async def scenario(cluster):
        await cluster.send("T")
        kept = {"REAL_TOPIC": "T", "REAL_QID": "3", "TRAN_MSG": "true", "PGROUP": "pg", "UNIQ_KEY": "K", "DELAY": "2"}
        half = message(HALF_TOPIC, 0, TRAN_PREPARED_QUEUE_OFFSET="7", TRANSACTION_CHECK_TIMES="4", **kept, **STAMPS)
        assert await cluster.escape.put(half)
        ((_, named),) = await cluster.stored(HALF_TOPIC)
        assert named.pop("REAL_QID") in "0123"
        expected = {name: value for name, value in kept.items() if name != "REAL_QID"}
        assert named == {**expected, "TRANSACTION_CHECK_TIMES": "4", "__transactionId__": "K", **STAMPS}
        assert not await cluster.stored(SCHEDULE_TOPIC, 1)  # its delay begins when it is committed

    other(scenario)


def test_a_half_message_without_a_destination_is_passed_over(other, caplog):
    async def scenario(cluster):
        assert await cluster.escape.put(message(HALF_TOPIC, 0, TRAN_MSG="true"))
        assert "does not name its topic" in caplog.text

    other(scenario)


def test_what_no_other_master_takes_is_reported_once_and_tried_again(other, caplog):
    async def scenario(cluster):
        for _ in range(2):
            assert not await cluster.escape.put(delivered(topic="Nowhere"))
        assert caplog.text.count("no other broker's master accepts messages for topic Nowhere") == 1
        await cluster.ask(18, {"topicConfigList": [{"topicName": "ReadOnly", "perm": 4}]})
        assert not await cluster.escape.put(delivered(topic="ReadOnly"))

    other(scenario)


def test_the_own_name_is_no_other_broker(other):
    async def scenario(cluster):
        await cluster.send("T")
        assert not await cluster.escape.put(delivered())

    other(scenario, own_name="broker-a")


def test_an_answer_other_than_success_does_not_count(other):
    async def scenario(cluster):
        await cluster.send("T")
        assert await cluster.escape.put(delivered())
        cluster.standalone.broker.context.settings.accept_sends_from_ms = 1 << 60
        assert not await cluster.escape.put(delivered())
        cluster.standalone.broker.context.settings.accept_sends_from_ms = 0
        assert await cluster.escape.put(delivered())

    other(scenario)


class Elsewhere:
    """Other brokers that store every message except the bodies in ``refuses``."""

    def __init__(self):
        self.refuses = set()
        self.tried, self.taken = [], []
        self.gate = asyncio.Event()
        self.gate.set()

    async def put(self, sent):
        self.tried.append(sent.body)
        await self.gate.wait()
        if sent.body in self.refuses:
            return False
        self.taken.append(sent)
        return True

    @property
    def bodies(self):
        return [sent.body for sent in self.taken]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("rmqkit.broker.delay.levels._LOOK_MS_MAX", 5)
    monkeypatch.setattr("rmqkit.broker.delay.levels._PAUSE_MS_MIN", 0)
    monkeypatch.setattr("rmqkit.broker.delay.levels._RETRY_MS", 5)


def on_delays(root, scenario, **settings):
    async def main():
        async with running(root / "store", **settings) as delays:
            delays.schedule.stop()
            await scenario(delays, Elsewhere())
            await delays.schedule.stop_remote()

    run_virtual(main())


@pytest.mark.parametrize("flush", list(FlushDiskType))
def test_due_messages_are_put_elsewhere_and_nothing_into_the_log(tmp_path, quick, flush):
    async def scenario(delays: Delays, elsewhere):
        for number in range(80):
            delays.put(1, body=b"%d" % number, queue_id=number % 2)
        delays.put(2, body=b"later")
        await until(lambda: delays.store.max_offset(SCHEDULE_TOPIC, 1) == 1)
        end = delays.store.max_physical_offset
        delays.schedule.start(elsewhere.put)
        delays.clock.ms += 1000
        await until(lambda: delays.schedule.offsets().offset_table.get(1) == 80)
        assert sorted(elsewhere.bodies, key=int) == [b"%d" % number for number in range(80)]
        assert {(sent.topic, sent.queue_id) for sent in elsewhere.taken} == {("T", 0), ("T", 1)}
        assert delays.store.max_physical_offset == end
        delays.clock.ms += 4000
        await until(lambda: elsewhere.bodies[80:] == [b"later"])

    on_delays(tmp_path, scenario, flush_disk_type=flush, commit_log_file_bytes=1 << 16)


def test_what_is_refused_is_put_again_and_nothing_else_is(tmp_path, quick):
    async def scenario(delays, elsewhere):
        for body in (b"a", b"b", b"c"):
            delays.put(1, body=body)
        elsewhere.refuses = {b"b"}
        delays.schedule.start(elsewhere.put)
        delays.clock.ms += 1000
        await until(lambda: elsewhere.tried.count(b"b") > 2)
        assert delays.schedule.offsets().offset_table[1] == 1
        elsewhere.refuses = set()
        await until(lambda: delays.schedule.offsets().offset_table[1] == 3)
        assert sorted(elsewhere.bodies) == [b"a", b"b", b"c"]

    on_delays(tmp_path, scenario)


def test_a_stop_waits_for_what_is_on_its_way_and_counts_it(tmp_path, quick):
    async def scenario(delays, elsewhere):
        delays.put(1, body=b"a")
        elsewhere.gate.clear()
        delays.schedule.start(elsewhere.put)
        delays.clock.ms += 1000
        await until(lambda: elsewhere.tried)
        stopping = asyncio.create_task(delays.schedule.stop_remote())
        await asyncio.sleep(0)
        assert not stopping.done()
        elsewhere.gate.set()
        await stopping
        assert delays.schedule.offsets().offset_table[1] == 1

    on_delays(tmp_path, scenario)


def test_delivery_continues_in_the_own_log_where_it_ended_elsewhere(tmp_path, quick):
    async def scenario(delays, elsewhere):
        for body in (b"a", b"b"):
            delays.put(1, body=body)
        elsewhere.refuses = {b"b"}
        delays.schedule.start(elsewhere.put)
        delays.clock.ms += 1000
        await until(lambda: elsewhere.tried.count(b"b") > 1)
        await delays.schedule.stop_remote()
        delays.schedule.start()
        assert await delays.delivered(1) == [b"b"]
        delays.put(1, body=b"c")
        delays.clock.ms += 1000
        assert await delays.delivered(2) == [b"b", b"c"]

    on_delays(tmp_path, scenario)


def test_undecided_half_messages_are_moved_once_and_decided_ones_are_not(tmp_path):
    with HalfMessages(tmp_path / "store") as halves:
        producer = halves.producer()
        for body in (b"open", b"decided", b"given up"):
            halves.half(body, **({"TRANSACTION_CHECK_TIMES": "15"} if body == b"given up" else {}))
        halves.ops.add(0, 1)
        halves.ops.write()
        halves.clock.ms += 6001
        halves.half(b"young")
        elsewhere = Elsewhere()
        halves.check_back = CheckBack(halves, elsewhere.put)
        halves.round()
        assert elsewhere.bodies == [b"open", b"given up"]
        assert {sent.topic for sent in elsewhere.taken} == {HALF_TOPIC}
        halves.round(6001)
        assert elsewhere.bodies == [b"open", b"given up", b"young"]
        assert (halves.positions, producer.asked, halves.given_up) == ((4, 1), [], [])
        assert halves.store.max_offset(HALF_TOPIC, 0) == 4
        assert halves.store.max_offset(OP_HALF_TOPIC, 0) == 1


def test_a_half_message_that_cannot_be_moved_ends_the_round(tmp_path):
    with HalfMessages(tmp_path / "store") as halves:
        for body in (b"a", b"b"):
            halves.half(body)
        elsewhere = Elsewhere()
        elsewhere.refuses = {b"b"}
        halves.check_back = CheckBack(halves, elsewhere.put)
        halves.round(6001)
        assert (elsewhere.tried, halves.positions[0]) == ([b"a", b"b"], 1)
        elsewhere.refuses = set()
        halves.round()
        assert (elsewhere.bodies, halves.positions[0]) == ([b"a", b"b"], 2)
