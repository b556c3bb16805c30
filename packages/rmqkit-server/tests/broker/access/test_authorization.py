"""Policies: the actions that they allow users (behaviour.md §9.8).

``tests/interop/test_authorization.py`` compares every request with Apache's broker."""

from __future__ import annotations

import json
from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.broker.access.policies import Authorization
from rmqkit.broker.access.users import AccessTable
from rmqkit.broker.settings import PROMISES, BrokerSettings, refuse_unsupported
from rmqkit.errors import PeerRefused, SettingsError
from rmqkit.policies import PolicyIndex
from rmqkit.protocol.codes import RequestCode as Code
from rmqkit.protocol.command import Command
from rmqkit.protocol.schemas.access import AclEntry, AclInfo, AclPolicy, UserInfo
from rmqkit.remoting.authentication import Authentication, AuthenticationSettings, Credentials
from rmqkit.remoting.client import RemotingClient
from rmqkit.rights import needed
from rmqkit.standalone import Standalone
from tests.broker.operations.test_admission import CLIENTS_OWN, GUARDED, OF_SERVERS, READING
from tests.elsewhere import BELIEVES_US, ask_from_elsewhere

NOTHING, DENIED = "no matched policies.", "the decision is deny."
PUB = frozenset(["Pub"])
ANNA = Credentials(access_key="anna", secret_key="secret12")
ROOT = Credentials(access_key="root", secret_key="secret12")
INNER = Credentials(access_key="inner", secret_key="inner-secret")
USERS = AuthenticationSettings(
    enabled=True,
    initial_user='{"username":"root","password":"secret12"}',
    inner_credentials='{"accessKey":"inner","secretKey":"inner-secret"}',
    authorization_enabled=True,
)


def entry(resource, *actions, allows=True, ips=()):
    decision = "Allow" if allows else "Deny"
    return AclEntry(resource=resource, actions=list(actions or ("Pub",)), source_ips=list(ips), decision=decision)


def policies(custom, default=()):
    pairs = (("Custom", custom), ("Default", default))
    return AclInfo(policies=[AclPolicy(policy_type=kind, entries=list(entries)) for kind, entries in pairs])


def objection(acl, resource, actions, *addresses):
    remark = PolicyIndex("anna", acl).remark(resource, actions, addresses)
    return remark and remark.removeprefix(f"User:anna has no permission to access {resource} from {addresses[-1]}, ")


@pytest.mark.parametrize(
    ("custom", "default", "expected"),
    [
        ([], [], NOTHING),
        ([entry("Topic:orders")], [], None),
        ([entry("Topic:order")], [], NOTHING),
        ([entry("Group:orders")], [], NOTHING),
        ([entry("Topic:ord*")], [], None),
        ([entry("Topic:*")], [], None),
        ([entry("Group:*")], [], NOTHING),
        ([entry("*")], [], None),
        ([entry("*", "Sub", "Get")], [], NOTHING),
        ([entry("*", "All")], [], None),
        ([entry("*", allows=False)], [], DENIED),
        ([entry("*"), entry("Topic:*", allows=False)], [], DENIED),
        ([entry("Topic:*"), entry("*", allows=False)], [], None),
        ([entry("Topic:o*", allows=False), entry("Topic:or*"), entry("Topic:*", allows=False)], [], None),
        ([entry("Topic:or*"), entry("Topic:orders", allows=False)], [], DENIED),
        ([entry("Topic:orders", "Sub", allows=False), entry("Topic:or*")], [], None),
        ([entry("Topic:o*")], [entry("Topic:orders", allows=False)], None),
        ([entry("Topic:x")], [entry("Topic:orders", allows=False)], DENIED),
        ([], [entry("*")], None),
        ([entry("*", ips=["10.1.0.0/16"])], [], None),
        ([entry("*", ips=["10.2.0.0/16", "10.1.2.3"])], [], None),
        ([entry("*", ips=["10.2.0.0/16", "::/0"])], [], NOTHING),
        ([entry("*", ips=["10.2.0.0/16"])], [entry("Topic:orders")], None),
        ([entry("Topic:o*"), entry("Topic:oa*", allows=False), entry("Topic:ord", allows=False)], [], None),
        ([entry("Topic:orders"), entry("Topic:orders", allows=False)], [], None),
        ([entry("Topic:or*", "Sub"), entry("Topic:or*", allows=False), entry("Topic:*")], [], DENIED),
    ],
)
def test_the_most_special_entry_decides(custom, default, expected):
    assert objection(policies(custom, default), "Topic:orders", PUB, "10.1.2.3") == expected


