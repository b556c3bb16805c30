"""An archive of a running broker as a table: DuckDB and Iceberg read the segments without rmqkit, consumers read the
same files, and a catalog that fails stops nothing."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from pyiceberg.catalog import load_catalog

from rmqkit.store.archive.archive import segment_name
from rmqkit.store.archive.places import Folder
from rmqkit.store.archive.segment import SegmentFile, rebuild
from tests.broker.test_archive import FILE_BYTES, Archived, beside

__all__ = ["beside"]

COUNT = 50
ALONE = """
import importlib.util, json, sys
sys.path.append({packages!r})
assert importlib.util.find_spec("rmqkit") is None, "rmqkit is not installed"
"""
"""The start of a program that can import the installed packages, but not rmqkit. rmqkit is installed by a .pth file,
which -S omits."""

DUCKDB = """
import duckdb
rows = duckdb.sql(
    "select queueOffset, decode(body), tags, properties['KEYS'], epoch_ms(storeTimestamp), brokerName "
    "from '{folder}/*.parquet' where topic = 'T' order by queueId, queueOffset"
).fetchall()
print(json.dumps(rows))
"""


def alone(program: str, folder: Path) -> list[list[object]]:
    """Run a program that cannot import rmqkit, and return the rows that it prints."""
    code = ALONE.format(packages=sysconfig.get_paths()["purelib"]) + program.format(folder=folder)
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    found: list[list[object]] = json.loads(done.stdout.splitlines()[-1])
    return found


def expected(rows: list[list[object]]) -> list[list[object]]:
    """Return the rows that the messages of `Archived.fill` have, as many as there are, with the times of the rows."""
    return [
        [number, f"{number} " + "\0" * 1000, "even" if number % 2 == 0 else "odd", f"k{number}", row[4], "broker-a"]
        for number, row in enumerate(rows)
    ]


async def filled(broker: Archived) -> int:
    """Fill and archive a broker. Return the first message that is only in the log."""
    await broker.fill(COUNT)
    await broker.archive_all()
    return int(broker.store.min_offset("T", 0))


@pytest.mark.real_time
async def test_duckdb_iceberg_and_a_consumer_read_the_same_files(tmp_path):
    database = f"sqlite:///{tmp_path}/catalog.db"
    async with Archived(tmp_path, store={"archive_catalog": f"sql:{database}"}) as broker:
        await broker.fill(COUNT)
        await broker.archive_full()
        logged = {path.name: path.read_bytes() for path in (broker.store.root / "commitlog").iterdir()}
        broker.delete_old()
        border = broker.store.min_offset("T", 0)
        assert border > 20
        folder = broker.archive / "broker-a"
        rows = await asyncio.to_thread(alone, DUCKDB, folder)
        assert len(rows) >= border and rows == expected(rows)
        assert await broker.read(0, COUNT) == list(range(COUNT)), "a consumer reads them and continues in the log"
        place = Folder(folder)
        for name, size in place.names().items():
            segment = SegmentFile(name, lambda at, count, name=name: place.read(name, at, count), size)
            end = segment.directory.records_end - segment.directory.start
            assert rebuild(segment)[:end] == logged[name.removesuffix(".parquet")][:end]
    catalog = load_catalog("rmqkit", type="sql", uri=database)
    found = catalog.load_table("rmqkit.broker-a").scan("topic = 'T'").to_arrow().sort_by("queueOffset")
    catalog.close()
    assert found["queueOffset"].to_pylist() == [row[0] for row in rows]


@pytest.mark.real_time
async def test_a_catalog_that_fails_stops_neither_archive_nor_retention(tmp_path, caplog):
    catalog = tmp_path / "later/catalog.db"
    async with Archived(tmp_path, store={"archive_catalog": f"sql:sqlite:///{catalog}"}) as broker:
        assert await filled(broker) > 20
        await broker.context.archive.round()
        assert caplog.text.count("the catalog lacks segments and is asked again every 10 s; check archiveCatalog") == 1
        catalog.parent.mkdir()
        await broker.context.archive.round()
        assert files_of(catalog) == sorted(path.name for path in (broker.archive / "broker-a").glob("*.parquet"))
        catalog.unlink()
        await broker.context.archive.round()
        assert not catalog.exists(), "a table that has all segments is not asked again"


@pytest.mark.real_time
async def test_a_broker_that_died_before_the_commit_adds_the_segment_after_its_start(tmp_path):
    async with Archived(tmp_path) as broker:
        await filled(broker)
    catalog = tmp_path / "catalog.db"
    settings = {"archive_catalog": f"sql:sqlite:///{catalog}", "archive_table": "lake.messages"}
    async with Archived(tmp_path, store=settings) as broker:
        await broker.context.archive.round()
        assert segment_name(FILE_BYTES) in files_of(catalog, "lake.messages")


def files_of(catalog: Path, table: str = "rmqkit.broker-a") -> list[str]:
    opened = load_catalog("rmqkit", type="sql", uri=f"sqlite:///{catalog}")
    try:
        paths = opened.load_table(table).inspect.data_files()["file_path"].to_pylist()
    finally:
        opened.close()
    return sorted(path.rpartition("/")[2] for path in paths)
