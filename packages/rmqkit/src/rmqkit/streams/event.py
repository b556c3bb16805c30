"""Events, and their ids.

The id of an event has three parts: ``<life>.<number>.<stream>``. The life grows when a stream expires and is written
again, the number grows with each event. Programs store ids and pass them back; they do not need the parts. A program
that knows the stream can omit the last part.
"""

from __future__ import annotations

import re
from datetime import datetime

import msgspec
from msgspec import Struct

from rmqkit.errors import EventIdIllegal
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.properties import (
    LITE_EPOCH,
    LITE_TOPIC,
    copied_properties,
    lite_number,
)
from rmqkit.times import moment_of

__all__ = ["LAST", "Event", "Place", "event_id", "event_of", "place_of", "stream_of"]

LAST = "rmqkit-last"
"""The property of the last event of a stream."""
_ID = re.compile(r"([0-9]{1,9})\.([0-9]{1,18})(?:\.([a-zA-Z0-9_-]{1,64}))?", re.ASCII)


class Place(Struct, frozen=True, order=True):
    """The place of an event in its stream. ``epoch``: the life of the stream."""

    epoch: int
    number: int


class Event(Struct, kw_only=True, frozen=True):
    """One event of a stream.

    Attributes:
        id: the id of the event. It identifies the event in all streams, and is valid after restarts of servers.
        stream: the name of the stream.
        data: the content; empty for the last event that `Streams.finish` stores without content.
        headers: names and values that the writer added.
        is_last: True for the last event of a finished stream.
        stored_ms: the time when the broker stored the event, in ms since the epoch.
    """

    id: str
    stream: str
    data: bytes
    headers: dict[str, str]
    is_last: bool
    stored_ms: int

    @property
    def text(self) -> str:
        """The content as text. Raises UnicodeDecodeError: it is not UTF-8."""
        return self.data.decode()

    @property
    def stored_at(self) -> datetime:
        """The time in UTC when the broker stored the event."""
        return moment_of(self.stored_ms)

    def json(self) -> object:
        """Return the content, decoded from JSON. Raises msgspec.DecodeError: the content is not JSON."""
        return msgspec.json.decode(self.data)


def event_id(stream: str, place: Place) -> str:
    """Return the id of an event."""
    return f"{place.epoch}.{place.number}.{stream}"


def place_of(stream: str, text: str) -> Place:
    """Return the place in an event id. Raises EventIdIllegal: the text is no event id, or one of another stream."""
    found = _ID.fullmatch(text)
    if found is None:
        raise EventIdIllegal(stream, text, "this is not an event id")
    if found[3] is not None and found[3] != stream:
        raise EventIdIllegal(stream, text, f"it belongs to stream {found[3]}")
    return Place(int(found[1]), int(found[2]))


def stream_of(text: str) -> str:
    """Return the stream in a whole event id. Raises EventIdIllegal: the text does not name a stream."""
    found = _ID.fullmatch(text)
    if found is None or found[3] is None:
        raise EventIdIllegal("?", text, "it does not name a stream")
    return found[3]


def event_of(message: ReceivedMessage) -> tuple[Place, Event]:
    """Return the event in a stored message, and its place."""
    properties = message.properties
    stream = properties[LITE_TOPIC]
    place = Place(int(properties.get(LITE_EPOCH, "1")), lite_number(properties))
    is_last = properties.get(LAST)
    return place, Event(
        id=event_id(stream, place),
        stream=stream,
        data=b"" if is_last == "empty" else message.body,
        headers={name: value for name, value in copied_properties(properties).items() if name != LAST},
        is_last=is_last is not None,
        stored_ms=message.store_timestamp,
    )
