"""The reason why a group did not consume a message, as a pure function of `Facts`.

The rules are applied in this order. The first rule with a result names the cause.

===================  ============================================================================================
rule                 causes
===================  ============================================================================================
nothing stored       expired, not stored, wrong kind of id, not in this cluster, wrong topic
dead letter          dead letter
scheduled            delayed, recalled, retrying; clock skew
half message         transaction pending, rolled back, given up; clock skew
broadcasting         broadcasting, broadcast forbidden
group is past it     consumed, filtered by tag or SQL92, subscriptions differ, skipped, popped
closed               group unknown or disabled, read forbidden, topic not readable, queue not read, no client online
not wanted           subscriptions differ, not subscribed, filtered by tag or SQL92
not shared out       queue has no owner
waiting              retrying, waiting
===================  ============================================================================================

A broker knows which messages it delivered to a group, and the offsets that the group committed. It does not know the
results of handlers. The sentences therefore say that a group "is past" a message, and "succeeded" only if a trace shows
the success.

A message may be stored several times under one unique key: as a half message, as a scheduled message, in its topic, in
a retry topic, and as a dead letter. Each copy is a separate record in a separate topic.
Source: behaviour.md §3.4, §3.7, §4, §5, §6.1, §8, §9.1–9.3; remoting.md §7.4.
"""

from __future__ import annotations

import enum
import shlex
from collections.abc import Callable, Iterator
from typing import Any, Self

from msgspec import Struct, field

from rmqkit.admin.messages.messages import TraceRow
from rmqkit.client.observe.status import utc
from rmqkit.filter import codes_of, is_tag_type, matches_tags
from rmqkit.protocol import names
from rmqkit.protocol import properties as prop
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.properties import java_hash
from rmqkit.protocol.schemas.clients import (
    ConsumerConnection,
    ConsumerRunningInfo,
    MessageQueue,
    ProcessQueueInfo,
    SubscriptionData,
)
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.protocol.schemas.topics import Permission
from rmqkit.sentences import _, capital, joined, marked

__all__ = ["Cause", "Explanation", "Fact", "Facts", "Lookup", "Place", "Reason", "Transaction", "judge"]

_SKEW_MS = 5_000
"""Smaller differences between clocks are ignored, because a send may take 5 s."""
_LATE_MS = 5_000
"""The delay after the due time from which a message counts as late."""
_SHOWN = 5


class Reason(enum.StrEnum):
    """The base of causes: a text, and the remedy, which may have placeholders for names."""

    remedy: str

    def __new__(cls, text: str, remedy: str) -> Self:
        cause = str.__new__(cls, text)
        cause._value_, cause.remedy = text, remedy
        return cause


