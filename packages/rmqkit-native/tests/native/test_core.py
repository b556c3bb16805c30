"""The compiled core and sends: its results equal those of the plain Python decoders and encoders byte for byte, and it
leaves unknown requests to them."""

from __future__ import annotations

import re
import struct
from array import array
from itertools import pairwise

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rmqkit.core import CORE as PROCESS_CORE
from rmqkit.errors import FrameError
from rmqkit.protocol.command import (
    FRAME_BYTES_MAX,
    JSON,
    REQUEST_HEADER_BYTES_MAX,
    ROCKETMQ,
    Frame,
    FrameSplitter,
    each_frame,
    encode_command,
    request,
)
from rmqkit.protocol.properties import (
    decode_properties,
    encode_in_stored_order,
    find_keys,
)
from rmqkit.protocol.record import (
    BatchEntry,
    decode_record,
    encode_batch,
)
from rmqkit.protocol.schemas.send import SendMessageRequest
from rmqkit.store.dispatcher import DispatchRequest, request_of
from tests.cpu import least_seconds, slowness
from tests.native.equal import (
    BORN,
    CORE,
    HOST,
    NOT_PLAIN,
    PIECES,
    STAMPS,
    TIMED,
    TWIN,
    check,
    check_stream,
    compare,
    has_room,
    hashes,
    plain,
)
from tests.native.sends import (
    PLAIN_NAMES,
    batch,
    changes,
    odd_strings,
    plain_strings,
    plain_values,
    send,
    string,
    strings,
    timed_strings,
)

HOST_V6 = bytes(15) + b"\x01" + bytes.fromhex("00002a9f")


@given(strings, changes, st.binary(max_size=40), st.sampled_from([JSON, ROCKETMQ]), st.sampled_from([10, 310, 320, 11]))
def test_what_the_core_takes_it_reads_as_python_does(text, fields, body, kind, code):
    check(send({"i": text, **fields}, code=code, body=body, kind=kind))


@given(plain_strings, st.binary(min_size=1, max_size=2000), st.sampled_from([JSON, ROCKETMQ]))
def test_it_takes_what_is_plain(text, body, kind):
    assert check(send({"i": text}, body=body, kind=kind)) == has_room(text)


@pytest.mark.parametrize(("name", "is_taken"), [("n" * 64, True), ("n" * 65, False), ("a b", False), ("é", False)])
def test_only_allowed_names_of_lite_topics_are_plain(name, is_taken):
    text = string([("__LITE_TOPIC", name)])
    assert check(send({"i": text})) == is_taken
    members = [BatchEntry(b"x", text.encode(), 0)] * 2
    assert check(batch(encode_batch(members))) == 2 * is_taken
    check_stream(send({"i": text}) + batch(encode_batch(members)))


@pytest.mark.parametrize("name", ["TIMER_DELAY_MS", "__LITE_TOPIC"])
def test_a_send_to_a_lite_topic_with_a_delivery_time_is_left(name):
    text = string([("__LITE_TOPIC", "s1"), ("TIMER_DELAY_MS" if name == "TIMER_DELAY_MS" else "a", "5")])
    assert check(send({"i": text})) == (name == "__LITE_TOPIC")


@pytest.mark.parametrize("length", [0, 1])
def test_longest_properties_with_a_lite_topic_have_room_for_the_greatest_numbers(length):
    stored = encode_in_stored_order({"UNIQ_KEY": "7F00AB", "__LITE_TOPIC": "s1", **STAMPS, "a": "x"})
    text = string(
        [("a", "x" * (1 + 511 - len(stored) - 98 - len("Orders") - len("s1") + length)), ("__LITE_TOPIC", "s1")]
    )
    assert check(send({"i": text})) == (length == 0)
    if not length:
        run = CORE.read(send({"i": text}))
        columns = array("B", [1]), array("q", [(1 << 63) - 2]), array("I", [(1 << 32) - 1])
        assert run.enter_lite([{"s1": 0}], *columns)
        assert len(run.message(0)[-1][1]) == 511


@given(odd_strings, st.sampled_from([JSON, ROCKETMQ]))
def test_it_leaves_what_is_not(text, kind):
    pairs = [piece.split("\x01") for piece in text.split("\x02")[:-1]]
    is_plain = all(name and value for name, value in pairs) and len(dict(pairs)) == len(pairs)
    is_plain = is_plain and dict(pairs).keys().isdisjoint([*NOT_PLAIN, *STAMPS])
    is_plain = is_plain and all(re.fullmatch("[0-9]{1,17}", value) for name, value in pairs if name in TIMED)
    assert check(send({"i": text}, kind=kind)) == is_plain


