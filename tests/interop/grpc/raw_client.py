"""A client of the gRPC service without an SDK: fields in, messages out, each answer as masked ``path: value`` lines.

Values that differ between two servers are masked: times, ports, numbers of receipt handles, positions in the log, and
Java class names and stack lines in Apache's texts.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message

from rmqkit.proxy.schema.messages import message_class, methods
from rmqkit.remoting.authentication import Credentials

METHODS = {method.name: method for method in methods()}
BODIES_OF_4_MIB = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]
_LITE_LIMITS = ("settings.subscription.lite_subscription_quota", "settings.subscription.max_lite_topic_size")
CALL_SECONDS = 20.0
STREAM_SECONDS = 60.0
SIGNED_DATE = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one call: all its messages, or gRPC's error."""

    items: list[Any]
    failure: str = ""

    @property
    def first(self) -> Any:
        assert self.items, f"the call failed: {self.failure}"
        return self.items[0]

    @property
    def messages(self) -> list[Any]:
        """Return the messages of a receive."""
        return [item.message for item in self.items if item.WhichOneof("content") == "message"]

    @property
    def handles(self) -> list[str]:
        return [message.system_properties.receipt_handle for message in self.messages]

    def lines(self, grpc_port: int) -> list[str]:
        """Return the answer as lines to compare."""
        found = [f"grpc: {masked_text(self.failure)}"] if self.failure else []
        for number, item in enumerate(self.items):
            found += flattened(item, grpc_port, f"[{number}]." if len(self.items) > 1 else "")
        # 5.5 sends the limits of lite topics to every consumer.
        return [line for line in found if not line.startswith(_LITE_LIMITS)]


class Client:
    """A client with an id. ``metadata`` changes its call's metadata (None removes an entry). ``user`` signs."""

    def __init__(
        self, address: str, client_id: str | None, user: Credentials | None = None, **metadata: str | None
    ) -> None:
        self.address = address
        entries = {"client_id": client_id, "language": "GO", "client_version": "5.1.2", **metadata}
        self._metadata = [
            (f"x-mq-{key.replace('_', '-')}", value) for key, value in entries.items() if value is not None
        ]
        if user is not None:
            digest = hmac.digest(user.secret_key.encode(), SIGNED_DATE.encode(), "sha1").hex()
            signed = f"Credential={user.access_key}, SignedHeaders=x-mq-date-time, Signature={digest}"
            self._metadata += [("x-mq-date-time", SIGNED_DATE), ("authorization", f"MQv2-HMAC-SHA1 {signed}")]
        self._channel = grpc.aio.insecure_channel(address, BODIES_OF_4_MIB)

    async def ask(self, name: str, seconds: float | None = CALL_SECONDS, **fields: Any) -> Answer:
        """Make one call. ``seconds``: its deadline."""
        method = METHODS[name]
        kind = self._channel.unary_stream if method.streams_responses else self._channel.unary_unary
        call = kind(method.path, method.request.SerializeToString, method.response.FromString)
        running = call(method.request(**fields), timeout=seconds, metadata=self._metadata)
        items = []
        try:
            if method.streams_responses:
                items += [item async for item in running]
            else:
                items.append(await running)
        except grpc.aio.AioRpcError as failed:
            return Answer(items, f"{failed.code().name} {failed.details()}")
        return Answer(items)

    async def ask_with_bytes(self, name: str, request: bytes) -> Answer:
        """Make one call with any bytes as the request."""
        method = METHODS[name]
        call = self._channel.unary_unary(method.path, None, method.response.FromString)
        try:
            return Answer([await call(request, timeout=CALL_SECONDS, metadata=self._metadata)])
        except grpc.aio.AioRpcError as failed:
            return Answer([], f"{failed.code().name} {failed.details()}")

    def telemetry(self) -> Stream:
        method = METHODS["Telemetry"]
        call = self._channel.stream_stream(method.path, method.request.SerializeToString, method.response.FromString)
        return Stream(call(timeout=STREAM_SECONDS, metadata=self._metadata))

    async def close(self) -> None:
        await self._channel.close()