class Cause(Reason):
    """The reason why a message was not consumed, and the remedy. CONSUMED means that nothing is wrong."""

    CONSUMED = marked("consumed"), marked("none needed; to see the results of handlers, switch traces on")
    FILTERED_BY_TAG = (
        marked("filtered by tag"),
        marked("change the subscription of all its clients, or the tag that is sent"),
    )
    FILTERED_BY_SQL92 = (
        marked("filtered by SQL92"),
        marked("change the subscription of all its clients, or the properties"),
    )
    SUBSCRIPTIONS_DIFFER = (
        marked("subscriptions differ"),
        marked("give all clients of the group the same subscriptions"),
    )
    NOT_SUBSCRIBED = (
        marked("not subscribed"),
        marked("have the group's clients subscribe to {topic}, or ask about the group that does"),
    )
    NO_CONSUMER_ONLINE = (
        marked("no consumer online"),
        marked("start one; if one runs, see in its log whether it connects"),
    )
    GROUP_UNKNOWN = (
        marked("group unknown"),
        marked("a consumer that starts creates its group; if the name is wrong, list the groups: rmq group list"),
    )
    GROUP_DISABLED = marked("group disabled"), marked("enable it: rmq group create {group} -s true")
    READ_FORBIDDEN = marked("read forbidden"), marked("lift the group's forbidden bit of {topic}")
    BROADCASTING = marked("broadcasting"), marked("look at the client that misses it, and at its offsets.json")
    BROADCAST_FORBIDDEN = (
        marked("broadcast forbidden"),
        marked("allow it: rmq group create {group} -d true; or use CLUSTERING"),
    )
    TOPIC_NOT_READABLE = (
        marked("topic not readable"),
        marked(
            "allow reading: rmq topic perm {queue_topic} rw; or of the whole broker: rmq broker perm rw -b {broker}"
        ),
    )
    QUEUE_NOT_READ = (
        marked("queue not read"),
        marked(
            "raise the read queues until it is empty: rmq topic create {queue_topic} -b {broker} -r {reads} -w {writes}"
        ),
    )
    NO_OWNER = (
        marked("queue has no owner"),
        marked("look for clients with equal ids, or with unlike allocation strategies"),
    )
    WAITING = (
        marked("waiting"),
        marked("if it stays so, look at that client (rmq consumer status {group}), or add consumers"),
    )
    SKIPPED = marked("skipped"), marked("go back before the message: rmq offset reset {group} {topic} {stored_ms}")
    POPPED = marked("popped"), marked("wait for the end of its invisible time: then it is acknowledged or redelivered")
    RETRYING = marked("retrying"), marked("see in the consumer's log why it failed, and fix the handler")
    DEAD_LETTER = (
        marked("dead letter"),
        marked("fix the handler, then send the dead letters again: rmq replay --dlq {group}"),
    )
    DELAYED = marked("delayed"), marked("wait, or send it without a delay")
    RECALLED = marked("recalled"), marked("send it again if it is wanted after all")
    TRANSACTION_PENDING = (
        marked("transaction pending"),
        marked("have a producer of its group commit it or roll it back"),
    )
    ROLLED_BACK = marked("transaction rolled back"), marked("ask its producer why; send it again if it is wanted")
    GIVEN_UP = marked("transaction given up"), marked("have producers of its group answer checks, and send it again")
    CLOCK_SKEW = marked("clock skew"), marked("set the producer's clock, and send it again")
    EXPIRED = marked("expired"), marked("keep messages longer (fileReservedTime), or consume sooner")
    NOT_STORED = marked("not stored"), marked("check whether the send succeeded, and whether the name is complete")
    WRONG_KIND_OF_ID = marked("wrong kind of id"), marked("ask with --key, or with the id of one of them")
    NOT_IN_CLUSTER = marked("not in this cluster"), marked("ask the name servers of the cluster it was sent to (-n)")
    WRONG_TOPIC = marked("wrong topic"), marked("ask about the topic it is in")


UNKNOWN = frozenset(
    {Cause.GROUP_UNKNOWN, Cause.NOT_STORED, Cause.WRONG_KIND_OF_ID, Cause.WRONG_TOPIC, Cause.NOT_IN_CLUSTER}
)
"""Causes of an unknown group or message. Often the name in the question is wrong."""


class Fact(Struct):
    """A fact, and the ``source`` that shows the fact."""

    name: str
    value: str | int
    source: str


class Explanation(Struct):
    """The answer: a cause, a sentence for the user, the facts behind the cause, and a remedy."""

    cause: Reason
    sentence: str
    evidence: list[Fact]
    remedy: str


_Verdict = tuple[Cause, str]


def judge(facts: Facts) -> Explanation:
    """Return the cause that the facts show."""
    cause, sentence = next(verdict for rule in _RULES if (verdict := rule(facts)) is not None)
    remedy = _(cause.remedy, **_of_commands(facts))
    return Explanation(cause, _("{sentence}.", sentence=capital(sentence)), list(_evidence(facts)), remedy)


def _of_commands(f: Facts) -> dict[str, str | int]:
    """Return the values for the placeholders in remedies. Names are quoted for a shell."""
    found: dict[str, str | int] = {"topic": shlex.quote(f.topic), "group": shlex.quote(f.group)}
    if f.message is not None:
        found["stored_ms"] = f.message.store_timestamp
    if f.place is not None:
        found["broker"], found["queue_topic"] = shlex.quote(f.place.broker), shlex.quote(f.place.topic)
        found["reads"] = max(f.place.read_queues, f.place.queue_id + 1)
        found["writes"] = f.place.write_queues
    return found


# -- no message is in a queue


