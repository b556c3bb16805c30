"""Messages that count only if a local transaction commits. Source: behaviour.md §7.9, §9.1."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from rmqkit import Message, MessageIllegal, ReceivedMessage, TransactionProducer, TransactionState
from rmqkit.protocol.ids import decode_offset_id
from tests.client.peers import until
from tests.interop.apache import TRANSACTION_CONF
from tests.interop.suite.scene import POLL_SECONDS, Scene

pytestmark = pytest.mark.patient

COMMIT, ROLLBACK, UNKNOWN = TransactionState.COMMIT, TransactionState.ROLLBACK, TransactionState.UNKNOWN
CHECKS_MAX = TRANSACTION_CONF["transactionCheckMax"]
END = b"end"


class Answers:
    """Answers to transaction checks, given one after the other (the last one repeatedly) and counted."""

    def __init__(self, *states: TransactionState | Exception | None) -> None:
        self.states = states
        self.asked: list[ReceivedMessage] = []

    def __call__(self, message: ReceivedMessage) -> TransactionState | None:
        if message.body == END:  # the commit reached the broker late
            return COMMIT
        state = self.states[min(len(self.asked), len(self.states) - 1)]
        self.asked.append(message)
        if isinstance(state, Exception):
            raise state
        return state


class Books:
    """A local transaction with the result of its argument, and its answer to later checks."""

    def __init__(self) -> None:
        self.states: dict[str | None, TransactionState | None] = {}

    def execute(self, message: Message, argument: Any) -> TransactionState | None:
        if isinstance(argument, Exception):
            raise argument
        self.states[message.msg_id] = argument
        return argument  # type: ignore[no-any-return]

    def check(self, message: ReceivedMessage) -> TransactionState | None:
        return self.states.get(message.msg_id)


async def transactions(scene: Scene, check: Answers | None = None) -> TransactionProducer:
    await scene.create_topic()
    books = Books()
    return await scene.transaction_producer(books.execute, check or books.check)


def message(scene: Scene, body: bytes = b"x") -> Message:
    return Message(topic=scene.topic, body=body, tags="A", keys=["k"], properties={"a": "ä"})


async def visible(scene: Scene, count: int) -> list[ReceivedMessage]:
    """Return at least ``count`` committed messages. A check in progress may have committed one of them twice."""
    found: dict[str, ReceivedMessage] = {}
    while len(found) < count:
        found = {one.msg_id: one for one in await scene.stored(count)}
    return list(found.values())


async def end_of(scene: Scene, producer: TransactionProducer) -> list[bytes]:
    """Commit one more transaction, wait until it is visible, and return all visible messages."""
    await producer.send_in_transaction(message(scene, END), COMMIT)
    found: list[bytes] = []
    while END not in found:
        await asyncio.sleep(POLL_SECONDS)
        found = [one.body for one in await visible(scene, 1)]
    return found


async def test_a_committed_message_becomes_visible_with_all_it_carries(scene: Scene) -> None:
    """behaviour.md §9.1, step 3."""
    producer = await transactions(scene)
    result = await producer.send_in_transaction(message(scene), COMMIT)
    (one,) = await visible(scene, 1)
    assert result.state is COMMIT
    assert (one.body, one.tags, one.keys, one.properties["a"]) == (b"x", "A", ["k"], "ä")
    assert one.msg_id == result.sent.msg_id
    *_, half = decode_offset_id(result.sent.offset_msg_id)
    assert one.prepared_transaction_offset >= half  # greater if a check came before the commit


async def test_a_rolled_back_message_is_never_visible(scene: Scene) -> None:
    """behaviour.md §9.1, step 3."""
    producer = await transactions(scene)
    result = await producer.send_in_transaction(message(scene), ROLLBACK)
    assert result.state is ROLLBACK
    assert await end_of(scene, producer) == [b"end"]


async def test_a_message_is_not_visible_before_its_transaction_ends(scene: Scene) -> None:
    """behaviour.md §9.1, step 1."""
    await scene.create_topic()
    found: list[list[ReceivedMessage]] = []

    async def execute(message: Message, argument: object) -> TransactionState:
        found.append(await scene.stored(0))
        return COMMIT

    producer = await scene.transaction_producer(execute, lambda _: COMMIT if found else UNKNOWN)
    await producer.send_in_transaction(message(scene))
    assert found == [[]]
    assert len(await visible(scene, 1)) == 1


async def test_the_local_transaction_knows_the_message_id(scene: Scene) -> None:
    """behaviour.md §7.9: transactionId = UNIQ_KEY."""
    await scene.create_topic()
    known: list[str | None] = []

    def execute(message: Message, argument: object) -> TransactionState:
        known.append(message.msg_id)
        return COMMIT

    producer = await scene.transaction_producer(execute, Answers(COMMIT))
    result = await producer.send_in_transaction(message(scene))
    assert known == [result.sent.msg_id] == [result.sent.transaction_id]


async def test_a_plain_local_transaction_runs_in_a_thread_of_its_own(scene: Scene) -> None:
    """behaviour.md §7.9."""
    await scene.create_topic()
    threads: list[threading.Thread] = []

    def execute(message: Message, argument: object) -> TransactionState:
        threads.append(threading.current_thread())
        return COMMIT

    producer = await scene.transaction_producer(execute, Answers(COMMIT))
    await producer.send_in_transaction(message(scene))
    assert threads[0] is not threading.current_thread()


async def test_a_large_message_is_committed_whole(scene: Scene) -> None:
    """behaviour.md §9.1: same body and flags."""
    producer = await transactions(scene)
    body = b"large enough to be compressed " * 300
    await producer.send_in_transaction(message(scene, body), COMMIT)
    assert [one.body for one in await visible(scene, 1)] == [body]


async def test_a_transaction_nobody_knows_the_end_of_is_asked_about(scene: Scene) -> None:
    """behaviour.md §9.1, steps 5 and 6."""
    answers = Answers(COMMIT)
    producer = await transactions(scene, answers)
    result = await producer.send_in_transaction(message(scene), UNKNOWN)
    (one,) = await visible(scene, 1)
    assert result.state is UNKNOWN
    assert one.msg_id == result.sent.msg_id == answers.asked[0].msg_id


async def test_a_question_shows_the_message_as_it_was_sent(scene: Scene) -> None:
    """behaviour.md §9.1, step 6: real topic and queue restored."""
    answers = Answers(COMMIT)
    producer = await transactions(scene, answers)
    await producer.send_in_transaction(message(scene), UNKNOWN)
    await until(lambda: answers.asked, "a question")
    asked = answers.asked[0]
    assert (asked.topic, asked.queue_id) == (scene.topic, 0)
    assert (asked.body, asked.tags, asked.keys, asked.properties["a"]) == (b"x", "A", ["k"], "ä")
    assert asked.properties["PGROUP"] == scene.group
    assert asked.properties["TRANSACTION_CHECK_TIMES"] == "1"


async def test_a_question_answered_with_rollback_ends_the_transaction(scene: Scene) -> None:
    """behaviour.md §9.1."""
    answers = Answers(ROLLBACK)
    producer = await transactions(scene, answers)
    await producer.send_in_transaction(message(scene), UNKNOWN)
    await until(lambda: answers.asked, "a question")
    assert await end_of(scene, producer) == [b"end"]


@pytest.mark.parametrize("first", [UNKNOWN, None, ValueError("no stock")], ids=["unknown", "none", "raises"])
async def test_a_question_that_is_not_answered_is_asked_again(
    scene: Scene, first: TransactionState | Exception | None
) -> None:
    """behaviour.md §7.9, §9.1: TRANSACTION_CHECK_TIMES counts."""
    answers = Answers(first, COMMIT)
    producer = await transactions(scene, answers)
    await producer.send_in_transaction(message(scene), UNKNOWN)
    assert len(await visible(scene, 1)) == 1
    assert [one.properties["TRANSACTION_CHECK_TIMES"] for one in answers.asked[:2]] == ["1", "2"]


async def test_a_local_transaction_that_raises_is_unknown_and_the_error_is_kept(scene: Scene) -> None:
    """behaviour.md §7.9: exception → UNKNOW and remembered."""
    answers = Answers(COMMIT)
    producer = await transactions(scene, answers)
    error = ValueError("no stock")
    result = await producer.send_in_transaction(message(scene), error)
    assert (result.state, result.error) == (UNKNOWN, error)
    assert len(await visible(scene, 1)) == 1
    assert answers.asked


async def test_a_local_transaction_that_says_nothing_is_unknown(scene: Scene) -> None:
    """behaviour.md §7.9: null → UNKNOW."""
    answers = Answers(COMMIT)
    producer = await transactions(scene, answers)
    assert (await producer.send_in_transaction(message(scene), None)).state is UNKNOWN
    assert len(await visible(scene, 1)) == 1
    assert answers.asked


async def test_after_the_last_question_a_transaction_is_given_up(scene: Scene) -> None:
    """behaviour.md §9.1: transactionCheckMax, TRANS_CHECK_MAX_TIME_TOPIC."""
    answers = Answers(UNKNOWN)
    producer = await transactions(scene, answers)
    result = await producer.send_in_transaction(message(scene), UNKNOWN)
    given_up: list[ReceivedMessage] = []
    while not given_up:
        found = await scene.stored(1, "TRANS_CHECK_MAX_TIME_TOPIC")
        given_up = [one for one in found if one.msg_id == result.sent.msg_id]
        await asyncio.sleep(0.1)
    await until(lambda: len([one for one in answers.asked if one.body == b"x"]) == CHECKS_MAX, "the last question")
    assert await end_of(scene, producer) == [b"end"]


async def test_another_producer_of_the_group_is_asked_when_the_first_is_gone(scene: Scene) -> None:
    """behaviour.md §9.1, step 6: one channel of the producer group."""
    first = await transactions(scene)
    answers = Answers(COMMIT)
    second = await scene.transaction_producer(Books().execute, answers)
    await second.send_in_transaction(message(scene, b"second"), COMMIT)
    result = await first.send_in_transaction(message(scene, b"first"), UNKNOWN)
    await first.close()
    assert sorted(one.body for one in await visible(scene, 2)) == [b"first", b"second"]
    assert result.sent.msg_id in {one.msg_id for one in answers.asked}  # perhaps also its own, if that took long


async def test_transactions_run_beside_each_other(scene: Scene) -> None:
    """behaviour.md §7.9."""
    producer = await transactions(scene)
    states = [(COMMIT, ROLLBACK)[i % 2] for i in range(20)]
    sends = [producer.send_in_transaction(message(scene, b"%d" % i), state) for i, state in enumerate(states)]
    assert [result.state for result in await asyncio.gather(*sends)] == states
    assert sorted(int(one.body) for one in await visible(scene, 10)) == list(range(0, 20, 2))


async def test_a_transaction_producer_sends_plain_messages_too(scene: Scene) -> None:
    """behaviour.md §7.9."""
    producer = await transactions(scene)
    await producer.send(message(scene))
    assert [one.body for one in await visible(scene, 1)] == [b"x"]


async def test_a_delay_level_is_refused_in_a_transaction(scene: Scene) -> None:
    """behaviour.md §9.1: delay level must not be combined."""
    producer = await transactions(scene)
    delayed = Message(topic=scene.topic, body=b"x", delay_level=1)
    with pytest.raises(MessageIllegal, match="in a transaction cannot have a delay"):
        await producer.send_in_transaction(delayed, COMMIT)
    assert await end_of(scene, producer) == [b"end"]
