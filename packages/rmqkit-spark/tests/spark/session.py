"""The Spark session that all tests of a process share: its start takes longer than most tests.

The session's queries are small and run once, so options that pay off only after hours are off: Java's second compiler,
generated code for each query, and adaptive plans. Spark's own Python sources come as a zip file, which each kind of
Python worker would compile again. Without the zip file workers import the installed, compiled modules. The loading of
Spark's classes is half of the start of a JVM; ``python -m tests.spark.classes`` stores the loaded classes in a file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.sources import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["CLASSES", "SHORT_LIVED", "SMALL", "short_lived", "small", "small_options", "spark_home"]

HOME = ROOT / ".cache"
"""Where the session's ``SPARK_HOME`` lies: Java takes the archive of classes only with the jars under the same path."""
CLASSES = HOME / "spark-classes.jsa"
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m"
"""Options of Java machines that run too briefly to earn back the second compiler: half of what they cost. With one
compiler Java reserves 48 MiB for code, which 150 different plans fill."""

SMALL: Mapping[str, str] = {
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    # A stream without rows says how far its source is after so many ms; by default after ten seconds.
    "spark.sql.streaming.noDataProgressEventInterval": "100",
}
"""Settings of sessions whose queries are small."""


def short_lived() -> str:
    """`SHORT_LIVED`, with the archive of classes where there is one. Another Java than the one that made it goes on
    without it."""
    # What Java says when it cannot use the archive would be taken for what the program under test says.
    return f"{SHORT_LIVED} -XX:SharedArchiveFile={CLASSES} -Xlog:disable" if CLASSES.exists() else SHORT_LIVED


def spark_home(folder: Path = HOME) -> Path:
    """Spark's programs under a folder that may be written to (executors of a cluster keep their logs below it), without
    the zipped Python sources."""
    home = folder / "spark"
    home.mkdir(parents=True, exist_ok=True)
    spec = importlib.util.find_spec("pyspark")
    assert spec is not None, "pyspark is installed"
    assert spec.origin is not None, "it is a folder with files"
    for name in ("bin", "jars"):
        with contextlib.suppress(FileExistsError):
            (home / name).symlink_to(Path(spec.origin).parent / name)
    return home


def small() -> dict[str, str]:
    """The environment of a program that starts a session of its own, for a test about the process."""
    return {**os.environ, "SPARK_HOME": str(spark_home())}


def small_options() -> list[str]:
    """Options of ``rmq pipeline`` for a short life, which Java says nothing about, as it does of the environment."""
    settings = {**SMALL, "spark.driver.extraJavaOptions": short_lived()}
    return [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]


@pytest.fixture(scope="session")
def spark_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the session's Java machine runs, which cannot change it: for tests with relative paths."""
    return tmp_path_factory.mktemp("spark")


@pytest.fixture(scope="session")
def spark(spark_folder: Path) -> Iterator[SparkSession]:
    """A session on two cores, in UTC."""
    from rmqkit.spark import spark_session

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(spark_folder)
        patch.setenv("SPARK_HOME", str(spark_home()))
        # Workers begin in that folder, too, and import what tests send to them.
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
        session = spark_session(
            "rmqkit-tests",
            "local[2]",
            {**SMALL, "spark.sql.session.timeZone": "UTC", "spark.driver.extraJavaOptions": short_lived()},
        )
    yield session
    session.stop()
