"""Many sends at once: the plain ones that one read of a connection brought, with one write to the log.

========  ==========================================  ============================================================
step      function                                    from what to what
========  ==========================================  ============================================================
read      `SendRun._plain` (`SendShapes.find`)        a frame → the message to put, and what its answer repeats; None
                                                      for every request that is no plain send
store     `MessageStore.put_run`                      messages → record bytes, one write; their queue entries and
                                                      index keys follow from what it returns
answer    `SendAnswers.frames`                        places in the log and the queues → bytes of the answers
========  ==========================================  ============================================================

The first step asks for a topic once a run, and the timer for a time; what `protocol.templates` and the store do of
the three knows no connection, table or handler. It is what `SendHandlers` does for each message, tested equal, where
nothing can be refused: headers of a known shape, a topic that is there and wants nothing special, a queue that has
messages. One for a time goes to the timer topic. All others, and all of those when the store does not take them
together, are left to be handled one by one. Answers are given when the one write is done, or together when the last
message is as safe as it has to be (`durability`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from operator import attrgetter, countOf
from typing import TYPE_CHECKING

from rmqkit.broker.durability import CODES, Outcome, Release
from rmqkit.broker.messages import TIMER_NAMES
from rmqkit.broker.send.checks import SendChecks, SendContext
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, Frame, reply
from rmqkit.protocol.ids import RecallHandle, encode_recall_handle
from rmqkit.protocol.names import TIMER_TOPIC
from rmqkit.protocol.schemas.send import SendMessageRequest
from rmqkit.protocol.schemas.topics import TopicConfig
from rmqkit.protocol.templates import SendAnswers, SendShape, SendShapes, Stored
from rmqkit.remoting.connection import Connection
from rmqkit.store.message_store import InnerMessage

if TYPE_CHECKING:
    from rmqkit.broker.counts import Counts

__all__ = ["SendRun"]

_log = logging.getLogger(__name__)

_shape_of = attrgetter("shape")
_NOT_PLAIN = (
    property_names.INNER_NUM,
    property_names.DELAY,
    property_names.TRANSACTION_PREPARED,
    property_names.POP_CHECK_POINT,
    property_names.INNER_MULTI_DISPATCH,
    property_names.PRIORITY,
    *TIMER_NAMES,
)
_NOT_PLAIN_OR_TIMED = (
    *(name for name in _NOT_PLAIN if name not in TIMER_NAMES),
    property_names.TIMER_DELETE_KEY,
    property_names.TIMER_OUT_MS,
    property_names.REAL_TOPIC,
    property_names.REAL_QUEUE_ID,
)
_NO_WAIT = b"WAIT\x01false\x02"


class PlainSend(InnerMessage, gc=False):
    """A plain send: what is stored, and what its answer repeats. One object for both, as a second costs 2 % of a send.

    Attributes:
        queue_digits, opaque: queue id, as its sender sees it, and opaque, in digits.
        recall_handle: of a message for a time, else empty.
        shape: the one that it had.
    """

    queue_digits: bytes = b""
    unique_key: bytes = b""
    recall_handle: bytes = b""
    opaque: bytes = b""
    shape: SendShape = None  # type: ignore[assignment]  # always given; what is required cannot follow what is not


class SendRun:
    """Takes plain sends out of what was read.
    ``stamps``: the properties that every message gets.
    ``told``: the fields that every answer has."""

    def __init__(self, context: SendContext, checks: SendChecks, stamps: bytes, told: dict[str, str]) -> None:
        self._store = context.store
        self._checks = checks
        self._store_host = context.identity.store_host
        self._shapes = SendShapes(stamps, _NOT_PLAIN if context.timer is None else _NOT_PLAIN_OR_TIMED)
        self._timer = context.timer
        self._broker_name = context.settings.broker_name
        self._told = told
        self._durability = context.durability
        self._statistics = context.statistics
        self._counts = context.counts
        self._monotonic_ms = context.clock.monotonic_ms
        self._answers = {code: SendAnswers(self._store_host, told, code) for code in CODES.values()}

    def rest(self, connection: Connection, frames: list[Frame]) -> Iterator[Frame]:
        """Store and answer plain sends; the other requests in their order, each when those before it are stored."""
        run: list[PlainSend] = []
        queue_counts: dict[str, int] = {}
        first = 0
        for place, frame in enumerate(frames):
            try:
                plain = self._plain(connection, frame, queue_counts)
            except Exception:  # noqa: BLE001 - the plain way meets it too, and answers
                plain = None
            if plain is not None:
                run.append(plain)
                continue
            if run and not self._store_all(connection, run):
                yield from frames[first:place]
            yield frame
            run, first = [], place + 1
            queue_counts.clear()
        if run and not self._store_all(connection, run):
            yield from frames[first:]

    def _plain(self, connection: Connection, frame: Frame, queue_counts: dict[str, int]) -> PlainSend | None:
        """The message of a plain send; None for any other request."""
        found = self._shapes.find(frame) if frame.body else None
        if found is None:
            return None
        shape, values = found
        sent = shape.header
        digits, born_timestamp, opaque, unique_key, words, tags = shape.read(values)
        queue_count = queue_counts.get(sent.topic)
        if queue_count is None:
            queue_count = queue_counts[sent.topic] = self._queue_count(connection, sent)
        queue_id = int(digits)
        if queue_id >= queue_count:
            return None
        topic, handle = sent.topic, b""
        if shape.asks is not None:
            at, unit_ms = shape.asks
            out_ms = None if self._timer is None else self._timer.kept_until(int(values[at]), unit_ms)
            if out_ms is None:
                return None
            recall = RecallHandle(topic, self._broker_name, out_ms, unique_key.decode())
            topic, queue_id, handle = TIMER_TOPIC, 0, encode_recall_handle(recall).encode()
            values = (*values, b"%d" % out_ms)
        plain = PlainSend(
            topic,
            queue_id,
            frame.body,
            shape.properties % shape.values(values),
            sent.flag,
            sent.sys_flag,
            int(born_timestamp),
            connection.peer_host,
            self._store_host,
            sent.reconsume_times or 0,
            0,
            (unique_key, words, tags),
            None,
            digits,
            unique_key,
            handle,
            opaque,
            shape,
        )
        if self._durability is not None and _NO_WAIT in plain.properties:
            return None
        return plain

    def _store_all(self, connection: Connection, run: list[PlainSend]) -> bool:
        """Store some messages with one write and answer them; False when they have to be handled one by one."""
        durability = self._durability
        if durability is not None and (durability.is_full or durability.lacks_replicas):
            return False
        try:
            stored = self._store.put_run(run)
        except Exception:  # noqa: BLE001 - the outer edge of these requests: none is answered, each is tried alone
            _log.exception("%d sends of %s cannot be stored together", len(run), connection.peer)
            return False
        if stored is None:
            return False
        answers = [
            (one.physical_offset, plain.queue_digits, one.queue_offset, plain.unique_key, plain.opaque)
            if not plain.recall_handle
            else (
                *(one.physical_offset, plain.queue_digits, one.queue_offset, plain.unique_key),
                *(plain.recall_handle, plain.opaque),
            )
            for one, plain in zip(stored, run, strict=True)
        ]
        end_offset = stored[-1].physical_offset + stored[-1].size
        assert len(stored) == len(run), "all messages of a run are stored, or none"
        ms = self._monotonic_ms() - connection.active_ms
        if len({one.topic for one in stored}) == 1:
            self._statistics.sent(stored[0].topic, end_offset - stored[0].physical_offset, ms, len(stored))
        else:
            for one in stored:
                self._statistics.sent(one.topic, one.size, ms)
        if durability is None or durability.has(end_offset):
            connection.send_frame(self._answers[ResponseCode.SUCCESS].frames(answers))
            counts = self._counts
            if counts is not None:  # spelled out: a call would cost as much as what it does
                noted, count = counts.by_shape.get(run[0].shape), len(run)
                if count == 1 and noted is not None:
                    noted.alone_ms.append(ms)
                    noted.stored.append(stored[0])
                elif noted is not None and countOf(map(_shape_of, run), run[0].shape) == count:
                    noted.runs_ms.append(ms)
                    noted.counts.append(count)
                    noted.stored += stored
                else:
                    counts.run(map(_shape_of, run), stored, ms)
                    return True
                if len(noted.stored) >= counts.noted_max:
                    noted.fold()
        else:
            release = partial(self._answer_late, connection, answers)
            if self._counts is not None:
                shapes = [plain.shape for plain in run]
                release = partial(self._count_late, self._counts, shapes, connection.active_ms, release)
                self._counts.run(shapes, stored, None)
            durability.hold(end_offset, release, answers=len(answers))
        return True

    def _answer_late(self, connection: Connection, answers: list[Stored], outcome: Outcome, reason: str) -> None:
        """Answer a run that waited for disk or slaves."""
        if outcome is not Outcome.FAILED:
            connection.send_frame(self._answers[CODES[outcome]].frames(answers))
            return
        for *_, opaque in answers:
            request = Command(RequestCode.SEND_MESSAGE_V2, int(opaque))
            connection.send(reply(request, ResponseCode.SYSTEM_ERROR, reason, fields=self._told))

    @staticmethod
    def _count_late(
        counts: Counts, shapes: list[SendShape], since_ms: float, release: Release, outcome: Outcome, reason: str
    ) -> None:
        release(outcome, reason)
        counts.answered_late(shapes, CODES[outcome], since_ms)

    def _queue_count(self, connection: Connection, sent: SendMessageRequest) -> int:
        """How many queues of a topic can be sent to; 0 when its messages have to be looked at one by one."""
        if self._checks.is_new(sent.topic):
            return 0
        topic = self._checks.topic_of(connection, sent)
        if not isinstance(topic, TopicConfig) or topic.attributes or topic.topic_filter_type == "MULTI_TAG":
            return 0
        if self._checks.is_static(topic.topic_name):
            return 0
        return max(topic.read_queue_nums, topic.write_queue_nums)
