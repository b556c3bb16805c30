"""Data that servers refuse to unauthorized clients, requested by a client that shares no code with the servers."""

from __future__ import annotations

import asyncio
import json

import pytest

from rmqkit.clock import SYSTEM_CLOCK
from tests.broker.cluster import serving
from tests.broker.stranger import Stranger, ask, frame, fully_signed
from tests.ports import free_port

SEND, QUERY, VIEW, SEND_BACK, END = 310, 12, 33, 36, 37
CREATE_USER, CREATE_ACL, HEARTBEAT, CONSUME_DIRECTLY = 3001, 3006, 34, 309
GET_TOPIC, DELETE_TOPIC, BROKER_CONFIG, NAMESRV_CONFIG = 351, 215, 26, 319
OK, UNSUPPORTED, REFUSED, NOT_FOUND = 0, 3, 16, 22
CHECK_BACK = 39
ADMIN_CODES = {17, 18, 25, 200, 207, 215, 225, 306, 316, 329}
ALL_TIME = {"maxNum": "32", "beginTimestamp": "0", "endTimestamp": str((1 << 63) - 1)}


async def send(address, topic, properties, user=None):
    values = ("p", topic, "TBW102", "4", "0", "0", "1700000000000", "0", properties, "0", "false")
    answer = await ask(
        address, SEND, b"body of " + topic.encode(), user, **dict(zip("abcdefghijk", values, strict=True))
    )
    assert answer.code == OK, answer.remark
    return answer.fields["msgId"]


async def with_rights(address, user, *resources, ips=()):
    """Create a user with the permission to send, receive and look up these topics."""
    answer = await ask(address, CREATE_USER, b'{"password":"secret12"}', "root", username=user)
    assert answer.code == OK, answer.remark
    entries = [
        {"resource": one, "actions": ["Pub", "Sub", "Get"], "decision": "Allow", "sourceIps": list(ips)}
        for one in resources
    ]
    acl = json.dumps({"policies": [{"entries": entries}]}).encode()
    assert (await ask(address, CREATE_ACL, acl, "root", subject=f"User:{user}")).code == OK


async def test_a_key_finds_nothing_of_a_topic_whose_keys_have_the_same_hash(servers):
    """Aa#k and BB#k have one hash, as Java computes it; so have aAa and aBB."""

    address = servers.broker_address
    await send(address, "BB", "KEYS\x01k aBB\x02TAGS\x01tAa\x02")
    for topic, key, more in (("Aa", "k", {}), ("BB", "aAa", {}), ("BB", "tBB", {"indexType": "T"})):
        answer = await ask(address, QUERY, topic=topic, key=key, **ALL_TIME, **more)
        assert (answer.code, answer.body) == (NOT_FOUND, b""), (topic, key)
    for key, more in (("k", {}), ("aBB", {}), ("tAa", {"indexType": "T"})):
        assert b"body of BB" in (await ask(address, QUERY, topic="BB", key=key, **ALL_TIME, **more)).body


async def test_keys_of_one_hash_do_not_hide_the_one_requested(servers):
    address = servers.broker_address
    await send(address, "BB", "KEYS\x01k\x02")
    for _ in range(40):
        await send(address, "Aa", "KEYS\x01k\x02")
    answer = await ask(address, QUERY, topic="BB", key="k", **ALL_TIME)
    assert answer.code == OK and answer.body.count(b"body of") == 1


async def test_a_right_on_one_topic_opens_no_other_by_key_or_id(tmp_path):
    async with serving(tmp_path, users=True) as servers:
        address = servers.broker_address
        await with_rights(address, "eve", "Topic:Aa", "Group:ge")
        message_id = await send(address, "BB", "KEYS\x01k\x02", "root")
        place = str(int(message_id[16:], 16))
        asked = (
            (QUERY, {"topic": "Aa", "key": "k", **ALL_TIME}),
            (VIEW, {"offset": place}),
            (SEND_BACK, {"offset": place, "group": "ge", "delayLevel": "0"}),
            (CONSUME_DIRECTLY, {"consumerGroup": "ge", "clientId": "eve", "msgId": message_id}),
            (CONSUME_DIRECTLY, {"consumerGroup": "ge", "clientId": "eve", "msgId": message_id, "topic": "Aa"}),
        )
        for code, fields in asked:
            answer = await ask(address, code, b"", "eve", **fields)
            assert answer.code == (NOT_FOUND if code == QUERY else REFUSED), (code, answer.remark)
            assert b"body of" not in answer.body