@pytest.mark.parametrize("kind", [JSON, ROCKETMQ])
@pytest.mark.parametrize("length", [511, 512])
def test_longest_properties(kind, length):
    stored = encode_in_stored_order({"UNIQ_KEY": "A1", "a": "x", **STAMPS})
    text = string([("a", "x" * (1 + length - len(stored) - len("7F00AB") + len("A1")))])
    assert check(send({"i": text}, kind=kind)) == (length == 511)


def test_a_name_that_is_looked_for_among_very_many_costs_little():
    """The string is refused for its length before anything is compared: the search is quadratic."""
    text = string([(f"{at:05}", "v") for at in range(26_000)])
    data = send({"i": text}, kind=ROCKETMQ)
    assert len(data) < REQUEST_HEADER_BYTES_MAX
    assert CORE.read(data) is None
    assert least_seconds(3, lambda: CORE.read(data)) < 0.5 * slowness()  # quadratic it is seconds


@pytest.mark.parametrize(
    "broken",
    [
        struct.pack(">iI", FRAME_BYTES_MAX, 0),
        struct.pack(">iI", -1, 0),
        struct.pack(">iI", 3, 0),
        struct.pack(">iI", 10, 7),
        struct.pack(">iI", 300_000, REQUEST_HEADER_BYTES_MAX),
        struct.pack(">iI", 100, 2 << 24),
    ],
)
def test_the_splitter_loses_sends_before_a_broken_frame_with_the_core_and_without(broken):
    for core in (None, CORE):
        with pytest.raises(FrameError):
            FrameSplitter(header_bytes_max=REQUEST_HEADER_BYTES_MAX, sends=core).feed(send() + broken)


@given(st.data())
def test_the_splitter_finds_the_same_frames_with_the_core_and_without(data):
    parts = st.sampled_from([send(), send(body=b"x" * 300), send(code=11), send(body=b""), send({"f": "4"})])
    stream = b"".join(data.draw(st.lists(parts, max_size=8)))
    cuts = sorted({0, len(stream), *data.draw(st.lists(st.integers(0, len(stream)), max_size=6))})
    plain_one, with_core = FrameSplitter(), FrameSplitter(sends=CORE)
    for start, end in pairwise(cuts):
        units = with_core.feed(stream[start:end])
        assert each_frame(units) == plain_one.feed(stream[start:end])
        assert with_core.buffered_bytes == plain_one.buffered_bytes
        assert all(plain(unit) is None for unit in units if isinstance(unit, Frame))


def test_limits_of_frames():
    data = send(body=b"x" * 100)
    header_bytes = int.from_bytes(data[5:8])
    for frame_max, header_max, count in [
        (len(data), header_bytes + 1, 1),
        (len(data) - 1, header_bytes + 1, 0),
        (len(data), header_bytes, 0),
    ]:
        run = PROCESS_CORE.sends_reader(STAMPS, NOT_PLAIN, TIMED, frame_max, header_max).read(data)
        assert (0 if run is None else len(run)) == count


def test_it_reads_from_a_place_on():
    one, two = send(opaque=1), send(opaque=2)
    run = CORE.read(one + two, len(one))
    assert (len(run), run.end, run.message(0)[2]) == (1, len(one + two), 2)
    assert CORE.read(one, len(one)) is None
    assert CORE.read(one, 10_000) is None


@given(st.data())
def test_changed_bytes_are_read_as_python_reads_them(data):
    whole = bytearray(send({"i": data.draw(strings)}, kind=data.draw(st.sampled_from([JSON, ROCKETMQ]))))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(8, len(whole) - 1))] = data.draw(st.integers(0, 255))
    check(bytes(whole))


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_left(data):
    check(data)
    check_stream(data)
    check(batch(data))


@given(st.integers(0, 4), st.integers(0, 400))
def test_what_is_not_whole_is_left(count, cut):
    data = b"".join(send(opaque=at) for at in range(count)) + send(opaque=99)[: min(cut, len(send(opaque=99)) - 1)]
    assert check(data) == count
    run = CORE.read(data)
    assert (0 if run is None else run.end) == count * len(send(opaque=1))


