"""Our errors are raised again unchanged after they passed through Spark's processes."""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyspark.errors import PySparkException, PythonException
from pyspark.sql import SparkSession

from rmqkit.errors import NoNameServer, RequestTimedOut, SettingsError, StoreError, exit_code
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.spark.broker_pool import DataLost
from rmqkit.spark.failures import CHECKPOINT_REMEDY, error_within, hide_closed_connections, one_line
from tests.spark.messages import record_at, segment_of

TIMED_OUT = RequestTimedOut("127.0.0.1:1", 11, 5)


def told(raising: Callable[[], object]) -> PythonException:
    """Return Spark's exception for a Python worker in which ``raising`` raises an error."""
    stack = io.StringIO()
    try:
        raising()
    except Exception:  # noqa: BLE001 - Spark reports any error
        traceback.print_exc(file=stack)
    return PythonException(f"An exception was thrown from the Python worker:\n{stack.getvalue()} SQLSTATE: 38000\n")


def timed_out() -> None:
    raise TIMED_OUT


def timed_out_while_handling() -> None:
    try:
        raise ValueError("no number")
    except ValueError:
        raise TIMED_OUT from None


def timed_out_because() -> None:
    try:
        raise StoreError("the first")
    except StoreError as error:
        raise TIMED_OUT from error


def another_after_ours() -> None:
    try:
        timed_out()
    except RequestTimedOut:
        raise ValueError("no number")  # noqa: B904 - what a bug in a handler looks like


@pytest.mark.parametrize("raising", [timed_out, timed_out_while_handling, timed_out_because])
def test_an_error_with_fields_keeps_class_and_text(raising: Callable[[], object]) -> None:
    with pytest.raises(RequestTimedOut) as caught, one_line():
        raise told(raising)
    assert str(caught.value) == str(TIMED_OUT)
    assert caught.value.__suppress_context__


def test_an_error_of_another_module_is_found() -> None:
    lost = DataLost(MessageQueue("orders", "broker-a", 3), 0, 7, "the queue begins at 7")

    def lose() -> None:
        raise lost

    found = error_within(told(lose))
    assert type(found) is DataLost
    assert str(found) == str(lost)


@pytest.mark.parametrize(
    "error",
    [
        told(another_after_ours),
        PySparkException("[TABLE_OR_VIEW_NOT_FOUND] The table or view `orders` cannot be found."),
        PythonException("Traceback (most recent call last):\nrmqkit.errors.RmqErrors: no class of ours"),
        PythonException("Traceback (most recent call last):\nrmqkit.spark.failures.one_line: no class"),
        PythonException("Traceback (most recent call last):\nrmqkit.newer.ThingLost: a module we do not have"),
        PythonException("he wrote rmqkit.errors.StoreError: in the middle of a line"),
    ],
)
def test_any_other_failure_passes_as_it_is(error: PySparkException) -> None:
    with pytest.raises(PySparkException) as caught, one_line():
        raise error
    assert caught.value is error


@pytest.mark.parametrize("name", ["rmqkit", "rmqkit.spark", "pyarrow"])
def test_executors_that_lack_a_package_are_reported(name: str) -> None:
    def load() -> None:
        raise ModuleNotFoundError(f"No module named '{name}'")

    said = f"^Spark's executors have no Python package {name.partition('.')[0]}: pip install"
    with pytest.raises(SettingsError, match=said), one_line():
        raise told(load)


CHECKPOINT_READER = """Traceback (most recent call last):
  File "/opt/pyspark/sql/streaming/python_streaming_source_runner.py", line 187, in latest_offset_func
    start_offset = json.loads(text)
                   ^^^^^^^^^^^^^^^^
  File "/usr/lib/python3.11/json/__init__.py", line 346, in loads
    return _default_decoder.decode(s)
json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)
"""


def test_a_checkpoint_that_is_not_json_is_reported_and_other_json_is_not() -> None:
    ours = error_within(PythonException(CHECKPOINT_READER))
    assert type(ours) is SettingsError
    assert str(ours) == (
        "rocketmq: the checkpoint has unusable offsets, no JSON: Expecting value: line 1 column 1 (char 0);"
        f" {CHECKPOINT_REMEDY}"
    )
    assert error_within(PythonException(CHECKPOINT_READER.replace("streaming_source_runner", "worker"))) is None


