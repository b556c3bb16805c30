"""The port that Prometheus reads: answers to good and bad requests, and the bound of connections."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager

import pytest

from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.exporter import Exporter
from rmqkit.metrics import histogram
from rmqkit.remoting.listening import ListenFailed
from tests.client.peers import until
from tests.waiting import SECONDS

GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


@asynccontextmanager
async def exporter(gather):
    made = Exporter()
    await made.bind("127.0.0.1", 0)
    try:
        await made.serve(gather, {"node_id": "n"}, histogram("rmqkit_event_loop_lag"), SYSTEM_CLOCK)
        yield made
    finally:
        await made.close()


async def seven():
    return {"rocketmq_topic_number": {(): 7}}


async def connect(made):
    host, _, port = made.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def ask(made, request, *, ends=False):
    reader, writer = await connect(made)
    writer.write(request)
    if ends:
        writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), SECONDS)
    writer.close()
    return answer


async def test_metrics_are_reported_with_their_type_and_length():
    async with exporter(seven) as made:
        head, _, body = (await ask(made, GET)).partition(b"\r\n\r\n")
        assert head.splitlines()[0] == b"HTTP/1.1 200 OK"
        assert b"Content-Type: text/plain; version=0.0.4; charset=utf-8" in head
        assert f"Content-Length: {len(body)}".encode() in head
        assert body.splitlines()[-1] == b'rocketmq_topic_number{node_id="n"} 7.0'
        again = await ask(made, GET.replace(b"/metrics", b"/metrics?name[]=x"))
        assert again.endswith(body)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /metrics/ HTTP/1.0\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 2\r\n\r\nxx", b"405"),
        (b"\x16\x03\x01\x00\xa5 \r\n\r\n", b"400"),
        (b"\r\n\r\n", b"400"),
        (b"GET /metrics\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/2.0\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 9_000, b"431"),
    ],
)
async def test_bad_requests_get_one_line(request_bytes, status):
    async with exporter(seven) as made:
        answer = await ask(made, request_bytes)
        assert answer.split()[1] == status
        assert answer.endswith(b"\n")
        assert b"rocketmq" not in answer
        assert (await ask(made, GET)).startswith(b"HTTP/1.1 200")


async def test_half_a_request_gets_nothing():
    async with exporter(seven) as made:
        assert await ask(made, GET[:20], ends=True) == b""


async def test_idle_connections_keep_nobody_out():
    async with exporter(seven) as made:
        idle = []
        for count in range(1, 41):
            idle.append(await connect(made))
            await until(lambda count=count: len(made._requests) >= min(count, 16), "it is accepted")
        assert (await ask(made, GET)).startswith(b"HTTP/1.1 200")
        for reader, writer in idle[:25]:
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b"", "the longest idle one made room"
            writer.close()
        for reader, writer in idle[25:]:
            writer.write(GET)
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()


async def test_too_many_requests_at_a_time_are_sent_away_and_the_others_served():
    let_go = asyncio.Event()

    async def gather():
        await let_go.wait()
        return await seven()

    async with exporter(gather) as made:
        waiting = [await connect(made) for _ in range(16)]
        for _, writer in waiting:
            writer.write(GET)
        await until(lambda: len(made._requests) == 16 and not made._silent, "all of them are served")
        reader, writer = await connect(made)
        assert (await reader.read()).startswith(b"HTTP/1.1 503")  # a request might find the connection closed
        writer.close()
        let_go.set()
        for reader, writer in waiting:
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()


async def test_a_failure_is_reported_and_the_next_request_served(caplog):
    rounds = []

    async def gather():
        rounds.append(1)
        if len(rounds) == 1:
            raise OSError(5, "Input/output error")
        return await seven()

    async with exporter(gather) as made:
        assert (await ask(made, GET)).startswith(b"HTTP/1.1 500")
        assert (await ask(made, GET)).startswith(b"HTTP/1.1 200")
    assert "cannot collect the metrics" in caplog.text


async def test_a_taken_port_is_one_line():
    async with exporter(seven) as made:
        port = int(made.address.rpartition(":")[2])
        with pytest.raises(ListenFailed, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*, or choose another port"):
            await Exporter().bind("127.0.0.1", port)
