"""Durable streams of events: one per chat session, agent task or SSE connection.

::

    async with rmqkit.streams.open("127.0.0.1:9876", "Chats", expire_after=3600) as streams:
        await streams.append("session-42", "Hello")
        async for event in streams.read("session-42", after=last_event_id):
            print(event.id, event.text)

A stream is a lite topic below a parent topic: ordered, durable, created by its first event. Any number of readers read
a stream without a consumer group, each from any event on. A stream expires a fixed time after its newest event.
`embedded` runs the servers in the process of the program. Source: lite.md §14.
"""

from rmqkit.errors import EventIdIllegal, StreamExpired
from rmqkit.streams.embedded import embedded
from rmqkit.streams.event import Event
from rmqkit.streams.names import stream_name
from rmqkit.streams.reader import StreamReader
from rmqkit.streams.streams import Streams, open  # noqa: A004

__all__ = [
    "Event",
    "EventIdIllegal",
    "StreamExpired",
    "StreamReader",
    "Streams",
    "embedded",
    "open",
    "stream_name",
]
