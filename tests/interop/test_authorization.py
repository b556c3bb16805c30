"""The permissions of users by their policies: Apache's broker and ours answer the same requests of the same users with
equal codes and remarks. Source: behaviour.md §9.8."""

import asyncio
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from rmqkit import Message, ReceivedMessage, StartFrom, sync
from rmqkit.admin import Admin
from rmqkit.console import Console
from rmqkit.protocol.codes import RequestCode as Code
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.command import decode_fields
from rmqkit.protocol.ids import decode_offset_id
from rmqkit.remoting.authentication import Credentials
from tests.console.asgi import Browser
from tests.console.test_changes import token_of
from tests.interop.apache import BROKER_NAME, CLUSTER, ask, open_store_with_apache
from tests.interop.asking import EXCEPTION, PULL_ALL, Asked
from tests.interop.kit import ApacheKit
from tests.interop.mqadmin import named_outputs
from tests.interop.server_process import wait_until
from tests.interop.standalone import run_standalone
from tests.patience import producing, pushing

TOPIC, GROUP, RETRY = "Granted", "granted", "%RETRY%granted"
QUEUE = {"topic": TOPIC, "queueId": 0}
BOTH = {"consumerGroup": GROUP, **QUEUE}
PULL = {**PULL_ALL, **BOTH}
SEND = dict(zip("abcdefghijkl", ("p", TOPIC, "TBW102", 4, 0, 0, 1_700_000_000_000, 0, "", 0, "false"), strict=False))
LONG_NAMES = {
    "producerGroup": "p",
    "defaultTopic": "TBW102",
    "defaultTopicQueueNums": 4,
    "sysFlag": 0,
    "flag": 0,
    "bornTimestamp": 1_700_000_000_000,
    **QUEUE,
}
CREATE = {
    "topic": "GrantedMore",
    "defaultTopic": "TBW102",
    "readQueueNums": 4,
    "writeQueueNums": 4,
    "perm": 6,
    "topicFilterType": "SINGLE_TAG",
    "topicSysFlag": 0,
    "order": "false",
}
POP = {
    **BOTH,
    "maxMsgNums": 8,
    "invisibleTime": 1_800_000,  # longer than this file takes: each broker redelivers at its own times
    "pollTime": 0,
    "bornTime": 1 << 60,
    "initMode": 0,
    "expType": "TAG",
    "exp": "*",
    "order": "false",
}
ACK = {**BOTH, "extraInfo": f"0 1700000000000 60000 0 0 {BROKER_NAME} 0 0", "offset": 0}
QUERY = {"topic": TOPIC, "key": "k", "maxNum": 1, "beginTimestamp": 0, "endTimestamp": 1}
LOCKED = [{"topic": topic, "brokerName": BROKER_NAME, "queueId": 0} for topic in (TOPIC, RETRY)]
LOCK = {"consumerGroup": GROUP, "clientId": "c", "mqSet": LOCKED}


def beat(*topics: str) -> dict[str, object]:
    """Return a heartbeat of a separate group: brokers remove it some time after its connection is closed."""
    subscriptions = [{"topic": topic, "subString": "*", "subVersion": 1} for topic in topics]
    consumer = {"groupName": "granted_beat", "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING"}
    return {
        "clientID": "granted",
        "consumerDataSet": [consumer | {"subscriptionDataSet": subscriptions}] if topics else [],
    }


