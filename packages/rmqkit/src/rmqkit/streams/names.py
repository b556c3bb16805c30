"""Names of streams for names of other systems.

The name of a stream has 1 to 64 letters, digits, ``-`` and ``_``. Names of tasks, requests and channels may have other
characters, or be longer:

=======================  ===========================================================================================
``<prefix><text>``       a text that the name of a stream may have, which does not begin with ``h-``
``<prefix>h-<hash>``     any other text: 28 hexadecimal digits of its SHA-256
=======================  ===========================================================================================

Two texts with one prefix have two names.
"""

from __future__ import annotations

import hashlib

from rmqkit.protocol.names import lite_topic_fault

__all__ = ["PREFIX_CHARACTERS_MAX", "stream_name"]

PREFIX_CHARACTERS_MAX = 34
_HASH_MARK = "h-"
_HASH_DIGITS = 28


def stream_name(text: str, *, prefix: str = "") -> str:
    """Return the name of the stream that belongs to a text of another system. ``prefix``: at most 34 letters, digits,
    ``-`` and ``_`` that all names of this kind begin with."""
    assert len(prefix) <= PREFIX_CHARACTERS_MAX, "a prefix leaves room for a hash"
    if text and not text.startswith(_HASH_MARK) and lite_topic_fault(prefix + text) is None:
        return prefix + text
    return f"{prefix}{_HASH_MARK}{hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]}"
