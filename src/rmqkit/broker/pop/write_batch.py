"""What pops and acks of one turn of the event loop store: check points and acks with one write, at the turn's end.

A pop's messages leave when its check point is stored, and the group's offset moves then; until then the next pop of the
queue begins at `PopWriteBatch.next_offsets`. So a crash in between has neither handed messages out nor forgotten them,
and what the store refuses is popped again. Answers are given by who asks. Loop only.
Source: behaviour.md §4.8 to §4.10.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rmqkit.broker.pop.check_points import CheckPointStore
from rmqkit.broker.pop.in_flight import AckKey, NewCheckPoint, QueueKey
from rmqkit.protocol.command import Command
from rmqkit.remoting.connection import Connection
from rmqkit.store.message_store import PutResult, PutStatus

__all__ = ["AnswerAcks", "PopWriteBatch", "Waiting"]

Waiting = list[tuple[Connection, Command]]
"""Who waits to be answered."""

AnswerAcks = Callable[[AckKey, PutResult | None, Waiting], None]
"""Told what became of the acks of a pop: None when there was nothing to store."""

_OK = PutStatus.OK  # asking an enumeration for a member costs a call
_log = logging.getLogger(__name__)


class PopWriteBatch:
    """What is stored at the end of this turn.

    Attributes:
        next_offsets: first unread offset per queue, counting pops of this batch that are not written yet.
    """

    def __init__(self, check_points: CheckPointStore) -> None:
        self._check_points = check_points
        self._loop = asyncio.get_running_loop()
        self.next_offsets: dict[QueueKey, int] = {}
        self._connections: dict[Connection, None] = {}
        self._new: list[NewCheckPoint] = []
        self._pop_answers: list[tuple[int, Callable[[PutResult], None]]] = []
        self._acks: dict[AckKey, tuple[list[int], Waiting, AnswerAcks]] = {}

    def pop(self, connection: Connection, new: list[NewCheckPoint], answer: Callable[[PutResult], None]) -> None:
        """Store check points and answer with the last one's put, or with one that was refused."""
        self._begin(connection)
        self._new += new
        self._pop_answers.append((len(new), answer))
        for one in new:
            self.next_offsets[one.pending.queue_key] = one.after

    def ack(self, key: AckKey, offset: int, connection: Connection, command: Command, answer: AnswerAcks) -> None:
        """Store that a message is consumed; acks of one pop are answered together."""
        self._begin(connection)
        gathered = self._acks.get(key)
        if gathered is None:
            gathered = self._acks[key] = [], [], answer
        gathered[0].append(offset)
        gathered[1].append((connection, command))

    def end(self) -> None:
        """Store and answer what came in this turn; what can be said now is written at once."""
        connections, new, pops, acks = self._connections, self._new, self._pop_answers, self._acks
        self._connections, self._new, self._pop_answers, self._acks = {}, [], [], {}
        try:
            puts, acked = self._check_points.store(new, {key: offsets for key, (offsets, _, _) in acks.items()})
        except Exception as error:  # noqa: BLE001 - the outer edge of these requests: answered and logged once
            _log.exception("%d check points and acks of %d pops cannot be stored", len(new), len(acks))
            failed = PutResult(PutStatus.SERVICE_NOT_AVAILABLE, reason=f"{type(error).__name__}: {error}")
            puts, acked = [failed] * len(new), [failed] * len(acks)
            self._check_points.withdraw(new)
        self.next_offsets.clear()
        for connection in connections:
            connection.cork()
        at = 0
        for count, answer in pops:
            for put in puts[at : at + count]:
                if put.status is not _OK:
                    break
            at += count
            try:
                answer(put)
            except Exception:  # noqa: BLE001 - a fault of one request must not reach another
                _log.exception("a pop cannot be answered")
        for ended, (key, (_, waiting, answer_acks)) in zip(acked, acks.items(), strict=True):
            try:
                answer_acks(key, ended, waiting)
            except Exception:  # noqa: BLE001 - a fault of one request must not reach another
                _log.exception("acks of %s cannot be answered", key)
        for connection in connections:
            try:
                connection.flush()
            except Exception:  # noqa: BLE001 - a fault of one connection must not reach another
                _log.exception("answers to %s cannot be written", connection.peer)

    def _begin(self, connection: Connection) -> None:
        if not self._connections:
            self._loop.call_soon(self.end)
        self._connections[connection] = None
