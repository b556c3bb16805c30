"""The endpoint on a port, called by grpc's own client. Source: grpc.md §1, §3.1."""

from __future__ import annotations

import asyncio
import ssl
import sys

import grpc
import grpc.aio
import pytest

from rmqkit.broker.settings import BrokerRole, BrokerSettings
from rmqkit.core import CORE
from rmqkit.errors import ExtraMissing
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import request
from rmqkit.proxy.schema.messages import SERVICE, message_class
from rmqkit.proxy.transport.frames import DATA, END_HEADERS, END_STREAM, HEADERS, SETTINGS, frame
from rmqkit.proxy.transport.header_blocks import header_block
from rmqkit.remoting.address import AdminAddresses, split_address
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.listening import ListenFailed
from rmqkit.remoting.tls import ClientTls, ServerTls, ServerTlsSettings, Tls, TlsMode
from rmqkit.standalone import Standalone
from tests.certificates import OPENSSL, REASON, make_certificate
from tests.proxy.calling import METHODS, message, receive_request
from tests.proxy.test_http2 import GREETING

# grpc has a thread of its own, which knows nothing of virtual time.
pytestmark = pytest.mark.real_time

METADATA = (("x-mq-client-id", "c1"), ("x-mq-language", "GO"))
NOTHING = message_class("HeartbeatRequest")


def servers(root, **settings):
    own = BrokerSettings(listen_port=0, bind_address="127.0.0.1", **{"grpc_port": 0, **settings})
    return Standalone(root, broker=own)


class Stubs:
    """Raw calls over a channel."""

    def __init__(self, channel):
        self._channel = channel

    def __getattr__(self, name):
        method = METHODS[name]
        kinds = {(False, False): "unary_unary", (False, True): "unary_stream", (True, True): "stream_stream"}
        make = getattr(self._channel, kinds[method.streams_requests, method.streams_responses])
        return make(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )


@pytest.fixture
async def running(tmp_path):
    async with servers(tmp_path) as it:
        it.broker.context.topics.ensure("T", 1)
        yield it


@pytest.fixture
async def channel(running):
    async with grpc.aio.insecure_channel(running.broker.grpc_address) as it:
        yield it


async def test_a_message_goes_through(channel):
    stubs = Stubs(channel)
    stream = stubs.Telemetry(metadata=METADATA)
    settings = {"client_type": 3, "subscription": {"group": {"name": "G"}}}
    await stream.write(message_class("TelemetryCommand")(settings=settings))
    assert (await stream.read()).settings.subscription.receive_batch_size == 32
    sent = await stubs.SendMessage(METHODS["SendMessage"].request(messages=[message()]), metadata=METADATA)
    assert sent.status.code == 20000
    items = [item async for item in stubs.ReceiveMessage(receive_request(), metadata=METADATA, timeout=30)]
    assert [item.WhichOneof("content") for item in items] == ["status", "message", "delivery_timestamp"]
    assert items[1].message.system_properties.born_host.startswith("127.0.0.1:")
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF


async def test_settings_that_cannot_be_end_the_stream_with_a_status(channel):
    stream = Stubs(channel).Telemetry(metadata=METADATA)
    await stream.write(message_class("TelemetryCommand")(settings={}))
    with pytest.raises(grpc.aio.AioRpcError, match="there is no publishing or subscription data in settings") as caught:
        await stream.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("name", ["PullMessage", "GetOffset", "UpdateOffset"])
async def test_what_is_not_built_is_unimplemented(channel, name):
    call = channel.unary_unary(f"/{SERVICE}/{name}")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"", metadata=METADATA)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("content", [b"\xff" * 20, b"\x0a\x05ab", b"\x0a\x02\xff\xfe"])
async def test_what_is_no_protobuf_is_refused_by_grpc(channel, content):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(f"/{SERVICE}/QueryRoute")(content, metadata=METADATA)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    answer = await Stubs(channel).Heartbeat(NOTHING(), metadata=METADATA)
    assert answer.status.code == 40015, "the connection goes on"


async def test_what_is_no_protobuf_ends_a_stream(channel):
    stream = channel.stream_stream(f"/{SERVICE}/Telemetry")(metadata=METADATA)
    await stream.write(b"\xff" * 20)
    with pytest.raises(grpc.aio.AioRpcError, match="Invalid protobuf byte sequence"):
        await stream.read()


async def test_more_than_a_message_may_have_is_refused_by_grpc(channel):
    large = METHODS["SendMessage"].request(messages=[message(body=bytes(17 << 20))])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await Stubs(channel).SendMessage(large, metadata=METADATA)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_receive_given_up_by_its_client_pops_nothing(channel):
    stubs = Stubs(channel)
    waiting = stubs.ReceiveMessage(receive_request(), metadata=METADATA, timeout=30)
    reading = asyncio.ensure_future(waiting.read())
    while not await asked_once(stubs):
        pass
    waiting.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await stubs.SendMessage(METHODS["SendMessage"].request(messages=[message()]), metadata=METADATA)
    items = [item async for item in stubs.ReceiveMessage(receive_request(), metadata=METADATA, timeout=30)]
    assert items[1].message.system_properties.delivery_attempt == 1


async def asked_once(stubs):
    """Make a call, after which the server has handled all earlier data."""
    return (await stubs.Heartbeat(NOTHING(), metadata=METADATA)).status.code == 40015


