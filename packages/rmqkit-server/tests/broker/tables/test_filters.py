"""The table of SQL92 filters, and bitmaps (behaviour.md §6.6, store.md §9.6, §17.3)."""

from __future__ import annotations

import json
import logging

import pytest

from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.tables.filters import FilterTable, inline_filter
from rmqkit.errors import StoreMismatch
from rmqkit.filter.sql92 import BloomFilter
from rmqkit.protocol.properties import encode_properties
from rmqkit.protocol.record import decode_record, encode_record, record_properties
from rmqkit.protocol.schemas.clients import SubscriptionData
from rmqkit.store.message_store import DispatchRequest
from rmqkit.store.queues.queue_ext import ExtUnit, QueueExt
from rmqkit.testing.clock import StandingClock
from tests.golden_stores import unpack_golden

NOW_MS = 1_795_226_100_000
DAY_MS = 86_400_000


def sql(expression, version=1, topic="T"):
    return SubscriptionData(topic=topic, sub_string=expression, expression_type="SQL92", sub_version=version)


def message(topic="T", **properties):
    return DispatchRequest(topic, 0, 0, 0, NOW_MS, 0, 100, 0, encode_properties(properties))


@pytest.fixture
def clock():
    return StandingClock(NOW_MS)


@pytest.fixture
def table(tmp_path, clock):
    return FilterTable(tmp_path, BrokerSettings(), clock)


def saved(table, tmp_path):
    table.persist()
    return json.loads((tmp_path / "consumerFilter.json").read_text())["filterDataByTopic"]


def test_a_heartbeat_registers_what_is_sql(table, tmp_path):
    table.register("g", [sql("a > 5"), SubscriptionData(topic="U", sub_string="A || B")])
    assert saved(table, tmp_path) == {
        "T": {
            "topic": "T",
            "groupFilterData": {
                "g": {
                    "bloomFilterData": {"bitNum": 112, "bitPos": list(BloomFilter(3, 112).positions("g", "T"))},
                    "bornTime": NOW_MS,
                    "clientVersion": 1,
                    "consumerGroup": "g",
                    "dead": False,
                    "deadTime": 0,
                    "expression": "a > 5",
                    "expressionType": "SQL92",
                    "topic": "T",
                }
            },
        }
    }
    assert (tmp_path / "consumerFilter.json").read_text().startswith('{\n\t"filterDataByTopic":{\n\t\t"T":{\n')


@pytest.mark.parametrize(
    ("expression", "version", "expected"),
    [("a > 6", 2, ("a > 6", 2)), ("a > 5", 2, ("a > 5", 2)), ("a > 6", 1, ("a > 5", 1)), ("a > 6", 0, ("a > 5", 1))],
)
def test_only_a_newer_version_changes_a_filter(table, clock, expression, version, expected):
    table.register("g", [sql("a > 5")])
    clock.ms += 10
    table.register("g", [sql(expression, version)])
    data = table.get("T", "g").data
    assert (data.expression, data.client_version) == expected
    assert data.born_time == NOW_MS + (10 if expected[0] == "a > 6" else 0)


def test_an_expression_that_does_not_compile_removes_the_one_before(table, caplog):
    table.register("g", [sql("a > 5")])
    with caplog.at_level(logging.CRITICAL):
        table.register("g", [sql("a >", 2)])
    assert table.get("T", "g") is None


def test_a_filter_is_dead_without_its_group_or_topic_and_comes_back(table, clock):
    table.register("g", [sql("a > 5"), sql("b > 5", topic="U")])
    clock.ms += 10
    table.register("g", [sql("a > 5")])
    assert [table.get(topic, "g").data.dead_time for topic in "TU"] == [0, NOW_MS + 10]
    table.unregister("g")
    assert table.get("T", "g").data.dead_time == NOW_MS + 10
    clock.ms += 10
    table.register("g", [sql("a > 5")])
    assert (table.get("T", "g").data.dead_time, table.get("T", "g").data.born_time) == (0, NOW_MS)


def test_a_dead_filter_is_kept_for_a_day(table, clock, tmp_path):
    table.register("g", [sql("a > 5")])
    table.unregister("g")
    clock.ms += DAY_MS - 1
    assert saved(table, tmp_path)["T"]["groupFilterData"]["g"]["dead"] is True
    assert not table.is_dirty
    clock.ms += 1
    assert table.is_dirty
    assert saved(table, tmp_path) == {}
    assert not table.is_dirty


def test_filters_alive_at_the_stop_are_dead_after_the_start(table, tmp_path, clock):
    table.register("old", [sql("a > 5")])
    clock.ms += 60_000
    table.register("young", [sql("a > 6")])
    table.persist()
    again = FilterTable(tmp_path, BrokerSettings(), clock)
    again.load()
    assert again.get("T", "old").data.dead_time == clock.ms - 30_000
    assert again.get("T", "young").data.dead_time == clock.ms
    assert again.bitmap_of(message(a="7")) == table.bitmap_of(message(a="7"))


def test_a_file_for_another_bloom_filter_is_ignored(table, tmp_path, clock, caplog):
    table.register("g", [sql("a > 5")])
    table.persist()
    other = FilterTable(tmp_path, BrokerSettings(bloom_group_count=64), clock)
    with caplog.at_level(logging.CRITICAL):
        other.load()
    assert other.get("T", "g") is None


