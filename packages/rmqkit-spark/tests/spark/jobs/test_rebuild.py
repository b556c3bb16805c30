"""Queue and index files that tasks rebuild equal those of real brokers and those of the plain rebuild."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from rmqkit import Message, Producer, PullConsumer
from rmqkit.errors import StoreError, StoreLocked, StoreMismatch
from rmqkit.protocol.record import iter_records
from rmqkit.spark.commands.pipeline import app
from rmqkit.spark.jobs.rebuild import rebuild
from rmqkit.store.offline import rebuild as plain
from rmqkit.store.offline.check import verify
from rmqkit.store.queues.consume_queue import BLANK_ENTRY
from rmqkit.store.settings import StoreSettings
from tests.examples import examples
from tests.golden_stores import unpack_golden
from tests.interop.standalone import run_standalone
from tests.patience import producing, pulling
from tests.spark.local_tasks import LOCAL
from tests.store.offline.test_fsck import damaged
from tests.store.offline.test_rebuild import WITH_BITMAPS, contents
from tests.store.stores import copy_store, golden_settings, message, opened, put_all, read_all, small_settings, tree

LOST = ("consumequeue", "consumequeue_ext", "batchconsumequeue", "index")
GOLDEN = [("5.4.0", "true"), ("4.9.4", "false"), ("5.4.0-ipv6-crc", "true")]


def lose(root: Path) -> None:
    for name in LOST:
        shutil.rmtree(root / name, ignore_errors=True)


def derived(root: Path) -> dict[str, str]:
    """Return the digests of all files that can be rebuilt, with the names of index files, too."""
    # Leave out `indexfiles`, whose name has the same beginning: a broker writes that list when it starts.
    return {path: digest for path, digest in tree(root).items() if path.partition("/")[0] in LOST}


def check_golden(spark: Any, name: str, index_tags: str, tmp_path: Path, split_bytes: int) -> None:
    golden = unpack_golden(name, tmp_path)
    before, indexes = tree(golden.root), contents(golden.root / "index")
    lose(golden.root)
    sizes = golden_settings(golden, indexTagsEnable=index_tags, enableConsumeQueueExt=str("ipv6" not in name).lower())
    made = rebuild(spark, str(golden.root), sizes, split_bytes=split_bytes)
    after = tree(golden.root)
    is_determined = [path for path in before if WITH_BITMAPS not in path and not path.startswith("index")]
    assert {path: after[path] for path in is_determined} == {path: before[path] for path in is_determined}
    assert contents(golden.root / "index") == indexes
    report = verify(golden.root, sizes)
    assert report.is_sound
    assert made.records == sum(one.records for one in made.segments) == report.checked["records"]
    assert (made.index_files, made.queues) == (len(indexes), len([*golden.root.glob("*consumequeue/*/*")]))
    assert not (golden.root / "rebuilt").exists()


@pytest.mark.parametrize("split_bytes", [2_000, 1 << 20])
@pytest.mark.parametrize(("name", "index_tags"), GOLDEN)
def test_files_of_real_brokers_come_out_byte_for_byte(name, index_tags, split_bytes, tmp_path):
    check_golden(LOCAL, name, index_tags, tmp_path, split_bytes)


@pytest.mark.spark
def test_files_of_a_real_broker_come_out_byte_for_byte_on_spark(spark, tmp_path):
    check_golden(spark, "5.4.0", "true", tmp_path, 40_000)
    (tmp_path / "t").mkdir()
    with pytest.raises(StoreError, match="is not a store"):
        rebuild(spark, str(tmp_path / "t"))


# ---------------------------------------------------------------- as the plain one


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> list[tuple[Path, StoreSettings]]:
    """Stores of real brokers with extension, batch, delay, half, timer and light queues, and one of ours."""
    ours = tmp_path_factory.mktemp("ours") / "store"
    sizes = small_settings()
    with opened(ours, sizes) as store:
        put_all(
            store, *(message("ABC"[i % 3], queue_id=i % 2, body=b"%d" % i, KEYS=f"k{i}", TAGS="t") for i in range(150))
        )
    unpacked = [unpack_golden(name, tmp_path_factory.mktemp("golden")) for name, _ in GOLDEN[:2]]
    return [(ours, sizes), *((one.root, golden_settings(one)) for one in unpacked)]


@pytest.fixture(scope="module")
def without_disk():
    """Nothing waits for the disk, which is most of the time of a small rebuild."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(f"os.{name}", lambda descriptor: None)
        yield


