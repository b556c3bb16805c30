"""The store's bench reports its measurements, and the naive store does the same work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.commands.naive_store import NaiveStore, naive_walk
from rmqkit.protocol.record import iter_records
from rmqkit.store.queues.consume_queue import ENTRY
from tests.store.stores import message, opened, put_all, small_settings

RMQ = str(Path(sys.executable).with_name("rmq"))


def test_naive_store_keeps_the_same_bytes(tmp_path: Path) -> None:
    messages = [message(queue_id=i % 2, body=b"%d" % i, TAGS="A") for i in range(9)]
    naive = NaiveStore(tmp_path / "naive")
    for one in messages:
        naive.put(one)
    with opened(tmp_path / "ours", small_settings(commit_log_file_bytes=8192)) as store:
        put_all(store, *messages)
        expected = [bytes(record) for record in store.get("TopicTest", 1, 0, count_max=4).records]
    found = naive.get("TopicTest", 1, 0, 4)
    naive.close()
    at = slice(56, 64)  # the time of the put
    assert [one[: at.start] + one[at.stop :] for one in found] == [one[: at.start] + one[at.stop :] for one in expected]
    entries = (tmp_path / "naive" / "TopicTest-1").read_bytes()
    path = tmp_path / "ours" / "consumequeue" / "TopicTest" / "1" / f"{0:020d}"
    assert list(ENTRY.iter_unpack(entries)) == list(ENTRY.iter_unpack(path.read_bytes()[: len(entries)]))


def test_naive_walk_reads_every_record(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        end = put_all(store, *(message(body=b"%d" % i) for i in range(12)))[-1].end_offset
    log = (tmp_path / "s" / "commitlog" / f"{0:020d}").read_bytes()[:end]
    records = list(iter_records(log))
    assert naive_walk(memoryview(log), end, check_crc=True) == (12, sum(len(record.body) for record in records))


@pytest.mark.slow
def test_bench_prints_every_figure_as_json(tmp_path: Path) -> None:
    command = [RMQ, "bench", "store", "--messages", "256", "--json", "--directory", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    names = [figure["figure"] for figure in report["figures"]]
    assert names[:2] == ["put", "put in batches of 64"] and names[-1] == "recovery without checkpoint"
    assert all(figure["ours"] > 0 and figure["naive"] > 0 for figure in report["figures"])
    assert list(tmp_path.iterdir()) == [], "the bench removes its files"