def test_who_has_no_policies_may_nothing_and_an_address_that_is_none_is_in_no_network():
    assert objection(None, "Topic:orders", PUB, "10.1.2.3") == NOTHING
    assert objection(policies([entry("*", ips=["0.0.0.0/0"])]), "Topic:orders", PUB, "?") == NOTHING


PULLED = {"topic": "T", "consumerGroup": "g"}
ACKS = {"acks": [{"c": "g", "t": "T", "so": 0, "q": 0, "rq": 0, "pt": 0, "it": 0, "b": ""}]}
SUBSCRIBED = {"subscriptionSet": [{"action": "PARTIAL_ADD", "group": "g", "topic": "Chats", "liteTopicSet": ["s"]}]}


@pytest.mark.parametrize(
    ("code", "fields", "body", "expected"),
    [
        (Code.SEND_MESSAGE_V2, {"b": "T"}, None, ["Topic:T Pub"]),
        (Code.SEND_BATCH_MESSAGE, {"b": "T"}, None, ["Topic:T Pub"]),
        (Code.SEND_MESSAGE, {"topic": "%RETRY%g"}, None, ["Group:g Sub"]),
        (Code.PULL_MESSAGE, PULLED, None, ["Topic:T Sub", "Group:g Sub"]),
        (Code.LITE_PULL_MESSAGE, PULLED, None, ["Topic:T Sub", "Group:g Sub"]),
        (Code.PULL_MESSAGE, PULLED | {"topic": "%RETRY%g"}, None, ["Group:g Sub", "Group:g Sub"]),
        (Code.PULL_MESSAGE, PULLED | {"topic": "%RETRY%other"}, None, ["Group:other Sub", "Group:g Sub"]),
        (Code.SEND_REPLY_MESSAGE, {"topic": "T"}, None, ["Topic:T Pub"]),
        (Code.SEND_REPLY_MESSAGE_V2, {"b": "T", "topic": "c_REPLY_TOPIC"}, None, ["Topic:T Pub"]),
        (Code.SEND_REPLY_MESSAGE, {"topic": "c_REPLY_TOPIC"}, None, []),
        (Code.SEND_REPLY_MESSAGE_V2, {"b": "ns%c_REPLY_TOPIC"}, None, []),
        (Code.SEND_REPLY_MESSAGE_V2, {"b": "%RETRY%g"}, None, ["Group:g Sub"]),
        (Code.POP_MESSAGE, PULLED | {"topic": "%RETRY%g"}, None, ["Group:g Sub", "Group:g Sub"]),
        (Code.BATCH_ACK_MESSAGE, {}, ACKS, ["Group:g Sub", "Topic:T Sub"]),
        (Code.END_TRANSACTION, {"topic": " "}, None, []),
        (Code.UPDATE_CONSUMER_OFFSET, PULLED, None, ["Topic:T Sub|Update", "Group:g Sub|Update"]),
        (
            Code.GET_CONSUME_STATS,
            {"consumerGroup": "g", "topicList": "T;;U"},
            None,
            "Group:g Get,Topic:T Get,Topic:U Get",
        ),
        (Code.DELETE_TOPIC_IN_BROKER_LIST, {}, {"topicList": ["T", "%RETRY%g", "T"]}, "Topic:T Delete,Group:g Delete"),
        (Code.DELETE_SUBSCRIPTION_GROUP_LIST, {}, {"groupNameList": ["g", "h"]}, "Group:g Delete,Group:h Delete"),
        (Code.LITE_SUBSCRIPTION_CTL, {}, SUBSCRIBED, ["Group:g Sub", "Topic:Chats Sub"]),
        (Code.DELETE_TOPIC_IN_BROKER, {"topic": "%LMQ%$Chats$s"}, None, ["Topic:Chats Delete"]),
        (Code.DELETE_TOPIC_IN_BROKER_LIST, {}, {"topicList": ["%LMQ%$Chats$s"]}, ["Topic:Chats Delete"]),
        (Code.GET_PARENT_TOPIC_INFO, {"topic": "Chats", "maxCount": "9"}, None, ["Topic:Chats Get"]),
        (Code.GET_PARENT_TOPIC_INFO, {"topic": "Chats", "group": "g"}, None, ["Topic:Chats Get", "Group:g Get"]),
        (
            Code.INVOKE_BROKER_TO_RESET_OFFSET,
            {"topic": "%LMQ%$Chats$s", "group": "g"},
            None,
            ["Group:g Update", "Topic:Chats Update"],
        ),
        (Code.GET_LITE_TOPIC_INFO, {"parentTopic": "Chats", "liteTopic": "s"}, None, ["Topic:Chats Get"]),
        (Code.AUTH_LIST_USER, {}, None, ["Cluster:c Get"]),
        (Code.GET_BROKER_RUNTIME_INFO, {"topic": "T"}, None, []),
    ],
)
def test_what_requests_need(code, fields, body, expected):
    command = Command(code, body=json.dumps(body).encode())
    found = [
        f"{resource} {'|'.join(sorted(actions, reverse=False))}" for resource, actions in needed(command, fields, "c")
    ]
    assert found == (expected.split(",") if isinstance(expected, str) else expected)


