"""Looking stored messages up (``MQAdminImpl``): by id, by key. Source: behaviour.md §8.16; remoting.md §4.3.6."""

from __future__ import annotations

import asyncio

from rmqkit.client.runtime.namespace import bare
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.errors import NoRoute, PeerRefused, RmqError
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.headers.queries import QueryMessageRequest
from rmqkit.protocol.ids import decode_offset_id
from rmqkit.protocol.message import ReceivedMessage, read_messages

__all__ = ["query_messages", "view_message"]

_UNIQUE_KEY_COUNT = 32
_THREE_DAYS_MS = 3 * 24 * 3_600_000
_FOREVER_MS = (1 << 63) - 1


async def view_message(runtime: ClientRuntime, topic: str, msg_id: str) -> ReceivedMessage | None:
    """A message by its offset message id, asked of the broker it names, or else by its unique key.
    Raises NoRoute: the topic does not exist."""
    brokers = await _brokers(runtime, topic)
    try:
        ip, port, physical_offset = decode_offset_id(msg_id)
    except ValueError:
        ip, port, physical_offset = "", 0, 0
    for name, address in brokers:
        if address == f"{ip}:{port}":
            return await _at_offset(runtime, topic, name, address, physical_offset)
    begin_ms = runtime.clock.now_ms() - _THREE_DAYS_MS
    found = await _query(runtime, brokers, topic, msg_id, _UNIQUE_KEY_COUNT, begin_ms, _FOREVER_MS, is_unique_key=True)
    return next((message for message in found if message.msg_id == msg_id), None)


async def query_messages(
    runtime: ClientRuntime, topic: str, key: str, count_max: int, begin_ms: int, end_ms: int | None
) -> list[ReceivedMessage]:
    """Messages with a key, in the order they were stored, from every broker of the topic.
    Raises NoRoute: the topic does not exist."""
    end_ms = _FOREVER_MS if end_ms is None else end_ms
    found = await _query(
        runtime, await _brokers(runtime, topic), topic, key, count_max, begin_ms, end_ms, is_unique_key=None
    )
    # Two keys of a message may have the same hash: then it is in the index twice.
    places = {(one.broker_name, one.queue_id, one.queue_offset): one for one in found if key in one.keys}
    return sorted(places.values(), key=lambda message: message.store_timestamp)[:count_max]


async def _brokers(runtime: ClientRuntime, topic: str) -> list[tuple[str, str]]:
    """Name and address of one broker of each name, masters first."""
    if not runtime.routes.brokers_of(topic):
        await runtime.routes.refresh(topic)
    found = [(name, runtime.routes.any_address(name)) for name in runtime.routes.brokers_of(topic)]
    if not found:
        raise NoRoute(f"no broker has topic {topic}: create it, or send a message to it first")
    return [(name, address[1]) for name, address in found if address is not None]


async def _at_offset(
    runtime: ClientRuntime, topic: str, name: str, address: str, physical_offset: int
) -> ReceivedMessage | None:
    try:
        messages = read_messages(await runtime.calls.view_message(address, topic, physical_offset), name)
    except PeerRefused as error:
        if error.code == ResponseCode.SYSTEM_ERROR:  # it has no message there
            return None
        raise
    bare(runtime.namespace, messages)
    return next((message for message in messages if message.topic == topic), None)


async def _query(
    runtime: ClientRuntime,
    brokers: list[tuple[str, str]],
    topic: str,
    key: str,
    count_max: int,
    begin_ms: int,
    end_ms: int,
    *,
    is_unique_key: bool | None,
) -> list[ReceivedMessage]:
    """What all brokers find together; brokers compare hashes, so that the key has still to be compared.
    Raises RemotingError, PeerRefused: nothing was found and a broker did not answer, or refused."""
    header = QueryMessageRequest(
        topic=topic,
        key=key,
        max_num=count_max,
        begin_timestamp=begin_ms,
        end_timestamp=end_ms,
        is_unique_key=is_unique_key,
    )
    calls = (runtime.calls.query_messages(address, header) for _, address in brokers)
    found: list[ReceivedMessage] = []
    failed: RmqError | None = None
    for (name, _), answer in zip(brokers, await asyncio.gather(*calls, return_exceptions=True), strict=True):
        if isinstance(answer, RmqError):
            failed = answer
        elif isinstance(answer, BaseException):
            raise answer
        else:
            messages = read_messages(answer, name)
            bare(runtime.namespace, messages)
            found += [message for message in messages if message.topic == topic]
    if failed is not None and not found:
        raise failed
    return found
