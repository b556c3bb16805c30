"""The KV configuration and its file (behaviour.md §1.1, §1.7)."""

from __future__ import annotations

import asyncio
import json

import pytest

from rmqkit.errors import StoreMismatch, StoreUnavailable
from rmqkit.namesrv.handlers import KeyValues
from tests.virtual_time import run as run_virtual

JAVA_FILE = '{"configTable":{"ORDER_TOPIC_CONFIG":{"UnitTest":"test"}}}'


def test_java_s_file_is_read(tmp_path):
    path = tmp_path / "kvConfig.json"
    path.write_text(JAVA_FILE)
    kv = KeyValues(path)
    kv.load()
    assert kv.get("ORDER_TOPIC_CONFIG", "UnitTest") == "test"
    assert kv.namespace("ORDER_TOPIC_CONFIG") == {"UnitTest": "test"}


def test_a_missing_file_is_an_empty_table_and_is_not_made_by_reading(tmp_path):
    kv = KeyValues(tmp_path / "namesrv" / "kvConfig.json")
    kv.load()
    assert kv.get("N", "k") is None
    assert kv.namespace("N") is None
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_read_stops_the_start(tmp_path):
    path = tmp_path / "kvConfig.json"
    path.write_text("{oops")
    with pytest.raises(StoreMismatch, match="cannot be read"):
        KeyValues(path).load()


def test_a_file_the_disk_refuses_to_read_stops_the_start(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreUnavailable, match="Not a directory"):
        KeyValues(tmp_path / "file" / "kvConfig.json").load()


@pytest.mark.virtual_time
def test_changes_at_the_same_time_are_all_kept(tmp_path):
    path = tmp_path / "namesrv" / "kvConfig.json"
    keys = [f"k{number}" for number in range(10)]

    async def change():
        kv = KeyValues(path)
        await asyncio.gather(*(kv.put("N", key, "v") for key in keys), kv.delete("N", "k3"), kv.delete("M", "k"))
        return dict(kv.namespace("N"))

    kept = run_virtual(change())
    assert kept == {key: "v" for key in keys if key != "k3"}
    assert json.loads(path.read_bytes()) == {"configTable": {"N": kept}}
