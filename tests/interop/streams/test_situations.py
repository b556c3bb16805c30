"""Streams in the situations of the page "Streams beside Kafka's source": ours here, Kafka's source in a program.

`make kill T=beside-kafka` plays all situations on both sides.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession

from tests.interop.kit import Unavailable, find_java
from tests.interop.streams.beside import plain, table
from tests.interop.streams.outcomes import OUTCOMES
from tests.interop.streams.sides import RocketmqSide, kafka_jars
from tests.interop.streams.situations import SITUATIONS, Situation
from tests.interop.streams.stage import Outcome, Stage, failure, spans
from tests.sources import ROOT

pytestmark = [pytest.mark.spark, pytest.mark.faults]

PAGE = ROOT / "docs" / "spark-streams-beside-kafka.md"
TESTED = [one for one in SITUATIONS if one.is_tested]
ON_KAFKA = ("longer_again_tolerated", "available_now", "other_topic")


@pytest.fixture(scope="module")
def side(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocketmqSide]:
    with RocketmqSide(tmp_path_factory.mktemp("streams")) as running:
        yield running


@pytest.mark.parametrize("one", TESTED, ids=[one.name for one in TESTED])
def test_a_stream_has_the_outcome_of_the_page(
    one: Situation, side: RocketmqSide, spark: SparkSession, tmp_path: Path
) -> None:
    stage = Stage(side, spark, tmp_path, f"s{SITUATIONS.index(one)}")
    one.play(stage)
    outcome = stage.close()
    assert plain(outcome) == OUTCOMES[one.name].ours, outcome.said


def test_kafkas_source_has_the_outcome_of_the_page(tmp_path: Path) -> None:
    try:
        find_java()
        kafka_jars()
    except Unavailable as reason:
        if os.environ.get("RMQKIT_INTEROP") == "require":
            raise
        pytest.skip(str(reason))
    command = [sys.executable, "-m", "tests.interop.streams.beside", "--side", "kafka", "--json"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    ran = subprocess.run(
        [*command, "--only", ",".join(ON_KAFKA)], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, "\n".join(line for line in ran.stderr.splitlines() if "\tat " not in line)[-3000:]
    found = msgspec.convert(json.loads(ran.stdout.splitlines()[-1])["kafka"], dict[str, Outcome])
    assert {name: plain(outcome) for name, outcome in found.items()} == {
        name: OUTCOMES[name].kafka for name in ON_KAFKA
    }


def test_the_page_has_the_outcomes() -> None:
    assert "\n\n{}\n\n".format("\n".join(table())) in PAGE.read_text()


def test_every_difference_has_a_reason_and_nothing_is_read_twice() -> None:
    assert list(OUTCOMES) == [one.name for one in SITUATIONS]
    assert len(TESTED) == 23
    for pair in OUTCOMES.values():
        assert bool(pair.reason) == (pair.ours != pair.kafka)
        assert not pair.ours.twice


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([2, 0, 1], "0-2"), ([5, 7, 8, 9, 11], "5,7-9,11")]
)
def test_numbers_are_shown_as_spans(numbers: list[int], text: str) -> None:
    assert spans(numbers) == text


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("x\nCaused by: org.apache.kafka.common.errors.TimeoutException: Timeout of 60 ms\n\tat a", "TimeoutException"),
        (
            "failed: Some data may have been lost because they are not available in Kafka any more; ...",
            "fails: data loss",
        ),
        ("x\nrmqkit.spark.broker_pool.DataLost: messages 0 to 9 are gone", "fails: data loss"),
        ("x\nrmqkit.errors.NoRoute: rocketmq: topic a does not exist", "NoRoute"),
        ("no class", "RuntimeError"),
    ],
)
def test_the_class_of_an_error_is_that_of_its_cause(text: str, end: str) -> None:
    assert failure(RuntimeError(text))[0] == end


def test_a_query_without_an_error_continues() -> None:
    assert failure(None) == ("continues", "")