def _nothing_stored(f: Facts) -> _Verdict | None:
    if f.message is not None or f.copies:
        return None
    if (place := f.place) is None:
        return _unknown_name(f, f.lookup)
    if not place.max_offset and place.queue_id >= place.read_queues:
        return Cause.NOT_STORED, _(
            "{asked} is not stored: {place} does not exist, it reads {reads} there",
            place=place,
            reads=place.read_queues,
            **f.named,
        )
    if place.offset >= place.max_offset:
        return Cause.NOT_STORED, _(
            "{asked} is not stored: {place} ends at offset {end:,}", place=place, end=place.max_offset, **f.named
        )
    end = _("past it, but this does not show whether it was read in time") if f.is_past else _("not past it")
    return Cause.EXPIRED, _(
        "{asked} is deleted: {place} begins at {begin:,} now; group {group} is {end}",
        place=place,
        begin=place.min_offset,
        end=end,
        **f.named,
    )


def _unknown_name(f: Facts, known: Lookup) -> _Verdict:
    if known.elsewhere is not None:
        return Cause.WRONG_TOPIC, _(
            "{asked} is not in topic {topic}: it was stored in {other}", other=known.elsewhere.topic, **f.named
        )
    if known.as_key:
        ids = list(dict.fromkeys(one.msg_id for one in known.as_key))
        have = _("{count} of topic {topic}: {ids}", count=_messages(len(ids)), ids=", ".join(ids[:_SHOWN]), **f.named)
        return Cause.WRONG_KIND_OF_ID, _(
            "{asked} is named by a key, not by an id; it is that of {have}", asked=f.asked, have=have
        )
    if known.address and not known.is_known:
        return Cause.NOT_IN_CLUSTER, _(
            "{asked} is of broker {address}, which is not in this cluster, or down", address=known.address, **f.named
        )
    if known.log_min is not None and known.physical_offset < known.log_min:
        return Cause.EXPIRED, _(
            "{asked} is deleted: the log of {address} now begins after it", asked=f.asked, address=known.address
        )
    where = (
        _("no message of {address} begins at that place", address=known.address)
        if known.address
        else _("no broker's index has it")
    )
    why = _("it was never stored, is deleted by now, or its broker is down")
    return Cause.NOT_STORED, _("{asked} is not in topic {topic}: {where}; {why}", where=where, why=why, **f.named)


def _half_message(f: Facts) -> _Verdict | None:
    if f.message is not None or (found := f.transaction) is None:
        return None
    checked = _("{checks} of {limit} checks", checks=found.checks, limit=found.checks_max)
    if found.is_given_up:
        skew = found.half.store_timestamp - found.half.born_timestamp
        if skew > _SKEW_MS and found.checks < found.checks_max:
            why = _("it looks too old as its producer's clock is {span} behind the broker's", span=_span(skew))
            return Cause.CLOCK_SKEW, _(
                "the transaction of {asked} was given up after {checked}: {why}", checked=checked, why=why, **f.named
            )
        return Cause.GIVEN_UP, _(
            "the transaction of {asked} was given up: no decision after {checked}", asked=f.asked, checked=checked
        )
    if found.is_ended:
        return Cause.ROLLED_BACK, _(
            "the transaction of {asked} was rolled back: it ended, and {topic} has nothing", **f.named
        )
    group = found.half.properties.get(prop.PRODUCER_GROUP, "?")
    nobody = _("; no producer of group {group} is online to be asked", group=group) if found.producers == 0 else ""
    return Cause.TRANSACTION_PENDING, _(
        "the transaction of {asked} is pending: no end is recorded, {checked}{nobody}",
        checked=checked,
        nobody=nobody,
        **f.named,
    )


def _dead(f: Facts) -> _Verdict | None:
    if (dead := f.dead_letter) is None:
        return None
    return Cause.DEAD_LETTER, _(
        "group {group} gave {asked} up: it failed {times}, {why}, and is in {dead}",
        times=_times(dead),
        why=why_dead(f, dead),
        dead=dead.topic,
        **f.named,
    )


def why_dead(f: Facts, letter: ReceivedMessage) -> str:
    """Return the reason in a dead letter as a text for operators."""
    if f.hides_bodies:
        return _("its reason is hidden from you here")
    if not (reason := letter.properties.get(prop.DEAD_LETTER_REASON)):
        return _("its consumer gave no reason")
    if not (handler := letter.properties.get(prop.DEAD_LETTER_HANDLER)):
        return reason
    return _("{reason} in {handler}", reason=reason, handler=handler)


