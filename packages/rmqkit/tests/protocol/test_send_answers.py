"""Ready-made answers to sends: remoting.md §4.3.1."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.command import Command, encode_command, header_fields, reply
from rmqkit.protocol.ids import offset_id
from rmqkit.protocol.record import pack_host
from rmqkit.protocol.schemas.send import SendMessageResponse
from rmqkit.protocol.sends import PlainSends, _Sent
from rmqkit.protocol.templates import answer_pieces

HOST = pack_host("192.0.2.1", 10911)


@given(
    st.lists(
        st.tuples(
            st.integers(0, (1 << 63) - 1),
            st.integers(0, (1 << 31) - 1),
            st.integers(0, (1 << 63) - 1),
            st.text("0123456789ABCDEFxyz", min_size=1, max_size=60),
            st.integers(0, (1 << 31) - 1),
            st.just("") | st.text("0123456789ABCDEFxyz-_=", min_size=1, max_size=60),
        ),
        max_size=4,
    ),
    st.sampled_from([HOST, pack_host("2001:db8::1", 10911)]),
    st.text(max_size=10) | st.sampled_from(["100%", "%d", "<id>", "<handle>", "1234567890"]),
    st.sampled_from([ResponseCode.SUCCESS, ResponseCode.FLUSH_DISK_TIMEOUT, ResponseCode.FLUSH_SLAVE_TIMEOUT]),
)
def test_answers_are_those_the_plain_encoder_writes(answers, host, region, code) -> None:
    told = {"MSG_REGION": region, "TRACE_ON": "true"}
    plain = b""
    for physical_offset, queue_id, queue_offset, unique_key, opaque, handle in answers:
        header = SendMessageResponse(offset_id(host, physical_offset), queue_id, queue_offset, unique_key)
        fields = header_fields(header) | told | ({"recallHandle": handle} if handle else {})
        plain += b"".join(encode_command(reply(Command(310, opaque), code, fields=fields)))
    pieces, written = answer_pieces(host, told, code), b""
    for physical_offset, queue_id, queue_offset, unique_key, opaque, handle in answers:
        keys = (unique_key.encode(), b"", b"")
        one = _Sent(("T", 0), queue_id, 310, opaque, 0, 0, 0, 0, b"x", b"", keys, None, "", handle)
        sends = PlainSends(None, b"", 0, 0, [one])
        sends._sizes, sends._physical_offset, sends._numbers = [1], physical_offset, [queue_offset]
        written += sends.answers(*pieces)
    assert written == plain
