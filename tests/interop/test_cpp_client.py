"""Apache's C++ client: it reports the same results with Apache's servers and with ours.

`cpp/client.py` runs once with each server, with every kind of send and consumer of the client's C interface, and a
second time to check the offsets of groups. If its package cannot be fetched or loaded, the tests are skipped, as for Go
and Node.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rmqkit import Message, sync
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command
from rmqkit.protocol.ids import decode_offset_id
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.testing import LocalCluster
from tests.faults.spark.servers import set_queues
from tests.interop.apache import QUICK_CONF, ApachePair, ask
from tests.interop.go_and_node import Program, prepare_cpp
from tests.interop.kit import Unavailable
from tests.interop.server_process import wait_until
from tests.waiting import SECONDS

QUEUES = {"broadcast": 1, "dead": 1, "delayed": 1, "filters": 4, "orderly": 4, "pulled": 1, "refused": 1, "retried": 1}
QUEUES |= {"ready": 1, "sends": 1}
SCENARIOS = sorted({*QUEUES, "created"} - {"dead", "ready"})
LATER = "again"


@pytest.fixture(scope="module")
def cpp() -> Program:
    try:
        return prepare_cpp()
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def ours() -> Iterator[tuple[str, str]]:
    quick = {key: value for key, value in QUICK_CONF.items() if key != "waitTimeMillsInSendQueue"}
    with LocalCluster(settings=quick) as cluster:
        yield cluster.name_server, cluster.brokers[0].address


@pytest.fixture(scope="module", params=["apache", "rmqkit"])
def server(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Return the addresses of a name server and of a broker."""
    if request.param == "rmqkit":
        return request.getfixturevalue("ours")
    pair = request.getfixturevalue("apache")
    return pair.namesrv_addr, pair.broker_addr


@pytest.fixture(scope="module")
def told(cpp: Program, server: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    home = tmp_path_factory.mktemp("cpp")
    make_topics(server, [*QUEUES.items(), ("filters-tags", 0), ("created", 0)])
    return cpp.run(home, *server, "Cpp", *SCENARIOS) | cpp.run(home, *server, "Cpp", LATER)


def make_topics(server: tuple[str, str], queue_counts: list[tuple[str, int]]) -> None:
    """Create the topics and the retry topics of their groups. Return when the name server knows them."""
    wanted = {f"Cpp-{name}": count for name, count in queue_counts if count}
    wanted |= {f"%RETRY%Cpp-{name}": 1 for name, _ in queue_counts}
    for topic, count in wanted.items():
        set_queues(server[1], topic, count)
    route = RequestCode.GET_ROUTEINFO_BY_TOPIC
    for topic in wanted:
        command = Command(route, fields={"topic": topic})
        wait_until(lambda command=command: ask(server[0], command).code == ResponseCode.SUCCESS, SECONDS, topic)


@pytest.mark.parametrize("scenario", [*SCENARIOS, LATER])
def test_a_cpp_client_sees_the_same_of_every_server(scenario: str, told: dict[str, Any], cpp: Program) -> None:
    assert told[scenario] == cpp.outcome[scenario]


def test_what_a_cpp_client_gives_up_lies_in_the_dead_letters(
    cpp: Program, ours: tuple[str, str], tmp_path: Path
) -> None:
    make_topics(ours, [("dead", 1), ("ready", 1)])
    group = msgspec.json.encode(SubscriptionGroupConfig(group_name="Cpp-dead", retry_max_times=1))
    made = ask(ours[1], Command(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=group))
    assert made.code == ResponseCode.SUCCESS
    stored = "CLUSTER DELAY MSG_REGION ORIGIN_MESSAGE_ID REAL_QID REAL_TOPIC RETRY_TOPIC TAGS TRACE_ON UNIQ_KEY WAIT"
    assert cpp.run(tmp_path, *ours, "Cpp", "dead")["dead"] == [f"poison at 0, retries 2, {stored}"]


def test_apache_keeps_no_dead_letter_of_a_client_that_names_no_origin(apache: ApachePair) -> None:
    """Clients such as the C++ client do not get the message again. The test above shows what our broker does
    instead.
    """
    with sync.Producer("Cpp-origin", apache.namesrv_addr) as producer:
        sent = producer.send(Message(topic="Cpp-origin", body=b"poison"))
    *_, offset = decode_offset_id(sent.offset_msg_id)
    fields = {"offset": str(offset), "group": "Cpp-origin", "delayLevel": "-1"}
    answer = ask(apache.broker_addr, Command(RequestCode.CONSUMER_SEND_MSG_BACK, fields=fields))
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "NullPointerException" in (answer.remark or "")