async def test_who_calls_itself_a_producer_of_a_group_is_reported_none_of_its_messages(tmp_path):
    """Check-back sends half messages to producers of their group, and any client may claim to be one."""

    async with serving(tmp_path, users=True) as servers:
        address = servers.broker_address
        await with_rights(address, "anna", "Topic:Orders")
        await with_rights(address, "eve", "Topic:Own")
        beat = json.dumps({"clientID": "c", "producerDataSet": [{"groupName": "p"}], "consumerDataSet": []}).encode()
        async with Stranger(address) as anna, Stranger(address) as eve:
            assert (await anna.ask(HEARTBEAT, beat, "anna")).code == OK
            assert (await eve.ask(HEARTBEAT, beat, "eve")).code == OK
            clients = servers.broker.context.clients
            members = clients.producers("p")
            assert sorted(member.user for member in members.values()) == ["anna", "eve"]
            asked = [member.user for c, member in members.items() if clients.may_be_asked(c, member, "Orders")]
            assert asked == ["anna"]
            # a reply to a client id that both claim goes to the first client
            assert members[clients.producer_connection("c")].user == "anna"


PROXY = b"PROXY TCP4 10.1.2.3 10.0.0.1 5000 9876\r\n"
PROXY_V2 = b"\r\n\r\n\x00\r\nQUIT\n!\x11\x00\x0c\n\x01\x02\x03\n\x00\x00\x01\x13\x88&\x94"


@pytest.mark.parametrize("preamble", [PROXY, PROXY_V2])
@pytest.mark.parametrize(
    ("balancers", "ips", "code"),
    [
        ("none", ["10.1.2.3"], REFUSED),
        ("10.9.9.9", ["10.1.2.3"], REFUSED),
        ("loopback", ["10.1.2.3"], REFUSED),
        ("loopback", ["127.0.0.0/8"], REFUSED),
        ("loopback", ["10.1.2.3", "127.0.0.1"], OK),
        ("none", ["127.0.0.1"], OK),
    ],
)
async def test_who_writes_a_proxy_line_is_where_it_is(balancers, ips, code, preamble, tmp_path):
    """Policies have addresses. A PROXY line with such an address, or an allowed balancer, gives no permission."""

    async with serving(tmp_path, users=True, broker={"proxyProtocolAddresses": balancers}) as servers:
        address = servers.broker_address
        await with_rights(address, "eve", "Topic:*", ips=ips)
        async with Stranger(address, preamble) as eve:
            answer = await eve.ask(GET_TOPIC, b"", "eve", topic="TBW102")
        assert answer.code == code, answer.remark


REGISTER, UNREGISTER, ROUTE, CLUSTERS, REGISTER_TOPIC, DATA_VERSION, BROKER_HEARTBEAT = (
    103,
    104,
    105,
    106,
    217,
    322,
    904,
)
ELSEWHERE = "127.0.0.2"
TOPIC = {"topicName": "TBW102", "readQueueNums": 1, "writeQueueNums": 1, "perm": 0}
SELF_TEST = {**TOPIC, "topicName": "SELF_TEST_TOPIC"}
VERSION = {"timestamp": 9_000_000_000_000, "counter": 9, "stateVersion": 9}
REGISTRATION = json.dumps(
    {
        "topicConfigSerializeWrapper": {
            "dataVersion": VERSION,
            "topicConfigTable": {"TBW102": TOPIC, "SELF_TEST_TOPIC": SELF_TEST},
        },
        "filterServerList": [],
    }
).encode()


def as_broker(address, name="broker-a", broker_id=0, cluster="DefaultCluster"):
    return {
        "brokerName": name,
        "brokerAddr": address,
        "clusterName": cluster,
        "brokerId": str(broker_id),
        "haServerAddr": "10.6.6.6:10912",
        "compressed": "false",
        "bodyCrc32": "0",
    }


