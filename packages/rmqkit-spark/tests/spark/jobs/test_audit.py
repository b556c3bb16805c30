"""An audit: its counts equal those of manifests and of generated messages; its report is one safe page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from rmqkit.errors import StoreError
from rmqkit.protocol.fastjson import loads
from rmqkit.protocol.properties import encode_properties
from rmqkit.spark.jobs import audit as audit_module
from rmqkit.spark.jobs import audit_tables
from rmqkit.spark.jobs.audit import Audit, Topic, audit
from rmqkit.spark.jobs.audit_plots import PLOTS, draw, duration_text
from rmqkit.spark.jobs.audit_report import findings, write_report
from rmqkit.spark.jobs.audit_tables import READ, add, reduce_split
from rmqkit.spark.source.store import read_plan, store_options, store_splits
from rmqkit.testing.clock import StandingClock
from tests.golden_stores import GoldenStore, unpack_golden
from tests.spark.messages import plain_records, record_at, segment_of
from tests.store.stores import message, opened

HOUR_MS = 3_600_000
NOON_MS = 1_700_049_600_000
assert NOON_MS % HOUR_MS == 0


def _audited(root: Path, *, period_seconds: int = 3600, hot_keys: int = 20, split_bytes: str = "20k") -> Audit:
    """Return the audit of a log from the code of the tasks and the driver, without Spark."""
    options = store_options({"path": str(root), "splitBytes": split_bytes, "corruptRecordMode": "skip"})
    plan = read_plan(options, READ)
    parts = [reduce_split(split, plan, period_seconds) for split in store_splits(options)]
    return audit_module.audit_of(str(root), period_seconds, reduce(add, parts), hot_keys)


def _made(root: Path, messages: Iterable[dict[str, Any]]) -> Path:
    """A store with one file of the log, of messages ``later`` ms after noon, each ``latency`` ms after its birth."""
    makers = []
    for number, fields in enumerate(messages):
        stored = NOON_MS + fields.pop("later", 0)
        born = stored - fields.pop("latency", 0)
        properties = encode_properties(fields.pop("properties", {}))
        changed = {"store_timestamp": stored, "born_timestamp": born, "queue_offset": number, "properties": properties}
        makers.append(lambda at, changed=changed | fields: record_at(at, **changed))
    (root / "commitlog").mkdir(parents=True)
    (root / "commitlog" / f"{0:020d}").write_bytes(segment_of(makers))
    return root


def _topic(found: Audit, name: str) -> Topic:
    return next(one for one in found.topics if one.topic == name)


# ---------------------------------------------------------------- golden


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> GoldenStore:
    return unpack_golden("5.4.0", tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize("split_bytes", ["20k", "128m"])
def test_a_golden_store_has_the_traffic_of_its_manifest(golden, split_bytes):
    found = _audited(golden.root, period_seconds=1, split_bytes=split_bytes)
    listed = golden.manifest["messages"]
    expected = Counter((m["topic"], m["queueId"], m["storeTimestamp"] // 1000 * 1000) for m in listed)
    counted = {(one.topic, one.queue_id, round(one.begin.timestamp() * 1000)): one.messages for one in found.traffic}
    assert counted == expected
    segments = [path.read_bytes() for path in (golden.root / "commitlog").iterdir()]
    sizes = [record.size for segment in segments for record in plain_records(segment)]
    assert (found.messages, found.bytes) == (len(listed), sum(sizes))
    for topic in found.topics:
        stored = [m["storeTimestamp"] for m in listed if m["topic"] == topic.topic]
        assert (round(topic.first_store_timestamp.timestamp() * 1000)) == min(stored)
        assert (round(topic.last_store_timestamp.timestamp() * 1000)) == max(stored)
    assert sum(one.records for one in found.segments) == 534
    assert [(one.damages, one.bad_crcs) for one in found.segments] == [(0, 0)] * len(found.segments)


def test_a_golden_store_has_the_latencies_and_keys_of_its_manifest(golden):
    found = _audited(golden.root)
    plain = [m for m in golden.manifest["messages"] if m["topic"] == "GoldPlain"]
    latencies = sorted(m["storeTimestamp"] - m["bornTimestamp"] for m in plain)
    topic = _topic(found, "GoldPlain")
    assert topic.latency_ms_max == latencies[-1]
    assert topic.latency_ms_p50 == latencies[-(-len(latencies) * 50 // 100) - 1]
    assert topic.latency_ms_p99 == latencies[-(-len(latencies) * 99 // 100) - 1]
    keyed = [m for m in golden.manifest["messages"] if m["topic"] == "GoldKey"]
    keys = Counter(key for m in keyed for key in (m["properties"].get("KEYS") or "").split())
    hot = {one.key: one.messages for one in found.hot_keys if one.topic == "GoldKey"}
    assert hot == {key: count for key, count in keys.items() if count > 1}
    assert found.keys_undercount_max == 0


def test_what_had_to_wait_by_design_reports_no_latency(golden):
    found = _audited(golden.root)
    for topic in ("GoldTran", "GoldDelay", "GoldTimer", "%RETRY%g_retry", "SCHEDULE_TOPIC_XXXX"):
        waited = [m for m in golden.manifest["messages"] if m["topic"] == topic]
        assert waited
        assert (_topic(found, topic).latency_ms_max or 0) < 1000, "only those that did not wait"


def test_retries_and_dead_letters_are_reported_by_group(golden):
    found = _audited(golden.root)
    (back, dead) = found.retries
    assert (back.group, back.is_dead, back.origin, back.messages) == ("g_retry", False, "GoldRetry", 3)
    assert (dead.group, dead.is_dead, dead.origin, dead.messages) == ("g_retry", True, "GoldRetry", 1)
    times = Counter(m["reconsumeTimes"] for m in golden.manifest["messages"] if m["topic"] == "%RETRY%g_retry")
    assert {one.times: one.messages for one in found.retries if not one.is_dead} == times


# ---------------------------------------------------------------- made


def test_known_latencies_come_out(tmp_path):
    latencies = [*range(100), 5000]
    root = _made(tmp_path, ({"topic": b"t", "latency": ms, "later": 7} for ms in latencies))
    topic = _topic(_audited(root, split_bytes="1k"), "t")
    assert (topic.latency_ms_p50, topic.latency_ms_p95, topic.latency_ms_p99, topic.latency_ms_max) == (
        50,
        95,
        99,
        5000,
    )
    assert topic.skewed == 0


def test_a_message_born_after_it_was_stored_is_a_matter_of_clocks(tmp_path):
    root = _made(tmp_path, [{"topic": b"t", "latency": ms} for ms in (-250, -1, 0, 3)])
    found = _audited(root)
    assert (_topic(found, "t").skewed, _topic(found, "t").latency_ms_max) == (2, 3)
    assert [(one.low, one.high, one.messages) for one in found.latency_ms] == [(-250, -1, 2), (0, 0, 1), (2, 3, 1)]
    assert "2 messages were stored before they were born" in dict(findings(found))["From producer to store"]


def test_traffic_is_counted_by_hour_and_queue(tmp_path):
    hours = [0, 0, 1, 5]
    root = _made(tmp_path, [{"topic": b"t", "queue_id": n % 2, "later": h * HOUR_MS + 1} for n, h in enumerate(hours)])
    found = _audited(root)
    rows = [
        (one.queue_id, round(one.begin.timestamp() * 1000 - NOON_MS) // HOUR_MS, one.messages) for one in found.traffic
    ]
    assert rows == [(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 5, 1)]
    assert found.first_store_timestamp == datetime.fromtimestamp(NOON_MS // 1000, UTC).replace(microsecond=1000)


def test_hot_keys_are_found_among_many_and_the_bound_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(audit_tables, "_KEYS_MAX", 8)
    keys = [f"user-{n % 5 if n % 2 else n}" for n in range(600)]
    root = _made(tmp_path, ({"topic": b"t", "properties": {"KEYS": key}} for key in keys))
    found = _audited(root, hot_keys=5, split_bytes="8k")
    true = Counter(keys)
    assert len(found.hot_keys) == 5
    assert {one.key for one in found.hot_keys} == {f"user-{n}" for n in range(5)}
    for one in found.hot_keys:
        assert one.messages <= true[one.key] <= one.messages + found.keys_undercount_max
        assert one.share == one.messages / 600


def test_damage_is_left_out_and_counted(tmp_path):
    root = _made(tmp_path, ({"topic": b"t"} for _ in range(10)))
    path = root / "commitlog" / f"{0:020d}"
    content = bytearray(path.read_bytes())
    content[4:8] = b"\0\0\0\0"
    path.write_bytes(content)
    found = _audited(root)
    assert found.messages == 9
    (segment,) = found.segments
    assert (segment.records, segment.damages, segment.damaged_bytes) == (9, 1, len(content) // 10)
    assert dict(findings(found))["Files"].startswith("Left out: 1 damaged place with ")


@given(st.lists(st.integers(-(2**40), 2**40), min_size=1), st.integers(1, 100))
def test_percentiles_are_at_most_a_64th_too_high(values, percent):
    ranges = audit_tables.value_ranges(pa.array(["t"] * len(values)), np.array(values, "i8"))
    (keys, sums) = audit_tables.REDUCED["latencies"]
    rows = ranges.group_by(keys).aggregate(list(sums.items())).rename_columns([*keys, *sums]).to_pylist()
    exact = sorted(values)[-(-len(values) * percent // 100) - 1]
    found = audit_module.percentile(rows, percent)
    assert found is not None
    assert exact <= found if exact >= 0 else found < 0
    if exact >= 0:
        assert found <= exact + exact // 64
    assert audit_module.percentile(rows, 100) == max(values)


# ---------------------------------------------------------------- report

HOSTILE = '<script>alert("1")</script>&'


def _busy(root: Path) -> Audit:
    """Two topics, one with a hostile name, three hours, hot keys, a dead letter; lags by hand."""
    fields: list[dict[str, Any]] = []
    for number in range(60):
        topic = b"orders" if number % 3 else HOSTILE.encode()
        fields.append(
            {"topic": topic, "later": number * 180_000, "latency": number, "properties": {"KEYS": f"k{number % 4}"}}
        )
    fields.append({"topic": b"%DLQ%billing", "reconsume_times": 16, "properties": {"RETRY_TOPIC": "orders"}})
    found = _audited(_made(root, fields))
    found.lags = [audit_module.Lag("billing", "orders", 0, 30, 40, 10, 1_800_000)]
    return found


def test_the_report_is_one_safe_page_with_every_plot(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need the extra `report`")
    found = _busy(tmp_path)
    write_report(found, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page
    assert HOSTILE not in page
    assert "&lt;script&gt;" in page
    assert page.count("<svg") == len(PLOTS)
    assert not re.search(r'(?:src|href|url)\s*[=(]\s*["\']?(?!#)[^"\')]*://', page.replace("xmlns", ""))
    assert not re.search(r"#0a0[ab]0\d", page), "a stand-in colour is left"
    assert "Topic orders: 40 messages, 67% of all 60" in page
    assert "Group billing is 10 messages behind, the oldest of them there for 30 min when the log ends." in page
    assert "Group billing gave up 1 message, the oldest at " in page
    assert not list(tmp_path.glob("*.tmp"))


def test_the_same_audit_makes_the_same_page(tmp_path):
    found = _busy(tmp_path)
    for name in ("one.html", "two.html"):
        write_report(found, tmp_path / name)
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def test_without_matplotlib_the_page_has_the_tables_and_says_how_to_get_plots(tmp_path, monkeypatch):
    monkeypatch.setattr("rmqkit.spark.jobs.audit_report.has_plots", lambda: False)
    write_report(_busy(tmp_path), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<svg" not in page
    assert "[report]" in page
    assert "<table>" in page


def test_an_empty_store_has_a_report(tmp_path):
    empty = audit_module.audit_of("nothing", 3600, audit_tables.Reduced({}, 0, []), 20)
    assert [draw(name, empty) for name in PLOTS] == [""] * len(PLOTS)
    write_report(empty, tmp_path / "report.html")
    assert "No message of an application is in the log." in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0, "0 ms"), (999, "999 ms"), (1500, "1.5 s"), (600_000, "10 min"), (9e6, "2.5 h"), (2e8, "2.3 days")],
)
def test_durations_are_in_the_unit_that_fits(ms, text):
    assert duration_text(ms) == text


# ---------------------------------------------------------------- Spark


@pytest.mark.spark
def test_lag_delays_and_transactions_of_a_golden_store(golden, spark: SparkSession):
    found = audit(spark, str(golden.root), {"splitBytes": "200k"}, period_seconds=1)
    assert (found.messages, found.notes) == (len(golden.manifest["messages"]), [])
    assert found.traffic == _audited(golden.root, period_seconds=1).traffic
    ends = {(queue["topic"], queue["queueId"]): queue["maxOffset"] for queue in golden.manifest["queues"]}
    stored = {(m["topic"], m["queueId"], m["queueOffset"]): m["storeTimestamp"] for m in golden.manifest["messages"]}
    newest = max(stored.values())
    assert {(one.group, one.topic, one.queue_id) for one in found.lags if one.lag} == {
        ("g_tag", "GoldTag", 0),
        ("g_tag", "GoldTag", 1),
    }
    for one in found.lags:
        assert one.lag == ends.get((one.topic, one.queue_id), 0) - one.offset
        expected = newest - stored[one.topic, one.queue_id, one.offset] if one.lag else 0
        assert one.lag_ms == expected
    waiting = loads((golden.root / "config/delayOffset.json").read_bytes())["offsetTable"]
    left = {str(level): ends["SCHEDULE_TOPIC_XXXX", int(level) - 1] - offset for level, offset in waiting.items()}
    assert {one.name: one.messages for one in found.delayed} == {level: count for level, count in left.items() if count}
    assert found.half_messages == []


@pytest.mark.spark
def test_time_of_lag_and_what_cannot_be_known(spark: SparkSession, tmp_path):
    clock = StandingClock(NOON_MS)
    with opened(tmp_path, clock=clock) as store:
        for _ in range(10):
            store.put(message("orders", 0, born_timestamp=clock.ms, KEYS="same"))
            clock.ms += 60_000
    (tmp_path / "config").mkdir()
    (tmp_path / "config/consumerOffset.json").write_text(
        '{"offsetTable":{"orders@billing":{0:4},"orders@done":{0:10}}}'
    )
    found = audit(spark, str(tmp_path))
    assert [(one.group, one.lag, one.lag_ms) for one in found.lags] == [("billing", 6, 5 * 60_000), ("done", 0, 0)]
    assert [(one.key, one.messages, one.share) for one in found.hot_keys] == [("same", 10, 1.0)]
    (tmp_path / "consumequeue").rename(tmp_path / "lost")
    found = audit(spark, str(tmp_path))
    assert found.messages == 10
    assert len(found.notes) == 3
    assert found.notes[0].startswith("consumer lag not known: ")
    assert "consumequeue does not exist" in found.notes[0]


@pytest.mark.spark
def test_mistakes_are_raised_as_they_are(spark: SparkSession, tmp_path):
    with pytest.raises(StoreError, match="commitlog does not exist"):
        audit(spark, str(tmp_path))
