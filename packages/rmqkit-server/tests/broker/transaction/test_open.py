"""Each half message ends once, whoever decides which copy of it, and however often (`broker.transaction.open`)."""

from __future__ import annotations

import pytest

from rmqkit.broker.transaction import open as open_transactions
from rmqkit.broker.transaction.check_back import CheckBack
from rmqkit.broker.transaction.open import transaction_of
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.ids import offset_id
from rmqkit.protocol.names import HALF_TOPIC, OP_HALF_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC, TRANSACTION_GROUP
from rmqkit.protocol.op_messages import op_offsets
from rmqkit.protocol.properties import decode_properties
from rmqkit.protocol.schemas.send import ResumeCheckRequest
from tests.broker.cluster import Cluster
from tests.broker.half_messages import HalfMessages
from tests.broker.transaction.test_transactions import (
    COMMIT,
    KEPT,
    NO_REMARK,
    ROLLBACK,
    Half,
    send_half,
    stored,
    until,
)
from tests.store.inside import appender_of
from tests.virtual_time import run as run_virtual

pytestmark = pytest.mark.virtual_time

OLD_ENOUGH = 6001
ENDED = ResponseCode.ILLEGAL_OPERATION


class Rounds:
    """A cluster whose check-back rounds are called by the test, each of them with every half message old enough."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.context = cluster.standalone.broker.context

    async def round(self):
        """Store every open half message again; return the copies of `Half` that a producer would be asked about."""
        before = len(await stored(self.cluster, HALF_TOPIC))
        now_ms, clock = self.context.clock.now_ms(), self.context.clock

        async def is_later():
            return clock.now_ms() > now_ms  # a round leaves what was stored in the millisecond that it begins in

        await until(is_later)
        await CheckBack(self.context).round()
        return [self.copy(record) for record in (await stored(self.cluster, HALF_TOPIC))[before:]]

    def copy(self, record):
        half = object.__new__(Half)
        half.cluster, half.physical_offset, half.answer = self.cluster, record.physical_offset, record
        return half

    async def resume(self, record):
        msg_id = offset_id(record.store_host, record.physical_offset)
        answer = await self.cluster.call(RequestCode.RESUME_CHECK_HALF_MESSAGE, ResumeCheckRequest(msg_id=msg_id))
        return answer.code, answer.remark


@pytest.fixture
async def rounds(tmp_path):
    # No rounds of its own: the interval is a day.
    broker = {"transaction_check_interval_ms": 86_400_000, "transaction_timeout_ms": 0, "transaction_checks_max": 3}
    async with Cluster(tmp_path / "store", broker=broker, store=KEPT) as cluster:
        yield Rounds(cluster)


async def delivered(rounds):
    return [record.body for record in await stored(rounds.cluster)]


async def test_a_commit_that_comes_twice_is_delivered_once(rounds):
    half = await send_half(rounds.cluster)
    assert [await half.decide(COMMIT) for _ in range(3)] == [(0, None)] * 3
    assert await delivered(rounds) == [b"hello"]
    assert await half.decide(ROLLBACK) == (ENDED, "transaction K is committed already")


async def test_a_commit_after_a_rollback_is_refused(rounds, caplog):
    half = await send_half(rounds.cluster)
    assert await half.decide(ROLLBACK) == (0, NO_REMARK)
    assert await half.decide(COMMIT) == (ENDED, "transaction K is rolled back already")
    assert await half.decide(ROLLBACK) == (0, NO_REMARK)
    assert await delivered(rounds) == []
    assert "a commit of group p has no effect: transaction K is rolled back already" in caplog.text


async def test_a_commit_by_a_ledger_counts_after_a_rollback_and_once(rounds):
    half = await send_half(rounds.cluster)
    assert await half.decide(ROLLBACK) == (0, NO_REMARK)
    assert [await half.decide(COMMIT, decidedByLedger="true") for _ in range(2)] == [(0, None)] * 2
    assert await delivered(rounds) == [b"hello"]
    assert await half.decide(ROLLBACK, decidedByLedger="true") == (ENDED, "transaction K is committed already")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("decisions", [(COMMIT, COMMIT, COMMIT), (COMMIT, ROLLBACK, COMMIT)])
async def test_the_first_answer_about_any_copy_counts(order, decisions, rounds):
    """A producer that needs longer for its answer than the broker waits between two questions."""
    copies = [await send_half(rounds.cluster)]
    for _ in range(2):
        copies += await rounds.round()
    assert len(copies) == 3
    codes = [(await copies[at].decide(decision))[0] for at, decision in zip(order, decisions, strict=True)]
    assert codes == [0 if decision == COMMIT else ENDED for decision in decisions]
    assert await delivered(rounds) == [b"hello"]
    assert await rounds.round() == []  # nobody is asked any more


async def test_a_rollback_of_an_old_copy_ends_the_questions(rounds):
    first = await send_half(rounds.cluster)
    (second,) = await rounds.round()
    await rounds.round()
    assert (await first.decide(ROLLBACK))[0] == 0
    assert (await second.decide(COMMIT, fromTransactionCheck="true"))[0] == ENDED
    assert (await rounds.round(), await delivered(rounds)) == ([], [])


async def test_two_transactions_with_the_same_key_are_two(rounds):
    """A Java program that sends one message object in two transactions."""
    halves = [await send_half(rounds.cluster) for _ in range(2)]
    assert [(await half.decide(COMMIT))[0] for half in halves] == [0, 0]
    assert await delivered(rounds) == [b"hello"] * 2


async def test_the_first_decision_about_a_transaction_that_was_given_up_counts(rounds):
    half = await send_half(rounds.cluster)
    for _ in range(4):
        await rounds.round()
    (given_up,) = await stored(rounds.cluster, TRANS_CHECK_MAX_TIME_TOPIC)
    assert (await half.decide(COMMIT))[0] == 0
    assert (await half.decide(COMMIT))[0] == 0
    assert await delivered(rounds) == [b"hello"]
    assert await rounds.resume(given_up) == (ENDED, "transaction K is committed already")


async def test_a_transaction_resumed_while_it_is_asked_about_is_asked_once_in_a_round(rounds):
    await send_half(rounds.cluster)
    (copy,) = await rounds.round()
    for record in (copy.answer, *await stored(rounds.cluster, HALF_TOPIC)):
        assert await rounds.resume(record) == (0, None)
    resumed = (await stored(rounds.cluster, HALF_TOPIC))[-1]
    assert decode_properties(resumed.properties)["TRANSACTION_CHECK_TIMES"] == "0"
    (asked,) = await rounds.round()
    assert [(await one.decide(COMMIT))[0] for one in (asked, copy, rounds.copy(resumed))] == [0, 0, 0]
    assert (await delivered(rounds), await rounds.round()) == ([b"hello"], [])


async def test_a_given_up_transaction_that_is_resumed_several_times_ends_once(rounds):
    await send_half(rounds.cluster)
    for _ in range(4):
        await rounds.round()
    (given_up,) = await stored(rounds.cluster, TRANS_CHECK_MAX_TIME_TOPIC)
    for _ in range(3):
        assert await rounds.resume(given_up) == (0, None)
    (asked,) = await rounds.round()
    assert (await asked.decide(COMMIT))[0] == 0
    assert (await delivered(rounds), await rounds.round()) == ([b"hello"], [])


async def test_op_messages_name_the_newest_copy_and_the_one_that_was_decided(rounds):
    """A broker of Apache that opens the store passes both."""
    first = await send_half(rounds.cluster)
    await rounds.round()
    (newest,) = await rounds.round()
    assert (await first.decide(COMMIT))[0] == 0
    rounds.context.ops.write()
    named = [at for op in await stored(rounds.cluster, OP_HALF_TOPIC) for at in op_offsets(op)]
    assert sorted(named) == [first.answer.queue_offset, newest.answer.queue_offset]


@pytest.mark.parametrize("decided", [None, 0, 1, 2])
def test_a_restart_knows_the_newest_copy(decided, tmp_path):
    """``decided``: the copy that was committed before the restart; check-back's position is lost with the crash."""
    with HalfMessages(tmp_path / "store") as halves:
        producer = halves.producer()
        halves.half()
        for _ in range(2):
            halves.round(OLD_ENOUGH)
        records = halves.records()
        halves.offsets.commit(TRANSACTION_GROUP, HALF_TOPIC, 0, 0)
        if decided is not None:
            record = records[decided]
            transaction = transaction_of(record, record.named)
            halves.transactions.decided(record, transaction, 2, COMMIT)
    with HalfMessages(tmp_path / "store", now_ms=halves.clock.ms) as halves:
        run_virtual(halves.transactions.prepare())
        found = [halves.transactions.open_offset(one, transaction_of(one, one.named)) for one in records]
        assert found == [2 if decided is None else None] * 3
        producer = halves.producer()
        halves.round(OLD_ENOUGH)
        assert len(producer.asked) == (decided is None)


