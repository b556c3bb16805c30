"""Nouns and verbs: the search for verbs, their arguments, and the display of their results."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from rmqkit.cli import NOUNS, app, noun_group
from rmqkit.cli.admin.mqadmin import JAVA
from rmqkit.client.runtime.settings import ProducerSettings
from rmqkit.errors import UnknownName
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import reply
from rmqkit.protocol.fastjson import dumps
from rmqkit.protocol.schemas.brokers import HaClientInfo, HaConnectionInfo, HaRuntimeInfo
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig, SubscriptionGroupTable
from rmqkit.protocol.schemas.topics import BrokerData, ClusterInfo, KVTable, TopicList
from tests.cli.answering import body, serving

SECONDS_MAX = 150
MASTER = HaRuntimeInfo(
    master=True,
    master_commit_log_max_offset=123_456,
    in_sync_slave_nums=1,
    ha_connection_info=[
        HaConnectionInfo(addr="127.0.0.1:1", slave_ack_offset=123_000, diff=456, in_sync=True, lag_ms=7),
        HaConnectionInfo(addr="127.0.0.1:2", slave_ack_offset=99, diff=123_357, transferred_byte_in_second=1_000_000),
    ],
)
SLAVE = HaRuntimeInfo(ha_client_runtime_info=HaClientInfo(master_addr="127.0.0.1:10912", max_offset=4711))
GROUPS = SubscriptionGroupTable(subscription_group_table={"payers": SubscriptionGroupConfig(group_name="payers")})
FIGURES = KVTable({"brokerVersionDesc": "V5_4_0", "putTps": "2.5 1.0 0.5", "brokerActive": "true"})


def cluster(address):
    data = BrokerData("DefaultCluster", "broker-a", {0: address, 1: "127.0.0.1:1"})
    slaves_only = BrokerData("DefaultCluster", "broker-b", {1: "127.0.0.1:1"})
    table = {"broker-a": data, "broker-b": slaves_only}
    return dumps(ClusterInfo(table, {"DefaultCluster": ["broker-b", "broker-a"]}))


def answering(status):
    """A broker that says this, and is a cluster's only master."""
    return {
        RequestCode.GET_BROKER_HA_STATUS: body(msgspec.json.encode(status)),
        RequestCode.GET_BROKER_CLUSTER_INFO: body(cluster),
        RequestCode.GET_BROKER_RUNTIME_INFO: body(msgspec.json.encode(FIGURES)),
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: body(msgspec.json.encode(GROUPS)),
        RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: body(
            msgspec.json.encode(TopicList(["Orders", "%RETRY%payers"]))
        ),
    }


def rmq(*arguments, env=None):
    return CliRunner().invoke(app, list(arguments), env={"NAMESRV_ADDR": None, **(env or {})})


def cells(text):
    """The lines of a table; columns are two blanks apart."""
    return [re.split(r"  +", line.strip()) for line in text.splitlines()]


@pytest.mark.parametrize("command", [("broker", "ha-status"), ("admin", "haStatus"), ("admin", "getBrokerHAStatus")])
def test_a_master_has_a_row_for_each_slave(command):
    with serving(answering(MASTER)) as address:
        done = rmq(*command, "-b", address)
    assert done.exit_code == 0
    title, *_ = done.stdout.splitlines()
    assert title == f"{address} is a master; its log ends at 123,456; 1 of 2 slaves in sync"
    rows = cells(done.stdout)
    assert ["SLAVE", "ACKNOWLEDGED", "LAG", "LAG MS", "SPEED", "IN SYNC"] in rows
    assert ["127.0.0.1:1", "123,000", "456 B", "7", "0 B/s", "yes"] in rows
    assert ["127.0.0.1:2", "99", "123,357 B", "1,000,000 B/s", "no"] in rows


def test_a_slave_says_whom_it_follows():
    with serving(answering(SLAVE)) as address:
        done = rmq("admin", "haStatus", "-b", address)
    assert done.stdout == f"{address} is a slave of 127.0.0.1:10912; its log ends at 4,711\n"


@pytest.mark.parametrize("where", [["-c", "DefaultCluster"], ["-b", "broker-a"], []])
def test_masters_are_found_through_a_name_server(where):
    with serving(answering(MASTER)) as address:
        done = rmq("admin", "haStatus", "-n", address, *where, "--json")
    assert msgspec.convert(json.loads(done.stdout), dict[str, HaRuntimeInfo]) == {address: MASTER}


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (["-c", "Other"], "has no cluster Other: it has DefaultCluster"),
        (["-b", "broker-c"], "has no broker broker-c: did you mean broker-a?"),
        (["-b", "broker-b"], "has no master of broker-b: did you mean broker-a?"),
    ],
)
def test_whom_a_name_server_does_not_know(where, said):
    with serving(answering(MASTER)) as address:
        done = rmq("admin", "haStatus", "-n", address, *where)
    assert isinstance(done.exception, UnknownName)
    assert str(done.exception) == f"name server {address} {said}"


