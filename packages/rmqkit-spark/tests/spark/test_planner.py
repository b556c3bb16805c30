"""The process that plans reads for the reader in Java: its calls, its errors, and what it imports."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from rmqkit.spark.planner import serve
from tests.spark.messages import HOST_V4, record_at
from tests.spark.pulled_broker import BROKER, TOPIC, PulledBroker, Stored

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def broker() -> Iterator[PulledBroker]:
    with PulledBroker() as running:
        yield running


def answers(*requests: list[Any]) -> list[dict[str, Any]]:
    """Return the answers of a process to requests."""
    lines = io.BytesIO(b"".join(json.dumps(request).encode() + b"\n" for request in requests))
    written = io.BytesIO()
    serve(lines, written)
    return [json.loads(line) for line in written.getvalue().splitlines()]


def given(broker: PulledBroker, **options: str) -> dict[str, str]:
    return {"nameServer": broker.address, "subscribe": TOPIC, "brokerPatienceMs": "0", **options}


def fill(broker: PulledBroker, count: int) -> None:
    fields = {"queue_id": 0, "topic": TOPIC.encode(), "born_host": HOST_V4, "store_host": HOST_V4}
    broker.records = [Stored(record_at(1000 * i, **{**fields, "queue_offset": i}), i, i + 1) for i in range(count)]


def test_the_process_imports_neither_pyspark_nor_arrow_nor_numpy() -> None:
    slow = "{'pyspark', 'pyarrow', 'numpy', 'pandas'}"
    program = f"import sys, rmqkit.spark.planner; assert not {slow} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_program_answers_on_its_output_until_its_input_ends() -> None:
    command = [sys.executable, "-m", "rmqkit.spark.planner"]
    request = b'["open", {"nameServer": "x:1"}, null, false]\n'
    found = subprocess.run(command, input=request, stdout=subprocess.PIPE, check=True)
    assert json.loads(found.stdout)["error"].startswith("rmqkit.errors.SettingsError: rocketmq: give one of subscribe")


def test_a_batch_is_planned_in_plain_values(broker: PulledBroker) -> None:
    fill(broker, 3)
    opened, planned = answers(["open", given(broker), None, False], ["batch"])
    assert opened == {"value": None}
    (part,) = planned["value"]
    assert (part["low"], part["high"]) == (0, 3)
    assert (part["pull"]["topic"], part["pull"]["brokerName"], part["pull"]["queueId"]) == (TOPIC, BROKER, 0)


def test_a_stream_is_planned_from_its_start_to_its_end(broker: PulledBroker) -> None:
    fill(broker, 3)
    options = given(broker, startingOffsets="earliest", maxOffsetsPerTrigger="2")
    _, limit, start, _ = answers(["open", options, None, True], ["rowsMax"], ["initialOffset"], ["endNow"])
    assert limit == {"value": 2}
    assert json.loads(start["value"]) == {TOPIC: {BROKER: {"0": 0}}}
    _, known, end, latest = answers(
        ["open", options, None, True], ["knownLatest"], ["latestOffset", start["value"], 2], ["knownLatest"]
    )
    assert known == {"value": None}
    assert json.loads(end["value"])[TOPIC] == {BROKER: {"0": 2}}
    assert json.loads(latest["value"])[TOPIC] == {BROKER: {"0": 3}}
    _, planned = answers(["open", options, None, True], ["parts", start["value"], end["value"]])
    assert [(part["low"], part["high"]) for part in planned["value"]] == [(0, 2)]


def test_no_limit_ends_a_batch_at_the_last_message(broker: PulledBroker) -> None:
    fill(broker, 3)
    _, end = answers(["open", given(broker), None, True], ["latestOffset", "{}", 0])
    assert json.loads(end["value"])[TOPIC] == {BROKER: {"0": 3}}


def test_an_error_has_its_class_and_the_process_serves_the_next_read(broker: PulledBroker) -> None:
    fill(broker, 1)
    refused, opened = answers(
        ["open", given(broker, endingTimestamp="5"), None, True], ["open", given(broker), None, True]
    )
    assert refused == {
        "error": "rmqkit.errors.SettingsError: rocketmq: endingTimestamp is for batches: a stream has no end"
    }
    assert opened == {"value": None}


def test_an_unexpected_error_has_its_traceback(broker: PulledBroker) -> None:
    (answer,) = answers(["batch"])
    assert answer["error"].startswith("Traceback")
    assert "a read is opened before it is planned" in answer["error"]


@pytest.mark.parametrize("call", [["latestOffset", "{", 0], ["parts", "{}", "{"], ["commit", "nothing"]])
def test_a_checkpoint_without_json_is_reported_with_a_remedy(broker: PulledBroker, call: list[Any]) -> None:
    _, answer = answers(["open", given(broker), None, True], call)
    assert "rmqkit.errors.SettingsError: rocketmq: the checkpoint has unusable offsets, no JSON: " in answer["error"]
    assert "restore a complete copy of it" in answer["error"]


def test_the_columns_of_a_caller_are_checked(broker: PulledBroker) -> None:
    schema = '{"type":"struct","fields":[{"name":"topic","type":"integer","nullable":true,"metadata":{}}]}'
    (refused,) = answers(["open", given(broker), schema, False])
    assert "rocketmq: column topic is string, the schema says int" in refused["error"]


def test_the_columns_of_a_catalog_have_the_options(broker: PulledBroker) -> None:
    fill(broker, 2)
    metadata = {"rmqkit.options": json.dumps(given(broker))}
    field = {"name": "topic", "type": "string", "nullable": True, "metadata": metadata}
    schema = json.dumps({"type": "struct", "fields": [field]})
    _, planned = answers(["open", {}, schema, False], ["batch"])
    assert [(part["low"], part["high"]) for part in planned["value"]] == [(0, 2)]
