"""The search for the reason why a lite group gets no messages of a lite topic: `lite_causes` judges the facts.

=============================  =========================================================================================
fact                           requests
=============================  =========================================================================================
the parent and its permission  GET_TOPIC_CONFIG, the route
the group                      GET_ALL_SUBSCRIPTIONGROUP_CONFIG (352 might create it)
the lite topic                 GET_LITE_TOPIC_INFO, GET_PARENT_TOPIC_INFO
the group's offset, batches    GET_LITE_GROUP_INFO, GET_PARENT_TOPIC_INFO
clients                        GET_LITE_GROUP_INFO, GET_LITE_CLIENT_INFO
limits of the broker           GET_BROKER_LITE_INFO, GET_BROKER_CONFIG
the rights of a user           AUTH_LIST_USER, AUTH_LIST_ACL
=============================  =========================================================================================

The requests change nothing. Facts that a broker does not report are missing from the evidence. Source: lite.md §11.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from rmqkit.admin import Admin
from rmqkit.admin.cluster.access import may, subject_of
from rmqkit.admin.cluster.lite import GroupAt
from rmqkit.admin.diagnosis.causes import Explanation
from rmqkit.admin.diagnosis.lite_causes import LiteFacts, judge_lite
from rmqkit.errors import PeerRefused, ProtocolError, RemotingError, SettingsError, UnknownName
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.names import lite_topic_fault
from rmqkit.protocol.schemas.topics import TopicConfig, TopicRequest
from rmqkit.sentences import _

__all__ = ["explain_lite"]

T = TypeVar("T")


# Long: it fills in one fact after the other, and stops at those that need an earlier one.
async def explain_lite(
    admin: Admin,
    parent: str,
    name: str,
    group: str,
    *,
    number: int | None = None,
    client_id: str | None = None,
    user: str = "",
) -> Explanation:
    """Return the reason why a group gets no messages of a lite topic. CONSUMED is a possible result.

    Args:
        number: the number of a message in the lite topic.
        client_id: the client that gets nothing.
        user: a user of the cluster whose right to consume is checked, too.

    Raises UnknownName: there is no such topic, or no such user. Raises SettingsError: the name is not allowed.
    Also raises the errors of `AdminCalls`."""
    if (fault := lite_topic_fault(name)) is not None:
        raise SettingsError(_("lite topic {name!r}: {fault}", name=name, fault=fault))
    calls, lite = admin.calls, admin.lite
    masters = await calls.masters_of_topic(parent)
    facts = await _place(admin, masters, parent, name, group)
    facts.number, facts.client_id, facts.user = number, client_id, user
    address = masters[facts.broker]
    facts.config = (await admin.groups.table(address)).get(group)
    if facts.topic is None or not facts.topic.is_lite or not facts.is_served:
        return judge_lite(facts)
    if user:
        facts.refusal = await _refusal(admin, facts)
    await _add_limits(admin, facts, address)
    if facts.binding == parent:
        clients = facts.standing.clients if facts.standing is not None else []
        facts.standing = await lite.group_at(facts.broker, address, parent, name, group, clients)
        view = await lite.group(group, top=1, broker=address)
        facts.clients = view.clients
        if client_id is not None:
            known = await lite.client_at(address, parent, group, client_id, 1)
            facts.client_names = known.lite_topic_count if known.lite_topic_count >= 0 else None
    else:
        facts.standing = None
    return judge_lite(facts)


async def _place(admin: Admin, masters: dict[str, str], parent: str, name: str, group: str) -> LiteFacts:
    """Return the facts of the broker that has the lite topic, or else of the one to which its messages go."""
    found: list[LiteFacts] = []
    for broker, address in masters.items():
        facts = LiteFacts(parent=parent, name=name, group=group, broker=broker, now_ms=admin.calls.clock.now_ms())
        found.append(facts)
        code, header = RequestCode.GET_TOPIC_CONFIG, TopicRequest(parent)
        facts.topic = await _maybe(admin.calls.fetch(TopicConfig, address, code, header))
        queues = (await admin.calls.route(parent)).queue_datas
        facts.routed_perm = next((data.perm for data in queues if data.broker_name == broker), ~0)
        if facts.topic is None or not facts.topic.is_lite:
            continue
        try:
            facts.place, clients = await admin.lite.place_at(broker, address, parent, name)
        except PeerRefused as error:
            if error.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                raise
            facts.is_served = False
            continue
        facts.standing = GroupAt(group=group, broker_name=broker, clients=clients.get(group, []))
    return max(found, key=_rank)


def _rank(facts: LiteFacts) -> tuple[bool, bool, bool, bool]:
    """Return a key by which the broker with messages is the greatest, then one that had messages."""
    place = facts.place
    if place is None:
        return False, False, False, facts.topic is not None
    return place.max_offset > place.min_offset, place.max_offset > 0, place.is_chosen, True


async def _add_limits(admin: Admin, facts: LiteFacts, address: str) -> None:
    """Add the limits of the broker, if the user may see them."""
    settings = await _maybe(admin.brokers.config(address))
    info = await _maybe(admin.lite.brokers(facts.broker))
    config = settings[address] if settings is not None else {}
    if info is not None:
        counts = info[facts.broker]
        facts.lite_topics, facts.subscriptions = counts.current_lmq_num, counts.lite_subscription_count
        facts.lifetime_minutes = counts.topic_meta.get(facts.parent, -1)
        # Apache's brokers have the limit of lite topics only with enableLmqQuota.
        is_limited = config.get("enableLmqQuota", "true") == "true"
        facts.lite_topics_max = counts.max_lmq_num if is_limited else None
    most = config.get("maxLiteSubscriptionCount", "")
    facts.subscriptions_max = int(most) if most.isdecimal() else None
    # rmqkit's brokers enter lite topics without these settings, and list names; Apache's do neither.
    needed = (config.get("enableLmq"), config.get("enableMultiDispatch"))
    facts.is_off = facts.place is not None and not facts.place.has_lists and "false" in needed


async def _refusal(admin: Admin, facts: LiteFacts) -> tuple[str, str]:
    """Return the resource that the user may not consume and the broker's remark; two empty texts if there is none.
    Raises UnknownName: there is no such user."""
    users = {one.username: one for one in await admin.access.users(facts.user, facts.broker)}
    if facts.user not in users:
        raise UnknownName(_("user"), facts.user, _("broker {broker}", broker=facts.broker), users)
    acls = (await admin.access.policies(facts.user, facts.broker))[facts.broker]
    own = next((one for one in acls if one.subject == subject_of(facts.user)), None)
    for resource in (f"Group:{facts.group}", f"Topic:{facts.parent}"):
        remark = may(facts.user, users[facts.user].user_type, own, resource, "Sub", "?")
        if remark:
            return resource, remark
    return "", ""


async def _maybe(asking: Awaitable[T]) -> T | None:
    """Return an answer, or None after an error."""
    try:
        return await asking
    except (PeerRefused, RemotingError, ProtocolError, UnknownName):
        return None
