"""Clients of an endpoint without a port in between: calls are made as a transport makes them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from rmqkit.broker.settings import BrokerSettings
from rmqkit.proxy.remote.remote_backend import RemoteBackend
from rmqkit.proxy.schema.messages import message_class, methods
from rmqkit.proxy.service.endpoint import Endpoint
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.router import Router
from rmqkit.remoting.tasks import repeat
from rmqkit.standalone import Standalone
from rmqkit.store.settings import StoreSettings

METHODS = {method.name: method for method in methods()}
BROKER = "broker-a"
ADDRESSES = {"scheme": 1, "addresses": [{"host": "10.0.0.9", "port": 8081}]}


@asynccontextmanager
async def endpoint_of(broker):
    """Return an endpoint of a running broker."""
    router = Router()
    broker.parts.add_handlers([router], Router(), "")
    clock = broker.context.clock
    endpoint = Endpoint(broker.parts.grpc_backend(router), clock, port=8081)
    endpoint.start()
    try:
        yield endpoint
    finally:
        await endpoint.drain()
        await endpoint.stop()


def remote_backend(namesrv, clock, users=None):
    def remoting(router, inner):
        return RemotingClient(router, clock=clock, credentials=inner)

    return RemoteBackend([namesrv], clock, remoting, users)


@asynccontextmanager
async def endpoint_before(servers, users=None):
    """Return an endpoint in front of a name server and its broker, as a proxy has it."""
    clock = servers.broker.context.clock
    backend = remote_backend(servers.namesrv_address, clock, users)
    endpoint = Endpoint(backend, clock, port=8081)
    endpoint.start()
    beating = asyncio.ensure_future(repeat(backend.heartbeat, name="heartbeat", seconds=20, end=endpoint.stopping))
    try:
        yield endpoint
    finally:
        await endpoint.drain()
        await endpoint.stop()
        await beating
        await backend.close()


@asynccontextmanager
async def served(root, *, authentication=None, store=None, by_proxy=False, users=None, **settings):
    """A broker of its own and an endpoint, in the broker or in front of it: the endpoint, and the broker's context."""
    own = BrokerSettings(listen_port=0, bind_address="127.0.0.1", broker_name=BROKER, recall_messages=True, **settings)
    store = StoreSettings(commit_log_file_bytes=1 << 20, **(store or {}))
    async with (
        Standalone(root / "store", broker=own, store=store, authentication=authentication) as servers,
        endpoint_before(servers, users) if by_proxy else endpoint_of(servers.broker) as endpoint,
    ):
        yield Caller(endpoint, servers.broker.context)


class Call:
    """One call; ``seconds``: until its deadline."""

    def __init__(self, metadata, seconds):
        self.metadata = metadata
        self.peername = ("10.0.0.7", 50_000)
        self._seconds = seconds

    def seconds_left(self):
        return self._seconds


class Stream:
    """A Telemetry stream from the client's side; ``ended``: done with what the stream ended with."""

    def __init__(self, caller):
        self.sent = asyncio.Queue()
        self.received = asyncio.Queue()
        call = Call(caller.metadata, None)
        self.ended = asyncio.ensure_future(caller.endpoint.telemetry(call, self._commands(), self.received.put))

    async def _commands(self):
        while (command := await self.sent.get()) is not None:
            yield command

    def send(self, **fields):
        self.sent.put_nowait(message_class("TelemetryCommand")(**fields))

    async def ask(self, **fields):
        """Send a command and return the answer."""
        self.send(**fields)
        return await self.received.get()

    async def end(self):
        """Half-close."""
        self.sent.put_nowait(None)
        await self.ended


def framed(write):
    """Return a function that decodes framed messages, one at a time, for ``write``."""

    async def write_framed(frames):
        assert int.from_bytes(frames[0][:5]) == len(frames[0]) - 5
        await write(METHODS["ReceiveMessage"].response.FromString(frames[0][5:]))
        return 1

    return write_framed


