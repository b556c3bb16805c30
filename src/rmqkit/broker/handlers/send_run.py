"""Many sends at once: the plain ones that one read of a connection brought, with one write to the log.

Does what `SendHandlers` does for each of them, tested equal, where nothing can be refused: headers of a known shape
(`send_shapes`), a topic that is there and wants nothing special, a queue that has messages, ASYNC_FLUSH. All others,
and all of those when the store does not take them together, are left to be handled one by one. An answer is given when
the one write is done.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from rmqkit.broker.handlers.send_checks import SendChecks
from rmqkit.broker.schedule import TIMER_NAMES
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.bodies.topics import TopicConfig
from rmqkit.protocol.frame import Frame
from rmqkit.protocol.hashing import encoded_tags_code
from rmqkit.protocol.headers.send import SendMessageRequest
from rmqkit.protocol.send_answers import SendAnswers
from rmqkit.protocol.send_shapes import SendShapes
from rmqkit.remoting.connection import Connection
from rmqkit.store.message_store import MessageStore, PutMessage

__all__ = ["SendRun"]

_log = logging.getLogger(__name__)
_NOT_PLAIN = (
    property_names.INNER_NUM,
    property_names.DELAY,
    property_names.TRANSACTION_PREPARED,
    property_names.POP_CHECK_POINT,
    *TIMER_NAMES,
)


_Plain = tuple[PutMessage, bytes, bytes, bytes]
"""A message, and what its answer repeats: queue id in digits, unique key, opaque in digits."""


class SendRun:
    """Takes plain sends out of what was read.

    Args:
        stamps: the properties that every message gets.
        told: the fields that every answer has.
    """

    def __init__(
        self, store: MessageStore, checks: SendChecks, store_host: bytes, stamps: bytes, told: Mapping[str, str]
    ) -> None:
        self._store = store
        self._checks = checks
        self._store_host = store_host
        self._shapes = SendShapes(stamps, _NOT_PLAIN)
        self._answers = SendAnswers(store_host, told)

    def rest(self, connection: Connection, frames: list[Frame]) -> Iterator[Frame]:
        """Store and answer plain sends; the other requests in their order, each when those before it are stored."""
        run: list[_Plain] = []
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

    def _plain(self, connection: Connection, frame: Frame, queue_counts: dict[str, int]) -> _Plain | None:
        """The message of a plain send; None for any other request."""
        found = self._shapes.find(frame)
        if found is None or not frame.body:
            return None
        shape, values = found
        sent = shape.header
        digits, born_timestamp, opaque, unique_key, tags = shape.read(values)
        queue_count = queue_counts.get(sent.topic)
        if queue_count is None:
            queue_count = queue_counts[sent.topic] = self._queue_count(connection, sent)
        queue_id = int(digits)
        if queue_id >= queue_count:
            return None
        message = PutMessage(
            sent.topic,
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
            encoded_tags_code(tags) if shape.has_tags else 0,
        )
        return message, digits, unique_key, opaque

    def _store_all(self, connection: Connection, run: list[_Plain]) -> bool:
        """Store some messages with one write and answer them; False when they have to be handled one by one."""
        try:
            stored = self._store.put_run([plain[0] for plain in run])
        except Exception:  # noqa: BLE001 - the outer edge of these requests: none is answered, each is tried alone
            _log.exception("%d sends of %s cannot be stored together", len(run), connection.peer)
            return False
        if stored is None:
            return False
        answers = [
            (one.physical_offset, digits, one.queue_offset, unique_key, opaque)
            for one, (_, digits, unique_key, opaque) in zip(stored, run, strict=True)
        ]
        connection.send_frame(self._answers.frames(answers))
        return True

    def _queue_count(self, connection: Connection, sent: SendMessageRequest) -> int:
        """How many queues of a topic can be sent to; 0 when its messages have to be looked at one by one."""
        topic = self._checks.topic_of(connection, sent)
        if not isinstance(topic, TopicConfig) or topic.attributes or topic.topic_filter_type == "MULTI_TAG":
            return 0
        return max(topic.read_queue_nums, topic.write_queue_nums)
