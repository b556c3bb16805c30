"""The fast path for the plain sends of one read, or of one batch. They share one write to the log, and one write of
their answers to the socket.

A send is plain if no check can refuse it: its topic exists and needs no special handling, and its queue has messages. A
message with a delivery time goes to the timer topic. A message with a lite topic is also entered in the light queue. If
a message of the run is not plain, or if the store does not accept the whole run, the messages are handled one by one
(`SendHandlers`). A batch is handled in the same way. Answers are sent after the write, or when the last message of the
run is as durable as required (`durability`). Both ways store the same records and send the same answers. A test
compares them. Use this module only on the event loop.
Source: behaviour.md §3.1 to §3.6; remoting.md §4.3.1.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from rmqkit.broker.durability import CODES, Outcome
from rmqkit.broker.messages import TIMER_NAMES
from rmqkit.broker.send.checks import SCHEDULED, SendContext
from rmqkit.core import CORE
from rmqkit.protocol import names
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, Frame, frames_of, reply
from rmqkit.protocol.core import Sends
from rmqkit.protocol.names import TIMER_TOPIC
from rmqkit.protocol.schemas.topics import Permission
from rmqkit.protocol.sends import sends_reader
from rmqkit.protocol.templates import answer_pieces
from rmqkit.remoting.connection import Connection

__all__ = ["FastPath"]

_log = logging.getLogger(__name__)

_HARMLESS = frozenset(("message.type", "lite.topic.expiration"))
"""Topic attributes that do not affect a plain send. The lifetime of lite topics affects only their expiry."""

_NOT_PLAIN = (
    property_names.INNER_NUM,
    property_names.DELAY,
    property_names.TRANSACTION_PREPARED,
    property_names.POP_CHECK_POINT,
    property_names.INNER_MULTI_DISPATCH,
    property_names.INNER_MULTI_QUEUE_OFFSET,
    property_names.LITE_EPOCH,
    property_names.PRIORITY,
)
_NOT_TIMED = (
    property_names.TIMER_DELETE_KEY,
    property_names.TIMER_OUT_MS,
    property_names.REAL_TOPIC,
    property_names.REAL_QUEUE_ID,
)
_UNITS_MS = dict(zip(TIMER_NAMES, (1000, 1, 0), strict=True))


class FastPath:
    """The fast path. It stores the plain sends of one read, or of one batch, with one write and answers them together.

    Args:
        stamps: the properties that every message gets.
        answer_fields: the fields that every answer has.

    Attributes:
        reader: the reader of plain sends from the bytes of a connection.
    """

    def __init__(self, context: SendContext, stamps: dict[str, str], answer_fields: dict[str, str]) -> None:
        self._store = context.store
        self._settings = context.settings
        self._topics = context.topics
        self._clock = context.clock
        self._store_host = context.identity.store_host
        self._timer = context.timer
        not_plain = (*_NOT_PLAIN, *(TIMER_NAMES if context.timer is None else _NOT_TIMED))
        self.reader = sends_reader(CORE, stamps, not_plain, {} if context.timer is None else _UNITS_MS)
        _log.info("plain sends are read by %s", "plain Python" if CORE.fault else "the compiled core")
        self._broker_name = context.settings.broker_name
        self._answer_fields = answer_fields
        self._durability = context.durability
        self._recorder = context.recorder
        self._monotonic_ms = context.clock.monotonic_ms
        self._pieces = {code: answer_pieces(self._store_host, answer_fields, code) for code in CODES.values()}
        self._stored = self._pieces[ResponseCode.SUCCESS]

    def handle(self, connection: Connection, units: Sequence[Frame | Sends]) -> Iterable[Frame]:
        """Store and answer the plain sends of one read. Yield every other request in its original order. The caller
        must handle a yielded request before it continues the iteration."""
        if len(units) == 1 and not isinstance(first := units[0], Frame):
            return () if self._store_all(connection, first) else self._each(connection, first)
        return self._handle(connection, units)

    def _handle(self, connection: Connection, units: Sequence[Frame | Sends]) -> Iterator[Frame]:
        for unit in units:
            if isinstance(unit, Frame):
                yield unit
            elif not self._store_all(connection, unit):
                yield from self._each(connection, unit)

    def _each(self, connection: Connection, sends: Sends) -> Iterator[Frame]:
        """Store the plain sends one by one, and yield the other requests in their order."""
        if sends.is_batch or len(sends) == 1:
            yield from frames_of(sends)
            return
        at = sends.start
        while at < sends.end:
            one = self.reader.read(sends.chunk, at, 1)
            assert one is not None, "a send that was read before is readable"
            at = one.end
            if not self._store_all(connection, one):  # type: ignore[arg-type]
                yield from frames_of(one)

    def _refuse_all(self, connection: Connection, opaques: Iterable[int], reason: str) -> None:
        for opaque in opaques:
            request = Command(RequestCode.SEND_MESSAGE_V2, opaque)
            connection.send(reply(request, ResponseCode.SYSTEM_ERROR, reason, fields=self._answer_fields))

    def _store_all(self, connection: Connection, sends: Sends) -> bool:
        """Store messages with one write and answer them. Return False if they have to be handled one by one."""
        durability = self._durability
        # Leave refusals to the handler, which has the reference's codes and order of checks. It also answers sends that
        # must not wait for the disk: in a run they would wait.
        if durability is not None and (durability.is_full or durability.lacks_replicas or sends.waits_not):
            return False
        for topic, queue_id, _, _ in sends.queues:
            if queue_id >= self._queue_count(topic):
                return False
        try:
            # `_keep` changes the messages to store, not the chunk. If the messages are handled one by one, they are
            # read from the chunk again, with their original times.
            if (asked := sends.asked) and not self._keep(sends, asked):
                return False
            if (parents := sends.lite_parents) and not all(map(self._has_lite_topics, parents)):
                return False
            end_offset = self._store.put_sends(sends, connection.peer_host, self._store_host)
        except Exception:  # noqa: BLE001 - the outer edge of these requests: none is answered, each is tried alone
            _log.exception("cannot store %d sends of %s together", len(sends), connection.peer)
            return False
        if end_offset is None:
            return False
        ms = self._monotonic_ms() - connection.active_ms
        if durability is None or durability.has(end_offset):
            connection.send_frame(sends.answers(*self._stored))
            self._recorder.sends(sends, ms)
            return True
        answer = partial(self._answer_late, connection, sends)
        release = self._recorder.waiting_sends(sends, ms, connection.active_ms, answer)
        durability.hold(end_offset, release, answers=len(sends.opaques))
        return True

    def _queue_count(self, name: str) -> int:
        """Return the number of queues for plain sends of a topic. The number is 0 if messages have to be handled one by
        one, because `SendChecks.topic_of` refuses them, or because the topic needs more than storing."""
        topic, settings = self._topics.get(name), self._settings
        # Leave a missing topic to the handler: it creates the topic and answers when the name servers know the topic.
        if topic is None or topic.topic_filter_type == "MULTI_TAG":
            return 0
        if topic.attributes and not topic.attributes.keys() <= _HARMLESS:
            return 0
        # A static topic numbers its queues over several brokers. Messages that are sent directly to a delay topic must
        # not be timed.
        if (
            name.startswith(names.LITE_QUEUE_PREFIX)
            or name in names.FORBIDDEN_TO_SEND
            or name in SCHEDULED
            or name in self._topics.static.local
        ):
            return 0
        if settings.accept_sends_from_ms and self._clock.now_ms() < settings.accept_sends_from_ms:
            return 0
        if topic.order and not settings.broker_permission & Permission.WRITE:
            return 0
        return max(topic.read_queue_nums, topic.write_queue_nums)

    def _keep(self, sends: Sends, asked: list[tuple[int, int]]) -> bool:
        """Turn messages with a delivery time into timed messages. Return False if the timer has to handle a message by
        itself."""
        timer = self._timer
        assert timer is not None, "delivery times are read only with a timer"
        outs = [out for time, unit_ms in asked if (out := timer.kept_until(time, unit_ms)) is not None]
        if len(outs) < len(asked):
            return False
        sends.keep(outs, TIMER_TOPIC, self._broker_name)
        return True

    def _has_lite_topics(self, name: str) -> bool:
        """Return True if messages of a topic can be in lite topics. The reader has checked the names of these."""
        topic = self._topics.get(name)
        return topic is not None and topic.is_lite and "$" not in name and not names.is_system_topic(name)

    def _answer_late(self, connection: Connection, sends: Sends, outcome: Outcome, reason: str) -> None:
        """Answer plain sends after they waited for disk or slaves."""
        if outcome is not Outcome.FAILED:
            connection.send_frame(sends.answers(*self._pieces[CODES[outcome]]))
            return
        self._refuse_all(connection, sends.opaques, reason)
