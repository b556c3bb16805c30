"""What can be found out about a message and a consumer group, before it is judged (`rmqkit.admin.causes`).

A message may be stored several times under its unique key: half, scheduled, in its topic, to be retried, dead. Each is
a record of its own, in a topic of its own. Source: behaviour.md §3.4, §3.7, §9.1–9.3; remoting.md §7.4.
"""

from __future__ import annotations

from msgspec import Struct, field

from rmqkit.admin.traces import TraceRow
from rmqkit.protocol import names
from rmqkit.protocol import properties as prop
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.schemas.clients import (
    ConsumerConnection,
    ConsumerRunningInfo,
    MessageQueue,
    ProcessQueueInfo,
    SubscriptionData,
)
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig

__all__ = ["Facts", "Lookup", "Place", "Transaction"]

_CHECKS_MAX = 15


class Place(Struct):
    """Where in a queue the group meets the message: its own place, or that of its latest retry.

    Attributes:
        min_offset, max_offset: the queue's first offset that is stored, and one past its last.
        committed: the group's offset at the broker, None if it has none.
        perm: `Permission` bits of the topic there.
    """

    broker: str
    topic: str
    queue_id: int
    offset: int
    min_offset: int
    max_offset: int
    committed: int | None
    perm: int
    read_queues: int

    def __str__(self) -> str:
        return f"queue {self.queue_id} of {self.topic} on {self.broker}"


class Transaction(Struct, kw_only=True):
    """What became of a half message.

    Attributes:
        half: its latest copy; every check-back writes one.
        is_given_up: whether a copy is in TRANS_CHECK_MAX_TIME_TOPIC.
        is_ended: whether an op record says so, or the broker is past it.
        checks_max: the broker's ``transactionCheckMax``.
        producers: members of its producer group online, None when the broker did not say.
    """

    half: ReceivedMessage
    is_given_up: bool = False
    is_ended: bool = False
    checks_max: int = _CHECKS_MAX
    producers: int | None = None

    @property
    def checks(self) -> int:
        """How often its producer was asked."""
        text = self.half.properties.get(prop.TRANSACTION_CHECK_TIMES, "")
        return int(text) if text.isdecimal() else 0


class Lookup(Struct, kw_only=True):
    """What else is known of a name under which nothing is stored in the topic.

    Attributes:
        address, physical_offset: what it says when it has the form of an offset message id.
        is_known: whether a broker of the name servers has that address.
        log_min, log_max: the bounds of that broker's log.
        as_key: messages of the topic that have it as a key.
        elsewhere: a message of that id in another topic.
        topics_searched: how many other topics were looked at.
        brokers: whose indexes were asked.
    """

    address: str = ""
    physical_offset: int = 0
    is_known: bool = False
    log_min: int | None = None
    log_max: int | None = None
    as_key: list[ReceivedMessage] = field(default_factory=list)
    elsewhere: ReceivedMessage | None = None
    topics_searched: int = 0
    brokers: list[str] = field(default_factory=list)


class Facts(Struct, kw_only=True):
    """All that was found out.

    Attributes:
        asked: how the message was named, such as ``message 7F00…``.
        message: the message in the topic.
        copies: others with its unique key.
        due_ms: when the latest scheduled copy is to be delivered.
        place: see `Place`; also of an offset at which there is no message.
        config: the group at the broker; None when it has none.
        is_read_forbidden: whether the group is forbidden to read the topic.
        connection: the members online and their subscriptions as brokers have them; None when nobody is.
        members: what each says of itself by client id; None when it did not answer.
        is_fetched: whether the broker's counters say that the group was given anything of the queue since the message
            was stored; None when they cannot tell.
        traces: what clients of the group told the trace topic about handling the message.
    """

    topic: str
    group: str
    asked: str
    now_ms: int
    message: ReceivedMessage | None = None
    copies: list[ReceivedMessage] = field(default_factory=list)
    due_ms: int | None = None
    place: Place | None = None
    config: SubscriptionGroupConfig | None = None
    is_read_forbidden: bool = False
    connection: ConsumerConnection | None = None
    members: dict[str, ConsumerRunningInfo | None] = field(default_factory=dict)
    is_fetched: bool | None = None
    traces: list[TraceRow] = field(default_factory=list)
    transaction: Transaction | None = None
    lookup: Lookup = field(default_factory=Lookup)

    @property
    def retry(self) -> ReceivedMessage | None:
        """Its latest copy that came to a retry topic of the group."""
        return max((one for one in self.copies if one.topic.startswith(names.RETRY_PREFIX)), key=_age, default=None)

    @property
    def scheduled(self) -> ReceivedMessage | None:
        """Its latest copy that waits for its time: that is not yet where it is to be delivered to."""
        waiting = [one for one in self.copies if one.topic in (names.SCHEDULE_TOPIC, names.TIMER_TOPIC)]
        latest = max(waiting, key=_age, default=None)
        if latest is None or latest.properties.get(prop.REAL_TOPIC) == self.topic:
            return latest if self.message is None else None
        is_back = self.retry is not None and self.retry.reconsume_times >= latest.reconsume_times
        return None if is_back else latest

    @property
    def dead_letter(self) -> ReceivedMessage | None:
        """Its copy among the group's dead letters."""
        return next((one for one in self.copies if one.topic.startswith(names.DLQ_PREFIX)), None)

    @property
    def owners(self) -> dict[str, ProcessQueueInfo]:
        """The members that have the queue, and what they hold of it."""
        if self.place is None:
            return {}
        queue = MessageQueue(self.place.topic, self.place.broker, self.place.queue_id)
        held = {client: info.mq_table.get(queue) for client, info in self.members.items() if info is not None}
        return {client: one for client, one in held.items() if one is not None and not one.droped}

    @property
    def waiting_acks(self) -> dict[str, int]:
        """The members that pop the queue, and how many messages of it each did not acknowledge yet."""
        if self.place is None:
            return {}
        popped = [MessageQueue(self.place.topic, self.place.broker, queue) for queue in (-1, self.place.queue_id)]
        return {
            client: sum(info.mq_pop_table[one].wait_ack_count for one in popped if one in info.mq_pop_table)
            for client, info in self.members.items()
            if info is not None and any(one in info.mq_pop_table for one in popped)
        }

    @property
    def subscriptions(self) -> dict[str, SubscriptionData | None]:
        """What each member that answered says it wants of the topic; None: it does not subscribe to it."""
        return {
            client: next((one for one in info.subscription_set if one.topic == self.topic), None)
            for client, info in self.members.items()
            if info is not None
        }

    @property
    def consumed_offset(self) -> int | None:
        """How far the group is: what the broker has, or an owner says, who tells the broker every 5 s."""
        told = [held.commit_offset for held in self.owners.values() if held.commit_offset >= 0]
        committed = self.place.committed if self.place is not None else None
        return max(told if committed is None else (*told, committed), default=None)

    @property
    def is_past(self) -> bool:
        """Whether the group is past the message."""
        return self.place is not None and (self.consumed_offset or 0) > self.place.offset

    @property
    def retries_max(self) -> int:
        """How many retries come before the dead letters: a client's own limit, or else the group's."""
        told = [info.properties.get("maxReconsumeTimes", "") for info in self.members.values() if info is not None]
        own = [int(text) for text in told if text.isdecimal()]
        return min(own) if own else self.config.retry_max_times if self.config is not None else 16


def _age(message: ReceivedMessage) -> tuple[int, int]:
    return message.reconsume_times, message.store_timestamp
