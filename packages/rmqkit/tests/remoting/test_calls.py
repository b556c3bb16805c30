"""The calls of a connection: their numbers, their deadlines, and their ends. No sockets are used."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from rmqkit.errors import ConnectionLost, ProtocolError, RequestTimedOut
from rmqkit.protocol.command import Command, encode_command, reply
from rmqkit.remoting.connection import Connection
from tests.remoting.wire import Wire, opened


def virtual_loop() -> Any:
    """Return the loop of the simulated world, with `go_on`."""
    return asyncio.get_running_loop()


def answer_bytes(opaque: int) -> bytes:
    return b"".join(encode_command(reply(Command(7, opaque), remark=f"answer {opaque}")))


async def ticks(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def ended_ms(answer: asyncio.Future[Command]) -> list[int]:
    """Return a list to which the end of a call adds the milliseconds since now."""
    loop, ends = asyncio.get_running_loop(), list[int]()
    began = loop.time()
    answer.add_done_callback(lambda _: ends.append(round((loop.time() - began) * 1000)))
    return ends


# -- numbers and answers


async def test_the_numbers_of_calls_count_from_1_and_wrap_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmqkit.remoting.connection._OPAQUE_MASK", 3)
    connection, wire = opened()
    for opaque in (1, 2, 3, 0, 1, 2):
        answer = connection.call(Command(7, 99), 1000)
        await asyncio.sleep(0)
        assert f'"opaque":{opaque},'.encode() in wire.writes[-1]
        connection.data_received(answer_bytes(opaque))
        assert (await answer).remark == f"answer {opaque}"


async def test_an_answer_ends_the_call_of_its_number_only() -> None:
    connection, _ = opened()
    first, second = (connection.call(Command(7, 0), 1000) for _ in range(2))
    connection.data_received(answer_bytes(3))
    connection.data_received(answer_bytes(2))
    assert (first.done(), second.done()) == (False, True)
    connection.data_received(answer_bytes(1) + answer_bytes(1))
    assert [one.result().remark for one in (first, second)] == ["answer 1", "answer 2"]


async def test_a_cancelled_call_ignores_its_answer_its_deadline_and_the_end_of_the_connection() -> None:
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    connection, wire = opened()
    answered, late, left = (connection.call(Command(7, 0), ms) for ms in (500, 500, 2000))
    for one in (answered, late, left):
        one.cancel()
    connection.data_received(answer_bytes(1))
    await asyncio.sleep(1)
    connection.connection_lost(None)
    assert not wire.is_closed
    assert errors == []


async def test_a_command_that_cannot_be_encoded_leaves_no_call() -> None:
    connection, _ = opened()
    with pytest.raises((ProtocolError, ValueError, TypeError)):
        connection.call(Command(7, 0, remark=cast("str", object())), 1000)
    answer = connection.call(Command(7, 0), 500)
    connection.connection_lost(OSError("the cable was cut"))
    with pytest.raises(ConnectionLost, match="the cable was cut"):
        await answer


async def test_the_end_of_a_connection_ends_its_calls_once_and_stops_their_timer() -> None:
    connection, _ = opened()
    answer = connection.call(Command(7, 0), 500)
    connection.connection_lost(None)
    with pytest.raises(ConnectionLost, match="the peer closed it"):
        await answer
    await asyncio.sleep(1)
    with pytest.raises(ConnectionLost, match="the peer closed it"):
        await connection.call(Command(7, 0), 500)


# -- deadlines


async def test_each_call_ends_when_its_own_time_is_over() -> None:
    connection, _ = opened()
    ends = [ended_ms(connection.call(Command(7, 0), ms)) for ms in (500, 250, 250, 10_000)]
    await asyncio.sleep(20)
    assert ends == [[500], [250], [250], [10_000]]


async def test_a_call_without_time_ends_at_once() -> None:
    connection, _ = opened()
    later, ended = ended_ms(connection.call(Command(7, 0), 1)), ended_ms(connection.call(Command(7, 0), -1000))
    await asyncio.sleep(0.0005)
    assert (later, ended) == ([], [0])


async def test_a_call_that_begins_later_than_another_may_end_before_it() -> None:
    connection, _ = opened()
    slow = ended_ms(connection.call(Command(7, 0), 900))
    await asyncio.sleep(0.1)
    quick = ended_ms(connection.call(Command(7, 0), 300))
    await asyncio.sleep(2)
    assert (slow, quick) == ([900], [300])


async def test_a_call_that_ends_in_time_names_its_code_and_its_time() -> None:
    connection, _ = opened(wire=Wire(("10.0.0.9", 10911)))
    with pytest.raises(RequestTimedOut) as caught:
        await connection.call(Command(10, 0), 250)
    assert (caught.value.address, caught.value.code, caught.value.timeout_ms) == ("10.0.0.9:10911", 10, 250)
    assert "did not answer SEND_MESSAGE (10) within 250 ms" in str(caught.value)


@pytest.mark.parametrize(
    ("late_ms", "end_ms"), [(0, 500), (90, 590), (110, 720), (200, 900), (500, 1500), (9500, 10_500)]
)
async def test_a_standstill_of_more_than_100_ms_extends_a_call_by_that_time_but_not_beyond_its_own(
    late_ms: int, end_ms: int
) -> None:
    """A loop that stood still has neither written requests nor read answers."""
    connection, _ = opened()
    ends = ended_ms(connection.call(Command(7, 0), 500))
    virtual_loop().go_on((500 + late_ms) / 1000)
    await asyncio.sleep(20)
    assert ends == [end_ms]


async def test_a_call_is_extended_once_only() -> None:
    connection, _ = opened()
    ends = ended_ms(connection.call(Command(7, 0), 500))
    virtual_loop().go_on(10)
    await asyncio.sleep(0.4)
    assert ends == []
    virtual_loop().go_on(10)
    await asyncio.sleep(0.001)
    assert ends == [20_400]


async def test_a_standstill_extends_the_calls_whose_time_is_over_and_no_other() -> None:
    connection, _ = opened()
    over, running = (ended_ms(connection.call(Command(7, 0), ms)) for ms in (500, 1500))
    virtual_loop().go_on(0.7)
    await asyncio.sleep(20)
    assert (over, running) == ([900], [1500])


# -- answers that wait to be read


def before_the_deadline(connection: Connection, steps: list[Callable[[], None]]) -> asyncio.Future[Command]:
    """Begin a call. Run the steps in the ticks after its deadline, one in each."""
    loop = asyncio.get_running_loop()

    def step() -> None:
        if steps:
            loop.call_soon(step)
            steps.pop(0)()

    loop.call_later(0.5, step)
    return connection.call(Command(7, 0), 500)


@pytest.mark.parametrize("tick", [0, 1])
async def test_an_answer_that_is_read_right_after_the_deadline_counts(tick: int) -> None:
    connection, _ = opened()
    nothing, read = (lambda: None), (lambda: connection.data_received(answer_bytes(1)))
    answer = before_the_deadline(connection, [*[nothing] * tick, read])
    assert (await answer).remark == "answer 1"


async def test_a_call_waits_for_its_answer_as_long_as_data_arrives() -> None:
    connection, _ = opened()
    other = lambda: connection.data_received(answer_bytes(77))  # noqa: E731
    steps = [*[other] * 30, lambda: connection.data_received(answer_bytes(1))]
    assert (await before_the_deadline(connection, steps)).remark == "answer 1"


async def test_a_call_does_not_wait_when_no_more_data_arrives() -> None:
    connection, _ = opened()
    steps = [*[lambda: None] * 8, lambda: connection.data_received(answer_bytes(1))]
    with pytest.raises(RequestTimedOut):
        await before_the_deadline(connection, steps)


async def test_a_peer_that_sends_without_end_does_not_delay_the_end_of_a_call_without_end() -> None:
    connection, _ = opened()
    steps = [lambda: connection.data_received(answer_bytes(77))] * 1000
    with pytest.raises(RequestTimedOut):
        await before_the_deadline(connection, steps)
    assert len(steps) > 800


# -- senders that wait for no answer


@pytest.mark.parametrize(("pieces", "written"), [(15, 0), (16, 16)])
async def test_a_sender_waits_for_the_write_of_16_pieces_and_not_longer(pieces: int, written: int) -> None:
    connection, wire = opened()
    fired: list[int] = []
    asyncio.get_running_loop().call_later(0.5, fired.append, 1)
    connection.send_frame(*[b"a"] * pieces)
    await connection.drain(1000)
    assert (len(wire.data), fired) == (written, [])


async def test_a_sender_waits_until_its_peer_reads() -> None:
    connection, _ = opened()
    connection.pause_writing()
    waiting = [asyncio.ensure_future(connection.drain(1000)) for _ in range(2)]
    await asyncio.sleep(0.5)
    assert [one.done() for one in waiting] == [False, False]
    connection.resume_writing()
    await asyncio.gather(*waiting)
    await connection.drain(1000)


async def test_a_sender_stops_waiting_when_the_connection_closes() -> None:
    connection, _ = opened()
    connection.pause_writing()
    waiting = asyncio.ensure_future(connection.drain(60_000))
    await asyncio.sleep(0)
    connection.connection_lost(None)
    await ticks(3)
    assert waiting.done()
    await waiting


async def test_a_sender_waits_no_longer_than_its_time_and_leaves_the_others_waiting() -> None:
    connection, _ = opened()
    connection.pause_writing()
    other = asyncio.ensure_future(connection.drain(60_000))
    waiting = asyncio.ensure_future(connection.drain(10_000))
    await asyncio.sleep(9.995)
    assert not waiting.done()
    await asyncio.sleep(0.01)
    assert isinstance(waiting.exception(), TimeoutError)
    assert not other.done()
    connection.resume_writing()
    await other
