"""Faults that a test injects into a broker. Each fault has a *dial*, which sets how often or how long it occurs.

===================  ==================================================================================================
dial                 effect
===================  ==================================================================================================
``duplicate``        share of pulls (0 to 1) that begin up to 8 messages earlier, after a tenth of a second, so that
                     messages are delivered again. A group gets no message more than twice, so that tests end.
``delay``            maximum delay in seconds: every request waits for a random time up to this. Requests of one
                     connection can overtake each other, as in the thread pools of Java's broker.
``flush_timeout``    share of sends that are stored, but answered with FLUSH_DISK_TIMEOUT.
``busy``             share of sends that are not stored, and answered with SYSTEM_BUSY.
``disconnect``       share of requests at which the connection is cut: half of them before the request is handled, half
                     of them after it, so that the answer is lost.
``rebalance_every``  interval in seconds at which all members of all groups are notified that the members have changed.
===================  ==================================================================================================

Sends are SEND_MESSAGE in its three forms. Requests of slaves to their master are affected. Name servers and the
broker's own requests are not affected. The seed fixes the random numbers; the order of requests depends on the network.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable
from typing import TypedDict, Unpack, cast

from msgspec.structs import replace

from rmqkit.broker.tables.clients import ClientTable
from rmqkit.errors import HeaderError, SettingsError
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, Frame, decode_fields, decode_header, each_frame, reply, request
from rmqkit.protocol.core import Acks, Sends
from rmqkit.protocol.schemas.clients import ConsumerGroupRequest
from rmqkit.protocol.schemas.pull import PullMessageRequest
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import Refusal, Router

__all__ = ["Chaos", "ChaosDispatch", "Dials"]

_SENDS = (RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)
_PULLS = (RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE)
_REPEATED_MAX = 8
_REPEAT_SECONDS = 0.1
"""Delay of a repeated pull: a client drops the duplicate of a message that it is still handling."""
_BUSY = "[CHAOS]broker busy, start flow control for a while"


class Dials(TypedDict, total=False):
    """The values of the dials. A missing dial is off. If ``seed`` is missing, the seed is random."""

    duplicate: float
    delay: float
    flush_timeout: float
    busy: float
    disconnect: float
    rebalance_every: float
    seed: int


_SHARES = ("duplicate", "flush_timeout", "busy", "disconnect")
_SECONDS = ("delay", "rebalance_every")


class Chaos:
    """The values of all dials, and the counts of the injected faults.

    Raises SettingsError: a share is not between 0 and 1, a time is negative, or there is no such dial.

    Attributes:
        happened: the number of faults that each dial caused.
        seed: the seed of the random numbers. The same seed produces the same random numbers.
    """

    def __init__(self, **dials: Unpack[Dials]) -> None:
        given = cast("dict[str, float]", dials)
        for name, share in given.items():
            if name not in Dials.__annotations__:
                raise SettingsError(f"chaos: there is no dial {name}: there are {', '.join(Dials.__annotations__)}")
            if name in _SHARES and not 0 <= share <= 1:
                raise SettingsError(f"chaos: {name} is {share}: it is a share, give 0 to 1")
            if name in _SECONDS and share < 0:
                raise SettingsError(f"chaos: {name} is {share}: it is seconds, give 0 or more")
        self.dials = {name: given[name] for name in (*_SHARES, *_SECONDS) if given.get(name)}
        self.seed = dials.get("seed", random.SystemRandom().getrandbits(32))
        self.happened: Counter[str] = Counter()
        self._dice = random.Random(self.seed)
        self._repeated: dict[tuple[str, str, int], int] = {}

    def __str__(self) -> str:
        listed = "".join(f"{name}={value:g}, " for name, value in self.dials.items())
        happened = ", ".join(f"{count} {name}" for name, count in sorted(self.happened.items())) or "nothing yet"
        return f"chaos({listed}seed={self.seed}) did {happened}"

    def falls(self, dial: str) -> bool:
        """Draw a random number for a dial that is a share. If the dial takes effect, count that and return True."""
        share = self.dials.get(dial, 0.0)
        if not share or self._dice.random() >= share:
            return False
        self.happened[dial] += 1
        return True

    def is_heads(self) -> bool:
        return self._dice.random() < 0.5

    def pause_seconds(self) -> float:
        if "delay" not in self.dials:
            return 0.0
        self.happened["delay"] += 1
        return self._dice.uniform(0, self.dials["delay"])

    def earlier(self, pull: PullMessageRequest) -> int:
        """Return the new offset of a pull: up to 8 messages earlier, but not before the end of the last repetition."""
        place = (pull.consumer_group, pull.topic, pull.queue_id)
        begin = max(pull.queue_offset - self._dice.randint(1, _REPEATED_MAX), self._repeated.get(place, 0))
        if begin >= pull.queue_offset or not self.falls("duplicate"):
            return pull.queue_offset
        self._repeated[place] = pull.queue_offset
        return begin


class ChaosDispatch(Router):
    """A request router that injects the faults of its chaos dials (see the table above). While all dials are off, it is
    a normal router. Use it only on the event loop."""

    def __init__(self, refusal: Refusal | None = None) -> None:
        super().__init__(refusal)
        self.clients: ClientTable | None = None
        self._chaos: Chaos | None = None
        self._round: asyncio.TimerHandle | None = None

    def turn(self, chaos: Chaos | None) -> None:
        """Set the dials. None switches all dials off."""
        self._chaos = chaos if chaos is not None and chaos.dials else None
        if self._round is not None:
            self._round.cancel()
            self._round = None
        if self._chaos is not None and (seconds := self._chaos.dials.get("rebalance_every")):
            self._round = asyncio.get_running_loop().call_later(seconds, self._tell_members, self._chaos)

    async def close(self) -> None:
        self.turn(None)
        await super().close()

    def remaining(self, connection: Connection, units: list[Frame | Sends | Acks]) -> Iterable[Frame]:
        return each_frame(units) if self._chaos is not None else super().remaining(connection, units)

    def handle(self, connection: Connection, command: Command) -> None:
        chaos = self._chaos
        if chaos is None:
            super().handle(connection, command)
        elif chaos.falls("disconnect"):
            if chaos.is_heads():
                super().handle(connection, command)
            connection.abort()
        elif command.code in _SENDS and chaos.falls("busy"):
            if not command.is_one_way:
                connection.send(reply(command, ResponseCode.SYSTEM_BUSY, _BUSY))
        else:
            pause_seconds, pull = chaos.pause_seconds(), _begun_earlier(chaos, command)
            if pull is not None:
                command, pause_seconds = pull, pause_seconds + _REPEAT_SECONDS
            elif command.code in _SENDS and chaos.falls("flush_timeout"):
                connection = cast("Connection", _Doubtful(connection))
            if pause_seconds:
                asyncio.get_running_loop().call_later(pause_seconds, super().handle, connection, command)
            else:
                super().handle(connection, command)

    def _tell_members(self, chaos: Chaos) -> None:
        groups = {} if self.clients is None else self.clients.all_consumers
        for name, group in groups.items():
            for connection in group.members:
                header = ConsumerGroupRequest(consumer_group=name)
                connection.send(request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, header, one_way=True))
                chaos.happened["rebalance"] += 1
        self.turn(chaos)


class _Doubtful:
    """A connection that answers FLUSH_DISK_TIMEOUT in place of success."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> object:
        return getattr(self._connection, name)

    def send(self, answer: Command) -> None:
        if answer.code == ResponseCode.SUCCESS:
            answer.code = ResponseCode.FLUSH_DISK_TIMEOUT
        self._connection.send(answer)


def _begun_earlier(chaos: Chaos, command: Command) -> Command | None:
    """Return the changed pull if the dial ``duplicate`` takes effect."""
    if command.code not in _PULLS or "duplicate" not in chaos.dials:
        return None
    try:
        pull = decode_header(command, PullMessageRequest)
    except HeaderError:
        return None  # the handler reports the error
    begin = chaos.earlier(pull)
    if begin == pull.queue_offset:
        return None
    return replace(command, fields={**decode_fields(command), "queueOffset": str(begin)})
