"""The text format of server-sent events, as browsers read it (HTML standard, section 9.2).

A frame is lines of ``field: value`` and an empty line:

===========  ========================================================================================================
``id``       the id that the browser sends in ``Last-Event-ID`` when it connects again
``event``    the type, the name for ``addEventListener``; without it the browser calls ``onmessage``
``data``     one line of the content; the browser joins the lines with line feeds
``retry``    the pause in ms before the browser connects again
``: text``   a comment, which the browser ignores
===========  ========================================================================================================

A line ends with CR LF, LF or CR. So a browser reads each of the three in the content as a line feed. Text is UTF-8:
content that is not UTF-8 is sent as base64, with the type ``base64``.
"""

from __future__ import annotations

import base64
import re

__all__ = ["END", "PING", "content_frame", "frame", "retry_frame"]

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BASE64 = "base64"
PING = b": ping\n\n"
"""A comment. It shows proxies and the server that the connection is alive."""
END = "end"
"""The type of the frame after which no event follows."""


def frame(data: bytes, *, event_id: str = "", event_type: str = "") -> bytes:
    """Return a frame. Line ends in the type become blanks, so that a type cannot add lines to the frame."""
    lines = [b"data: " + line for line in _LINE_END.split(data)]
    if event_type:
        lines.insert(0, b"event: " + _LINE_END.sub(b" ", event_type.encode()))
    if event_id:
        lines.insert(0, b"id: " + event_id.encode())
    return b"\n".join(lines) + b"\n\n"


def content_frame(data: bytes, *, event_id: str, event_type: str) -> bytes:
    """Return the frame of content that may be any bytes."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return frame(base64.b64encode(data), event_id=event_id, event_type=_BASE64)
    return frame(data, event_id=event_id, event_type=event_type)


def retry_frame(pause_ms: float) -> bytes:
    """Return the frame with the pause before a browser connects again."""
    return b"retry: %d\n\n" % pause_ms
