"""Redelivery of messages that are not acknowledged in time (``PopReviveService``).

When the invisible time of a message is over, the broker puts a copy with a higher count (with the same count, if its
consumer suspended the message) into the retry topic that the group has for the topic. A message that was popped from a
retry topic goes back to the same retry topic. The broker drops check points of deleted topics and groups, and messages
that were deleted from the log and exist in no other place. While the store refuses messages, or a failed flush has
damaged an entry, the pop is retried after `_AGAIN_MS`. A message that the store can never accept goes to the dead
letters of the group, and the other messages of its pop are redelivered. A message without room for the new properties
is redelivered without them. A crash between the put of a message and its ack record leads to another delivery. Like the
reference, the broker does not limit the number of deliveries. Consumers limit it. Use this module only on the event
loop. Source: behaviour.md §4.12.
"""

from __future__ import annotations

import logging

from rmqkit.broker.dead_letters import DeadLetters, is_hopeless
from rmqkit.broker.messages import message_from
from rmqkit.broker.older import OlderMessages
from rmqkit.broker.pop.check_points import CheckPointStore
from rmqkit.broker.pop.in_flight import InFlightPop
from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.tables.groups import GroupTable
from rmqkit.broker.tables.offsets import OffsetTable
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.errors import RecordCorrupt, StoreUnavailable
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.names import RETRY_PREFIX, pop_retry_topic
from rmqkit.protocol.properties import find_property
from rmqkit.protocol.record import Record, decode_record
from rmqkit.remoting.tasks import ROUND_SLICE_SECONDS, Slice
from rmqkit.store.message_store import GetStatus, InnerMessage, MessageStore, PutResult, PutStatus

__all__ = ["Revive"]

_AGAIN_MS = 10_000

_log = logging.getLogger(__name__)