async def told(servers):
    """Return the tables of brokers and of a topic that clients get."""
    answers = [await ask(servers.namesrv_address, CLUSTERS), await ask(servers.namesrv_address, ROUTE, topic="TBW102")]
    return [answer.table for answer in answers]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (REGISTER, {"address": "10.6.6.6:10911"}),
        (REGISTER, {"address": "10.6.6.6:10911", "cluster": "Other"}),
        (REGISTER, {"address": "10.6.6.6:10911", "broker_id": -1}),
        (REGISTER, {}),
        (REGISTER, {"broker_id": 7}),
        (REGISTER, {"cluster": "Other"}),
        (REGISTER, {"name": "other"}),
        (UNREGISTER, {}),
        (UNREGISTER, {"name": "other"}),
        (DATA_VERSION, {}),
        (BROKER_HEARTBEAT, {}),
    ],
)
async def test_nobody_speaks_for_a_broker_that_is_alive(code, said, tmp_path):
    """Otherwise an attacker could make the broker's clients send to another address, or to none."""

    async with serving(tmp_path, broker={"brokerName": "broker-a"}) as servers:
        before = await told(servers)
        async with Stranger(servers.namesrv_address, source=ELSEWHERE) as stranger:
            body = REGISTRATION if code == REGISTER else json.dumps(VERSION).encode()
            fields = as_broker(**{"address": servers.broker_address, **said})
            answer = await stranger.ask(code, body, **fields)
            assert answer.code == REFUSED, answer.remark
            assert servers.broker_address in answer.remark
        assert await told(servers) == before


async def test_nobody_changes_the_queues_of_a_broker_that_is_alive(tmp_path):
    # it is on this machine, too: an administrator may
    async with serving(
        tmp_path, broker={"brokerName": "broker-a"}, namesrv={"adminAllowedAddresses": "127.0.0.1"}
    ) as servers:
        before = await told(servers)
        queues = [{"brokerName": "broker-a", "readQueueNums": 0, "writeQueueNums": 0, "perm": 0, "topicSysFlag": 0}]
        async with Stranger(servers.namesrv_address, source=ELSEWHERE) as stranger:
            body = json.dumps({"queueDatas": queues, "brokerDatas": []}).encode()
            assert (await stranger.ask(REGISTER_TOPIC, body, topic="TBW102")).code == REFUSED
        assert await told(servers) == before


@pytest.mark.parametrize("source", ["127.0.0.1", ELSEWHERE])
async def test_a_broker_has_the_place_of_one_that_is_gone(source, servers):
    first, second = as_broker("10.0.0.1:10911", "b"), as_broker("10.0.0.2:10911", "b")
    async with Stranger(servers.namesrv_address) as broker:
        assert (await broker.ask(REGISTER, REGISTRATION, **first)).code == OK
        assert (await broker.ask(REGISTER, REGISTRATION, **first)).code == OK
        async with Stranger(servers.namesrv_address, source=source) as other:
            answer = await other.ask(REGISTER, REGISTRATION, **second)
            assert (answer.code, "10.0.0.1:10911 and alive" in answer.remark) == (REFUSED, True)
    async with Stranger(servers.namesrv_address, source=source) as other:
        while (answer := await other.ask(REGISTER, REGISTRATION, **second)).code != OK:
            assert answer.code == REFUSED  # until the name server has seen the end of the connection
        addresses = (await other.ask(CLUSTERS)).table["brokerAddrTable"]["b"]["brokerAddrs"]
        assert addresses == {"0": "10.0.0.2:10911"}


async def test_a_setting_lets_a_broker_have_the_place_of_one_that_is_alive(tmp_path):
    async with (
        serving(tmp_path, broker={"brokerName": "broker-a"}, namesrv={"allowBrokerTakeover": "true"}) as servers,
        Stranger(servers.namesrv_address, source=ELSEWHERE) as leader,
    ):
        assert (await leader.ask(REGISTER, REGISTRATION, **as_broker("10.6.6.6:10911"))).code == OK
        assert (await told(servers))[0]["brokerAddrTable"]["broker-a"]["brokerAddrs"] == {"0": "10.6.6.6:10911"}


