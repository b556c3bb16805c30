"""Every entity of ``rocketmq-store``, and the options to read only some messages, on golden stores; without Spark."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmqkit.arrow.queue_files import find_queue_files, queue_end, queue_start
from rmqkit.arrow.reader import Selection
from rmqkit.arrow.schema import MESSAGE_COLUMNS
from rmqkit.errors import SettingsError, StoreError
from rmqkit.protocol import fastjson
from rmqkit.protocol.names import HALF_TOPIC, OFFSET_MOVED_EVENT, OP_HALF_TOPIC, SCHEDULE_TOPIC, TRANSACTION_GROUP
from rmqkit.protocol.properties import java_hash
from rmqkit.protocol.record import is_blank
from rmqkit.protocol.schemas.topics import DataVersion
from rmqkit.spark.source.store import (
    StoreReader,
    TableReader,
    chosen_columns,
    read_plan,
    store_options,
    store_parts,
    store_splits,
)
from rmqkit.spark.source.tables import TABLES
from rmqkit.store.table_journal import TableJournal
from tests.golden_stores import GoldenStore, golden_manifest, unpack_golden
from tests.sources import ROOT
from tests.store.log.test_recovery import GOLDEN, damage
from tests.store.stores import message, opened

NAMES = ["5.4.0", "4.9.4", "5.4.0-ipv6-crc", "5.4.0-retained"]
Row = dict[str, Any]
LEVEL_MS = {1: 1000, 2: 5000, 3: 10_000, 6: 120_000, 9: 300_000, 18: 7_200_000}


@pytest.fixture(scope="module", params=NAMES)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GoldenStore:
    return unpack_golden(request.param, tmp_path_factory.mktemp("golden"))


def rows(root: Path | str, **given: str) -> list[Row]:
    """All rows of a read, as Spark would get them."""
    options = store_options({"path": str(root), **given})
    names = [column.name for column in chosen_columns(options, ())]
    is_messages = given.get("entity", "messages") == "messages"
    reader = StoreReader(options, read_plan(options, names)) if is_messages else TableReader(options, names)
    batches = [batch for partition in reader.partitions() for batch in reader.read(partition)]
    return pa.Table.from_batches(batches).to_pylist() if batches else []


def place(row: Row) -> tuple[str, int, int]:
    return row["topic"], row["queueId"], row["queueOffset"]


def is_listed(topic: str) -> bool:
    """Return True if a manifest lists a topic's messages (see golden/README.md)."""
    return topic not in (OFFSET_MOVED_EVENT, OP_HALF_TOPIC) and not topic.startswith("%LMQ%")


def slots(store: GoldenStore) -> str:
    return store.manifest["brokerConf"]["maxHashSlotNum"]


# ---------------------------------------------------------------- files of the store


def test_queue_entries_are_what_the_client_read(store):
    listed = {place(one): one for one in store.manifest["messages"] if is_listed(one["topic"])}
    found = {place(row): row for row in rows(store.root, entity="consumequeue") if is_listed(row["topic"])}
    batch_queues = {topic.name for topic in (store.root / "batchconsumequeue").glob("*")}
    # Entries outlive the log.
    first_offset = int(min(path.name for path in (store.root / "commitlog").iterdir()))
    found = {key: row for key, row in found.items() if row["commitLogOffset"] >= first_offset}
    assert found
    assert found.keys() <= listed.keys()
    # An entry of a batch queue is that of the first message of a batch.
    assert {one[0] for one in listed.keys() - found.keys()} <= batch_queues
    assert batch_queues & {topic for topic, _, _ in listed} <= {topic for topic, _, _ in found}
    for key, row in found.items():
        one = listed[key]
        # The client reports no size for a message of a batch.
        assert (row["commitLogOffset"], row["size"]) == (one["physicalOffset"], one["size"] or row["size"])
        if one["topic"] != SCHEDULE_TOPIC and one["topic"] not in batch_queues:
            assert row["tagsCode"] == (java_hash(one["tags"]) if one["tags"] else 0)


def test_the_entries_of_a_topic(store):
    topics = sorted(path.name for path in (store.root / "consumequeue").iterdir())[-2:]
    chosen = rows(store.root, entity="consumequeue", topic=", ".join(topics))
    assert {row["topic"] for row in chosen} == set(topics)


