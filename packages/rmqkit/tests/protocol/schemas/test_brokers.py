"""Registrations in every form that brokers send (remoting.md §6.4.1)."""

from __future__ import annotations

import struct
import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.errors import BodyError
from rmqkit.protocol.codes import version_number
from rmqkit.protocol.schemas.brokers import (
    BrokerMemberGroup,
    BrokerMemberGroupBody,
    RegisterBrokerBody,
    compress_registration,
    decode_registration,
)
from rmqkit.protocol.schemas.topics import (
    DataVersion,
    KVTable,
    TopicConfig,
    TopicConfigTable,
    TopicList,
    TopicQueueMappingInfo,
)

V4, V5 = version_number(4, 9, 4), version_number(5, 4, 0)
SPEC = (
    b'{"filterServerList":[],"topicConfigSerializeWrapper":{"dataVersion":{"counter":2,"stateVersion":0,'
    b'"timestamp":1795224574705},"mappingDataVersion":{"counter":0,"stateVersion":0,"timestamp":1795224205485},'
    b'"topicConfigTable":{"T":{"attributes":{},"order":false,"perm":6,"readQueueNums":4,'
    b'"topicFilterType":"SINGLE_TAG","topicName":"T","topicSysFlag":0,"writeQueueNums":4}},'
    b'"topicQueueMappingDetailMap":{},"topicQueueMappingInfoMap":{}}}'
)
SPEC_TABLE = TopicConfigTable(
    DataVersion(2, 0, 1795224574705), {"T": TopicConfig("T", 4, 4)}, DataVersion(0, 0, 1795224205485), {}, {}
)


def chunk(content):
    return struct.pack(">i", len(content)) + content


def count(number):
    return struct.pack(">i", number)


VERSION = chunk(b'{"counter":2,"stateVersion":0,"timestamp":1795224574705}')
FILTERS = chunk(b'["127.0.0.1:30000"]')
MAPPING = chunk(b'{"bname":"a","currIdMap":{0:0,1:1},"dirty":false,"epoch":7,"scope":"s","topic":"T","totalQueues":2}')
LINES_5 = [b'T 4 8 6 SINGLE_TAG {"message.type":"DELAY"}', b"U 1 1 4 MULTI_TAG {}"]
LINES_4 = [b"T 4 8 6 SINGLE_TAG", b"U 1 1 4 MULTI_TAG"]
BODY_5 = VERSION + count(2) + b"".join(map(chunk, LINES_5)) + FILTERS + count(1) + MAPPING
BODY_4 = VERSION + count(2) + b"".join(map(chunk, LINES_4)) + FILTERS


def read(body, *, is_compressed=False, version=V5):
    return decode_registration(body, is_compressed=is_compressed, version=version)


def test_the_spec_s_body_is_read():
    assert read(SPEC) == RegisterBrokerBody([], SPEC_TABLE)


def test_an_empty_body_is_an_empty_table():
    assert read(b"") == RegisterBrokerBody([], TopicConfigTable(DataVersion(0, 0, 0)))


def test_brokers_before_3_0_11_send_the_table_alone():
    inner = SPEC.partition(b'"topicConfigSerializeWrapper":')[2][:-1]
    assert read(inner, version=36) == RegisterBrokerBody([], SPEC_TABLE)
    assert read(inner, version=37).topic_config_serialize_wrapper.topic_config_table == {}


@pytest.mark.parametrize("is_compressed", [True, False])
def test_the_compressed_body_of_5_x_is_read(is_compressed):
    body = read(zlib.compress(BODY_5, 9), is_compressed=is_compressed)
    assert body.filter_server_list == ["127.0.0.1:30000"]
    table = body.topic_config_serialize_wrapper
    assert table.data_version == DataVersion(2, 0, 1795224574705)
    assert table.topic_config_table == {
        "T": TopicConfig("T", 4, 8, 6, attributes={"message.type": "DELAY"}),
        "U": TopicConfig("U", 1, 1, 4, "MULTI_TAG"),
    }
    mapping = TopicQueueMappingInfo(bname="a", curr_id_map={0: 0, 1: 1}, epoch=7, scope="s", topic="T", total_queues=2)
    assert table.topic_queue_mapping_info_map == {"T": mapping}


