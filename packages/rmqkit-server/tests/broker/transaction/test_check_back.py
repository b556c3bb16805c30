"""Check-back rounds on a clock that stands still (store.md §19.5, behaviour.md §9.1)."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.broker.durability import Outcome
from rmqkit.broker.messages import committed, to_half
from rmqkit.broker.transaction import check_back
from rmqkit.protocol.names import HALF_TOPIC, OP_HALF_TOPIC, TRANSACTION_GROUP
from rmqkit.protocol.properties import decode_properties
from rmqkit.store.settings import StoreSettings
from tests.broker.half_messages import HalfMessages
from tests.golden_stores import golden_manifest, unpack_golden
from tests.store.inside import appender_of
from tests.store.stores import HOST, golden_settings, message, opened, read_all
from tests.virtual_time import run as run_virtual

pytestmark = pytest.mark.virtual_time

OLD_ENOUGH = 6001
HOUR_MS = 3_600_000


@pytest.fixture
def halves(tmp_path):
    with HalfMessages(tmp_path / "store") as opened_halves:
        yield opened_halves


def times(record):
    return record.named.get("TRANSACTION_CHECK_TIMES")


def test_a_half_message_nobody_decided_is_asked_about_and_put_again(halves):
    producer = halves.producer()
    put = halves.half(flag=7, TAGS="a", WAIT="true")
    halves.clock.ms += 1000
    halves.half(b"later")
    halves.round(OLD_ENOUGH - 1000)

    first, later, again = halves.records()
    assert (again.queue_offset, again.named) == (2, {**first.named, "TRANSACTION_CHECK_TIMES": "1"})
    assert (again.body, again.flag, again.born_timestamp) == (first.body, 7, first.born_timestamp)
    assert times(later) is None
    ((header, asked),) = producer.asked
    assert (header.tran_state_table_offset, header.commit_log_offset) == (2, again.physical_offset)
    assert header.msg_id == header.transaction_id == "K-hello"
    assert (header.topic, header.bname) == (HALF_TOPIC, "broker-a")
    assert header.offset_msg_id == (HOST + again.physical_offset.to_bytes(8)).hex().upper()
    assert (asked.topic, asked.queue_id, asked.body, asked.flag) == ("T", 3, b"hello", 7)
    assert (asked.queue_offset, asked.physical_offset) == (2, again.physical_offset)
    assert asked.born_timestamp == first.born_timestamp
    assert decode_properties(asked.properties) == {**again.named, "WAIT": "false"}
    assert producer.commands[0].is_one_way
    assert halves.positions == (1, 0)
    assert put.queue_offset == 0


def test_a_question_has_the_bytes_of_a_5_4_0_broker(halves):
    """The record that one sent when it was asked the same, but for host, times and offsets."""
    producer = halves.producer()
    stamps = {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true", "CLUSTER": "InteropCluster"}
    sent = message("TX", 1, b"x", UNIQ_KEY="K", PGROUP="p", TRAN_MSG="true", born_timestamp=halves.clock.ms, **stamps)
    halves.store.put(to_half(sent))
    halves.round(OLD_ENOUGH)
    ((_, asked),) = producer.asked
    assert (asked.topic, asked.queue_id, asked.reconsume_times) == ("TX", 1, 0)
    assert asked.properties == (
        b"MSG_REGION\x01DefaultRegion\x02UNIQ_KEY\x01K\x02CLUSTER\x01InteropCluster\x02PGROUP\x01p\x02"
        b"__transactionId__\x01K\x02TRAN_MSG\x01true\x02WAIT\x01false\x02TRACE_ON\x01true\x02"
        b"TRANSACTION_CHECK_TIMES\x011\x02REAL_TOPIC\x01TX\x02REAL_QID\x011\x02"
    )


def test_a_young_half_message_ends_the_round(halves):
    producer = halves.producer()
    halves.half()
    halves.round(6000)
    assert (len(halves.records()), producer.commands, halves.positions) == (1, [], (0, 0))


def test_a_half_message_stored_since_the_round_began_waits_for_the_next(halves):
    producer = halves.producer()
    halves.half(born_timestamp=halves.clock.ms - HOUR_MS)
    for count in (1, 2):  # each round asks once, and puts a copy, which the same round does not look at
        halves.round()
        assert (len(producer.asked), len(halves.records())) == (count, count + 1)


def test_a_sender_whose_clock_is_ahead_is_asked_too(halves):
    producer = halves.producer()
    halves.half(born_timestamp=halves.clock.ms + HOUR_MS)
    halves.round(1)
    assert len(producer.asked) == 1


ASKED, AGAIN, GIVEN_UP, LEFT = "asked", "put again", "given up", "left"


def outcome(halves, age_ms, **properties):
    """Return what a round does with a half message of an age."""
    producer = halves.producer()
    halves.half(born_timestamp=halves.clock.ms - age_ms, **properties)
    halves.round(1)
    if halves.given_up:
        return GIVEN_UP
    if producer.asked:
        return ASKED
    return LEFT if len(halves.records()) == 1 else AGAIN


@pytest.mark.parametrize(
    ("age_ms", "properties", "expected"),
    [
        (5999, {}, LEFT),
        (6000, {}, ASKED),
        (-1, {}, LEFT),
        (-2, {}, ASKED),
        (19_999, {"CHECK_IMMUNITY_TIME_IN_SECONDS": 20}, AGAIN),
        (20_000, {"CHECK_IMMUNITY_TIME_IN_SECONDS": 20}, ASKED),
        (-20_001, {"CHECK_IMMUNITY_TIME_IN_SECONDS": 20}, AGAIN),
        (-20_002, {"CHECK_IMMUNITY_TIME_IN_SECONDS": 20}, ASKED),
        (0, {"CHECK_IMMUNITY_TIME_IN_SECONDS": 0}, ASKED),
        (-1, {"CHECK_IMMUNITY_TIME_IN_SECONDS": 0}, AGAIN),
        (2 * HOUR_MS - 1, {}, ASKED),
        (2 * HOUR_MS, {}, GIVEN_UP),
        (2 * HOUR_MS + 19_999, {"CHECK_IMMUNITY_TIME_IN_SECONDS": 20}, ASKED),
        (2 * HOUR_MS + 20_000, {"CHECK_IMMUNITY_TIME_IN_SECONDS": 20}, GIVEN_UP),
        (OLD_ENOUGH, {"TRANSACTION_CHECK_TIMES": 14}, ASKED),
        (OLD_ENOUGH, {"TRANSACTION_CHECK_TIMES": 15}, GIVEN_UP),
        (5999, {"TRANSACTION_CHECK_TIMES": 15}, LEFT),
    ],
)
def test_each_time_of_a_half_message_has_an_exact_bound(tmp_path, age_ms, properties, expected):
    """The clock goes on by 1 ms before the round, so that a round sees the age plus 1."""
    store = StoreSettings(commit_log_file_bytes=1 << 20, file_reserved_hours=2)
    settings = {"transaction_timeout_ms": 6000, "transaction_checks_max": 15}
    with HalfMessages(tmp_path / "store", store=store, **settings) as halves:
        assert outcome(halves, age_ms, **properties) == expected


@pytest.mark.parametrize(("counter", "next_counter"), [("0", "1"), ("7", "8"), ("-3", "1"), ("abc", "1")])
def test_a_question_raises_the_counter_by_one(halves, counter, next_counter):
    assert outcome(halves, OLD_ENOUGH, TRANSACTION_CHECK_TIMES=counter) == ASKED
    assert times(halves.records()[-1]) == next_counter


def test_decided_half_messages_are_passed_over(halves):
    producer = halves.producer()
    for number in range(5):
        halves.half(b"%d" % number)
    for offset in (0, 1, 3):
        halves.ops.add(0, offset)
    halves.ops.write()
    halves.round(OLD_ENOUGH)
    assert [asked.body for _, asked in producer.asked] == [b"2", b"4"]
    assert halves.positions == (5, 1)


def test_a_decision_that_is_not_written_yet_counts(halves):
    producer = halves.producer()
    halves.half()
    halves.ops.add(0, 0)
    halves.round(OLD_ENOUGH)
    assert (producer.commands, halves.positions) == ([], (1, 0))
    halves.ops.write()
    halves.round()
    assert halves.positions == (1, 1)


def test_the_op_position_stays_at_the_first_op_message_with_an_open_offset(halves):
    halves.producer()
    for number in range(4):
        halves.half(b"%d" % number, born_timestamp=halves.clock.ms + (0 if number < 2 else 5000))
    for offset in (1, 3, 0):
        halves.ops.add(0, offset)
        halves.ops.write()
    halves.round(OLD_ENOUGH)
    assert halves.positions == (2, 1)  # op message 1 is about half message 3, which is not passed yet
    halves.round(5000)
    assert halves.positions == (4, 3)


def test_op_messages_of_old_brokers_and_broken_ones_are_read(halves):
    producer = halves.producer()
    for number in range(3):
        halves.half(b"%d" % number)
    for body in (b"0", b"", b"x,", b"2"):
        halves.store.put(message(OP_HALF_TOPIC, 0, body, TAGS="d"))
    halves.round(OLD_ENOUGH)
    assert [asked.body for _, asked in producer.asked] == [b"1"]
    assert halves.positions == (3, 4)


def test_op_messages_are_read_until_the_half_message_is_found(halves):
    producer = halves.producer()
    for number in range(100):
        halves.half(b"%d" % number)
    for offset in reversed(range(100)):
        halves.ops.add(0, offset)
        halves.ops.write()
    halves.round(OLD_ENOUGH)
    assert (producer.commands, halves.positions) == ([], (100, 100))


def test_an_op_message_twice_stops_nothing(halves):
    halves.producer()
    halves.half()
    for _ in range(2):
        halves.ops.add(0, 0)
        halves.ops.write()
    halves.round(OLD_ENOUGH)
    assert halves.positions == (1, 2)


def test_each_round_asks_again_until_the_limit_and_then_gives_up(tmp_path):
    with HalfMessages(tmp_path / "store", transaction_checks_max=3) as halves:
        producer = halves.producer()
        halves.half(TAGS="a")
        for _ in range(3):
            halves.round(OLD_ENOUGH)
        assert [times(record) for record in halves.records()] == [None, "1", "2", "3"]
        assert len(producer.asked) == 3
        halves.round(1)
        (given_up,) = halves.given_up
        assert (given_up.body, given_up.named) == (b"hello", halves.records()[-1].named)
        assert (given_up.sys_flag, given_up.queue_id) == (0, 0)
        assert halves.topics.get("TRANS_CHECK_MAX_TIME_TOPIC").write_queue_nums == 1
        halves.round(OLD_ENOUGH)
        assert (len(halves.given_up), len(producer.asked), halves.positions) == (1, 3, (4, 0))


def test_half_messages_that_are_given_up_are_logged_in_a_line_for_each_group(tmp_path, caplog):
    with HalfMessages(tmp_path / "store", transaction_checks_max=0) as halves:
        for number in range(30):
            halves.half(b"%d" % number, group="sink" if number % 3 else "shop")
        halves.round(OLD_ENOUGH)
        assert len(halves.given_up) == 30
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "gave up 10 undecided half messages of producer group shop",
        "gave up 20 undecided half messages of producer group sink",
    ]


def test_a_half_message_older_than_the_store_keeps_files_is_given_up_at_once(tmp_path):
    store = StoreSettings(commit_log_file_bytes=1 << 20, file_reserved_hours=2)
    with HalfMessages(tmp_path / "store", store=store) as halves:
        producer = halves.producer()
        halves.half(b"old", born_timestamp=halves.clock.ms - 2 * HOUR_MS)
        halves.half(b"young", born_timestamp=halves.clock.ms - 2 * HOUR_MS + 10)
        halves.round(5)
        assert [record.body for record in halves.given_up] == [b"old"]
        assert [asked.body for _, asked in producer.asked] == [b"young"]


def test_giving_up_waits_until_the_op_messages_are_read(tmp_path):
    with HalfMessages(tmp_path / "store", transaction_checks_max=1) as halves:
        for number in range(40):
            halves.half(b"%d" % number, TRANSACTION_CHECK_TIMES=1)
        for offset in reversed(range(40)):
            halves.ops.add(0, offset)
            halves.ops.write()
        halves.round(OLD_ENOUGH)
        assert (halves.given_up, halves.positions) == ([], (40, 40))


def test_a_message_with_its_own_immunity_is_put_again_and_not_asked_about(halves):
    producer = halves.producer()
    halves.half(b"immune", CHECK_IMMUNITY_TIME_IN_SECONDS=20)
    halves.half(b"usual")
    halves.round(OLD_ENOUGH)
    assert [asked.body for _, asked in producer.asked] == [b"usual"]
    again = halves.records()[2]
    assert (again.body, times(again), again.named["TRAN_PREPARED_QUEUE_OFFSET"]) == (b"immune", None, "0")
    assert again.named["WAIT"] == "false"

    halves.round(OLD_ENOUGH)  # still immune: the copy of the copy names the same original
    again = halves.records()[4]
    assert (again.body, times(again), again.named["TRAN_PREPARED_QUEUE_OFFSET"]) == (b"immune", None, "0")

    halves.round(9000)
    assert [asked.body for _, asked in producer.asked][-2:] == [b"immune", b"usual"]
    assert times(halves.records()[-2]) == "1"


def test_copies_inside_the_immunity_do_not_count_as_checks(tmp_path):
    """The reference counts them, and rolls back without asking when the immunity is longer than all checks."""
    store = StoreSettings(commit_log_file_bytes=1 << 20, file_reserved_hours=1)
    with HalfMessages(tmp_path / "store", transaction_checks_max=3, store=store) as halves:
        producer = halves.producer()
        halves.half(CHECK_IMMUNITY_TIME_IN_SECONDS=2 * 3600)  # longer than the store keeps files, too
        for _ in range(10):
            halves.round(HOUR_MS // 6)
        assert (producer.asked, halves.given_up) == ([], [])
        halves.round(HOUR_MS // 3)
        assert (producer.asked, halves.given_up) == ([], [])  # the last millisecond of the immunity
        halves.round(1)
        assert len(producer.asked) == 1
        for _ in range(2):
            halves.round(OLD_ENOUGH)
        assert (len(producer.asked), halves.given_up) == (3, [])
        halves.round(OLD_ENOUGH)
        assert (len(producer.asked), len(halves.given_up)) == (3, 1)


@pytest.mark.parametrize("is_written", [True, False])
def test_a_copy_whose_original_was_decided_is_passed_over(halves, is_written):
    producer = halves.producer()
    halves.half(CHECK_IMMUNITY_TIME_IN_SECONDS=20)
    halves.round(OLD_ENOUGH)
    halves.ops.add(0, 0)  # the producer knows nothing of the copy
    if is_written:
        halves.ops.write()
    halves.round(OLD_ENOUGH)
    assert (len(halves.records()), producer.commands) == (2, [])
    halves.ops.write()
    halves.round(30_000)
    assert (len(halves.records()), producer.commands, halves.positions) == (2, [], (2, 1))


@pytest.mark.parametrize("seconds", ["abc", "-1"])
def test_an_immunity_that_is_no_number_is_the_usual_one(halves, seconds):
    producer = halves.producer()
    halves.half(CHECK_IMMUNITY_TIME_IN_SECONDS=seconds)
    halves.round(OLD_ENOUGH)
    assert len(producer.asked) == 1
    assert "TRAN_PREPARED_QUEUE_OFFSET" not in halves.records()[-1].named


def test_producers_of_the_group_are_asked_in_turn(halves):
    producers = [halves.producer() for _ in range(3)]
    stranger = halves.producer("other")
    for number in range(9):
        halves.half(b"%d" % number)
    halves.round(OLD_ENOUGH)
    assert [len(producer.commands) for producer in producers] == [3, 3, 3]
    assert stranger.commands == []


def test_a_producer_that_does_not_keep_up_is_left_out(halves):
    slow, quick = halves.producer(), halves.producer()
    slow.is_writable = False
    for number in range(4):
        halves.half(b"%d" % number)
    halves.round(OLD_ENOUGH)
    assert (len(slow.commands), len(quick.commands)) == (0, 4)


def test_without_a_producer_the_next_round_tries_again(halves):
    halves.half()
    halves.half(b"nobody's", group="")
    halves.round(OLD_ENOUGH)
    producer = halves.producer()
    halves.round(OLD_ENOUGH)
    ((_, asked),) = producer.asked
    assert decode_properties(asked.properties)["TRANSACTION_CHECK_TIMES"] == "2"


def test_a_half_message_that_cannot_grow_by_its_counter_is_given_up(halves):
    producer = halves.producer()
    halves.half(b"small")
    properties_bytes = len(halves.records()[0].properties)
    halves.half(big="x" * (32767 - properties_bytes - len("big..")))
    halves.half(b"next")
    halves.round(OLD_ENOUGH)
    assert [record.body for record in halves.given_up] == [b"hello"]
    assert [asked.body for _, asked in producer.asked] == [b"small", b"next"]


def test_a_store_that_takes_nothing_ends_the_round_and_loses_nothing(halves):
    producer = halves.producer()
    halves.half()
    appender_of(halves.store).refusal = "the disk is full"
    halves.round(OLD_ENOUGH)
    assert (halves.positions, producer.commands) == ((0, 0), [])
    appender_of(halves.store).refusal = ""
    halves.round()
    assert (halves.positions, len(producer.asked)) == ((1, 0), 1)


def test_a_half_message_that_cannot_be_given_up_stays(tmp_path):
    with HalfMessages(tmp_path / "store", transaction_checks_max=0) as halves:
        halves.half()
        appender_of(halves.store).refusal = "the disk is full"
        halves.round(OLD_ENOUGH)
        assert halves.positions == (0, 0)
        appender_of(halves.store).refusal = ""
        halves.round()
        assert len(halves.given_up) == 1


@pytest.mark.parametrize("outcome", list(Outcome))
def test_positions_are_kept_only_when_what_was_put_is_durable(halves, outcome):
    class Disk:
        is_done = False

        def is_on_disk(self, end_offset):
            assert end_offset == halves.store.max_physical_offset
            return self.is_done

        async def wait(self, end_offset):
            self.is_done = outcome in (Outcome.DURABLE, Outcome.REPLICA_TIMED_OUT)
            return outcome, "the disk"

    halves.producer()
    halves.half()
    halves.durability = disk = Disk()
    halves.check_back = check_back.CheckBack(halves)
    halves.round(OLD_ENOUGH)
    assert halves.positions == ((1, 0) if disk.is_done else (None, None))


def test_positions_outside_the_queues_are_corrected(halves):
    producer = halves.producer()
    halves.half()
    for topic in (HALF_TOPIC, OP_HALF_TOPIC):
        halves.offsets.commit(TRANSACTION_GROUP, topic, 0, 77)
    halves.round(OLD_ENOUGH)
    assert halves.positions == (1, 0)  # the end of the half queue: what a crash cut off is not asked about twice
    halves.half(b"new")
    halves.round(OLD_ENOUGH)
    assert [asked.body for _, asked in producer.asked] == [b"new"]


def test_an_empty_store_has_nothing_to_do(halves):
    halves.round()
    assert halves.positions == (0, 0)


def test_a_round_works_in_small_pieces(halves, monkeypatch):
    monkeypatch.setattr(check_back, "_WORK_PER_TICK", 10)
    for number in range(100):
        halves.half(b"%d" % number)

    async def scenario():
        task = asyncio.create_task(halves.check_back.round())
        seen = []
        while not task.done():
            await asyncio.sleep(0)
            seen.append(halves.positions[0])
        return seen

    halves.clock.ms += OLD_ENOUGH
    seen = run_virtual(scenario())
    assert len(set(seen)) >= 10
    assert seen[-1] == 100


async def test_a_round_under_way_ends_when_the_broker_stops(halves, monkeypatch):
    monkeypatch.setattr(check_back, "_WORK_PER_TICK", 10)
    for number in range(100):
        halves.half(b"%d" % number)

    halves.clock.ms += OLD_ENOUGH
    await halves.transactions.prepare()
    task = asyncio.create_task(halves.check_back.round())
    await asyncio.sleep(0)
    halves.check_back.stop()
    await task
    done = halves.positions[0]
    assert 0 < done < 100
    assert len(halves.records()) == 100 + done


def test_a_round_lasts_a_minute_at_most(halves, monkeypatch):
    for number in range(100):
        halves.half(b"%d" % number)
    put = halves.store.put

    def slow_put(again):
        halves.clock.ms += 10_000
        return put(again)

    halves.clock.ms += OLD_ENOUGH
    monkeypatch.setattr(halves.store, "put", slow_put)
    run_virtual(halves.check_back.round())
    assert halves.positions == (6, 0)


def test_ops_that_come_without_end_do_not_keep_a_round_from_asking(halves, monkeypatch):
    producer = halves.producer()
    halves.half()
    get = halves.store.get

    def busy_get(topic, *arguments, **named):
        if topic == OP_HALF_TOPIC:
            halves.clock.ms += 2000
            halves.store.put(message(OP_HALF_TOPIC, 0, b"99,", TAGS="d", born_timestamp=halves.clock.ms))
        return get(topic, *arguments, **named)

    halves.clock.ms += OLD_ENOUGH
    monkeypatch.setattr(halves.store, "get", busy_get)
    run_virtual(halves.check_back.round())
    assert len(producer.asked) == 1


def test_positions_and_questions_survive_a_restart(tmp_path):
    with HalfMessages(tmp_path / "store") as halves:
        halves.half(b"open")
        halves.half(b"decided")
        halves.ops.add(0, 1)
        halves.round(OLD_ENOUGH)
        positions = halves.positions
    with HalfMessages(tmp_path / "store", now_ms=halves.clock.ms) as halves:
        producer = halves.producer()
        assert halves.positions == positions == (2, 0)
        halves.round(OLD_ENOUGH)
        ((_, asked),) = producer.asked
        assert asked.body == b"open"
        assert halves.positions == (3, 1)


def test_rounds_write_what_the_golden_broker_wrote(tmp_path):
    """The seven transactions of the golden store again, at its times: every half, op and given-up record is equal."""
    golden = unpack_golden("5.4.0", tmp_path)
    settings = golden_settings(golden)
    with opened(golden.root, settings, is_batch_topic=lambda topic: topic == "GoldInnerBatch") as store:
        expected = {t: read_all(store, t) for t in (HALF_TOPIC, OP_HALF_TOPIC, "TRANS_CHECK_MAX_TIME_TOPIC")}
        commits = {r.prepared_transaction_offset: r for q in (0, 1) for r in read_all(store, "GoldTran", q)}
    conf = golden_manifest("5.4.0")["brokerConf"]
    half_records, (op_1, op_2), (given_up,) = expected.values()

    with HalfMessages(
        tmp_path / "ours",
        transaction_timeout_ms=int(conf["transactionTimeOut"]),
        transaction_checks_max=int(conf["transactionCheckMax"]),
    ) as halves:
        halves.producer("pg_golden_tran")
        for record in half_records[:7]:
            halves.clock.ms = record.store_timestamp
            halves.store.put(_as_it_was_sent(record))
        for decided in (0, 1, 2, 6):
            halves.ops.add(0, decided)
        halves.clock.ms = op_1.store_timestamp
        halves.ops.write()
        halves.clock.ms = half_records[7].store_timestamp
        halves.round()
        for decided in (7, 8):
            halves.ops.add(0, decided)
        halves.clock.ms = op_2.store_timestamp
        halves.ops.write()
        for record in (half_records[10], given_up):
            halves.clock.ms = record.store_timestamp
            halves.round()
        assert halves.positions == (11, 2)
        for topic, records in expected.items():
            ours = halves.records(topic)
            assert [_seen(record) for record in ours] == [_seen(record) for record in records]
        for half in halves.records():
            if half.queue_offset in (0, 2, 7):
                real, golden_commit = (
                    committed(half),
                    commits[half_records[half.queue_offset].physical_offset],
                )
                assert (real.topic, real.queue_id, real.body, real.sys_flag, real.properties) == (
                    golden_commit.topic,
                    golden_commit.queue_id,
                    golden_commit.body,
                    golden_commit.sys_flag,
                    golden_commit.properties,
                )


def _as_it_was_sent(record):
    properties = decode_properties(record.properties)
    topic, queue_id = properties.pop("REAL_TOPIC"), int(properties.pop("REAL_QID"))
    del properties["__transactionId__"]
    sent = message(topic, queue_id, record.body, born_timestamp=record.born_timestamp, sys_flag=0x4, **properties)
    return to_half(sent)


def _seen(record):
    return (
        record.queue_offset,
        record.body,
        record.properties,
        record.sys_flag,
        record.flag,
        record.born_timestamp,
        record.reconsume_times,
        record.prepared_transaction_offset,
    )