@pytest.mark.parametrize(
    "header",
    [
        # Java, Go and Node as they write it, then what must be left: spaces, a name twice, unknown fields, an escape in
        # a topic, half a pair of surrogates, null
        '{"code":310,"extFields":%s,"flag":0,"language":"JAVA","opaque":5,"serializeTypeCurrentRPC":"JSON","version":477}',
        '{"code":310,"language":"GO","version":317,"opaque":5,"flag":0,"extFields":%s}',
        '{"code": 310, "language": "NODE", "version": 399, "opaque": 5, "flag": 0, "extFields": %s}',
        '{"code":310,"code":311,"opaque":5,"flag":0,"extFields":%s}',
        '{ "code":310,"opaque":5,"flag":0,"extFields":%s}',
        '{"code":310,"opaque":5,"flag":0,"remark":null,"extFields":%s}',
        '{"code":310,"opaque":5,"flag":2,"extFields":%s}',
        '{"code":310,"opaque":-5,"flag":0,"extFields":%s}',
        '{"code":310,"opaque":5,"flag":0,"extFields":%s}x',
    ],
)
@pytest.mark.parametrize("topic", ["Orders", "Ord\\u0065rs", "Größe", "\\ud83d", "%RETRY%g", "x" * 128])
def test_headers_of_clients_and_odd_ones(header, topic):
    short = '{"a":"p","b":"%s","c":"TBW102","d":"4","e":"1","f":"0","g":"17","h":"0","i":"UNIQ_KEY\\u0001A1\\u0002"}'
    text = (header % (short % topic)).encode()
    count = check(struct.pack(">iI", len(text) + 9, len(text)) + text + b"hello")
    is_clients = '"JAVA"' in header or '"GO"' in header or '"NODE"' in header
    assert count == (is_clients and topic == "Orders")


