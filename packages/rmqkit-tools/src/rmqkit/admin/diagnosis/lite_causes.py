"""The reason why a lite group gets no messages of a lite topic, as a pure function of `LiteFacts`.

The rules are applied in this order. The first rule with a result names the cause.

===================  ============================================================================================
rule                 causes
===================  ============================================================================================
broker               no parent topic, lite topics not served, switched off
group                group unknown or disabled, regular group, bound to another topic
rights               topic not readable, no permission
messages             never written, too many lite topics, expired, message deleted, not stored, consumed
subscription         no client online, client unknown, taken by another client, quota exceeded, not subscribed
delivery             not acknowledged, waiting
===================  ============================================================================================

Without a message to deliver the subscriptions do not matter, so the messages come first.
Source: lite.md §1, §6 to §9, §11.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator

from msgspec import Struct, field

from rmqkit.admin.cluster.lite import ClientAt, GroupAt, LiteAt, model_of
from rmqkit.admin.diagnosis.causes import Explanation, Fact, Reason
from rmqkit.client.observe.status import utc
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.protocol.schemas.topics import Permission, TopicConfig
from rmqkit.sentences import _, capital, marked

__all__ = ["UNKNOWN_LITE", "LiteCause", "LiteFacts", "judge_lite"]

_SHOWN = 5
_READ = int(Permission.READ)


class LiteCause(Reason):
    """The reason why a group gets no messages of a lite topic, and the remedy. CONSUMED means that nothing is wrong."""

    NO_PARENT = (
        marked("no parent topic"),
        marked("make it one: rmq topic create {parent} -b {broker} -a +message.type=LITE"),
    )
    NOT_SERVED = (
        marked("lite topics not served"),
        marked("upgrade the broker: Apache's brokers have them from 5.5.0 on"),
    )
    SWITCHED_OFF = (
        marked("lite topics switched off"),
        marked("set enableLmq=true and enableMultiDispatch=true in the broker's settings, and restart it"),
    )
    GROUP_UNKNOWN = (
        marked("group unknown"),
        marked("create it: rmq group create {group} -b {broker} --attributes +lite.bind.topic={parent}"),
    )
    GROUP_DISABLED = marked("group disabled"), marked("enable it: rmq group create {group} -s true")
    REGULAR_GROUP = (
        marked("regular group"),
        marked("bind it: rmq group create {group} -b {broker} --attributes +lite.bind.topic={parent}"),
    )
    BOUND_ELSEWHERE = (
        marked("bound to another topic"),
        marked("use another group: a lite group reads one parent topic, and its binding does not change"),
    )
    NOT_READABLE = marked("topic not readable"), marked("allow reading: rmq topic perm {parent} rw")
    NO_PERMISSION = (
        marked("no permission"),
        marked("allow it: rmq policy put {user} -r {resource} -a Sub"),
    )
    NEVER_WRITTEN = (
        marked("never written"),
        marked("check the name at the producer and at the consumer: rmq lite list {parent} --prefix {start}"),
    )
    TOO_MANY = (
        marked("too many lite topics"),
        marked("raise maxLiteTopicNum, or let unused lite topics expire (lite.topic.expiration)"),
    )
    EXPIRED = (
        marked("expired"),
        marked("raise lite.topic.expiration of {parent}; a new message begins the next life of the lite topic"),
    )
    DELETED = marked("message deleted"), marked("keep messages longer (fileReservedTime), or consume sooner")
    NOT_STORED = marked("not stored"), marked("check whether the send succeeded: rmq lite read {parent} {name}")
    CONSUMED = (
        marked("consumed"),
        marked("none needed; to get messages again, subscribe with a start, such as first or a number"),
    )
    NO_CLIENT = marked("no client online"), marked("start one; if one runs, see in its log whether it connects")
    CLIENT_UNKNOWN = (
        marked("client unknown"),
        marked("see in its log whether its subscriptions are refused; the clients: rmq lite group {group}"),
    )
    TAKEN = (
        marked("taken by another client"),
        marked("subscribe again at the client that shall have it, or use a group with the model Shared"),
    )
    QUOTA = (
        marked("quota exceeded"),
        marked("unsubscribe from unused lite topics, or raise lite.sub.client.quota or maxLiteSubscriptionCount"),
    )
    NOT_SUBSCRIBED = marked("not subscribed"), marked("have a client subscribe to {name}")
    UNACKED = (
        marked("not acknowledged"),
        marked("wait for the end of the invisible time, and see in the client's log why it does not acknowledge"),
    )
    WAITING = (
        marked("waiting"),
        marked("if it stays so, look whether the client pops, and trigger a delivery: rmq lite dispatch {group}"),
    )


UNKNOWN_LITE = frozenset({LiteCause.GROUP_UNKNOWN, LiteCause.NO_PARENT, LiteCause.NEVER_WRITTEN, LiteCause.NOT_STORED})
"""Causes of an unknown topic, group or message. Often the name in the question is wrong."""


class LiteFacts(Struct, kw_only=True):
    """All facts about a lite topic and a group, at the broker that has the lite topic.

    Attributes:
        number: the number of a message in the lite topic; None: any message.
        client_id: the client that gets nothing; None: any client.
        topic: the configuration of the parent; None if the broker does not have it.
        routed_perm: the permission of the broker in the route of the parent.
        is_served: False if the broker does not know requests for lite topics.
        is_off: True if the broker's settings switch lite topics off.
        refusal: the broker's remark that refuses a user's right to consume, and the resource; empty texts: none.
        lite_topics, lite_topics_max: number of lite topics of the broker, and their limit; None: unknown.
        subscriptions, subscriptions_max: the same for pairs of a client and a lite topic.
        lifetime_minutes: the lifetime of lite topics of the parent, -1 without one.
        client_names: number of lite topics of the client at the broker; None: it is unknown there.
        clients: the clients of the group at the broker.
    """

    parent: str
    name: str
    group: str
    broker: str
    now_ms: int
    number: int | None = None
    client_id: str | None = None
    user: str = ""
    topic: TopicConfig | None = None
    routed_perm: int = ~0
    is_served: bool = True
    is_off: bool = False
    config: SubscriptionGroupConfig | None = None
    refusal: tuple[str, str] = ("", "")
    place: LiteAt | None = None
    standing: GroupAt | None = None
    lite_topics: int | None = None
    lite_topics_max: int | None = None
    subscriptions: int | None = None
    subscriptions_max: int | None = None
    lifetime_minutes: int = -1
    client_names: int | None = None
    clients: list[ClientAt] = field(default_factory=list)

    @property
    def subscribers(self) -> list[str]:
        """The clients of the group that subscribe to the lite topic; ``*`` for a wildcard group."""
        return [] if self.standing is None else self.standing.clients

    @property
    def is_wildcard(self) -> bool:
        return "*" in self.subscribers

    @property
    def binding(self) -> str | None:
        return None if self.config is None else self.config.lite_parent

    @property
    def asked(self) -> str:
        if self.number is None:
            return _("lite topic {name} of {parent}", name=self.name, parent=self.parent)
        return _("message {number} of lite topic {name} of {parent}", number=self.number, name=self.name,
                 parent=self.parent)  # fmt: skip


_Verdict = tuple[LiteCause, str]


def judge_lite(facts: LiteFacts) -> Explanation:
    """Return the cause that the facts show."""
    cause, sentence = next(verdict for rule in _RULES if (verdict := rule(facts)) is not None)
    named = {"parent": facts.parent, "group": facts.group, "name": facts.name, "broker": facts.broker}
    named |= {"user": facts.user, "resource": facts.refusal[0], "start": facts.name[:4]}
    remedy = _(cause.remedy, **{name: shlex.quote(text) for name, text in named.items()})
    return Explanation(cause, _("{sentence}.", sentence=capital(sentence)), list(_evidence(facts)), remedy)


# -- rules


def _broker(f: LiteFacts) -> _Verdict | None:
    if f.topic is None or not f.topic.is_lite:
        kind = _("missing") if f.topic is None else (f.topic.attributes or {}).get("message.type", "NORMAL")
        text = _("topic {parent} on {broker} is no parent of lite topics: its type is {kind}", parent=f.parent,
                 broker=f.broker, kind=kind)  # fmt: skip
        return LiteCause.NO_PARENT, text
    if not f.is_served:
        return LiteCause.NOT_SERVED, _("broker {broker} does not serve lite topics", broker=f.broker)
    if f.is_off:
        return LiteCause.SWITCHED_OFF, _(
            "broker {broker} stores messages of lite topics, but enters them in no lite topic", broker=f.broker
        )
    return None


def _group(f: LiteFacts) -> _Verdict | None:
    named = {"group": f.group, "broker": f.broker}
    if f.config is None:
        return LiteCause.GROUP_UNKNOWN, _("broker {broker} has no group {group}", **named)
    if not f.config.consume_enable:
        return LiteCause.GROUP_DISABLED, _("group {group} is disabled on {broker} (consumeEnable=false)", **named)
    if f.binding is None:
        return LiteCause.REGULAR_GROUP, _("group {group} is bound to no parent topic: it gets no lite topics", **named)
    if f.binding != f.parent:
        return LiteCause.BOUND_ELSEWHERE, _(
            "group {group} is bound to topic {binding}, not to {parent}", binding=f.binding, parent=f.parent, **named
        )
    return None


def _rights(f: LiteFacts) -> _Verdict | None:
    assert f.topic is not None, "an earlier rule needs the topic"
    perm = f.topic.perm & f.routed_perm
    if not perm & _READ:
        return LiteCause.NOT_READABLE, _(
            "{parent} cannot be read on {broker}: its perm is {perm}", parent=f.parent, broker=f.broker, perm=perm
        )
    resource, remark = f.refusal
    if remark:
        return LiteCause.NO_PERMISSION, _(
            "user {user} may not consume {resource}: {remark}",
            user=f.user,
            resource=resource,
            remark=remark.rstrip("."),
        )
    return None


def _messages(f: LiteFacts) -> _Verdict | None:
    place, number = _place(f), f.number
    if place.is_live is False and place.max_offset:
        return LiteCause.EXPIRED, _(
            "lite topic {name} of {parent} has expired or was deleted; its last message was number {last}, at {time}",
            name=f.name, parent=f.parent, last=place.max_offset - 1, time=utc(place.last_update_timestamp),
        )  # fmt: skip
    if not place.max_offset:
        if f.lite_topics is not None and f.lite_topics_max is not None and f.lite_topics >= f.lite_topics_max:
            return LiteCause.TOO_MANY, _(
                "{asked} has no message: {broker} has {count:,} lite topics, and refuses new ones from {most:,} on",
                asked=f.asked, broker=f.broker, count=f.lite_topics, most=f.lite_topics_max,
            )  # fmt: skip
        gone = _(
            "; lite topics of {parent} expire after {minutes} minutes", parent=f.parent, minutes=f.lifetime_minutes
        )
        may_be_gone = place.is_live is None and f.lifetime_minutes > 0
        return LiteCause.NEVER_WRITTEN, _(
            "{asked} has never had a message on {broker}{gone}", asked=f.asked, broker=f.broker,
            gone=gone if may_be_gone else "",
        )  # fmt: skip
    if number is not None and number >= place.max_offset:
        return LiteCause.NOT_STORED, _(
            "{asked} is not stored: the next message gets number {next}", asked=f.asked, next=place.max_offset
        )
    if (number if number is not None else place.max_offset - 1) < place.min_offset:
        return LiteCause.DELETED, _(
            "{asked} is deleted: the first stored message is number {first}", asked=f.asked, first=place.min_offset
        )
    at = _standing(f).consumer_offset
    if at > (number if number is not None else place.max_offset - 1):
        return LiteCause.CONSUMED, _(
            "group {group} is past {asked}: its offset is {at:,}, the next message gets number {next:,}",
            group=f.group, asked=f.asked, at=at, next=place.max_offset,
        )  # fmt: skip
    return None


def _subscription(f: LiteFacts) -> _Verdict | None:
    named = {"group": f.group, "name": f.name, "client": f.client_id or ""}
    if f.client_id is not None and f.client_names is None:
        return LiteCause.CLIENT_UNKNOWN, _(
            "broker {broker} has no client {client} of group {group}: it sent no subscription for three minutes, or "
            "never one", broker=f.broker, **named,
        )  # fmt: skip
    is_known = _place(f).has_lists  # a broker without lists knows only the clients that sent heartbeats
    if is_known and not f.clients and not [one for one in f.subscribers if one != "*"]:
        return LiteCause.NO_CLIENT, _("no client of group {group} is online", **named)
    if f.is_wildcard or (f.client_id in f.subscribers if f.client_id is not None else f.subscribers):
        return None
    if f.subscribers and f.config is not None and model_of(f.config) == "Exclusive":
        return LiteCause.TAKEN, _(
            "client {holder} of group {group} has lite topic {name}, and a group with the model Exclusive has one "
            "subscriber for each", holder=f.subscribers[0], **named,
        )  # fmt: skip
    if (why := _quota(f)) is not None:
        return LiteCause.QUOTA, why
    if f.client_id is not None:
        text = _("client {client} of group {group} does not subscribe to lite topic {name}", **named)
    else:
        text = _("no client of group {group} subscribes to lite topic {name}", **named)
    return LiteCause.NOT_SUBSCRIBED, text


def _quota(f: LiteFacts) -> str | None:
    """Return the reason why a further subscription is refused, or None if there is room."""
    quota = -1 if f.config is None else f.config.lite_quota
    counts = [f.client_names] if f.client_names is not None else [one.lite_topic_count for one in f.clients]
    if quota >= 0 and counts and all(count >= quota for count in counts):
        who = _("client {client}", client=f.client_id) if f.client_id is not None else _("each client of the group")
        return _("{who} has {count:,} lite topics, and may have {quota:,}", who=who, count=min(counts), quota=quota)
    if f.subscriptions is None or f.subscriptions_max is None or f.subscriptions < f.subscriptions_max:
        return None
    return _(
        "broker {broker} has {count:,} subscriptions of clients to lite topics, and may have {most:,}",
        broker=f.broker, count=f.subscriptions, most=f.subscriptions_max,
    )  # fmt: skip


def _delivery(f: LiteFacts) -> _Verdict:
    standing = _standing(f)
    if standing.unacked_count:
        when = utc(standing.free_at or f.now_ms)
        return LiteCause.UNACKED, _(
            "group {group} has received {count:,} messages of lite topic {name} and not acknowledged them: the others "
            "wait, and these are redelivered at {time}", group=f.group, count=standing.unacked_count, name=f.name,
            time=when,
        )  # fmt: skip
    return LiteCause.WAITING, _(
        "{asked} waits for a pop of group {group}, {lag:,} messages behind: {who}", asked=f.asked, group=f.group,
        lag=standing.lag, who=_poppers(f),
    )  # fmt: skip


def _poppers(f: LiteFacts) -> str:
    """Return a text about the subscribers that should pop."""
    own = [one for one in f.clients if f.is_wildcard or one.client_id in f.subscribers]
    if not own:
        return _("its subscribers are {clients}", clients=", ".join(f.subscribers[:_SHOWN]))
    newest = max(own, key=lambda one: one.last_consume_time)
    if not newest.last_consume_time:
        return _("client {client} has received nothing yet", client=newest.client_id)
    time = utc(newest.last_consume_time)
    return _("client {client} received its last messages at {time}", client=newest.client_id, time=time)


_RULES: tuple[Callable[[LiteFacts], _Verdict | None], ...] = (
    _broker, _group, _rights, _messages, _subscription, _delivery
)  # fmt: skip


def _place(f: LiteFacts) -> LiteAt:
    assert f.place is not None, "a broker that serves the parent reports the lite topic"
    return f.place


def _standing(f: LiteFacts) -> GroupAt:
    assert f.standing is not None, "a broker reports the standing of a group that is bound to the parent"
    return f.standing


# -- evidence


def _evidence(f: LiteFacts) -> Iterator[Fact]:
    broker = _("broker {broker}", broker=f.broker)
    if f.topic is not None:
        yield Fact(
            _("type of {topic}", topic=f.parent), (f.topic.attributes or {}).get("message.type", "NORMAL"), broker
        )
    if f.config is not None:
        yield Fact(_("bound to"), f.binding or _("no topic"), broker)
        yield Fact("consumeEnable", str(f.config.consume_enable).lower(), broker)
    if f.binding is not None and f.config is not None:
        quota = f.config.lite_quota
        yield Fact(_("model"), model_of(f.config), broker)
        yield Fact(_("lite topics per client"), quota if quota >= 0 else _("no limit"), broker)
    if (place := f.place) is not None:
        bounds = _("{first:,} to {next:,}", first=place.min_offset, next=place.max_offset)
        yield Fact(_("its messages"), bounds if place.max_offset else _("none"), broker)
        if place.last_update_timestamp:
            yield Fact(_("last message"), utc(place.last_update_timestamp), broker)
        if place.expires_at > 0:
            yield Fact(_("expires"), utc(place.expires_at), broker)
        if place.epoch is not None:
            yield Fact(_("life"), place.epoch, broker)
    if (standing := f.standing) is not None:
        yield Fact(_("group's offset"), standing.consumer_offset, broker)
        yield Fact(_("subscribers"), ", ".join(standing.clients[:_SHOWN]) or _("none"), broker)
    if f.lite_topics is not None:
        yield Fact(_("lite topics of the broker"), _counted(f.lite_topics, f.lite_topics_max), broker)
    if f.subscriptions is not None:
        yield Fact(_("subscriptions of the broker"), _counted(f.subscriptions, f.subscriptions_max), broker)
    for client in f.clients[:_SHOWN]:
        text = _(
            "{count:,} lite topics, {waiting:,} waiting pops, last request at {time}", count=client.lite_topic_count,
            waiting=client.waiting_count, time=utc(client.last_access_time),
        )  # fmt: skip
        yield Fact(_("client"), _("{client}: {text}", client=client.client_id, text=text), client.broker_name)


def _counted(count: int, most: int | None) -> str:
    return f"{count:,}" if most is None else _("{count:,} of {most:,}", count=count, most=most)