@examples(12)
@given(
    which=st.integers(0, 2),
    file=st.floats(0, 0.999),
    place=st.floats(0, 0.999),
    noise=st.binary(min_size=1, max_size=40) | st.sampled_from([bytes(3000), b"\xff" * 300]),
    split_bytes=st.sampled_from([1_500, 40_000, 1 << 20]),
    has_ext=st.booleans(),
    lost_files=st.integers(0, 2),
)
def test_a_damaged_log_gives_what_the_plain_rebuild_gives(
    stores, without_disk, tmp_path_factory, which, file, place, noise, split_bytes, has_ext, lost_files
):
    root, sizes = stores[which]
    sizes = StoreSettings(
        **{f: getattr(sizes, f) for f in sizes.__struct_fields__} | {"enable_consume_queue_ext": has_ext}
    )
    folder = tmp_path_factory.mktemp("damaged")
    store, expected = copy_store(root, folder / "store"), folder / "expected"
    try:
        for path in sorted((store / "commitlog").iterdir())[:lost_files]:
            path.unlink()
        damaged(store / "commitlog", file, place, noise)
        copy_store(store, expected)
        made_plain = plain.rebuild(expected, sizes, queues=True, index=True)
        made = rebuild(LOCAL, str(store), sizes, split_bytes=split_bytes)
        assert derived(store) == derived(expected)
        assert all(getattr(made, name) == getattr(made_plain, name) for name in made_plain.__struct_fields__)
    finally:
        shutil.rmtree(folder)


def test_only_what_was_requested_is_rebuilt(stores, tmp_path):
    root, sizes = stores[0]
    store = copy_store(root, tmp_path / "s")
    before = tree(store)
    made = rebuild(LOCAL, str(store), sizes, queues=False)
    assert (made.queues, made.index_files, made.records) == (0, 7, 150)
    made = rebuild(LOCAL, str(store), sizes, index=False)
    assert (made.queues, made.index_files, made.records) == (6, 0, 150)
    assert {path: one for path, one in tree(store).items() if not path.startswith("index")} == {
        path: one for path, one in before.items() if not path.startswith("index")
    }
    assert contents(store / "index") == contents(root / "index")


def test_sizes_are_taken_from_the_files(stores, tmp_path):
    store = copy_store(stores[0][0], tmp_path / "s")
    before = tree(store / "consumequeue")
    rebuild(LOCAL, str(store), index=False)
    assert tree(store / "consumequeue") == before
    with pytest.raises(StoreMismatch, match=r"give the broker.conf of the store"):
        rebuild(LOCAL, str(store))


def test_a_lost_record_leaves_a_blank_entry(tmp_path):
    with opened(tmp_path / "s", small_settings()) as store:
        results = put_all(store, *(message(body=b"%d" % i) for i in range(20)))
    segment = tmp_path / "s/commitlog" / ("0" * 20)
    content = bytearray(segment.read_bytes())
    content[results[7].physical_offset + 4] ^= 1  # its magic
    segment.write_bytes(content)
    made = rebuild(LOCAL, str(tmp_path / "s"), small_settings(), split_bytes=500)
    assert (made.records, sum(one.damages for one in made.segments)) == (19, 1)
    entries = (tmp_path / "s/consumequeue/TopicTest/0" / ("0" * 20)).read_bytes()
    assert entries[140:160] == BLANK_ENTRY


def test_a_store_that_lost_its_first_files_keeps_the_numbers(tmp_path):
    with opened(tmp_path / "s") as store:
        put_all(store, *(message(body=bytes(300)) for _ in range(40)))
    segments = sorted((tmp_path / "s/commitlog").iterdir())
    first = next(iter_records(segments[1].read_bytes()))
    segments[0].unlink()
    rebuild(LOCAL, str(tmp_path / "s"), small_settings())
    with opened(tmp_path / "s") as store:
        assert (store.min_offset("TopicTest", 0), store.max_offset("TopicTest", 0)) == (first.queue_offset, 40)
        assert len(read_all(store, "TopicTest")) == 40 - first.queue_offset


