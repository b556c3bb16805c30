"""Templates for responses that differ only in a few values. Most responses of busy brokers are of this kind.

A *template* (`answer_template`) is the header of a response, encoded once from a sample by `encode_command`, with
placeholders for the values that differ. A filled template has the same bytes as the output of `encode_command`, at a
fifth of the cost. `answer_pieces` returns the templates of responses to sends, which `Sends.answers` fills.
`pulled_frame`, `found_frame` and `success_frames` answer pulls, pops and acks.
Source: remoting.md §1.2, §4.3.1, §4.6.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.command import (
    JSON,
    RESPONSE,
    Body,
    Command,
    encode_command,
    frame_start,
    header_fields,
)
from rmqkit.protocol.schemas.pop import PopMessageResponse
from rmqkit.protocol.schemas.pull import PullMessageResponse

_SAMPLE_OPAQUE = 1_234_567_890
_START_BYTES = 8


def answer_template(
    fields: Mapping[str, str] | None,
    forms: Mapping[str, str],
    *,
    code: int = ResponseCode.SUCCESS,
    remark: str | None = None,
) -> bytes:
    """Return the header of a response as a format.
    ``forms``: the placeholder for each text in the fields, in the order of the fields. The last placeholder is ``%b``,
    for the digits of the opaque."""
    sample = Command(code, _SAMPLE_OPAQUE, RESPONSE, None if fields is None else dict(fields), remark=remark)
    # Double the percent signs before inserting placeholders, because the % of a placeholder must stay single.
    text = b"".join(encode_command(sample))[_START_BYTES:].decode().replace("%", "%%")
    for value, form in {**forms, f'"opaque":{_SAMPLE_OPAQUE}': '"opaque":%b'}.items():
        text = text.replace(value, form, 1)
    return text.encode()


def answer_pieces(
    store_host: bytes, properties: Mapping[str, str], code: int = ResponseCode.SUCCESS
) -> tuple[tuple[bytes, ...], tuple[bytes, ...], tuple[bytes, ...], bytes]:
    """Return the constant pieces of the headers of responses to sends, as four values.

    The first value contains the pieces before, between and after the values of a response to a plain send: physical
    offset in hexadecimal, queue id, queue offset, unique key and opaque. The second value is the same for a timed
    message, with its recall handle before the opaque. The third value is the same for a message in a lite topic, with
    its number there and the life of the lite topic before the opaque. The fourth value is the piece between the
    physical offsets of a batch. ``store_host``: the packed address at the start of every message id. ``properties``:
    the further fields of each response. ``code``: the response code of a stored message."""
    names = ("msgId", "queueId", "queueOffset", "transactionId")
    marks = {"<id>": f"{store_host.hex().upper()}\0", "<queue>": "\0", "<offset>": "\0", "<key>": "\0"}
    values = {**dict(zip(names, marks, strict=True)), **properties}
    timed = {**values, "recallHandle": "<handle>"}
    plain_form = answer_template(values, marks, code=code)
    timed_form = answer_template(timed, {**marks, '"recallHandle":"<handle>"': '"recallHandle":"\0"'}, code=code)
    lite = {**values, "liteOffset": "<number>", "liteEpoch": "<life>"}
    lite_marks = {'"liteOffset":"<number>"': '"liteOffset":"\0"', '"liteEpoch":"<life>"': '"liteEpoch":"\0"'}
    lite_form = answer_template(lite, {**marks, **lite_marks}, code=code)
    opened = [form.replace(b'"opaque":%b', b'"opaque":\0') for form in (plain_form, timed_form, lite_form)]
    pieces = [tuple(form.replace(b"%%", b"%").split(b"\0")) for form in opened]
    assert [len(one) for one in pieces] == [6, 7, 8], "the values are between the pieces"
    return pieces[0], pieces[1], pieces[2], f",{store_host.hex().upper()}".encode()


_FOUND_NAMES = list(header_fields(PopMessageResponse(start_offset_info="", msg_offset_info="")))
_SUCCESS = answer_template(None, {})
# The index is the length of the opaque's text, on which the lengths at the start of the frame depend.
_SUCCESSES = [
    frame_start(JSON, len(_SUCCESS % bytes(count)), 0).replace(b"%", b"%%") + _SUCCESS
    for count in range(len(str(-(1 << 31))) + 1)
]
_FOUND = answer_template(
    {name: f"<{name}>" for name in _FOUND_NAMES}, {f"<{name}>": "%b" for name in _FOUND_NAMES}, remark="FOUND"
)
_PULLED_NAMES = list(header_fields(PullMessageResponse(0, 0, 0, 0, 0, 0)))
_PULLED = answer_template(
    {name: f"<{name}>" for name in _PULLED_NAMES}, {f"<{name}>": "%d" for name in _PULLED_NAMES}, remark="FOUND"
).replace(b'"opaque":%b', b'"opaque":%d')


def pulled_frame(opaque: int, answer: PullMessageResponse, body_bytes: int) -> bytes:
    """Return the response to a successful pull without the records, which follow. Do not use it for static topics."""
    header = _PULLED % (
        answer.suggest_which_broker_id,
        answer.next_begin_offset,
        answer.min_offset,
        answer.max_offset,
        answer.topic_sys_flag,
        answer.group_sys_flag,
        opaque,
    )
    return frame_start(JSON, len(header), body_bytes) + header


def success_frames(opaques: Iterable[int]) -> bytes:
    """Return the concatenated responses, SUCCESS without fields, to several requests."""
    return b"".join([_SUCCESSES[len(digits)] % digits for digits in map(b"%d".__mod__, opaques)])


def found_frame(opaque: int, answer: PopMessageResponse, records: Sequence[Body]) -> bytes:
    """Return the response to a successful unordered pop, with a copy of the records."""
    header = _FOUND % (
        b"%d" % answer.pop_time,
        b"%d" % answer.invisible_time,
        b"%d" % answer.revive_qid,
        b"%d" % answer.rest_num,
        (answer.start_offset_info or "").encode(),
        (answer.msg_offset_info or "").encode(),
        b"%d" % opaque,
    )
    return b"".join((frame_start(JSON, len(header), sum(map(len, records))), header, *records))
