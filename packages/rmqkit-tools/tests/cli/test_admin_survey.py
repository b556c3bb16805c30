"""The web console's data on the command line: findings, lags, clients, messages, timelines, settings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from rmqkit import PushConsumer
from rmqkit.admin import Admin
from rmqkit.broker.settings import BrokerSettings
from rmqkit.errors import ExitCode, RmqError
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.clients import MessageQueue
from tests.admin.things import find_when_indexed, send
from tests.cli.in_process import rmq
from tests.client.peers import standalone

MESSAGES = 6


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A name server, and the id of the first of six orders; group billing has read one of them, and is offline."""
    broker = BrokerSettings(listen_port=0, bind_address="127.0.0.1", broker_name="broker-a", property_filter=True)
    with standalone(tmp_path_factory.mktemp("survey"), broker=broker) as address:
        yield address, asyncio.run(fill(address))


async def fill(address: str) -> str:
    async with Admin(address) as admin:
        await admin.topics.create("Orders", read_queues=1, write_queues=1)
        await admin.groups.update("billing", {})
        sent = await send(admin, *(Message(topic="Orders", body=b"%d" % n, tags="new") for n in range(MESSAGES)))
        master = await admin.calls.address("broker-a")
        await admin.calls.commit_offset(master, "billing", MessageQueue("Orders", "broker-a", 0), 1)
        await find_when_indexed(admin, "Orders", sent[0].msg_id)
        return sent[0].msg_id


def told(world: tuple[str, str], *words: str) -> Any:
    done = rmq(*words, "-n", world[0], "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def said(world: tuple[str, str], *words: str) -> str:
    done = rmq(*words, "-n", world[0])
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let the two looks follow each other at once; returns how far apart they should have been."""
    asked: list[float] = []

    async def pause(seconds: float) -> None:
        asked.append(seconds)

    monkeypatch.setattr("rmqkit.admin.diagnosis.survey._pause", pause)
    return asked


def test_findings_say_what_is_wrong_and_what_nobody_reported(world: tuple[str, str], at_once: list[float]) -> None:
    assert told(world, "cluster", "findings") == {"findings": [], "notKnown": {}}
    text = said(world, "cluster", "findings", "--apart", "7")
    assert text.startswith("nothing is wrong with 1 broker and their clocks, disks and slaves and the lag of 1 group")
    assert at_once == [10.0, 7.0]


def test_findings_end_with_a_code_of_their_own(
    world: tuple[str, str], at_once: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmqkit.admin.diagnosis.health.LAG_COUNT", 5)
    done = rmq("cluster", "findings", "-n", world[0], "--json")
    (found,) = json.loads(done.stdout)["findings"]
    assert done.returncode == ExitCode.FINDINGS == 8
    assert (found["severity"], found["kind"], found["name"]) == ("bad", "group", "billing")
    assert "5 messages" in found["text"]
    assert "none of its consumers is online" in found["text"]
    done = rmq("cluster", "findings", "-n", world[0])
    assert "start its consumers" in done.stdout
    assert done.returncode == 8
    nobody = rmq("cluster", "findings", "-n", "127.0.0.1:1")
    assert nobody.returncode == ExitCode.NO_SERVER


def test_a_question_without_an_answer_is_no_success(
    world: tuple[str, str], at_once: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any) -> Any:
        raise RmqError("not today")

    monkeypatch.setattr("rmqkit.admin.replay.dead.Dead.groups", refuse)
    done = rmq("cluster", "findings", "-n", world[0])
    assert (done.returncode, "not known: dead letters: not today" in done.stdout) == (8, True)
    assert "some requests failed" in done.stdout


def test_lags_of_all_groups(world: tuple[str, str]) -> None:
    (lag,) = told(world, "group", "lags")
    assert (lag["group"], lag["topic"], lag["count"], lag["queues"]) == ("billing", "Orders", 5, 1)
    assert lag["behindSinceMs"] > 0
    heading, row = said(world, "group", "lags", "-b", "broker-a").splitlines()
    assert heading.split() == ["GROUP", "TOPIC", "BEHIND", "AGE", "QUEUES"]
    assert row.split()[:3] == ["billing", "Orders", "5"]


def test_everybody_who_is_connected(world: tuple[str, str]) -> None:
    assert told(world, "cluster", "clients") == []

    async def while_online() -> Any:
        consumer = PushConsumer("mailer", world[0])
        consumer.subscribe("Orders", handler=lambda _: None)
        async with consumer:
            return await asyncio.to_thread(told, world, "cluster", "clients")

    (client,) = asyncio.run(while_online())
    assert (client["consumes"], client["topics"], client["produces"]) == (["mailer"], ["%RETRY%mailer", "Orders"], [])


def test_a_page_of_messages_continues_where_it_ended(world: tuple[str, str]) -> None:
    first = told(world, "message", "page", "Orders", "-l", "4")
    assert [one["body"] for one in first["messages"]] == ["5", "4", "3", "2"]
    assert (first["examined"], first["total"], first["stopped"]) == (4, MESSAGES, "count")
    rest = told(world, "message", "page", "Orders", "-l", "4", "--cursor", first["cursor"])
    assert [one["body"] for one in rest["messages"]] == ["1", "0"]
    assert (rest["stopped"], rest["cursor"]) == ("end", "")
    oldest = said(world, "message", "page", "Orders", "-l", "1", "--oldest-first").splitlines()
    assert oldest[0].endswith(" tags=new 0")
    assert oldest[1] == "looked at 1 of 6 messages"
    assert oldest[2].startswith("continue with --cursor ")


def test_a_timeline_with_and_without_a_group(world: tuple[str, str]) -> None:
    events = told(world, "message", "timeline", "Orders", world[1])
    assert [event["what"] for event in events] == ["sent by its producer", "stored in Orders"]
    events = told(world, "message", "timeline", "Orders", world[1], "-g", "billing")
    assert events[-1]["what"] == "group is past it: its offset is 1, past 0"
    assert "stored in Orders" in said(world, "message", "timeline", "Orders", world[1])


def test_settings_are_explained(world: tuple[str, str]) -> None:
    ((address, rows),) = told(world, "broker", "settings", "--only", "changed").items()
    (row,) = [one for one in rows if one["key"] == "enablePropertyFilter"]
    assert (row["value"], row["default"], row["isKnown"]) == ("true", "false", True)
    assert row["help"]
    text = said(world, "broker", "settings", "--only", "changed")
    assert text.startswith(f"{address}:\nKEY")
    assert f"{row['help']}" in text
    assert told(world, "broker", "settings", "--only", "differs") == {address: []}
    ((_, rows),) = told(world, "namesrv", "settings").items()
    assert "listenPort" in [one["key"] for one in rows]
    assert "must be changed or differs" in rmq("broker", "settings", "-n", world[0], "--only", "odd").stderr
