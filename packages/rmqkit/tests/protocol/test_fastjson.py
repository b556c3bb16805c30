"""The JSON dialect of Java peers (remoting.md §6)."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.errors import BodyError
from rmqkit.protocol.fastjson import ObjectKey, _Reader, decode_as, decode_with_texts, dumps, loads, read
from rmqkit.protocol.schemas.brokers import RegisterBrokerBody
from rmqkit.protocol.schemas.clients import HeartbeatData, MessageQueue
from rmqkit.protocol.schemas.topics import BrokerData, TopicRoute

QUEUE_KEY = ObjectKey({"brokerName": "broker-a", "queueId": 0, "topic": "T"})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b'{0:"a:1",1:"b:2"}', {"0": "a:1", "1": "b:2"}),
        (b'{"a":{-3:1}}', {"a": {"-3": 1}}),
        (b'{{"brokerName":"broker-a","queueId":0,"topic":"T"}:3}', {QUEUE_KEY: 3}),
        (b'{{"topic":"T","queueId":0,"brokerName":"broker-a"}:{"maxOffset":5}}', {QUEUE_KEY: {"maxOffset": 5}}),
        (b'{"x":{"n":1},"y":{"$ref":"$.x"},0:1}', {"x": {"n": 1}, "y": {"n": 1}, "0": 1}),
        (b'{"x":[{"n":1}],"y":{"$ref":"$.x[0]"},0:1}', {"x": [{"n": 1}], "y": {"n": 1}, "0": 1}),
        (b'{"a.b":{"n":1},"y":{"$ref":"$.a\\\\.b"},0:1}', {"a.b": {"n": 1}, "y": {"n": 1}, "0": 1}),
        (b'{0:1.5e3,1:true,2:null,3:-7,4:"\\u00e9"}', {"0": 1500.0, "1": True, "2": None, "3": -7, "4": "é"}),
        (b" [ ] ", []),
        (b'{"jstack":"main()\n\t\\"x.go\\":1\x01"}', {"jstack": 'main()\n\t"x.go":1\x01'}),  # a Go client's
    ],
)
def test_the_dialect_is_read(text, value):
    assert loads(text) == value


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"{1}",
        b"{1:}",
        b'{"a":1',
        b"{1:2,,3:4}",
        b"{{[]:1}:2}",
        b"{1:2}x",
        b'{1:"a}',
        b'["\\\n"]',
        b"{true:1}",
        b"\xff",
    ],
)
def test_what_is_neither_is_a_body_error(text):
    with pytest.raises(BodyError):
        loads(text)


@pytest.mark.parametrize("start", [b"{0:", b"[", b'{"a":', b"{", b'[{"$ref":"$"},'])
def test_nesting_has_a_limit(start):
    with pytest.raises(BodyError, match="64 levels"):
        loads(start * 100_000)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b'{"a":{"$ref":"$"},"b":1}', {"a": None, "b": 1}),
        (b'{"a":{"$ref":"@"},"b":1}', {"a": None, "b": 1}),
        (b'{"a":{"x":{"$ref":".."}},"b":1}', {"a": {"x": None}, "b": 1}),
        (b'{"a":{"x":1,"y":{"$ref":"@.x"}}}', {"a": {"x": 1, "y": 1}}),
        (b'{"a":{"y":{"$ref":"...b"}},"b":[5]}', {"a": {"y": [5]}, "b": [5]}),
        (b'[[1],{"$ref":"$[0]"},{"$ref":"$[0][0]"}]', [[1], [1], 1]),
        (b'{"a":{"b.c":[7]},"d":{"$ref":"$.a[\\"b.c\\"]"}}', {"a": {"b.c": [7]}, "d": [7]}),
        (b'{"a":{"b.c":[7]},"d":{"$ref":"$.a[\'b.c\'][0]"}}', {"a": {"b.c": [7]}, "d": 7}),
        (b'{"%RETRY%g":{"n":1},"d":{"$ref":"$.\\\\%RETRY\\\\%g"}}', {"%RETRY%g": {"n": 1}, "d": {"n": 1}}),
        # a reference to something that holds references itself
        (b'{"a":{"x":{"$ref":"$.b"}},"b":[2],"c":{"$ref":"$.a"}}', {"a": {"x": [2]}, "b": [2], "c": {"x": [2]}}),
    ],
)
def test_references_are_resolved_in_strict_json_as_well(text, value):
    assert loads(text) == value


@pytest.mark.parametrize("text", [b'{"$ref":"@"}', b'{"$ref":".."}', b'[{"$ref":".."}]', b'{"a":{"$ref":"x.y"}}'])
def test_a_reference_to_what_is_not_there_is_a_body_error(text):
    with pytest.raises(BodyError, match="is not a path from here"):
        loads(text)


def test_a_reference_to_a_reference_is_a_body_error():
    with pytest.raises(BodyError, match="points to another reference"):
        loads(b'{"a":{"$ref":"$.b"},"b":{"$ref":"$.a"}}')


def test_references_cannot_grow_a_text_without_bound():
    levels = [b'"x0":[1,1,1,1,1,1,1,1]']
    levels += [b'"x%d":[%s]' % (i, b",".join([b'{"$ref":"$.x%d"}' % (i - 1)] * 8)) for i in range(1, 20)]
    with pytest.raises(BodyError, match="grow it beyond"):
        loads(b"{" + b",".join(levels) + b"}")


QUEUE = MessageQueue("T", "broker-a", 0)


@pytest.mark.parametrize(
    "key",
    [
        b'{"brokerName":"broker-a","queueId":0,"topic":"T"}',
        b'{"topic":"T", "queueId":"0", "brokerName":"broker-a", "what":1}',
        b'"{\\"brokerName\\":\\"broker-a\\",\\"queueId\\":0,\\"topic\\":\\"T\\"}"',
    ],
)
def test_object_keys_become_the_key_type_of_the_map(key):
    assert decode_as(b"{" + key + b":3}", dict[MessageQueue, int]) == {QUEUE: 3}


def test_object_keys_become_their_text_in_a_map_of_texts():
    text = '{"brokerName":"broker-a","queueId":0,"topic":"T"}'
    body = memoryview(b'[{{"a":1,"b":"x"}:{"n":2},' + text.encode() + b':{"n":3}}]')
    assert decode_with_texts(body, list[dict[str, dict[str, int]]]) == [{'{"a":1,"b":"x"}': {"n": 2}, text: {"n": 3}}]


@pytest.mark.parametrize("body", [b'{{"a": 1}:3}', b'{{"a":1}:"x"}', b"{0:1}", b"\xff", b"[" * 2000, b""])
def test_what_is_written_otherwise_has_no_texts(body):
    with pytest.raises(BodyError):
        decode_with_texts(body, dict[str, int])


@pytest.mark.parametrize("key", [b"{}", b'{"topic":"T"}', b'"T"', b"7", b'"{"', b'"{}x"', b'{"topic":{}}'])
def test_a_key_of_another_type_is_a_body_error(key):
    with pytest.raises(BodyError):
        decode_as(b"{" + key + b":3}", dict[MessageQueue, int])


def test_an_enum_may_come_as_its_ordinal():
    data = decode_as(
        b'{"clientID":"c","consumerDataSet":[{"groupName":"g","consumeType":1,"messageModel":0,"consumeFromWhere":4}]}',
        HeartbeatData,
    )
    (group,) = data.consumerDataSet
    assert (group.consume_type, group.message_model) == ("CONSUME_PASSIVELY", "BROADCASTING")
    assert group.consume_from_where == "CONSUME_FROM_FIRST_OFFSET"
    with pytest.raises(BodyError, match="consumeType"):
        decode_as(b'{"clientID":"c","consumerDataSet":[{"groupName":"g","consumeType":3}]}', HeartbeatData)


@pytest.mark.parametrize("ref", [b'"$.nothing"', b'"$.x.y.z"', b'"elsewhere"', b'"$[7]"'])
def test_a_reference_to_nothing_is_a_body_error(ref):
    with pytest.raises(BodyError, match="ref"):
        loads(b'{"x":1,"y":{"$ref":' + ref + b"},0:0}")


def test_a_route_is_read_in_both_forms():
    queue_datas = b'"queueDatas":[{"brokerName":"b","perm":6,"readQueueNums":4,"topicSynFlag":0,"writeQueueNums":4}]'
    for key in (b"0", b'"0"'):
        addresses = b'{"brokerAddrs":{' + key + b':"127.0.0.1:21911"},"brokerName":"b","cluster":"C"}'
        route = decode_as(
            b'{"brokerDatas":[' + addresses + b'],"filterServerTable":{},' + queue_datas + b"}", TopicRoute
        )
        assert route.broker_datas == [BrokerData("C", "b", {0: "127.0.0.1:21911"})]
        assert (route.queue_datas[0].write_queue_nums, route.queue_datas[0].perm) == (4, 6)


def test_a_registration_body_of_a_real_broker_is_read():
    body = decode_as(
        b'{"filterServerList":[],"topicConfigSerializeWrapper":{"dataVersion":{"counter":2,"stateVersion":0,'
        b'"timestamp":1795224574705},"mappingDataVersion":{"counter":0,"stateVersion":0,"timestamp":1795224205485},'
        b'"topicConfigTable":{"T":{"attributes":{},"order":false,"perm":6,"readQueueNums":4,'
        b'"topicFilterType":"SINGLE_TAG","topicName":"T","topicSysFlag":0,"writeQueueNums":4}},'
        b'"topicQueueMappingDetailMap":{},"topicQueueMappingInfoMap":{}}}',
        RegisterBrokerBody,
    )
    wrapper = body.topic_config_serialize_wrapper
    assert (wrapper.data_version.counter, wrapper.topic_config_table["T"].write_queue_nums) == (2, 4)


def test_a_heartbeat_of_a_real_client_is_read():
    data = decode_as(
        b'{"clientID":"127.0.0.1@1","consumerDataSet":[{"consumeFromWhere":"CONSUME_FROM_LAST_OFFSET",'
        b'"consumeType":"CONSUME_PASSIVELY","groupName":"CG","messageModel":"CLUSTERING","subscriptionDataSet":['
        b'{"classFilterMode":false,"codeSet":[2598919,2598920],"expressionType":"TAG","subString":"TagA || TagB",'
        b'"subVersion":1700000000000,"tagsSet":["TagA","TagB"],"topic":"T"}],"unitMode":false}],'
        b'"heartbeatFingerprint":0,"producerDataSet":[{"groupName":"PG"}],"withoutSub":false}',
        HeartbeatData,
    )
    assert data.clientID == "127.0.0.1@1"
    assert data.consumerDataSet[0].subscription_data_set[0].code_set == [2598919, 2598920]
    assert data.producerDataSet[0].group_name == "PG"


def test_a_value_of_another_type_is_a_body_error_that_names_the_place():
    with pytest.raises(BodyError, match=r"\$\.clientID"):
        decode_as(b'{"clientID":[1]}', HeartbeatData)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({0: "a", 1: "b"}, b'{0:"a",1:"b"}'),
        ({QUEUE_KEY: 3}, b'{{"brokerName":"broker-a","queueId":0,"topic":"T"}:3}'),
        ({MessageQueue("T", "b", 1): {"x": None}}, b'{{"topic":"T","brokerName":"b","queueId":1}:{"x":null}}'),
        (
            BrokerData("C", "b", {0: "a:1"}),
            b'{"cluster":"C","brokerName":"b","brokerAddrs":{0:"a:1"},"enableActingMaster":false}',
        ),
        ([1, "é\n", True], '[1,"é\\n",true]'.encode()),
        ({}, b"{}"),
    ],
)
def test_the_dialect_is_written(value, text):
    assert dumps(value) == text


def test_files_are_written_in_lines_with_tabs():
    assert dumps({"t": {0: 1, 1: 2}, "e": []}, indent="\t") == b'{\n\t"t":{\n\t\t0:1,\n\t\t1:2\n\t},\n\t"e":[]\n}'


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(codec="utf-8"), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc$.", max_size=4), inner, max_size=3),
    max_leaves=12,
)


@given(PLAIN, st.sampled_from([None, "\t"]))
def test_strict_values_survive(value, indent):
    assert msgspec.json.decode(dumps(value, indent=indent)) == value


@given(st.dictionaries(st.integers(-9, 9), st.dictionaries(st.integers(0, 9), st.integers(), max_size=3), max_size=3))
def test_maps_with_integer_keys_survive(value):
    read = loads(dumps(value))
    assert {int(k): {int(i): n for i, n in inner.items()} for k, inner in read.items()} == value


@given(st.binary(max_size=40) | st.text('{}[]":,0123456789.-eE$ref\\truefalsn ', max_size=40).map(str.encode))
def test_any_bytes_are_a_value_or_a_body_error(noise):
    try:
        loads(noise)
    except BodyError as error:
        assert str(error)


QUEUE_KEYS = st.builds(
    ObjectKey, st.fixed_dictionaries({"topic": st.text('ab{}:,"\\', max_size=4), "queueId": st.integers(0, 3)})
)
WITH_OBJECT_KEYS = st.recursive(
    st.integers(-3, 3) | st.text('a{}:,"\\', max_size=5) | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(QUEUE_KEYS | st.text("a{", max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)
TOKENS = st.sampled_from(["{", "}", "[", "]", ",", ":", '"', "\\", "a", "0", '{"a":1}', '{{"a":1}:2}', '"a,{"', "1L"])


@given(WITH_OBJECT_KEYS.map(lambda value: dumps(value).decode()) | st.lists(TOKENS, max_size=9).map("".join))
def test_keys_put_in_quotes_read_as_character_by_character(text):
    try:
        value = _Reader(text, False).document()
    except BodyError:
        with pytest.raises(BodyError):
            read(text.encode())
    else:
        assert repr(read(text.encode())) == repr(value)