def test_a_blank_filled_queue_has_rows_for_messages_only(tmp_path):
    retained = unpack_golden("5.4.0-ipv6-crc", tmp_path)
    queue = retained.root / "consumequeue" / "Filled" / "0"
    queue.mkdir(parents=True)
    blank, entry = (0).to_bytes(8) + 0x7FFFFFFF.to_bytes(4) + bytes(8), (244).to_bytes(8) + (9).to_bytes(4) + bytes(8)
    (queue / f"{2000:020}").write_bytes(blank * 3 + entry + bytes(1920))
    assert [place(row) for row in rows(retained.root, entity="consumequeue", topic="Filled")] == [("Filled", 0, 103)]


def test_the_index_holds_every_key_that_can_be_requested(store):
    by_hash = defaultdict(set)
    for row in rows(store.root, entity="index", maxHashSlotNum=slots(store)):
        assert row["slot"] == row["keyHash"] % int(slots(store))
        by_hash[row["keyHash"]].add(row["commitLogOffset"])
    for query in store.manifest["queryByKey"]:
        if "physicalOffsets" in query:
            hashed = abs(java_hash(f"{query['topic']}#{query['key']}"))
            assert set(query["physicalOffsets"]) <= by_hash[hashed]


def test_the_index_has_the_keys_of_every_message_and_no_others(store):
    has_tag_keys = store.manifest["brokerVersionDesc"] != "V4_9_4"
    expected = Counter()
    for row in rows(store.root, unwrap="false"):
        properties = dict(row["properties"])
        names = [properties.get("UNIQ_KEY", ""), *properties.get("KEYS", "").split(" ")]
        if has_tag_keys and properties.get("TAGS"):
            names.append(f"T#{properties['TAGS']}")
        hashes = [abs(java_hash(f"{row['topic']}#{name}")) for name in names if name]
        expected.update((hashed, row["commitLogOffset"]) for hashed in hashes)
    found = rows(store.root, entity="index", maxHashSlotNum=slots(store))
    assert Counter((row["keyHash"], row["commitLogOffset"]) for row in found) == expected


def test_an_index_that_does_not_fit_its_slots_names_the_option(store):
    with pytest.raises(StoreError, match=r"index/\d{17} of \d+ bytes has no room .* give the broker's maxHashSlotNum"):
        rows(store.root, entity="index")


def test_raw_records_are_the_bytes_of_the_log(store):
    raw = rows(store.root, entity="commitlog-raw")
    files = sorted((store.root / "commitlog").iterdir())
    base, log = int(files[0].name), b"".join(path.read_bytes() for path in files)
    at = 0
    for row in raw:
        if is_blank(log, at):
            at += int.from_bytes(log[at : at + 4])
        assert (row["offset"], row["size"]) == (base + at, len(row["bytes"]))
        assert row["bytes"] == log[at : at + row["size"]]
        at += row["size"]
    assert len(raw) > 20


# ---------------------------------------------------------------- config files


def test_topics_are_those_of_the_config(store):
    table = json.loads((store.root / "config" / "topics.json").read_text())["topicConfigTable"]
    found = {row["topic"]: row for row in rows(store.root, entity="topics")}
    assert found.keys() == table.keys()
    for name, row in found.items():
        assert (row["readQueues"], row["perm"]) == (table[name]["readQueueNums"], table[name]["perm"])
        assert dict(row["attributes"]) == (table[name].get("attributes") or {})


def test_the_lag_of_a_group_counts_to_the_end_of_its_queues(store):
    ends = {(one["topic"], one["queueId"]): one["maxOffset"] for one in store.manifest["queues"]}
    found = rows(store.root, entity="offsets")
    assert bool(found) == (store.root / "config" / "consumerOffset.json").exists()
    for row in found:
        end = ends.get((row["topic"], row["queueId"]), 0)
        assert (row["maxOffset"], row["lag"]) == (end, max(end - row["offset"], 0))


def test_a_batch_queue_ends_behind_the_last_message_of_its_last_batch(store):
    ends = {(one["topic"], one["queueId"]): one["maxOffset"] for one in store.manifest["queues"]}
    for topic in (store.root / "batchconsumequeue").glob("*"):
        for queue_id in topic.iterdir():
            found = find_queue_files(str(store.root), [topic.name])
            files = [file for file in found if file.queue_id == int(queue_id.name)]
            assert queue_end(files) == ends[topic.name, int(queue_id.name)]
            assert (queue_start(files) or 0) < ends[topic.name, int(queue_id.name)]


def test_a_config_file_that_is_damaged_is_named_with_its_copy(tmp_path):
    (tmp_path / "commitlog").mkdir()
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "topics.json").write_text("{")
    with pytest.raises(StoreError, match=r"topics.json has no topicConfigTable: .*; its copy topics.json.bak may be"):
        rows(tmp_path, entity="topics")


