"""The same messages in a real Apache 5.5.0 broker and in ours: the resulting files are equal, byte for byte.

One Java program (`java/src/interop/FixedSequence.java`) sends the same messages in the same order to both, with the
same `broker.conf` and topics. After a clean stop of both, every file of the commit log, the queues and the index is
compared over its whole length, the files' names included. Values that differ between any two runs of one broker are
masked:

| File | Masked | Because |
|---|---|---|
| commit log | bytes 40 to 72 of every record: born and store timestamp, born and store host with port | clocks, ports |
| | the ten digits of a record's `__CRC32#`, where that is on | it covers the bytes before |
| batch consume queue | store timestamp of every entry | clock |
| consume queue extension | store timestamp of every unit | clock |
| index | begin and end timestamp of the header, the seconds of every entry | clock |
| | file names (their order counts) | time of creation |

Nothing else: body checksums, queue and physical offsets, the order of properties, tag codes, hash slots and chains,
blank records and the bytes after the end are compared. Records that a broker writes for itself (scheduled topics,
timer, transactions) are not part of this sequence.
"""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from rmqkit.protocol.record import decode_record
from tests.interop.apache import BROKER_CONF, ApachePair
from tests.interop.kit import ApacheKit
from tests.interop.standalone import run_standalone
from tests.interop.store_files import files, opened_by_apache

BROKER = "bytes"
SECONDS_MAX = 300
DRIVER_HEAP_MB = 300

SLOTS, ENTRIES = 50, 400
CONF: Mapping[str, object] = {
    **BROKER_CONF,
    "brokerName": BROKER,
    "mappedFileSizeCommitLog": 1 << 15,
    "mappedFileSizeConsumeQueue": 600,
    "mappedFileSizeConsumeQueueExt": 1024,
    "mapperFileSizeBatchConsumeQueue": 460,
    "maxHashSlotNum": SLOTS,
    "maxIndexNum": ENTRIES,
    "timerWheelEnable": "false",
}
VARIANTS: Mapping[str, Mapping[str, object]] = {
    "plain": {},
    "ext-and-crc": {"enableConsumeQueueExt": "true", "enabledAppendPropCRC": "true"},
}
TOPICS = {"Bytes": 3, "BytesBatch": 2, "BytesInner": 1, f"{'Bytes-long-':x<127}": 1}

RECORD_MAGIC = b"\xda\xa3\x20\xa7"
BLANK_MAGIC = b"\xcb\xd4\x31\x94"
PROPERTY_CRC = b"__CRC32#\x01"


def seed_topics(store: Path) -> None:
    """Write the topics that both brokers read at their start."""
    table = {
        name: {
            "topicName": name,
            "readQueueNums": count,
            "writeQueueNums": count,
            "perm": 6,
            "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": 0,
            "order": False,
            "attributes": {"queue.type": "BatchCQ"} if name == "BytesInner" else {},
        }
        for name, count in TOPICS.items()
    }
    (store / "config").mkdir(parents=True)
    version = {"counter": 1, "stateVersion": 0, "timestamp": 1}
    content = msgspec.json.encode({"topicConfigTable": table, "dataVersion": version})
    (store / "config/topics.json").write_bytes(content)


def send_sequence(kit: ApacheKit, namesrv_addrs: Sequence[str], work_dir: Path) -> None:
    """Run the Java program, once for all brokers."""
    targets = [part for address in namesrv_addrs for part in ("--target", f"{address}/{BROKER}")]
    command = kit.jvm("interop.FixedSequence", ["send", *targets], heap_mb=DRIVER_HEAP_MB, work_dir=work_dir)
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    assert done.returncode == 0, f"the Java program ended with {done.returncode}:\n{done.stdout}{done.stderr}"


