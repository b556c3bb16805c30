"""Pops that wait for a message: their number, their end, and the arrivals that wake them (behaviour.md §4.8)."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.broker.pop.service import PopLongPolling, WaitingPop
from rmqkit.broker.settings import BrokerSettings
from rmqkit.store.message_store import DispatchRequest

BEGAN_MS = 1_800_000_000_000


class LoopClock:
    """A clock in whole milliseconds of the loop's time."""

    def __init__(self):
        self.loop = asyncio.get_running_loop()
        self.began = self.loop.time()

    def now_ms(self):
        return BEGAN_MS + round((self.loop.time() - self.began) * 1000)

    def monotonic_ms(self):
        return self.loop.time() * 1000


class Waits:
    """The waiting requests of a broker, and the retries that they got.

    Attributes:
        asked: the number of requests that were asked whether they want a message.
        retries: name of the request, whether it may be held again, and milliseconds since the beginning.
    """

    def __init__(self, **settings):
        self.clock = LoopClock()
        self.polling = PopLongPolling(BrokerSettings(**settings), self.clock)
        self.retries = []
        self.asked = 0

    def hold(self, name, *, queue=-1, ms=10_000, look_ms=None, topic="T", group="g", wants=True, peer="c", fault=None):
        def retry(may_hold):
            self.retries.append((name, may_hold, self.clock.now_ms() - BEGAN_MS))
            if fault is not None:
                raise fault

        now_ms = self.clock.now_ms()
        look_at_ms = None if look_ms is None else now_ms + look_ms
        held = WaitingPop(peer, topic, group, queue, now_ms + ms, retry, self.filter(wants), look_at_ms)
        return self.polling.hold(held)

    def filter(self, wants):
        def asked(_):
            self.asked += 1
            return wants

        return asked

    @property
    def names(self):
        return [name for name, _, _ in self.retries]

    async def after(self, *arrivals):
        """Return the names of the requests that messages wake, given by topic and queue id."""
        self.polling.arrived([DispatchRequest(topic, queue_id, 0, 0, 0, 0, 0, 0, b"") for topic, queue_id in arrivals])
        assert self.retries == [], "a put of messages must not run a pop"
        await asyncio.sleep(0)
        return self.names


# -- how many wait


async def test_no_more_requests_wait_than_the_limit_of_all():
    waits = Waits(pops_held_max=2)
    assert [waits.hold(name, queue=number) for number, name in enumerate("abc")] == [True, True, False]
    assert len(waits.polling) == 2
    waits.polling.wake("T", "g", 0)
    await asyncio.sleep(0)
    assert len(waits.polling) == 1
    assert waits.hold("d")


async def test_no_more_requests_wait_for_a_queue_of_a_group_than_its_limit():
    waits = Waits(pops_held_per_queue_max=2)
    assert [waits.hold(name, queue=1) for name in "abc"] == [True, True, False]
    others = [{"queue": 2}, {"queue": -1}, {"queue": 1, "group": "h"}, {"queue": 1, "topic": "U"}]
    assert [waits.hold("d", **other) for other in others] == [True] * 4
    places = [("T", "g", 1), ("T", "g", 2), ("T", "g", -1), ("T", "h", 1), ("U", "g", 1), ("T", "g", 3)]
    assert [waits.polling.count(*place) for place in places] == [2, 1, 1, 1, 1, 0]


async def test_a_request_is_held_once():
    waits = Waits()
    held = WaitingPop("c", "T", "g", 0, BEGAN_MS + 10, lambda may_hold: None, lambda arrival: True)
    waits.polling.hold(held)
    with pytest.raises(AssertionError, match="a request is held once"):
        waits.polling.hold(held)


async def test_the_requests_of_a_closed_connection_are_dropped_and_not_retried():
    waits = Waits()
    waits.hold("a", peer="gone", ms=500)
    waits.hold("b", peer="here", ms=500)
    waits.hold("c", peer="gone", ms=500)
    waits.polling.connection_closed("gone")
    waits.polling.connection_closed("unknown")
    assert (len(waits.polling), waits.polling.count("T", "g", -1)) == (1, 1)
    await asyncio.sleep(1)
    assert waits.names == ["b"]


async def test_a_connection_that_closes_after_a_message_woke_its_request_gets_no_message():
    waits = Waits()
    waits.hold("a", peer="gone")
    waits.hold("b", peer="here")
    waits.polling.wake("T", "g")
    waits.polling.connection_closed("gone")
    await asyncio.sleep(0)
    assert waits.retries == []
    waits.polling.wake("T", "g")
    await asyncio.sleep(0)
    assert waits.names == ["b"]


async def test_at_the_stop_of_the_broker_all_are_answered_and_no_more_wait():
    waits = Waits()
    for name in "ab":
        waits.hold(name, peer=name)
    waits.polling.close()
    assert waits.retries == [("a", False, 0), ("b", False, 0)]
    assert not waits.hold("c")
    assert len(waits.polling) == 0


# -- their end


@pytest.mark.parametrize(
    ("ms", "look_ms", "expected"),
    [
        (500, None, (False, 500)),
        (10_000, None, (False, 10_000)),
        (500, 200, (True, 200)),
        (500, 479, (True, 479)),
        (500, 480, (False, 480)),
        (500, 600, (False, 500)),
        (0, None, (False, 0)),
        (-700, None, (False, 0)),
    ],
)
async def test_a_request_is_retried_at_its_end_for_the_last_time_and_before_when_a_queue_is_free(ms, look_ms, expected):
    waits = Waits()
    waits.hold("a", ms=ms, look_ms=look_ms)
    await asyncio.sleep(20)
    assert waits.retries == [("a", *expected)]
    assert (len(waits.polling), waits.polling.count("T", "g", -1)) == (0, 0)