def test_a_broker_that_does_not_answer_does_not_hide_the_others():
    with serving(answering(MASTER)) as address:
        done = rmq("admin", "clusterList", "-n", address, "--json")
    rows = {row["addr"]: row for row in json.loads(done.stdout)}
    assert (rows[address]["version"], rows[address]["inTps"], rows[address]["trouble"]) == ("V5_4_0", 2.5, "")
    assert "cannot connect to 127.0.0.1:1" in rows["127.0.0.1:1"]["trouble"]


def test_name_servers_are_taken_from_the_environment():
    with serving(answering(MASTER)) as address:
        assert rmq("topic", "list", env={"NAMESRV_ADDR": address}).stdout == "Orders\n"


def test_watching_asks_again():
    asked = []

    def count(address, command):
        asked.append(command.code)
        return reply(command, body=msgspec.json.encode(TopicList([f"T{len(asked)}"])))

    stopped = []

    async def interrupt(seconds):
        stopped.append(seconds)
        if len(stopped) == 2:
            raise KeyboardInterrupt

    with (
        serving({RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: count}) as address,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("rmqkit.cli.frame.nouns._pause", interrupt)
        done = rmq("topic", "list", "-n", address, "--watch", "5", "--json")
    assert (done.exit_code, done.stdout, stopped) == (0, '["T1"]\n["T2"]\n', [5, 5])


@pytest.mark.parametrize(
    ("words", "incomplete", "found"),
    [
        (["topic", "route"], "O", "Orders"),
        (["group", "progress"], "p", "payers"),
        (["topic", "route", "-t"], "O", "Orders"),
        (["topic", "status", "Orders", "-c"], "D", "DefaultCluster"),
        (["broker", "status", "-b"], "broker-", "broker-a\nbroker-b"),
        (["topic"], "rou", "route"),
        ([], "clus", "cluster"),
        (["broker"], "ha", "ha-status"),
        (["admin"], "topicL", "topicList"),
        (["send"], "O", "Orders"),
        (["tail"], "O", "Orders"),
        (["replay"], "O", "Orders"),
    ],
)
def test_shells_complete_commands_and_live_names(words, incomplete, found, monkeypatch):
    monkeypatch.setattr("rmqkit.cli.frame.nouns._COMPLETION_MS", 1000 * SECONDS_MAX)  # how fast is not the question
    with serving(answering(MASTER)) as address:
        line = " ".join(["rmq", *words, incomplete])
        env = {
            "NAMESRV_ADDR": address,
            "_RMQ_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split()) - 1),
        }
        done = CliRunner().invoke(app, [], env=env, prog_name="rmq")
    assert done.stdout.strip() == found


def test_completion_is_silent_without_a_server():
    env = {"NAMESRV_ADDR": "127.0.0.1:1", "_RMQ_COMPLETE": "complete_bash", "COMP_WORDS": "rmq topic route O"}
    done = CliRunner().invoke(app, [], env={**env, "COMP_CWORD": "4"}, prog_name="rmq")
    assert (done.stdout.strip(), done.stderr) == ("", "")


def commands():
    return {
        (noun, verb): group.get_command(None, verb)
        for noun in NOUNS
        for group in [noun_group(noun)]
        for verb in group.list_commands(None)
    }


def test_java_s_names_stand_for_verbs():
    assert {tuple(ours.split()) for ours in JAVA.values()} <= commands().keys()


def test_every_verb_says_what_it_does():
    assert [name for name, command in commands().items() if not (command.help or "").strip()] == []


@pytest.mark.parametrize("words", [["--version"], ["topic", "list", "--help"], ["send", "--help"]])
def test_version_and_help_need_no_client(words):
    program = (
        "import sys; from rmqkit.cli import app; app(sys.argv[1:], standalone_mode=False); "
        "print(*sorted(name for name in sys.modules if name.count('.') < 2))"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    imported = set(done.stdout.splitlines()[-1].split())
    heavy = {
        "asyncio",
        "ssl",
        "msgspec",
        "uvloop",
        "rmqkit.admin",
        "rmqkit.client",
        "rmqkit.protocol",
        "rmqkit.remoting",
    }
    assert imported & heavy == set()
    assert "rich" not in imported or words != ["--version"]


def test_send_has_the_limit_of_producers():
    command = typer.main.get_command(app).get_command(None, "send")
    (option,) = [one for one in command.params if one.name == "bytes_max"]
    assert option.default == ProducerSettings().limits.message_bytes_max


def test_a_list_of_topics_needs_nothing_heavy():
    """Imports take most of the time of a command."""
    program = (
        "import sys; from rmqkit.cli import app; app(sys.argv[1:], standalone_mode=False); "
        "print(*sorted(name for name in sys.modules if name.count('.') < 2))"
    )
    with serving(answering(MASTER)) as address:
        asked = [sys.executable, "-c", program, "topic", "list", "-n", address]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=SECONDS_MAX, check=True)
    *topics, modules = done.stdout.splitlines()
    assert topics == ["Orders"]
    imported = set(modules.split())
    heavy = {
        "numpy",
        "pyspark",
        "uvloop",
        "rich",
        "lark",
        "prometheus_client",
        "rmqkit.broker",
        "rmqkit.store",
        "rmqkit.spark",
    }
    assert imported & heavy == set()
    assert {"rmqkit.admin", "rmqkit.remoting"} <= imported
