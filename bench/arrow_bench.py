"""``python bench/arrow_bench.py``: reading a store as tables, compared with decoding record by record; prints JSON.

A store of a million messages with bodies of 100 bytes (`bench.commands.sample_store`) is read in five ways, each a few
times in turn; the figures are the best CPU seconds and wall seconds of this process. The other way is the plain decoder
in a loop, as in a program that reads the files itself. Both must find the same rows, or the program fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for a script, only its own folder is on the path
import pyarrow.compute as pc

from bench.commands.sample_store import write_log
from rmqkit.arrow import dataset, scan
from rmqkit.arrow.query import query
from rmqkit.protocol.message import ReceivedMessage, messages_of_record
from rmqkit.protocol.record import decode_record, is_blank

_RECORD_BYTES = 330
_TOPIC, _QUEUE = "topic-1", 1
Work = Callable[[], int]


def naive(root: Path) -> Iterator[ReceivedMessage]:
    """Yield the messages of a store."""
    for path in sorted((root / "commitlog").iterdir()):
        data, position = path.read_bytes(), 0
        while position < len(data) and not is_blank(data, position) and any(data[position : position + 8]):
            record = decode_record(data, position)
            yield from messages_of_record(record)
            position += record.size


def works(root: Path) -> dict[str, tuple[Work, Work]]:
    """Return measured work → our way, the other way. Both must return the same number."""
    messages = dataset(root)
    wanted = (pc.field("topic") == _TOPIC) & (pc.field("queueId") == _QUEUE)

    def sql() -> int:
        rows = query(messages, "select topic, count(*) as n from messages group by topic")
        assert rows is not None, "a select has rows"
        return int(pc.sum(rows.read_all()["n"]).as_py())

    def naive_count_by_topic() -> int:
        counts: dict[str, int] = {}
        for one in naive(root):
            counts[one.topic] = counts.get(one.topic, 0) + 1
        return sum(counts.values())

    return {
        "all columns": (
            lambda: sum(map(len, scan(root))),
            lambda: sum(1 for _ in naive(root)),
        ),
        "count": (messages.count_rows, lambda: sum(1 for _ in naive(root))),
        "two columns": (
            lambda: sum(map(len, scan(root, columns=["topic", "queueOffset"]))),
            lambda: len([(one.topic, one.queue_offset) for one in naive(root)]),
        ),
        "filter on topic and queue": (
            lambda: messages.to_table(filter=wanted).num_rows,
            lambda: sum(1 for one in naive(root) if one.topic == _TOPIC and one.queue_id == _QUEUE),
        ),
        "group by topic, SQL": (sql, naive_count_by_topic),
    }


def timed(work: Work) -> tuple[int, float, float]:
    """Return the result of the work, its CPU seconds in this process, and its wall seconds."""
    began, cpu = time.perf_counter(), time.process_time()
    found = work()
    return found, time.process_time() - cpu, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rmqkit-arrow-") as folder:
        root = Path(folder)
        count = write_log(root, given.messages * _RECORD_BYTES, 100)
        figures: dict[str, dict[str, float]] = {}
        for name, (ours, other) in works(root).items():
            best = {"cpu_s": 1e9, "wall_s": 1e9, "naive_cpu_s": 1e9, "naive_wall_s": 1e9}
            for number in range(given.rounds):
                found, cpu_s, wall_s = timed(ours)
                best["cpu_s"], best["wall_s"] = min(best["cpu_s"], cpu_s), min(best["wall_s"], wall_s)
                if number == 0:  # the other way takes so long that one round is exact enough
                    same, best["naive_cpu_s"], best["naive_wall_s"] = timed(other)
                    assert same == found, f"{name}: {found} rows, and {same} by the plain decoder"
            best["rows"] = found
            best["times_less_cpu"] = best["naive_cpu_s"] / best["cpu_s"]
            figures[name] = {key: round(value, 3) for key, value in best.items()}
        print(json.dumps({"messages": count, "cores": os.cpu_count(), "figures": figures}, indent=2))


if __name__ == "__main__":
    main()
