"""The answers to a pop that found one message, and to its ack, as whole frames made from templates.
Source: remoting.md §4.6.1."""

from __future__ import annotations

from rmqkit.protocol.answer_templates import answer_template
from rmqkit.protocol.command import Body, header_fields
from rmqkit.protocol.frame import JSON, frame_start
from rmqkit.protocol.headers.pop import PopMessageResponse

__all__ = ["found_frame", "success_frame"]

_FOUND_NAMES = list(header_fields(PopMessageResponse(start_offset_info="", msg_offset_info="")))
_SUCCESS = answer_template(None, {})
_FOUND = answer_template(
    {name: f"<{name}>" for name in _FOUND_NAMES}, {f"<{name}>": "%b" for name in _FOUND_NAMES}, remark="FOUND"
)


def success_frame(opaque: int) -> bytes:
    """A success that says nothing else."""
    header = _SUCCESS % (b"%d" % opaque)
    return frame_start(JSON, len(header), 0) + header


def found_frame(opaque: int, answer: PopMessageResponse, body: Body) -> bytes:
    """What a pop found that was not in order, with a body that is copied."""
    header = _FOUND % (
        b"%d" % answer.pop_time,
        b"%d" % answer.invisible_time,
        b"%d" % answer.revive_qid,
        b"%d" % answer.rest_num,
        (answer.start_offset_info or "").encode(),
        (answer.msg_offset_info or "").encode(),
        b"%d" % opaque,
    )
    return b"".join((frame_start(JSON, len(header), len(body)), header, body))
