"""Users at a proxy in front of a broker that requires signatures and has policies: Apache's proxy and `rmq proxy`
answer the same calls of the same users alike, in front of Apache's broker and of ours. Source: grpc.md §2.2, §2.3,
§11."""

import asyncio
import json
from collections.abc import Iterator, Mapping

import pytest

from rmqkit.remoting.authentication import Credentials
from tests.interop.apache import CLUSTER, open_store_with_apache
from tests.interop.grpc.apache_proxy import prepare_proxy, run_apache_cluster_proxy
from tests.interop.grpc.raw_client import Answer, Client
from tests.interop.grpc.scene import ASKED_AT, ack, consumer, message, receive, send
from tests.interop.kit import ApacheKit
from tests.interop.standalone import run_proxy, run_standalone
from tests.interop.test_authorization import AUTH, CONF, GROUP, ROOT, TOPIC, of, prepare

INNER = {"accessKey": "inner", "secretKey": "inner-secret"}
SIGNED = {
    "authenticationEnabled": "true",
    "authorizationEnabled": "true",
    "innerClientAuthenticationCredentials": json.dumps(INNER),
    "rocketMQClusterName": CLUSTER,
}
PROXY = "org.apache.rocketmq.proxy.auth"
OF_APACHE = {
    "authenticationEnabled": True,
    "authenticationProvider": f"{AUTH}.authentication.provider.DefaultAuthenticationProvider",
    "authenticationMetadataProvider": f"{PROXY}.ProxyAuthenticationMetadataProvider",
    "authorizationEnabled": True,
    "authorizationProvider": f"{AUTH}.authorization.provider.DefaultAuthorizationProvider",
    "authorizationMetadataProvider": f"{PROXY}.ProxyAuthorizationMetadataProvider",
    "innerClientAuthenticationCredentials": json.dumps(INNER),
    "enableAclRpcHookForClusterMode": True,
}
OK, UNAUTHORIZED = 20000, 40100
WITHOUT_NAME = {"route without name", "send without topic", "send nothing", "ack without group", "change without group"}
MAY_EVERYTHING = {"near", "super"}
HANDLE = "0 1700000000000 60000 0 0 broker-a 0 0 0"
NAMES = {"group": {"name": GROUP}, "topic": {"name": TOPIC}}
CALLS: Mapping[str, tuple[str, dict[str, object]]] = {
    "route": ("QueryRoute", {"topic": {"name": TOPIC}, "endpoints": ASKED_AT}),
    "route of nothing": ("QueryRoute", {"topic": {"name": "NowhereAtAll"}, "endpoints": ASKED_AT}),
    "route without name": ("QueryRoute", {"endpoints": ASKED_AT}),
    "assignment": ("QueryAssignment", {**NAMES, "endpoints": ASKED_AT}),
    "send": ("SendMessage", {"messages": [message(TOPIC)]}),
    "send without topic": ("SendMessage", {"messages": [message("")]}),
    "send nothing": ("SendMessage", {}),
    "ack": ("AckMessage", {**NAMES, "entries": [{"message_id": "x", "receipt_handle": HANDLE}]}),
    "ack without group": ("AckMessage", {"topic": {"name": TOPIC}}),
    "change": (
        "ChangeInvisibleDuration",
        {**NAMES, "receipt_handle": HANDLE, "message_id": "x", "invisible_duration": {"seconds": 10}},
    ),
    "change without group": ("ChangeInvisibleDuration", {"topic": {"name": TOPIC}}),
    "forward": ("ForwardMessageToDeadLetterQueue", {**NAMES, "receipt_handle": HANDLE}),
    "end": ("EndTransaction", {"topic": {"name": TOPIC}, "transaction_id": "x", "message_id": "x", "resolution": 1}),
    "recall": ("RecallMessage", {"topic": {"name": TOPIC}, "recall_handle": "x"}),
    "beat of a consumer": ("Heartbeat", {"group": {"name": GROUP}, "client_type": 3}),
    "beat of a producer": ("Heartbeat", {"client_type": 1}),
    "termination": ("NotifyClientTermination", {"group": {"name": GROUP}}),
    "termination without group": ("NotifyClientTermination", {}),
}
SETTINGS: Mapping[str, dict[str, object]] = {
    "producer": {"client_type": 1, "publishing": {"topics": [{"name": TOPIC}]}},
    "consumer": {
        "client_type": 3,
        "subscription": {"group": {"name": GROUP}, "subscriptions": [{"topic": {"name": TOPIC}}]},
    },
}
NAMES_OF_USERS = (
    "none",
    "literal",
    "topic",
    "group",
    "prefix",
    "deny",
    "default",
    "near",
    "far",
    "pub",
    "sub",
    "super",
)


