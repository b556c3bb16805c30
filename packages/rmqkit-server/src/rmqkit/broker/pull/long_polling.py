"""Long polling: pulls that found nothing wait here for a message (``PullRequestHoldService``).

Held pulls are grouped by topic and queue. When the dispatcher reports messages of a queue, the pulls that want the
messages are answered in the same tick. Other pulls are answered when their time is up. If a pull's filter refused the
new messages, the pull is answered within `PASSED_BY_MS`, so that its consumer's offset moves. Nothing is polled, and
the cost of a message does not grow with the pulls of other queues. The end times of pulls are grouped in slots of
`_SLOT_MS`, with one timer per slot. The pulls of a closed connection are dropped. If a message wakes more than
`_AT_ONCE_MAX` pulls, they are answered in slices, in the same order, and the loop runs in between.
Use this module only on the event loop. Source: behaviour.md §4.4.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rmqkit.clock import Clock
from rmqkit.protocol.names import is_light
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.tasks import Turns
from rmqkit.store.message_store import DispatchRequest, StoredSends

__all__ = ["HELD_MAX", "PASSED_BY_MS", "LongPolling", "WaitingPull"]

HELD_MAX = 100_000
"""The maximum number of waiting pulls. Further pulls are refused as busy (the pull queue of behaviour.md §2.4)."""
PASSED_BY_MS = 5_000
_WAIT_MS_MAX = 86_400_000
_SLOT_MS = 50
_KEPT_SECONDS = 60.0
"""An empty slot is not dropped if it ends within this time."""
_AT_ONCE_MAX = 32

K = TypeVar("K")

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class WaitingPull:
    """One waiting pull.

    Attributes:
        connection: the client's connection; None for a part of the broker itself.
        queue_offset: the first requested offset.
        codes: the requested tag codes; None for all.
        until_ms: the monotonic time at which the pull expires.
        retry: reads again and answers with the result.
        wants: a further test of new messages, or None.
        group: the consumer group of the pull.
        key: the topic and the queue of the pull while it is held.
        slot: the number of the slot of its end time.
        was_passed_by: True if its filter refused a new message.
        is_gone: True if its connection is closed.
    """

    connection: Connection | None
    queue_offset: int
    codes: frozenset[int] | None
    until_ms: float
    retry: Callable[[], None]
    wants: Callable[[DispatchRequest], bool] | None = None
    group: str = ""
    key: tuple[str, int] = ("", 0)
    slot: int = 0
    was_passed_by: bool = False
    is_gone: bool = False


_Several = dict[WaitingPull, None]
"""Held pulls in the order of their arrival."""


class LongPolling:
    """The waiting pulls of a broker."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._queues: dict[tuple[str, int], _Several] = {}
        # Number of pulls that wait for light queues: making the names of the light queues of all messages costs a lot.
        self._light_count = 0
        self._connections: dict[Connection, _Several] = {}
        self._slots: dict[int, tuple[_Several, asyncio.TimerHandle]] = {}
        self._turns = Turns(lambda error: _log.error("cannot answer held pulls", exc_info=error))
        self._count = 0
        self._news: deque[Sequence[DispatchRequest]] = deque()

    def __len__(self) -> int:
        """Return the number of waiting pulls of clients."""
        return self._count

    @property
    def is_full(self) -> bool:
        """Return True if no further pull can wait."""
        return self._count >= HELD_MAX

    @property
    def timer_count(self) -> int:
        """Return the number of running timers. Pulls that end at about the same time share a timer."""
        return len(self._slots)

    def hold(self, topic: str, queue_id: int, held: WaitingPull) -> None:
        """Hold a pull until a message for it arrives or its time is up."""
        held.key = key = (topic, queue_id)
        waiting = self._queues.setdefault(key, {})
        assert held not in waiting, "a pull is held once"
        waiting[held] = None
        self._light_count += is_light(topic)
        if held.connection is not None:
            self._connections.setdefault(held.connection, {})[held] = None
            self._count += 1
        self._end_by(held, held.until_ms)

    def arrived(self, requests: Sequence[DispatchRequest]) -> None:
        """Answer the pulls that wait for one of these messages."""
        if not self._queues:
            return
        if isinstance(requests, StoredSends) and not self._is_awaited(requests):
            return  # `StoredSends` knows the queues of all its messages: decode none if no pull waits for these queues
        # Queue the messages: the answer to a pull reads the store, which may dispatch further messages and call this
        # method again. Without the queue the calls would nest for each message.
        self._news.append(requests)
        if len(self._news) > 1:
            return
        try:
            while self._news:
                self._look(self._news[0])
                self._news.popleft()
        finally:
            self._news.clear()

    def _is_awaited(self, sends: StoredSends) -> bool:
        """Return True if a pull waits for a queue of these messages."""
        queues = self._queues.keys()
        return not queues.isdisjoint(sends.places) or (
            self._light_count > 0 and not queues.isdisjoint(sends.light_places)
        )

    def _look(self, requests: Sequence[DispatchRequest]) -> None:
        for stored in requests.requests_of(self._queues) if isinstance(requests, StoredSends) else requests:
            waiting = self._queues.get((stored.topic, stored.queue_id))
            if waiting is None:
                continue
            # Use slices also while earlier slices run: pulls must be answered in the order of the messages.
            if len(waiting) > _AT_ONCE_MAX or self._turns:
                self._turns.add(self._concerned(stored))
                continue
            end = stored.queue_offset + stored.batch_count
            for held in [held for held in waiting if held.queue_offset < end]:
                self._check_waiting(held, stored)

    def wake(self, topic: str, queue_id: int, group: str) -> None:
        """Answer the pulls of a group for a queue, because the group's offset was reset."""
        self._answer_all([held for held in self._queues.get((topic, queue_id), ()) if held.group == group])

    def wake_all(self) -> None:
        """Answer all waiting pulls of clients, because another broker can serve them better now."""
        self._answer_all([held for several in self._connections.values() for held in several])

    def close(self) -> None:
        """Answer all waiting pulls when the broker stops."""
        # First finish the running slices, which are in the order of the messages.
        self._turns.finish()
        for held in [held for waiting in self._queues.values() for held in waiting]:
            self._answer(held)
        for _, timer in self._slots.values():
            timer.cancel()
        self._slots.clear()

    def connection_closed(self, connection: Connection) -> None:
        """Drop the pulls of a closed connection."""
        several = self._connections.pop(connection, None)
        if several is not None:
            # Subtract the pulls now, so that other pulls get their places. Drop them in slices.
            self._count -= len(several)
            assert self._count >= 0, "each pull of a client counts once"
            for held in several:
                held.is_gone = True
            self._do_all(several, self._drop)

    # -- inside

    def _concerned(self, stored: DispatchRequest) -> Iterator[None]:
        """Check the pulls that wait for a message's queue. Yield after each pull. Later pulls are not checked."""
        end = stored.queue_offset + stored.batch_count
        waiting = self._queues.get((stored.topic, stored.queue_id), ())
        for held in [held for held in waiting if held.queue_offset < end]:
            self._check_waiting(held, stored)
            yield

    def _check_waiting(self, held: WaitingPull, stored: DispatchRequest) -> None:
        """Answer a pull if it wants a message."""
        if (held.codes is None or stored.tags_code in held.codes) and (held.wants is None or held.wants(stored)):
            self._answer(held)
        elif not held.was_passed_by:
            self._pass_by(held)

    def _answer_all(self, several: Iterable[WaitingPull]) -> None:
        self._do_all(list(several), self._answer)

    def _do_all(self, several: Collection[WaitingPull], act: Callable[[WaitingPull], None]) -> None:
        if len(several) > _AT_ONCE_MAX:
            self._turns.add(map(act, several))
        else:
            for held in several:
                act(held)

    def _answer(self, held: WaitingPull) -> None:
        if held.is_gone or held not in self._queues.get(held.key, ()):
            return  # the answer to another pull closed its connection
        # Drop the pull first: its answer may close the connection, which drops all pulls of the connection.
        self._drop(held)
        try:
            held.retry()
        except Exception:  # noqa: BLE001 - the outer edge of a held request: its fault must not reach a producer
            _log.exception("cannot answer a held pull of %s", held.key)

    def _drop(self, held: WaitingPull) -> None:
        _discard(self._queues, held.key, held)
        self._light_count -= is_light(held.key[0])
        if held.connection is not None and not held.is_gone:
            self._count -= 1
            assert self._count >= 0, "each pull of a client counts once"
            _discard(self._connections, held.connection, held)
        self._leave_slot(held)

    def _pass_by(self, held: WaitingPull) -> None:
        held.was_passed_by = True
        if held.is_gone or held not in self._queues.get(held.key, ()):
            return
        soon_ms = self._clock.monotonic_ms() + PASSED_BY_MS
        if soon_ms < held.until_ms:
            self._leave_slot(held)
            self._end_by(held, soon_ms)

    def _leave_slot(self, held: WaitingPull) -> None:
        slot = self._slots.get(held.slot)
        if slot is None:
            return
        several, timer = slot
        several.pop(held, None)
        # Drop an empty slot that ends late: the delivery of delayed messages waits for a day again and again. A slot
        # that ends soon stays for the next pull, because a timer for each pull would cost more.
        if not several and timer.when() > self._loop.time() + _KEPT_SECONDS:
            timer.cancel()
            del self._slots[held.slot]

    def _end_by(self, held: WaitingPull, at_ms: float) -> None:
        """Put a pull into the slot of its end time. Create a missing slot with its timer."""
        now_ms = self._clock.monotonic_ms()
        # Use the slot after the end time: a timer fires at the begin of its slot, which must not be before the end.
        held.slot = number = int(min(max(at_ms, now_ms), now_ms + _WAIT_MS_MAX)) // _SLOT_MS + 1
        slot = self._slots.get(number)
        if slot is None:
            seconds = (number * _SLOT_MS - now_ms) / 1000
            slot = self._slots[number] = ({}, self._loop.call_later(seconds, self._end_slot, number))
        slot[0][held] = None

    def _end_slot(self, number: int) -> None:
        ended, _ = self._slots.pop(number)
        self._answer_all(ended)


def _discard(table: dict[K, _Several], key: K, held: WaitingPull) -> None:
    several = table[key]
    del several[held]
    if not several:
        del table[key]