def _scheduled(f: Facts) -> _Verdict | None:
    if (copy := f.scheduled) is None:
        return None
    when = _("at a time that the broker did not report") if f.due_ms is None else _("at {time}", time=utc(f.due_ms))
    if f.due_ms is not None and f.due_ms < f.now_ms - _LATE_MS:
        when = _("{when}, which is past: the broker does not deliver, or its clock is behind", when=when)
    if copy.properties.get(prop.REAL_TOPIC) != f.topic:
        retry = _("retry {times} of {limit}", times=copy.reconsume_times, limit=f.retries_max)
        return Cause.RETRYING, _(
            "group {group} failed to consume {asked}: {retry} comes {when}", retry=retry, when=when, **f.named
        )
    if any(prop.TIMER_DELETE_KEY in one.properties for one in f.copies):
        return Cause.RECALLED, _("{asked} was recalled before it was due", asked=f.asked)
    skew = copy.born_timestamp - copy.store_timestamp
    if prop.TIMER_DELIVER_MS in copy.properties and abs(skew) > _SKEW_MS:
        theirs = _(
            "by the broker's clock; its producer's is {span} {value}",
            span=_span(abs(skew)),
            value=_("ahead") if skew > 0 else _("behind"),
        )
        return Cause.CLOCK_SKEW, _("{asked} will be delivered {when} {theirs}", asked=f.asked, when=when, theirs=theirs)
    return Cause.DELAYED, _("{asked} is delayed: it will be delivered {when}", asked=f.asked, when=when)


# -- the message is in a queue


def _broadcasting(f: Facts) -> _Verdict | None:
    if f.connection is None or f.connection.message_model != "BROADCASTING":
        return None
    if f.config is not None and not f.config.consume_broadcast_enable:
        return Cause.BROADCAST_FORBIDDEN, _(
            "group {group} may not consume by broadcasting, and its clients try to", group=f.group
        )
    past = sum(f.place is not None and held.commit_offset > f.place.offset for held in f.owners.values())
    clients = _(
        "{past} of {count} clients online say that they are past {asked}", past=past, count=len(f.members), **f.named
    )
    return Cause.BROADCASTING, _(
        "group {group} broadcasts, so that each client keeps an offset of its own; {clients}",
        clients=clients,
        **f.named,
    )


def _passed(f: Facts) -> _Verdict | None:
    if any(one.status == "success" for one in f.traces):
        return Cause.CONSUMED, _("group {group} consumed {asked}: a trace says that its handler succeeded", **f.named)
    if not f.is_past or (place := f.place) is None:
        return None
    if f.retry is not None:
        return Cause.CONSUMED, _(
            "group {group} consumed {asked} on retry {number}, as it is past that and nothing came back",
            number=f.retry.reconsume_times,
            **f.named,
        )
    if (unwanted := _not_wanted(f)) is not None:
        return unwanted
    offsets = _("its offset is {at:,}, past {offset:,}", at=f.consumed_offset, offset=place.offset)
    if f.is_fetched is False:
        how = _("a reset, or a start from the last offset, does that")
        given = _(
            "{offsets}, and the broker gave it nothing of that queue since the message was stored", offsets=offsets
        )
        return Cause.SKIPPED, _("group {group} skipped {asked}: {given}; {how}", given=given, how=how, **f.named)
    if acks := sum(f.waiting_acks.values()):
        unknown = _(
            "{count} of {place} await an acknowledgement, perhaps this one, too",
            count=_popped(acks),
            place=place,
        )
        return Cause.POPPED, _("group {group} popped past {asked}: {unknown}", unknown=unknown, **f.named)
    unknown = _("brokers do not record the result of its handler")
    return Cause.CONSUMED, _(
        "group {group} is past {asked}: {offsets}, and it did not come back; {unknown}",
        offsets=offsets,
        unknown=unknown,
        **f.named,
    )


def _closed(f: Facts) -> _Verdict | None:
    place = _place(f)
    if f.config is None:
        return Cause.GROUP_UNKNOWN, _("broker {broker} has no group {group}", broker=place.broker, group=f.group)
    if not f.config.consume_enable:
        return Cause.GROUP_DISABLED, _(
            "group {group} is disabled on {broker} (consumeEnable=false)", group=f.group, broker=place.broker
        )
    if f.is_read_forbidden:
        return Cause.READ_FORBIDDEN, _(
            "group {group} is forbidden to read topic {topic} on {broker}", broker=place.broker, **f.named
        )
    if not place.perm & Permission.READ:
        return Cause.TOPIC_NOT_READABLE, _(
            "{topic} cannot be read on {broker}: its perm is {perm}",
            topic=place.topic,
            broker=place.broker,
            perm=place.perm,
        )
    if place.queue_id >= place.read_queues:
        return Cause.QUEUE_NOT_READ, _(
            "nobody reads {place}: it has {count} there", place=place, count=_read_queues(place.read_queues)
        )
    if f.connection is None or not f.connection.connection_set:
        known = f.consumed_offset
        where = (
            _("it has no offset there")
            if known is None
            else _("its offset is {known:,}, not past {offset:,}", known=known, offset=place.offset)
        )
        return Cause.NO_CONSUMER_ONLINE, _(
            "no consumer of group {group} is online to get {asked}: {where}", where=where, **f.named
        )
    return None


