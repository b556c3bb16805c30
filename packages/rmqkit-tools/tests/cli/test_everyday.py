"""`rmq send`, `rmq tail` and `rmq replay` against our servers: their effects, output and exit codes."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
import termios
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from rmqkit.admin import Admin
from rmqkit.broker.settings import BrokerSettings
from rmqkit.cli import app
from rmqkit.cli.messages.sending import from_line
from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.client.producer.selectors import PlacedMessage
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.errors import RmqError, exit_code
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import request
from rmqkit.protocol.message import Message
from rmqkit.protocol.names import dlq_topic
from rmqkit.protocol.schemas.send import ConsumerSendBackRequest
from rmqkit.remoting.authentication import AuthenticationSettings
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.tls import ClientTls, ServerTls, ServerTlsSettings, Tls, TlsMode
from rmqkit.store.settings import StoreSettings
from tests.admin.test_dead import KINDS, die
from tests.certificates import OPENSSL, REASON, make_certificate
from tests.cli.in_process import rmq as rmq_in_process
from tests.client.peers import standalone, until
from tests.golden_stores import unpack_golden

RMQ = Path(sys.executable).with_name("rmq")
SECONDS_MAX = 150


@pytest.fixture(scope="module")
def namesrv(tmp_path_factory):
    broker = BrokerSettings(listen_port=0, bind_address="127.0.0.1", broker_name="broker-a", property_filter=True)
    with standalone(tmp_path_factory.mktemp("everyday"), broker=broker) as address:
        yield address


@pytest.fixture
def rmq(namesrv, monkeypatch):
    """Run a command in this process; its result, with the exit code and stderr that `rmq` would have."""
    monkeypatch.setenv("NAMESRV_ADDR", namesrv)

    def run(*arguments, exit_code_wanted=0):
        result = CliRunner().invoke(app, list(map(str, arguments)))
        code, told = result.exit_code, result.stderr
        if isinstance(result.exception, RmqError):
            code, told = exit_code(result.exception), f"{told}rmq: {result.exception}\n"
        elif result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert code == exit_code_wanted, told or result.stdout
        return result.stdout if code == 0 else told

    return run


@pytest.fixture
def stored(rmq, namesrv):
    """All messages of a topic, as JSON lines have them, when there are so many."""

    def look(topic, count, *options):
        asyncio.run(known(topic))
        lines = rmq("tail", topic, "--from", "beginning", "--count", count, "--for", 100, "--json", *options)
        return [json.loads(line) for line in lines.splitlines()]

    async def known(topic):
        """Wait until the name server knows a new topic."""
        async with Admin(namesrv) as admin, asyncio.timeout(SECONDS_MAX):
            while topic not in await admin.calls.topic_names():
                await asyncio.sleep(0.002)

    return look


def bodies(messages):
    return sorted(one["body"] for one in messages)


# ---------------------------------------------------------------- send


def test_arguments_are_sent_with_what_the_options_say(rmq, stored):
    options = ("--tags", "T", "--keys", "k1", "--keys", "k2", "--property", "region=eu", "--queue", "broker-a:2")
    assert rmq("send", "Arguments", "a", "b", *options).startswith("sent 2 to Arguments in ")
    found = stored("Arguments", 2)
    assert [(one["body"], one["queueId"], one["queueOffset"]) for one in found] == [("a", 2, 0), ("b", 2, 1)]
    for one in found:
        assert (one["tags"], one["keys"], one["properties"]["region"]) == ("T", ["k1", "k2"], "eu")
    one = rmq("send", "Arguments", "c", "--queue", "2")
    assert one == f"sent {stored('Arguments', 3)[2]['msgId']} to Arguments, broker-a:2@2\n"


@pytest.mark.parametrize("option", [("--delay", 0.001), ("--at", "2020-01-01T00:00:00"), ("--at", 1577836800000)])
def test_messages_are_delivered_later_by_time(rmq, stored, option):
    topic = f"Later{option[0][2:]}{option[1]}".replace(":", "-").replace(".", "-")
    rmq("send", topic, "x", *option)
    (found,) = stored(topic, 1)
    assert found["body"] == "x" and any(name.startswith("TIMER_") for name in found["properties"]), found["properties"]


def test_a_json_line_has_its_own_delay(tmp_path):
    template = PlacedMessage(topic="T", body=b"", delay=5)
    assert from_line(b'{"body": "x"}', template).delay == 5
    for text, at in ((b"1e9", 1e9), (b'"2026-01-31T12:00:00Z"', datetime(2026, 1, 31, 12, tzinfo=UTC))):
        later = from_line(b'{"body": "x", "deliverAt": %s}' % text, template)
        assert (later.delay, later.deliver_at) == (None, at)
    assert from_line(b'{"body": "x", "delay": 0.5}', template).delay == 0.5


def test_one_delay_is_enough(rmq):
    told = rmq("send", "Later", "x", "--delay", 5, "--delay-level", 3, exit_code_wanted=2)
    assert "use only one of --delay-level, --delay and --at" in told


def test_json_lines_say_more_than_options_and_bad_ones_are_counted(rmq, stored, tmp_path):
    lines = tmp_path / "lines.jsonl"
    lines.write_text(
        '{"body": "x", "keys": "a b", "tags": "Z", "queueId": 3, "properties": {"n": "1"}, "flag": 7}\n'
        "bad\n\n"
        '{"body": "y", "tgas": "Z"}\n'
        '{"bodyBase64": "AP8=", "delayLevel": 0, "msgId": "mine"}\n'
        '{"body": "y", "queueId": 99}\n'
        '{"body": 5}\n'
    )
    result = CliRunner().invoke(
        app, ["send", "Lines", "--json-lines", "--file", str(lines), "--json", "--tags", "T", "--property", "p=q"]
    )
    assert result.exit_code == 1
    sent, bad, unknown, binary, misplaced, number = map(json.loads, result.stdout.splitlines())
    assert "JSON is malformed" in bad["error"] and "unknown field `tgas`" in unknown["error"]
    assert "topic Lines has no queue 99 to send to" in misplaced["error"]
    assert number["error"] == "line '{\"body\": 5}' is not a message in JSON: Expected `str`, got `int`"
    assert "rmq: sent 2 to Lines" in result.stderr and "4 failed, the first because: line 'bad'" in result.stderr
    found = {one["msgId"]: one for one in stored("Lines", 2)}
    first, second = found[sent["msgId"]], found[binary["msgId"]]
    assert [sent["number"], binary["number"], binary["msgId"]] == [0, 3, "mine"]
    assert (first["tags"], first["keys"], first["queueId"], first["flag"]) == ("Z", ["a", "b"], 3, 7)
    assert {name: first["properties"][name] for name in "np"} == {"n": "1", "p": "q"}
    assert (second["bodyBase64"], second["tags"]) == ("AP8=", "T")


def test_who_waits_for_a_broker_is_reported_for_which(rmq, namesrv, monkeypatch):
    rmq("send", "Waited", "x", "--queue", 0)
    monkeypatch.setattr("rmqkit.admin.messages.sending.SILENT_SECONDS", 0.0)  # before any broker could answer
    for place in ([], ["--queue", "broker-a:0"]):
        lines = CliRunner().invoke(app, ["send", "Waited", "x", "--json", *place]).stderr.splitlines()
        who = "broker broker-a" if place else "a broker that accepts the topic"
        assert any(line.startswith(f"rmq: waiting for {who}, up to ") for line in lines), lines
    lines = CliRunner().invoke(app, ["replay", "Waited", "--to", "WaitedAgain"]).stderr.splitlines()
    waits = [line for line in lines if line.startswith("rmq: waiting for broker broker-a, up to ")]
    assert len(waits) >= 2, "for what it reads and what it sends"


def test_what_tail_prints_can_be_sent(rmq, stored, tmp_path):
    rmq("send", "Printed", "x", "--tags", "T", "--shard-key", "s", "--property", "a=b")
    lines = tmp_path / "printed.jsonl"
    lines.write_text(json.dumps(stored("Printed", 1)[0]))
    rmq("send", "PrintedAgain", "--json-lines", "--file", lines)
    (again,) = stored("PrintedAgain", 1)
    properties = again["properties"]
    assert (again["body"], again["tags"], properties["a"], properties["__SHARDINGKEY"]) == ("x", "T", "b", "s")


def test_batches_files_and_repetition(rmq, stored, tmp_path):
    file = tmp_path / "body"
    file.write_bytes(b"two\nlines")
    assert "sent 1,001 to Batches" in rmq("send", "Batches", "a", "--file", file, "--count", 1001, "--batch", 50)
    assert Counter(bodies(stored("Batches", 1001))) == {"a": 501, "two\nlines": 500}


def test_one_illegal_message_does_not_keep_its_batch_from_going(rmq, stored, tmp_path):
    large = tmp_path / "large"
    large.write_bytes(bytes(5 << 20))
    told = rmq("send", "Mixed", "a", "", "b", "--file", large, "--batch", 10, exit_code_wanted=1)
    assert told.startswith("rmq: sent 2 to Mixed in ") and "; 2 failed, the first because: body of a message" in told
    assert bodies(stored("Mixed", 2)) == ["a", "b"]


def test_messages_with_a_sharding_key_keep_their_order(rmq, stored, tmp_path):
    lines = tmp_path / "ordered.jsonl"
    lines.write_text("".join(f'{{"body": "{i:04}", "shardingKey": "{i % 3}"}}\n' for i in range(600)))
    rmq("send", "Ordered", "--json-lines", "--file", lines)
    by_key = {}
    for one in stored("Ordered", 600):
        by_key.setdefault(one["properties"]["__SHARDINGKEY"], []).append(one)
    assert {key: len({one["queueId"] for one in some}) for key, some in by_key.items()} == {"0": 1, "1": 1, "2": 1}
    for some in by_key.values():
        assert [one["body"] for one in sorted(some, key=lambda one: one["queueOffset"])] == bodies(some)


def test_lines_of_stdin_go_as_they_come_and_an_interrupt_says_how_many_went(namesrv, stored):
    command = [RMQ, "send", "Stdin", "-n", namesrv, "--json"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdin.write("one\r\n\ntwo\nthr")
        process.stdin.flush()
        assert {json.loads(process.stdout.readline())["status"] for _ in range(2)} == {"SEND_OK"}
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS_MAX) == 130
        assert process.stderr.read().startswith("rmq: stopped, sent 2 to Stdin in ")
    done = subprocess.run(command[:-1], input="three\nfour", capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.stdout.startswith("sent 2 to Stdin in ") and done.returncode == 0, done.stderr
    assert bodies(stored("Stdin", 4)) == ["four", "one", "three", "two"]


# ---------------------------------------------------------------- tail


@pytest.fixture(scope="module")
def tens(namesrv):
    """A topic of twenty messages, ten with tag A in queue 0 and ten with tag B in queue 1."""
    for tag, queue in ("A", "0"), ("B", "1"):
        texts = [f"{tag}{i}" for i in range(10)]
        given = ["send", "Tens", *texts, "--tags", tag, "--keys", f"key-{tag}", "--queue", queue, "--property", "n=5"]
        assert CliRunner().invoke(app, [*given, "-n", namesrv]).exit_code == 0
    return "Tens"


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--tags", "A || C", "--count", 10], [f"A{i}" for i in range(10)]),
        (["--sql", "TAGS = 'B' AND n > 4", "--count", 10], [f"B{i}" for i in range(10)]),
        (["--key", "key-B", "--key", "nobody's", "--count", 10], [f"B{i}" for i in range(10)]),
        (["--queue", "broker-a:1", "--from", "7", "--count", 3], ["B7", "B8", "B9"]),
        (["--queue", "0", "--from", "2020-01-01T00:00", "--count", 2], ["A0", "A1"]),
        (["--from", "9999999999999", "--for", 0.3], []),
        (["--for", 0.3, "--from", "end"], []),
    ],
)
def test_tail_shows_what_is_wanted(rmq, tens, options, wanted):
    if "--from" not in options:
        options = ["--from", "beginning", *options]
    assert rmq("tail", tens, *options, "--format", "{body}").split() == wanted


def test_tail_begins_with_what_is_there_in_the_order_of_time(rmq, stored, tmp_path):
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(f'{{"body": "{i:03}", "queueId": {i // 7 % 3}}}\n' for i in range(200)))
    for options in ("--rate", 2000), ("--rate", 3000):
        rmq("send", "InTime", "--json-lines", "--file", lines, *options)
    found = stored("InTime", 400)
    times = [one["storeTimestamp"] for one in found]
    assert times == sorted(times)
    assert len(found) == 400 and len(set(times)) > 10
    for queue_id in range(3):
        offsets = [one["queueOffset"] for one in found if one["queueId"] == queue_id]
        assert offsets == list(range(len(offsets)))


def test_tail_prints_a_line_for_each_message_whatever_is_in_it(rmq):
    rmq("send", "Odd", "two\nlines \x1b[2J", "--queue", 0, "--property", "a=b")
    line = rmq("tail", "Odd", "--from", "0", "--count", 1)
    assert line.split(" ", 2)[2] == "broker-a:0@0 - - two\\nlines \\x1b[2J\n"
    assert (
        rmq("tail", "Odd", "--from", "0", "--count", 1, "--format", "{topic} {properties} {offset:03}")
        == "Odd a=b 000\n"
    )


def on_terminal(columns, *arguments):
    """Return the output of a command on a terminal with this number of columns."""
    ours, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, columns))
    environment = {name: text for name, text in os.environ.items() if name not in ("COLUMNS", "LINES")}
    with subprocess.Popen([RMQ, *map(str, arguments)], stdout=terminal, env=environment):
        os.close(terminal)
        shown = b""
        while chunk := _read(ours):
            shown += chunk
    os.close(ours)
    return shown.decode().replace("\r\n", "\n")


def _read(terminal):
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the other side is closed
        return b""


SHOWN = {
    "fits": "fits",
    "0123456789" * 123: "012345678901234567890123… (1,230 bytes)",
    "日本" * 50: "日本日本日本日本日本日本日… (300 bytes)",
    "\n" * 50: "\\n" * 13 + "\\… (50 bytes)",
}
"""Body → the part that fits into a line of 80 columns."""


def test_on_a_terminal_tail_shows_as_much_of_a_body_as_fits(rmq):
    for body in SHOWN:
        rmq("send", "Fits", body, "--queue", 0)
    tail = ("tail", "Fits", "--from", 0, "--count", len(SHOWN))
    lines = on_terminal(80, *tail).splitlines()
    assert [line.split(" ", 5)[5] for line in lines] == [*SHOWN.values()]
    assert all(cell_len(line) <= 80 for line in lines)
    whole = [
        line.replace(shown, body.replace("\n", "\\n")) for line, (body, shown) in zip(lines, SHOWN.items(), strict=True)
    ]
    assert rmq(*tail).splitlines() == on_terminal(80, *tail, "--whole").splitlines() == whole
    only_bodies = on_terminal(80, *tail, "--format", "{body}").splitlines()
    assert [body.strip() for body in only_bodies] == [line.split(" ", 5)[5].strip() for line in whole]


def test_a_line_that_is_full_before_the_body_still_shows_some_of_it(rmq):
    rmq("send", "Keys", "0123456789" * 10, "--keys", "k" * 100)
    line = on_terminal(80, "tail", "Keys", "--from", 0, "--count", 1)
    assert line.endswith(f" {'k' * 100} 01234567890… (100 bytes)\n")


def test_tail_leaves_nothing_at_the_broker(rmq, tens, namesrv):
    def kept():
        async def ask():
            client = RemotingClient()
            runtime = ClientRuntime(namesrv)
            await runtime.start()
            await runtime.routes.refresh(tens)
            (address,) = [by_id[0] for by_id in runtime.routes.brokers.values()]
            codes = (RequestCode.GET_ALL_CONSUMER_OFFSET, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
            answers = [bytes((await client.call(address, request(code), 60_000)).payload) for code in codes]
            await runtime.close()
            await client.close()
            return answers

        return asyncio.run(ask())

    before = kept()
    rmq("tail", tens, "--from", "beginning", "--count", 20)
    assert kept() == before


# ---------------------------------------------------------------- replay


def test_a_topic_is_replayed_once_and_audited(rmq, stored, tens, tmp_path):
    state, audit = tmp_path / "state.json", tmp_path / "audit.jsonl"
    command = ("replay", tens, "--to", "TensAgain", "--tags", "A", "--sql", "n = 5", "--state", state, "--audit", audit)
    table = rmq(*command, "--dry-run")
    assert "broker-a:0:9" in table and "key-A" in table
    assert table.splitlines()[-1] == "would send 10 of Tens to TensAgain"
    assert not state.exists()
    assert rmq(*command).startswith("sent 10 to TensAgain in ")
    assert rmq(*command).startswith("sent 0 to TensAgain in ")
    found = stored("TensAgain", 10)
    assert bodies(found) == [f"A{i}" for i in range(10)]
    assert {(one["tags"], one["keys"][0], one["properties"]["n"]) for one in found} == {("A", "key-A", "5")}
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert {line["newMsgId"]: line["newOffsetMsgId"] for line in lines} == {
        one["msgId"]: one["offsetMsgId"] for one in found
    }
    assert [line["place"] for line in lines] == [f"broker-a:0:{i}" for i in range(10)]
    assert len(stored("TensAgain", 11, "--for", 0.3)) <= 10, "and nothing more"


def test_a_topic_is_replayed_into_itself_up_to_where_it_was(rmq, stored):
    rmq("send", "Itself", "--count", 700, "x", "--batch", 100)
    assert rmq("replay", "Itself", "--to", "Itself").startswith("sent 700 to Itself")
    assert len(stored("Itself", 1400)) == 1400
    assert len(stored("Itself", 1401, "--for", 0.5)) <= 1400, "and nothing more"


def test_dead_letters_go_back_to_their_group_once(rmq, stored, namesrv, tmp_path, monkeypatch):
    async def kill():
        runtime = ClientRuntime(namesrv)
        await runtime.start()
        async with (
            Producer("PG-dead", runtime=runtime) as producer,
            PullConsumer("CG-dead", runtime=runtime) as consumer,
        ):
            for i in range(3):
                message = Message(topic=f"Dead{i % 2}", body=b"%d" % i, tags="T", properties={"a": "b"})
                sent = await producer.send(message)
                (found,) = (await consumer.pull(sent.queue, sent.queue_offset, max_count=1)).messages
                header = ConsumerSendBackRequest(found.physical_offset, "CG-dead", -1, found.msg_id, found.topic)
                await runtime.calls.send_back(runtime.routes.address(sent.queue.broker_name), header)
        await runtime.close()

    asyncio.run(kill())
    assert len(stored("%DLQ%CG-dead", 3)) == 3
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    table = rmq("replay", "--dlq", "CG-dead", "--dry-run")
    assert "would send 3 of %DLQ%CG-dead to %RETRY%CG-dead, which only group CG-dead reads\n" in table
    assert not list(tmp_path.iterdir()), "a dry run remembers nothing"
    assert rmq("replay", "--dlq", "CG-dead", "--rate", 100).startswith("sent 3 to group CG-dead in ")
    again = stored("%RETRY%CG-dead", 3)
    assert bodies(again) == ["0", "1", "2"]
    assert {one["properties"]["RETRY_TOPIC"] for one in again} == {"Dead0", "Dead1"}
    assert {(one["tags"], one["properties"]["a"], one["reconsumeTimes"]) for one in again} == {("T", "b", 0)}
    assert "; 3 were replayed before (--again repeats them)" in rmq("replay", "--dlq", "CG-dead")
    assert "would not send 3 that were replayed before" in rmq("replay", "--dlq", "CG-dead", "--dry-run")
    assert rmq("replay", "--dlq", "CG-dead", "--again").startswith("sent 3 to group CG-dead in ")
    assert "sent 0 to group CG-dead" in rmq("replay", "--dlq", "CG-dead")
    (kept,) = tmp_path.rglob("*.json")
    assert kept.name.startswith("CG-dead-")
    # Another target has a memory of its own.
    assert rmq("replay", "--dlq", "CG-dead", "--to", "Dead0").startswith("sent 3 to Dead0 in ")
    again = stored("Dead0", 5)
    assert bodies(again) == ["0", "0", "1", "2", "2"]
    assert {one["properties"].get("RETRY_TOPIC") for one in again} == {None}
    assert {(one["tags"], one["properties"]["a"]) for one in again} == {("T", "b")}


def test_a_dry_run_names_the_other_groups_of_the_target(rmq, namesrv, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    async def prepare():
        async with Admin(namesrv) as admin:
            await admin.topics.create("Shared", read_queues=1, write_queues=1)
            for group in ("CG-read", "CG-also"):
                await admin.groups.update(group, {})
                await admin.offsets.reset(group, "Shared", 0)
            await die(admin, "CG-read", 4)

    asyncio.run(prepare())
    told = rmq_in_process("replay", "--dlq", "CG-read", "--to", "Shared", "--dry-run", "-n", namesrv)
    assert "to Shared: 1 other groups read it, too, and receive the messages: CG-also" in told.stderr
    told = rmq_in_process("replay", "--dlq", "CG-read", "--dry-run", "-n", namesrv)
    assert "no client of group CG-read is online: the messages wait in its retry topic" in told.stderr


@pytest.mark.parametrize(
    ("kind", "found"),
    [("1", 1), ("no user", 1), (KINDS[2][2], 1)],
)
def test_kinds_are_chosen_by_number_and_by_a_part_of_the_name(rmq, namesrv, kind, found):
    group = "CG-kinds"

    async def prepare():
        async with Admin(namesrv) as admin:
            if dlq_topic(group) not in await admin.calls.topic_names():
                await admin.groups.update(group, {})
                await die(admin, group, 6)

    asyncio.run(prepare())
    listed = json.loads(rmq("dead", "kinds", group, "--json"))["kinds"]
    assert listed[0]["kind"] == KINDS[2][2], "the kinds are sorted by count and name"
    lines = rmq("replay", "--dlq", group, "--kind", kind, "--dry-run", "--json").splitlines()
    assert len(lines) == 2 * found
    told = rmq("replay", "--dlq", group, "--kind", "4", "--dry-run", exit_code_wanted=2)
    assert f"--kind 4: group {group} has 3 numbered kinds: rmq dead kinds {group}" in told
    told = rmq("replay", "--dlq", group, "--kind", "nothing like it", "--dry-run", exit_code_wanted=2)
    assert f"--kind nothing like it is a part of no kind: rmq dead kinds {group}" in told
    told = rmq("replay", "--dlq", group, "--kind", "Orders", "--dry-run", exit_code_wanted=2)
    names = [f"{number} ({one['kind']})" for number, one in enumerate(listed, 1) if "Orders" in one["kind"]]
    assert f"--kind Orders is a part of 2 kinds, give the number: {', '.join(names)}" in told


def test_the_messages_of_a_store_are_replayed(rmq, stored, tmp_path):
    golden = unpack_golden("5.4.0", tmp_path)
    wanted = [one for one in golden.manifest["messages"] if one["topic"] == "%DLQ%g_retry"]
    assert wanted
    told = rmq("replay", "--store", golden.root, "--dlq", "g_retry", "--dry-run")
    assert f"would send {len(wanted)} of %DLQ%g_retry to %RETRY%g_retry, which only group g_retry reads" in told
    topic = max(Counter(one["topic"] for one in golden.manifest["messages"] if one["topic"][0] != "%").items())[0]
    wanted = [one for one in golden.manifest["messages"] if one["topic"] == topic]
    state = tmp_path / "state.json"
    assert f"sent {len(wanted)} to FromStore" in rmq(
        "replay", topic, "--store", golden.root, "--to", "FromStore", "--state", state
    )
    found = stored("FromStore", len(wanted))
    assert Counter((one["tags"], *one["keys"]) for one in found) == Counter(
        (one.get("tags"), *(one.get("keys") or "").split()) for one in wanted
    )
    assert {one["msgId"].split("/")[1].split(":")[0] for one in found} == {"log"}
    assert rmq("replay", topic, "--store", golden.root, "--to", "FromStore", "--state", state).startswith("sent 0")


def test_a_killed_replay_continues_without_loss_or_doubles(rmq, stored, namesrv, tmp_path):
    rmq("send", "Killed", "--count", 1500, "x", "--batch", 100)
    state, audit = tmp_path / "state.json", tmp_path / "audit.jsonl"
    command = ("replay", "Killed", "--to", "Survived", "--state", state, "--audit", audit)

    def audited():
        return audit.read_text().count("\n") if audit.exists() else 0

    for _ in range(2):
        enough = audited() + 90
        with subprocess.Popen([RMQ, *command, "-n", namesrv, "--rate", "300"], stdout=subprocess.DEVNULL) as process:
            asyncio.run(until(lambda enough=enough: audited() > enough, f"{enough} lines of audit", SECONDS_MAX))
            process.kill()
    told = rmq(*command)
    assert "in all runs" in told
    places = Counter(one["msgId"].split("/")[1] for one in stored("Survived", 1500))
    assert len(stored("Survived", 1501, "--for", 1)) <= 1500, "and nothing more"
    assert len(places) == 1500 and set(places.values()) == {1}
    assert Counter(json.loads(line)["place"] for line in audit.read_text().splitlines()) == places
    assert json.loads(state.read_text())["sent"] == 1500


# ---------------------------------------------------------------- what cannot be done


@pytest.mark.parametrize(
    ("command", "code", "text"),
    [
        (["send", "T", "x", "-n", "127.0.0.1:1"], 3, "cannot connect to 127.0.0.1:1"),
        (["send", "no topic", "x"], 1, "contains illegal characters"),
        (["send", "T", "x", "--queue", "b:x"], 2, "must be an id, or broker:id"),
        (["send", "T", "x", "--property", "x"], 2, "a property must be NAME=VALUE"),
        (["send", "T", "--file", "/nowhere/x"], 1, "cannot read or write /nowhere/x: No such file or directory"),
        (["tail", "Tnes"], 5, "has no topic Tnes: did you mean Tens?"),
        (["tail", "Tens", "--queue", "9"], 2, "has no queue 9: it has broker-a:0"),
        (["tail", "Tens", "--sql", "n >"], 1, "correct the subscription's expression"),
        (["tail", "Tens", "--format", "{boddy}"], 2, "--format has no field {boddy}"),
        (["tail", "Tens", "--tags", "a", "--sql", "b = 1"], 2, "not both"),
        (["tail", "Tens", "--from", "yesterday"], 2, "must be ms since the epoch, now, or like"),
        (["replay", "Tens"], 2, "no target: give --to TOPIC"),
        (["replay", "--to", "Tens"], 2, "nothing to replay: give a topic"),
        (["replay", "Tens", "--to", "X", "--sql", "n >"], 2, "replay: "),
        (["replay", "--store", "/nowhere", "--dry-run"], 1, "/nowhere is not a store"),
        (["replay", "Tens", "--to", "X", "--state", __file__], 2, "is not the state of a replay"),
        (["replay", "Tens", "--to", "X", "--audit", "/dev/full"], 2, "/dev/full is not a regular file"),
        (["replay", "Tens", "--to", "X", "--state", "/dev/full"], 2, "/dev/full is not a regular file"),
        (["replay", "Tens", "--to", "X", "--audit", __file__], 2, "does not end with a line of an audit"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_an_exit_code(rmq, tens, command, code, text):
    told = rmq(*command, exit_code_wanted=code)
    assert text in " ".join(told.replace("│", "").split())


def test_large_bodies_are_sent_and_replayed_where_all_limits_allow_it(tmp_path):
    def run(*arguments):
        done = CliRunner().invoke(app, [*map(str, arguments), "-n", address])
        return done.stdout + done.stderr, done.exit_code

    body, size = tmp_path / "body", 8 << 20
    body.write_bytes(base64.b64encode(os.urandom(size // 4 * 3)))
    with standalone(tmp_path / "small") as address:
        said, code = run("send", "T", "--file", body)
        limit = f"has {size} bytes, {4 << 20} more than the limit of {4 << 20} (maxMessageSize; --max-bytes on"
        assert (limit in said, code) == (True, 1), said
        said, code = run("send", "T", "--file", body, "--max-bytes", size)
        limit = f"msg body length limit {4 << 20}B"
        assert (limit in said, "or raise maxMessageSize on the broker" in said, code) == (True, True, 1), said
    with standalone(tmp_path / "large", store=StoreSettings(message_bytes_max=size)) as address:
        for command in (
            ["send", "T", "--file", body, "--max-bytes", size],
            ["replay", "T", "--to", "U"],
            ["tail", "U", "--from", "0", "--count", "1", "--format", "{offset}"],
        ):
            said, code = run(*command)
            assert code == 0, said


def test_a_broker_that_does_not_filter_by_sql92_is_named(tmp_path):
    with standalone(tmp_path) as address:
        assert CliRunner().invoke(app, ["send", "T", "x", "-n", address]).exit_code == 0
        error = CliRunner().invoke(app, ["tail", "T", "--sql", "a = 1", "-n", address]).exception
    assert "does not filter by SQL92" in str(error) and "set enablePropertyFilter=true there" in str(error)


@pytest.mark.skipif(OPENSSL is None, reason=REASON)
def test_encrypted_and_signed_connections_are_made_with_the_options_of_rmq_admin(tmp_path):
    own = make_certificate(tmp_path, "server")
    server = ServerTls(ServerTlsSettings(mode=TlsMode.ENFORCING, certificate=own.certificate, key=own.key))
    client = ClientTls(Tls(verify=False))
    users = AuthenticationSettings(
        enabled=True,
        initial_user='{"username":"anna","password":"secret12"}',
        inner_credentials='{"accessKey":"broker","secretKey":"other123"}',
    )
    with standalone(tmp_path, tls=server, client_tls=client, authentication=users) as address:
        options = ["-n", address, "--tls-ca", own.certificate, "--access-key", "anna", "--secret-key", "secret12"]
        for command in (
            ["send", "Secret", "x"],
            ["tail", "Secret", "--from", "0", "--count", "1"],
            ["replay", "Secret", "--to", "Secret"],
        ):
            done = CliRunner().invoke(app, [*command, *options])
            assert done.exit_code == 0, done.exception
        refused = CliRunner().invoke(app, ["send", "Secret", "x", *options[:-1], "guess"]).exception
        plain = CliRunner().invoke(app, ["send", "Secret", "x", "-n", address]).exception
    assert "check signature failed" in str(refused)
    assert exit_code(refused) == 4
    assert exit_code(plain) == 7