def test_what_is_not_pysparks_is_not_looked_at() -> None:
    with pytest.raises(ValueError, match=r"^rmqkit"), one_line():
        raise ValueError("rmqkit.errors.StoreError: not from Spark")
    with one_line():
        pass


# ---------------------------------------------------------------- inside Spark


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A store whose only file begins with a broken record."""
    segment = bytearray(segment_of([record_at] * 3))
    segment[4] ^= 0xFF
    log = tmp_path / "commitlog"
    log.mkdir()
    (log / "00000000000000000000").write_bytes(segment)
    return tmp_path


def load(spark: SparkSession, root: Path, **options: str) -> Any:
    return spark.read.format("rocketmq-store").options(**options).load(str(root))


def raised(work: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught, one_line():
        work()
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.spark
def test_options_planner_and_workers_raise_our_classes(spark: SparkSession, damaged: Path) -> None:
    option = raised(lambda: load(spark, damaged, topci="x"))
    assert (type(option), str(option)) == (
        SettingsError, "rocketmq-store: option 'topci' is not known: did you mean topic?"
    )  # fmt: skip
    planner = raised(lambda: load(spark, damaged / "none").count())
    assert type(planner) is StoreError
    assert str(planner).startswith(f"{damaged}/none/commitlog does not exist: ")
    worker = raised(lambda: load(spark, damaged).count())
    assert type(worker) is StoreError
    assert "damage at byte 0 (commitLogOffset 0)" in str(worker)


@pytest.mark.spark
def test_a_task_of_a_job_raises_our_class(spark: SparkSession) -> None:
    numbers = spark.sparkContext.parallelize([1], 1)
    assert str(raised(lambda: numbers.map(lambda _: timed_out_because()).collect())) == str(TIMED_OUT)
    frame = spark.createDataFrame(numbers.map(lambda _: timed_out_while_handling()), "number int")
    assert type(raised(lambda: frame.write.format("noop").mode("append").save())) is RequestTimedOut


@pytest.mark.parametrize(("kind", "code"), [("NoNameServer", 3), ("PeerRefused", 1), ("RequestTimedOut", 6)])
def test_an_error_of_which_only_the_text_is_left_has_an_exit_code(kind: str, code: int) -> None:
    error = error_within(PythonException(f"Traceback (most recent call last):\nrmqkit.errors.{kind}: no answer\n"))
    assert error is not None
    assert exit_code(error) == code


@pytest.mark.spark
def test_a_stream_ends_with_our_class(spark: SparkSession, tmp_path: Path) -> None:
    source = spark.readStream.format("rocketmq").options(
        nameServer="127.0.0.1:1", subscribe="orders", brokerPatienceMs="0"
    )
    written = source.load().writeStream.format("noop").option("checkpointLocation", str(tmp_path))
    query = written.start()
    stopped = raised(query.awaitTermination)
    assert type(stopped) is NoNameServer
    ended = query.exception()
    assert ended is not None
    assert type(error_within(ended)) is NoNameServer


@pytest.mark.parametrize(
    ("name", "error", "is_shown"),
    [
        ("pyspark.daemon", BrokenPipeError, False),
        ("pyspark.daemon", ConnectionResetError, False),
        ("pyspark.daemon", OSError, True),
        ("job", BrokenPipeError, True),
        (None, BrokenPipeError, True),
    ],
)
def test_a_worker_prints_no_traceback_of_a_connection_that_spark_closed(
    name: str | None, error: type[OSError], is_shown: bool, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    main = ModuleType("__main__")
    main.__spec__ = None if name is None else ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(traceback, "print_exc", traceback.print_exc)  # the former function comes back after the test
    hide_closed_connections()
    try:
        raise error("nothing to write to")
    except OSError:
        traceback.print_exc()
    assert ("Traceback" in capsys.readouterr().err) is is_shown