def test_a_damaged_file_is_reported_and_its_backup_taken(table, tmp_path, clock, caplog):
    table.register("g", [sql("a > 5")])
    table.persist()
    table.persist()
    (tmp_path / "consumerFilter.json").write_text("{")
    again = FilterTable(tmp_path, BrokerSettings(), clock)
    with caplog.at_level(logging.CRITICAL):
        again.load()
    assert again.get("T", "g").data.expression == "a > 5"
    for name in ("consumerFilter.json", "consumerFilter.json.bak"):
        (tmp_path / name).write_text("{")
    with pytest.raises(StoreMismatch):
        FilterTable(tmp_path, BrokerSettings(), clock).load()


def test_a_bitmap_has_the_bits_of_the_groups_that_want_the_message_dead_ones_too(table):
    table.register("g_sql_1", [sql("a > 5", topic="GoldSql")])
    table.register("g_sql_2", [sql("a > 7", topic="GoldSql")])
    table.unregister("g_sql_2")
    bloom = BloomFilter(3, 112)
    for a, groups in (("1", []), ("6", ["g_sql_1"]), ("8", ["g_sql_1", "g_sql_2"]), ("x", [])):
        mask = 0
        for group in groups:
            mask |= bloom.mask(bloom.positions(group, "GoldSql"))
        assert table.bitmap_of(message("GoldSql", a=a)) == bloom.bitmap(mask)
    assert table.bitmap_of(message("T", a="8")) == b""


def test_an_entry_is_skipped_only_when_its_bitmap_is_newer_than_the_filter_and_lacks_a_bit(table):
    table.register("g", [sql("a > 5")])
    accept = table.get("T", "g").pull_filter.accept_entry
    full = table.bitmap_of(message(a="7"))
    for unit, accepted in [
        (None, True),
        (ExtUnit(0, NOW_MS, bytes(14)), True),
        (ExtUnit(0, NOW_MS + 1, bytes(14)), False),
        (ExtUnit(0, NOW_MS + 1, b""), True),
        (ExtUnit(0, NOW_MS + 1, bytes(15)), True),
        (ExtUnit(0, NOW_MS + 1, full), True),
    ]:
        assert accept(0, unit) is accepted


def test_retried_messages_are_filtered_by_the_topic_they_came_from(table):
    table.register("g", [sql("a > 5")])
    wanted = table.retry_filter("g", frozenset({1}))
    assert wanted.codes == frozenset({1})
    assert wanted.wants(message(RETRY_TOPIC="T", a="7"))
    assert not wanted.wants(message(RETRY_TOPIC="T", a="5"))
    assert wanted.wants(message(RETRY_TOPIC="U", a="5"))
    assert wanted.wants(message(a="5"))


@pytest.mark.parametrize(
    ("text", "kind"), [("a >", "SQL92"), ("", "SQL92"), (None, "SQL92"), ("a > 5", "FOO"), ("||", "TAG")]
)
def test_an_inline_subscription_that_cannot_be_read_is_a_value_error(text, kind):
    with pytest.raises(ValueError):
        inline_filter(text, kind)


@pytest.mark.parametrize("v6", [False, True])
@pytest.mark.parametrize("topic", ["T", "t" * 200])
def test_the_properties_of_a_record_are_found_without_decoding_it(v6, topic):
    host = bytes(20 if v6 else 8)
    record = encode_record(
        topic=topic.encode(), queue_id=0, flag=0, queue_offset=0, physical_offset=0, sys_flag=0, born_timestamp=0,
        born_host=host, store_timestamp=0, store_host=bytes(8), reconsume_times=0, prepared_transaction_offset=0,
        body=b"body", properties=b"a\x017\x02",
    )  # fmt: skip
    assert record_properties(memoryview(record)) == b"a\x017\x02"
    for end in range(len(record)):
        record_properties(memoryview(record)[:end])


# ---- golden data


@pytest.mark.parametrize("version", ["5.4.0", "4.9.4"])
def test_a_real_brokers_file_and_bitmaps_are_ours_byte_for_byte(tmp_path, version):
    golden = unpack_golden(version, tmp_path)
    config = golden.root / "config"
    before = json.loads((config / "consumerFilter.json").read_text())
    table = FilterTable(config, BrokerSettings(), StandingClock(NOW_MS))
    table.load()
    table.persist()
    assert json.loads((config / "consumerFilter.json").read_text()) == before
    born_ms = max(table.get("GoldSql", group).data.born_time for group in ("g_sql_1", "g_sql_2"))

    log = b"".join(path.read_bytes() for path in sorted((golden.root / "commitlog").iterdir()))
    entries = b"".join(path.read_bytes() for path in sorted((golden.root / "consumequeue" / "GoldSql" / "0").iterdir()))
    ext = QueueExt(
        golden.root / "consumequeue_ext" / "GoldSql" / "0",
        int(golden.manifest["brokerConf"]["mappedFileSizeConsumeQueueExt"]),
    )
    ext.queue.load()
    bitmaps = 0
    for at in range(0, len(entries), 20):
        size = int.from_bytes(entries[at + 8 : at + 12], "big")
        if not size:
            break
        record = decode_record(log, int.from_bytes(entries[at : at + 8], "big"))
        unit = ext.read(int.from_bytes(entries[at + 12 : at + 20], "big", signed=True))
        assert unit is not None
        if unit.bitmap and unit.store_timestamp > born_ms:
            bitmaps += 1
            arrival = DispatchRequest("GoldSql", 0, 0, 0, 0, 0, 0, 0, record.properties)
            assert table.bitmap_of(arrival) == unit.bitmap
    assert bitmaps > 10