def test_topics_have_the_changes_of_the_journal(tmp_path):
    (tmp_path / "commitlog").mkdir()
    config = tmp_path / "config"
    config.mkdir()
    old = {"Old": {"topicName": "Old"}, "Gone": {"topicName": "Gone"}}
    (config / "topics.json").write_text(json.dumps({"dataVersion": {"counter": 1}, "topicConfigTable": old}))
    journal = TableJournal(config / "topics.journal")
    journal.starts_at(DataVersion(1))
    new = {"topicName": "New", "readQueueNums": 3}
    journal.write(journal.add(DataVersion(2), {"topicConfigTable": {"New": new, "Gone": None}}))
    assert {row["topic"]: row["readQueues"] for row in rows(tmp_path, entity="topics")} == {"Old": None, "New": 3}


# ---------------------------------------------------------------- messages that wait


def test_delayed_messages_are_reported_with_the_time_they_are_due(store):
    path = store.root / "config" / "delayOffset.json"
    offsets = fastjson.loads(path.read_bytes())["offsetTable"] if path.exists() else {}
    progress = {int(level): offset for level, offset in offsets.items()}
    listed = {place(one): one for one in store.manifest["messages"] if one["topic"] == SCHEDULE_TOPIC}
    waiting = {place(row): row for row in rows(store.root, entity="delay")}
    assert waiting.keys() == {key for key in listed if key[2] >= progress.get(key[1] + 1, 0)}
    for key, row in waiting.items():
        due_ms = listed[key]["storeTimestamp"] + LEVEL_MS[row["delayLevel"]]
        assert row["deliverTimestamp"].timestamp() * 1000 == pytest.approx(due_ms)
        assert row["realTopic"] == listed[key]["properties"]["REAL_TOPIC"]


def test_every_half_message_of_the_golden_stores_is_decided(store):
    assert rows(store.root, entity="transactions") == []


def test_half_messages_wait_until_an_op_message_names_them(tmp_path):
    with opened(tmp_path / "store") as made:
        for i in range(6):
            properties = (
                f"PGROUP\x01shop\x02REAL_TOPIC\x01Orders\x02REAL_QID\x01{i}\x02TRANSACTION_CHECK_TIMES\x01{i}\x02"
            )
            made.put(message(HALF_TOPIC, queue_id=0, body=b"half %d" % i, string=properties.encode()))
        made.put(message(OP_HALF_TOPIC, queue_id=0, body=b"2,4,", string=b"TAGS\x01d\x02"))
    config = tmp_path / "store" / "config"
    config.mkdir(exist_ok=True)
    progress = {"offsetTable": {f"{HALF_TOPIC}@{TRANSACTION_GROUP}": {"0": 1}}}
    (config / "consumerOffset.json").write_text(json.dumps(progress))
    waiting = rows(tmp_path / "store", entity="transactions")
    assert [(row["body"], row["checkTimes"]) for row in waiting] == [(b"half 1", 1), (b"half 3", 3), (b"half 5", 5)]
    assert {(row["producerGroup"], row["realTopic"]) for row in waiting} == {("shop", "Orders")}


# ---------------------------------------------------------------- some messages only


def test_the_queues_point_at_the_messages_that_a_walk_finds(store):
    entries = rows(store.root, entity="consumequeue")
    pointed = {(row["topic"], row["commitLogOffset"]) for row in entries}
    topics = {topic for topic, _ in pointed}
    assert len(topics) > 5
    for topic in topics:
        walked = [row for row in rows(store.root, topic=topic) if (topic, row["commitLogOffset"]) in pointed]
        picked = rows(store.root, topic=topic, offsetsFrom="consumequeue", splitBytes="500")
        assert sorted(picked, key=place) == sorted(walked, key=place)


def test_a_key_finds_what_the_client_found(store):
    for query in store.manifest["queryByKey"]:
        found = rows(store.root, topic=query["topic"], key=query["key"], maxHashSlotNum=slots(store))
        offsets = {row["commitLogOffset"] for row in found}
        listed = set(query.get("physicalOffsets", ()))
        assert offsets >= listed if query["unique"] else offsets == listed  # the client takes one of several copies


def test_a_key_without_a_topic_is_refused(store):
    with pytest.raises(SettingsError, match="key=k needs a topic: the index knows keys within topics"):
        rows(store.root, key="k")