def test_every_request_is_decided_upon():
    """Every request that the broker answers needs a permission or is in this list."""
    free = {
        *(18, 21, 25, 26, 28, 43, 45, 46, 60, 61, 200, 201, 225, 305, 306, 316, 329),
        *(400, 401, 402, 513, 907, 1007, 5001),
    }
    answered = GUARDED | CLIENTS_OWN | READING | OF_SERVERS
    body = {"consumerGroup": "g", "clientId": "c", "clientID": "c", "consumerDataSet": [{"groupName": "g"}], **ACKS}
    body |= {"topicList": ["T"], "groupNameList": ["g"], **SUBSCRIBED}
    names = ("topic", "b", "group", "consumerGroup", "groupName", "destGroup", "parentTopic")
    fields = dict.fromkeys(names, "x")
    asked = {code for code in answered if list(needed(Command(code, body=json.dumps(body).encode()), fields, "c"))}
    assert {int(code) for code in answered - asked} == free


def access_table(folder):
    access = AccessTable(folder, "127.0.0.1")
    access.create_user("anna", UserInfo(password="p"))
    return access


def test_a_judgement_holds_until_policies_change(tmp_path):
    access = access_table(tmp_path)
    authorization = Authorization(access, "c", None)
    command, fields = Command(Code.SEND_MESSAGE_V2), {"b": "T"}

    def refusal():
        return authorization.refusal("anna", fields, command, ["::1"])

    refused = "User:anna has no permission to access Topic:T from ::1, no matched policies."
    assert [refusal(), refusal()] == [refused] * 2
    access.put_acl("User:anna", policies([entry("Topic:T")]).policies[:1])
    assert [refusal(), refusal()] == [None] * 2
    access.delete_acl("User:anna", None, None)
    assert refusal() == refused
    access.update_user("anna", UserInfo(user_type="Super"))
    assert refusal() is None


NAMES = st.text("ab", max_size=4)
RESOURCES = st.one_of(st.just("*"), st.builds("Topic:{}{}".format, NAMES, st.sampled_from(["", "*"])))
ENTRIES = st.lists(
    st.builds(
        entry,
        RESOURCES,
        st.sampled_from(["Pub", "Sub", "All"]),
        allows=st.booleans(),
        ips=st.sampled_from([(), ("10.0.0.0/8",), ("::1", "11.0.0.0/8")]),
    ),
    max_size=12,
)


def most_special(entries, resource, actions, ip):
    """Return the most special entry, found as in the reference: by a look at every entry."""
    found = [
        one
        for one in entries
        if (one.resource == resource or (one.resource[-1] == "*" and resource.startswith(one.resource[:-1])))
        and {*actions, "All"} & {*one.actions}
        and (not one.source_ips or any(ip_address(ip) in ip_network(each) for each in one.source_ips))
    ]
    return max(found, key=lambda one: (one.resource[-1] != "*", len(one.resource)), default=None)


@given(ENTRIES, ENTRIES, NAMES, st.sampled_from(["10.1.2.3", "11.1.2.3", "::1"]))
def test_an_index_of_policies_judges_as_a_look_at_every_entry_does(custom, default, name, ip):
    resource = f"Topic:{name}"
    decisive = most_special(custom, resource, PUB, ip) or most_special(default, resource, PUB, ip)
    expected = NOTHING if decisive is None else None if decisive.decision == "Allow" else DENIED
    assert objection(policies(custom, default), resource, PUB, ip) == expected


def test_policies_have_to_allow_it_from_each_address():
    acl = policies([entry("*", ips=["10.0.0.0/8"])])
    assert objection(acl, "Topic:orders", PUB, "10.0.0.1", "10.0.0.2") is None
    assert objection(acl, "Topic:orders", PUB, "10.0.0.1", "11.0.0.2") == NOTHING


