"""A standalone and one client connection to it, for tests of the broker's answers."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rmqkit.broker.settings import BrokerSettings
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.filter import subscription
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command, decode_fields, decode_header, request
from rmqkit.protocol.schemas.clients import ConsumerData, ConsumerGroupRequest, HeartbeatData, ProducerData
from rmqkit.protocol.schemas.pull import PullFlag, PullMessageRequest
from rmqkit.protocol.schemas.send import SendMessageRequest, SendMessageV2Request
from rmqkit.remoting.authentication import AuthenticationSettings
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.router import Router
from rmqkit.settings import load
from rmqkit.standalone import Standalone
from rmqkit.store.settings import StoreSettings

ILLEGAL = (
    "the message is illegal, maybe msg body or properties length not matched. msg body length limit 4194304B, "
    "msg properties length limit 32KB."
)
FAQ = "\nSee https://rocketmq.apache.org/docs/bestPractice/06FAQ for further details."


class Cluster:
    """A standalone and one client connection to it."""

    def __init__(self, root, **settings):
        broker = BrokerSettings(
            listen_port=0, bind_address="127.0.0.1", broker_name="broker-a", **settings.pop("broker", {})
        )
        store = StoreSettings(**{"commit_log_file_bytes": 1 << 20, **settings.pop("store", {})})
        clock = settings.pop("clock", SYSTEM_CLOCK)
        self.standalone = Standalone(root, broker=broker, store=store, clock=clock)
        self.notices: list[str] = []
        self.clients: list[RemotingClient] = []
        self.client = self.new_client()

    def new_client(self, answers=None):
        dispatch = Router()
        dispatch.register(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, self.notified)
        for code, handler in (answers or {}).items():
            dispatch.register(code, handler)
        self.clients.append(RemotingClient(dispatch))
        return self.clients[-1]

    def notified(self, connection, command):
        self.notices.append(decode_header(command, ConsumerGroupRequest).consumer_group)

    async def call(self, code, header=None, body=b"", client=None):
        return await (client or self.client).call(self.standalone.broker_address, request(code, header, body), 60_000)

    async def ask(self, code, body=b"", client=None, **fields):
        """Send a request with these texts as its fields, also missing, empty and unreadable ones. Return the answer."""
        texts = {name: str(value) for name, value in fields.items()}
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        command = Command(code, fields=texts or None, body=content)
        return await (client or self.client).call(self.standalone.broker_address, command, 60_000)

    async def send(self, topic="T", body=b"hello", properties="", code=RequestCode.SEND_MESSAGE_V2, **fields):
        header_type = SendMessageRequest if code == RequestCode.SEND_MESSAGE else SendMessageV2Request
        header = header_type(
            producer_group="p",
            topic=topic,
            default_topic=fields.pop("default_topic", "TBW102"),
            default_topic_queue_nums=fields.pop("queues", 4),
            queue_id=fields.pop("queue_id", 0),
            sys_flag=fields.pop("sys_flag", 0),
            born_timestamp=1_700_000_000_000,
            flag=fields.pop("flag", 0),
            properties=properties,
            **fields,
        )
        return await self.call(code, header, body)

    async def pull(self, offset=0, topic="T", queue_id=0, expression="*", flags=PullFlag.SUBSCRIPTION, **fields):
        client = fields.pop("client", None)
        header = PullMessageRequest(
            consumer_group=fields.pop("group", "g"),
            topic=topic,
            queue_id=queue_id,
            queue_offset=offset,
            max_msg_nums=fields.pop("count", 32),
            sys_flag=flags,
            commit_offset=fields.pop("commit", 0),
            suspend_timeout_millis=fields.pop("suspend_ms", 15_000),
            sub_version=fields.pop("version", 0),
            subscription=expression,
            **fields,
        )
        return await self.call(RequestCode.PULL_MESSAGE, header, client=client)

    async def heartbeat(self, client_id, *topics, client=None, group="g", version=1, **fields):
        subscriptions = [subscription(t, e, version=version) for t, e in topics]
        data = HeartbeatData(
            clientID=client_id,
            consumerDataSet=[ConsumerData(group_name=group, subscription_data_set=subscriptions, **fields)],
            producerDataSet=[ProducerData("p")],
        )
        return await self.call(RequestCode.HEART_BEAT, body=msgspec.json.encode(data), client=client)

    async def number(self, code, header):
        return int(decode_fields(await self.call(code, header)).get("offset", -99))

    async def __aenter__(self):
        await self.standalone.start()
        return self

    async def __aexit__(self, *exc_info):
        for client in self.clients:
            await client.close()
        await self.standalone.stop()


USERS = AuthenticationSettings(
    enabled=True, initial_user='{"username":"root","password":"secret12"}', authorization_enabled=True
)


def serving(
    root: Path,
    *,
    users: bool = False,
    full: bool = False,
    broker: dict[str, str] | None = None,
    namesrv: dict[str, str] | None = None,
) -> Standalone:
    """A name server and a broker; ``broker``, ``namesrv`` are lines of their files.
    ``users``: whether they know users; ``full``: whether these have to sign fully."""
    return Standalone(
        root / "store",
        authentication=msgspec.structs.replace(USERS, full_signatures_only=full) if users else None,
        broker=_settings(BrokerSettings, broker),
        namesrv=_settings(NamesrvSettings, namesrv),
    )


def _settings(settings_type, lines):
    return load([settings_type], {"listenPort": "0", "bindAddress": "127.0.0.1", **(lines or {})}).values[0]
