"""gRPC clients that behave like an SDK, over a port or directly on an endpoint of this process.

Both ways run the same code, so that hours of it can pass in virtual time. A `Member` is one client id; several members
share a connection. `Gone`: no answer arrived, so it is unknown whether the endpoint handled the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

import grpc

from rmqkit.proxy.schema.messages import message_class
from tests.proxy import calling
from tests.proxy.calling import BROKER, METHODS, receive_request

OK, EMPTY = 20000, 40401
PRODUCER, PUSH, SIMPLE = 1, 2, 3
NORMAL, FIFO, DELAY, TRANSACTION = 1, 2, 3, 4
COMMIT, ROLLBACK = 1, 2
FROM_CLIENT, FROM_CHECK = 1, 2
CALL_SECONDS = 60.0
BEGIN = b"begin"
"""The body of messages sent before a group starts. Some may be delivered later."""
_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
]


class Gone(Exception):
    """The call was not answered."""


class Refused(Exception):
    """The endpoint refused the call."""

    def __init__(self, status: Any) -> None:
        super().__init__(f"{status.code} {status.message}")
        self.code = status.code


class Wire(Protocol):
    """The transport for the calls of one client id."""

    async def ask(self, name: str, fields: Mapping[str, Any]) -> Any:
        """Return the answer. Raises Gone."""

    async def items(self, request: Any) -> list[Any]:
        """Return all messages of the answer to a receive. Raises Gone."""

    def stream(self) -> Talk:
        """Open a new Telemetry stream."""


class Talk(Protocol):
    """A Telemetry stream."""

    async def tell(self, **fields: Any) -> None:
        """Send a command. Raises Gone."""

    async def next(self) -> Any:
        """Return the next command from the endpoint. Raises Gone."""

    def cut(self) -> None:
        """Close the stream without a goodbye."""


class Member:
    """One client.

    Attributes:
        talk: its stream, or None.
    """

    def __init__(self, wire: Wire, client_id: str) -> None:
        self.wire = wire
        self.id = client_id
        self.talk: Talk | None = None

    async def produces(self, *topics: str) -> None:
        """Open a stream as a producer of topics. Raises Gone."""
        await self._settle({"client_type": PRODUCER, "publishing": {"topics": [{"name": name} for name in topics]}})

    async def consumes(self, group: str, topic: str, client_type: int) -> None:
        """Open a stream as a consumer. Raises Gone."""
        wanted = {"topic": {"name": topic}, "expression": {"type": 1, "expression": "*"}}
        subscription = {"group": {"name": group}, "subscriptions": [wanted]}
        await self._settle({"client_type": client_type, "subscription": subscription})

    async def _settle(self, settings: Mapping[str, Any]) -> None:
        self.talk = self.wire.stream()
        await self.talk.tell(settings=settings)
        # The broker may send requests first.
        while (await self.talk.next()).WhichOneof("command") != "settings":
            pass

    async def orphan(self) -> Any:
        """Return the next half message that the broker checks: a `RecoverOrphanedTransactionCommand`. Raises Gone."""
        assert self.talk is not None, "a producer has a stream"
        while (told := await self.talk.next()).WhichOneof("command") != "recover_orphaned_transaction_command":
            pass
        return told.recover_orphaned_transaction_command

    async def send(self, topic: str, body: bytes, message_id: str, **system: Any) -> Any:
        """Send a message. Return the entry of the answer. Raises Gone, Refused."""
        answer = await self.ask("SendMessage", messages=[calling.message(topic, body, message_id, **system)])
        return answer.entries[0]

    async def end(self, topic: str, transaction_id: str, resolution: int, source: int = FROM_CLIENT) -> None:
        await self.ask(
            "EndTransaction",
            topic={"name": topic},
            message_id=transaction_id,
            transaction_id=transaction_id,
            resolution=resolution,
            source=source,
        )

    async def receive(self, group: str, topic: str, **more: Any) -> list[Any]:
        """Return messages, or none after the time of a long poll. Raises Gone, Refused."""
        more.setdefault("long_polling_timeout", {"seconds": 5})
        items = await self.wire.items(receive_request(topic, group, **more))
        status = items[0].status
        if status.code not in (OK, EMPTY):
            raise Refused(status)
        return [item.message for item in items if item.WhichOneof("content") == "message"]

    async def ack(self, group: str, topic: str, *messages: Any) -> None:
        entries = [
            {"message_id": one.system_properties.message_id, "receipt_handle": one.system_properties.receipt_handle}
            for one in messages
        ]
        await self.ask("AckMessage", group={"name": group}, topic={"name": topic}, entries=entries)

    async def hide(self, group: str, topic: str, message: Any, seconds: int) -> None:
        """Change the time until a message is redelivered, and its handle. 0 redelivers it at once, as after a failed
        handler.
        """
        answer = await self.ask(
            "ChangeInvisibleDuration",
            group={"name": group},
            topic={"name": topic},
            receipt_handle=message.system_properties.receipt_handle,
            message_id=message.system_properties.message_id,
            invisible_duration={"seconds": seconds},
        )
        message.system_properties.receipt_handle = answer.receipt_handle

    async def beat(self, group: str | None, client_type: int) -> None:
        """Send a heartbeat."""
        of_group = {} if group is None else {"group": {"name": group}}
        await self.ask("Heartbeat", client_type=client_type, **of_group)

    async def leave(self, group: str | None = None) -> None:
        """Send a goodbye and close the stream."""
        await self.ask("NotifyClientTermination", **({} if group is None else {"group": {"name": group}}))
        self.cut()

    def cut(self) -> None:
        """Close the stream, if it is open."""
        talk, self.talk = self.talk, None
        if talk is not None:
            talk.cut()

    async def ask(self, name: str, **fields: Any) -> Any:
        """Make any call. Raises Gone, Refused."""
        answer = await self.wire.ask(name, fields)
        if answer.status.code != OK:
            raise Refused(answer.status)
        return answer


class Connection:
    """A connection to an endpoint, which reconnects by itself."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, _OPTIONS)
        self._calls = {name: self._call(name) for name in METHODS}

    def member(self, client_id: str) -> Member:
        return Member(_Called(self._calls, client_id), client_id)

    async def close(self) -> None:
        await self._channel.close()

    def _call(self, name: str) -> Any:
        method = METHODS[name]
        kind: Any = self._channel.unary_unary
        if method.streams_responses:
            kind = self._channel.stream_stream if method.streams_requests else self._channel.unary_stream
        return kind(method.path, method.request.SerializeToString, method.response.FromString)


