"""`rmq send`, `rmq tail` and `rmq replay` against Apache's servers: to the dead letters and back."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rmqkit.admin import Admin
from rmqkit.cli import app
from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command
from rmqkit.protocol.fastjson import loads
from rmqkit.protocol.schemas.send import ConsumerSendBackRequest
from tests.interop.apache import ApachePair, ask
from tests.interop.kit import ApacheKit
from tests.interop.probe import run_probe
from tests.interop.suite.consuming import SECONDS
from tests.patience import TIMEOUT_MS, pulling

TOPIC, GROUP, COUNT = "Everyday", "CG-everyday", 600


def rmq(*arguments: object) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments), "--timeout", str(TIMEOUT_MS)])
    assert result.exit_code == 0, (result.exception, result.stderr)
    return result.stdout


def stored(topic: str, count: int, *options: object) -> list[dict[str, object]]:
    lines = rmq("tail", topic, "--from", "beginning", "--count", count, "--for", 200, "--json", *options)
    return [json.loads(line) for line in lines.splitlines()]


def kept(apache: ApachePair) -> list[set[str]]:
    """Return the groups with offsets of the topic, and the broker's groups."""
    offsets, groups = (
        loads(ask(apache.broker_addr, Command(code)).payload)[part]
        for code, part in (
            (RequestCode.GET_ALL_CONSUMER_OFFSET, "offsetTable"),
            (RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, "subscriptionGroupTable"),
        )
    )
    return [{name for name in offsets if name.startswith(f"{TOPIC}@")}, set(groups)]


async def give_up(namesrv: str, topic: str, count: int) -> None:
    """Send the first messages of each queue to the dead letters, as consumers do."""
    runtime = ClientRuntime(namesrv, settings=pulling())
    await runtime.start()
    async with PullConsumer(GROUP, runtime=runtime, settings=pulling()) as consumer:
        for queue in await consumer.queues(topic):
            for message in (await consumer.pull(queue, 0, max_count=count)).messages:
                header = ConsumerSendBackRequest(message.physical_offset, GROUP, -1, message.msg_id, topic)
                address = await runtime.routes.find_address(queue.broker_name, topic)
                await runtime.calls.send_back(address, header)
    await runtime.close()


async def known(namesrv: str, topic: str) -> None:
    async with Admin(namesrv) as admin, asyncio.timeout(SECONDS):
        while topic not in await admin.calls.topic_names():
            await asyncio.sleep(0.01)


def test_a_message_goes_to_the_dead_letters_and_back(
    apache: ApachePair, apache_kit: ApacheKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAMESRV_ADDR", apache.namesrv_addr)
    lines = tmp_path / "lines.jsonl"
    fields = (
        {"body": f"{i}", "tags": "AB"[i % 2], "keys": [f"k{i}"], "properties": {"n": f"{i}"}} for i in range(COUNT)
    )
    lines.write_text("\n".join(json.dumps(one) for one in fields))
    assert rmq("send", TOPIC, "--json-lines", "--file", lines, "--batch", 20).startswith(f"sent {COUNT} to {TOPIC}")
    asyncio.run(known(apache.namesrv_addr, TOPIC))
    before = kept(apache)
    assert {one["body"] for one in stored(TOPIC, COUNT)} == {str(i) for i in range(COUNT)}
    assert {one["body"] for one in stored(TOPIC, 2, "--sql", "n BETWEEN 7 AND 8")} == {"7", "8"}
    assert {one["tags"] for one in stored(TOPIC, COUNT // 2, "--tags", "B")} == {"B"}
    assert kept(apache) == before, "a tail leaves no offset or group in the broker"

    asyncio.run(give_up(apache.namesrv_addr, TOPIC, 2))
    asyncio.run(known(apache.namesrv_addr, f"%DLQ%{GROUP}"))
    dead = stored(f"%DLQ%{GROUP}", 8)
    retry = f"%RETRY%{GROUP}"
    command = ("replay", "--dlq", GROUP, "--state", tmp_path / "state", "--audit", tmp_path / "audit")
    assert f"would send 8 of %DLQ%{GROUP} to {retry}, which only group {GROUP} reads" in rmq(*command, "--dry-run")
    assert rmq(*command).startswith(f"sent 8 to group {GROUP}")
    again = stored(retry, 8)
    assert sorted(str(one["body"]) for one in again) == sorted(str(one["body"]) for one in dead)
    assert all(one["properties"]["n"] == one["body"] for one in again)  # type: ignore[index]
    assert "; 8 were replayed before" in rmq(*command)
    memory = json.loads((tmp_path / "state").read_text()) | {"places": {}, "marks": {}, "is_done": False}
    (tmp_path / "state").write_text(json.dumps(memory))
    assert "8 were there already" in rmq(*command), "after a kill, the index finds the messages that are in the target"

    # Apache's consumer gets each of them through its retry topic, under its original topic.
    probe = run_probe(
        apache_kit,
        "consume",
        namesrv=apache.namesrv_addr,
        topic=TOPIC,
        work_dir=tmp_path,
        consumers={GROUP: f"*:{COUNT + 8}"},
    )
    assert probe.exit_code == 0, probe.outcome
    replayed = [one for one in probe.received if one.msg_id.startswith("replay-")]
    assert sorted(one.body_sha256 for one in replayed) == sorted(
        sha256(str(one["body"]).encode()).hexdigest() for one in dead
    )
    assert {(one.topic, one.reconsume_times) for one in replayed} == {(TOPIC, 0)}
