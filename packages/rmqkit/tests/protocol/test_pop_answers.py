"""Ready-made answers to pops and acks: remoting.md §4.6.1."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rmqkit.protocol.command import Command, encode_command, reply
from rmqkit.protocol.ids import PopQueue, encode_message_offsets, encode_start_offsets
from rmqkit.protocol.schemas.pop import PopMessageResponse
from rmqkit.protocol.templates import found_frame, success_frames

i64, opaques = st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, (1 << 31) - 1)


@given(
    opaques,
    st.builds(PopMessageResponse, pop_time=i64, invisible_time=i64, revive_qid=opaques, rest_num=i64),
    st.dictionaries(st.builds(PopQueue, st.sampled_from("012"), opaques), st.lists(i64, min_size=1), max_size=3),
    st.binary(max_size=100),
)
def test_they_are_what_the_plain_encoder_writes(opaque, answer, found, body) -> None:
    answer.start_offset_info = encode_start_offsets({queue: offsets[0] for queue, offsets in found.items()})
    answer.msg_offset_info = encode_message_offsets(found)
    request = Command(200050, opaque)
    for frame, plain in (
        (found_frame(opaque, answer, [memoryview(body)]), reply(request, remark="FOUND", header=answer, body=body)),
        (success_frames([opaque]), reply(request)),
    ):
        assert frame == b"".join(encode_command(plain))
