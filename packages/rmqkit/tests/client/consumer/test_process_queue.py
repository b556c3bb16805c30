"""The process queue: its messages and its offset. Source: behaviour.md §8.6, §8.7."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.client.consumer.process_queue import NOTHING_HELD, ProcessQueue
from rmqkit.protocol.schemas.clients import MessageQueue
from tests.client.messages import received


def process_queue(**limits: int) -> ProcessQueue:
    return ProcessQueue(
        MessageQueue("T", "broker-0", 0), **{"messages_max": 1000, "bytes_max": 1 << 20, "span_max": 2000, **limits}
    )


def test_the_offset_is_the_lowest_message_left():
    held = process_queue()
    messages = held.put([received(offset) for offset in (10, 11, 12)])
    assert held.remove(messages[1]) == 10
    assert held.remove(messages[0]) == 12
    assert held.remove(messages[2]) == 13
    assert len(held) == 0
    assert held.body_bytes == 0


def test_behind_the_last_message_the_offset_is_that_of_the_next_pull():
    held = process_queue()
    first, last = held.put([received(offset) for offset in (10, 12)])
    held.next_offset = 50
    assert held.remove(first) == 12
    assert held.remove(last) == 50
    (later,) = held.put([received(60)])  # the loop sets the next offset after the messages are held
    assert held.remove(later) == 61


def test_an_empty_queue_reports_no_offset():
    assert process_queue().remove(received(5)) == NOTHING_HELD


def test_a_message_that_is_here_already_is_not_consumed_twice():
    held = process_queue()
    (first,) = held.put([received(10)])
    again = received(10)
    assert held.put([again, received(11)])[0].queue_offset == 11
    assert first in held
    assert again not in held
    assert held.remove(again) == 10, "removing what is not here changes nothing"


@pytest.mark.parametrize(
    ("limits", "fitting"),
    [({"messages_max": 3}, 3), ({"bytes_max": 20}, 2), ({"span_max": 5}, 6)],
    ids=["messages", "bytes", "span"],
)
def test_each_limit_ends_the_room(limits, fitting):
    held = process_queue(**limits)
    put = 0
    while held.has_room:
        held.put([received(put, body=b"0123456789")])
        put += 1
    assert put == fitting


def test_a_stuck_message_ends_the_room_by_its_span():
    held = process_queue(span_max=100)
    stuck, *others = held.put([received(offset) for offset in range(101)])
    for message in others:
        held.remove(message)
    assert len(held) == 1
    assert not held.has_room
    assert held.remove(stuck) == 101
    assert held.has_room


def test_the_lowest_messages_are_found_without_removing_them():
    held = process_queue()
    held.put([received(offset) for offset in (3, 4, 9)])
    assert [message.queue_offset for message in held.lowest(2)] == [3, 4]
    assert len(held) == 3


async def test_waiting_for_room_ends_when_a_message_is_consumed():
    held = process_queue(messages_max=1)
    (message,) = held.put([received(0)])
    waiting = asyncio.create_task(held.wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    held.remove(message)
    await waiting


async def test_waiting_for_room_ends_when_the_queue_is_dropped():
    held = process_queue(messages_max=1)
    held.put([received(0)])
    waiting = asyncio.create_task(held.wait_for_room())
    await asyncio.sleep(0)
    held.drop()
    await waiting


async def test_waiting_for_handlers_reports_whether_they_ended():
    held = process_queue()
    assert await held.wait_for_handlers(0)
    held.handler_starts()
    assert not await held.wait_for_handlers(1)
    waiting = asyncio.create_task(held.wait_for_handlers(10_000))
    await asyncio.sleep(0)
    held.handler_ends()
    assert await waiting


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=60))
def test_it_agrees_with_a_plain_set(steps):
    held, model, last, messages = process_queue(), {}, -1, {}
    for is_put, offset in steps:
        if is_put:
            message = received(offset)
            fresh = held.put([message])
            assert bool(fresh) == (offset not in model)
            if fresh:
                model[offset] = messages[offset] = message
                last = max(last, offset)
        elif offset in messages:
            had_any = bool(model)
            if model.get(offset) is messages[offset]:
                del model[offset]
            expected = (min(model) if model else last + 1) if had_any else NOTHING_HELD
            assert held.remove(messages[offset]) == expected
        assert len(held) == len(model)


async def test_a_paused_queue_has_no_room_until_it_is_resumed_or_dropped():
    held = process_queue()
    held.is_paused = True
    waiting = [asyncio.create_task(held.wait_for_room()), asyncio.create_task(held.wait_until_resumed())]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    held.is_paused = False
    await asyncio.gather(*waiting)
    held.is_paused = True
    waiting = [asyncio.create_task(held.wait_for_room()), asyncio.create_task(held.wait_until_resumed())]
    await asyncio.sleep(0)
    held.drop()
    await asyncio.gather(*waiting)


def test_bounds_are_the_lowest_and_the_highest_offset():
    held = process_queue()
    assert held.bounds == (0, 0)
    messages = held.put([received(offset) for offset in (3, 4, 9)])
    assert (held.bounds, held.lowest(1)) == ((3, 9), messages[:1])
    held.remove(messages[0])
    assert (held.bounds, held.lowest(1)) == ((4, 9), messages[1:2])
