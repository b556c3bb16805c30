"""SyncLiteSubscription: the lite topics of each lite consumer (``LiteSubscriptionService``).

A lite consumer sends changes of its set of lite topics, and the whole set after its start and every 30 s. The endpoint
passes each change to all brokers with readable queues of the parent topic, because every broker may have some of the
lite topics. All brokers must accept the change.

==================================  ==================================================================================
event                               request to brokers
==================================  ==================================================================================
SyncLiteSubscription                the same change
NotifyClientTermination             COMPLETE_REMOVE
the client's Telemetry stream ends  COMPLETE_REMOVE; the endpoint still remembers the set
the client sends settings again     COMPLETE_ADD of the remembered set
a pop is answered with ``resync``   the same, for this broker: it has restarted and does not know the client
a broker's notice                   none: another client of an exclusive group has taken the lite topic
==================================  ==================================================================================

Apache's proxy does not remember the set: after a reconnect or a restart, nothing is delivered until the client sends
its whole set. Sets are stored as text, because an endpoint may have millions of subscriptions. Use this module only on
the event loop. Source: lite.md §6, §13.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import msgspec

from rmqkit.clock import Clock
from rmqkit.errors import PeerRefused, RmqError
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import request
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.protocol.schemas.lite import (
    ADD,
    COMPLETE_ADD,
    COMPLETE_REMOVE,
    OFFSET,
    POLICY,
    REMOVE,
    TAIL,
    TIMESTAMP,
    LiteSubscription,
    LiteSubscriptionCtlBody,
    OffsetOption,
)
from rmqkit.protocol.schemas.topics import Permission
from rmqkit.proxy.backend import Backend, Route
from rmqkit.proxy.schema.checks import check_group, check_lite_topic, check_topic
from rmqkit.proxy.schema.messages import message_class
from rmqkit.proxy.schema.status import OK, Code, Refused
from rmqkit.proxy.service.clients import Client, LiteSet

__all__ = ["LiteLimits", "LiteSubscriptions"]

_ACTIONS = {0: ADD, 1: REMOVE, 2: COMPLETE_ADD, 3: COMPLETE_REMOVE}
_OPTIONS = {"offset": OFFSET, "tail_n": TAIL, "timestamp": TIMESTAMP, "policy": POLICY}
_log = logging.getLogger(__name__)

_Response = message_class("SyncLiteSubscriptionResponse")


@dataclass(frozen=True, slots=True)
class LiteLimits:
    """The limits of lite consumers. ``renewed_max``: messages that a client holds, above which it gets no more until it
    acks some. ``adds_per_second_max``: requests of all clients to subscribe to more lite topics."""

    renewed_max: int = 100
    adds_per_second_max: int = 5000


class LiteSubscriptions:
    """The subscriptions of all lite consumers of an endpoint."""

    def __init__(self, backend: Backend, clock: Clock, limits: LiteLimits) -> None:
        self._backend = backend
        self._clock = clock
        self.limits = limits
        self._second = 0
        self._adds = 0

    async def sync(self, client: Client, asked: Any) -> Any:
        """Answer SyncLiteSubscription. Raises Refused; RmqError: a broker has not accepted the change."""
        topic, group = check_topic(asked.topic.name), check_group(asked.group.name)
        action = _ACTIONS.get(asked.action)
        if action is None:
            raise Refused(Code.BAD_REQUEST, f"action {asked.action} of a lite subscription: it must be 0 to 3")
        names = [check_lite_topic(name) for name in asked.lite_topic_set]
        config = await self._backend.group(group) or SubscriptionGroupConfig()
        if config.lite_parent != topic:
            bound = "null" if config.lite_parent is None else config.lite_parent
            text = f"lite group {group} is expected to bind topic {bound}, but actual is {topic}"
            raise Refused(Code.ILLEGAL_TOPIC, text)
        change = LiteSubscription(
            action=action,
            client_id=client.id,
            group=group,
            topic=topic,
            lite_topic_set=names,
            version=asked.version,
            offset_option=_offset_option(asked) if action == ADD else None,
        )
        async with client.lite_order:
            await self._change(client, change, LiteSet(topic, group), config.lite_quota)
        return _Response(status=OK)

    async def _change(self, client: Client, change: LiteSubscription, made: LiteSet, quota: int) -> None:
        """Send a change to all brokers, and remember the client's set after it. ``made``: a set without names."""
        given, known = set(change.lite_topic_set or ()), client.lite
        if known is not None and (known.topic, known.group) == (made.topic, made.group):
            made.names = known.names
        if change.action == ADD:
            self._count_add()
            made.names |= given
        elif change.action == REMOVE:
            made.names -= given
        else:
            made.names = given
        # The reference accepts 300 more, and does not count the names of earlier changes.
        if change.action in (ADD, COMPLETE_ADD) and 0 <= quota < len(made.names):
            raise Refused(Code.LITE_SUBSCRIPTION_QUOTA_EXCEEDED, f"lite subscription quota exceeded: {quota}")
        await self._send(client, change)
        client.lite = None if change.action == COMPLETE_REMOVE else made

    def _count_add(self) -> None:
        second = int(self._clock.monotonic_ms() // 1000)
        if second != self._second:
            self._second, self._adds = second, 0
        self._adds += 1
        limit = self.limits.adds_per_second_max
        if self._adds > limit:
            text = f"more than {limit} lite subscriptions in a second: try again"
            raise Refused(Code.TOO_MANY_REQUESTS, text)

    async def restore(self, client: Client, broker: str | None = None) -> None:
        """Send the remembered set of a client with a stream again, to one broker or to all."""
        async with client.lite_order:
            # The stream may have ended since this call: the client must not come back after its removal.
            if client.lite is not None and client.stream is not None:
                await self._send_quietly(client, client.lite, COMPLETE_ADD, broker)

    async def remove(self, client: Client) -> None:
        """Remove a client without a stream from brokers. Its set is remembered until it opens a stream again."""
        async with client.lite_order:
            if client.lite is not None and client.stream is None:
                await self._send_quietly(client, client.lite, COMPLETE_REMOVE, None)

    async def forget(self, client: Client) -> None:
        """Remove a client that terminates from brokers, and forget its set."""
        async with client.lite_order:
            known, client.lite = client.lite, None
            if known is not None:
                await self._send_quietly(client, known, COMPLETE_REMOVE, None)

    async def _send_quietly(self, client: Client, known: LiteSet, action: str, broker: str | None) -> None:
        """Send a change of the endpoint itself. A refusal is logged: the client itself sends its set within 30 s, and
        brokers forget silent clients."""
        names = sorted(known.names) if action == COMPLETE_ADD else []
        change = LiteSubscription(
            action=action, client_id=client.id, group=known.group, topic=known.topic, lite_topic_set=names
        )
        try:
            await self._send(client, change, broker)
        except RmqError as error:
            _log.info("the lite topics of client %s are not changed at a broker (%s): %s", client.id, action, error)

    async def _send(self, client: Client, change: LiteSubscription, broker: str | None = None) -> None:
        """Send a change to a broker, or to all brokers of the parent topic. Raises RmqError: a broker refused it."""
        assert change.topic is not None, "a change names the parent topic"
        body = msgspec.json.encode(LiteSubscriptionCtlBody([change]))
        route = await self._backend.route(change.topic) if broker is None else None
        names = [broker] if broker is not None else _readable(route)
        peer, code = client.clients.peer_of(client), RequestCode.LITE_SUBSCRIPTION_CTL
        answers = await asyncio.gather(*(peer.ask(name, request(code, body=body)) for name in names))
        for answer in answers:
            if answer.code != ResponseCode.SUCCESS:
                raise PeerRefused(answer.code, answer.remark or "sync lite subscription failed", "the broker")


def _readable(route: Route | None) -> list[str]:
    """Return the names of the brokers with readable queues of a topic. Raises Refused: there is none."""
    brokers = [] if route is None else route.brokers
    names = [one.name for one in brokers if one.permission & Permission.READ and one.read_queue_count]
    if not names:
        raise Refused(Code.FORBIDDEN, "no readable queue")
    return names


def _offset_option(asked: Any) -> OffsetOption | None:
    kind = asked.offset_option.WhichOneof("offset_type") if asked.HasField("offset_option") else None
    return None if kind is None else OffsetOption(_OPTIONS[kind], getattr(asked.offset_option, kind))