BROKER = {"transaction_check_interval_ms": 86_400_000, "transaction_timeout_ms": 0, "transaction_checks_max": 1}


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_commit_whose_op_message_a_crash_lost_is_not_repeated(is_given_up, tmp_path, monkeypatch):
    halves = []

    async def first():
        async with Cluster(tmp_path / "store", broker=BROKER, store=KEPT) as cluster:
            rounds = Rounds(cluster)
            half = await send_half(cluster, body=b"committed")
            halves.append(half)
            halves.append(await send_half(cluster, body=b"open"))
            for _ in range(2 * is_given_up):
                await rounds.round()
            assert (await half.decide(COMMIT))[0] == 0
            monkeypatch.setattr(rounds.context.ops, "_collected", {})  # the crash

    async def second():
        async with Cluster(tmp_path / "store", broker=BROKER, store=KEPT) as cluster:
            rounds = Rounds(cluster)
            for half in halves:
                half.cluster = cluster
            assert await halves[0].decide(COMMIT) == (0, None)
            assert (await halves[0].decide(ROLLBACK))[0] == ENDED
            assert [(await halves[1].decide(COMMIT))[0] for _ in range(2)] == [0, 0]
            assert await delivered(rounds) == [b"committed", b"open"]
            assert await rounds.round() == []
            for record in await stored(cluster, TRANS_CHECK_MAX_TIME_TOPIC):
                assert (await rounds.resume(record))[0] == ENDED

    run_virtual(first())
    run_virtual(second())


