"""Helpers of the store's tests: small messages, small files, stores that are closed at the end."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from rmqkit.protocol.properties import encode_properties
from rmqkit.protocol.record import Record, decode_record, pack_host
from rmqkit.settings import load
from rmqkit.store.message_store import GetResult, InnerMessage, MessageStore, PutResult, PutStatus
from rmqkit.store.settings import StoreSettings
from rmqkit.system import disk
from tests.golden_stores import GoldenStore

HOST = pack_host("127.0.0.1", 10911)
HOST_V6 = pack_host("::1", 10911)
BORN_MS = 1_700_000_000_000


def message(
    topic: str = "TopicTest", queue_id: int = 0, body: bytes = b"hello", **properties: str | int | bytes
) -> InnerMessage:
    """Return a message. Keyword arguments are fields of `InnerMessage` or otherwise properties."""
    assert "properties" not in properties, "the property string is the argument `string`"
    fields: dict[str, Any] = {
        name: properties.pop(name) for name in InnerMessage.__struct_fields__ if name in properties
    }
    encoded = encode_properties({name: str(value) for name, value in properties.items()})
    defaults: dict[str, Any] = {
        "flag": 0,
        "sys_flag": 0,
        "born_timestamp": BORN_MS,
        "born_host": HOST,
        "store_host": HOST,
        "string": encoded,
    }
    return InnerMessage(topic, queue_id, body, **(defaults | fields))


def small_settings(**changes: Any) -> StoreSettings:
    """Return settings with files of a few records, so that files roll soon."""
    sizes: dict[str, Any] = {
        "commit_log_file_bytes": 4096,
        "consume_queue_file_bytes": 200,
        "batch_consume_queue_file_bytes": 460,
        "hash_slot_count": 16,
        "index_entry_count": 50,
    }
    return StoreSettings(**(sizes | changes))


def replace_queue_writes(monkeypatch: pytest.MonkeyPatch, pwrite: Callable[[int, bytes, int], int]) -> None:
    """Replace the writes of queue files, and leave those of other files."""
    real = disk.pwrite

    def write(descriptor: int, data: bytes, position: int) -> int:
        is_queue = "/consumequeue/" in str(Path(f"/proc/self/fd/{descriptor}").readlink())
        return (pwrite if is_queue else real)(descriptor, data, position)

    monkeypatch.setattr(disk, "pwrite", write)


def golden_settings(golden: GoldenStore, **changes: str) -> StoreSettings:
    """Return the settings with which a golden store was written."""
    given = golden.manifest["brokerConf"] | changes
    # Keys of the broker are no settings of a store: looking for names like them takes 40 ms.
    settings: StoreSettings = load([StoreSettings], given, source="golden", without_effect=given).values[0]
    return settings


@contextmanager
def opened(root: Path, settings: StoreSettings | None = None, **options: Any) -> Iterator[MessageStore]:
    """Yield an open store, and close it at the end."""
    store = MessageStore(root, settings or small_settings(), **options)
    store.open()
    try:
        yield store
    finally:
        store.close()


def put_all(store: MessageStore, *messages: InnerMessage) -> list[PutResult]:
    """Put messages that the store has to accept."""
    results = [store.put(one) for one in messages]
    assert [one.status for one in results] == [PutStatus.OK] * len(messages), results
    return results


def read_all(store: MessageStore, topic: str, queue_id: int = 0) -> list[Record]:
    """Return every readable message of a queue, as a consumer that follows ``next_begin_offset`` gets them."""
    records: list[Record] = []
    offset = store.min_offset(topic, queue_id)
    while offset < store.max_offset(topic, queue_id):
        found: GetResult = store.get(topic, queue_id, offset, count_max=32)
        records.extend(decode_record(record) for record in found.records)
        assert found.next_begin_offset > offset
        offset = found.next_begin_offset
    return records


def copy_store(root: Path, to: Path) -> Path:
    """Copy the directory as a crash would leave it, also while the store replaces files by new ones."""
    shutil.copytree(root, to, copy_function=_copy_what_is_there)
    return to


def _copy_what_is_there(file: str, to: str) -> None:
    with suppress(FileNotFoundError):
        shutil.copy2(file, to)


def tree(root: Path) -> dict[str, str]:
    """Return every file and directory under a directory with a digest of its content."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "directory"
        for path in sorted(root.rglob("*"))
    }


def change_body(root: Path, body: bytes) -> int:
    """Flip one bit of the newest record with this body, also under an open store. Return its physical offset."""
    for path in sorted((root / "commitlog").iterdir(), reverse=True):
        at = path.read_bytes().rfind(len(body).to_bytes(4) + body)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + 4)
                file.write(bytes([body[0] ^ 1]))
            return int(path.name) + at - 84
    raise AssertionError(f"no record has the body {body!r}")
