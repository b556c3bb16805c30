"""Client settings. Source: behaviour.md §7.4, §8.2."""

from __future__ import annotations

import pytest
from msgspec.structs import astuple

from rmqkit.client.runtime.settings import (
    ClientSettings,
    CompressionType,
    ProducerSettings,
    PullConsumerSettings,
    Pulling,
    PushConsumerSettings,
    StartFrom,
    check,
    name_server_list,
)
from rmqkit.errors import SettingsError
from rmqkit.remoting.authentication import Credentials
from rmqkit.settings import load, setting_table, to_properties


def test_defaults_are_the_reference_ones():
    producer, consumer = ProducerSettings(), PushConsumerSettings()
    assert (producer.send_timeout_ms, producer.retries, producer.compression.body_bytes_min) == (20_000, -1, 4096)
    assert (producer.limits.message_bytes_max, producer.template_topic, producer.template_queue_count) == (
        4194304,
        "TBW102",
        4,
    )
    assert (consumer.pull.count, *astuple(consumer.limits)[:3]) == (
        32,
        2000,
        1000,
        100,
    )
    assert (consumer.pull.suspend_ms, consumer.pull.timeout_ms, consumer.handlers_max) == (15_000, 30_000, 20)
    assert consumer.start_from is StartFrom.FIRST_OFFSET


@pytest.mark.parametrize(
    "settings_type", [ClientSettings, ProducerSettings, PullConsumerSettings, PushConsumerSettings]
)
def test_defaults_are_within_their_own_bounds_and_every_field_is_declared(settings_type):
    check(settings_type())
    declared = {name.partition(".")[0] for name, _, _ in setting_table(settings_type).values()}
    assert declared == set(settings_type.__struct_fields__)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            lambda: PushConsumerSettings(pull=Pulling(count=0)),
            "pull.count (pullBatchSize) is 0: it must be at least 1 and at most 1024",
        ),
        (
            lambda: PushConsumerSettings(handlers_max=1001),
            "handlers_max (consumeThreadMax) is 1001: it must be at least 1 and at most 1000",
        ),
        (lambda: ProducerSettings(send_timeout_ms=0), "send_timeout_ms (sendMsgTimeout) is 0: it must be at least 1"),
    ],
)
def test_a_value_out_of_bounds_is_reported_with_the_bounds(settings, text):
    with pytest.raises(SettingsError) as caught:
        check(settings())
    assert str(caught.value) == text


def test_a_properties_file_of_java_clients_fills_them():
    properties = {"sendMsgTimeout": "5000", "compressType": "ZSTD", "retryAnotherBrokerWhenNotStoreOK": "true"}
    properties |= {"accessKey": "shop", "secretKey": "secret"}
    assert to_properties(ProducerSettings())["accessKey"] == "", "a group that is None has no values"
    loaded = load([ProducerSettings], properties, source="client.properties")
    (settings,) = loaded.values
    assert (settings.send_timeout_ms, settings.compression.type, settings.retry_not_stored) == (
        5000,
        CompressionType.ZSTD,
        True,
    )
    assert settings.auth == Credentials("shop", "secret")
    assert settings.tls is settings.trace is None
    assert to_properties(settings)["compressType"] == "ZSTD"


def test_name_servers_come_from_the_argument_else_from_the_environment():
    environment = {"NAMESRV_ADDR": "b:2"}
    assert name_server_list("a:1; c:3", environment) == ["a:1", "c:3"]
    assert name_server_list(None, environment) == ["b:2"]


@pytest.mark.parametrize(
    ("name_servers", "text"),
    [
        (
            ["a:1", 2],
            "name servers ['a:1', 2]: an address is a text, host:port",
        ),
        ("a", "name servers 'a': address 'a' must be host:port, for example 127.0.0.1:9876"),
        (";", "name servers ';': the list of name servers is empty: give host:port;host:port"),
    ],
)
def test_name_servers_that_cannot_be_used_are_named(name_servers, text):
    with pytest.raises(SettingsError) as caught:
        name_server_list(name_servers, {})
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("name_servers", "environment", "found"),
    [
        (None, {}, ["127.0.0.1:9876"]),
        ("", {}, ["127.0.0.1:9876"]),
        ([], {}, ["127.0.0.1:9876"]),
        (None, {"NAMESRV_ADDR": "a:1;b:2"}, ["a:1", "b:2"]),
        ("c:3", {"NAMESRV_ADDR": "a:1;b:2"}, ["c:3"]),
        (["a:1", "b:2"], {}, ["a:1", "b:2"]),
        ("rocketmq://a:1", {}, ["a:1"]),
        ("rocketmq://a:1/; b:2", {}, ["a:1", "b:2"]),
        (("rocketmq://a:1", "[::1]:2"), {}, ["a:1", "[::1]:2"]),
    ],
)
def test_name_servers_are_given_or_those_of_the_environment_or_the_one_of_this_machine(
    name_servers, environment, found
):
    assert name_server_list(name_servers, environment) == found


def test_a_web_server_is_asked_before_the_name_server_of_this_machine():
    assert name_server_list(None, {}, domain="jmenv.example") == []
    assert name_server_list(None, {"NAMESRV_ADDR": "a:1"}, domain="jmenv.example") == ["a:1"]
