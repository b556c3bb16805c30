"""Typed tables of a live topic of our own broker: rows, rejected rows, restarts, kills, and a topic that changes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from rmqkit import sync
from rmqkit.admin import Admin
from rmqkit.cli import app
from rmqkit.errors import SettingsError
from rmqkit.spark.broker_pool import DataLost
from rmqkit.spark.jobs import archive_target, typed_table
from rmqkit.spark.jobs.typed_table import Written, write_table
from tests.faults.spark.servers import set_queues
from tests.interop.standalone import Standalone, run_standalone

pytestmark = pytest.mark.spark

SCHEMA = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}
WIDER = {**SCHEMA, "properties": {"id": {"type": "integer"}, "name": {"type": "string"}}}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    work_dir = tmp_path_factory.mktemp("table")
    with run_standalone(work_dir / "store", work_dir) as running:
        yield running


class Job:
    """A table of a topic with one queue."""

    def __init__(self, spark: SparkSession, broker: Standalone, root: Path, topic: str) -> None:
        self.spark, self.broker, self.root, self.topic = spark, broker, root, topic
        self.address = broker.namesrv_addr
        set_queues(broker.broker_addr, topic, 1)
        self.describe(SCHEMA)

    def make_topic_again(self) -> None:
        async def delete() -> None:
            async with Admin(self.address) as admin:
                await admin.topics.delete(self.topic)

        asyncio.run(delete())
        set_queues(self.broker.broker_addr, self.topic, 1)

    def describe(self, schema: dict[str, Any]) -> None:
        self.schema = self.root / "schema.json"
        self.schema.write_text(json.dumps(schema))

    def send(self, *bodies: bytes) -> None:
        with sync.Producer("shop", self.address) as producer:
            for body in bodies:
                producer.send(self.topic, body, tags="t", keys="k")

    def write(self, target: str = "t", **options: Any) -> Written:
        source = {"nameServer": self.address, **options.pop("source", {})}
        schema, state = self.schema, str(self.root / "state")
        where = target if "://" in target else f"{self.root}/{target}"
        return write_table(self.spark, self.topic, schema, where, state, source, **{"is_once": True, **options})

    def rows(self, table: str = "t") -> list[dict[str, Any]]:
        found = [pq.read_table(path) for path in sorted((self.root / table).glob("*.parquet"))]
        rows = pa.concat_tables(found, promote_options="default").to_pylist() if found else []
        return sorted(rows, key=lambda row: int(row["_queueOffset"]))

    def forget_last_batch(self) -> None:
        """Make Spark repeat the last batch, as after a kill before it wrote that the batch is complete."""
        commits = self.root / "state" / "commits"
        last = max(int(one.name) for one in commits.iterdir() if one.name.isdigit())
        for one in (commits / str(last), commits / f".{last}.crc"):
            one.unlink()


@pytest.fixture
def job(spark: SparkSession, broker: Standalone, tmp_path: Path, request: pytest.FixtureRequest) -> Job:
    return Job(spark, broker, tmp_path, f"T{abs(hash(request.node.name)) % 10**9}")


def test_the_command_writes_rows_and_rejected_rows_and_a_repeated_batch_adds_nothing(job: Job) -> None:
    job.send(b'{"id": 1, "name": "a"}', b'{"id": "x"}', b'{"id": 3}')
    arguments = [
        *("pipeline", "table", job.topic, "--schema", job.root / "schema.json", "--to", job.root / "t"),
        *("--checkpoint", job.root / "state", "--once", "--name-servers", job.address, "--json"),
    ]
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    tables = {"table": f"{job.root}/t", "rejected_table": f"{job.root}/t_rejected"}
    assert json.loads(done.stdout) == {"topic": job.topic, **tables, "batches": 1, "rows": 2, "rejected": 1}
    first = job.rows()[0]
    assert isinstance(first.pop("_msgId"), str)
    assert first.pop("_storeTimestamp") is not None
    assert first.pop("_brokerName")
    fields = {"_topic": job.topic, "_queueId": 0, "_queueOffset": 0, "_keys": "k", "_tags": "t"}
    assert first == {"id": 1, **fields}
    [rejected] = job.rows("t_rejected")
    assert (rejected["body"], rejected["reason"]) == (b'{"id": "x"}', "Expected `int`, got `str` - at `$.id`")
    assert rejected["_queueOffset"] == 1

    job.forget_last_batch()
    job.describe(WIDER)
    job.send(b'{"id": 4, "name": "b"}')
    assert job.write().rows == 1
    assert [(row["id"], row["name"]) for row in job.rows()] == [(1, None), (3, None), (4, "b")]
    job.describe(SCHEMA)
    with pytest.raises(SettingsError, match="has the column name, the schema has not: keep the property"):
        job.write()


@pytest.mark.parametrize(
    ("name", "content", "body", "reason"),
    [
        (
            "s.avsc",
            b'{"type": "record", "name": "R", "fields": [{"name": "id", "type": "long"}]}',
            b"\6",
            "a number ends early, or has more than 64 bits - at `$.id`",
        ),
        # The descriptor of: syntax = "proto3"; message R { int64 id = 1; }
        (
            "s.desc",
            b'\n"\n\7s.proto"\x0f\n\1R\x12\n\n\2id\x18\1 \1(\3b\6proto3',
            b"\x08\3",
            "no R: ",
        ),
    ],
)
def test_bodies_of_other_formats_are_rows_of_a_lake_once(
    job: Job, name: str, content: bytes, body: bytes, reason: str
) -> None:
    job.schema = job.root / name
    job.schema.write_bytes(content)
    job.send(body, b"\x80")
    done = job.write(f"delta://{job.root}/t")
    assert (done.rows, done.rejected) == (1, 1)
    job.forget_last_batch()
    assert job.write(f"delta://{job.root}/t").rows == 0
    table = DeltaTable(job.root / "t").to_pyarrow_table()
    assert table.column("id").to_pylist() == [3]
    [rejected] = job.rows("t_rejected")
    assert (rejected["body"], rejected["reason"][: len(reason)]) == (b"\x80", reason)


def _killing(original: Callable[..., Any], count: int) -> Callable[..., Any]:
    left = iter(range(count))

    def call(*given: Any) -> Any:
        if next(left, None) is None:
            raise ConnectionAbortedError("killed")
        return original(*given)

    return call


def test_a_batch_that_was_killed_between_its_two_tables_is_written_once_by_the_next_run(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.send(b'{"id": 1}', b"no JSON")
    with monkeypatch.context() as patched:
        # A batch has three moves for each table: manifest, file, manifest; the rejected rows are first.
        patched.setattr(archive_target, "_move", _killing(archive_target._move, 3))
        with pytest.raises(Exception, match="killed"):
            job.write(f"delta://{job.root}/t")
    assert (len(job.rows("t_rejected")), len(job.rows())) == (1, 0)
    job.describe(WIDER)
    with pytest.raises(SettingsError, match="run the job once with the former schema, then change it"):
        job.write(f"delta://{job.root}/t")
    job.describe(SCHEMA)
    done = job.write(f"delta://{job.root}/t")
    assert (done.rows, done.rejected) == (1, 0)
    for table in ("t", "t_rejected"):
        assert DeltaTable(job.root / table).to_pyarrow_dataset().count_rows() == 1


@pytest.mark.slow
def test_a_topic_that_was_made_again_fails_unless_lost_data_is_allowed(job: Job) -> None:
    job.send(b'{"id": 1}', b'{"id": 2}')
    job.write()
    job.make_topic_again()
    job.send(b'{"id": 3}')
    with pytest.raises(DataLost, match="failOnDataLoss=false continues without them"):
        job.write()
    assert job.write(source={"failOnDataLoss": "false"}).rows == 1
    assert sorted(row["id"] for row in job.rows()) == [1, 2, 3]


def test_a_job_without_once_runs_until_it_is_stopped(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.send(b'{"id": 1}')
    stop = threading.Event()
    move = archive_target._move

    def stopping(filesystem: Any, path: str, to: str) -> None:
        move(filesystem, path, to)
        if to.endswith(".parquet"):
            stop.set()

    monkeypatch.setattr(archive_target, "_move", stopping)
    assert job.write(is_once=False, stop=stop).rows == 1
    assert [row["id"] for row in job.rows()] == [1]


def test_a_running_job_merges_small_files_of_both_tables(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typed_table, "COMPACTED_BATCHES", 2)
    job.send(b'{"id": 1}', b"no JSON", b'{"id": 2}', b"no JSON")
    # Three batches: files are merged after the second, and then the job is killed.
    with monkeypatch.context() as patched:
        patched.setattr(typed_table.TypedTable, "check", _killing(typed_table.TypedTable.check, 8))
        with pytest.raises(Exception, match="killed"):
            job.write(source={"maxOffsetsPerTrigger": "1"}, is_compacted=True)
    assert [len(list((job.root / name).glob("*.parquet"))) for name in ("t", "t_rejected")] == [1, 1]
    assert job.write(is_compacted=True).batches >= 1
    assert [row["id"] for row in job.rows()] == [1, 2]
    assert [row["_queueOffset"] for row in job.rows("t_rejected")] == [1, 3]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"source": {"Subscribe": "a"}}, "option Subscribe is not for typed tables: the command sets it"),
        ({"message": "R"}, "message R needs a Protobuf descriptor"),
        ({"target": "iceberg://t"}, "is no table: write PATH"),
    ],
)
def test_options_that_do_not_go_together_are_refused(job: Job, options: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        job.write(**options)