def test_a_commit_whose_op_message_a_crash_lost_is_not_asked_about(tmp_path, monkeypatch):
    async def first():
        async with Cluster(tmp_path / "store", broker=BROKER, store=KEPT) as cluster:
            assert (await (await send_half(cluster)).decide(COMMIT))[0] == 0
            assert await (await send_half(cluster)).decide(ROLLBACK) == (0, NO_REMARK)
            monkeypatch.setattr(cluster.standalone.broker.context.ops, "_collected", {})

    async def second():
        async with Cluster(tmp_path / "store", broker=BROKER, store=KEPT) as cluster:
            # The rollback left no trace, and is asked about again.
            assert [half.answer.queue_offset for half in await Rounds(cluster).round()] == [2]

    run_virtual(first())
    run_virtual(second())


def test_a_store_that_an_apache_broker_left_is_read_from_its_positions(tmp_path):
    """Its op messages name single offsets, and its copies inside the immunity name the original."""
    with HalfMessages(tmp_path / "store") as halves:
        halves.half(b"decided")
        halves.half(b"open", TRANSACTION_CHECK_TIMES=1)
        halves.half(b"open too")
        halves.ops.add(0, 0)
        halves.ops.write()
        run_virtual(halves.transactions.prepare())
        found = [halves.transactions.open_offset(one, transaction_of(one, one.named)) for one in halves.records()]
        assert found == [None, 1, 2]


def test_what_is_remembered_of_ended_transactions_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(open_transactions, "_REMEMBERED_MAX", 3)
    with HalfMessages(tmp_path / "store") as halves:
        table = halves.transactions
        for number in range(5):
            halves.half(b"%d" % number)
        records = halves.records()
        for record in records:
            table.decided(record, transaction_of(record, record.named), record.queue_offset, COMMIT)
        known = [table.decision(transaction_of(record, record.named)) for record in records]
        assert known == [None, None, COMMIT, COMMIT, COMMIT]
        assert [table.open_offset(one, transaction_of(one, one.named)) for one in records] == [None] * 5


async def test_a_decision_before_the_queues_are_read_waits_for_them(tmp_path):
    async with Cluster(tmp_path / "store", store=KEPT) as cluster:
        transactions = cluster.standalone.broker.context.transactions
        assert not transactions.is_ready
        half = await send_half(cluster)
        assert await half.decide(COMMIT) == (0, None)
        assert transactions.is_ready
        assert [record.body for record in await stored(cluster)] == [b"hello"]


async def test_a_commit_that_the_store_refuses_does_not_end_the_transaction(rounds):
    half = await send_half(rounds.cluster)
    (copy,) = await rounds.round()
    store = rounds.context.store
    appender_of(store).refusal = "the disk is full"
    assert (await half.decide(COMMIT))[0] == ResponseCode.SERVICE_NOT_AVAILABLE
    appender_of(store).refusal = ""
    assert (await copy.decide(COMMIT))[0] == 0
    assert (await half.decide(COMMIT))[0] == 0
    assert await delivered(rounds) == [b"hello"]
