"""The scene of a case: a server's addresses, clients, and the list of checks.

A case is a coroutine function that accepts a `Scene`. All cases of a server run together, because many of them wait for
seconds with Apache's servers. Each has topics and groups of its own.
"""

from __future__ import annotations

import asyncio
import re
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rmqkit.admin import Admin
from rmqkit.proxy.schema.messages import message_class
from tests.interop.grpc.raw_client import Answer, Client

BROKER = "broker-a"
ASKED_AT = {"scheme": 1, "addresses": [{"host": "10.0.0.9", "port": 8081}]}
BORN = {"seconds": 1_500_000_000, "nanos": 123_000_000}
CODES = message_class("Status").DESCRIPTOR.fields_by_name["code"].enum_type
CASES: dict[str, Callable[[Scene], Awaitable[None]]] = {}
TOPICS: dict[str, dict[str, Any]] = {}
GROUPS: dict[str, dict[str, Any]] = {}


@dataclass(frozen=True, slots=True)
class Place:
    """A server with a gRPC endpoint, and the broker and name server behind it."""

    peer: str
    grpc_addr: str
    namesrv_addr: str
    broker_addr: str


@dataclass(frozen=True, slots=True)
class Check:
    """One answer: its lines, the lines that the spec requires, and the reason if ours differs on purpose."""

    name: str
    lines: list[str]
    wanted: tuple[str, ...]
    why: str

    def missing(self) -> list[str]:
        """Return the wanted lines that are missing. In them ``…`` matches any text."""
        return [line for line in self.wanted if not any(pattern(line).fullmatch(found) for found in self.lines)]


@dataclass(slots=True)
class Outcome:
    checks: dict[str, Check] = field(default_factory=dict)
    failure: str = ""


class Scene:
    """One case with one server."""

    def __init__(self, place: Place, name: str) -> None:
        self.place = place
        self.name = name
        self.outcome = Outcome()
        self._clients: list[Client] = []

    @property
    def own_address(self) -> dict[str, Any]:
        """Return the endpoints that a client sends if it connects to the server directly."""
        host, _, port = self.place.grpc_addr.rpartition(":")
        return {"scheme": 1, "addresses": [{"host": host, "port": int(port)}]}

    @property
    def is_ours(self) -> bool:
        return self.place.peer == "ours"

    def client(self, client_id: str | None = "", **metadata: str | None) -> Client:
        """Return a client. Its default id is the name of the case."""
        client = Client(self.place.grpc_addr, self.name if client_id == "" else client_id, **metadata)
        self._clients.append(client)
        return client

    def check(
        self, name: str, answer: Answer, wanted: Iterable[str] = (), *, ours: Iterable[str] | None = None, why: str = ""
    ) -> Answer:
        """Record an answer. ``ours``: the lines wanted of our server if it differs from Apache's on purpose, with the
        reason ``why``.
        """
        assert (ours is None) == (not why), f"{name} says one of ours and why"
        assert name not in self.outcome.checks, f"{name} is there twice"
        port = int(self.place.grpc_addr.rpartition(":")[2])
        lines = tuple(ours if ours is not None and self.is_ours else wanted)
        self.outcome.checks[name] = Check(name, answer.lines(port), lines, why)
        return answer

    async def run(self) -> Outcome:
        try:
            await CASES[self.name](self)
        except Exception:  # noqa: BLE001 - the test of this case shows it; the others go on
            self.outcome.failure = traceback.format_exc()
        finally:
            for client in self._clients:
                await client.close()
        return self.outcome


def case(
    topics: Mapping[str, dict[str, Any]] | None = None, groups: Mapping[str, dict[str, Any]] | None = None
) -> Callable[[Callable[[Scene], Awaitable[None]]], Callable[[Scene], Awaitable[None]]]:
    """Register a function as a case, with the arguments of its topics for `Admin` and the changes of its groups."""

    def register(function: Callable[[Scene], Awaitable[None]]) -> Callable[[Scene], Awaitable[None]]:
        assert not TOPICS.keys() & (topics or {}).keys(), f"{function.__name__} names a topic of another case"
        TOPICS.update(topics or {})
        GROUPS.update(groups or {})
        CASES[function.__name__] = function
        return function

    return register


