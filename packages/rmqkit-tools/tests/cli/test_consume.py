"""`rmq consume`: a member of a group that commits only the messages that it has printed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rmqkit.admin import Admin
from rmqkit.broker.settings import BrokerSettings
from rmqkit.protocol.schemas.clients import MessageQueue
from tests.cli.in_process import rmq as run
from tests.client.peers import standalone

RMQ = Path(sys.executable).with_name("rmq")


@pytest.fixture(scope="module")
def namesrv(tmp_path_factory):
    broker = BrokerSettings(listen_port=0, bind_address="127.0.0.1", broker_name="broker-a")
    with standalone(tmp_path_factory.mktemp("consume"), broker=broker) as address:
        yield address


@pytest.fixture
def rmq(namesrv, monkeypatch):
    """Run a command in this process; what it printed."""
    monkeypatch.setenv("NAMESRV_ADDR", namesrv)

    def command(*arguments):
        told = run(*arguments)
        assert told.returncode == 0, told.stderr
        return told.stdout

    return command


def committed(namesrv, group):
    """Return the numbers of messages that a group has consumed and has not consumed yet."""

    async def ask():
        async with Admin(namesrv) as admin:
            queues = (await admin.groups.progress(group)).queues
            return sum(one.consumer_offset for one in queues), sum(one.diff for one in queues)

    return asyncio.run(ask())


def test_a_group_continues_where_it_was(rmq, namesrv):
    rmq("send", "Steps", *"abcdef", "--queue", 0)
    consume = ("consume", "Steps", "--group", "steps", "--format", "{body}")
    assert rmq(*consume, "--count", 2).split() == ["a", "b"]
    assert committed(namesrv, "steps") == (2, 4), "what was fetched and not printed is not committed"
    assert rmq(*consume, "--count", 4).split() == ["c", "d", "e", "f"]
    assert committed(namesrv, "steps") == (6, 0)


def test_json_lines_are_those_of_tail_and_tags_choose(rmq):
    rmq("send", "Tagged", "one", "--tags", "A", "--queue", 0)
    rmq("send", "Tagged", "two", "--tags", "B", "--queue", 0)
    line = json.loads(rmq("consume", "Tagged", "-g", "tagged", "--tags", "B", "--count", 1, "--json"))
    tail = json.loads(rmq("tail", "Tagged", "--from", "1", "--queue", "0", "--count", 1, "--json"))
    assert (line["body"], line["msgId"], line["queueOffset"]) == ("two", tail["msgId"], 1)


def test_a_new_group_begins_at_the_first_message_or_behind_the_last(rmq, namesrv):
    rmq("send", "Young", "old", "--queue", 0)
    assert rmq("consume", "Young", "-g", "whole", "--count", 1, "--format", "{body}") == "old\n"
    command = [RMQ, "consume", "Young", "-g", "young", "--from", "end", "--count", "1", "--format", "{body}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        asyncio.run(begun(namesrv, "young"))
        rmq("send", "Young", "new", "--queue", 0)
        assert process.stdout.read() == "new\n"
    assert process.returncode == 0


async def begun(namesrv, group):
    """Wait until the broker has an offset of a group, which the member saves when it knows where it begins."""
    async with Admin(namesrv) as admin, asyncio.timeout(100):
        address = await admin.calls.address("broker-a")
        queue = MessageQueue("Young", "broker-a", 0)
        while not await admin.calls.committed_offset(address, group, queue, is_stored=True, timeout_ms=60_000):
            await asyncio.sleep(0.01)


def test_what_nobody_could_read_is_not_committed(rmq, namesrv):
    rmq("send", "Pipe", *["x" * 1000] * 200, "--queue", 0)
    shell = f"{RMQ} consume Pipe -g piped --format '{{offset}} {{body}}' | head -n 3"
    told = subprocess.run(["/bin/sh", "-c", shell], capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in told.stdout.splitlines()] == ["0", "1", "2"] and told.stderr == ""
    done, left = committed(namesrv, "piped")
    assert done + left == 200 and left > 0


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("Nowhere", "-g", "g"), 5, "has no topic Nowhere"),
        (("Steps",), 2, "/ '--group'"),
        (("Steps", "-g", "g", "--from", "never"), 2, "'never' is not one of 'beginning', 'end'"),
        (("Steps", "-g", "g", "--sql", "a = 1", "--tags", "A"), 2, "exclude each other"),
        (("Steps", "-g", "g", "--format", "{bdoy}"), 2, "--format has no field {bdoy}"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_an_exit_code(namesrv, monkeypatch, arguments, code, text):
    monkeypatch.setenv("NAMESRV_ADDR", namesrv)
    told = run("consume", *arguments)
    assert told.returncode == code and text in told.stderr and told.stderr.count("\n") == 1


def test_who_gets_no_queue_learns_why(tmp_path, monkeypatch):
    monkeypatch.setattr("rmqkit.cli.messages.consume._PATIENCE_SECONDS", 0.0)
    broker = BrokerSettings(listen_port=0, bind_address="127.0.0.1", broker_name="broker-a", auto_create_group=False)
    with standalone(tmp_path, broker=broker) as address:
        assert run("send", "Closed", "x", "-n", address).returncode == 0
        told = run("consume", "Closed", "-g", "nobody", "-n", address, "--for", 0.2)
    assert (told.returncode, told.stdout) == (0, "")
    assert "rmq: group nobody has no queue of Closed here: " in told.stderr
    assert "(rmq group create nobody)" in told.stderr