def _not_wanted(f: Facts) -> _Verdict | None:
    """Return a verdict if the subscriptions exclude the message. A retry is delivered regardless of its tag."""
    message, own = f.message, f.subscriptions
    if f.connection is None or message is None or f.retry is not None:
        return None
    subscription = f.connection.subscription_table.get(f.topic)
    if len({_expression(one) for one in own.values()}) > 1 and not all(_wants(one, message) for one in own.values()):
        some = sorted(own.items())[:_SHOWN]
        each = joined(", ", [_("{client} {what}", client=client, what=_expression(one)) for client, one in some])
        return Cause.SUBSCRIPTIONS_DIFFER, _(
            "the clients of group {group} subscribe to {topic} differently: {each}", each=each, **f.named
        )
    if subscription is None:  # a group that is past the message may have had a subscription before
        return (
            None
            if f.is_past
            else (
                Cause.NOT_SUBSCRIBED,
                _("group {group} does not subscribe to topic {topic}", **f.named),
            )
        )
    if _wants(subscription, message):
        return None
    is_tag = is_tag_type(subscription.expression_type)
    has = _("its tag is {tags}", tags=message.tags or _("none")) if is_tag else _("its properties do not satisfy that")
    wants = _("group {group} subscribes to {filter}, and {has}", group=f.group, filter=subscription.sub_string, has=has)
    younger = _("the subscription is younger than the message, and may have been another when the group passed it")
    is_younger = f.is_past and subscription.sub_version > message.store_timestamp
    cause = Cause.FILTERED_BY_TAG if is_tag else Cause.FILTERED_BY_SQL92
    why = joined("; ", [wants, younger] if is_younger else [wants])
    return cause, _("{asked} is filtered: {why}", asked=f.asked, why=why)


def _not_shared_out(f: Facts) -> _Verdict | None:
    if f.owners or f.waiting_acks or not f.members or None in f.members.values():
        return None
    where = _("{place}, where {asked} is ({online} online)", place=_place(f), asked=f.asked, online=len(f.members))
    return Cause.NO_OWNER, _("no client of group {group} holds {where}", group=f.group, where=where)


def _waiting(f: Facts) -> _Verdict:
    place = _place(f)
    ahead = place.offset - max(f.consumed_offset or 0, place.min_offset)
    where = (
        _("behind {count} of {place}", count=_messages(ahead), place=place)
        if ahead > 0
        else _("as the next of {place}", place=place)
    )
    if f.retry is not None:
        retry = _("retry {times} of {limit} of {asked}", times=f.retry.reconsume_times, limit=f.retries_max, **f.named)
        return Cause.RETRYING, _("{asked} waits {where}: {why}", asked=retry, where=where, why=_holder(f, place))
    return Cause.WAITING, _("{asked} waits {where}: {why}", asked=f.asked, where=where, why=_holder(f, place))


def _holder(f: Facts, place: Place) -> str:
    """Return a text about the client that has the queue, and the reason why this client has not handled the message."""
    if not f.owners:
        return (
            _("{client} pops it", client=next(iter(f.waiting_acks)))
            if f.waiting_acks
            else _("its owner did not answer")
        )
    client, held = next(iter(f.owners.items()))
    if held.cached_msg_count and held.cached_msg_min_offset <= place.offset <= held.cached_msg_max_offset:
        count = _messages(held.cached_msg_count)
        if held.cached_msg_min_offset == place.offset:
            return _("{client} holds it, as the first of {count}, and has not finished it", client=client, count=count)
        return _("{client} holds it, among {count}, and has not finished it", client=client, count=count)
    info = f.members[client]
    if info is not None and info.properties.get("PROP_CONSUMEORDERLY") == "true" and not held.locked:
        return _("{client} consumes in order and has no lock of the queue", client=client)
    pulled = (
        _("its last pull was at {time}", time=utc(held.last_pull_timestamp))
        if held.last_pull_timestamp
        else _("it never pulled")
    )
    return _("{client} did not fetch it yet, {pulled}", client=client, pulled=pulled)