async def run_all(place: Place) -> dict[str, Outcome]:
    """Create the topics and groups, then run all cases together."""
    async with Admin(place.namesrv_addr) as admin:
        for topic, options in TOPICS.items():
            await admin.topics.create(
                topic, broker=place.broker_addr, **{"read_queues": 1, "write_queues": 1, **options}
            )
        for group, changes in GROUPS.items():
            await admin.groups.update(group, changes, place.broker_addr)
    outcomes = await asyncio.gather(*(Scene(place, name).run() for name in CASES))
    return dict(zip(CASES, outcomes, strict=True))


def kind(name: str, queues: int = 1, **options: Any) -> dict[str, Any]:
    """Return a topic's options for its message.type."""
    return {"attributes": f"+message.type={name}", "read_queues": queues, "write_queues": queues, **options}


def pattern(line: str) -> re.Pattern[str]:
    """Return the pattern of a wanted line, for any item of a stream."""
    return re.compile(r"(\[\d+\]\.)?" + ".*".join(map(re.escape, line.split("…"))), re.DOTALL)


def status(code: int, text: str) -> tuple[str, ...]:
    """Return the two lines of a status, or only the code if any text is allowed."""
    name = CODES.values_by_number[code].name
    return (f"status.code: {name}",) if text == "…" else (f"status.code: {name}", f"status.message: {text!r}")


OK = status(20000, "OK")


def message(topic: str, body: bytes = b"hello", message_id: str = "ID1", properties: Any = None, **system: Any) -> Any:
    return {
        "topic": {"name": topic},
        "body": body,
        "user_properties": properties or {},
        "system_properties": {
            "message_id": message_id,
            "born_timestamp": BORN,
            "born_host": "tests",
            "body_encoding": 1,
            **system,
        },
    }


async def send(client: Client, topic: str, body: bytes = b"hello", message_id: str = "ID1", **more: Any) -> Answer:
    return await client.ask("SendMessage", messages=[message(topic, body, message_id, **more)])


def wanted_messages(topic: str, group: str, expression: str = "*", kind: int = 1, **more: Any) -> dict[str, Any]:
    """Return the fields of a receive."""
    return {
        "group": {"name": group},
        "message_queue": {"topic": {"name": topic}, "broker": {"name": BROKER}},
        "filter_expression": {"type": kind, "expression": expression},
        "batch_size": 16,
        "invisible_duration": {"seconds": 30},
        "long_polling_timeout": {"seconds": 5},
        **more,
    }


async def receive(client: Client, topic: str, group: str, *args: Any, seconds: float = 20, **more: Any) -> Answer:
    return await client.ask("ReceiveMessage", seconds, **wanted_messages(topic, group, *args, **more))


async def consumer(
    client: Client, topic: str, group: str, expression: str = "*", kind: int = 1, role: int = 3
) -> Answer:
    """Store a consumer's settings. The stream remains open."""
    wanted = {"topic": {"name": topic}, "expression": {"type": kind, "expression": expression}}
    subscription = {"group": {"name": group}, "subscriptions": [wanted]}
    settings = {"client_type": role, "subscription": subscription, "request_timeout": {"seconds": 3}}
    return await client.telemetry().ask(settings=settings)


async def ack(client: Client, topic: str, group: str, *handles: str, message_id: str = "ID1") -> Answer:
    entries = [{"message_id": message_id, "receipt_handle": handle} for handle in handles]
    return await client.ask("AckMessage", group={"name": group}, topic={"name": topic}, entries=entries)


async def change(client: Client, topic: str, group: str, handle: str, seconds: int, message_id: str = "ID1") -> Answer:
    names = {"group": {"name": group}, "topic": {"name": topic}, "message_id": message_id}
    duration = {"seconds": seconds}
    return await client.ask("ChangeInvisibleDuration", receipt_handle=handle, invisible_duration=duration, **names)
