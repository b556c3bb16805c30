"""The search for a message in any topic, by an id or a key (the console's search box).

==================  ================================================================================================
the text is         searched
==================  ================================================================================================
offset message id   the broker in the id (VIEW_MESSAGE_BY_ID), then the queue of the found message
                    (QUERY_CONSUME_QUEUE), which requires a permission on the topic of the message
unique key, or key  the index of each topic (QUERY_MESSAGE), with one request to each broker that has the topic
==================  ================================================================================================

Queues are not scanned. At most `TOPICS_MAX` topics are searched, `_AT_ONCE` at a time and for `_SECONDS`.
`Found` has the number of the topics that were not searched. Every request is signed with the caller's credentials, so
the result has no message of a topic that the caller is not allowed to read.
Source: behaviour.md §8.16.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from msgspec import Struct, field

from rmqkit.admin.messages.messages import Messages
from rmqkit.errors import PeerRefused, RmqError, UnknownName
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.message import ReceivedMessage

__all__ = ["TOPICS_MAX", "Found", "lookup"]

TOPICS_MAX = 200
_AT_ONCE = 8
_SECONDS = 3.0
_MESSAGES_MAX = 50


class Found(Struct, kw_only=True):
    """The messages that `lookup` found, the newest first.

    Attributes:
        asked: the number of searched topics.
        refused: the number of topics that the caller is not allowed to read.
        left: the number of topics that were not searched, or not in time.
        trouble: the text of the first other error.
    """

    messages: list[ReceivedMessage] = field(default_factory=list)
    asked: int = 0
    refused: int = 0
    left: int = 0
    trouble: str = ""


async def lookup(messages: Messages, text: str, topics: Sequence[str]) -> Found:
    """Search for messages with the text as offset message id, unique key or key, in the order of the topics."""
    found = Found(left=len(topics))
    try:
        async with asyncio.timeout(_SECONDS):
            if (one := await _by_offset_id(messages, text)) is not None:
                found.messages.append(one)
                return found
            waiting = iter(topics[:TOPICS_MAX])
            async with asyncio.TaskGroup() as group:
                for _ in range(_AT_ONCE):
                    group.create_task(_ask(messages, text, waiting, found))
    except TimeoutError:
        pass
    found.messages.sort(key=lambda one: -one.store_timestamp)
    return found


async def _by_offset_id(messages: Messages, text: str) -> ReceivedMessage | None:
    try:
        found = await messages.find(text, kind="offset")
        # Apache's brokers answer VIEW_MESSAGE_BY_ID without checking the policies of the message's topic.
        return await messages.at(found.topic, found.broker_name or "", found.queue_id, found.queue_offset)
    except RmqError:
        return None


async def _ask(messages: Messages, text: str, topics: Iterator[str], found: Found) -> None:
    """Search the indexes of topics one after the other, until enough messages are found."""
    for topic in topics:
        if len(found.messages) >= _MESSAGES_MAX:
            return
        try:
            found.messages += await messages.by_key(topic, text, with_unique=True)
            found.asked += 1
        except UnknownName:  # the topic was deleted after the list of topics was made
            found.asked += 1
        except RmqError as error:
            if isinstance(error, PeerRefused) and error.code == ResponseCode.NO_PERMISSION:
                found.refused += 1
            else:
                found.trouble = found.trouble or str(error)
                continue
        found.left -= 1