def test_a_broker_dispatches_nothing_again(stores, tmp_path):
    root, sizes = stores[0]
    store = copy_store(root, tmp_path / "s")
    lose(store)
    rebuild(LOCAL, str(store), sizes)
    made = derived(store)
    with opened(store, sizes) as again:
        assert again.max_offset("A", 0) == 25
        put_all(again, message("A", KEYS="later"))
        assert again.max_offset("A", 0) == 26
    with opened(store, sizes) as again:
        assert len(read_all(again, "A")) == 26
    rebuild(LOCAL, str(store), sizes)
    assert len(derived(store)) >= len(made)
    assert verify(store, sizes).is_sound


def test_a_store_in_use_is_refused_and_stays_as_it_is(tmp_path):
    with opened(tmp_path / "s") as store:
        put_all(store, *(message() for _ in range(5)))
        before = derived(tmp_path / "s")
        with pytest.raises(StoreLocked):
            rebuild(LOCAL, str(tmp_path / "s"), small_settings())
        assert derived(tmp_path / "s") == before
        assert not (tmp_path / "s" / "rebuilt").exists()


def test_a_full_disk_leaves_the_old_files(tmp_path, monkeypatch):
    with opened(tmp_path / "s") as store:
        put_all(store, *(message(KEYS="k") for _ in range(50)))
    before = {path: digest for path, digest in tree(tmp_path / "s").items() if path != "lock"}

    def refuse(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rmqkit.store.log.mapped_file.MappedFile.sync", refuse)
    with pytest.raises(StoreError, match=r"rebuilt cannot be read or written: No space left"):
        rebuild(LOCAL, str(tmp_path / "s"), small_settings())
    assert {path: digest for path, digest in tree(tmp_path / "s").items() if path != "lock"} == before


# ---------------------------------------------------------------- a broker that lost its queues and index


async def send(namesrv: str, count: int) -> None:
    async with Producer("senders", namesrv, settings=producing()) as producer:
        for i in range(count):
            await producer.send(Message(topic="orders", body=b"%d" % i * (i % 9 + 1), keys=[f"k{i}"], tags="t"))


async def serve(namesrv: str) -> tuple[dict[tuple[int, int], bytes], dict[str, list[bytes]]]:
    """Everything in the queues, by queue and offset, and what is found by key."""
    found: dict[tuple[int, int], bytes] = {}
    async with PullConsumer("readers", namesrv, settings=pulling()) as consumer:
        for queue in await consumer.queues("orders"):
            offset = await consumer.min_offset(queue)
            while offset < await consumer.max_offset(queue):
                result = await consumer.pull(queue, offset)
                found |= {(one.queue_id, one.queue_offset): one.body for one in result.messages}
                offset = result.next_begin_offset
        keyed = {f"k{i}": await consumer.query_messages("orders", f"k{i}") for i in range(0, 200, 10)}
    return found, {key: [one.body for one in messages] for key, messages in keyed.items()}


@pytest.mark.spark
def test_a_broker_that_lost_queues_and_index_serves_everything_again(spark, tmp_path):
    store, config = tmp_path / "store", tmp_path / "broker.conf"
    config.write_text(
        "mappedFileSizeCommitLog=16384\nmappedFileSizeConsumeQueue=400\nmaxHashSlotNum=50\nmaxIndexNum=90\n"
    )
    with run_standalone(store, tmp_path, "-c", str(config)) as running:
        asyncio.run(send(running.namesrv_addr, 200))
        before = asyncio.run(serve(running.namesrv_addr))
        running.stop()
    assert len(before[0]) == 200
    assert all(len(bodies) == 1 for bodies in before[1].values())
    lose(store)
    told = CliRunner().invoke(app, ["rebuild", str(store), "-c", str(config), "--json"])
    assert told.exit_code == 0, told.output
    made = json.loads(told.stdout)
    assert (made["queues"], made["index_files"]) == (4, 7)
    files = derived(store)
    with run_standalone(store, tmp_path, "-c", str(config)) as running:
        assert asyncio.run(serve(running.namesrv_addr)) == before
        running.stop()
    assert derived(store) == files  # nothing was dispatched again
    told = CliRunner().invoke(app, ["verify", str(store), "-c", str(config)])
    assert (told.exit_code, "sound" in told.stdout) == (0, True)
    overwritten = next((store / "consumequeue/orders").rglob("0" * 20))
    overwritten.write_bytes(b"\x7f" * 400)
    told = CliRunner().invoke(app, ["verify", str(store), "-c", str(config), "--json"])
    assert told.exit_code == 1
    report = json.loads(told.stdout)
    assert report["counts"].keys() == {"queue entry"}
    assert sum(one["records"] for one in report["segments"]) == made["records"]
