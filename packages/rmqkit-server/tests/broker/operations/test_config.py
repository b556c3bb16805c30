"""The broker's settings, shown and changed: 26, 25 (remoting.md §4.4, behaviour.md §9.9)."""

from __future__ import annotations

import json
import time

import pytest

from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import decode_fields, request
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.message import read_messages
from rmqkit.protocol.schemas.pull import PullFlag, PullMessageRequest, QueryMessageRequest
from rmqkit.protocol.schemas.topics import RouteRequest, TopicRoute
from rmqkit.remoting.authentication import AuthenticationSettings
from rmqkit.settings import SECRET, Configuration, parse_properties
from tests.broker.cluster import Cluster

OK, ERROR, NO_PERMISSION = 0, 1, 16

PULL = PullMessageRequest(
    consumer_group="g",
    topic="T",
    queue_id=0,
    queue_offset=0,
    max_msg_nums=32,
    sys_flag=PullFlag.SUBSCRIPTION,
    commit_offset=0,
    suspend_timeout_millis=0,
    sub_version=0,
    subscription="*",
)


async def shown(cluster):
    answer = await cluster.call(RequestCode.GET_BROKER_CONFIG)
    return parse_properties(answer.body.decode()), json.loads(decode_fields(answer)["version"])


async def change(cluster, text):
    return await cluster.call(RequestCode.UPDATE_BROKER_CONFIG, body=text.encode())


async def test_all_settings_are_shown_sorted_with_the_store_s(cluster):
    body = (await cluster.call(RequestCode.GET_BROKER_CONFIG)).body.decode()
    keys = [line.partition("=")[0] for line in body.splitlines()]
    assert keys == sorted(keys)
    settings, version = await shown(cluster)
    assert settings["brokerName"] == "broker-a"
    assert settings["mappedFileSizeCommitLog"] == str(1 << 20)
    assert settings["authenticationEnabled"] == "false"
    assert version["counter"] == 0


def test_a_secret_is_shown_to_nobody():
    users = AuthenticationSettings(initial_user='{"username":"u","password":"p"}')
    texts = Configuration([users]).texts()
    assert (texts["initAuthenticationUser"], texts["innerClientAuthenticationCredentials"]) == (SECRET, "")


@pytest.mark.parametrize(
    ("text", "code", "remark"),
    [
        *(
            (f"longPollingEnable=false\n{key}=1", NO_PERMISSION, "Can not update config in black list.")
            for key in (
                "brokerConfigPath",
                "rocketmqHome",
                "configBlackList",
                "listenPort",
                "flushDiskType",
                "brokerId",
            )
        ),
        ("longPollingEnable=\\u00zz", ERROR, "string2Properties error"),
        ("longPollingEnable=perhaps", ERROR, "request: longPollingEnable=perhaps must be true or false"),
        (
            "longPollingEnabled=true",
            ERROR,
            "unknown key longPollingEnabled, did you mean longPollingEnable?; nothing was changed",
        ),
        ("useSpinLock=true", ERROR, "useSpinLock: without effect here; nothing was changed"),
        ("sendMessageThreadPoolNums=many", ERROR, "request: sendMessageThreadPoolNums=many must be a whole number"),
        (
            "timerStopEnqueue=true",
            ERROR,
            (
                "request: timerStopEnqueue=true is not supported: timed messages are always accepted and delivered; "
                "use timerStopEnqueue=false"
            ),
        ),
        (
            "messageStorePlugIn=x",
            ERROR,
            (
                "request: messageStorePlugIn=x is not supported: storage engines other than files are not built; "
                "leave it out"
            ),
        ),
    ],
)
async def test_what_cannot_be_changed_leaves_everything_as_it_was(text, code, remark, cluster):
    before = await shown(cluster)
    answer = await change(cluster, text)
    assert (answer.code, answer.remark) == (code, remark)
    assert await shown(cluster) == before


async def test_a_change_has_a_new_version_and_is_kept_in_the_file(tmp_path):
    file = tmp_path / "broker.conf"
    file.write_text("# ours\nbrokerName=broker-a\nmaxMessageSize = 5\n")

    cluster = Cluster(tmp_path / "store")
    broker = cluster.standalone.broker
    broker.configuration = Configuration(broker.configuration.settings, file=file)
    async with cluster:
        assert (await change(cluster, "maxMessageSize=4096\nlongPollingEnable=false")).code == OK
        settings, version = await shown(cluster)
        assert (settings["maxMessageSize"], settings["longPollingEnable"]) == ("4096", "false")
        assert version["counter"] == 1
    assert file.read_text() == "# ours\nbrokerName=broker-a\nmaxMessageSize=4096\nlongPollingEnable=false\n"


async def test_a_file_that_cannot_be_written_leaves_everything_as_it_was(tmp_path):
    cluster = Cluster(tmp_path / "store")
    broker = cluster.standalone.broker
    (tmp_path / "a-file").touch()
    broker.configuration = Configuration(broker.configuration.settings, file=tmp_path / "a-file" / "broker.conf")
    async with cluster:
        before = await shown(cluster)
        answer = await change(cluster, "longPollingEnable=false")
        assert answer.code == ERROR
        assert answer.remark.startswith(f"cannot write {tmp_path}/a-file/broker.conf: ")
        assert await shown(cluster) == before


