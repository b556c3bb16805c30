"""Options: typed, in any case, and every mistake named in one line."""

from __future__ import annotations

import re

import pytest

from rmqkit.arrow.options import CorruptRecords, VerifyCrc
from rmqkit.errors import SettingsError
from rmqkit.settings import setting_table
from rmqkit.spark.options import LiveOptions, SinkOptions, StoreOptions, parse_options, words


def _parse(**given: str) -> StoreOptions:
    return parse_options(StoreOptions, given, "rocketmq-store")


def test_nothing_given_means_the_defaults() -> None:
    assert _parse() == StoreOptions()
    assert StoreOptions().split_bytes == 128 << 20


def test_names_are_taken_in_any_case() -> None:
    options = _parse(VERIFYCRC="drop", splitbytes="1000", storepathcommitlog="/a,/b", CorruptRecordMode="SKIP")
    assert options.verify_crc is VerifyCrc.DROP
    assert options.split_bytes == 1000
    assert options.log_paths == "/a,/b"
    assert options.corrupt_records is CorruptRecords.SKIP


@pytest.mark.parametrize(
    ("text", "size"), [("64k", 64 << 10), ("128m", 128 << 20), ("1G", 1 << 30), ("2MB", 2 << 20), (" 7 ", 7)]
)
def test_sizes_may_have_a_suffix(text: str, size: int) -> None:
    assert _parse(splitBytes=text).split_bytes == size


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"topci": "a"}, "option 'topci' is not known: did you mean topic?"),
        ({"splitbyte": "1"}, "option 'splitbyte' is not known: did you mean splitBytes?"),
        ({"qwertz": "1"}, "option 'qwertz' is not known: choose from path, storePathCommitLog, entity, topic,"),
        ({"verifyCrc": "maybe"}, "verifyCrc=maybe must be one of none, fail, drop, column"),
        ({"entity": "queue"}, "entity=queue must be one of messages, consumequeue"),
        ({"splitBytes": "0"}, "splitBytes=0 must be a whole number at least 1"),
        ({"splitBytes": "12x"}, "splitBytes=12x must be a whole number at least 1"),
        ({"batchRows": "-5"}, "batchRows=-5 must be a whole number from 1 to 1048576"),
        ({"includeBody": "yes"}, "includeBody=yes must be true or false"),
    ],
)
def test_a_mistake_is_named_in_one_line(given: dict[str, str], text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        _parse(**given)
    assert str(caught.value).startswith(f"rocketmq-store: {text}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options_type", "name", "hint"),
    [
        (LiveOptions, "kafka.bootstrap.servers", "it is Kafka's, its name here is nameServer"),
        (LiveOptions, "groupIdPrefix", "it is Kafka's, its name here is group"),
        (LiveOptions, "includeHeaders", "it is Kafka's, its name here is includeProperties"),
        (LiveOptions, "fetchOffset.numRetries", "it is Kafka's, its name here is brokerPatienceMs"),
        (LiveOptions, "kafka.isolation.level", "it is Kafka's, leave it out: uncommitted messages are never read"),
        (SinkOptions, "kafka.batch.size", "it is Kafka's, its name here is batchMaxBytes"),
        (SinkOptions, "kafka.request.timeout.ms", "it is Kafka's, its name here is sendTimeoutMs"),
        (SinkOptions, "kafka.security.protocol", "it is Kafka's, its name here is useTLS"),
        (SinkOptions, "includeHeaders", "choose from nameServer,"),
    ],
)
def test_an_option_of_kafka_is_reported_with_its_name_here(options_type: type, name: str, hint: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(f"rocketmq: option '{name}' is not known: {hint}")):
        parse_options(options_type, {name: "1"}, "rocketmq")


def test_every_option_says_what_it_is_for() -> None:
    for _, _, setting in setting_table(StoreOptions).values():
        assert setting.help


def test_lists_are_separated_by_commas() -> None:
    assert words(" a, b,,c ") == ["a", "b", "c"]
    assert words("") == []
