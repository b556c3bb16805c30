"""Every example of remoting.md §6 (and the bodies in §4) is read into its type and written again."""

from __future__ import annotations

import importlib
import typing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.errors import BodyError
from rmqkit.protocol.catalog import CATALOG
from rmqkit.protocol.fastjson import decode_as, dumps, loads
from rmqkit.protocol.operation import Content
from rmqkit.protocol.schemas.brokers import TimerCheckpoint, decode_timer_checkpoint, encode_timer_checkpoint
from rmqkit.protocol.schemas.clients import MessageQueue, SubscriptionData
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.protocol.schemas.offsets import BrokerStatsData, QueueOffset, ResetOffsetBody, ResetOffsetList
from rmqkit.protocol.schemas.pop import Assignments
from rmqkit.protocol.schemas.topics import DataVersion

BODIES = Path(__file__).with_name("bodies.txt")


def examples():
    for line in BODIES.read_text().splitlines():
        if not line.startswith("#"):
            name, _, text = line.partition(" ")
            module, _, body_type = name.partition(".")
            found = getattr(importlib.import_module(f"rmqkit.protocol.schemas.{module}"), body_type)
            yield pytest.param(found, text.encode(), id=body_type)


@pytest.mark.parametrize(("body_type", "text"), [*examples()])
def test_an_example_is_read_and_written(body_type, text):
    value = decode_as(text, body_type)
    assert loads(dumps(value)) == loads(text)
    assert decode_as(dumps(value), body_type) == value


def test_every_json_body_of_the_catalog_has_an_example():
    shown = {parameter.values[0] for parameter in examples()}
    for operation in CATALOG.values():
        for body in (operation.request_body, operation.response_body):
            item = typing.get_args(body)[0] if typing.get_origin(body) is list else body
            if item not in (None, str) and not isinstance(item, Content):
                assert item in shown, f"{operation.name}: add an example of {item.__name__} to {BODIES.name}"


def test_queues_are_typed_keys():
    body = decode_as(b'{"offsetTable":{{"brokerName":"broker-a","queueId":0,"topic":"T"}:3}}', ResetOffsetBody)
    assert body.offset_table == {MessageQueue("T", "broker-a", 0): 3}


def test_values_that_fastjson_1_shares_are_read():
    table = decode_as(
        b'{"statsDay":{"avgpt":0.0,"sum":0,"tps":0.0},"statsHour":{"$ref":"$.statsDay"},'
        b'"statsMinute":{"avgpt":1.0,"sum":3,"tps":2.0}}',
        BrokerStatsData,
    )
    assert (table.stats_hour, table.stats_minute.sum) == (table.stats_day, 3)


def test_cpp_clients_get_the_offsets_as_a_list():
    body = ResetOffsetBody({MessageQueue("T", "b", 1): 3})
    assert ResetOffsetList.of(body).offset_table == [QueueOffset(topic="T", broker_name="b", queue_id=1, offset=3)]


def test_an_account_that_is_not_registered_gets_no_assignment():
    assert decode_as(b"{}", Assignments).message_queue_assignments == []


def test_absent_properties_have_javas_defaults_and_unknown_ones_are_ignored():
    assert decode_as(b'{"groupName":"g","retryPolicy":{"x":[1]}}', SubscriptionGroupConfig).retry_max_times == 16
    assert decode_as(b'{"topic":"T"}', SubscriptionData).sub_string == "*"


@pytest.mark.parametrize("queue_id", [b"2147483648", b"-2147483649", b'"x"', b"1.5", b"true", b"9" * 400])
def test_a_number_java_could_not_have_sent_is_a_body_error(queue_id):
    with pytest.raises(BodyError, match="queueId"):
        decode_as(b'{"brokerName":"b","queueId":' + queue_id + b',"topic":"T"}', MessageQueue)


CHECKPOINT = bytes.fromhex("0000000000000001 0000000000000002 0000000000000003 0000000000000004") + bytes.fromhex(
    "0000000000000005 0000000000000006 0000000000000007"
)


def test_the_timer_checkpoint_has_56_bytes():
    checkpoint = TimerCheckpoint(
        last_read_time_ms=1,
        last_timer_log_flush_position=2,
        last_timer_queue_offset=3,
        master_timer_queue_offset=4,
        data_version=DataVersion(counter=7, state_version=5, timestamp=6),
    )
    assert encode_timer_checkpoint(checkpoint) == CHECKPOINT
    assert decode_timer_checkpoint(CHECKPOINT) == checkpoint


@given(st.binary(max_size=80))
def test_a_timer_checkpoint_of_another_size_is_a_body_error(body):
    if len(body) == 56:
        assert encode_timer_checkpoint(decode_timer_checkpoint(body)) == body
    else:
        with pytest.raises(BodyError, match="56"):
            decode_timer_checkpoint(body)