def test_addresses_that_an_entry_remembers_are_bounded(monkeypatch):
    monkeypatch.setattr("rmqkit.policies._ADDRESSES_MAX", 3)
    index = PolicyIndex("anna", policies([entry("*", ips=["10.0.0.0/8"])]))
    for number in range(10):
        assert index.remark("Topic:orders", PUB, [f"10.0.0.{number}"]) is None
        assert index.remark("Topic:orders", PUB, [f"11.0.0.{number}"]) is not None
    (one,) = index._types[0]._prefixed[0][0]
    assert len(one._by_address) <= 3


def test_what_a_body_names_twice_is_judged_once():
    queues = [{"topic": "T", "brokerName": "b", "queueId": number} for number in range(3)]
    body = json.dumps({"clientId": "c", "consumerGroup": "g", "mqSet": queues}).encode()
    asked = list(needed(Command(Code.LOCK_BATCH_MQ, body=body), {}, "c"))
    assert [resource for resource, _ in asked] == ["Group:g", "Topic:T"]


def test_policies_that_would_hold_the_loop_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("rmqkit.broker.access.users._ENTRIES_MAX", 3)
    monkeypatch.setattr("rmqkit.broker.access.users._NETWORKS_MAX", 4)
    monkeypatch.setattr("rmqkit.broker.access.users._ENTRIES_OF_SUBJECT_MAX", 5)
    access = access_table(tmp_path)

    def refusal(names, ips=()):
        try:
            access.put_acl("User:anna", policies([entry(f"Topic:{name}", ips=ips) for name in names]).policies[:1])
        except PeerRefused as refused:
            return refused.code, refused.remark
        return None

    assert refusal("abcd") == (1, "4 entries in one request: at most 3 are kept")
    assert refusal("abc", ["::1", "::2"]) == (1, "6 source ips in one request: at most 4 are kept")
    assert [refusal("abc"), refusal("cde"), refusal("abc")] == [None] * 3, "repeated addresses take no more room"
    assert refusal("fg") == (1, "7 entries of User:anna: at most 5 are kept")
    assert len(access.acls["User:anna"].policies[0].entries) == 5


def test_a_body_that_cannot_be_read_is_refused(tmp_path):
    authorization = Authorization(access_table(tmp_path), "c", None)
    command = Command(Code.LOCK_BATCH_MQ, body=b"{")
    assert authorization.refusal("anna", {"x": ""}, command, ["1.1.1.1"]) == "parse authorization context error."


async def ask(address, credentials, code, body=None, **fields):
    client = RemotingClient(credentials=credentials)
    try:
        command = Command(code, fields=fields or None, body=b"" if body is None else json.dumps(body).encode())
        answer = await client.call(address, command, 60_000)
        return answer.code, answer.remark
    finally:
        await client.close()


async def test_a_broker_refuses_what_policies_do_not_allow(tmp_path):
    broker = BrokerSettings(listen_port=0, bind_address="127.0.0.1", **BELIEVES_US)

    async with Standalone(tmp_path, authentication=USERS, broker=broker) as servers:
        address = servers.broker_address
        assert await ask(address, ROOT, Code.AUTH_CREATE_USER, {"password": "secret12"}, username="anna") == (
            0,
            None,
        )
        acl = {"policies": [{"entries": [{"resource": "Topic:TBW*", "actions": ["Get"], "decision": "Allow"}]}]}
        assert (await ask(address, INNER, Code.AUTH_CREATE_ACL, acl, subject="User:anna"))[0] == 0
        assert (await ask(address, ANNA, Code.GET_TOPIC_CONFIG, topic="TBW102"))[0] == 0
        remark = "User:anna has no permission to access Topic:Other from 127.0.0.1, no matched policies."
        assert await ask(address, ANNA, Code.GET_TOPIC_CONFIG, topic="Other") == (16, remark)
        command = Command(Code.GET_TOPIC_CONFIG, fields={"topic": "Other"})
        ANNA.sign(command)
        assert (await ask_from_elsewhere(address, command)).remark == remark.replace("127.0.0.1", "10.1.2.3")


def test_policies_for_whom_nobody_knows_stop_a_start():
    with pytest.raises(SettingsError, match="authorizationEnabled=true needs authenticationEnabled=true"):
        Authentication.of(AuthenticationSettings(authorization_enabled=True))


@pytest.mark.parametrize("side", ["authentication", "authorization"])
def test_both_strategies_are_accepted_and_no_other(side):
    key = f"{side}Strategy"
    for strategy in PROMISES[key]:
        refuse_unsupported({key: strategy}, source="broker.conf")
    with pytest.raises(SettingsError, match="is not supported yet"):
        refuse_unsupported({key: "com.example.Own"}, source="broker.conf")
