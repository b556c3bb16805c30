"""Commands in both header forms (remoting.md §1.2, §1.3, vectors of §12)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.errors import FrameError, HeaderError
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import (
    JSON,
    ROCKETMQ,
    Command,
    Frame,
    FrameSplitter,
    decode_command,
    decode_fields,
    decode_header,
    decode_header_leniently,
    encode_command,
    header_fields,
    reply,
    request,
)
from rmqkit.protocol.schemas.pull import PullMessageRequest
from rmqkit.protocol.schemas.send import ConsumerSendBackRequest, SendMessageRequest, SendMessageV2Request
from rmqkit.protocol.schemas.topics import RouteRequest

BINARY_VECTOR = bytes.fromhex(
    "00000025 01000021 0069 00 0191 00000001 00000000 00000000 0000000c 0005 746f706963 00000001 54"
)
JSON_VECTOR = (
    bytes.fromhex("0000007f 0000007b")
    + b'{"code":105,"extFields":{"topic":"T"},"flag":0,"language":"JAVA","opaque":1,'
    + b'"serializeTypeCurrentRPC":"JSON","version":401}'
)


def route_request() -> Command:
    command = request(RequestCode.GET_ROUTEINFO_BY_TOPIC, RouteRequest("T"))
    command.opaque, command.version, command.language = 1, 401, "JAVA"
    return command


def decode(data: bytes) -> Command:
    (frame,) = FrameSplitter().feed(data)
    return decode_command(frame)


@pytest.mark.parametrize(("serialize_type", "vector"), [(JSON, JSON_VECTOR), (ROCKETMQ, BINARY_VECTOR)])
def test_the_vectors_are_encoded_and_decoded(serialize_type, vector):
    assert b"".join(encode_command(route_request(), serialize_type)) == vector
    command = decode(vector)
    assert (command.code, command.opaque, command.flag, command.version, command.language) == (105, 1, 0, 401, "JAVA")
    assert decode_header(command, RouteRequest) == RouteRequest("T")


def json_command(text: bytes) -> Command:
    return decode_command(Frame(JSON, text, b""))


@pytest.mark.parametrize(
    ("language", "expected"),
    [(b'"GO"', "GO"), (b"9", "GO"), (b'"9"', "GO"), (b'"KLINGON"', None), (b"99", None), (b"null", None)],
)
def test_a_language_is_a_name_or_a_number_and_an_unknown_one_is_tolerated(language, expected):
    assert json_command(b'{"code":1,"language":' + language + b"}").language == expected


def test_unknown_header_keys_are_ignored_and_missing_ones_have_defaults():
    command = json_command(b'{"code":7,"what":[1,{"a":2}],"serializeTypeCurrentRPC":"JSON"}')
    assert (command.code, command.flag, command.version, command.remark, decode_fields(command)) == (7, 0, 0, None, {})


def test_numbers_and_booleans_in_ext_fields_are_taken_as_text_and_as_their_type():
    command = json_command(b'{"code":11,"extFields":{"topic":1,"acceptStandardJsonOnly":true}}')
    assert decode_fields(command) == {"topic": "1", "acceptStandardJsonOnly": "true"}
    assert decode_header(command, RouteRequest) == RouteRequest("1", accept_standard_json_only=True)


def test_text_numbers_become_numbers():
    fields = b'"consumerGroup":"g","topic":"t","queueId":"3","queueOffset":"9000000000","maxMsgNums":"32"'
    fields += b',"sysFlag":"2","commitOffset":"-1","suspendTimeoutMillis":"15000","subVersion":"1","unknown":"x"'
    header = decode_header(json_command(b'{"code":11,"extFields":{' + fields + b"}}"), PullMessageRequest)
    assert (header.queue_id, header.queue_offset, header.commit_offset) == (3, 9_000_000_000, -1)


@pytest.mark.parametrize(
    ("fields", "named"),
    [(b"{}", "consumerGroup"), (b'{"consumerGroup":"g","topic":"t","queueId":"x"}', "queueId"), (b"[]", "object")],
)
def test_a_header_error_names_the_field(fields, named):
    with pytest.raises(HeaderError, match=named):
        decode_header(json_command(b'{"code":11,"extFields":' + fields + b"}"), PullMessageRequest)


def test_short_and_long_send_headers_have_the_same_fields():
    long = SendMessageRequest("g", "t", "TBW102", 4, 0, 0, 5, 0, "p", 1, False, 16, True, "b")
    short = SendMessageV2Request(*(getattr(long, name) for name in long.__struct_fields__))
    assert header_fields(short) == dict(
        zip("abcdefghijklmn", "g t TBW102 4 0 0 5 0 p 1 false 16 true b".split(), strict=True)
    )
    assert list(header_fields(long)) == [
        *("producerGroup", "topic", "defaultTopic", "defaultTopicQueueNums", "queueId", "sysFlag", "bornTimestamp"),
        *("flag", "properties", "reconsumeTimes", "unitMode", "maxReconsumeTimes", "batch", "bname"),
    ]


def test_a_reply_has_the_opaque_of_its_request_and_no_empty_remark():
    answer = reply(Command(10, opaque=42), 17, "not here")
    assert (answer.opaque, answer.flag, answer.is_one_way) == (42, 1, False)
    assert b'"remark":"not here"' in encode_command(answer)[0]
    assert b"remark" not in encode_command(reply(Command(10)))[0]


def test_a_large_body_is_not_copied_into_the_header():
    body = bytes(10_000)
    pieces = encode_command(request(10, body=body))
    assert pieces[1] is body
    assert decode(b"".join(pieces)).body == body


def test_a_body_of_several_pieces_is_written_as_they_are():
    command = request(10)
    command.body = [memoryview(b"ab"), memoryview(b"cd")]
    assert decode(b"".join(encode_command(command))).payload == command.payload == b"abcd"


def test_codes_over_32767_need_a_json_header():
    with pytest.raises(HeaderError, match="200050"):
        encode_command(request(200050), ROCKETMQ)


TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
COMMANDS = st.builds(
    Command,
    code=st.integers(-32768, 32767),
    opaque=st.integers(-(2**31), 2**31 - 1),
    flag=st.integers(0, 3),
    fields=st.dictionaries(TEXT.filter(bool), TEXT.filter(bool), max_size=5),
    body=st.binary(max_size=50),
    remark=TEXT.filter(bool) | st.none(),
    language=st.sampled_from(["JAVA", "PYTHON", "NODE_JS"]),
    version=st.integers(0, 32767),
)


@given(COMMANDS, st.sampled_from([JSON, ROCKETMQ]))
def test_what_is_encoded_is_decoded(command, serialize_type):
    decoded = decode(b"".join(encode_command(command, serialize_type)))
    assert decode_fields(decoded) == command.fields
    for name in ("code", "opaque", "flag", "body", "remark", "language", "version"):
        assert getattr(decoded, name) == getattr(command, name)


@given(st.binary(max_size=60), st.sampled_from([JSON, ROCKETMQ]))
def test_any_header_is_a_command_or_a_header_error(noise, serialize_type):
    for header in (noise, BINARY_VECTOR[8:] + noise, BINARY_VECTOR[8:20] + noise, b'{"code":1,"extFields":' + noise):
        try:
            decode_fields(decode_command(Frame(serialize_type, header, b"")))
        except HeaderError as error:
            assert str(error)


@given(st.data())
def test_a_frame_survives_any_cut(data):
    stream = JSON_VECTOR + BINARY_VECTOR + JSON_VECTOR
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    splitter = FrameSplitter()
    frames = [f for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True) for f in splitter.feed(stream[a:b])]
    assert [frame.serialize_type for frame in frames] == [JSON, ROCKETMQ, JSON]
    assert splitter.buffered_bytes == 0


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        ("01000000 00000004", "over the limit of 16777216"),
        ("00000010 02000004", "serialize type 2"),
        ("00000010 0000000d", "header of 13 bytes does not fit"),
        ("00000003 00000000", "does not fit"),
        ("ffffffff 00000000", "does not fit"),
    ],
)
def test_impossible_frames_are_refused_before_their_bytes_arrive(start, reason):
    with pytest.raises(FrameError, match=reason):
        FrameSplitter().feed(bytes.fromhex(start))


def test_the_largest_frame_is_accepted():
    splitter = FrameSplitter()
    assert splitter.feed((16_777_216 - 4).to_bytes(4) + (2).to_bytes(4) + b"{}") == []


@given(st.binary(max_size=64))
def test_any_bytes_are_frames_or_a_frame_error(noise):
    try:
        for frame in FrameSplitter().feed(noise):
            assert frame.serialize_type in (JSON, ROCKETMQ)
    except FrameError as error:
        assert str(error)


BACK = {"offset": "7", "group": "g", "delayLevel": "1"}


@pytest.mark.parametrize(
    ("fields", "header"),
    [
        (BACK, ConsumerSendBackRequest(7, "g", 1)),
        (BACK | {"unitMode": "maybe"}, ConsumerSendBackRequest(7, "g", 1, unit_mode=False)),
        (BACK | {"unitMode": "1"}, ConsumerSendBackRequest(7, "g", 1, unit_mode=False)),
        (BACK | {"unitMode": "True"}, ConsumerSendBackRequest(7, "g", 1, unit_mode=True)),
        (BACK | {"unitMode": "", "maxReconsumeTimes": "x"}, ConsumerSendBackRequest(7, "g", 1, unit_mode=False)),
        (BACK | {"maxReconsumeTimes": "9" * 20}, ConsumerSendBackRequest(7, "g", 1)),
        ({"offset": "7", "group": "g"}, ConsumerSendBackRequest(7, "g", 0)),
        (BACK | {"delayLevel": "x"}, ConsumerSendBackRequest(7, "g", 0)),
    ],
)
def test_a_lenient_header_takes_what_java_takes(fields, header):
    command = Command(36, fields=fields)
    assert decode_header_leniently(command, ConsumerSendBackRequest, missing={"delayLevel": "0"}) == header


@pytest.mark.parametrize("fields", [BACK | {"offset": "x"}, {"group": "g"}, BACK | {"offset": "9" * 20}])
def test_a_lenient_header_has_its_needed_fields(fields):
    with pytest.raises(HeaderError, match="offset"):
        decode_header_leniently(Command(36, fields=fields), ConsumerSendBackRequest)


def test_a_header_with_a_codec_of_its_own_drops_no_unreadable_number():
    with pytest.raises(HeaderError, match="maxReconsumeTimes"):
        decode_header_leniently(
            Command(36, fields=BACK | {"maxReconsumeTimes": "x"}), ConsumerSendBackRequest, drops_unreadable=False
        )