@given(
    st.lists(
        st.tuples(st.integers(0, 3), plain_strings | timed_strings, st.binary(min_size=1, max_size=600), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([(BORN, HOST), (HOST_V6, HOST), (BORN, HOST_V6)]),
    st.integers(0, 1 << 50),
)
def test_records_entries_and_answers_are_equal(sends, hosts, physical_offset):
    data = b"".join(
        long_send({"properties": text, "queueId": str(queue)}, body, at)
        if is_long
        else send({"i": text, "e": str(queue)}, body=body, opaque=at)
        for at, (queue, text, body, is_long) in enumerate(sends)
    )
    run = CORE.read(data)
    assume(run is not None and len(run) == len(sends))  # else one has more than 511 bytes of properties
    twin = TWIN.read(data, 0)
    records = compare(run, twin, *hosts, physical_offset)
    # Both may err in the same way: what is dispatched is what the decoded records say.
    at = 0
    for fields in twin.requests(True):
        record = decode_record(records, at)
        found = msgspec.structs.replace(DispatchRequest(*fields), keys=None, sys_flag=record.sys_flag)
        assert found == request_of(record, ())
        at += record.size
    assert (at, run.opaques) == (len(records), list(range(len(sends))))
    with pytest.raises(ValueError, match="forgotten"):
        run.chunk  # noqa: B018


def long_send(fields, body, opaque):
    header = SendMessageRequest("p", "Orders", "TBW102", 4, 1, 0, 1_700_000_000_000, 0, "", 0, False)
    command = request(10, header, body)
    command.fields |= fields
    command.opaque = opaque
    return b"".join(bytes(piece) for piece in encode_command(command, JSON))


def hashes_of(record, with_tags):
    return hashes(record.topic, find_keys(record.properties), with_tags)


entries = st.tuples(
    st.binary(max_size=300), plain_strings | strings | st.just(""), st.integers(-(1 << 31), (1 << 31) - 1)
)


@given(st.lists(entries, min_size=1, max_size=5), plain_strings, st.sampled_from([JSON, ROCKETMQ]))
def test_a_batch_is_read_and_stored_as_python_does_it(members, own, kind):
    body = encode_batch([BatchEntry(text, properties.encode(), flag) for text, properties, flag in members])
    data = batch(body, {"i": own, "e": "3", "f": "64", "j": "2"}, kind=kind, opaque=9)
    taken = check(data)
    # What recovery might take for torn, and what names UNIQ_KEY, KEYS or TAGS twice, is left.
    stored = [properties for _, properties, _ in members]
    own_bytes = len(encode_in_stored_order({**decode_properties(own.encode()), **STAMPS}))
    is_lite = any("__LITE_TOPIC" in one for one in stored)
    if not taken:
        is_long = own_bytes > 511 or any(len(one.encode()) > 511 for one in stored)
        assert "__LITE_TOPIC" in own or is_long or any(map(is_odd, stored)) or is_lite
        return
    run, twin = CORE.read(data), TWIN.read(data, 0)
    assert (taken, run.opaques, run.body_bytes_max) == (len(members), [9], len(body))
    records, at = compare(run, twin, HOST_V6, HOST, 4096), 0
    for fields, (text, properties, flag) in zip(run.requests(True), members, strict=True):
        record = decode_record(records, at)
        assert (record.body, record.flag) == (text, flag)
        assert is_lite or record.properties == properties.encode()
        assert (record.queue_id, record.reconsume_times) == (3, 2)
        request = msgspec.structs.replace(request_of(record, ()), sys_flag=0x40, hashes=hashes_of(record, True))
        # its place is the log's: the record says it, too
        assert (DispatchRequest(*fields), record.physical_offset) == (request, 4096 + at)
        at += record.size
    (first, _), ids = run.requests(False)[0][5:7], run.answers(*PIECES)
    assert f"{HOST.hex().upper()}{first:016X}".encode() in ids
    assert ids.count(HOST.hex().upper().encode()) == len(members)


lite_strings = st.dictionaries(st.sampled_from(PLAIN_NAMES[1:]), plain_values, max_size=6).map(
    lambda pairs: string([*pairs.items()])
)


@given(
    st.lists(st.tuples(st.binary(max_size=200), lite_strings, st.integers(0, 99)), min_size=1, max_size=6),
    st.text("abcXYZ019-_", min_size=1, max_size=64),
    st.sampled_from([JSON, ROCKETMQ]),
)
def test_a_batch_in_one_lite_topic_is_stored_like_its_single_sends(members, lite_topic, kind):
    texts = [f"__LITE_TOPIC\x01{lite_topic}\x02{text}" for _, text, _ in members]
    assume(all(map(has_room, texts)))
    entries = [BatchEntry(body, text.encode(), flag) for text, (body, _, flag) in zip(texts, members, strict=True)]
    data = batch(encode_batch(entries), kind=kind, opaque=9)
    assert check(data) == len(members)
    run, twin = CORE.read(data), TWIN.read(data, 0)
    assert run.lite == [("Orders", lite_topic)] * len(members)
    records = compare(run, twin)
    singles = b"".join(
        send({"i": text, "h": str(flag)}, body=body or b"-", opaque=at)
        for at, (text, (body, _, flag)) in enumerate(zip(texts, members, strict=True))
    )
    if all(body for body, _, _ in members):  # a single send has a body
        assert compare(CORE.read(singles), TWIN.read(singles, 0)) == records
    answer = run.answers(*PIECES)
    assert answer.count(b'"liteOffset":"0"') == 1
    assert answer.count(HOST.hex().upper().encode()) == len(members)


@pytest.mark.parametrize("others", [["s2"], [None], ["s1", "a b"], ["s1", None]])
def test_a_batch_that_is_not_all_in_one_lite_topic_is_left(others):
    def entry(name):
        pairs = [] if name is None else [("__LITE_TOPIC", name)]
        return BatchEntry(b"x", string(pairs).encode(), 0)

    several = [entry("s1"), *map(entry, others)]
    for members in (several, several[::-1]):
        data = batch(encode_batch(members))
        assert (CORE.read(data), TWIN.read(data, 0)) == (None, None)
        check_stream(send() + data + send())


@pytest.mark.parametrize(
    "more",
    [
        *[f"{name}\x015\x02" for name in (*NOT_PLAIN, *STAMPS, *TIMED)],
        "a\x01" + "b" * 400 + "\x02",
        "UNIQ_KEY\x01K2\x02",
    ],
)
def test_a_batch_with_a_message_that_is_no_plain_send_to_its_lite_topic_is_left(more):
    text = string([("__LITE_TOPIC", "s1")])
    for at in (0, 1):
        members = [BatchEntry(b"x", (text + more * (at == place)).encode(), 0) for place in (0, 1)]
        data = batch(encode_batch(members))
        assert (CORE.read(data), TWIN.read(data, 0)) == (None, None)
    keyless = batch(encode_batch([BatchEntry(b"x", b"__LITE_TOPIC\x01s1\x02", 0)]))
    assert (CORE.read(keyless), TWIN.read(keyless, 0)) == (None, None)


@pytest.mark.parametrize(("properties_bytes", "count_max"), [(256, 512), (32, 2048)])
def test_the_longest_batch_in_a_lite_topic(properties_bytes, count_max):
    pairs = [("__LITE_TOPIC", "s1"), ("a", "x" * (properties_bytes - 35))][: 1 + (properties_bytes > 35)]
    member = BatchEntry(b"x", string(pairs).encode(), 0)
    assert len(member.properties) == properties_bytes
    for count in (count_max, count_max + 1):
        data = batch(encode_batch([member] * count))
        assert check(data) == (count if count == count_max else 0)
        assert (TWIN.read(data, 0) is not None) == (count == count_max)


def is_odd(text):
    pairs = [piece.split("\x01") for piece in text.removesuffix("\x02").split("\x02")] if text else []
    return not all(len(pair) == 2 and all(pair) for pair in pairs) or len({pair[0] for pair in pairs}) < len(pairs)


ENTRY = encode_batch([BatchEntry(b"hello", b"UNIQ_KEY\x01A\x02", 0)])


@given(st.data())
def test_bodies_that_are_no_batch_are_left(data):
    count = data.draw(st.integers(1, 3))
    body = bytearray(ENTRY * count)
    assert check(batch(bytes(body))) == count
    for _ in range(data.draw(st.integers(0, 2))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    check(batch(bytes(body[: data.draw(st.integers(0, len(body)))])))


@given(strings, changes, st.sampled_from([JSON, ROCKETMQ]), st.sampled_from([10, 310, 320]), st.booleans())
def test_headers_of_batches_are_read_as_python_reads_them(own, fields, kind, code, is_batch):
    data = send({"i": own, "m": str(is_batch).lower(), **fields}, code=code, body=ENTRY, kind=kind)
    check(data)
    check_stream(data)


def test_a_batch_comes_alone():
    one, several = send(opaque=1), batch(ENTRY * 3, opaque=2)
    run = CORE.read(one + several + one)
    assert (len(run), run.end, run.is_batch) == (1, len(one), False)
    run = CORE.read(one + several + one, len(one), 1)
    assert (len(run), run.end, run.is_batch, run.opaques) == (3, len(one + several), True, [2])
    check_stream(one + several + several + one)


def test_batches_at_the_bounds():
    def of(properties, count=1, **more):
        return check(batch(encode_batch([BatchEntry(b"x", properties, 0)] * count), **more))

    assert of(b"a\x01" + b"b" * 508 + b"\x02") == 1
    assert of(b"a\x01" + b"b" * 509 + b"\x02") == 0
    assert of(b"a\x01b\0") == 0
    assert of(b"a\x01\xff") == 0
    assert of(b"", fields={"b": "T" * 127}) == 1
    assert of(b"", fields={"b": "T" * 128}) == 0
    assert (of(b"", 2048), of(b"", 2049)) == (2048, 0)
    assert (of(b"a\x01" + b"b" * 508 + b"\x02", 64), of(b"a\x01" + b"b" * 508 + b"\x02", 65)) == (64, 0)


def test_a_batch_that_requests_more_is_left():
    for more in ("DELAY\x013\x02", "TIMER_DELAY_MS\x01500\x02", "MSG_REGION\x01x\x02", "a\x01b"):
        data = batch(ENTRY, {"i": f"UNIQ_KEY\x01A1\x02{more}"})
        is_left = more != "a\x01b"
        assert (CORE.read(data) is None, TWIN.read(data, 0) is None) == (is_left, is_left)
    assert CORE.read(batch(ENTRY, {"i": "a\x01b\x02"})) is None  # no unique key
    assert CORE.read(batch(ENTRY, {"i": "UNIQ_KEY\x01A1\x02WAIT\x01false\x02"})).waits_not


def test_calls_that_cannot_be_are_refused():
    run = CORE.read(send())
    with pytest.raises(ValueError, match="call encode first"):
        run.queue_entries()
    with pytest.raises(ValueError, match="2 numbers for 1 queues"):
        run.encode([1, 2], 0, BORN, 1, HOST, False)
    with pytest.raises(ValueError, match="does not fit into the log's numbers"):
        run.encode([(1 << 63) - 1], 0, BORN, 1, HOST, False)
    with pytest.raises(IndexError):
        run.message(1)
