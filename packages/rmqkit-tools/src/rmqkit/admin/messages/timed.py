"""The timed messages that wait in a broker's timer: list them, recall a message, or deliver a message now.

Brokers have no request that lists timed messages. The messages are therefore read from queue 0 of the timer topic. The
newest are read first, because a message may wait for days while later messages are delivered. The reader
(`rmqkit.admin.messages.waiting`) has a budget. A record of the topic is not a waiting message if

=========================  =========================================================================================
its time is over           TIMER_OUT_MS is not later than now: the message is delivered or due
a later record recalls it  this record has TIMER_DELETE_KEY (a *marker*), the same topic and the same time
a later record repeats it  a long wait is stored in stages, and each stage adds 1 to TIMER_ROLL_TIMES
=========================  =========================================================================================

*Recall* sends RECALL_MESSAGE, as a producer does. *Deliver now* sends a copy with the same unique key to the queue of
the message, then recalls the original. If the recall fails, the message is delivered twice, but is never lost.
Source: behaviour.md §3.4, §3.9; store.md §18.2.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct, field

from rmqkit.admin.messages.messages import Messages, Sent
from rmqkit.errors import SettingsError, UnknownName
from rmqkit.protocol import properties as prop
from rmqkit.protocol.ids import RecallHandle, encode_recall_handle
from rmqkit.protocol.message import Message, ReceivedMessage, copied
from rmqkit.protocol.names import TIMER_TOPIC
from rmqkit.sentences import _

__all__ = ["Timed", "TimedList", "TimedMessages", "still_waiting"]

_AHEAD_MS = 2_000
"""If less time is left until the delivery, a recall may be too late."""
_ROLLS = "TIMER_ROLL_TIMES"


class Timed(Struct, rename="camel", kw_only=True):
    """A timed message. ``offset`` is the offset of its record in queue 0 of the timer topic of ``broker``."""

    broker: str
    offset: int
    topic: str
    msg_id: str
    keys: list[str]
    tags: str
    due_ms: int
    stored_ms: int
    body_bytes: int


class TimedList(Struct, rename="camel", kw_only=True):
    """Timed messages of the cluster, sorted by due time."""

    rows: list[Timed]
    matched: int
    examined: int = 0
    is_whole: bool = True
    troubles: dict[str, str] = field(default_factory=dict)


class TimedMessages:
    """Operations on timed messages. Each raises the errors of `AdminCalls`."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages

    async def at(self, broker: str, offset: int) -> tuple[Timed, ReceivedMessage]:
        """Return a timed message and its record, by the offset of the record.
        Raises UnknownName: there is no such message. Raises SettingsError: the message is due, or the broker does not
        allow recalls."""
        record = await self._messages.at(TIMER_TOPIC, broker, 0, offset)
        found = _timed(broker, record)
        if found is None or prop.TIMER_DELETE_KEY in record.properties:
            raise UnknownName("message", str(offset), _("the timer of {broker}", broker=broker))
        await self._check(found)
        return found, record

    async def _check(self, message: Timed) -> None:
        """Raise SettingsError if a message is due or almost due, or if its broker does not allow recalls."""
        if not await self._messages.may_recall(message.broker):
            raise SettingsError(
                _("broker {broker} cannot recall messages: set recallMessageEnable=true there", broker=message.broker)
            )
        if message.due_ms - self._messages.now_ms < _AHEAD_MS:
            raise SettingsError(_("message {id} is due now: its topic has it", id=message.msg_id))

    async def recall(self, message: Timed) -> str:
        """Recall a message. Raises SettingsError: the message is due, a name contains a blank, or the broker does not
        allow recalls."""
        await self._check(message)
        try:
            handle = encode_recall_handle(RecallHandle(message.topic, message.broker, message.due_ms, message.msg_id))
        except ValueError as error:
            raise SettingsError(str(error)) from None
        return await self._messages.recall(message.topic, message.broker, handle)

    async def deliver(self, message: Timed, record: ReceivedMessage) -> Sent:
        """Send a copy of a message to its queue, and recall the original. Raises the errors of `recall`."""
        await self._check(message)
        queue = record.properties.get(prop.REAL_QUEUE_ID, "")
        copy = Message(topic=message.topic, msg_id=message.msg_id, **copied(record))
        queue_id = int(queue) if queue.isdecimal() and len(queue) < 10 else None
        sent = await self._messages.send(copy, broker=message.broker, queue_id=queue_id)
        await self.recall(message)
        return sent


def still_waiting(broker: str, newest_first: Iterable[ReceivedMessage], now_ms: int) -> list[Timed]:
    """Return the waiting messages among the records of a timer topic. This function is pure."""
    recalled: set[tuple[str, str, int]] = set()
    later_stages: dict[tuple[str, str, int], int] = {}
    found: list[Timed] = []
    for record in newest_first:
        one = _timed(broker, record)
        if one is None or one.due_ms <= now_ms:
            continue
        marked = record.properties.get(prop.TIMER_DELETE_KEY)
        if marked is not None:
            recalled.add((one.topic, marked.removeprefix(f"{one.topic}+"), one.due_ms))
            continue
        key = one.topic, one.msg_id, one.due_ms
        rolls = int(text) if (text := record.properties.get(_ROLLS, "0")).isdecimal() and len(text) < 10 else 0
        if key in recalled or rolls < later_stages.get(key, 0):
            continue
        later_stages[key] = rolls
        found.append(one)
    return found


def _timed(broker: str, record: ReceivedMessage) -> Timed | None:
    """Return the timed message in a record of the timer topic; None if the record has no topic or no time."""
    topic, due = (record.properties.get(name, "") for name in (prop.REAL_TOPIC, prop.TIMER_OUT_MS))
    if not topic or not due.isdecimal() or len(due) > 18:
        return None
    return Timed(
        broker=broker,
        offset=record.queue_offset,
        topic=topic,
        msg_id=record.properties.get(prop.UNIQ_KEY, record.msg_id),
        keys=record.keys,
        tags=record.tags or "",
        due_ms=int(due),
        stored_ms=record.store_timestamp,
        body_bytes=len(record.body),
    )