def test_the_compressed_body_of_4_x_is_read():
    table = read(zlib.compress(BODY_4), is_compressed=True, version=V4).topic_config_serialize_wrapper
    assert table.topic_config_table == {"T": TopicConfig("T", 4, 8), "U": TopicConfig("U", 1, 1, 4, "MULTI_TAG")}
    assert table.topic_queue_mapping_info_map is msgspec.UNSET


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "ends at byte 0 before its data version"),
        (count(-1), "-1 at byte 0 cannot be the size of its data version"),
        (count(5) + b"{}", "5 at byte 0 cannot be the size of its data version"),
        (VERSION + count(1) + b"ab", "ends at byte 66 before its topic"),
        (VERSION + count(1) + chunk(b"T 4 4 6"), "topic line b'T 4 4 6' cannot be read: it has 4 items"),
        (VERSION + count(1) + chunk(b"T four 4 6 SINGLE_TAG"), "cannot be read: invalid literal"),
        (VERSION + count(1) + chunk(b"\xff 4 4 6 SINGLE_TAG"), "cannot be read: 'utf-8' codec"),
        (VERSION + count(0) + chunk(b"{}"), "list: Expected `array`, got `object`"),
        (BODY_5[:-1], "cannot be the size of its mapping"),
    ],
)
def test_a_compressed_body_that_is_cut_or_wrong_is_an_error(body, text):
    with pytest.raises(BodyError) as failure:
        read(zlib.compress(body), is_compressed=True)
    assert text in str(failure.value)


def test_a_body_that_would_fill_the_memory_is_refused():
    with pytest.raises(BodyError, match="grows beyond the limit"):
        read(zlib.compress(bytes(65 << 20), 1), is_compressed=True)


@given(
    body=st.binary() | st.binary().map(zlib.compress),
    is_compressed=st.booleans(),
    version=st.sampled_from([36, V4, V5]),
)
def test_any_bytes_are_read_or_refused(body, is_compressed, version):
    try:
        read(body, is_compressed=is_compressed, version=version)
    except BodyError:
        pass


@given(cut=st.integers(0, len(BODY_5)), flip=st.integers(0, 8 * len(BODY_5) - 1))
def test_a_damaged_compressed_body_is_read_or_refused(cut, flip):
    damaged = bytearray(BODY_5)
    damaged[flip // 8] ^= 1 << flip % 8
    try:
        read(zlib.compress(bytes(damaged[:cut])), is_compressed=True)
    except BodyError:
        pass


names = st.text("abcXYZ0123%_-|", min_size=1, max_size=20)
numbers = st.integers(0, 1 << 30)
configs = st.builds(
    TopicConfig,
    read_queue_nums=numbers,
    write_queue_nums=numbers,
    perm=numbers,
    topic_filter_type=st.sampled_from(["SINGLE_TAG", "MULTI_TAG"]),
    attributes=st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=2),
)


@given(table=st.dictionaries(names, configs, max_size=4), servers=st.lists(names), mapped=st.sets(names, max_size=2))
def test_what_is_compressed_is_read_back(table, servers, mapped):
    for name, config in table.items():
        config.topic_name = name
    mappings = {topic: TopicQueueMappingInfo(topic=topic, bname="a", curr_id_map={1: 2}) for topic in mapped}
    registration = RegisterBrokerBody(servers, TopicConfigTable(DataVersion(1, 2, 3), table, msgspec.UNSET, mappings))
    assert read(compress_registration(registration, version=V5), is_compressed=True) == registration
    without = compress_registration(registration, version=V4)
    plain = read(without, is_compressed=True, version=V4).topic_config_serialize_wrapper
    assert plain.topic_config_table == {
        name: msgspec.structs.replace(config, attributes={}) for name, config in table.items()
    }


@pytest.mark.parametrize(
    ("body", "json"),
    [
        (KVTable({"k": "v"}), b'{"table":{"k":"v"}}'),
        (TopicList(["T"]), b'{"topicList":["T"]}'),
        (TopicList([], "127.0.0.1:10911"), b'{"topicList":[],"brokerAddr":"127.0.0.1:10911"}'),
        (
            BrokerMemberGroupBody(BrokerMemberGroup({0: "127.0.0.1:10911"}, "b", "c")),
            b'{"brokerMemberGroup":{"brokerAddrs":{"0":"127.0.0.1:10911"},"brokerName":"b","cluster":"c"}}',
        ),
    ],
)
def test_small_bodies_have_the_wire_s_shape(body, json):
    assert msgspec.json.encode(body) == json
    assert msgspec.json.decode(json, type=type(body)) == body
