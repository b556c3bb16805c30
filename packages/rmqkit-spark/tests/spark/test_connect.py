"""All jobs, sources and sinks over Spark Connect. The program is `tests.spark.connect_program`. Its server runs in the
JVM of the tests' session, started as Spark's plugin starts it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from pyspark.sql import SparkSession

from tests.golden_stores import GoldenStore, unpack_golden
from tests.interop.standalone import run_standalone
from tests.ports import free_port
from tests.spark import connect_program
from tests.spark.inside import java_context_of, jvm_of
from tests.store.stores import golden_settings

for package in ("google.rpc", "grpc", "grpc_status", "pandas"):
    pytest.importorskip(package, reason=f"the extra [connect] lacks {package}")

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> GoldenStore:
    return unpack_golden("5.4.0", tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="module")
def topic(golden: GoldenStore) -> str:
    """Return the application topic with the most messages."""
    topics = Counter(one["topic"] for one in golden.manifest["messages"] if one["topic"].startswith("Gold"))
    return topics.most_common(1)[0][0]


@pytest.fixture(scope="module")
def server(spark: SparkSession) -> Iterator[str]:
    """The address of a server."""
    port = free_port()
    context = java_context_of(spark)
    conf = context.conf()
    conf.set("spark.connect.grpc.binding.address", "127.0.0.1")
    conf.set("spark.connect.grpc.binding.port", str(port))
    plugin = jvm_of(spark).org.apache.spark.sql.connect.SparkConnectPlugin().driverPlugin()
    plugin.init(context, None)
    yield f"sc://127.0.0.1:{port}"
    plugin.shutdown()


@pytest.fixture(scope="module")
def found(golden: GoldenStore, topic: str, server: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the program's results by case."""
    work_dir = tmp_path_factory.mktemp("connect")
    shutil.copytree(golden.root, work_dir / "copy")
    changed = changed_at(golden)
    with (work_dir / "copy" / "commitlog" / f"{0:020}").open("r+b") as file:
        file.seek(changed + 88)
        byte = file.read(1)
        file.seek(changed + 88)
        file.write(bytes([byte[0] ^ 1]))
    with run_standalone(work_dir / "live", work_dir) as broker:
        setup = connect_program.Setup(
            remote=server, store=str(golden.root), copy=str(work_dir / "copy"), topic=topic,
            settings=golden_settings(golden), name_server=broker.namesrv_addr, work_dir=str(work_dir),
        )  # fmt: skip
        ran = subprocess.run(
            [sys.executable, connect_program.__file__, msgspec.json.encode(setup).decode()],
            capture_output=True, text=True, check=False, timeout=580, cwd=work_dir,
        )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return dict(json.loads(line) for line in ran.stdout.splitlines())


def changed_at(golden: GoldenStore) -> int:
    """The physical offset of a message with a body that is stored as it is."""
    return next(one["physicalOffset"] for one in golden.manifest["messages"] if one["topic"] == "GoldTag")


def listed(golden: GoldenStore, topic: str) -> int:
    return sum(one["topic"] == topic for one in golden.manifest["messages"])


def test_jobs_count_every_message(found: dict[str, Any], golden: GoldenStore) -> None:
    messages = golden.manifest["messages"]
    assert dict(found["job_summary"]) == Counter(one["topic"] for one in messages)
    assert found["job_audit"] == {"messages": len(messages), "notes": [], "waiting": [True, True]}


def test_a_store_is_verified_and_rebuilt(found: dict[str, Any]) -> None:
    assert found["job_verify"]["is_sound"]
    assert found["job_verify"]["records"] > 500
    count, same = found["job_rebuild"]
    assert count == same > 20


def test_the_one_message_that_differs_is_found(found: dict[str, Any], golden: GoldenStore) -> None:
    assert found["job_diff"]["counts"] == [0, 0, 1]
    assert found["job_diff"]["rows"] == [["changed", changed_at(golden)]]
    assert found["job_diff"]["segments"]


def test_frames_of_jobs_outlive_the_next_job_and_no_view_is_left(
    found: dict[str, Any], golden: GoldenStore, topic: str
) -> None:
    asked = found["jobs_query_and_sql"]
    count = listed(golden, topic)
    assert asked.pop("topics") > 0
    assert asked == {
        "braces": 0,
        "messages": count,
        "again": count,
        "columns": ["topic", "queueId"],
        "query": count,
        "read": [[topic, count]],
        "views": [],
    }


def test_an_archive_is_written_and_asked(found: dict[str, Any], golden: GoldenStore, topic: str) -> None:
    assert found["job_archive"] == [listed(golden, topic)] * 2


def test_a_replay_a_batch_and_a_stream_to_a_live_topic(found: dict[str, Any], golden: GoldenStore, topic: str) -> None:
    count = listed(golden, topic)
    live = {"sent": {topic: count}, "batch": count, "is_over": True, "streamed": count}
    assert found["job_replay_and_a_stream"] == live


def test_errors_are_our_own_in_one_line(found: dict[str, Any]) -> None:
    damage = "damaged/commitlog/00000000000000000000: damage at byte 0 (commitLogOffset 0): magic is "
    (one, damaged), (two, audited), (three, condition), (four, nobody) = found["errors"]
    assert (one, two, three, four) == ("StoreError", "StoreError", "SettingsError", "SettingsError")
    assert damage in damaged
    assert damage in audited
    assert condition.startswith("replay: where='no such' is not a condition over the columns of a message: ")
    assert nobody == (
        "no Spark Connect at sc://127.0.0.1:1: Connection refused; start it with start-connect-server.sh,"
        " or give its address"
    )


def test_the_command_line_takes_the_address(found: dict[str, Any], golden: GoldenStore) -> None:
    assert found["command_line"] == {"n": len(golden.manifest["messages"])}