async def test_what_has_no_effect_is_shown_kept_and_reported_once(tmp_path, caplog):
    file = tmp_path / "broker.conf"

    cluster = Cluster(tmp_path / "store")
    broker = cluster.standalone.broker
    broker.configuration = Configuration(broker.configuration.settings, file=file)
    async with cluster:
        settings, _ = await shown(cluster)
        assert (settings["maxTopicLength"], settings["timerCheckMetricsWhen"]) == ("127", "05")
        text = "maxTopicLength=200\nwakeFlushWhenPutMessage=false\ntimerStopEnqueue=false\npopReviveConcurrency=1"
        assert (await change(cluster, text)).code == OK
        settings, version = await shown(cluster)
        assert (settings["maxTopicLength"], settings["popReviveConcurrency"]) == ("200", "1")
        assert version["counter"] == 1
    assert "maxTopicLength=200\n" in file.read_text()
    told = [one.getMessage() for one in caplog.records if "without effect" in one.getMessage()]
    assert told == [
        "without effect here: maxTopicLength=200 (Apache's 5.4.0 broker does not read it, either)",
        "without effect here: popReviveConcurrency=1 (POP always keeps its check points in the log)",
    ]


# -- immediate effects of changes


async def sent(cluster, **fields):
    return (await cluster.send(**fields)).code


async def half(cluster):
    return await sent(cluster, properties="TRAN_MSG\x01true\x02PGROUP\x01p\x02", sys_flag=4)


async def pulled(cluster):
    answer = await cluster.pull()
    return answer.code, len(read_messages(answer.body or b""))


async def new_group(cluster):
    return (await cluster.pull(group=f"g{time.monotonic_ns()}")).code


async def by_key(cluster):
    header = QueryMessageRequest(topic="T", key="k", max_num=64, begin_timestamp=0, end_timestamp=1 << 62)
    return len(read_messages((await cluster.call(RequestCode.QUERY_MESSAGE, header)).body or b""))


async def sql_pull(cluster):
    return (await cluster.pull(expression="a = 1", expression_type="SQL92", version=1)).code


async def by_unique_key(cluster):
    header = QueryMessageRequest(
        topic="T", key="k", max_num=0, begin_timestamp=0, end_timestamp=1 << 62, is_unique_key=True
    )
    return len(read_messages((await cluster.call(RequestCode.QUERY_MESSAGE, header)).body or b""))


async def lite_pull(cluster):
    return (await cluster.call(RequestCode.LITE_PULL_MESSAGE, PULL)).code


async def perm_told(cluster):
    """Return the permission of the topic in the name server's route."""
    question = request(RequestCode.GET_ROUTEINFO_BY_TOPIC, RouteRequest("T", accept_standard_json_only=True))
    answer = await cluster.client.call(cluster.standalone.namesrv_address, question, 60_000)
    return decode_as(answer.body, TopicRoute).queue_datas[0].perm


EFFECTS = {
    "brokerPermission=2": (pulled, (OK, 3), (NO_PERMISSION, 0)),
    "autoCreateSubscriptionGroup=false": (new_group, OK, 26),
    "startAcceptSendRequestTimeStamp=99999999999999": (sent, OK, 1),
    "rejectTransactionMessage=true": (half, OK, NO_PERMISSION),
    "litePullMessageEnable=false": (lite_pull, OK, NO_PERMISSION),
    "rejectPullConsumerEnable=true": (pulled, (OK, 3), (24, 0)),
    "defaultQueryMaxNum=1": (by_unique_key, 3, 1),
    "maxTransferBytesOnMessageInMemory=1": (pulled, (OK, 3), (OK, 1)),
    "maxMessageSize=3": (sent, OK, 13),
    "enablePropertyFilter=true": (sql_pull, 1, 20),
    "maxTransferCountOnMessageInMemory=1": (pulled, (OK, 3), (OK, 1)),
    "maxMsgsNumBatch=1": (by_key, 3, 1),
}


@pytest.mark.parametrize("text", EFFECTS)
async def test_a_changed_setting_has_its_effect_at_once(text, cluster):
    look, before, after = EFFECTS[text]

    for _ in range(3):
        await cluster.send(properties="KEYS\x01k\x02")
    assert await look(cluster) == before
    assert (await change(cluster, text)).code == OK
    assert await look(cluster) == after


async def test_topics_are_created_again_when_that_is_switched_on(tmp_path):
    async with Cluster(tmp_path / "store", broker={"auto_create_topic": False}) as cluster:
        assert await sent(cluster) == 17
        assert (await change(cluster, "autoCreateTopicEnable=true")).code == OK
        assert await sent(cluster) == OK


async def test_the_name_servers_are_notified_of_a_new_permission(cluster):
    await cluster.send()
    await cluster.standalone.broker.context.topics_published()
    assert await perm_told(cluster) == 6
    assert (await change(cluster, "brokerPermission=4")).code == OK
    await cluster.standalone.broker.context.topics_published()
    assert await perm_told(cluster) == 4
