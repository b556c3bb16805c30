"""The queues and the index of every golden store, rebuilt from its log alone, byte for byte (store.md §11).

| Part | Compared |
|---|---|
| index, batch consume queues | every file whole (index files by their order: names are times of creation) |
| consume queues and their extension | every file whole, where no unit of the queue holds a filter bitmap |
| where a unit holds a bitmap | offset, size, and the unit's tags code and store time; bitmaps depend on live filters |

Queues of light topics (`%LMQ%`) are included: the brokers had `enableLmq` and `enableMultiDispatch`.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from rmqkit.settings import load
from rmqkit.store.queues.consume_queue import ENTRY
from rmqkit.store.queues.queue_ext import UNIT, QueueExt
from rmqkit.store.settings import StoreSettings
from tests.golden_stores import golden_manifest
from tests.sources import ROOT
from tests.store.stores import opened, read_all

GOLDEN = ROOT / "tests" / "golden"
NAMES = ("5.4.0", "4.9.4", "5.4.0-ipv6-crc", "5.4.0-unclean")
IS_BATCH = "GoldInnerBatch".__eq__
Rebuilt = tuple[Path, Path, StoreSettings]


def unpacked(name: str, into: Path) -> tuple[Path, StoreSettings]:
    """Return a copy of a golden store and the settings with which it was written."""
    with tarfile.open(GOLDEN / f"store-{name}.tar.gz") as archive:
        archive.extractall(into, filter="data")
    conf = golden_manifest(name.removesuffix("-unclean"))["brokerConf"]
    if name == "4.9.4":
        conf["indexTagsEnable"] = "false"
    settings: StoreSettings = load([StoreSettings], conf, source="golden").values[0]
    return into / "store", settings


@pytest.fixture(scope="module", params=NAMES)
def rebuilt(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rebuilt:
    """Return a golden store, and the store that our code rebuilt from its log."""
    tmp_path = tmp_path_factory.mktemp("golden")
    golden, settings = unpacked(request.param, tmp_path / "golden")
    again = tmp_path / "again"
    again.mkdir()
    (golden / "commitlog").rename(again / "commitlog")
    (again / "abort").touch()
    with opened(again, settings, is_batch_topic=IS_BATCH):
        pass
    return golden, again, settings


def contents(root: Path, folder: str) -> dict[str, bytes]:
    found = sorted(path for path in (root / folder).rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def queues_with_bitmaps(root: Path) -> set[str]:
    """Return `topic/queue` of the extensions that hold a bitmap."""
    return {
        "/".join(Path(path).parts[1:3])
        for path, content in contents(root, "consumequeue_ext").items()
        if bitmaps(content)
    }


def bitmaps(content: bytes) -> int:
    """Return the number of units of an extension file that hold a bitmap."""
    at = count = 0
    while at + UNIT.size <= len(content) and (unit := UNIT.unpack_from(content, at))[0] > 0:
        count += unit[3] > 0
        at += unit[0]
    return count


def test_queues_come_out_byte_for_byte(rebuilt: Rebuilt) -> None:
    golden, again, _ = rebuilt
    filtered = queues_with_bitmaps(golden)
    assert filtered <= {"GoldSql/0"}

    def without_filtered(root: Path, folder: str) -> dict[str, bytes]:
        return {
            path: content
            for path, content in contents(root, folder).items()
            if "/".join(Path(path).parts[1:3]) not in filtered
        }

    for folder in ("consumequeue", "consumequeue_ext"):
        assert without_filtered(again, folder) == without_filtered(golden, folder)
    assert len(contents(golden, "consumequeue")) > 3


def test_queues_with_bitmaps_say_the_same(rebuilt: Rebuilt) -> None:
    golden, again, settings = rebuilt
    for queue in queues_with_bitmaps(golden):
        theirs = said_by(golden, queue, settings)
        assert len(theirs) == 24
        assert said_by(again, queue, settings) == theirs


def said_by(root: Path, queue: str, settings: StoreSettings) -> list[tuple[int, int, int, int]]:
    """Return offset, size, and the tags code and store time of the addressed unit, of every entry."""
    ext = QueueExt(root / "consumequeue_ext" / queue, settings.consume_queue_ext_file_bytes)
    ext.queue.load()
    said: list[tuple[int, int, int, int]] = []
    for content in contents(root, f"consumequeue/{queue}").values():
        for physical_offset, size, address in ENTRY.iter_unpack(content):
            if size:
                unit = ext.read(address)
                assert unit is not None
                said.append((physical_offset, size, unit.tags_code, unit.store_timestamp))
    ext.queue.close()
    return said


def test_batch_queues_come_out_byte_for_byte(rebuilt: Rebuilt) -> None:
    golden, again, _ = rebuilt
    assert contents(again, "batchconsumequeue") == contents(golden, "batchconsumequeue")


def test_index_comes_out_byte_for_byte(rebuilt: Rebuilt) -> None:
    golden, again, _ = rebuilt
    theirs = list(contents(golden, "index").values())
    assert list(contents(again, "index").values()) == theirs
    assert theirs


@pytest.mark.parametrize("name", ["5.4.0", "4.9.4", "5.4.0-ipv6-crc"])
def test_every_listed_message_is_read_in_its_place(name: str, tmp_path: Path) -> None:
    root, settings = unpacked(name, tmp_path)
    manifest = golden_manifest(name)
    listed = {m["physicalOffset"]: m for m in manifest["messages"]}
    read: set[int] = set()
    with opened(root, settings, is_batch_topic=IS_BATCH) as store:
        for queue in manifest["queues"]:
            topic, queue_id = queue["topic"], queue["queueId"]
            if IS_BATCH(topic) or "pullError" in queue:
                continue
            bounds = store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)
            assert bounds == (queue["minOffset"], queue["maxOffset"]), queue
            for number, record in enumerate(read_all(store, topic, queue_id), queue["minOffset"]):
                was = listed[record.physical_offset]
                found = record.size, record.body_crc, record.flag, record.store_timestamp
                assert found == (was["size"], was["bodyCRC"], was["flag"], was["storeTimestamp"])
                if "%LMQ%" not in topic:
                    assert (topic, queue_id, number) == (was["topic"], was["queueId"], was["queueOffset"])
                read.add(record.physical_offset)
    assert read == {offset for offset, was in listed.items() if not IS_BATCH(was["topic"])}