async def test_a_woken_request_is_not_retried_at_its_end():
    waits = Waits()
    waits.hold("a", ms=500)
    waits.polling.wake("T", "g")
    await asyncio.sleep(1)
    assert waits.retries == [("a", True, 0)]


async def test_a_request_that_fails_is_logged_and_the_others_are_retried(caplog):
    waits = Waits()
    for name, group in (("a", "g"), ("b", "h")):
        waits.hold(name, group=group, fault=OSError("boom") if name == "a" else None)
    assert await waits.after(("T", 0)) == ["a", "b"]
    assert caplog.messages == ["cannot answer a waiting pop of T by g"]


# -- arrivals


async def test_a_message_wakes_one_request_of_each_group_of_its_topic():
    waits = Waits()
    for name, fields in {"a": {}, "b": {}, "c": {"group": "h"}, "d": {"topic": "U"}}.items():
        waits.hold(name, **fields)
    assert await waits.after(("T", 0), ("T", 0)) == ["a", "c"]
    assert waits.retries[0] == ("a", True, 0)
    assert len(waits.polling) == 2


async def test_messages_of_two_queues_wake_two_requests_of_a_group():
    waits = Waits()
    for name in "abc":
        waits.hold(name)
    assert await waits.after(("T", 0), ("T", 1), ("T", 0)) == ["a", "b"]


@pytest.mark.parametrize(("queue_id", "woken"), [(0, ["any"]), (1, ["one"]), (2, ["any"])])
async def test_a_message_wakes_the_first_request_for_its_queue_or_for_all(queue_id, woken):
    waits = Waits()
    waits.hold("one", queue=1)
    waits.hold("any")
    assert await waits.after(("T", queue_id)) == woken


async def test_a_message_does_not_wake_a_request_whose_filter_refuses_it():
    waits = Waits()
    waits.hold("a", wants=False)
    assert await waits.after(("T", 0)) == []
    waits.hold("b")
    assert await waits.after(("T", 0)) == ["b"]


@pytest.mark.parametrize(("topic", "woken"), [("%RETRY%g_T", ["a"]), ("%RETRY%g+T", ["a"]), ("%RETRY%h_T", [])])
async def test_a_redelivered_message_wakes_a_request_of_its_group_whatever_its_queue_and_filter(topic, woken):
    waits = Waits()
    waits.hold("a", queue=3, wants=False)
    assert await waits.after((topic, 0)) == woken


async def test_a_message_of_a_topic_without_requests_wakes_nobody():
    waits = Waits()
    assert await waits.after(("T", 0)) == []
    waits.hold("a")
    assert await waits.after(("U", 0), ("V", 0)) == []
    assert await waits.after(("U", 0), ("T", 0)) == ["a"]


@pytest.mark.parametrize("count", [32, 33, 100])
async def test_a_message_wakes_all_groups_however_many_wait(count):
    waits = Waits()
    for number in range(count):
        waits.hold(number, group=f"g{number}")
        waits.hold("second", group=f"g{number}")
    await waits.after(("T", 0))
    for _ in range(1000):
        await asyncio.sleep(0)
    assert waits.names == list(range(count))
    assert {may_hold for _, may_hold, _ in waits.retries} == {True}


@pytest.mark.parametrize(("count", "retried"), [(32, 32), (33, 1)])
async def test_more_than_32_woken_requests_let_other_work_run_in_between(count, retried, monkeypatch):
    monkeypatch.setattr("rmqkit.remoting.tasks.Slice.is_over", property(lambda one: len(waits.retries) > 0))
    waits = Waits()
    for number in range(count):
        waits.hold(number, group=f"g{number}")
        waits.polling.wake("T", f"g{number}")
    await asyncio.sleep(0)
    assert len(waits.retries) == retried


@pytest.mark.parametrize(("count", "woken"), [(32, 32), (33, 1)])
async def test_a_message_for_more_than_32_groups_lets_other_work_run_in_between(count, woken, monkeypatch):
    waits = Waits()
    monkeypatch.setattr("rmqkit.remoting.tasks.Slice.is_over", property(lambda one: waits.asked > 0))
    for number in range(count):
        waits.hold(number, group=f"g{number}")
    waits.polling.arrived([DispatchRequest("T", 0, 0, 0, 0, 0, 0, 0, b"")])
    assert waits.asked == woken


@pytest.mark.parametrize(("queue_id", "woken"), [(-1, ["one"]), (0, ["any"]), (1, ["one"]), (2, ["any"])])
async def test_more_messages_of_a_queue_wake_the_next_request_for_it(queue_id, woken):
    waits = Waits()
    waits.hold("other", group="h")
    waits.hold("one", queue=1)
    waits.hold("any")
    waits.polling.wake("T", "g", queue_id)
    assert waits.retries == []
    await asyncio.sleep(0)
    assert waits.names == woken


async def test_requests_that_are_woken_in_one_tick_are_different_ones():
    waits = Waits()
    for name in "abc":
        waits.hold(name)
    waits.polling.wake("T", "g")
    waits.polling.wake("T", "g")
    assert await waits.after() == ["a", "b"]
    waits.polling.wake("T", "g")
    waits.polling.wake("T", "g")
    waits.polling.wake("U", "g")
    waits.polling.wake("T", "h")
    await asyncio.sleep(0)
    assert waits.names == ["a", "b", "c"]
