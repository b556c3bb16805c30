"""Java clients read an Apache store whose old log files are in our archive, and get every message."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from rmqkit.broker.archive import LogArchive
from rmqkit.store.message_store import MessageStore
from tests.golden_reading import batch_topics, expected_messages
from tests.golden_stores import GoldenStore, unpack_golden
from tests.interop.kit import ApacheKit
from tests.interop.probe import run_probe
from tests.interop.standalone import run_standalone
from tests.store.stores import golden_settings

NAME = "broker-golden"
SIZES = ("mappedFileSize", "mapperFileSize", "maxHashSlotNum", "maxIndexNum")


async def archive_all(golden: GoldenStore, place: Path) -> int:
    """Archive every full file of a store and delete it; returns where the log begins then."""
    settings = msgspec.structs.replace(golden_settings(golden), archive=str(place), file_reserved_hours=0)
    batches = batch_topics(golden.root)
    store = MessageStore(golden.root, settings, is_batch_topic=lambda topic: topic in batches)
    store.open()
    try:
        archive = LogArchive(store, settings, NAME, writes=True)
        store.kept_from = lambda: archive.kept_from
        await archive.round()
        for path in (golden.root / "commitlog").iterdir():
            os.utime(path, (0, 0))
        for _ in range(5):
            store.retention.request()
            store.retention_round()
        return store.min_physical_offset
    finally:
        store.close()


@pytest.mark.interop
def test_java_reads_across_the_border(apache_kit: ApacheKit, tmp_path: Path) -> None:
    golden = unpack_golden("5.4.0", tmp_path)
    expected = expected_messages(golden)
    assert asyncio.run(archive_all(golden, tmp_path / "archive")) >= 3 * 131072
    written = {key: value for key, value in golden.manifest["brokerConf"].items() if key.startswith(SIZES)}
    conf = {**written, "brokerName": NAME, "archive": tmp_path / "archive", "grpcServerPort": -1}
    options = [word for key, value in conf.items() for word in ("--set", f"{key}={value}")]
    with run_standalone(golden.root, tmp_path, *options) as server:
        for topic in ("GoldBig", "GoldKey"):
            run = run_probe(apache_kit, "read", namesrv=server.namesrv_addr, topic=topic, work_dir=tmp_path)
            assert run.exit_code == 0, run.outcome
            of_topic = [one for one in expected if one["topic"] == topic]
            found = [(one.queue_id, one.queue_offset) for one in run.received]
            assert sorted(found) == sorted((one["queueId"], one["queueOffset"]) for one in of_topic)
            for queue_id in {queue_id for queue_id, _ in found}:
                numbers = [number for at, number in found if at == queue_id]
                assert numbers == sorted(numbers)
            assert {queue.min_offset for queue in run.queues} == {0}
        server.stop()
