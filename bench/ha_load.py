"""The load on the masters that `ha_bench` measures: one thread that writes prepared frames, some microseconds each, so
that master and slave can use the CPU.
"""

from __future__ import annotations

import os
import selectors
import socket
import statistics
import time
from collections import deque
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command, FrameSplitter, decode_command, encode_command, request
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.schemas.brokers import HaRuntimeInfo
from rmqkit.protocol.schemas.send import SendMessageV2Request

__all__ = ["QUEUES", "TOPIC", "Load"]

TOPIC, QUEUES = "BenchHa", 4
FRAMES = 2000
READ_BYTES = 1 << 18
SAMPLE_SECONDS = 0.002
PACED_CONNECTIONS, PACED_TOGETHER = 8, 64
SILENT_SECONDS_MAX = 30.0
SUCCESS = b'"code":0,'


class Load:
    """A sender with one thread. Every answer must be a success."""

    def __init__(self, body_bytes: int) -> None:
        self._frames = [_send_frame(number, body_bytes) for number in range(FRAMES)]

    def run(self, address: str, count: int, connections: int, under_way: int) -> float:
        """Send ``count`` messages. Return the seconds."""
        frames = cycle(self._frames)
        with Connections(address, connections) as peers:
            begun, left, answered = time.perf_counter(), count, 0
            for peer in peers.all:
                part = min(left, under_way)
                peer.sendall(b"".join(islice(frames, part)))
                left -= part
            while answered < count:
                for peer, answers in peers.answers(None):
                    answered += answers
                    part = min(left, answers)
                    if part:
                        peer.sendall(b"".join(islice(frames, part)))
                        left -= part
            return time.perf_counter() - begun

    def paced(self, address: str, rate: float, seconds: float) -> dict[str, float]:
        """Send at a steady rate. Return the slave's lag in ms."""
        frames, lag, sent, answered = cycle(self._frames), Lag(), 0, 0
        with Connections(address, PACED_CONNECTIONS) as peers, Connections(address, 1) as asking:
            begun, turns = time.perf_counter(), cycle(peers.all)
            asked_at, is_asked = 0.0, False
            while (now := time.perf_counter() - begun) < seconds:
                if (due := min(int(now * rate) - sent, PACED_TOGETHER)) > 0:
                    next(turns).sendall(b"".join(islice(frames, due)))
                    sent += due
                if not is_asked and now - asked_at >= SAMPLE_SECONDS:
                    asked_at, is_asked = now, True
                    asking.all[0].sendall(_STATUS_FRAME)
                answered += sum(answers for _, answers in peers.answers(SAMPLE_SECONDS / 4))
                for body in asking.bodies():
                    is_asked = False
                    lag.note(asked_at, time.perf_counter() - begun, decode_as(body, HaRuntimeInfo))
            while answered < sent:
                answered += sum(answers for _, answers in peers.answers(None))
        return lag.figures() | {"messages_per_second": round(sent / seconds)}


class Connections:
    """Sockets to one broker."""

    def __init__(self, address: str, count: int) -> None:
        host, _, port = address.rpartition(":")
        self.all = [socket.create_connection((host, int(port))) for _ in range(count)]
        self._tails = dict.fromkeys(self.all, b"")
        self._splitter = FrameSplitter()
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Connections:
        for peer in self.all:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(peer, selectors.EVENT_READ)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._selector.close()
        for peer in self.all:
            peer.close()

    def answers(self, timeout_seconds: float | None) -> Iterator[tuple[socket.socket, int]]:
        """Yield the sockets that got answers, with their number, after waiting for the first. Only successes are
        counted, so a failure shows at the end as a missing answer."""
        ready = self._selector.select(SILENT_SECONDS_MAX if timeout_seconds is None else timeout_seconds)
        assert ready or timeout_seconds is not None, f"no success for {SILENT_SECONDS_MAX:g} s: {self._tails}"
        for key, _ in ready:
            peer: Any = key.fileobj
            chunk = peer.recv(READ_BYTES)
            assert chunk, "the connection is open"
            chunk = self._tails[peer] + chunk
            self._tails[peer] = chunk[1 - len(SUCCESS) :]
            yield peer, chunk.count(SUCCESS)

    def bodies(self) -> Iterator[bytes]:
        """Yield the answers received on the only connection, without waiting."""
        for key, _ in self._selector.select(0):
            peer: Any = key.fileobj
            for frame in self._splitter.feed(peer.recv(READ_BYTES)):
                yield decode_command(frame).payload


def _send_frame(number: int, body_bytes: int) -> bytes:
    key = f"{number:032X}"
    properties = f"KEYS\x01key{number}\x02UNIQ_KEY\x01{key}\x02WAIT\x01true\x02TAGS\x01Tag{number % 4}\x02"
    now_ms = time.time_ns() // 1_000_000
    header = SendMessageV2Request("bench", TOPIC, "TBW102", 4, number % QUEUES, 0, now_ms, 0, properties, 0)
    return b"".join(encode_command(request(RequestCode.SEND_MESSAGE_V2, header, os.urandom(body_bytes))))


_STATUS_FRAME = b"".join(encode_command(Command(RequestCode.GET_BROKER_HA_STATUS)))


class Lag:
    """The lag of a slave in ms, from samples of the master's end and the slave's."""

    def __init__(self) -> None:
        self._ms: list[float] = []
        self._bytes: list[int] = []
        self._ends: deque[tuple[float, int]] = deque()

    def note(self, asked_at: float, answered_at: float, state: HaRuntimeInfo) -> None:
        """Record a state that was read between these times, in seconds."""
        (slave,) = state.ha_connection_info
        end, copied = state.master_commit_log_max_offset, slave.slave_ack_offset
        self._ends.append((asked_at, end))
        while len(self._ends) > 1 and self._ends[1][1] <= copied:
            self._ends.popleft()
        self._bytes.append(end - copied)
        self._ms.append((answered_at - self._ends[0][0]) * 1000 if end > copied else 0.0)

    def figures(self) -> dict[str, float]:
        cuts = statistics.quantiles(self._ms, n=100)
        return {
            "samples": len(self._ms),
            "lag_p50_ms": round(cuts[49], 2),
            "lag_p99_ms": round(cuts[98], 2),
            "lag_ms_max": round(max(self._ms), 2),
            "lag_bytes_max": max(self._bytes),
        }