_RULES: tuple[Callable[[Facts], _Verdict | None], ...] = (
    *(_nothing_stored, _dead, _scheduled, _half_message),
    *(_broadcasting, _passed, _closed, _not_wanted, _not_shared_out, _waiting),
)


# -- parts of sentences


def _place(f: Facts) -> Place:
    assert f.place is not None, "a message that is in a queue has a place"
    return f.place


def _messages(count: int) -> str:
    return _("{count:,} message", count=count) if count == 1 else _("{count:,} messages", count=count)


def _popped(count: int) -> str:
    return _("{count:,} popped message", count=count) if count == 1 else _("{count:,} popped messages", count=count)


def _read_queues(count: int) -> str:
    return _("{count:,} read queue", count=count) if count == 1 else _("{count:,} read queues", count=count)


def _times(message: ReceivedMessage) -> str:
    return _("once") if message.reconsume_times == 1 else _("{times} times", times=message.reconsume_times)


def _span(ms: int) -> str:
    units = ((_("{count} days"), 86_400_000), (_("{count} hours"), 3_600_000), (_("{count} minutes"), 60_000))
    known = next(((name, size) for name, size in units if ms >= 2 * size), None)
    if known is None:
        return f"{ms // 1000} s" if ms >= 2000 else f"{ms} ms"
    return _(known[0], count=ms // known[1])


def _expression(subscribed: SubscriptionData | None) -> str:
    if subscribed is None:
        return _("nothing")
    is_tag = is_tag_type(subscribed.expression_type)
    return " || ".join(sorted(subscribed.tags_set)) or "*" if is_tag else f"SQL92 {subscribed.sub_string}"


def _wants(subscribed: SubscriptionData | None, message: ReceivedMessage) -> bool:
    """Return True if the filters of broker and client accept a message. An invalid expression accepts no message."""
    if subscribed is None:
        return False
    if is_tag_type(subscribed.expression_type):
        codes = codes_of(subscribed)
        return (codes is None or java_hash(message.tags or "") in codes) and matches_tags(subscribed, message.tags)
    from rmqkit.filter.sql92 import ExpressionRejected, compile_expression  # slow to import, and few groups need it

    try:
        expression = compile_expression(subscribed.sub_string)
    except ExpressionRejected:
        return False
    return expression.matches(prop.encode_properties(message.properties))


# -- evidence


def _evidence(f: Facts) -> Iterator[Fact]:
    """Yield the facts about the message, the queue, the group and the members of the group."""
    for one in filter(None, (f.message, f.lookup.elsewhere, *f.copies, *f.lookup.as_key[:_SHOWN])):
        retried = _(", failed {times}", times=_times(one)) if one.reconsume_times else ""
        at = _(
            "{topic}, queue {queue}, offset {offset:,}{retried}, at {time}",
            topic=one.topic,
            queue=one.queue_id,
            offset=one.queue_offset,
            retried=retried,
            time=utc(one.store_timestamp),
        )
        yield Fact(_("stored in"), at, _("broker {broker}", broker=one.broker_name))
    if f.message is not None:
        yield Fact(_("id"), f.message.msg_id, _("message"))
        yield Fact(_("tag"), f.message.tags or _("none"), _("message"))
        skew = f.message.born_timestamp - f.message.store_timestamp
        if skew > _SKEW_MS:
            yield Fact(
                _("producer's clock"), _("{span} ahead of the broker's", span=_span(skew)), _("born and store time")
            )
    if f.due_ms is not None:
        yield Fact(_("due"), utc(f.due_ms), _("queue entry"))
    if (found := f.transaction) is not None:
        yield Fact(
            _("checks"),
            _("{checks} of {limit}", checks=found.checks, limit=found.checks_max),
            _("half message"),
        )
        yield Fact(_("its end"), _("recorded") if found.is_ended else _("not recorded"), _("op topic"))
        yield Fact(_("producers online"), _("unknown") if found.producers is None else found.producers, _("broker"))
    if (known := f.lookup).address:
        yield Fact(
            _("broker in the id"), known.address, _("in the cluster") if known.is_known else _("not in the cluster")
        )
        at = f"{known.physical_offset:,}"
        if known.log_min is not None:
            at = _("{at}, the log has {begin:,} to {end:,}", at=at, begin=known.log_min, end=known.log_max or 0)
        yield Fact(_("place in its log"), at, _("id, runtime info"))
    if known.brokers:
        yield Fact(
            _("asked"),
            _(
                "{brokers} about {topic} and {others} others",
                brokers=", ".join(known.brokers),
                others=known.topics_searched,
                **f.named,
            ),
            _("indexes"),
        )
    if f.place is not None:
        yield from _group_evidence(f, f.place)
    for trace in f.traces:
        yield Fact(
            _("handler"),
            _("{status}, began at {time}", status=trace.status, time=utc(trace.timestamp)),
            _("trace of {host}", host=trace.client_host),
        )


def _group_evidence(f: Facts, place: Place) -> Iterator[Fact]:
    broker, online = _("broker {broker}", broker=place.broker), f.connection
    yield Fact(
        _("its offset"),
        _(
            "{offset:,} of {begin:,} to {end:,} in {place}",
            offset=place.offset,
            begin=place.min_offset,
            end=place.max_offset,
            place=place,
        ),
        broker,
    )
    yield Fact(_("group's offset"), _("none") if place.committed is None else place.committed, broker)
    if f.is_fetched is not None:
        yield Fact(
            _("given to it"), _("at least one message") if f.is_fetched else _("no message since it started"), broker
        )
    if f.config is not None:
        yield Fact("consumeEnable", str(f.config.consume_enable).lower(), broker)
    yield Fact(_("clients online"), len(online.connection_set) if online is not None else 0, _("brokers"))
    if online is not None:
        yield Fact(_("subscription"), _expression(online.subscription_table.get(f.topic)), _("brokers"))
        named = (online.message_model, online.consume_type, online.consume_from_where)
        model, how, start = (_((one or "").replace("CONSUME_", "").lower()) for one in named)
        yield Fact(_("kind"), _("{model} {how} {start}", model=model, how=how, start=start), _("brokers"))
    for client, info in list(f.members.items())[:_SHOWN]:
        standing = _("did not answer") if info is None else _("does not hold the queue")
        if client in f.waiting_acks:
            standing = _("pops the queue, {count:,} await an acknowledgement", count=f.waiting_acks[client])
        if info is not None and (held := f.owners.get(client)) is not None:
            why = info.user_consumer_info.get(f"{place.topic} {place.broker} {place.queue_id}", "")
            standing = _(
                "holds the queue, is at {offset:,}, {count:,} unfinished",
                offset=held.commit_offset,
                count=held.cached_msg_count,
            )
            standing = joined("; ", [standing, why] if why else [standing])
        yield Fact(_("client"), _("{client} {standing}", client=client, standing=standing), _("running info"))


_CHECKS_MAX = 15


class Place(Struct):
    """The place in a queue from which the group gets the message: the place of the message or of its latest retry.

    Attributes:
        min_offset, max_offset: the first stored offset of the queue, and its end.
        committed: the offset of the group at the broker, or None if the broker has no offset.
        perm: the `Permission` bits of the topic on the broker.
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
    write_queues: int

    def __str__(self) -> str:
        return _("queue {queue} of {topic} on {broker}", queue=self.queue_id, topic=self.topic, broker=self.broker)


class Transaction(Struct, kw_only=True):
    """The state of a half message.

    Attributes:
        half: the latest copy of the half message; every check-back writes a copy.
        is_given_up: True if a copy is in TRANS_CHECK_MAX_TIME_TOPIC.
        is_ended: True if an op record names the half message, or the check-back of the broker is past it.
        checks_max: the broker's ``transactionCheckMax``.
        producers: the number of online members of the producer group; None if the broker did not return them.
    """

    half: ReceivedMessage
    is_given_up: bool = False
    is_ended: bool = False
    checks_max: int = _CHECKS_MAX
    producers: int | None = None

    @property
    def checks(self) -> int:
        """The number of check-backs that the broker has sent to the producer."""
        text = self.half.properties.get(prop.TRANSACTION_CHECK_TIMES, "")
        return int(text) if text.isdecimal() else 0


class Lookup(Struct, kw_only=True):
    """Further facts about a name, if the topic has no message with the name.

    Attributes:
        address, physical_offset: the parts of the name, if the name is an offset message id.
        is_known: True if the name servers know a broker with this ``address``.
        log_min, log_max: the bounds of the commit log of this broker.
        as_key: messages of the topic with the name as a key.
        elsewhere: a message in another topic with the name as its id.
        topics_searched: the number of other topics that were searched.
        brokers: the brokers whose indexes were searched.
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
    """All facts about a message and its group.

    Attributes:
        asked: the name of the message in the question, such as ``message 7F00…``.
        message: the message in the topic.
        copies: other messages with the same unique key.
        due_ms: the delivery time of the latest scheduled copy.
        place: see `Place`. It is also set if the question names an offset without a message.
        config: the group's configuration at the broker; None if the broker does not have the group.
        is_read_forbidden: True if the group is forbidden to read the topic.
        connection: the online members and their subscriptions, as the brokers report them; None if no member is online.
        members: the running info of each member by client id, or None if the member did not answer.
        is_fetched: True if the broker's counters show that the group got messages of the queue since the message was
            stored; None if the counters do not show this.
        traces: the trace records of clients of the group that handled the message.
        hides_bodies: True if the user is not allowed to see bodies. The reasons in dead letters are then hidden, too,
            because they often quote bodies.
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
    hides_bodies: bool = False

    @property
    def retry(self) -> ReceivedMessage | None:
        """The latest copy of the message in a retry topic of the group."""
        return max((one for one in self.copies if one.topic.startswith(names.RETRY_PREFIX)), key=_age, default=None)

    @property
    def scheduled(self) -> ReceivedMessage | None:
        """The latest copy of the message that waits for its delivery time."""
        waiting = [one for one in self.copies if one.topic in (names.SCHEDULE_TOPIC, names.TIMER_TOPIC)]
        latest = max(waiting, key=_age, default=None)
        if latest is None or latest.properties.get(prop.REAL_TOPIC) == self.topic:
            return latest if self.message is None else None
        is_back = self.retry is not None and self.retry.reconsume_times >= latest.reconsume_times
        return None if is_back else latest

    @property
    def dead_letter(self) -> ReceivedMessage | None:
        """The copy of the message among the group's dead letters."""
        return next((one for one in self.copies if one.topic.startswith(names.DLQ_PREFIX)), None)

    @property
    def owners(self) -> dict[str, ProcessQueueInfo]:
        """The members that have the queue, with the state of the queue at each member."""
        if self.place is None:
            return {}
        queue = MessageQueue(self.place.topic, self.place.broker, self.place.queue_id)
        held = {client: info.mq_table.get(queue) for client, info in self.members.items() if info is not None}
        return {client: one for client, one in held.items() if one is not None and not one.droped}

    @property
    def waiting_acks(self) -> dict[str, int]:
        """The members that pop the queue, with the number of messages that each member has not acknowledged."""
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
        """The subscription of each member to the topic, or None if the member has no subscription. Members that did not
        answer are missing."""
        return {
            client: next((one for one in info.subscription_set if one.topic == self.topic), None)
            for client, info in self.members.items()
            if info is not None
        }

    @property
    def consumed_offset(self) -> int | None:
        """The highest offset that the broker or an owner has for the group. Owners commit their offsets every 5 s."""
        offsets = [held.commit_offset for held in self.owners.values() if held.commit_offset >= 0]
        committed = self.place.committed if self.place is not None else None
        return max(offsets if committed is None else (*offsets, committed), default=None)

    @property
    def named(self) -> dict[str, Any]:
        """The values for the placeholders ``asked``, ``group`` and ``topic``, which most sentences contain."""
        return {"asked": self.asked, "group": self.group, "topic": self.topic}

    @property
    def is_past(self) -> bool:
        """Return True if the offset of the group is greater than the offset of the message."""
        return self.place is not None and (self.consumed_offset or 0) > self.place.offset

    @property
    def retries_max(self) -> int:
        """The maximum number of retries: the lowest limit of a client, or the limit of the group if no client has
        one."""
        limits = [info.properties.get("maxReconsumeTimes", "") for info in self.members.values() if info is not None]
        own = [int(text) for text in limits if text.isdecimal()]
        return min(own) if own else self.config.retry_max_times if self.config is not None else 16


def _age(message: ReceivedMessage) -> tuple[int, int]:
    return message.reconsume_times, message.store_timestamp