async def test_a_stop_ends_what_is_held(tmp_path):
    async with servers(tmp_path) as running:
        running.broker.context.topics.ensure("T", 1)
        async with grpc.aio.insecure_channel(running.broker.grpc_address) as channel:
            stubs = Stubs(channel)
            held = [stubs.ReceiveMessage(receive_request(), metadata=METADATA, timeout=60) for _ in range(1000)]
            stream = stubs.Telemetry(metadata=METADATA)
            await stream.write(message_class("TelemetryCommand")())
            assert await asked_once(stubs)
            await running.broker.stop()
            for call in (*held, stream):
                assert await ended(call)


async def ended(call):
    """Return True if the call ends without a message, with an answer or by a cut connection."""
    try:
        return all(item.WhichOneof("content") != "message" for item in [one async for one in call])
    except grpc.aio.AioRpcError as error:
        return error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def test_the_port_takes_clients_of_the_remoting_protocol(running):
    client = RemotingClient()
    answer = await client.call(running.broker.grpc_address, request(RequestCode.GET_BROKER_CONFIG), 10_000)
    await client.close()
    assert b"brokerName=" in answer.payload


@pytest.mark.skipif(OPENSSL is None, reason=REASON)
async def test_tls_with_a_certificate(tmp_path):
    made = make_certificate(tmp_path, "localhost")
    tls = ServerTls(ServerTlsSettings(mode=TlsMode.ENFORCING, certificate=made.certificate, key=made.key))
    own = BrokerSettings(listen_port=0, bind_address="127.0.0.1", grpc_port=0)
    client_tls = ClientTls(Tls(verify=False))
    trusted = grpc.ssl_channel_credentials((tmp_path / "localhost.crt").read_bytes())
    named = (("grpc.ssl_target_name_override", "localhost"),)
    async with Standalone(tmp_path / "store", broker=own, tls=tls, client_tls=client_tls) as running:
        running.broker.context.topics.ensure("T", 1)
        async with grpc.aio.secure_channel(running.broker.grpc_address, trusted, named) as channel:
            stubs = Stubs(channel)
            for body in (b"small", bytes(3 << 20)):
                sent = METHODS["SendMessage"].request(messages=[message(body=body)])
                assert (await stubs.SendMessage(sent, metadata=METADATA)).status.code == 20000
                received = stubs.ReceiveMessage(receive_request(), metadata=METADATA, timeout=30)
                assert [item.message.body async for item in received][1:-1] == [body]
        async with grpc.aio.insecure_channel(running.broker.grpc_address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await Stubs(channel).Heartbeat(NOTHING(), metadata=METADATA, timeout=30)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.skipif(OPENSSL is None, reason=REASON)
async def test_tls_with_a_certificate_made_at_the_start_beside_plain_calls(tmp_path):
    """The SDKs for Java and Go accept any certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    own = BrokerSettings(listen_port=0, bind_address="127.0.0.1", grpc_port=0)
    async with Standalone(tmp_path / "store", broker=own, tls=ServerTls(ServerTlsSettings())) as running:
        reader, writer = await asyncio.open_connection(*split_address(running.broker.grpc_address), ssl=context)
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
        writer.write(GREETING)
        assert (await reader.readexactly(9))[3] == SETTINGS
        writer.close()
        async with grpc.aio.insecure_channel(running.broker.grpc_address) as channel:
            assert await asked_once(Stubs(channel))


async def test_who_a_balancer_names_is_the_peer(tmp_path):
    async with servers(tmp_path, proxy_addresses=AdminAddresses("loopback")) as running:
        running.broker.context.topics.ensure("T", 1)
        assert await born_host_behind_a_balancer(running.broker.grpc_address) == "203.0.113.9:4321"


async def born_host_behind_a_balancer(address):
    """Return the born host of a message that arrives through a balancer's connection."""
    reader, writer = await asyncio.open_connection(*split_address(address))
    asked = METHODS["SendMessage"].request(messages=[message()]).SerializeToString()
    listed = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", METHODS["SendMessage"].path.encode())]
    listed += [(b"content-type", b"application/grpc"), (b"x-mq-client-id", b"c1")]
    opened = frame(HEADERS, END_HEADERS, 1, header_block(listed))
    writer.write(b"PROXY TCP4 203.0.113.9 192.0.2.1 4321 8081\r\n" + GREETING + opened)
    writer.write(frame(DATA, END_STREAM, 1, b"\0" + len(asked).to_bytes(4) + asked))
    await reader.readuntil(b"grpc-status\x010")
    writer.close()
    async with grpc.aio.insecure_channel(address) as channel:
        items = [item async for item in Stubs(channel).ReceiveMessage(receive_request(broker=""), metadata=METADATA)]
    return items[1].message.system_properties.born_host


async def test_a_port_that_is_taken_stops_the_start(tmp_path, running):
    port = int(running.broker.grpc_address.rpartition(":")[2])
    with pytest.raises(ListenFailed, match=str(port)):
        await servers(tmp_path / "other", grpc_port=port).start()


async def test_without_the_extra_the_setting_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(CORE, "fault", "turned off")  # the compiled core needs no hpack
    for name in ("grpc_call", "http2", "header_blocks", "plain_header_blocks"):
        monkeypatch.delitem(sys.modules, f"rmqkit.proxy.transport.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "hpack", None)
    told = r"grpcServerPort=0 \(-1 for no such port\) needs hpack, which is not installed: pip install '.*\[grpc\]'"
    with pytest.raises(ExtraMissing, match=told):
        await servers(tmp_path).start()


async def test_a_slave_has_no_endpoint(tmp_path):
    async with servers(tmp_path, broker_role=BrokerRole.SLAVE, broker_id=1) as running:
        assert running.broker.grpc_address == ""
