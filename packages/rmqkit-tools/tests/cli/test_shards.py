"""``rmq broker --shards N``: the settings of each shard, refused uses, and the start, crash and stop of shards."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import socket
import sys
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rmqkit import Message, Producer, PushConsumer, StartFrom
from rmqkit.admin import Admin
from rmqkit.cli.servers import serve
from rmqkit.cli.servers.shards import Shard, check_layout, check_settings, shard_settings
from rmqkit.cli.servers.sources import BROKER
from rmqkit.errors import RmqError, SettingsError, StoreMismatch
from rmqkit.settings import Configuration, Given, parse_properties
from rmqkit.testing import StandingClock
from tests.interop.server_process import ServerProcess, wait_until
from tests.interop.standalone import RMQ, run_name_server
from tests.patience import producing, pushing
from tests.ports import free_port

SECONDS_MAX = 150
HOST = "127.0.0.1"


def settings_of(count, **given):
    given = {"brokerName": "a", **given}
    texts = Configuration.load(BROKER, {key: Given(text, "x") for key, text in given.items()}).texts()
    return [{**texts, **shard_settings(texts, index)} for index in range(count)]


def runs(test):
    @functools.wraps(test)
    def run(**fixtures):
        asyncio.run(test(**fixtures))

    return run


# -- what sets them apart


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"brokerName": "a-2", "listenPort": "10931", "haListenPort": "0", "metricsPromExporterPort": "5559"}),
        ({"listenPort": "0", "metricsPromExporterPort": "0"}, {"listenPort": "0", "metricsPromExporterPort": "0"}),
        ({"haListenPort": "10915"}, {"haListenPort": "10935"}),
        ({"storePathRootDir": "/s"}, {"storePathRootDir": "/s/shard-2", "storePathCommitLog": ""}),
        ({"storePathCommitLog": "/x, /y"}, {"storePathCommitLog": "/x/shard-2,/y/shard-2"}),
        ({"brokerName": ""}, {"brokerName": f"{socket.gethostname()}-2"}),
    ],
)
def test_a_shard_has_its_own_name_ports_and_folders(given, expected):
    own = settings_of(3, **given)[2]
    assert {key: own[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"haListenPort": "10921"}, "listenPort of a-1 would be 10921, as is haListenPort of a-0: choose another"),
        ({"listenPort": "65530"}, "listenPort of a-1 would be 65540, above 65535: choose a lower one"),
        ({"metricsExporterType": "PROM", "metricsPromExporterPort": "10911"}, "metricsPromExporterPort of a-0 would"),
        ({"haMasterAddress": "h:10912"}, "haMasterAddress=h:10912 is of one master: leave it out"),
    ],
)
def test_shards_that_cannot_be(given, said):
    with pytest.raises(SettingsError) as caught:
        check_settings(settings_of(2, **given))
    assert str(caught.value).startswith(said)


def test_a_hundred_shards_share_no_port():
    check_settings(settings_of(100, metricsExporterType="PROM"))
    check_settings(settings_of(2, listenPort="0", metricsExporterType="PROM", metricsPromExporterPort="0"))


@pytest.mark.parametrize(
    ("files", "count", "said"),
    [
        ((), 2, ""),
        (("shard-0/lock", "shard-1/lock"), 2, ""),
        (("shard-0/lock",), 2, ""),
        (("config/topics.json",), None, ""),
        (("shard-9/lock", "shard-10/lock"), None, "holds shards: start it with --shards 11"),
        (("commitlog/00",), 1, "is an unsharded broker's, it has commitlog: start it without --shards"),
        (
            ("shard-0/lock", "shard-2/lock"),
            2,
            "holds shard-2, which --shards 2 would leave unserved: use --shards 3",
        ),
    ],
)
def test_a_store_is_refused_when_messages_of_it_would_not_be_served(tmp_path, files, count, said):
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    if not said:
        check_layout(tmp_path, count)
        return
    with pytest.raises(StoreMismatch) as caught:
        check_layout(tmp_path, count)
    assert str(caught.value) == f"store {tmp_path} {said}, or choose another directory"


def test_print_config_reports_what_all_share_and_what_each_has(tmp_path):
    def printed(*arguments):
        command = ["broker", "--shards", "2", *arguments, "--print-config"]
        done = CliRunner().invoke(serve.app, command, env={"NAMESRV_ADDR": None}, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    text = printed("--set", "brokerName=a", "--store", tmp_path)
    assert text.startswith(
        "# shard-0: brokerName=a-0  listenPort=10911  metricsPromExporterPort=5557  storePathRootDir="
    )
    assert "# shard-1: brokerName=a-1  listenPort=10921" in text
    again = tmp_path / "again.conf"
    again.write_text(text)
    assert parse_properties(printed("-c", str(again))) == parse_properties(text)
    rows = {row["key"]: row for row in json.loads(printed("-c", str(again), "--json"))}
    assert rows["storePathRootDir"]["shards"] == [f"{tmp_path}/shard-0", f"{tmp_path}/shard-1"]
    assert rows["flushDiskType"]["shards"] == []


# -- one of them


def program(text: str) -> list[str]:
    return [sys.executable, "-S", "-c", f"import sys; {text}"]


@runs
async def test_the_pause_before_the_next_start_doubles_until_a_shard_has_lived_long(tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    clock = StandingClock(0)
    shard = Shard("a-0", program(f"print('ready broker=h:1 store=s', flush=True); open({str(gate)!r}).read()"), clock)

    async def pause_ms_after(lived_ms):
        life = asyncio.create_task(shard.live())
        with await asyncio.to_thread(gate.open, "w"):
            await shard.ready
            clock.ms += lived_ms
        return await life

    assert [await pause_ms_after(0) for _ in range(8)] == [100, 200, 400, 800, 1600, 3200, 6400, 10_000]
    assert [await pause_ms_after(lived_ms) for lived_ms in (60_000, 60_001, 0)] == [10_000, 100, 200]


@runs
async def test_what_a_shard_says_goes_into_the_log_under_its_name(caplog):
    line = {"time": "2026-01-02T03:04:05.678+00:00", "level": "WARNING", "logger": "x.y", "message": "m"}
    said = "\n".join((json.dumps(line), "Traceback", json.dumps({**line, "exception": "E"})))
    print_all = f"print({said!r}, 'a' * (1 << 20) + 'b', 'rmq: no', sep=chr(10), file=sys.stderr); sys.exit(3)"
    shard = Shard("a-0", program(print_all))
    await shard.live()
    records = [record for record in caplog.records if hasattr(record, "shard")]
    assert {record.shard for record in records} == {"a-0 "}
    told = [(record.name, record.levelname, record.getMessage(), record.exc_text) for record in records]
    assert told[:4] == [  # the end of the long line may be one of its own
        ("x.y", "WARNING", "m", None),
        ("stderr", "ERROR", "Traceback", None),
        ("x.y", "WARNING", "m", "E"),
        ("stderr", "ERROR", "a line of more than 1048576 bytes was left out", None),
    ]
    assert (records[0].created, records[0].msecs) == (1767323045.678, 678)
    with pytest.raises(RmqError, match=r"a-0 \(process \d+\) ended with exit code 3: no"):
        await shard.ready


# -- all of them


def free_port_of_two() -> int:
    """A port for the first of two shards: what it and the second listen on is free."""
    return free_port(-2, 1, 8, 10, 11)


def sharded(tmp_path: Path, *options: object) -> ServerProcess:
    command = [RMQ, "broker", "--shards", "2", "--host", HOST, "--set", "brokerName=a", "--store", tmp_path / "store"]
    return ServerProcess([*command, *map(str, options)], tmp_path / "shards.log")


def pid_of(tmp_path: Path, index: int) -> int:
    return int((tmp_path / f"store/shard-{index}/abort").read_text())


def stores_are_closed(tmp_path: Path) -> bool:
    return not list(tmp_path.glob("store/shard-*/abort"))


def has_ended(pid: int) -> bool:
    """Return True if the process has ended. It may still be a zombie that its new parent has not waited for."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


