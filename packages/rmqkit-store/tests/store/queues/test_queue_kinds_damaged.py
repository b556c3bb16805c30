"""Damaged batch queues and queue extensions: rebuilt from the log with a log line, after a stop and after a kill."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rmqkit.protocol.record import BatchEntry, encode_batch
from rmqkit.store.message_store import MessageStore, PutStatus
from rmqkit.store.offline.check import verify
from rmqkit.store.queues.batch_queue import BATCH_ENTRY
from tests.store.stores import copy_store, message, opened, put_all, read_all, small_settings

COUNT = 25
TOPIC = "Orders"
EXT_BYTES = 220  # nine units of 22 bytes
EXT = small_settings(commit_log_file_bytes=16384, enable_consume_queue_ext=True, consume_queue_ext_file_bytes=EXT_BYTES)
BATCH = small_settings(commit_log_file_bytes=16384)
BITS = {"bitmap_of": lambda arrival: b"\x80\x01"}
IS_BATCH = {"is_batch_topic": TOPIC.__eq__}


def patch(path: Path, position: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(data)


def ext(root: Path, number: int) -> Path:
    return root / "consumequeue_ext" / TOPIC / "0" / f"{number * EXT_BYTES:020d}"


def batch(root: Path, number: int) -> Path:
    return root / "batchconsumequeue" / TOPIC / "0" / f"{number * 460:020d}"


def put_ext(store: MessageStore) -> None:
    put_all(store, *(message(TOPIC, 0, b"%d" % i, TAGS=f"tag{i % 3}") for i in range(COUNT)))


def put_batches(store: MessageStore) -> None:
    for i in range(COUNT):
        body = encode_batch([BatchEntry(b"%d.%d" % (i, k), b"TAGS\x01x\x02") for k in range(3)])
        assert store.put_batch(message(TOPIC, 0, body, UNIQ_KEY=f"U{i}")).status is PutStatus.OK


def check_ext(store: MessageStore) -> None:
    assert [record.body for record in read_all(store, TOPIC)] == [b"%d" % i for i in range(COUNT)]
    codes = frozenset({_java_hash("tag1")})
    count = offset = 0
    while offset < COUNT:
        found = store.get(TOPIC, 0, offset, count_max=32, codes=codes)
        count, offset = count + len(found.records), found.next_begin_offset
    assert count == len(range(1, COUNT, 3)), "filtered by the tag codes of the units"
    assert put_all(store, message(TOPIC))[0].queue_offset == COUNT


def check_batches(store: MessageStore) -> None:
    assert (store.min_offset(TOPIC, 0), store.max_offset(TOPIC, 0)) == (0, 3 * COUNT)
    assert [record.queue_offset for record in read_all(store, TOPIC)] == list(range(0, 3 * COUNT, 3))
    body = encode_batch([BatchEntry(b"next", b"")])
    assert store.put_batch(message(TOPIC, 0, body, UNIQ_KEY="U")).queue_offset == 3 * COUNT


def _java_hash(text: str) -> int:
    value = 0
    for letter in text:
        value = (value * 31 + ord(letter)) & 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


EXT_DAMAGE: dict[str, Callable[[Path], object]] = {
    "the extension is missing": lambda root: shutil.rmtree(root / "consumequeue_ext"),
    "its newest file is missing": lambda root: ext(root, 2).unlink(),
    "its newest file is zeros": lambda root: patch(ext(root, 2), 0, bytes(EXT_BYTES)),
    "its newest file has no length": lambda root: ext(root, 2).write_bytes(b""),
    "a size is torn": lambda root: patch(ext(root, 2), 22, b"\0\0"),
    "a tag code is flipped": lambda root: patch(ext(root, 2), 22 + 9, b"\x55"),
    "the queue is missing": lambda root: shutil.rmtree(root / "consumequeue"),
    "both are missing": lambda root: [shutil.rmtree(root / one) for one in ("consumequeue", "consumequeue_ext")],
}
BATCH_DAMAGE: dict[str, Callable[[Path], object]] = {
    "the queue is missing": lambda root: shutil.rmtree(root / "batchconsumequeue"),
    "the newest file is missing": lambda root: batch(root, 2).unlink(),
    "a file in between is missing": lambda root: batch(root, 1).unlink(),
    "the newest file is zeros": lambda root: patch(batch(root, 2), 0, bytes(460)),
    "the newest file has no length": lambda root: batch(root, 2).write_bytes(b""),
    "its last entry is zeros": lambda root: patch(batch(root, 2), 4 * BATCH_ENTRY.size, bytes(BATCH_ENTRY.size)),
    "an offset is flipped": lambda root: patch(batch(root, 2), BATCH_ENTRY.size + 7, b"\x55"),
    "a base number is flipped": lambda root: patch(batch(root, 2), BATCH_ENTRY.size + 35, b"\x07"),
    "a count is flipped": lambda root: patch(batch(root, 2), BATCH_ENTRY.size + 37, b"\x09"),
}
CASES = [("ext", name) for name in EXT_DAMAGE] + [("batch", name) for name in BATCH_DAMAGE]


@pytest.mark.parametrize(("kind", "name"), CASES)
@pytest.mark.parametrize("is_clean", [True, False])
def test_what_is_damaged_is_rebuilt_and_logged(kind, name, is_clean, tmp_path, caplog):
    settings, options = (EXT, BITS) if kind == "ext" else (BATCH, IS_BATCH)
    put, check = (put_ext, check_ext) if kind == "ext" else (put_batches, check_batches)
    root = tmp_path / "store"
    with opened(root, settings, **options) as store:
        put(store)
        if not is_clean:
            copy_store(root, tmp_path / "killed")
    root = root if is_clean else tmp_path / "killed"
    (EXT_DAMAGE if kind == "ext" else BATCH_DAMAGE)[name](root)
    assert not verify(root, settings).is_sound
    with caplog.at_level(logging.WARNING), opened(root, settings, **options) as store:
        check(store)
    if is_clean:
        assert "1 queues were damaged" in caplog.text
        assert "entries rebuilt from the log, 0 messages lost" in caplog.text
    assert verify(root, settings).findings == []
