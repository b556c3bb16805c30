"""Ready-made answers to sends: remoting.md §4.3.1."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rmqkit.protocol.command import Command, encode_command, header_fields, reply
from rmqkit.protocol.headers.send import SendMessageResponse
from rmqkit.protocol.ids import offset_id
from rmqkit.protocol.record import pack_host
from rmqkit.protocol.send_answers import SendAnswers

HOST = pack_host("192.0.2.1", 10911)


@given(
    opaque=st.integers(-(1 << 31), (1 << 31) - 1),
    physical_offset=st.integers(0, (1 << 63) - 1),
    queue_id=st.integers(-(1 << 31), (1 << 31) - 1),
    queue_offset=st.integers(0, (1 << 63) - 1),
    unique_key=st.text(st.characters(codec="utf-8"), max_size=40) | st.text("0123456789ABCDEF", max_size=32),
    host=st.sampled_from([HOST, pack_host("2001:db8::1", 10911)]),
    region=st.text(max_size=10) | st.sampled_from(["100%", "%d", "<id>", "1234567890"]),
)
def test_answer_is_the_one_the_plain_encoder_writes(
    opaque, physical_offset, queue_id, queue_offset, unique_key, host, region
) -> None:
    told = {"MSG_REGION": region, "TRACE_ON": "true"}
    header = SendMessageResponse(offset_id(host, physical_offset), queue_id, queue_offset, unique_key)
    plain = encode_command(reply(Command(310, opaque), fields=header_fields(header) | told))
    frame = SendAnswers(host, told).stored(
        opaque,
        physical_offset=physical_offset,
        queue_id=queue_id,
        queue_offset=queue_offset,
        unique_key=unique_key.encode(),
    )
    if frame is None:
        assert not unique_key.isalnum() or not unique_key.isascii()
    else:
        assert frame == b"".join(plain)
