"""`rmq lite` against our servers: lists, one lite topic, groups, clients, messages, deletions."""

from __future__ import annotations

import asyncio
import json

import pytest

from rmqkit.broker.settings import BrokerSettings
from rmqkit.cli.admin.lite import LITE
from rmqkit.client.lite.consumer import LiteConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.protocol.message import Message
from tests.cli.in_process import rmq as run
from tests.client.peers import standalone

pytestmark = pytest.mark.real_time


@pytest.fixture(scope="module")
def namesrv(tmp_path_factory):
    broker = BrokerSettings(listen_port=0, bind_address="127.0.0.1", broker_name="broker-a")
    with standalone(tmp_path_factory.mktemp("lite"), broker=broker) as address:
        yield address


@pytest.fixture
def rmq(namesrv, monkeypatch):
    monkeypatch.setenv("NAMESRV_ADDR", namesrv)
    return lambda *arguments: run("lite", *arguments)


@pytest.fixture(scope="module")
def chats(namesrv):
    """The parent Chats with two groups, whose clients have received a part of the messages."""
    attributes = "+message.type=LITE,+lite.topic.expiration=20"
    assert not run("topic", "create", "Chats", "-b", "broker-a", "-a", attributes, "-n", namesrv).returncode
    asyncio.run(_fill(namesrv))
    return "Chats"


async def _fill(namesrv):
    async with Producer("p", namesrv) as producer:
        for name, count in (("s-1", 3), ("s-2", 1), ("t-1", 2)):
            for i in range(count):
                message = Message(topic="Chats", body=f"{name}:{i}".encode(), tags="T", keys=["k"], lite_topic=name)
                await producer.send(message)
    async with LiteConsumer("answers", "Chats", namesrv) as consumer:
        await consumer.subscribe("s-1", "s-2")
        received = 0
        async for message in consumer:
            received += 1
            if message.lite_topic == "s-1" and message.number == 0:
                await message.ack()
            if received == 4:
                break


def columns(text, *names):
    """The cells of some columns of the table that has them."""
    lines = text.splitlines()
    head = next(place for place, line in enumerate(lines) if all(name in line for name in names))
    rows = [line for line in lines[head + 1 :] if line]
    ends = [lines[head].index(name) + len(name) for name in names]
    return [tuple(row[:end].split()[-1] for end in ends) for row in rows]


def test_parents_are_listed_with_their_counts(rmq, chats):
    out = rmq("parents").stdout
    assert out.split() == ("PARENT LITE TOPICS EXPIRE AFTER GROUPS BROKERS Chats 3 20 min answers broker-a").split(), (
        out
    )
    (row,) = json.loads(rmq("parents", "--json").stdout)
    assert (row["parent"], row["liteTopics"], row["lifetimeMinutes"], row["groups"]) == ("Chats", 3, 20, ["answers"])


def test_names_are_listed_by_prefix_and_page_by_page(rmq, chats):
    out = rmq("list", chats, "--prefix", "s-", "-m", 1).stdout
    assert out.splitlines()[1].startswith("s-1  ")
    assert "s-2" not in out
    assert out.splitlines()[-2:] == [
        "1 of 3 lite topics of Chats",
        "the next page: rmq lite list Chats --prefix s- --count 1 --after s-1",
    ]
    second = rmq("list", chats, "--prefix", "s-", "-m", 1, "--after", "s-1").stdout
    assert second.splitlines()[1].startswith("s-2  ")
    assert "the next page" not in second


def test_a_list_shows_the_lag_of_a_group(rmq, chats):
    found = json.loads(rmq("list", chats, "-g", "answers", "--json").stdout)
    assert [(one["liteTopic"], one["maxOffset"], one["consumerOffset"]) for one in found["rows"]] == [
        ("s-1", 3, 1),
        ("s-2", 1, 0),
        ("t-1", 2, 0),
    ]
    assert found["total"] == 3


def test_a_prefix_without_names_says_so(rmq, chats):
    assert rmq("list", chats, "--prefix", "zz").stdout == (
        "no lite topic begins with zz\n0 of 3 lite topics of Chats\n"
    )


def test_one_lite_topic_has_its_bounds_and_its_groups(rmq, chats):
    out = rmq("show", chats, "s-1").stdout
    assert columns(out, "FIRST", "NEXT", "MESSAGES", "LIFE")[0] == ("0", "3", "3", "1")
    group, offset, lag = out.splitlines()[-1].split()[0], *out.splitlines()[-1].split()[2:4]
    assert (group, offset, lag) == ("answers", "1", "2")


def test_an_unknown_name_has_no_messages(rmq, chats):
    shown = rmq("show", chats, "nothing")
    assert shown.returncode == 0
    assert "nothing has no messages: it was never written, has expired, or was deleted" in shown.stdout
    read = rmq("read", chats, "nothing")
    assert (read.returncode, read.stdout) == (5, "")
    assert "has no lite topic nothing; it was never written, has expired, or was deleted" in read.stderr


@pytest.mark.parametrize("verb", ["show", "read", "delete"])
def test_a_name_that_is_not_allowed_is_refused_in_one_line(rmq, chats, verb):
    found = rmq(verb, chats, "a/b")
    assert found.returncode
    assert found.stderr.count("\n") == 1
    assert "lite topic 'a/b': lite topic can only contain alphanumeric characters" in found.stderr


def test_a_parent_shows_its_groups(rmq, chats):
    last = rmq("parent", chats).stdout.splitlines()[-1].split()
    assert last == "answers Shared 2,000 0 5".split()


def test_a_topic_of_another_type_is_no_parent(rmq, namesrv):
    assert not run("topic", "create", "Plain", "-b", "broker-a", "-n", namesrv).returncode
    found = rmq("parent", "Plain")
    assert found.returncode
    assert "Topic [Plain] type not match." in found.stderr