async def until(condition, what):
    await asyncio.to_thread(wait_until, condition, SECONDS_MAX, what)


@runs
async def test_clients_balance_over_shards_and_a_killed_one_comes_back_with_all_that_was_acknowledged(tmp_path):
    port, log = free_port_of_two(), tmp_path / "log.json"
    with (
        run_name_server(tmp_path) as (_, namesrv),
        sharded(tmp_path, "-n", namesrv, "--port", port, "--log-file", log, "--log-format", "json") as parent,
    ):
        addresses = f"{HOST}:{port},{HOST}:{port + 10}"
        parent.wait_ready(f"^ready broker={addresses} store={tmp_path}/store$", SECONDS_MAX)
        async with Admin(namesrv) as admin:
            await admin.topics.create("Orders", read_queues=2, write_queues=2)
        acknowledged: list[bytes] = []
        async with Producer("g", namesrv, settings=producing()) as producer:

            async def send(count):
                sent = []
                for _ in range(count):
                    message = Message(topic="Orders", body=b"%d" % (len(acknowledged)))
                    sent.append((await producer.send(message)).queue.broker_name)
                    acknowledged.append(message.body)
                return Counter(sent)

            assert await send(40) == {"a-0": 20, "a-1": 20}
            os.kill(pid_of(tmp_path, 0), signal.SIGKILL)
            while "is ready again" not in log.read_text():
                await send(1)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert [f"a-0 is ready again at {HOST}:{port}"] == [
            one["message"] for one in lines if "again at" in one["message"]
        ]
        assert any(one.get("broker") == "a-0" and "was not closed cleanly" in one["message"] for one in lines)
        consumed, all_came = set(), asyncio.Event()
        consumer = PushConsumer("c", namesrv, settings=pushing(start_from=StartFrom.FIRST_OFFSET))

        @consumer.on("Orders")
        async def handler(message):
            consumed.add(message.body)
            if consumed.issuperset(acknowledged):
                all_came.set()

        async with consumer, asyncio.timeout(SECONDS_MAX):
            await all_came.wait()
        os.kill(parent.pid, signal.SIGHUP)
        await until(lambda: log.read_text().count("was read again") == 2, "two shards that read their file again")
        assert parent.stop(signal.SIGTERM, SECONDS_MAX) == 0
    assert stores_are_closed(tmp_path)
    assert parent.log.read_text().count("\n") == 1


def test_shards_stop_in_order_when_their_parent_is_killed(tmp_path):
    with sharded(tmp_path, "--port", 0) as parent:
        parent.wait_ready("^ready broker=", SECONDS_MAX)
        pids = [pid_of(tmp_path, index) for index in range(2)]
        parent.kill()
        wait_until(lambda: all(map(has_ended, pids)), SECONDS_MAX, "the end of the shards")
    assert stores_are_closed(tmp_path)


def test_a_shard_that_cannot_start_ends_all(tmp_path):
    port = free_port_of_two()
    with socket.create_server((HOST, port + 10)), sharded(tmp_path, "--port", port) as parent:
        wait_until(lambda: "rmq: " in parent.log.read_text(), SECONDS_MAX, "an error")
        assert parent.stop(signal.SIGCONT, SECONDS_MAX) == 1
    line = parent.log.read_text().splitlines()[-1]
    assert line.startswith("rmq: a-1 (process ")
    assert f"ended with exit code 1: cannot listen on {HOST}:{port + 10}: in use by " in line
    assert stores_are_closed(tmp_path)
