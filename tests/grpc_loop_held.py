"""Every gRPC call at its size limits, and the CPU time for which each call holds the event loop of a broker.

`make loop-held` runs it after `tests.loop_held`. A client in a separate thread sends the calls as encoded bytes. The
result is the CPU time of the longest callback of the loop, the smallest of three tries.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from rmqkit.broker.settings import BrokerSettings
from rmqkit.proxy.schema.messages import Method, methods
from rmqkit.standalone import Standalone
from rmqkit.store.settings import StoreSettings
from tests.loop_held import MAX_SECONDS, Held, table
from tests.strangers import measured

__all__ = ["held"]

_TRIES = 3
_BIG = 16 << 20
_NAMES = {"group": {"name": "G"}, "topic": {"name": "T"}}
_ENDPOINTS = {"scheme": 1, "addresses": [{"host": "127.0.0.1", "port": 8081}]}
_METADATA = [("x-mq-client-id", "c1"), ("x-mq-language", "GO"), ("x-mq-client-version", "5.1.2")]
_STREAMS = ("ReceiveMessage", "Telemetry")


def _shapes(method: Method, now_ms: int) -> Iterator[tuple[str, bytes]]:
    """Yield the shapes of one call: encoded requests, by the part that is at its limit."""
    made = lambda **fields: method.request(**fields).SerializeToString()  # noqa: E731
    # Every repeated field, as often as fits into 16 MiB, and as often as the decoder accepts.
    for field in method.request.DESCRIPTOR.fields:
        tag = bytes([field.number << 3 | 2, 0])
        if field.type == field.TYPE_MESSAGE or field.type == field.TYPE_STRING:
            yield f"{field.name}: 16 MiB of empty ones", tag * ((_BIG - 16) // 2)
            yield f"{field.name}: 11,900 empty ones", tag * 11_900
        if field.type == field.TYPE_STRING:
            yield f"{field.name}: 1 MiB of text", made(**{field.name: "a" * (1 << 20)})
    handle = f"0 {now_ms} 60000 2 0 b 3 %d 123456"
    match method.name:
        case "AckMessage":
            for name, text in (("unreadable", "x%d"), ("forged", handle), ("long", "1 " * 1000 + "%d")):
                entries = [{"message_id": f"id{n}", "receipt_handle": text % n} for n in range(10_000)]
                yield f"10,000 {name} handles", made(entries=entries, **_NAMES)
            yield "10,001 handles", made(entries=[{"receipt_handle": "x"}] * 10_001, **_NAMES)
        case "ChangeInvisibleDuration" | "ForwardMessageToDeadLetterQueue":
            yield "a forged handle", made(receipt_handle=handle % 0, **_NAMES)
            yield "a handle of 1 MiB", made(receipt_handle="1 " * (1 << 19), **_NAMES)
        case "SendMessage":
            yield from _sends(made)
        case "QueryRoute" | "QueryAssignment":
            names = {"topic": {"name": "Big"}} | ({"group": {"name": "G"}} if method.name == "QueryAssignment" else {})
            yield "20,000 queues", made(endpoints=_ENDPOINTS, **names)
            many = {"scheme": 1, "addresses": [{"host": "10.0.0.1", "port": 1}] * 10_000}
            yield "10,000 addresses", made(endpoints=many, topic={"name": "T"})
        case "ReceiveMessage":
            queue = {"message_queue": {"topic": {"name": "T"}}, "group": {"name": "G"}, "auto_renew": True}
            yield "SQL", made(filter_expression={"type": 2, "expression": "a=1 OR " * 2300 + "a=1"}, **queue)
            yield "tags", made(filter_expression={"type": 1, "expression": "a||" * 20_000 + "a"}, **queue)
        case "Telemetry":
            yield from _settings(made)


def _sends(made: Callable[..., bytes]) -> Iterator[tuple[str, bytes]]:
    def message(**more: Any) -> dict[str, Any]:
        return {"topic": {"name": "T"}, "body": b"x", "system_properties": {"message_id": "id"}} | more

    yield "one message of 4 MiB", made(messages=[message(body=bytes(4 << 20))])
    yield "2,000 messages", made(messages=[message()] * 2000)
    properties = {f"p{n}": "v" for n in range(128)}
    yield "80 messages of 128 properties", made(messages=[message(user_properties=properties)] * 80)
    yield "10,000 properties", made(messages=[message(user_properties={f"p{n}": "v" for n in range(10_000)})])
    yield "10,000 keys", made(messages=[message(system_properties={"keys": [f"k{n}" for n in range(10_000)]})])
    gzipped = gzip.compress(bytes(64 << 20))
    system = {"message_id": "id", "body_encoding": 2}
    yield "a body of gzip", made(messages=[message(body=gzipped, system_properties=system)])
    yield "1,000 bodies of gzip", made(messages=[message(body=gzip.compress(b"x"), system_properties=system)] * 1000)


def _settings(made: Callable[..., bytes]) -> Iterator[tuple[str, bytes]]:
    sql = {"type": 2, "expression": "a=1 OR a=2"}
    for count in (1000, 3000):
        wanted = [{"topic": {"name": f"T{n}"}, "expression": sql} for n in range(count)]
        subscription = {"group": {"name": "G"}, "subscriptions": wanted}
        yield f"{count} subscriptions", made(settings={"client_type": 3, "subscription": subscription})
        topics = {"topics": [{"name": f"T{n}"} for n in range(count)]}
        yield f"{count} topics", made(settings={"client_type": 1, "publishing": topics})


async def held(root: Path, *, tell: bool = False) -> list[Held]:
    """Return how long each shape of each call holds the loop."""
    found: list[Held] = []
    own = BrokerSettings(
        listen_port=0,
        grpc_port=0,
        bind_address="127.0.0.1",
        broker_name="b",
        property_filter=True,
        recall_messages=True,
    )
    async with Standalone(root, broker=own, store=StoreSettings(commit_log_file_bytes=64 << 20)) as servers:
        context = servers.broker.context
        context.topics.ensure("T", 8)
        context.topics.ensure("Big", 20_000)
        now_ms = context.clock.now_ms()
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        port = servers.broker.grpc_address.rpartition(":")[2]
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as channel, measured() as callbacks:
            for method in methods():
                for shape, content in _shapes(method, now_ms):
                    tries = []
                    for _ in range(_TRIES):
                        callbacks.reset()
                        await asyncio.to_thread(_call, channel, method, content)
                        tries.append((callbacks.longest, callbacks.which))
                        if tries[-1][0] <= MAX_SECONDS:
                            break
                    seconds, which = min(tries)
                    found.append(Held(seconds, method.name, shape, which))
                    if tell:
                        print(f"{seconds * 1000:8.1f} ms  {method.name:32} {shape}", flush=True)
    return sorted(found, reverse=True)


def _call(channel: grpc.Channel, method: Method, content: bytes) -> None:
    """Make a call, and read its whole answer."""
    path = f"/apache.rocketmq.v2.MessagingService/{method.name}"
    as_it_is = {"request_serializer": None, "response_deserializer": None}
    try:
        if method.name == "Telemetry":
            for _ in itertools.islice(channel.stream_stream(path, **as_it_is)(iter([content]), 20, _METADATA), 2):
                pass
        elif method.name == "ReceiveMessage":
            for _ in channel.unary_stream(path, **as_it_is)(content, 6, _METADATA):
                pass
        else:
            channel.unary_unary(path, **as_it_is)(content, 20, _METADATA)
    except grpc.RpcError:
        pass


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="rmq-held-") as folder:
        found = asyncio.run(held(Path(folder), tell=True))
    print(table(found, 15))
    return int(any(one.seconds > MAX_SECONDS for one in found))


if __name__ == "__main__":
    sys.exit(main())