class Revive:
    """The redelivery of due messages through retry topics."""

    def __init__(
        self,
        check_points: CheckPointStore,
        store: MessageStore,
        topics: TopicTable,
        groups: GroupTable,
        offsets: OffsetTable,
        settings: BrokerSettings,
        store_host: bytes,
        older: OlderMessages | None,
    ) -> None:
        self._check_points = check_points
        self._store = store
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._settings = settings
        self._store_host = store_host
        self._older = older
        self._dead_letters = DeadLetters(store, topics.ensure)
        self._refusal = ""

    async def round(self) -> None:
        """Redeliver due messages. The broker calls this a few times a second."""
        # Write acks first: `follow` does nothing while acks are unwritten.
        self._check_points.write_acks()
        self._check_points.follow()
        work = Slice(ROUND_SLICE_SECONDS)  # thousands of pops may become due together
        for pending in self._check_points.due():
            try:
                fetched = await self._fetch(pending)
                if self._is_wanted(pending):
                    # Write the table in a thread: it may have thousands of topics.
                    await self._topics.ensure_shared(self._retry_topic(pending), 1)
                if pending.left:  # acks may have arrived meanwhile
                    self._revive(pending, fetched)
            except StoreUnavailable as error:  # a retry topic cannot be created while the disk is full
                self._note_refusal(str(error))
                self._check_points.postpone(pending, _AGAIN_MS)
            except Exception:  # noqa: BLE001 - the outer edge of a check point: a fault of one must not hold up others
                _log.exception("cannot redeliver messages of %s that %s popped", pending.topic, pending.group)
                self._check_points.postpone(pending, _AGAIN_MS)
            await work.pause_if_over()
        self._check_points.commit()

    # -- inside

    async def _fetch(self, pending: InFlightPop) -> dict[int, memoryview]:
        """Fetch the messages of a pop that were deleted from the log, by offset, if another place has them.
        Raises PeerRefused, StoreError, OSError: the messages cannot be fetched. The pop is retried later."""
        found: dict[int, memoryview] = {}
        if self._older is None:
            return found
        topic, queue_id = pending.topic, pending.queue_id
        for offset in [one for one in sorted(pending.left) if self._store.is_older(topic, queue_id, one)]:
            records = (await self._older.get(None, topic, queue_id, offset, count_max=1)).records
            if records:
                found[offset] = records[0]
        return found

    def _revive(self, pending: InFlightPop, fetched: dict[int, memoryview]) -> None:
        is_wanted = self._is_wanted(pending)
        done: list[int] = []
        try:
            for offset in sorted(pending.left):
                record = self._record(pending, offset, fetched.get(offset)) if is_wanted else None
                if record is not None and not self._put(pending, record):
                    self._check_points.postpone(pending, _AGAIN_MS)
                    break
                done.append(offset)
        finally:
            if done:
                self._check_points.revived(pending, done)

    def _note_refusal(self, reason: str) -> None:
        """Log why messages are not redelivered, once for each reason."""
        if reason != self._refusal:
            self._refusal = reason
            _log.warning("popped messages cannot be redelivered yet: %s", reason)

    def _is_wanted(self, pending: InFlightPop) -> bool:
        """Return True if topic and group of a pop still exist."""
        # Use `in` for the group: `get` would create a deleted group again.
        return self._topics.get(pending.topic) is not None and pending.group in self._groups

    def _retry_topic(self, pending: InFlightPop) -> str:
        if pending.topic.startswith(RETRY_PREFIX):
            return pending.topic
        return pop_retry_topic(pending.group, pending.topic, "+" if self._settings.retry_topic_v2 else "_")

    def _record(self, pending: InFlightPop, offset: int, fetched: memoryview | None) -> Record | None:
        if fetched is not None:
            found = [fetched]
        else:
            read = self._store.get(pending.topic, pending.queue_id, offset, count_max=1)
            if read.status is GetStatus.OFFSET_FOUND_NULL and read.next_begin_offset == offset:
                place = f"message {offset} of {pending.topic}-{pending.queue_id}"
                raise StoreUnavailable(f"a failed flush has damaged the entry of {place}: restart the broker")
            found = read.records
        try:
            record = decode_record(found[0], verify_crc=self._store.checks_bodies) if found else None
        except RecordCorrupt as error:
            _log.error("popped message %s[%d]@%d cannot be read: %s", pending.topic, pending.queue_id, offset, error)
            return None
        return record if record is not None and record.queue_offset == offset else None

    def _put(self, pending: InFlightPop, record: Record) -> bool:
        """Put a message into its retry topic or its dead letters. Return False if the store refuses it for now."""
        topic = self._retry_topic(pending)
        if self._offsets.get(pending.group, topic, 0) is None:
            self._offsets.commit(pending.group, topic, 0, 0)
        message = self._copy(pending, record, topic)
        put: PutResult | None = self._store.put(message)
        assert put is not None, "a put has a result"
        self._check_points.counts.revived[pending.topic, pending.group, put.status.value] += 1
        if is_hopeless(put):
            put = self._dead_letters.put(message, put, "popped", pending.group)
        if put is None or put.status is PutStatus.OK:
            self._refusal = ""
            return True
        self._note_refusal(f"{put.status.value} {put.reason}")
        return False

    def _copy(self, pending: InFlightPop, record: Record, topic: str) -> InnerMessage:
        """Return the copy of a message for its redelivery."""
        changes: dict[str, str | None] = {"ORIGIN_GROUP": pending.group}
        if find_property(record.properties, property_names.FIRST_POP_TIME.encode()) is None:
            changes[property_names.FIRST_POP_TIME] = str(pending.pop_time)
        copies = (
            message_from(
                record,
                topic=topic,
                queue_id=0,
                changes=one,
                reconsume_times=record.reconsume_times + (not pending.is_suspended),
                store_host=self._store_host,
            )
            for one in (changes, {})
        )
        message = next(copies)
        return message if len(message.properties) <= self._store.properties_bytes_max else next(copies)
