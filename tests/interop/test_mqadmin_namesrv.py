"""Apache's mqadmin with our name server and broker: the same commands as with Apache's servers, the same output.

Both sides run one list of commands, each in one JVM and at the same time. Addresses, and numbers that change with time,
are replaced before outputs are compared.
"""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.interop.apache import BROKER_NAME, CLUSTER, open_store_with_apache
from tests.interop.kit import ApacheKit
from tests.interop.mqadmin import named_outputs
from tests.interop.standalone import run_standalone

TOPIC = "AdminTopic"
ORDER = f"{BROKER_NAME}:4"
ROUTE = f"topicRoute -t {TOPIC}"
WITHOUT_ROCKSDB = "RMQ_SYS_ROCKSDB_"
"""The prefix of topics of Apache's broker for a transaction store that needs RocksDB."""

COMMANDS = {
    "create topic": f"updateTopic -c {CLUSTER} -t {TOPIC} -r 4 -w 4",
    "route": ROUTE,
    "route of a missing topic": "topicRoute -t Missing",
    "clusters of a topic": f"topicClusterList -t {TOPIC}",
    "clusters": "clusterList",
    "clusters with totals": "clusterList -m",
    "put a value": f"updateKvConfig -s ORDER_TOPIC_CONFIG -k {TOPIC} -v {ORDER}",
    "put another value": "updateKvConfig -s PROJECT_CONFIG -k 10.0.0.1 -v project-a",
    "get a value": f"updateOrderConf -m get -t {TOPIC}",
    "delete a value": f"deleteKvConfig -s ORDER_TOPIC_CONFIG -k {TOPIC}",
    "get a deleted value": f"updateOrderConf -m get -t {TOPIC}",
    "settings": "getNamesrvConfig",
    "change a setting": "updateNamesrvConfig -k waitSecondsForService -v 50",
    "change a fixed setting": "updateNamesrvConfig -k kvConfigPath -v /nowhere",
    "changed settings": "getNamesrvConfig",
    "wipe write permission": f"wipeWritePerm -b {BROKER_NAME}",
    "route without write permission": ROUTE,
    "add write permission": f"addWritePerm -b {BROKER_NAME}",
    "route with write permission": ROUTE,
    "topics": "topicList",
    "broker": "brokerStatus -b BROKER",
}
NAMESRV_FLAGS = """
    configBlackList deleteTopicWithBrokerRegistration enableAllTopicList enableTopicList needWaitForService
    notifyMinBrokerIdChanged orderMessageEnable returnOrderTopicConfigToBroker scanNotActiveBrokerInterval
    supportActingMaster unRegisterBrokerQueueCapacity waitSecondsForService
""".split()


@dataclass(frozen=True, slots=True)
class Outputs:
    """The commands' output by name, and the KV file that they left."""

    by_name: dict[str, str]
    kv_file: Path

    def settings(self, name: str) -> dict[str, str]:
        """Return the printed settings."""
        lines = [line.partition("=") for line in self.by_name[name].splitlines()[1:]]
        return {key.strip(): value.strip() for key, _, value in lines}


@pytest.fixture(scope="module")
def both(apache_kit: ApacheKit, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Outputs, Outputs]]:
    """Return Apache's outputs and ours."""
    theirs, ours = tmp_path_factory.mktemp("theirs"), tmp_path_factory.mktemp("ours")
    config = ours / "broker.conf"
    config.write_text(f"brokerClusterName={CLUSTER}\nbrokerName={BROKER_NAME}\n")
    with (
        open_store_with_apache(apache_kit, theirs / "store", theirs) as pair,
        run_standalone(ours / "store", ours, "-c", str(config)) as running,
        ThreadPoolExecutor(2) as pool,
    ):
        from_apache = pool.submit(named_outputs, apache_kit, COMMANDS, pair.namesrv_addr, pair.broker_addr, theirs)
        from_us = pool.submit(named_outputs, apache_kit, COMMANDS, running.namesrv_addr, running.broker_addr, ours)
        yield (
            Outputs(from_apache.result(), theirs / "namesrv" / "kvConfig.json"),
            Outputs(from_us.result(), ours / "store" / "config" / "kvConfig.json"),
        )