class Caller:
    """A client by its id."""

    def __init__(self, endpoint, context, client_id="c1", **metadata):
        self.endpoint = endpoint
        self.context = context
        self.metadata = {"x-mq-client-id": client_id, "x-mq-language": "GO", "x-mq-client-version": "5.1.2", **metadata}
        self._unpublished = []

    def other(self, client_id, **metadata):
        return Caller(self.endpoint, self.context, client_id, **metadata)

    def topic(self, name="T", queues=1, message_type=None, perm=6):
        self.context.topics.ensure(name, queues)
        config = self.context.topics.get(name)
        config.perm = perm
        if message_type is not None:
            config.attributes = {"message.type": message_type}
        self._unpublished.append(name)
        return name

    async def published(self):
        """Wait until the name servers know the current topics."""
        self.context.topics.register_all()
        await self.context.topics_published()

    async def ask(self, name, seconds=None, **fields):
        method = METHODS[name]
        # Encode the message as any client does: a value that a field cannot hold raises here.
        content = method.request(**fields).SerializeToString()
        if self._unpublished:
            self._unpublished.clear()
            await self.published()
        call, answered = Call(self.metadata, seconds), asyncio.get_running_loop().create_future()
        if self.endpoint.answer_at_once(method, call, content, answered.set_result):
            self.endpoint.handle_gathered()
            return method.response.FromString(await answered)
        return await self.endpoint.unary(method, call, method.request.FromString(content))

    async def send(self, topic="T", body=b"hello", message_id="ID1", properties=None, **system):
        return await self.ask("SendMessage", messages=[message(topic, body, message_id, properties, **system)])

    async def items(self, seconds=None, **fields):
        """Return the items of a receive's answer."""
        method, items, asked = METHODS["ReceiveMessage"], asyncio.Queue(), receive_request(**fields)
        await self.endpoint.receive(method, Call(self.metadata, seconds), asked, items.put, framed(items.put))
        return [items.get_nowait() for _ in range(items.qsize())]

    async def receive(self, **fields):
        """Return the status of a receive and its messages."""
        first, *rest = await self.items(**fields)
        assert first.WhichOneof("content") == "status"
        assert rest[-1].WhichOneof("content") == "delivery_timestamp"
        return first.status, [item.message for item in rest[:-1]]

    async def one(self, **fields):
        status, messages = await self.receive(**fields)
        assert status.code == 20000, status
        (found,) = messages
        return found

    async def ack(self, *handles, topic="T", group="G", message_id="ID1"):
        entries = [{"message_id": message_id, "receipt_handle": handle} for handle in handles]
        return await self.ask("AckMessage", group={"name": group}, topic={"name": topic}, entries=entries)

    async def change(self, handle, seconds, topic="T", group="G", message_id="ID1", **fields):
        names = {"group": {"name": group}, "topic": {"name": topic}, "message_id": message_id}
        duration = {"seconds": seconds}
        return await self.ask(
            "ChangeInvisibleDuration", receipt_handle=handle, invisible_duration=duration, **names, **fields
        )

    async def consumer(self, topic="T", group="G", client_type=3, expression="*"):
        """Open a stream with a consumer's settings. Return the stream and the settings of the answer."""
        stream = Stream(self)
        wanted = {"topic": {"name": topic}, "expression": {"type": 1, "expression": expression}}
        subscription = {"group": {"name": group}, "subscriptions": [wanted]}
        told = await stream.ask(settings={"client_type": client_type, "subscription": subscription})
        return stream, told.settings

    async def producer(self, *topics):
        stream = Stream(self)
        publishing = {"topics": [{"name": name} for name in topics]}
        told = await stream.ask(settings={"client_type": 1, "publishing": publishing})
        return stream, told.settings


def receive_request(
    topic="T", group="G", expression="*", kind=1, batch_size=16, invisible=30, renew=False, broker=BROKER, **more
):
    request = METHODS["ReceiveMessage"].request(
        group={"name": group},
        message_queue={"topic": {"name": topic}, "broker": {"name": broker}},
        filter_expression={"type": kind, "expression": expression},
        batch_size=batch_size,
        auto_renew=renew,
        **more,
    )
    if invisible is not None:
        request.invisible_duration.seconds = invisible
    return request


def message(topic="T", body=b"hello", message_id="ID1", properties=None, **system):
    return {
        "topic": {"name": topic},
        "body": body,
        "user_properties": properties or {},
        "system_properties": {"message_id": message_id, **system},
    }
