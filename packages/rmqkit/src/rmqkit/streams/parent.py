"""The parent topic of streams: its creation and its lifetime."""

from __future__ import annotations

import asyncio

from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.errors import ClientError, NoRoute, PeerRefused
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.schemas.topics import CreateTopicRequest, TopicConfig, TopicRequest

__all__ = ["ensure_parent"]

_QUEUES = 8
_READ_WRITE = 6
_TYPE, _LIFETIME = "message.type", "lite.topic.expiration"
_ROUTE_TRIES = 50
_ROUTE_PAUSE_SECONDS = 0.1


async def ensure_parent(runtime: ClientRuntime, parent: str, minutes: int | None, *, create: bool) -> None:
    """Create a parent topic at every master if it is missing, and set its lifetime if it differs.

    Args:
        minutes: the lifetime of its lite topics; None: no change.
        create: whether it may be created or changed.

    Raises ClientError: the topic has another type, or it is missing and may not be created.
    Raises PeerRefused: a broker refused. Raises NoRoute: there is no broker."""
    addresses = await runtime.master_addresses()
    if not addresses:
        raise NoRoute(f"no broker is registered for topic {parent}: start a broker, or check the name servers")
    for address in addresses:
        known = await _config(runtime, address, parent)
        if known is not None and not known.is_lite:
            kind = (known.attributes or {}).get(_TYPE, "NORMAL")
            raise ClientError(f"topic {parent} has {_TYPE}={kind}, streams need LITE: choose another topic")
        lifetime = (known.attributes or {}).get(_LIFETIME) if known is not None else None
        if known is not None and (minutes is None or lifetime == str(minutes)):
            continue
        if not create and known is None:
            raise ClientError(f"topic {parent} does not exist: create it with {_TYPE}=LITE, or open with create=True")
        if create:
            await _put(runtime, address, parent, known, minutes)
    await _wait_for_route(runtime, parent)


async def _config(runtime: ClientRuntime, address: str, topic: str) -> TopicConfig | None:
    """Return the configuration of a topic at a broker, or None if the broker does not have the topic."""
    try:
        answer = await runtime.calls.ask(address, RequestCode.GET_TOPIC_CONFIG, TopicRequest(topic))
    except PeerRefused as error:
        if error.code == ResponseCode.TOPIC_NOT_EXIST:
            return None
        raise
    return decode_as(answer.payload, TopicConfig)


async def _put(
    runtime: ClientRuntime, address: str, parent: str, known: TopicConfig | None, minutes: int | None
) -> None:
    attributes = [f"+{_TYPE}=LITE"] if known is None else []
    if minutes is not None:
        attributes.append(f"+{_LIFETIME}={minutes}")
    queues = (_QUEUES, _QUEUES) if known is None else (known.read_queue_nums, known.write_queue_nums)
    header = CreateTopicRequest(
        parent,
        "TBW102",
        *queues,
        _READ_WRITE if known is None else known.perm,
        "SINGLE_TAG",
        attributes=",".join(attributes),
    )
    await runtime.calls.ask(address, RequestCode.UPDATE_AND_CREATE_TOPIC, header)


async def _wait_for_route(runtime: ClientRuntime, parent: str) -> None:
    """Wait until the name servers know the topic."""
    for i in range(_ROUTE_TRIES):
        try:
            await runtime.routes.publish_queues(parent, "", 0)
        except NoRoute:
            if i == _ROUTE_TRIES - 1:
                raise
            await asyncio.sleep(_ROUTE_PAUSE_SECONDS)
        else:
            return