def without_numbers(text: str) -> str:
    """Replace numbers that change with time by one letter, with one blank between columns."""
    return re.sub(r"[ \t]+", " ", re.sub(r"\d+(\.\d+)?", "N", text))


@pytest.mark.parametrize(
    "name",
    [
        "create topic",
        "route",
        "route of a missing topic",
        "clusters of a topic",
        "clusters with totals",
        "put a value",
        "put another value",
        "get a value",
        "delete a value",
        "get a deleted value",
        "change a setting",
        "change a fixed setting",
        "route without write permission",
        "route with write permission",
    ],
)
def test_the_output_is_the_same(both: tuple[Outputs, Outputs], name: str) -> None:
    theirs, ours = both
    assert ours.by_name[name] == theirs.by_name[name] != ""


@pytest.mark.parametrize("name", ["clusters", "wipe write permission", "add write permission"])
def test_the_output_is_the_same_but_for_its_figures(both: tuple[Outputs, Outputs], name: str) -> None:
    theirs, ours = both
    assert without_numbers(ours.by_name[name]) == without_numbers(theirs.by_name[name])


def test_the_cluster_list_has_a_line_for_the_broker(both: tuple[Outputs, Outputs]) -> None:
    _, ours = both
    title, line = ours.by_name["clusters"].splitlines()
    assert title.split()[:4] == ["#Cluster", "Name", "#Broker", "Name"]
    assert line.split()[:5] == [CLUSTER, BROKER_NAME, "0", "BROKER", "V5_4_0"]
    assert line.split()[-1] == "true"


def test_the_write_permission_goes_and_comes_back(both: tuple[Outputs, Outputs]) -> None:
    _, ours = both
    perms = [
        json.loads(ours.by_name[name].replace("0:", '"0":'))["queueDatas"][0]["perm"]
        for name in ("route", "route without write permission", "route with write permission")
    ]
    assert perms == [6, 4, 6]


def test_every_topic_of_the_broker_is_touched_by_the_write_permission(both: tuple[Outputs, Outputs]) -> None:
    _, ours = both
    count = len(ours.by_name["topics"].splitlines())
    assert ours.by_name["wipe write permission"].endswith(f" OK, {count}")
    assert ours.by_name["add write permission"].endswith(f" OK, {count}")


def test_a_fresh_broker_has_the_same_topics(both: tuple[Outputs, Outputs]) -> None:
    theirs, ours = both
    expected = {topic for topic in theirs.by_name["topics"].splitlines() if not topic.startswith(WITHOUT_ROCKSDB)}
    assert set(ours.by_name["topics"].splitlines()) == expected


def test_the_name_server_s_own_settings_have_the_same_values(both: tuple[Outputs, Outputs]) -> None:
    theirs, ours = both
    for name, seconds in (("settings", "45"), ("changed settings", "50")):
        their_flags, our_flags = theirs.settings(name), ours.settings(name)
        assert {key: our_flags[key] for key in NAMESRV_FLAGS} == {key: their_flags[key] for key in NAMESRV_FLAGS}
        assert our_flags["waitSecondsForService"] == seconds


def test_the_kv_file_is_the_same(both: tuple[Outputs, Outputs]) -> None:
    theirs, ours = both
    stored = json.loads(ours.kv_file.read_bytes())
    assert stored == json.loads(theirs.kv_file.read_bytes())
    assert stored["configTable"]["PROJECT_CONFIG"] == {"10.0.0.1": "project-a"}


def test_the_broker_reports_only_keys_that_apache_s_broker_reports(both: tuple[Outputs, Outputs]) -> None:
    def keys(outputs: Outputs) -> set[str]:
        found = {line.partition(":")[0].strip() for line in outputs.by_name["broker"].splitlines()}
        return {re.sub("_/.*", "_<path>", key) for key in found}

    theirs, ours = both
    assert keys(ours) - keys(theirs) == {"brokerVersion"}
    assert len(keys(ours)) > 40
