"""A hundred thousand lite topics: files, memory and starts do not follow their number. Source: lite.md §15.

``make bench T=lite`` measures a million.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from rmqkit.protocol.names import lite_queue
from rmqkit.store.settings import StoreSettings
from tests.store.stores import copy_store, message, opened

pytestmark = pytest.mark.slow

COUNT = 100_000
PARENT = "LT"
BYTES_MAX = 250
SLACK_BYTES = 8 << 20
"""Growth of the process that has nothing to do with names, such as the allocator's free memory."""


def anonymous_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) << 10


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def put_names(store, numbers) -> None:
    with store.batch():
        for number in numbers:
            name = f"session-{number:08}"
            put = store.put(message(PARENT, __LITE_TOPIC=name, INNER_MULTI_DISPATCH=lite_queue(PARENT, name)))
            assert put.light_offset == 0


def files_of(root: Path) -> int:
    return sum(path.is_file() for path in (root / "lite").rglob("*"))


def test_a_hundred_thousand_lite_topics_need_few_files_and_little_memory(tmp_path):
    settings = StoreSettings(message_index_enable=False, commit_log_file_bytes=64 << 20)
    root, dead = tmp_path / "store", tmp_path / "dead"
    with opened(root, settings) as store:
        put_names(store, range(1000))
        before, opened_before = anonymous_bytes(), descriptors()
        for first in range(1000, COUNT, 1000):
            put_names(store, range(first, first + 1000))
        assert anonymous_bytes() - before < COUNT * BYTES_MAX + SLACK_BYTES
        assert descriptors() <= opened_before + 8
        assert files_of(root) <= 64
        assert len(store.lite.table) == COUNT
        while store.lite.save():
            pass
        copy_store(root, dead)
        (dead / "lock").unlink(missing_ok=True)
    for path in (root, dead):
        with opened(path, settings) as store:
            assert len(store.lite.table) == COUNT
            for number in (0, COUNT // 2, COUNT - 1):
                assert store.bounds(lite_queue(PARENT, f"session-{number:08}"), 0) == (0, 1)
