"""Connections that tell how long answers take; a server makes them in place of plain ones when metrics are told.

A request's time begins with the read that brought it (`Connection.active_ms`) and ends, for all that are answered at
once, with the one write of their answers: nothing is kept of such a request but those milliseconds,
and no clock is asked for it. Of one that is answered later the connection keeps request and time by its opaque. Answers
that leave as ready frames (`send_frame`) are counted by who makes them. Loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rmqkit.metrics.values import Gathered, Histogram, RpcLatency
from rmqkit.protocol.command import RESPONSE, Command, decode_command
from rmqkit.protocol.frame import Frame
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.server import RemotingServer

_HELD_MAX = 100_000
_NOTED_MAX = 2048
_FOLDED_AT = 512
_CODE_BITS = 16
_CODE_MAX = (1 << _CODE_BITS) - 1
_NOBODY: tuple[None, float] = (None, 0.0)


@dataclass(slots=True)
class Meter:
    """What the connections of one server tell. ``also``: by code, who else wants request, answer and milliseconds."""

    latency: RpcLatency = field(default_factory=RpcLatency)
    also: Mapping[int, Callable[[Command, Command, float], None]] = field(default_factory=dict)

    noted: dict[int, list[float]] = field(default_factory=dict)
    """Milliseconds of successful answers that nobody else wants, by request code << 16 | response code, until `fold`
    enters them: many at once cost a fraction of what they cost one by one."""

    def answered(self, request: Command, answer: Command, ms: float, is_held: bool, result: str) -> None:
        self.latency[request.code, answer.code, is_held, result].observe(ms)
        if request.code in self.also:
            self.also[request.code](request, answer, ms)
        elif not is_held and result == "success" and 0 <= answer.code <= _CODE_MAX and len(self.noted) < _NOTED_MAX:
            self.noted.setdefault(request.code << _CODE_BITS | answer.code, [])

    def gather(self) -> Mapping[tuple[str, ...], float | Histogram]:
        """The values of ``rocketmq_rpc_latency``."""
        self.fold()
        return self.latency.gather()

    def fold(self) -> None:
        """Enter what was noted."""
        for key, several in self.noted.items():
            if several:
                self.latency[key >> _CODE_BITS, key & _CODE_MAX, False, "success"].observe_all(several)
                several.clear()


class MeteredConnection(Connection):
    """A connection whose answers are timed."""

    __slots__ = ("_answered", "_held", "_meter", "_noted", "_request")
    # As attributes of its dictionary they would be more than CPython keeps inline, and all of them slow to find.

    def __init__(self, *arguments: Any, meter: Meter, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self._meter = meter
        self._noted = meter.noted
        self._request: Command | None = None
        self._answered: list[list[float]] = []
        self._held: dict[int, tuple[Command, float]] = {}

    def send(self, command: Command) -> None:
        Connection.send(self, command)
        request = self._request
        if request is not None and request.opaque == command.opaque and command.flag & RESPONSE:
            self._request = None
            noted = self._noted.get(request.code << _CODE_BITS | command.code)
            if noted is not None and self._unsent:  # it was taken, so the connection is open
                if not self._answered:
                    self._loop.call_soon(self._count_answered, self.active_ms)
                self._answered.append(noted)
            else:
                self._tell(request, command, self.active_ms, is_held=False)
        elif command.flag & RESPONSE:
            request, since_ms = self._held.pop(command.opaque, _NOBODY)
            if request is not None:
                self._tell(request, command, since_ms, is_held=True)

    def _tell(self, request: Command, answer: Command, since_ms: float, *, is_held: bool) -> None:
        result = "success" if self.is_open else "write_channel_failed"
        self._meter.answered(request, answer, self._clock.monotonic_ms() - since_ms, is_held, result)

    def _count_answered(self, since_ms: float) -> None:
        """Count what was answered at once, when it is written: a look after each write would make sends slower."""
        ms = self.active_ms - since_ms
        for noted in self._answered:
            noted.append(ms)
        if len(self._answered[0]) >= _FOLDED_AT:
            self._meter.fold()
        self._answered.clear()

    def on_one_way_reply(self, request: Command, answer: Command) -> None:
        self._meter.answered(request, answer, self._clock.monotonic_ms() - self.active_ms, False, "oneway")

    def _handle(self, frame: Frame) -> None:
        command = decode_command(frame)
        if command.flag & RESPONSE:
            self._settle(command)
            return
        self._request = command
        self._router.handle(self, command)
        if self._request is not None:
            self._keep()

    def _keep(self) -> None:
        """Keep the request that was handled and not answered: it is answered later, or never."""
        request, self._request = self._request, None
        if request is not None and not request.is_one_way:
            if len(self._held) >= _HELD_MAX:
                self._held.pop(next(iter(self._held)))
            self._held[request.opaque] = request, self.active_ms


def lane_values(lanes: Mapping[str, tuple[int, int]], servers: Sequence[RemotingServer]) -> Gathered:
    """Lanes by name with the requests in each and how many there may be, and the connections of servers that share
    their limits."""
    return {
        **(servers[0].limits.gather() if servers else {}),
        "rmqkit_lane_requests": {(name,): requests for name, (requests, _) in lanes.items()},
        "rmqkit_lane_requests_max": {(name,): requests_max for name, (_, requests_max) in lanes.items()},
        "rmqkit_connections": {(): sum(len(server.connections) for server in servers)},
    }