@pytest.fixture(scope="module")
def written(apache_kit: ApacheKit, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Return for each variant the store of Apache's broker, and ours. All brokers run at the same time."""
    folders = {name: tmp_path_factory.mktemp(name) for name in VARIANTS}
    with ExitStack() as stack:
        apaches, ours = [], []
        for name, folder in folders.items():
            conf = {**CONF, **VARIANTS[name]}
            config = folder / "ours.conf"
            config.write_text("".join(f"{key}={value}\n" for key, value in conf.items()))
            seed_topics(folder / "theirs")
            seed_topics(folder / "ours")
            apaches.append(stack.enter_context(opened_by_apache(apache_kit, folder / "theirs", folder, conf)))
            ours.append(stack.enter_context(run_standalone(folder / "ours", folder, "-c", str(config))))
        addresses = [running.namesrv_addr for running in (*apaches, *ours)]
        send_sequence(apache_kit, addresses, next(iter(folders.values())))
        for running in ours:
            running.stop()
        with ThreadPoolExecutor() as pool:
            list(pool.map(ApachePair.stop_broker, apaches))
    return {name: (folder / "theirs", folder / "ours") for name, folder in folders.items()}


@pytest.fixture(params=VARIANTS)
def stores(written: dict[str, tuple[Path, Path]], request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """Return the store of Apache's broker, and ours."""
    return written[request.param]


def records(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield start and end of every record of a commit-log file."""
    start = 0
    while data[start + 4 : start + 8] == RECORD_MAGIC:
        end = start + int(struct.unpack_from(">i", data, start)[0])
        yield start, end
        start = end


def masked_log(data: bytes) -> bytes:
    masked = bytearray(data)
    for start, end in records(data):
        assert not data[start + 39] & 0x30, "both hosts are IPv4"
        masked[start + 40 : start + 72] = bytes(32)
        if data[end - 20 :].startswith(PROPERTY_CRC):
            masked[end - 11 : end - 1] = bytes(10)
    return bytes(masked)


def masked_entries(data: bytes, *, first: int, size: int, field: int, width: int) -> bytes:
    """Return a file of equal entries without one field of each entry."""
    masked = bytearray(data)
    for at in range(first, len(data) - size + 1, size):
        masked[at + field : at + field + width] = bytes(width)
    return bytes(masked)


def masked_units(data: bytes) -> bytes:
    """Return an extension file without the store timestamp of each unit."""
    masked, at = bytearray(data), 0
    while at + 20 <= len(data) and (size := int(struct.unpack_from(">h", data, at)[0])) > 0:
        masked[at + 10 : at + 18] = bytes(8)
        at += size
    return bytes(masked)


def masked_index(data: bytes) -> bytes:
    assert len(data) == 40 + 4 * SLOTS + 20 * ENTRIES
    return bytes(16) + masked_entries(data, first=40 + 4 * SLOTS, size=20, field=12, width=4)[16:]


def test_commit_logs_are_equal(stores: tuple[Path, Path]) -> None:
    theirs, ours = (files(store, "commitlog") for store in stores)
    for name in theirs.keys() & ours.keys():
        for (start, end), place in zip(records(theirs[name]), records(ours[name]), strict=False):
            their, our = (masked_log(data[start:end]) for data in (theirs[name], ours[name]))
            assert (name, place, our) == (name, (start, end), their), (
                f"{decode_record(our)}\nis not\n{decode_record(their)}"
            )
    assert theirs.keys() == ours.keys() and len(ours) > 8
    assert {name: masked_log(data) for name, data in ours.items()} == {
        name: masked_log(data) for name, data in theirs.items()
    }
    blanks = [data for data in ours.values() if data.find(BLANK_MAGIC) >= 0]
    assert len(blanks) >= len(ours) - 1
    count = sum(len(list(records(data))) for data in ours.values())
    print(f"{count} records in {len(ours)} files, {sum(map(len, ours.values()))} bytes")


def test_consume_queues_are_equal(stores: tuple[Path, Path]) -> None:
    theirs, ours = (files(store, "consumequeue") for store in stores)
    assert theirs.keys() == ours.keys() and len(ours) > 10
    assert ours == theirs


def test_batch_consume_queues_are_equal(stores: tuple[Path, Path]) -> None:
    def masked(store: Path) -> dict[str, bytes]:
        return {
            name: masked_entries(data, first=0, size=46, field=20, width=8)
            for name, data in files(store, "batchconsumequeue").items()
        }

    theirs, ours = map(masked, stores)
    assert theirs.keys() == ours.keys() and len(ours) == 4
    assert ours == theirs


def test_consume_queue_extensions_are_equal(written: dict[str, tuple[Path, Path]]) -> None:
    theirs, ours = (files(store, "consumequeue_ext") for store in written["ext-and-crc"])
    assert theirs.keys() == ours.keys() and len(ours) > 10
    assert {name: masked_units(data) for name, data in ours.items()} == {
        name: masked_units(data) for name, data in theirs.items()
    }


def test_index_files_are_equal(stores: tuple[Path, Path]) -> None:
    theirs, ours = (list(files(store, "index").values()) for store in stores)
    assert len(theirs) == len(ours) > 2
    assert [masked_index(data) for data in ours] == [masked_index(data) for data in theirs]