def test_files_outside_of_the_wanted_times_are_not_read(store):
    options = store_options({"path": str(store.root)})
    splits = store_splits(options)
    stored = sorted(one["storeTimestamp"] for one in store.manifest["messages"])

    def read(start_ms: int = 0, end_ms: int = 0) -> list[str]:
        return [part.path for part in store_parts(options, Selection.of((), (), start_ms, end_ms))]

    everything = [split.path for split in splits]
    assert read(stored[0]) == read(end_ms=stored[-1]) == everything
    hour = 3_600_000
    assert read(stored[-1] + hour) == everything[-1:]
    assert read(end_ms=stored[0] - hour) == everything[:1]


# ---------------------------------------------------------------- after a crash, and after retention


def as_listed(row: Row) -> Row:
    """Return the manifest's fields of a message."""
    return {
        "physicalOffset": row["commitLogOffset"],
        "size": row["storeSize"],
        "msgId": row["msgId"],
        "tags": row["tags"],
        "keys": row["keys"],
        "bodyCRC": row["bodyCrc"],
        "bodySha256": hashlib.sha256(row["body"]).hexdigest(),
        "flag": row["flag"],
        "reconsumeTimes": row["reconsumeTimes"],
        "bornTimestamp": round(row["bornTimestamp"].timestamp() * 1000),
        "storeTimestamp": round(row["storeTimestamp"].timestamp() * 1000),
    }


def assert_listed(found: dict[tuple[str, int, int], Row], listed: Iterable[Row]) -> None:
    for one in listed:
        read = as_listed(found[place(one)])
        assert read == {name: one[name] for name in read}


CRASHED = json.loads(gzip.decompress((GOLDEN / "expected-5.4.0-unclean.json.gz").read_bytes()))


@pytest.mark.parametrize("was", CRASHED["variants"], ids=lambda was: was["variant"])
def test_a_crashed_store_reads_as_the_broker_that_recovered_it(was, tmp_path):
    with tarfile.open(GOLDEN / "store-5.4.0-unclean.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    root = tmp_path / "store"
    damage(was["variant"], root, was["lastRecord"])
    kept = [one for one in CRASHED["messages"] if one["physicalOffset"] < int(was["after"]["commitLogMaxOffset"])]
    found = {place(row): row for row in rows(root)}
    assert found.keys() == {place(one) for one in kept}
    assert_listed(found, kept)
    if (root / "index").exists():
        asked = [one for one in was["after"]["queryByKey"] if "error" not in one]
        assert asked
        for one in asked:
            keyed = rows(root, topic=one["topic"], key=one["key"], maxHashSlotNum="64")
            assert [row["commitLogOffset"] for row in keyed] == one["physicalOffsets"]
    if (root / "consumequeue").exists():
        assert {place(row) for row in rows(root, offsetsFrom="consumequeue")} == found.keys()


def test_a_store_that_lost_two_files_reads_as_the_broker_reads_it(tmp_path):
    """Left out is the delayed message which the broker delivered before it was asked."""
    root, retained = unpack_golden("5.4.0", tmp_path).root, golden_manifest("5.4.0-retained")
    for path in sorted((root / "commitlog").iterdir())[:2]:
        path.unlink()
    listed = [one for one in retained["messages"] if place(one) != ("GoldDelay", 0, 1)]
    for given in ({}, {"offsetsFrom": "consumequeue"}):
        found = {place(row): row for row in rows(root, **given)}
        assert found.keys() == {place(one) for one in listed}
        assert_listed(found, listed)
    ends = {(one["topic"], one["queueId"]): one["maxOffset"] for one in retained["queues"]}
    progress = [row for row in rows(root, entity="offsets") if (row["topic"], row["queueId"]) in ends]
    assert progress
    assert all(row["maxOffset"] == ends[row["topic"], row["queueId"]] for row in progress)
    offsets = {one["physicalOffset"] for one in listed}
    for query in retained["queryByKey"]:
        keyed = rows(root, topic=query["topic"], key=query["key"], maxHashSlotNum="64")
        assert {row["commitLogOffset"] for row in keyed} >= offsets & set(query.get("physicalOffsets", ()))


def test_the_guide_lists_the_columns_of_every_table():
    guide = (ROOT / "docs/how-to/spark.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| (.+) \|$", guide.partition("| `entity` | Columns |")[2], re.MULTILINE)
    of_messages = ", ".join(column.name for column in MESSAGE_COLUMNS)
    wanted = {"messages": of_messages}
    for entity, table in TABLES.items():
        columns = ", ".join(column.name for column in table.columns)
        wanted[entity.value] = columns.replace(of_messages, "and those of messages")
    assert dict(rows[: len(wanted)]) == wanted