class _Called:
    """Calls over a connection."""

    def __init__(self, calls: Mapping[str, Any], client_id: str) -> None:
        self._calls = calls
        entries = {"client-id": client_id, "language": "GO", "client-version": "5.1.2"}
        self._metadata = [(f"x-mq-{key}", value) for key, value in entries.items()]

    async def ask(self, name: str, fields: Mapping[str, Any]) -> Any:
        request = METHODS[name].request(**fields)
        try:
            return await self._calls[name](request, timeout=CALL_SECONDS, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise Gone(f"{name}: {error.code().name} {error.details()}") from None

    async def items(self, request: Any) -> list[Any]:
        call = self._calls["ReceiveMessage"](request, timeout=CALL_SECONDS, metadata=self._metadata)
        try:
            return [item async for item in call]
        except grpc.aio.AioRpcError as error:
            raise Gone(f"ReceiveMessage: {error.code().name} {error.details()}") from None
        finally:
            call.cancel()

    def stream(self) -> Talk:
        return _Stream(self._calls["Telemetry"](metadata=self._metadata))


class _Stream:
    """A Telemetry stream over a connection."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._came: asyncio.Queue[Any] = asyncio.Queue()
        # A caller that waits for a command may be cancelled, and a cancelled read ends the call.
        self._reading = asyncio.create_task(self._read(), name="soak stream")

    async def tell(self, **fields: Any) -> None:
        try:
            await self._call.write(message_class("TelemetryCommand")(**fields))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise Gone(f"Telemetry: {error}") from None

    async def next(self) -> Any:
        came = await self._came.get()
        if isinstance(came, Gone):
            self._came.put_nowait(came)
            raise came
        return came

    def cut(self) -> None:
        self._call.cancel()
        self._reading.cancel()

    async def _read(self) -> None:
        try:
            while (command := await self._call.read()) is not grpc.aio.EOF:
                self._came.put_nowait(command)
            self._came.put_nowait(Gone("the stream was completed"))
        except grpc.aio.AioRpcError as error:
            self._came.put_nowait(Gone(f"Telemetry: {error.code().name} {error.details()}"))
        except asyncio.CancelledError:
            self._came.put_nowait(Gone("the stream was cut"))
            raise


class Straight:
    """Calls to an endpoint of this process, without a port."""

    def __init__(self, caller: calling.Caller) -> None:
        self._caller = caller

    def member(self, client_id: str) -> Member:
        return Member(Straight(self._caller.other(client_id)), client_id)

    async def ask(self, name: str, fields: Mapping[str, Any]) -> Any:
        return await self._caller.ask(name, **fields)

    async def items(self, request: Any) -> list[Any]:
        items: asyncio.Queue[Any] = asyncio.Queue()
        call = calling.Call(self._caller.metadata, CALL_SECONDS)
        framed = calling.framed(items.put)
        await self._caller.endpoint.receive(METHODS["ReceiveMessage"], call, request, items.put, framed)
        return [items.get_nowait() for _ in range(items.qsize())]

    def stream(self) -> Talk:
        return _StraightStream(calling.Stream(self._caller))


class _StraightStream:
    """A Telemetry stream without a port."""

    def __init__(self, stream: calling.Stream) -> None:
        self._stream = stream

    async def tell(self, **fields: Any) -> None:
        self._stream.send(**fields)

    async def next(self) -> Any:
        return await self._stream.received.get()

    def cut(self) -> None:
        self._stream.ended.cancel()


async def begin(member: Member, group: str, topic: str, producer: Member) -> None:
    """Start a new group: it does not get messages sent before its first receive."""
    receiving = asyncio.create_task(member.receive(group, topic))
    number = 0
    while not receiving.done():
        await producer.send(topic, BEGIN, f"begin {topic} {number}")
        await asyncio.wait([receiving], timeout=0.05)
        number += 1
    await member.ack(group, topic, *receiving.result())


async def until_answered(work: Any, seconds: float = 150.0) -> Any:
    """Repeat a call until it is answered, and return the answer. ``work``: creates the coroutine."""
    async with asyncio.timeout(seconds):
        while True:
            with suppress(Gone):
                return await work()
            await asyncio.sleep(0.05)


__all__ = [
    "BEGIN",
    "BROKER",
    "COMMIT",
    "DELAY",
    "EMPTY",
    "FIFO",
    "FROM_CHECK",
    "NORMAL",
    "OK",
    "PUSH",
    "ROLLBACK",
    "SIMPLE",
    "TRANSACTION",
    "Connection",
    "Gone",
    "Member",
    "Refused",
    "Straight",
    "begin",
    "until_answered",
]
