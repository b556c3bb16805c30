"""The place of due messages: the own log or other brokers, and what has to be retried (behaviour.md §9.2, §10.5)."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.broker.dead_letters import DeadLetters
from rmqkit.broker.delay.destination import Destination, Handed, Refused
from rmqkit.protocol.names import TIMER_TOPIC
from rmqkit.protocol.record import pack_host
from rmqkit.store.message_store import DispatchRequest, MessageStore, PutResult, PutStatus
from rmqkit.testing.clock import StandingClock
from tests.store.stores import message, read_all, small_settings

OTHER_HOST = pack_host("10.0.0.9", 1)
FULL = PutResult(PutStatus.SERVICE_NOT_AVAILABLE, reason="no space")
ILLEGAL = PutResult(PutStatus.MESSAGE_ILLEGAL, reason="not like that")


class Place:
    """A destination over a small store.

    Attributes:
        delivered: topic, body and queue offset of the messages that were stored in their real topic.
        runs: the number of messages of each common write.
    """

    def __init__(self, store, monkeypatch):
        self.store = store
        self.delivered = []
        self.runs = []
        self.topics = []
        letters = DeadLetters(store, lambda *topic: self.topics.append(topic))
        self.destination = Destination(store, "timed", self.on_delivered, letters)
        put_run = store.put_run

        def counted(messages):
            arrivals = put_run(messages)
            self.runs += [] if arrivals is None else [len(messages)]
            return arrivals

        monkeypatch.setattr(store, "put_run", counted)

    def open_queue(self):
        """Store a message in T: the first message of a queue is never stored together with others."""
        assert self.store.put(message("T", 0, b"first")).status is PutStatus.OK

    def on_delivered(self, one, put):
        self.delivered.append((one.topic, one.body, put.queue_offset))

    def refuse(self, monkeypatch, body, *answers):
        """Refuse the message with this body: with each of the answers, and then no more."""
        put, left = self.store.put, [*answers]
        monkeypatch.setattr(self.store, "put_run", lambda messages: None)
        monkeypatch.setattr(self.store, "put", lambda one: left.pop(0) if one.body == body and left else put(one))

    def bodies(self, topic="T"):
        return [one.body for one in read_all(self.store, topic, 0)]


@pytest.fixture
def place(tmp_path, monkeypatch):
    store = MessageStore(tmp_path, small_settings(), clock=StandingClock())
    store.open()
    yield Place(store, monkeypatch)
    store.close()


def several(*bodies, **fields):
    return [message("T", 0, body.encode(), **fields) for body in bodies]


@pytest.mark.parametrize(
    ("stored", "passed"),
    [([], 0), ([True, True], 2), ([True, False, True], 1), ([False, True], 0), ([False], 0)],
)
def test_the_messages_before_the_first_that_has_to_be_retried_are_passed(stored, passed):
    assert Handed(stored).passed == passed


# -- the own log


def test_messages_of_one_sender_are_stored_with_one_write_and_reported(place):
    place.open_queue()
    handed = place.destination.put_here(several("a", "b", "c"))
    assert (handed.stored, handed.failure, place.runs) == ([True] * 3, None, [3])
    assert place.delivered == [("T", b"a", 1), ("T", b"b", 2), ("T", b"c", 3)]
    assert place.destination.end_offset == place.store.max_physical_offset


@pytest.mark.parametrize("count", [1, 3])
def test_a_write_with_another_number_of_places_than_messages_is_a_fault(count, place, monkeypatch):
    places = [DispatchRequest("T", 0, number, 0, 0, 0, 0, 0, b"") for number in range(count)]
    monkeypatch.setattr(place.store, "put_run", lambda messages: places)
    handed = place.destination.put_here(several("a", "b"))
    assert (handed.stored, type(handed.failure)) == ([False, False], ValueError)


def test_messages_of_several_senders_and_missing_ones_keep_their_order(place):
    place.open_queue()
    first, second, third, fourth = several("a", "b", "c", "d")
    third.born_host = OTHER_HOST
    fourth.born_host = OTHER_HOST
    handed = place.destination.put_here([first, None, second, third, fourth, None])
    assert (handed.stored, handed.failure) == ([True] * 6, None)
    assert place.runs == [2], "one message needs no common write"
    assert [body for _, body, _ in place.delivered] == [b"a", b"b", b"c", b"d"]
    assert place.bodies() == [b"first", b"a", b"b", b"c", b"d"]


def test_no_message_needs_no_write(place):
    for messages in ([], [None], [None, None]):
        handed = place.destination.put_here(messages)
        assert (handed.stored, handed.failure) == ([True] * len(messages), None)
    assert (place.delivered, place.runs, place.destination.end_offset) == ([], [], 0)


def test_a_message_that_goes_to_the_timer_topic_again_is_not_delivered_yet(place):
    waiting = message(TIMER_TOPIC, 0, b"a")
    place.destination.put_here([waiting])
    assert place.delivered == []
    assert place.destination.end_offset == place.store.max_physical_offset > 0


def test_messages_after_a_refused_one_are_retried_with_it(place, monkeypatch):
    place.refuse(monkeypatch, b"b", FULL)
    handed = place.destination.put_here([*several("a", "b"), None, *several("c")])
    assert (handed.stored, handed.passed) == ([True, False, True, False], 1)
    assert isinstance(handed.failure, Refused)
    assert str(handed.failure) == "SERVICE_NOT_AVAILABLE no space"
    assert (place.bodies(), place.delivered) == ([b"a"], [("T", b"a", 0)])


def test_a_message_that_is_refused_for_good_goes_to_the_dead_letters_and_the_others_are_delivered(place, monkeypatch):
    place.refuse(monkeypatch, b"b", ILLEGAL)
    handed = place.destination.put_here(several("a", "b", "c"))
    assert (handed.stored, handed.failure) == ([True] * 3, None)
    assert (place.bodies(), place.bodies("%DLQ%CID_RMQ_SYS_UNDELIVERABLE")) == ([b"a", b"c"], [b"b"])
    assert [body for _, body, _ in place.delivered] == [b"a", b"c"], "a dead letter is not delivered"
    assert place.topics == [("%DLQ%CID_RMQ_SYS_UNDELIVERABLE", 1)]


def test_a_message_whose_dead_letter_is_refused_is_retried(place, monkeypatch):
    place.refuse(monkeypatch, b"b", ILLEGAL, *[FULL] * 9)
    handed = place.destination.put_here(several("a", "b", "c"))
    assert (handed.stored, str(handed.failure)) == ([True, False, False], "SERVICE_NOT_AVAILABLE no space")


def test_a_fault_of_the_disk_is_reported_with_the_messages_that_were_stored_before(place, monkeypatch):
    def fail(one):
        raise OSError(28, "No space left on device")

    place.destination.put_here(several("a"))
    monkeypatch.setattr(place.store, "put", fail)
    handed = place.destination.put_here([None, *several("b")])
    assert handed.stored == [True, False]
    assert isinstance(handed.failure, OSError)


@pytest.mark.parametrize(
    ("properties", "place_of"),
    [
        ({"REAL_TOPIC": "T", "REAL_QID": "3"}, ("T", 3)),
        ({"REAL_TOPIC": "T", "REAL_QID": "0"}, ("T", 0)),
        ({"REAL_TOPIC": "HALF", "REAL_QID": "0"}, None),
        ({"REAL_TOPIC": "T", "REAL_QID": "-1"}, None),
        ({"REAL_TOPIC": "T", "REAL_QID": "x"}, None),
        ({"REAL_TOPIC": "T"}, None),
        ({"REAL_QID": "0"}, None),
    ],
)
def test_a_message_without_a_real_place_is_dropped_with_a_log_line(properties, place_of, place, caplog):
    place.store.put(message("X", 0, b"a", **properties))
    (record,) = read_all(place.store, "X", 0)
    assert place.destination.place_of(record, forbidden=b"HALF") == place_of
    assert len(caplog.messages) == (place_of is None)
    assert all(line.startswith("timed message at 0 is dropped: it is for ") for line in caplog.messages)


# -- other brokers


async def test_an_acting_master_sends_all_messages_at_once_and_retries_those_that_were_not_stored(place):
    sent, done = [], asyncio.get_running_loop().create_future()

    async def remote_put(one):
        sent.append(one.body)
        await done
        return one.body != b"b"

    assert not place.destination.is_remote
    place.destination.remote_put = remote_put
    assert place.destination.is_remote
    putting = asyncio.ensure_future(place.destination.put([*several("a", "b"), None, *several("c")]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sent == [b"a", b"b", b"c"]
    done.set_result(None)
    handed = await putting
    assert (handed.stored, handed.passed) == ([True, False, True, True], 1)
    assert str(handed.failure) == "1 of 4 messages were not stored by another broker"
    assert (place.bodies(), place.delivered, place.destination.end_offset) == ([], [], 0)


async def test_an_acting_master_whose_messages_are_all_stored_retries_none(place):
    async def remote_put(one):
        return True

    place.destination.remote_put = remote_put
    handed = await place.destination.put([None, *several("a")])
    assert (handed.stored, handed.failure) == ([True, True], None)


async def test_a_delivery_runs_to_its_end_here_and_in_a_task_elsewhere(place):
    steps = []

    async def deliver(name):
        await place.destination.put([])
        steps.append(name)

    place.destination.run(deliver("here"), "delivery")
    assert steps == ["here"]

    async def remote_put(one):
        return True

    place.destination.remote_put = remote_put
    place.destination.run(deliver("elsewhere"), "delivery")
    assert steps == ["here"]
    await place.destination.finish()
    assert steps == ["here", "elsewhere"]


async def test_a_delivery_into_the_own_log_that_waits_is_a_mistake(place):
    with pytest.raises(AssertionError, match="a delivery into the own log never waits"):
        place.destination.run(asyncio.sleep(0), "delivery")