async def test_only_some_addresses_may_speak_for_brokers(tmp_path):
    async with serving(tmp_path, namesrv={"registrationAllowedAddresses": "127.0.0.1;"}) as servers:
        before = await told(servers)
        async with Stranger(servers.namesrv_address, source=ELSEWHERE) as stranger:
            for code in (REGISTER, UNREGISTER, REGISTER_TOPIC, DATA_VERSION, BROKER_HEARTBEAT):
                answer = await stranger.ask(code, REGISTRATION, **as_broker("10.6.6.6:10911", "new"), topic="T")
                assert answer.code == REFUSED and "registrationAllowedAddresses=127.0.0.1;" in answer.remark
            assert (await stranger.ask(ROUTE, topic="TBW102")).code == OK
        assert await told(servers) == before


async def test_where_users_are_in_force_brokers_sign_what_they_say_of_themselves(tmp_path):
    """The broker of this standalone is registered when it has started. Clients need not sign their requests."""

    async with serving(tmp_path, users=True) as servers:
        name_server = servers.namesrv_address
        before = await told(servers)
        await with_rights(servers.broker_address, "eve", "*")
        for user in (None, "eve"):
            for code in (REGISTER, UNREGISTER, REGISTER_TOPIC, DATA_VERSION, BROKER_HEARTBEAT):
                answer = await ask(name_server, code, REGISTRATION, user, **as_broker("10.6.6.6:1", "new"), topic="T")
                assert answer.code == REFUSED and "innerClientAuthenticationCredentials" in answer.remark, code
        assert await told(servers) == before
        for address, code in ((name_server, NAMESRV_CONFIG), (servers.broker_address, BROKER_CONFIG)):
            shown = await ask(address, code, b"", "eve")
            assert shown.code == OK and b"secret12" not in shown.body and b"listenPort" in shown.body
        answer = await ask(name_server, REGISTER, REGISTRATION, "root", **as_broker("10.6.6.6:1", "new"))
        assert answer.code == OK, answer.remark


async def test_who_saw_a_fully_signed_request_cannot_send_it_again_or_as_another(tmp_path):
    async with serving(tmp_path, users=True, full=True) as servers:
        now_ms = SYSTEM_CLOCK.now_ms()

        async def told_of(code, signed_for=GET_TOPIC, said=f"{now_ms} s 1"):
            fields = fully_signed(signed_for, {"topic": "TBW102"}, b"", "root", "secret12", said)
            async with Stranger(servers.broker_address) as eve:
                answer = await eve.ask_bytes(frame(code, fields))
            return answer.code, answer.remark.partition(": ")[2]

        assert (await told_of(GET_TOPIC))[0] == OK
        assert await told_of(GET_TOPIC) == (REFUSED, "it came before.")
        wrong = (REFUSED, "RmqSignature does not fit the request.")
        assert await told_of(DELETE_TOPIC, said=f"{now_ms} s 2") == wrong
        assert (await told_of(GET_TOPIC, said=f"{now_ms} s 3"))[0] == OK
        assert (await told_of(GET_TOPIC, said=f"{now_ms} s 2"))[0] == OK
        assert await told_of(GET_TOPIC, said=f"{now_ms} s 2") == (REFUSED, "it came before.")
        code, remark = await told_of(GET_TOPIC, said=f"{now_ms - 3_600_000} s 4")
        assert code == REFUSED and "300000 are allowed: set the clocks right" in remark
        old = await ask(servers.broker_address, GET_TOPIC, b"", "root", topic="TBW102")
        assert old.code == REFUSED and "fullSignatureRequired=true" in old.remark


async def test_old_signatures_are_accepted_by_default_and_a_full_one_has_to_be_right(tmp_path):
    async with serving(tmp_path, users=True) as servers:
        assert (await ask(servers.broker_address, GET_TOPIC, b"", "root", topic="TBW102")).code == OK
        fields = fully_signed(GET_TOPIC, {"topic": "TBW102"}, b"", "root", "secret12", "1700000000000 s 1")
        async with Stranger(servers.broker_address) as eve:
            assert (await eve.ask_bytes(frame(GET_TOPIC, fields))).code == OK
            assert (await eve.ask_bytes(frame(DELETE_TOPIC, fields))).code == REFUSED


async def half(address, topic, user):
    """Store a half message and never decide about it; over a connection of its own, as a question about it could come
    before the answer to this."""
    properties = "TRAN_MSG\x01true\x02PGROUP\x01p\x02UNIQ_KEY\x01k\x02"
    born_ms = str(SYSTEM_CLOCK.now_ms())  # the broker does not check messages older than the retention time
    values = ("p", topic, "TBW102", "4", "0", "4", born_ms, "0", properties, "0", "false")
    answer = await ask(address, SEND, b"secret half", user, **dict(zip("abcdefghijk", values, strict=True)))
    assert answer.code == OK, answer.remark