@pytest.fixture(scope="module")
def places(apache_kit: ApacheKit, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Yield the addresses of three proxies: Apache's, ours in front of the same broker, ours in front of our broker."""
    theirs, ours, proxy = (tmp_path_factory.mktemp(name) for name in ("theirs", "ours", "proxy"))
    config = ours / "broker.conf"
    config.write_text("".join(f"{key}={value}\n" for key, value in CONF.items()))
    with (
        open_store_with_apache(apache_kit, theirs / "store", theirs, CONF, credentials=ROOT) as pair,
        run_standalone(ours / "store", ours, "--config", str(config), "--set", "grpcServerPort=-1") as standalone,
    ):
        for address in (pair.broker_addr, standalone.broker_addr):
            prepare(address)
        apache_jars = prepare_proxy(apache_kit.version)
        with (
            run_apache_cluster_proxy(apache_jars, proxy, pair.namesrv_addr, OF_APACHE) as (_, apache_addr),
            run_proxy(theirs, pair.namesrv_addr, SIGNED) as (_, before_apache),
            run_proxy(ours, standalone.namesrv_addr, SIGNED) as (_, before_ours),
        ):
            yield {"apache": apache_addr, "ours before apache": before_apache, "ours": before_ours}


async def told(address: str, user: Credentials | None, **metadata: str | None) -> dict[str, str]:
    """Return the answer to each call: the whole refusal of the user, or that there was no refusal."""
    client_id = "client" if user is None else user.access_key  # in our proxy an id belongs to its first user
    client = Client(address, client_id, user, **metadata)
    found = {name: said(await client.ask(call, **fields)) for name, (call, fields) in CALLS.items()}
    for name, settings in SETTINGS.items():
        stream = client.telemetry()
        found[name] = said(await stream.ask(settings=settings))
        await stream.end()
    await client.close()
    return found


def said(answer: Answer) -> str:
    if answer.failure:
        return answer.failure
    status = answer.first.status
    return f"{status.code} {status.message}" if status.code == UNAUTHORIZED else "let in"


@pytest.mark.parametrize("name", NAMES_OF_USERS)
def test_a_user_may_what_policies_say(places: dict[str, str], name: str) -> None:
    found = {place: asyncio.run(told(address, of(name))) for place, address in places.items()}
    # A deliberate difference: ours also requires Sub on the topic. Otherwise an invented handle could deliver a message
    # of any topic.
    expected = found["apache"] | {"change": found["apache"]["ack"]}
    assert found["ours before apache"] == expected
    assert found["ours"] == expected
    is_refused = {call for call, text in found["ours"].items() if text != "let in"}
    assert is_refused >= WITHOUT_NAME
    assert (is_refused == WITHOUT_NAME) == (name in MAY_EVERYTHING), is_refused


def test_who_signs_wrongly_is_refused(places: dict[str, str]) -> None:
    for user in (
        None,
        Credentials(access_key="stranger", secret_key="x"),
        Credentials(access_key="super", secret_key="x"),
    ):
        found = [asyncio.run(told(address, user)) for address in places.values()]
        for other in found[1:]:
            assert [(call, text, found[0][call]) for call, text in other.items() if text != found[0][call]] == []
        assert "let in" not in found[0].values()


def test_brokers_own_user_may_everything(places: dict[str, str]) -> None:
    for address in places.values():
        found = asyncio.run(told(address, of("inner")))
        assert {call for call, text in found.items() if text != "let in"} == WITHOUT_NAME


def test_a_user_sends_and_receives_by_a_proxy_that_signs(places: dict[str, str]) -> None:
    for address in places.values():
        asyncio.run(sends_and_receives(address, of("literal")))


async def sends_and_receives(address: str, user: Credentials) -> None:
    """Check that a message of a user with the rights is sent and received. The refusals are tested above."""
    client = Client(address, "worker", user)
    await consumer(client, TOPIC, GROUP)
    body = b"signed"
    async with asyncio.timeout(120):
        while True:
            assert (await send(client, TOPIC, body)).first.status.code == OK
            answer = await receive(client, TOPIC, GROUP)
            mine = [one for one in answer.messages if one.body == body]
            if mine:
                break
    for one in mine:
        handle, message_id = one.system_properties.receipt_handle, one.system_properties.message_id
        entry = (await ack(client, TOPIC, GROUP, handle, message_id=message_id)).first.entries[0]
        assert entry.status.code == OK, entry
    await client.close()