USED = [
    Asked(Code.SEND_MESSAGE, LONG_NAMES, b"1"),
    Asked(Code.SEND_MESSAGE_V2, SEND, b"1"),
    Asked(Code.SEND_MESSAGE, {**LONG_NAMES, "topic": RETRY}, b"1"),
    Asked(Code.SEND_MESSAGE_V2, {**SEND, "a": GROUP, "b": RETRY}, b"1"),
    Asked(Code.SEND_MESSAGE_V2, {**SEND, "a": "other", "b": RETRY}, b"1"),
    Asked(Code.CONSUMER_SEND_MSG_BACK, {"offset": 1 << 40, "group": GROUP, "delayLevel": 1, "originTopic": "Other"}),
    Asked(Code.RECALL_MESSAGE, {"topic": TOPIC, "recallHandle": "x"}),
    # Twice: with our broker a reset of offsets is pending until the client pulls again, with Apache's until it has
    # answered once.
    *(Asked(Code.PULL_MESSAGE, PULL) for _ in range(2)),
    Asked(Code.PULL_MESSAGE, {**PULL, "topic": RETRY}),
    Asked(Code.QUERY_MESSAGE, QUERY),
    Asked(Code.QUERY_MESSAGE, {**QUERY, "topic": RETRY}),
    Asked(Code.HEART_BEAT, {}, beat()),
    Asked(Code.HEART_BEAT, {}, beat(RETRY)),
    Asked(Code.HEART_BEAT, {}, beat(TOPIC)),
    Asked(Code.UNREGISTER_CLIENT, {"clientID": "granted", "producerGroup": "p"}),
    Asked(Code.UNREGISTER_CLIENT, {"clientID": "granted", "consumerGroup": GROUP}),
    Asked(Code.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": GROUP}),
    Asked(Code.QUERY_CONSUMER_OFFSET, BOTH),
    Asked(Code.QUERY_CONSUMER_OFFSET, {**BOTH, "topic": RETRY}),
    Asked(Code.UPDATE_CONSUMER_OFFSET, {**BOTH, "commitOffset": 0}),
    Asked(Code.UPDATE_CONSUMER_OFFSET, {**BOTH, "topic": RETRY, "commitOffset": 0}),
    Asked(Code.LOCK_BATCH_MQ, {}, LOCK),
    Asked(Code.UNLOCK_BATCH_MQ, {}, LOCK),
    *(Asked(code, POP) for code in (Code.POP_MESSAGE, Code.NOTIFICATION, Code.PEEK_MESSAGE, Code.POLLING_INFO)),
    Asked(Code.POP_MESSAGE, {**POP, "topic": RETRY}),
    Asked(Code.ACK_MESSAGE, ACK),
    Asked(Code.ACK_MESSAGE, {**ACK, "topic": f"{RETRY}_Other"}),
    Asked(Code.CHANGE_MESSAGE_INVISIBLETIME, {**ACK, "invisibleTime": 1000}),
    *(Asked(code, QUEUE) for code in (Code.GET_MAX_OFFSET, Code.GET_MIN_OFFSET, Code.GET_EARLIEST_MSG_STORETIME)),
    Asked(Code.SEARCH_OFFSET_BY_TIMESTAMP, {**QUEUE, "timestamp": 0}),
    Asked(Code.VIEW_MESSAGE_BY_ID, {"topic": TOPIC, "offset": 1 << 40}),
]
"""The requests of producers and consumers."""

ADMINISTERED = [
    Asked(Code.UPDATE_AND_CREATE_TOPIC, CREATE),
    Asked(Code.GET_TOPIC_CONFIG, {"topic": TOPIC}),
    Asked(Code.GET_TOPIC_STATS_INFO, {"topic": TOPIC}),
    Asked(Code.DELETE_TOPIC_IN_BROKER, {"topic": "GrantedMore"}),
    Asked(Code.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": GROUP}),
    Asked(Code.DELETE_SUBSCRIPTIONGROUP, {"groupName": "granted_more"}),
    Asked(Code.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": GROUP}),
    Asked(Code.GET_PRODUCER_CONNECTION_LIST, {"producerGroup": "p"}),
    Asked(Code.GET_ALL_PRODUCER_INFO),
    Asked(Code.GET_CONSUME_STATS, {"consumerGroup": GROUP, "topic": TOPIC}),
    Asked(Code.GET_CONSUME_STATS, {"consumerGroup": GROUP, "topicList": f"Other;{TOPIC};"}),
    Asked(Code.GET_BROKER_CONSUME_STATS, {"isOrder": "false"}),
    Asked(Code.VIEW_BROKER_STATS_DATA, {"statsName": "TOPIC_PUT_NUMS", "statsKey": "None"}),
    Asked(Code.QUERY_TOPIC_CONSUME_BY_WHO, {"topic": TOPIC}),
    Asked(Code.QUERY_TOPIC_CONSUME_BY_WHO, {"topic": RETRY}),
    Asked(Code.QUERY_CONSUME_TIME_SPAN, {"topic": TOPIC, "group": GROUP}),
    Asked(Code.QUERY_CORRECTION_OFFSET, {"filterGroups": f"{GROUP},other", "compareGroup": GROUP, "topic": TOPIC}),
    Asked(Code.QUERY_CONSUME_QUEUE, {**BOTH, "index": 0, "count": 1}),
    Asked(Code.QUERY_TOPICS_BY_CONSUMER, {"group": GROUP}),
    Asked(Code.QUERY_SUBSCRIPTION_BY_CONSUMER, {"group": GROUP, "topic": TOPIC}),
    Asked(Code.UPDATE_AND_GET_GROUP_FORBIDDEN, {"group": GROUP, "topic": TOPIC}),
    Asked(Code.INVOKE_BROKER_TO_RESET_OFFSET, {"group": GROUP, **QUEUE, "timestamp": -1, "isForce": "true"}),
    Asked(Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, {"group": GROUP, "topic": TOPIC}),
    Asked(Code.GET_CONSUMER_RUNNING_INFO, {"consumerGroup": GROUP, "clientId": "none"}),
    Asked(Code.CLONE_GROUP_OFFSET, {"srcGroup": GROUP, "destGroup": "other", "topic": TOPIC}),
    Asked(Code.CONSUME_MESSAGE_DIRECTLY, {"consumerGroup": GROUP, "topic": TOPIC, "clientId": "none", "msgId": "x"}),
    Asked(Code.RESUME_CHECK_HALF_MESSAGE, {"topic": TOPIC, "msgId": "x"}),
    Asked(Code.EXCHANGE_BROKER_HA_INFO),
    Asked(Code.RESET_MASTER_FLUSH_OFFSET, {"masterFlushOffset": 0}),
    *(
        Asked(code, {"username": "another"}, {"password": "p"})
        for code in (Code.AUTH_CREATE_USER, Code.AUTH_UPDATE_USER)
    ),
    Asked(Code.AUTH_CREATE_USER, {"username": "chief"}, {"password": "p", "userType": "Super"}),
    Asked(Code.AUTH_UPDATE_USER, {"username": "another"}, {"userType": "Super"}),
    Asked(Code.AUTH_UPDATE_USER, {"username": "boss"}, {"password": "p"}),
    *(Asked(Code.AUTH_DELETE_USER, {"username": name}) for name in ("another", "chief", "boss", "nobody at all")),
    Asked(Code.AUTH_GET_USER, {"username": "nobody at all"}),
    Asked(Code.AUTH_LIST_USER, {"filter": "nobody at all"}),
    Asked(Code.AUTH_GET_ACL, {"subject": "User:none"}),
    Asked(Code.AUTH_LIST_ACL, {"subjectFilter": "nobody at all"}),
]
"""The requests of operators."""

FREE = [
    *(Asked(code) for code in (Code.GET_BROKER_CONFIG, Code.GET_BROKER_RUNTIME_INFO, Code.GET_ALL_TOPIC_CONFIG)),
    *(Asked(code) for code in (Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, Code.GET_BROKER_HA_STATUS)),
    Asked(Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body={"groupName": "granted_more"}),
    Asked(Code.UPDATE_BROKER_CONFIG, body=b"brokerPermission=6"),
    Asked(Code.UPDATE_AND_CREATE_TOPIC_LIST, body={"topicConfigList": [{"topicName": "GrantedMore"}]}),
    Asked(Code.VIEW_MESSAGE_BY_ID, {"offset": 1 << 40}),
    Asked(Code.SEND_REPLY_MESSAGE, {**LONG_NAMES, "topic": f"{CLUSTER}_REPLY_TOPIC"}, b"1"),
]
"""The requests that any user may send."""


def entry(resource: str, *actions: str, decision: str = "Allow", ips: tuple[str, ...] = ()) -> dict[str, object]:
    return {"resource": resource, "actions": actions, "decision": decision, "sourceIps": ips}


ALL = entry("*", "All")
USERS: dict[str, dict[str, list[dict[str, object]]]] = {
    "none": {},
    "literal": {
        "Custom": [*(entry(name, "All") for name in (f"Topic:{TOPIC}", f"Group:{GROUP}", "Group:granted_beat"))]
    },
    "topic": {"Custom": [entry("Topic:*", "All")]},
    "group": {"Custom": [entry("Group:*", "All")]},
    "prefix": {"Custom": [entry("Topic:Gr*", "Pub", "Sub"), entry("Group:gra*", "Sub")]},
    "odd": {"Custom": [entry("topic:Gra*x*", "pub", "SUB"), entry("GROUP:granted*", "all")]},
    "every": {"Custom": [ALL]},
    "deny": {"Custom": [ALL, entry(f"Topic:{TOPIC}", "All", decision="Deny")]},
    "exception": {
        "Custom": [entry("*", "All", decision="Deny"), entry("Topic:Grant*", "Pub"), entry("Topic:*", "Sub")]
    },
    "longer": {
        "Custom": [entry("Topic:Gr*", "All", decision="Deny"), entry("Topic:Gran*", "All"), entry("Group:*", "All")]
    },
    "shorter": {
        "Custom": [entry("Topic:Gran*", "All", decision="Deny"), entry("Topic:Gr*", "All"), entry("Group:*", "All")]
    },
    "default": {"Default": [ALL], "Custom": [entry(f"Topic:{TOPIC}", "Pub", "Get", decision="Deny")]},
    "near": {"Custom": [entry("*", "All", ips=("10.0.0.1", "127.0.0.1"))]},
    "network": {"Custom": [entry("*", "All", ips=("127.0.0.0/8",))]},
    "far": {"Custom": [entry("*", "All", ips=("10.0.0.0/8", "127.0.0.2"))]},
    "cluster": {"Custom": [entry(f"Cluster:{CLUSTER}", "Get")]},
    "operator": {"Custom": [entry("Cluster:*", "Get", "Update"), entry("Topic:*", "Create")]},
    **{
        name.lower(): {"Custom": [entry("*", name)]}
        for name in ("Pub", "Sub", "Get", "Create", "Update", "Delete", "List")
    },
    "worker": {"Custom": [entry("Topic:Worked", "Pub", "Sub", "Get"), entry("Group:workers", "Sub")]},
    "boss": {},
    "super": {},
}
ROOT = Credentials(access_key="root", secret_key="root-secret")
AUTH = "org.apache.rocketmq.auth"
CONF = {
    "authenticationEnabled": "true",
    "authenticationProvider": f"{AUTH}.authentication.provider.DefaultAuthenticationProvider",
    "authenticationMetadataProvider": f"{AUTH}.authentication.provider.LocalAuthenticationMetadataProvider",
    "initAuthenticationUser": json.dumps({"username": ROOT.access_key, "password": ROOT.secret_key}),
    "innerClientAuthenticationCredentials": json.dumps({"accessKey": "inner", "secretKey": "inner-secret"}),
    "authorizationEnabled": "true",
    "authorizationProvider": f"{AUTH}.authorization.provider.DefaultAuthorizationProvider",
    "authorizationMetadataProvider": f"{AUTH}.authorization.provider.LocalAuthorizationMetadataProvider",
    "authenticationWhitelist": "30, 202",
    "authorizationWhitelist": "202,apache.rocketmq.v2.QueryRouteRequest",
    "recallMessageEnable": "false",  # Apache's default; our standalone recalls messages by default
    "brokerClusterName": CLUSTER,
    "brokerName": BROKER_NAME,
}


@pytest.fixture(scope="module")
def servers(apache_kit: ApacheKit, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Run Apache's broker and ours, which know the users, each with its name server. Yield the addresses."""
    theirs, ours = (tmp_path_factory.mktemp(name) for name in ("theirs", "ours"))
    config = ours / "broker.conf"
    config.write_text("".join(f"{key}={value}\n" for key, value in CONF.items()))
    with (
        open_store_with_apache(apache_kit, theirs / "store", theirs, CONF, credentials=ROOT) as pair,
        run_standalone(ours / "store", ours, "--config", str(config)) as standalone,
    ):
        for address in (pair.broker_addr, standalone.broker_addr):
            prepare(address)
        yield {pair.broker_addr: pair.namesrv_addr, standalone.broker_addr: standalone.namesrv_addr}
        standalone.stop()


@pytest.fixture
def brokers(servers: dict[str, str]) -> tuple[str, str]:
    """Return the addresses of Apache's broker and ours."""
    apache, ours = servers
    return apache, ours


def prepare(address: str) -> None:
    """Create topic, group and users. Every answer must be a success."""
    asked = [
        *(Asked(Code.UPDATE_AND_CREATE_TOPIC, {**CREATE, "topic": name}) for name in (TOPIC, "Worked")),
        *(
            Asked(Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body={"groupName": name})
            for name in (GROUP, "other", "workers")
        ),
    ]
    for name, policies in USERS.items():
        kind = "Super" if name in ("boss", "super") else "Normal"
        asked.append(Asked(Code.AUTH_CREATE_USER, {"username": name}, {"password": f"{name}-secret", "userType": kind}))
        if policies:
            body = {"policies": [{"policyType": kind, "entries": entries} for kind, entries in policies.items()]}
            asked.append(Asked(Code.AUTH_CREATE_ACL, {"subject": f"User:{name}"}, body))
    for one in asked:
        code, remark = answer(address, one, ROOT)
        assert code == ResponseCode.SUCCESS, f"{address}: {one}: {remark}"


def answer(address: str, asked: Asked, user: Credentials | None) -> tuple[int, str]:
    command = asked.command({})
    if user is not None:
        user.sign(command)
    answered = ask(address, command)
    return answered.code, answered.remark or ""


def of(name: str) -> Credentials:
    return Credentials(access_key=name, secret_key=f"{name}-secret")


def differences(brokers: tuple[str, str], asked: Iterable[Asked], user: Credentials | None) -> dict[str, object]:
    """Return the different answers of the two brokers, apart from texts of Java exceptions."""
    apache, own = brokers
    found = {}
    for one in asked:
        ours, theirs = answer(own, one, user), answer(apache, one, user)
        if is_other(theirs, ours) and theirs[0] == ResponseCode.PULL_NOT_FOUND:
            # Apache's queues are written a moment after the broker answered a send.
            wait_until(lambda one=one, ours=ours: not is_other(answer(apache, one, user), ours), 10, f"Apache's {one}")
        elif is_other(theirs, ours):
            found[str(one)] = theirs, ours
    return found


def is_other(theirs: tuple[int, str], ours: tuple[int, str]) -> bool:
    return theirs[0] != ours[0] or (theirs[1] != ours[1] and EXCEPTION.match(theirs[1]) is None)


@pytest.mark.parametrize("name", [name for name in USERS if name != "boss"])
def test_users_may_what_their_policies_say(brokers: tuple[str, str], name: str) -> None:
    assert differences(brokers, (*USED, *ADMINISTERED, *FREE), of(name)) == {}


def test_requests_that_do_not_say_what_they_are_about(brokers: tuple[str, str]) -> None:
    """Without 17: Apache's broker rejects its missing numbers before it checks the rights."""
    codes = {one.code for one in (*USED, *ADMINISTERED)} - {Code.UPDATE_AND_CREATE_TOPIC}
    assert differences(brokers, [Asked(code) for code in sorted(codes)], of("none")) == {}


def test_white_lists(brokers: tuple[str, str]) -> None:
    asked = [Asked(code, QUEUE) for code in (Code.GET_MAX_OFFSET, Code.GET_MIN_OFFSET, Code.GET_TOPIC_STATS_INFO)]
    for user in (None, of("none")):
        assert differences(brokers, asked, user) == {}
    guessed = [Credentials(access_key=name, secret_key="guessed") for name in ("none", "every", "super", "stranger")]
    for user in (None, *guessed):
        assert [answer(brokers[1], one, user)[0] for one in asked] == [16, 16, 0]
    believed = [answer(brokers[0], asked[0], user)[0] for user in guessed]
    assert believed == [16, 0, 0, 16], "without signatures, Apache's broker accepts the user name as it is"


def test_changes_hold_at_once(brokers: tuple[str, str]) -> None:
    user, subject = {"username": "changing"}, {"subject": "User:changing"}
    send = Asked(Code.SEND_MESSAGE_V2, SEND, b"1")
    codes = []
    for change in (
        Asked(Code.AUTH_CREATE_USER, user, {"password": "changing-secret"}),
        Asked(Code.AUTH_CREATE_ACL, subject, {"policies": [{"entries": [entry("Topic:G*", "Pub")]}]}),
        Asked(Code.AUTH_UPDATE_ACL, subject, {"policies": [{"entries": [entry("Topic:Gr*", "Pub", decision="Deny")]}]}),
        Asked(Code.AUTH_DELETE_ACL, {**subject, "resource": "Topic:Gr*"}),
        Asked(Code.AUTH_DELETE_ACL, subject),
        Asked(Code.AUTH_UPDATE_USER, user, {"userType": "Super"}),
        Asked(Code.AUTH_UPDATE_USER, user, {"userType": "Normal"}),
    ):
        assert differences(brokers, [change], ROOT) == {}
        assert differences(brokers, [send], of("changing")) == {}, change
        codes.append(answer(brokers[1], send, of("changing"))[0])
    assert codes == [16, 0, 16, 0, 16, 0, 16]


def test_what_apache_lets_everybody_do_and_ours_does_not(brokers: tuple[str, str]) -> None:
    apache, ours = brokers
    acks = {"acks": [{"c": GROUP, "t": TOPIC, "so": 0, "q": 0, "rq": 0, "pt": 0, "it": 0, "b": ""}]}
    for name, asked in (
        ("none", Asked(Code.LITE_PULL_MESSAGE, PULL)),
        ("none", Asked(Code.BATCH_ACK_MESSAGE, {}, acks)),
        ("none", Asked(Code.SEND_REPLY_MESSAGE, LONG_NAMES, b"1")),
        ("none", Asked(Code.SEND_REPLY_MESSAGE_V2, SEND, b"1")),
        ("literal", Asked(Code.PULL_MESSAGE, {**PULL, "topic": "%RETRY%other"})),
    ):
        assert answer(apache, asked, of(name))[0] != ResponseCode.NO_PERMISSION, asked
        assert answer(ours, asked, of(name))[0] == ResponseCode.NO_PERMISSION, asked


def sent(address: str, properties: str) -> int:
    """Send a message as a user with the permission. Return its place in the log."""
    command = Asked(Code.SEND_MESSAGE_V2, {**SEND, "i": properties}, b"1").command({})
    of("literal").sign(command)
    answered = ask(address, command)
    assert answered.code == ResponseCode.SUCCESS, answered.remark
    return decode_offset_id(decode_fields(answered)["msgId"])[2]


def test_apache_lets_everybody_reach_messages_by_their_place_and_ours_does_not(brokers: tuple[str, str]) -> None:
    """Users with the permission may still do it with our broker."""
    codes: list[int] = []
    for address in brokers:
        plain, half = sent(address, ""), sent(address, "TRAN_MSG\x01true\x02PGROUP\x01p\x02")
        stored = {"producerGroup": "p", "tranStateTableOffset": 0, "commitLogOffset": half}
        asked = (
            Asked(Code.VIEW_MESSAGE_BY_ID, {"offset": plain}),
            Asked(Code.VIEW_MESSAGE_BY_ID, {"offset": half}),
            Asked(Code.CONSUMER_SEND_MSG_BACK, {"offset": plain, "group": GROUP, "delayLevel": 1}),
            Asked(Code.END_TRANSACTION, {**stored, "commitOrRollback": 8}),
        )
        codes += [answer(address, one, of(name))[0] for name in ("group", "literal") for one in asked]
    assert codes == [0] * 8 + [ResponseCode.NO_PERMISSION] * 4 + [0] * 4


@pytest.mark.parametrize("at", [0, 1], ids=["apache", "ours"])
def test_pub_sub_and_get_are_enough_for_a_producer_and_a_consumer_with_retries(
    servers: dict[str, str], at: int
) -> None:
    namesrv, tries = list(servers.values())[at], list[int]()
    user = of("worker")

    def refuse_once(message: ReceivedMessage) -> None:
        tries.append(message.reconsume_times)
        if message.reconsume_times == 0:
            raise ValueError("once more")

    settings = pushing(start_from=StartFrom.FIRST_OFFSET, rebalance_interval_ms=200, auth=user)
    with (
        sync.Producer("working", namesrv, settings=producing(auth=user)) as producer,
        sync.PushConsumer("workers", namesrv, settings=settings) as consumer,
    ):
        consumer.subscribe("Worked", "*", refuse_once)
        producer.send(Message(topic="Worked", body=b"1"))
        wait_until(lambda: tries == [0, 1], 60, "the second try")


def test_mqadmin_signs_and_is_refused_without_permission(
    apache_kit: ApacheKit, servers: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = of("operator")
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/tools.yml").write_text(f"accessKey: {user.access_key}\nsecretKey: {user.secret_key}\n")
    monkeypatch.setenv("ROCKETMQ_HOME", str(tmp_path))
    commands = {
        "user": "createUser -b BROKER -u tool -p secret12 -t Normal",
        "chief": "createUser -b BROKER -u tools -p secret12 -t Super",
        "policy": "createAcl -b BROKER -s User:tool -r Topic:*,Group:a* -a Pub,Sub -d Allow -i 10.1.0.0/16",
        "policies": "getAcl -b BROKER -s User:tool",
        "group": "deleteSubGroup -b BROKER -g granted",
    }
    theirs, ours = (
        named_outputs(apache_kit, commands, namesrv, broker, tmp_path) for broker, namesrv in servers.items()
    )
    assert ours == theirs
    assert "The super user can only be create by super user" in ours["chief"]
    assert "Group:a*" in ours["policies"]
    assert "User:operator has no permission to access Group:granted from 127.0.0.1" in ours["group"]


@pytest.mark.real_time
async def test_the_console_lets_a_user_do_what_the_policies_say(servers: dict[str, str]) -> None:
    """With Apache's broker and ours: `anna` logs in, and the broker decides. When she is removed, her login ends."""
    for number, namesrv in enumerate(servers.values()):
        anna, password = f"anna{number}", "secret-of-anna"
        async with (
            Admin(namesrv, credentials=ROOT) as admin,
            Console({"both": namesrv}, login=True, credentials=ROOT) as console,
        ):
            await console.envs["both"].watcher.first(60)
            await admin.topics.create("ConsoleOther", cluster=CLUSTER)
            async with asyncio.timeout(60):
                while "ConsoleOther" not in await admin.calls.topic_names():
                    await asyncio.sleep(0.1)
            await admin.access.create_user(anna, password)
            await admin.access.put_policy(anna, "Topic:*", ["Get", "Create"])
            await admin.access.put_policy(anna, f"Topic:{TOPIC}", ["Pub", "Sub", "Get", "Create"])
            browser = Browser(console)
            assert (await browser.post("/login", {"name": anna, "secret": "wrong"})).status == 401
            login = await browser.post("/login", {"name": anna, "secret": password})
            assert login.status == 303, login.text
            path = f"/both/topics/{TOPIC}/send"
            review = await browser.post(path, {"body": "from anna"})
            assert (await browser.post(path, {"review": token_of(review)})).status == 200
            review = await browser.post("/both/topics/ConsoleOther/send", {"body": "from anna"})
            refused = await browser.post("/both/topics/ConsoleOther/send", {"review": token_of(review)})
            assert (refused.status, f"User:{anna} has no permission" in refused.text) == (403, True), refused.text
            assert (await browser.get("/both/topics")).status == 200
            await admin.access.delete_user(anna)
            removed = await browser.get("/both/topics")
            assert (removed.status, f"User:{anna} is not found" in removed.text) == (403, True), removed.text
            assert (await browser.get("/both/topics")).status == 303
            outcomes = [(line.user, line.outcome) for line in console.audit.lines("send")]
            assert outcomes[:2] == [(anna, "failed"), (anna, "intent")]
