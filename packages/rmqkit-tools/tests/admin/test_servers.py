"""Operations on clusters, topics, brokers and name servers, against our own servers in this process."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from rmqkit.admin import Admin, Done
from rmqkit.admin.cluster.brokers import _progress
from rmqkit.admin.cluster.topics import Assigned, TopicStats, TopicUse, permission_of
from rmqkit.broker.settings import BrokerSettings
from rmqkit.errors import NoNameServer, PeerRefused, SettingsError, UnknownName
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.standalone import Standalone
from rmqkit.store.settings import StoreSettings

SECONDS_MAX = 60
CLUSTER, BROKER = "DefaultCluster", "broker-a"


def with_admin(root, scenario):
    """Run a scenario with an `Admin` of a name server and a broker."""

    async def main():
        broker = BrokerSettings(listen_port=0, bind_address="127.0.0.1", broker_name=BROKER)
        async with (
            Standalone(root, broker=broker, store=StoreSettings(commit_log_file_bytes=1 << 20)) as both,
            Admin(both.namesrv_address) as admin,
        ):
            await scenario(admin, both)

    asyncio.run(main())


def test_a_topic_from_creation_to_deletion(tmp_path):
    async def scenario(admin, both):
        done = await admin.topics.create("T", read_queues=3, write_queues=2, perm=4, attributes="+message.type=FIFO")
        assert done == [Done(both.broker_address, "topic T has 3 queues to read and 2 to write, permission r")]
        assert "T" in await admin.topics.names() and "T" in await admin.topics.names(CLUSTER)
        (changed,) = await admin.topics.set_permission("T", 6, broker=BROKER)
        assert changed.done == "permission of topic T changed from r to rw"
        (config,) = (await admin.topics.config("T")).values()
        assert (config.read_queue_nums, config.write_queue_nums, config.perm) == (3, 2, 6)
        assert config.attributes == {"message.type": "FIFO"}
        (unchanged,) = await admin.topics.set_permission("T", 6, cluster=CLUSTER)
        assert unchanged.done == "topic T has permission rw already"
        assert await admin.topics.clusters("T") == [CLUSTER]
        assert [done.where for done in await admin.topics.delete("T")] == [both.broker_address, both.namesrv_address]
        with pytest.raises(UnknownName, match="has no topic T"):
            await admin.topics.route("T")
        with pytest.raises(UnknownName, match="has no topic T"):
            await admin.topics.delete("T")

    with_admin(tmp_path, scenario)


def test_an_ordered_topic_is_reported_to_the_name_servers(tmp_path):
    async def scenario(admin, both):
        await admin.topics.create("T", broker=both.broker_address, write_queues=4, order=True)
        assert await admin.topics.order("T") == "broker-a:4"
        await admin.topics.set_order("T", "broker-b:2")
        await admin.topics.create("T", broker=BROKER, write_queues=3, order=True)
        assert await admin.topics.order("T") == "broker-b:2;broker-a:3"
        await admin.topics.delete("T", CLUSTER)
        assert await admin.topics.order("T") is None
        with pytest.raises(SettingsError, match="must be broker:count"):
            await admin.topics.set_order("T", "broker-a:many")

    with_admin(tmp_path, scenario)


def test_what_is_in_a_topic(tmp_path):
    async def scenario(admin, both):
        await admin.topics.create("T", read_queues=2, write_queues=2)
        for queue_id in (0, 1, 1):
            sent = await admin.brokers.send_test(BROKER, "T", queue_id=queue_id, body_bytes=10)
            assert (sent.broker_name, sent.queue_id, sent.result) == (BROKER, queue_id, "SEND_OK")
        group = msgspec.json.encode(SubscriptionGroupConfig(group_name="g"))
        await admin.calls.ask(both.broker_address, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=group)
        await admin.calls.commit_offset(both.broker_address, "g", MessageQueue("T", BROKER, 1), 1)
        status = await admin.topics.status("T", CLUSTER)
        assert [(row.queue_id, row.min_offset, row.max_offset) for row in status.queues] == [(0, 0, 1), (1, 0, 2)]
        assert all(row.last_updated_timestamp > 0 for row in status.queues)
        assert await admin.topics.groups("T") == ["g"]
        assert TopicUse(CLUSTER, "T", "g") in await admin.topics.uses()
        (stats,) = await admin.topics.stats("T")
        assert (stats.consumer_group, stats.accumulation, stats.in_24_hours, stats.out_24_hours) == ("g", 2, 3, 0)
        assert [row.topic for row in await admin.topics.stats(active_only=True)] == ["T"]
        progress = {(row.topic, row.group, row.queue_id): row.diff for row in await admin.brokers.consume_stats(BROKER)}
        assert progress["T", "g", 1] == 1
        (row,) = await admin.clusters.brokers(CLUSTER)
        assert (row.in_today, row.in_yesterday, row.broker_id, row.active) == (3, 0, 0, True)
        failed = await admin.brokers.send_test(both.broker_address, "T", queue_id=7)
        assert "queueId[7] is illegal" in failed.result

    with_admin(tmp_path, scenario)


@pytest.mark.parametrize(
    "key",
    [
        b'{"topic":"T","brokerName":"b","queueId":%d}',
        b'{"queueId":"%d","topic":"T","brokerName":"b"}',
        b'{"topic": "T", "brokerName": "b", "queueId": %d}',
        b'"{\\"topic\\":\\"T\\",\\"brokerName\\":\\"b\\",\\"queueId\\":%d}"',
    ],
)
def test_progress_is_read_however_its_queues_are_written(key):
    table = b",".join(
        key % queue + b':{"brokerOffset":%d,"consumerOffset":2,"lastTimestamp":3}' % (queue + 3) for queue in (1, 0)
    )
    body = b'{"brokerAddr":null,"consumeStatsList":[{"g":[{"consumeTps":0.0,"offsetTable":{%b}}],"h":[]}]}' % table
    rows = [(row.group, row.topic, row.broker_name, row.queue_id, row.diff) for row in _progress(memoryview(body), 1)]
    assert rows == [("g", "T", "b", 0, 1), ("g", "T", "b", 1, 2)]
    assert [row.queue_id for row in _progress(body, 2)] == [1]


def test_a_topic_that_nobody_uses_has_figures_of_its_own(tmp_path):
    async def scenario(admin, both):
        await admin.topics.create("T")
        assert await admin.topics.stats("T") == [TopicStats(topic="T")]
        assert TopicUse(CLUSTER, "T", "") in await admin.topics.uses()

    with_admin(tmp_path, scenario)


def test_queues_are_shared_out_on_average(tmp_path):
    async def scenario(admin, both):
        await admin.topics.create("T", read_queues=3)
        shared = [Assigned("a", BROKER, 0), Assigned("a", BROKER, 1), Assigned("b", BROKER, 2)]
        assert await admin.topics.allocate("T", ["b", "a"]) == shared

    with_admin(tmp_path, scenario)


def test_settings_of_brokers(tmp_path):
    async def scenario(admin, both):
        changed = {"flushIntervalCommitLog": "321"}
        assert await admin.brokers.update_config(changed, BROKER) == [
            Done(both.broker_address, "flushIntervalCommitLog=321")
        ]
        for told in (await admin.brokers.config(BROKER), await admin.brokers.config(cluster=CLUSTER)):
            assert told[both.broker_address]["flushIntervalCommitLog"] == "321"
        with pytest.raises(PeerRefused, match="black list"):
            await admin.brokers.update_config({"brokerConfigPath": "/x"})
        status = (await admin.brokers.status(BROKER))[both.broker_address]
        assert list(status) == sorted(status) and status["brokerActive"] == "true"

    with_admin(tmp_path, scenario)


def test_a_broker_is_closed_to_producers(tmp_path):
    async def scenario(admin, both):
        await admin.topics.create("T")
        await admin.brokers.update_config({"brokerPermission": "4"})
        async with asyncio.timeout(SECONDS_MAX):
            while (await admin.topics.route("T")).queue_datas[0].perm != 4:  # it registers with what it lets others do
                await asyncio.sleep(0.01)
                admin.calls.forget()

    with_admin(tmp_path, scenario)


@pytest.mark.parametrize("what", ["expired-cq", "unused-topic", "expired-commitlog"])
def test_cleaning(tmp_path, what):
    async def scenario(admin, both):
        assert await admin.brokers.clean(what, cluster=CLUSTER) == [Done(both.broker_address, f"cleaned {what}")]

    with_admin(tmp_path, scenario)


def test_key_values_and_settings_of_name_servers(tmp_path):
    async def scenario(admin, both):
        names = admin.name_servers
        assert await names.values("N") == {} and await names.value("N", "a") is None
        assert await names.put_value("N", "a", "b") == [Done(both.namesrv_address, "N a=b")]
        assert await names.values("N") == {"a": "b"} and await names.value("N", "a") == "b"
        await names.delete_value("N", "a")
        assert await names.values("N") == {}
        await names.update_config({"waitSecondsForService": "7"})
        assert (await names.config())[both.namesrv_address]["waitSecondsForService"] == "7"

    with_admin(tmp_path, scenario)


def test_a_broker_is_taken_out_of_all_routes_and_put_back(tmp_path):
    async def scenario(admin, both):
        await admin.topics.create("T")
        for change, broker, perm in (
            (admin.name_servers.wipe_write_permission, BROKER, 4),
            (admin.name_servers.add_write_permission, both.broker_address, 6),
        ):
            counts = await change(broker)
            assert counts == {both.namesrv_address: len(await admin.topics.names())}
            admin.calls.forget()
            assert [data.perm for data in (await admin.topics.route("T")).queue_datas] == [perm]
        with pytest.raises(UnknownName, match="has no broker broker-b"):
            await admin.name_servers.wipe_write_permission("broker-b")

    with_admin(tmp_path, scenario)


def test_brokers_are_known_by_name_and_address(tmp_path):
    async def scenario(admin, both):
        calls, at = admin.calls, {BROKER: both.broker_address}
        assert await calls.masters() == await calls.masters(CLUSTER) == await calls.masters(broker=BROKER) == at
        assert await calls.masters(broker=both.broker_address) == await calls.targets(None, None) == at
        assert await calls.masters(broker="127.0.0.1:1") == {"127.0.0.1:1": "127.0.0.1:1"}
        assert await calls.addresses("127.0.0.1:1", None) == ["127.0.0.1:1"]
        for wrong in ({"broker": "broker-b"}, {"cluster": "Other"}):
            with pytest.raises(UnknownName):
                await calls.masters(**wrong)
        (await calls.cluster()).cluster_addr_table["Other"] = []
        with pytest.raises(SettingsError, match="-c: DefaultCluster, Other"):
            await calls.targets(None, None)

    with_admin(tmp_path, scenario)


def test_name_servers_are_asked_in_turn(tmp_path):
    async def scenario(admin, both):
        async with Admin(f"127.0.0.1:1;{both.namesrv_address}") as second:
            assert await second.topics.names() == await admin.topics.names()
        async with Admin("127.0.0.1:1;127.0.0.1:2") as none:
            with pytest.raises(NoNameServer, match=r"127\.0\.0\.1:1: .*127\.0\.0\.1:2: "):
                await none.topics.names()

    with_admin(tmp_path, scenario)


@pytest.mark.parametrize(("text", "bits"), [("6", 6), ("rw", 6), ("R", 4), ("4", 4), ("w", 2), ("2", 2)])
def test_permissions_are_numbers_or_letters(text, bits):
    assert permission_of(text) == bits


def test_name_servers_have_to_be_addresses():
    with pytest.raises(SettingsError, match="host:port"):
        Admin("nowhere")