def test_a_group_shows_its_backlog_and_its_clients(rmq, chats, namesrv):
    async def with_client():
        async with LiteConsumer("readers", "Chats", namesrv) as consumer:
            await consumer.subscribe("t-1")
            shown = await asyncio.to_thread(rmq, "group", "readers", "-k", 1, "--json")
            named = await asyncio.to_thread(rmq, "client", chats, "readers", _client_id(shown))
            return json.loads(shown.stdout), named.stdout

    group, client = asyncio.run(with_client())
    assert (group["parent"], group["lag"], len(group["top"])) == ("Chats", 6, 1)
    assert (group["top"][0]["liteTopic"], group["top"][0]["lagCount"]) == ("s-1", 3)
    assert [one["liteTopicCount"] for one in group["clients"]] == [1]
    assert client.splitlines()[-1] == "t-1"


def _client_id(shown):
    return json.loads(shown.stdout)["clients"][0]["clientId"]


def test_a_client_that_is_unknown_is_reported_with_a_remedy(rmq, chats):
    found = rmq("client", chats, "answers", "nobody")
    assert found.returncode == 5
    assert "has no client nobody; see its clients: rmq lite group answers" in found.stderr


@pytest.mark.parametrize(
    ("start", "expected"), [("first", "012"), ("1", "12"), ("-1", "2"), ("-9", "012"), ("3", ""), ("9", "")]
)
def test_messages_are_read_from_a_number_on(rmq, chats, start, expected):
    lines = rmq("read", chats, "s-1", "--from", start).stdout.splitlines()
    assert [(line.split()[0], line.split()[-1]) for line in lines] == [(i, f"s-1:{i}") for i in expected]


def test_a_limited_read_stops_and_json_has_whole_messages(rmq, chats):
    out = rmq("read", chats, "s-1", "-m", 1, "--json").stdout
    one = json.loads(out)
    assert (one["number"], one["message"]["body"], one["message"]["topic"]) == (0, "s-1:0", "Chats")


def test_a_start_that_is_no_number_is_refused(rmq, chats):
    found = rmq("read", chats, "s-1", "--from", "soon")
    assert found.returncode
    assert "must be first, new, a number, or -N for the last N messages" in " ".join(found.stderr.split())


def test_a_deleted_lite_topic_is_gone_and_the_others_stay(rmq, chats, namesrv):
    async def send():
        async with Producer("p", namesrv) as producer:
            await producer.send(Message(topic="Chats", body=b"x", lite_topic="gone"))

    asyncio.run(send())
    assert rmq("delete", chats, "gone", "--yes").stdout == "broker-a: lite topic gone of Chats deleted\n"
    assert "gone" not in rmq("list", chats).stdout
    assert "has expired" in rmq("show", chats, "gone").stdout
    again = rmq("delete", chats, "gone", "--yes")
    assert again.returncode == 5
    assert "s-1" in rmq("list", chats).stdout


@pytest.mark.parametrize(("to", "number"), [("first", 0), ("end", 3), ("2", 2), ("2020-01-01T00:00:00", 0)])
def test_the_offset_of_a_group_is_reset(rmq, chats, namesrv, to, number):
    made = ("group", "create", "moved", "-b", "broker-a", "--attributes", "+lite.bind.topic=Chats", "-n", namesrv)
    assert not run(*made).returncode
    assert (
        rmq("reset", chats, "s-1", "moved", to).stdout == f"broker-a: group moved continues at number {number} of s-1\n"
    )
    shown = json.loads(rmq("show", chats, "s-1", "--json").stdout)
    assert next(one["consumerOffset"] for one in shown["groups"] if one["group"] == "moved") == number
    assert not run("group", "delete", "moved", "-b", "broker-a", "--yes", "-n", namesrv).returncode


def test_a_reset_to_nowhere_is_refused(rmq, chats):
    found = rmq("reset", chats, "s-1", "answers", "soon")
    assert found.returncode
    assert "time 'soon' must be" in found.stderr
    assert "not in consume queue range [0-3]" in rmq("reset", chats, "s-1", "answers", "9").stderr


def test_a_dispatch_is_triggered(rmq, chats):
    assert rmq("dispatch", "answers").stdout == ("broker-a: the lite topics of group answers are looked at again\n")
    found = rmq("dispatch", "nobody")
    assert found.returncode
    assert "Group [nobody] not exist." in found.stderr


def test_mqadmin_s_commands_have_their_own_options(rmq, chats):
    def admin(*words):
        found = run("admin", *words)
        assert not found.returncode, found.stderr
        return found.stdout

    assert "broker-a" in admin("getBrokerLiteInfo", "-d")
    assert "20 min" in admin("getParentTopicInfo", "-p", chats)
    assert "answers" in admin("getLiteTopicInfo", "-p", chats, "-l", "s-1")
    assert "s-1" in admin("getLiteGroupInfo", "-p", chats, "-g", "answers", "-k", "5")
    assert "lag" in admin("getLiteGroupInfo", "-p", chats, "-g", "answers", "-l", "s-1").lower()
    assert "looked at again" in admin("triggerLiteDispatch", "-p", chats, "-g", "answers")


def test_a_group_that_gets_nothing_is_explained(rmq, chats):
    found = rmq("explain", chats, "t-1", "answers")
    assert found.returncode == 0
    assert found.stdout.startswith("no client online: No client of group answers is online.\n")
    assert rmq("explain", chats, "never", "answers").returncode == 5
    past = json.loads(rmq("explain", chats, "s-1", "answers", "-o", 0, "--json").stdout)
    assert past["cause"] == "consumed"


def test_every_verb_has_help():
    for name in LITE.list_commands(None):
        assert LITE.get_command(None, name).help