class Stream:
    """A Telemetry stream."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def ask(self, **fields: Any) -> Answer:
        """Send a command. Return the next command, or the end of the stream."""
        try:
            await self._call.write(message_class("TelemetryCommand")(**fields))
            return await self.next()
        except asyncio.InvalidStateError:  # the server ended the stream before the command was written
            return Answer([], f"{(await self._call.code()).name} {await self._call.details()}")

    async def tell(self, **fields: Any) -> None:
        """Send a command that gets no answer."""
        await self._call.write(message_class("TelemetryCommand")(**fields))

    async def half_close(self) -> None:
        await self._call.done_writing()

    async def next(self) -> Answer:
        try:
            command = await self._call.read()
        except grpc.aio.AioRpcError as failed:
            return Answer([], f"{failed.code().name} {failed.details()}")
        return Answer([], "the stream was completed") if command is grpc.aio.EOF else Answer([command])

    async def end(self) -> None:
        self._call.cancel()


def flattened(message: Message, grpc_port: int, path: str = "") -> list[str]:
    """Return every set field as ``path: value``, in the order of field numbers, maps by key."""
    found: list[str] = []
    for field, value in message.ListFields():
        where = f"{path}{field.name}"
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            found += [f"{where}[{key}]: {masked_text(str(value[key]))!r}" for key in sorted(value)]
        elif isinstance(value, (Message, bytes, str, int, float)):
            found += list(_one(field, value, where, grpc_port))
        else:
            for number, item in enumerate(value):
                found += list(_one(field, item, f"{where}[{number}]", grpc_port))
    # A present value without fields, such as a disabled Metric.
    return found or [f"{path.rstrip('.') or 'message'}: (empty)"]


def _one(field: Any, value: Any, where: str, grpc_port: int) -> Iterator[str]:
    if field.message_type is not None and field.message_type.full_name == "google.protobuf.Timestamp":
        yield f"{where}: <time>" if value.seconds > 1_600_000_000 else f"{where}: {value.seconds} s {value.nanos} ns"
    elif isinstance(value, Message):
        yield from flattened(value, grpc_port, f"{where}.")
    elif field.name == "receipt_handle":
        yield f"{where}: {masked_handle(value)}"
    elif field.name == "recall_handle":
        padded = value + "=" * (-len(value) % 4)
        yield f"{where}: {masked_text(base64.urlsafe_b64decode(padded).decode())!r}"
    elif field.name == "port" and value == grpc_port:
        yield f"{where}: <grpc>"
    elif field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        yield f"{where}: {known.name if known else value}"
    elif isinstance(value, str):
        yield f"{where}: {masked_text(value)!r}"
    else:
        yield f"{where}: {value!r}"


def masked_text(text: str) -> str:
    text = text.replace("org.apache.rocketmq.proxy.common.ProxyException: ", "")
    text = re.sub(r"\. [A-Za-z]+Exception\. [a-z]+\.[\w.$]+\(.*\)$", "", text)
    text = re.sub(r"(127\.0\.0\.1|\[::1\]|localhost):\d+", r"\1:<port>", text)
    return re.sub(r"\b1[6-9]\d{11}\b", "<ms>", text)


def masked_handle(handle: str) -> str:
    """Mask a handle. Invisible time, revive queue of an ordered pop, flag, broker and queue remain: the server uses
    them. Apache's handles have one more word after a change."""
    words = handle.split(" ")
    if not 8 <= len(words) <= 10 or not words[1].isdigit():
        return repr(handle)
    start, _, invisible, revive, flag, broker, queue, *offsets = words
    kept = "999" if revive == "999" else "<revive>"
    return " ".join(
        [
            "<start>" if start else "",
            "<ms>",
            invisible,
            kept,
            flag,
            broker,
            queue,
            "<n>" if len(offsets) > 1 else "<offset>",
        ]
    )
