"""`rmq send`, `rmq tail` and `rmq replay` against Apache's servers: to the dead letters and back."""

from __future__ import annotations

import asyncio
import json
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
    """Whose offsets of the topic the broker has, and its groups."""
    offsets, groups = (
        loads(ask(apache.broker_addr, Command(code)).payload)[part]
        for code, part in (
            (RequestCode.GET_ALL_CONSUMER_OFFSET, "offsetTable"),
            (RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, "subscriptionGroupTable"),
        )
    )
    return [{name for name in offsets if name.startswith(f"{TOPIC}@")}, set(groups)]


async def give_up(namesrv: str, topic: str, count: int) -> None:
    """Have the broker put the first messages of each queue to the dead letters, as consumers do."""
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
    apache: ApachePair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    assert kept(apache) == before, "a tail leaves nothing at the broker"

    asyncio.run(give_up(apache.namesrv_addr, TOPIC, 2))
    asyncio.run(known(apache.namesrv_addr, f"%DLQ%{GROUP}"))
    dead = stored(f"%DLQ%{GROUP}", 8)
    command = ("replay", "--dlq", GROUP, "--state", tmp_path / "state", "--audit", tmp_path / "audit")
    assert f"would send 8 of %DLQ%{GROUP} to {TOPIC}" in rmq(*command, "--dry-run")
    assert rmq(*command).startswith("sent 8 to their own topics")
    again = [one for one in stored(TOPIC, COUNT + 8) if str(one["msgId"]).startswith("replay-")]
    assert sorted(str(one["body"]) for one in again) == sorted(str(one["body"]) for one in dead)
    assert all(one["properties"]["n"] == one["body"] for one in again)  # type: ignore[index]
    (tmp_path / "state").write_text((tmp_path / "state").read_text().replace("[\n      8,", "[\n      0,"))
    assert "8 were there already" in rmq(*command), "as after a kill: what is in the target is found by the index"
