"""Replays to our own broker: each message is sent once, also with filters, a growing store or a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from rmqkit.errors import NoRoute, SettingsError
from rmqkit.protocol.message import ReceivedMessage, read_messages
from rmqkit.spark.broker_pool import BrokerPool, Range
from rmqkit.spark.jobs.replay import Filter, Replayed, replay
from rmqkit.spark.options import LiveOptions
from tests.interop.server_process import wait_until
from tests.interop.standalone import Standalone, run_standalone
from tests.spark.session import small, small_options
from tests.store.stores import message, opened, put_all, small_settings

pytestmark = pytest.mark.spark

COUNT = 90
CHUNK_BYTES = 6 << 10
QUICK = {"transactionSettleMs": "500"}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    work_dir = tmp_path_factory.mktemp("replay")
    with run_standalone(work_dir / "target", work_dir) as running:
        yield running


@pytest.fixture(scope="module")
def live(broker: Standalone) -> BrokerPool:
    return BrokerPool(LiveOptions(name_servers=broker.namesrv_addr))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of three topics, one of them the system's."""
    root = tmp_path_factory.mktemp("source") / "store"
    fill(root, 0, COUNT)
    return root


def fill(root: Path, first: int, count: int) -> None:
    with opened(root, small_settings(commit_log_file_bytes=1 << 20)) as store:
        put_all(store, message("SCHEDULE_TOPIC_XXXX", 0, b"a delayed one"))
        for number in range(first, first + count):
            put_all(
                store,
                message(
                    "orders" if number % 3 else "others",
                    number % 2,
                    b"%d" % number,
                    TAGS="even" if number % 2 == 0 else "odd",
                    KEYS=f"k{number} x",
                    color="red",
                    DELAY="3",
                    UNIQ_KEY=f"ID{number}",
                    __SHARDINGKEY=f"s{number % 5}",
                ),
            )


def seen(live: BrokerPool, topic: str) -> list[ReceivedMessage]:
    """Return the messages of a topic that consumers see, queue by queue."""
    try:
        queues = live.queues([topic])
    except NoRoute:
        return []
    live.wait_dispatched(queues)
    parts = [Range(queue, bound.low, bound.high) for queue, bound in sorted(live.bounds(queues).items())]
    return [one for part in parts for body in live.bodies(part) for one in read_messages(body)]


def bodies(*numbers: int) -> Counter[bytes]:
    return Counter(b"%d" % number for number in numbers)


def test_every_message_is_sent_once_with_what_is_its_own(
    spark: SparkSession, broker: Standalone, live: BrokerPool, source: Path
) -> None:
    sink = {"nameServer": broker.namesrv_addr, **QUICK}

    def run(*, is_dry_run: bool = False) -> Replayed:
        return replay(
            spark,
            str(source),
            "again",
            sink=sink,
            is_ordered=True,
            chunk_bytes=CHUNK_BYTES,
            is_dry_run=is_dry_run,
        )

    planned = run(is_dry_run=True)
    assert (planned.messages, seen(live, "again")) == ({"orders": COUNT * 2 // 3, "others": COUNT // 3}, [])
    done = run()
    assert (done.messages, done.batches) == (planned.messages, planned.batches)
    assert done.batches > 1
    found = seen(live, "again")
    assert Counter(one.body for one in found) == bodies(*range(COUNT))
    one = next(one for one in found if one.body == b"17")
    assert one.msg_id.startswith(f"{done.replay_id}/")
    kept = {name: value for name, value in one.properties.items() if name in ("color", "DELAY", "TAGS", "KEYS")}
    assert kept == {"color": "red", "TAGS": "odd", "KEYS": "k17 x"}
    for remainder in range(5):
        same = [int(one.body) for one in found if int(one.body) % 5 == remainder]
        assert same == sorted(same)

    assert (run().messages, run().up_to) == ({}, done.up_to)
    fill(source, COUNT, 10)
    assert sum(run().messages.values()) == 10
    assert Counter(one.body for one in seen(live, "again")) == bodies(*range(COUNT + 10))


def test_what_is_not_wanted_is_left_out(
    spark: SparkSession, broker: Standalone, live: BrokerPool, source: Path
) -> None:
    wanted = Filter(topic="orders", tag="odd", where="cast(cast(body as string) as int) < 60 and queueId = 1")
    done = replay(spark, str(source), "filtered", sink={"nameServer": broker.namesrv_addr, **QUICK}, wanted=wanted)
    numbers = [number for number in range(1, 60, 2) if number % 3]
    assert done.messages == {"orders": len(numbers)}
    assert Counter(one.body for one in seen(live, "filtered")) == bodies(*numbers)
    with pytest.raises(
        SettingsError, match=r"where='colour = 1' is not a condition over the columns of a message: .*colour"
    ):
        replay(spark, str(source), "no", sink={"nameServer": broker.namesrv_addr}, wanted=Filter(where="colour = 1"))


@pytest.mark.slow
def test_a_killed_replay_continues(spark: SparkSession, broker: Standalone, live: BrokerPool, tmp_path: Path) -> None:
    """With a Java machine of its own: it is the driver that is killed."""
    root = tmp_path / "store"
    fill(root, 0, COUNT)
    command: list[str | Path] = [
        Path(sys.executable).with_name("rmq"), "pipeline", "replay", root, "killed", "--id", "r1", "--rate", "25",
        "--name-servers", broker.namesrv_addr, "--sink", "transactionSettleMs=500", "--master", "local[1]", "--json",
        *small_options(),
    ]  # fmt: skip
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=small(), start_new_session=True)
    try:
        wait_until(lambda: process.poll() is not None or len(seen(live, "killed")) >= 20, 300, "some messages")
        assert process.poll() is None, (tmp_path / "log").read_text()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    before = len(seen(live, "killed"))
    assert before < COUNT, "it was to be killed in the middle"
    sink = {"nameServer": broker.namesrv_addr, **QUICK}
    done = replay(spark, str(root), "killed", sink=sink, replay_id="r1")
    assert Counter(one.body for one in seen(live, "killed")) == bodies(*range(COUNT))
    assert done.messages == {}  # what was decided is finished without being staged again
