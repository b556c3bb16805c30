"""Recall handles: what a timer message's sender gets to call it back with (RECALL_MESSAGE 370).

A handle is base64url, padded, of ``v1 <topic> <broker name> <deliver time in ms + 1> <UNIQ_KEY>``.
Source: remoting.md §7.6.
"""

from __future__ import annotations

import base64
import binascii

from msgspec import Struct

from rmqkit.errors import HeaderError

__all__ = ["RecallHandle", "decode_recall_handle", "encode_recall_handle"]

_VERSION = "v1"
_DIGITS_MAX = 19


class RecallHandle(Struct, frozen=True):
    """The message a handle stands for; ``deliver_timestamp`` in ms since the epoch."""

    topic: str
    broker_name: str
    deliver_timestamp: int
    unique_key: str


def encode_recall_handle(handle: RecallHandle) -> str:
    """The text of a handle. Raises ValueError: a name holds a blank, which separates the parts."""
    parts = (_VERSION, handle.topic, handle.broker_name, str(handle.deliver_timestamp + 1), handle.unique_key)
    text = " ".join(parts)
    if text.count(" ") != len(parts) - 1 or not all(parts):
        raise ValueError(f"recall handle parts {parts} must be words without blanks")
    return base64.urlsafe_b64encode(text.encode()).decode()


def decode_recall_handle(text: str) -> RecallHandle:
    """What a handle stands for; missing padding is tolerated, as Java does.
    Raises HeaderError: the text is no handle of a known version."""
    try:
        plain = base64.b64decode(text.encode() + b"=" * (-len(text) % 4), b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise HeaderError(f"recall handle {text[:80]!r} is not base64url of UTF-8 text") from None
    match plain.split(" "):
        case [version, topic, broker_name, time, unique_key] if version == _VERSION and _is_time(time):
            return RecallHandle(topic, broker_name, int(time) - 1, unique_key)
        case _:
            raise HeaderError(f"recall handle {plain[:80]!r} is not 'v1 <topic> <broker> <time> <key>'")


def _is_time(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX
