"""A real Apache broker on a golden store whose queues and index files were deleted and rebuilt by `rmq pipeline`: it
serves every message in its place, and finds it by key and by id.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from rmqkit import PullConsumer
from tests.golden_reading import expected_messages, order, simple_queues
from tests.golden_stores import GoldenStore, unpack_golden
from tests.interop.apache import open_store_with_apache
from tests.interop.kit import ApacheKit
from tests.interop.test_golden_store_at_apache import OWN_KEYS, pull_all
from tests.patience import pulling

KEYED = ("GoldKey", "GoldBatch", "GoldOrder", "GoldUnicode")
REBUILD_SECONDS = 600


def rebuild_with_spark(golden: GoldenStore, work_dir: Path) -> dict[str, Any]:
    """Delete all files that are derived from the log, and rebuild them as a user would."""
    for name in ("consumequeue", "consumequeue_ext", "batchconsumequeue", "index"):
        shutil.rmtree(golden.root / name)
    config = work_dir / "broker.conf"
    config.write_text(golden.conf)
    rmq = Path(sys.executable).with_name("rmq")
    command = [rmq, "pipeline", "rebuild", golden.root, "-c", config, "--master", "local[2]", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=REBUILD_SECONDS)
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(done.stdout)
    return made


async def query_all(namesrv: str, listed: dict[tuple[str, str], set[int]]) -> dict[tuple[str, str], set[int]]:
    """Return the physical offsets found by topics and keys."""
    async with PullConsumer("audit", namesrv, settings=pulling()) as consumer:
        return {
            (topic, key): {one.physical_offset for one in await consumer.query_messages(topic, key, max_count=64)}
            for topic, key in listed
        }


async def view_all(namesrv: str, messages: list[dict[str, Any]]) -> list[int | None]:
    """Return the physical offsets of messages found by their ids."""
    async with PullConsumer("audit", namesrv, settings=pulling()) as consumer:
        found = [await consumer.view_message(one["topic"], one["msgId"]) for one in messages]
    return [None if one is None else one.physical_offset for one in found]


def test_apache_s_broker_serves_what_spark_rebuilt(apache_kit: ApacheKit, tmp_path: Path) -> None:
    pytest.importorskip("pyspark", reason="the extra [spark] is not installed")
    golden = unpack_golden("5.4.0", tmp_path)
    made = rebuild_with_spark(golden, tmp_path)
    assert (made["records"], made["index_files"]) == (534, 3)
    conf = {key: value for key, value in golden.manifest["brokerConf"].items() if key not in OWN_KEYS}
    conf["transactionCheckInterval"] = "3600000"
    queues, expected = simple_queues(golden), expected_messages(golden)
    keyed: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for one in golden.manifest["messages"]:
        if one["topic"] in KEYED:
            for key in (one["keys"] or "").split():
                keyed[one["topic"], key].add(one["physicalOffset"])
    with_ids = [one for one in expected if one["topic"] in KEYED][::7]
    with open_store_with_apache(apache_kit, golden.root, tmp_path, conf) as pair:
        found = asyncio.run(pull_all(pair.namesrv_addr, "broker-golden", queues))
        found_by_key = asyncio.run(query_all(pair.namesrv_addr, keyed))
        found_by_id = asyncio.run(view_all(pair.namesrv_addr, with_ids))
    at = {order(message): message for message in found}
    assert [at.get(order(message)) for message in expected] == expected
    assert len(keyed) > 40
    assert found_by_key == keyed
    assert found_by_id == [one["physicalOffset"] for one in with_ids]