async def test_a_producer_without_the_right_is_never_asked_about_a_half_message(tmp_path):
    """End to end: the broker asks again and again over the connection of who may publish, and never over the other."""

    quick = {"transactionTimeOut": "1", "transactionCheckInterval": "20"}
    async with serving(tmp_path, users=True, broker=quick) as servers:
        address = servers.broker_address
        await with_rights(address, "anna", "Topic:Orders")
        await with_rights(address, "eve", "Topic:Own")
        beats = [
            json.dumps({"clientID": name, "producerDataSet": [{"groupName": "p"}], "consumerDataSet": []}).encode()
            for name in ("anna", "eve")
        ]
        async with Stranger(address) as anna, Stranger(address) as eve:
            assert (await anna.ask(HEARTBEAT, beats[0], "anna")).code == OK
            assert (await eve.ask(HEARTBEAT, beats[1], "eve")).code == OK
            await half(address, "Orders", "anna")
            for _ in range(4):
                code, body = await anna.next_request()
                assert (code, b"secret half" in body) == (CHECK_BACK, True)
            # What was sent to eve before this answer would come before it.
            assert (await eve.ask(HEARTBEAT, beats[1], "eve")).code == OK


# ---- the VIP port and the exporter


@pytest.mark.parametrize("users", [False, True])
async def test_the_vip_port_opens_nothing_that_the_main_port_does_not(users, tmp_path):
    port = free_port(-2, 1)
    main, vip = f"127.0.0.1:{port}", f"127.0.0.1:{port - 2}"
    signed_by = "root" if users else None

    async with serving(tmp_path, users=users, broker={"listenPort": str(port), "proxyProtocolAddresses": "loopback"}):
        await send(main, "T", "", signed_by)
        await send(vip, "T", "", signed_by)
        # Administration from another machine, by who it may be: refused at both.
        for code in sorted(ADMIN_CODES):
            answers = []
            for address in (main, vip):
                async with Stranger(address, PROXY) as stranger:
                    answers.append(await stranger.ask(code, b"{}", signed_by, topic="T"))
            assert [answer.code for answer in answers] == [REFUSED, REFUSED], (code, answers[0].remark)
        # Unsigned, or signed with a secret that is not right: the same answers.
        for fields in ({}, {"AccessKey": "root", "Signature": "x"}):
            codes = [(await ask(address, GET_TOPIC, topic="T", **fields)).code for address in (main, vip)]
            assert codes == ([REFUSED, REFUSED] if users else [OK, OK])
        # Pulls and pops are no requests of this port.
        for code in (11, 361, 200_050, 200_052, 200_054, 200_055):
            answer = await ask(vip, code, b"", signed_by, consumerGroup="g", topic="T", queueId="0")
            assert answer.code == UNSUPPORTED, (code, answer.remark)


async def http(address, request):
    """Send bytes and return the bytes of the answer."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize("users", [False, True])
async def test_the_exporter_reports_everybody_names_and_counts_and_takes_nothing_else(users, tmp_path):
    async with serving(
        tmp_path, users=users, broker={"metricsExporterType": "PROM", "metricsPromExporterPort": "0"}
    ) as servers:
        await send(servers.broker_address, "Orders", "KEYS\x01secretkey\x02", "root" if users else None)
        address = servers.broker.metrics_address
        told = await http(address, b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert told.startswith(b"HTTP/1.1 200")
        assert b'topic="Orders"' in told
        for secret in (b"body of", b"secretkey", b"secret12"):
            assert secret not in told
        for request in (
            b"GET /config/access.json HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
            b"GET /metrics/../config/access.json HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
            b"DELETE /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
            b"POST /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}",
            frame(DELETE_TOPIC, {"topic": "Orders"}),
        ):
            answer = await http(address, request)
            assert not answer.startswith(b"HTTP/1.1 2"), answer[:80]
        assert (await ask(servers.broker_address, GET_TOPIC, b"", "root" if users else None, topic="Orders")).code == OK


async def test_without_the_setting_there_is_no_exporter(servers):
    assert servers.broker.metrics_address == ""
