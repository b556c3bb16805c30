"""Every request code at its size limits, and the CPU time for which each holds the event loop of a broker or name
server.

``python -m tests.loop_held`` sends all shapes (`make loop-held`); the test in `tests.broker` sends the small ones.
Requests are built with `struct` and `json` alone and sent over a plain socket. The result is the CPU time of the
longest callback of the loop, the smallest of three tries, because noise only ever adds time. With ``--users`` the
servers check users and their policies. With ``--uvloop`` they run on uvloop, and whole loop iterations are measured.
"""

from __future__ import annotations

import argparse
import asyncio
import enum
import itertools
import json
import logging
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
import uvloop

from rmqkit.broker.server import Broker
from rmqkit.broker.settings import BrokerSettings
from rmqkit.namesrv.server import NameServer
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.protocol.catalog import CATALOG
from rmqkit.protocol.operation import Operation, Server
from rmqkit.remoting.authentication import AuthenticationSettings
from rmqkit.remoting.router import Router
from rmqkit.store.settings import StoreSettings
from tests.broker.stranger import signed
from tests.strangers import Callbacks, Stranger, frame, measured, measured_turns
from tests.waiting import until

__all__ = ["MAX_SECONDS", "Held", "held", "table"]

MAX_SECONDS = 0.05
_TRIES = 3
_FRAME = (16 << 20) - (300 << 10)
_MESSAGE = 4 << 20
_HEADER = (256 << 10) - 512
_JSON = (1 << 20) - 64
_SLOW = (16 << 10) - 16
_SETTINGS = (64 << 10) - 16
_LAST = (17, 18, 200, 225)
"""Codes that create many topics and groups. They run last, because they would make the other codes slower."""
_BIG, _QUEUES = "Big", 20_000
_FENCE, _FENCE_OPAQUE = 0x7FFF, 77
_MARKS = ("a", "%", "a||", "a=1 OR ", "0 ", "x\x01y\x02", "+a=b,", "a;", "T@", "127.0.0.1;", "%RETRY%", "\u00e9")


_ROOT, _USER = ("root", "secret12"), ("u", "secret34")
_USERS = AuthenticationSettings(
    enabled=True, initial_user='{"username":"root","password":"secret12"}', authorization_enabled=True
)
_RESOURCES, _ENTRIES = ("Topic:*", "Group:*", "Cluster:*"), 300
"""The policies of the signing user come last, after this number of other entries."""

_POLICIES = (3006, 3007)

Sign = Callable[[dict[str, str], bytes], dict[str, str]]


class Held(NamedTuple):
    """The CPU seconds for which one request held the loop, and the callback that ran."""

    seconds: float
    name: str
    shape: str
    callback: str


class _Servers:
    """A name server and a broker, with a topic of many queues and a group with offsets of all of them."""

    def __init__(self, root: Path, *, has_users: bool) -> None:
        self.has_users = has_users
        self._authentication = _USERS if has_users else None
        namesrv = NamesrvSettings(listen_port=0, bind_address="127.0.0.1", kv_config_path=str(root / "kv.json"))
        self._namesrv = NameServer(namesrv, authentication=self._authentication)
        self._root = root
        self._dispatches: list[Router] = [self._namesrv._server._router]
        self._broker: Broker | None = None

    def _dispatch(self, refusal: Any) -> Router:
        self._dispatches.append(Router(refusal))
        return self._dispatches[-1]

    async def __aenter__(self) -> _Servers:
        await self._namesrv.start()
        settings = BrokerSettings(
            listen_port=0,
            bind_address="127.0.0.1",
            broker_name="b",
            property_filter=True,
            namesrv_addr=self._namesrv.address,
        )
        store = StoreSettings(commit_log_file_bytes=64 << 20)
        self._broker = Broker(
            settings, store, self._root / "store", authentication=self._authentication, dispatch=self._dispatch
        )
        await self._broker.start()
        context = self._broker.context
        context.topics.ensure("T", 8)
        context.topics.ensure(_BIG, _QUEUES)
        for group in ("T", _BIG):
            context.groups.get(group)
        for queue_id in range(_QUEUES):
            context.offsets.commit(_BIG, _BIG, queue_id, 0)
        if self.has_users:
            await asyncio.to_thread(_let, self._broker.address)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._broker is not None:
            await self._broker.stop()
        await self._namesrv.stop()

    def address(self, server: Server) -> str | None:
        assert self._broker is not None, "the broker is started"
        return {Server.NAME_SERVER: self._namesrv.address, Server.BROKER: self._broker.address}.get(server)

    @property
    def is_idle(self) -> bool:
        """Return True if no request is being handled."""
        return all(dispatch.is_idle for dispatch in self._dispatches)


async def held(
    root: Path, *, is_long: bool, has_users: bool = False, codes: set[int] | None = None, tell: bool = False
) -> list[Held]:
    """Return the time of every shape of every code, or of the shapes of ``codes`` only."""
    found: list[Held] = []
    operations = sorted(CATALOG.values(), key=lambda one: (int(one.code) in _LAST, one.code))
    is_asyncio = isinstance(asyncio.get_running_loop(), asyncio.BaseEventLoop)
    async with _Servers(root, has_users=has_users) as servers:
        with measured() if is_asyncio else measured_turns() as callbacks:
            for operation, server in ((one, server) for one in operations for server in one.servers):
                address = servers.address(server)
                if address is None or (codes and int(operation.code) not in codes):
                    continue
                sign = _signer(server, int(operation.code)) if has_users else _unsigned
                for shape, data in _requests(operation, sign, is_long=is_long):
                    seconds, callback = await _longest(servers, callbacks, address, data)
                    for _ in range(_TRIES - 1):
                        if seconds > MAX_SECONDS:
                            seconds, callback = min(
                                (seconds, callback), await _longest(servers, callbacks, address, data)
                            )
                    found.append(Held(seconds, f"{operation.code} {operation.name}", shape, callback))
                    if tell:
                        print(f"{seconds * 1000:8.1f} ms  {found[-1].name:45} {shape}", flush=True)
    return sorted(found, reverse=True)


def table(found: list[Held], count: int) -> str:
    """Return a table of the requests that held the loop longest."""
    return "\n".join(
        f"{one.seconds * 1000:8.1f} ms  {one.name:45} {one.shape:20} "
        f"{one.callback if one.seconds > MAX_SECONDS else ''}"
        for one in found[:count]
    )


async def _longest(servers: _Servers, callbacks: Callbacks, address: str, data: bytes) -> tuple[float, str]:
    """Return the CPU seconds of the longest callback while a request is handled, and the callback."""
    callbacks.reset()
    await asyncio.to_thread(_ask, address, data)
    await until(lambda: servers.is_idle)
    return callbacks.longest, callbacks.which


def _ask(address: str, data: bytes) -> None:
    """Send a request over a new connection, and wait until it is handled or the connection is closed."""
    stranger = Stranger(address)
    try:
        stranger.send(data + frame(_FENCE, opaque=_FENCE_OPAQUE))
        while stranger.answer()["opaque"] != _FENCE_OPAQUE:
            pass
    except OSError:
        pass
    finally:
        stranger.close()


# ---- users


def _unsigned(fields: dict[str, str], body: bytes) -> dict[str, str]:
    return fields


def _signer(server: Server, code: int) -> Sign:
    """Return a signer for the requests: a user with policies, but on name servers the first user, who alone may change
    policies.
    """
    user, secret = _ROOT if server is Server.NAME_SERVER or code in _POLICIES else _USER
    return lambda fields, body: signed(fields, body, user, secret)


def _let(address: str) -> None:
    """Create the user, and permit it everything."""
    user, secret = _USER
    made = json.dumps({"password": secret}).encode()
    actions = ["Pub", "Sub", "Create", "Update", "Delete", "Get", "List"]
    resources = [*(f"Topic:other-{i}" for i in range(_ENTRIES)), *_RESOURCES]
    entries = [{"resource": one, "actions": actions, "decision": "Allow"} for one in resources]
    policies = json.dumps({"policies": [{"entries": entries}]}).encode()
    stranger = Stranger(address)
    for code, body, fields in ((3001, made, {"username": user}), (3006, policies, {"subject": f"User:{user}"})):
        answer = stranger.ask(frame(code, signed(fields, body, *_ROOT), body))
        assert answer["code"] == 0, answer
    stranger.close()


# ---- shapes


def _requests(operation: Operation, sign: Sign, *, is_long: bool) -> Iterator[tuple[str, bytes]]:
    code, plain = int(operation.code), _fields(operation, "T")
    if code in _POLICIES:
        plain["subject"] = f"User:{_ROOT[0]}"
    for shape, header in _headers(operation, sign, is_long=is_long):
        yield shape, frame(code, header=header)
    yield "many queues", frame(code, sign(_fields(operation, _BIG), b""))
    bodies: list[tuple[str, bytes]] = []
    if operation.request_body is not None:
        bodies += _bodies_of(code, is_long=is_long)
    if operation.request_body is not None or is_long:
        bodies += _BODIES if is_long else _BODIES[:_FEW_BODIES]
    if is_long:
        bodies += _long_bodies()
    for shape, body in bodies:
        compressed = {"compressed": "true"} if shape in ("bomb", "compressed") else {}
        yield shape, frame(code, sign(plain | compressed, body), body)


def _fields(operation: Operation, text: str) -> dict[str, str]:
    """Return header fields of the right types, with ``text`` for every text field."""
    if operation.request_header is None:
        return {}
    infos = msgspec.structs.fields(operation.request_header)
    return {info.encode_name: _value(info.type, text) for info in infos}


def _value(kind: Any, text: str) -> str:
    kinds = [kind, *get_args(kind)]
    if bool in kinds:
        return "true"
    if int in kinds or any(int in get_args(one) for one in kinds):
        return "0"
    enums = [one for one in kinds if isinstance(one, type) and issubclass(one, enum.Enum)]
    return str(next(iter(enums[0])).value) if enums else text


def _headers(operation: Operation, sign: Sign, *, is_long: bool) -> Iterator[tuple[str, bytes]]:
    said = {"code": int(operation.code), "language": "JAVA", "version": 500, "opaque": 1, "flag": 0}

    def header(fields: dict[str, str]) -> bytes:
        return json.dumps({**said, "extFields": sign(fields, b"")}).encode()

    plain = _fields(operation, "T")
    texts = [name for name, value in plain.items() if value == "T"]
    yield "many fields", header(plain | {f"k{i}": "" for i in range(_HEADER // 14)})
    for mark in (_MARKS if is_long else (";",)) if texts else ():
        count = (_HEADER - len(header(plain))) // len(texts) // (len(json.dumps(mark)) - 2)
        yield f"long {mark!r}", header(plain | dict.fromkeys(texts, mark * count))
    for mark in ";,|" if is_long and texts else "":
        numbered = mark.join(map(str, range(10_000, 10_000 + (_HEADER - len(header(plain))) // len(texts) // 6)))
        yield f"names {mark!r}", header(plain | dict.fromkeys(texts, numbered))
    for shape, number in (("large", (1 << 31) - 1), ("huge", (1 << 63) - 1), ("negative", -(1 << 63))):
        if is_long:
            yield shape, header({name: str(number) if value == "0" else value for name, value in plain.items()})
    if is_long:
        yield "nothing", header({})
        yield "not JSON", b"[" * _HEADER
        yield "unknown member", json.dumps({**said, "x": [[]] * (_HEADER // 5)}).encode()


def _repeated(unit: bytes, size: int, begin: bytes, end: bytes) -> bytes:
    return begin + b",".join([unit] * ((size - len(begin) - len(end)) // (len(unit) + 1))) + end


def _numbered(unit: bytes, size: int, begin: bytes, end: bytes, count: int = 1 << 30) -> bytes:
    """Join as many copies of a unit as fit, each with a number in place of ``#``."""
    fits = (size - len(begin) - len(end)) // (len(unit) + 6)
    return begin + b",".join(unit.replace(b"#", b"%d" % i) for i in range(100_000, 100_000 + min(fits, count))) + end


_FEW_BODIES = 3
_BODIES = [
    ("dialect", _repeated(b"1:1", _SLOW, b"{", b"}")),
    ("lists", _repeated(b"[]", _JSON, b"[", b"]")),
    ("settings", b"".join(b"a%d=b\n" % i for i in range(_SETTINGS // 9))),
    ("deep", b"[" * _JSON),
    ("deep objects", b'{"a":' * (_JSON // 5)),
    ("references", _repeated(b'{"$ref":"$"}', _SLOW, b"[", b"]")),
    ("wrong types", b'{"clientID":[],"mqSet":{},"topicConfigList":1,"groupConfigList":"x","acks":[[[]]]}'),
]


def _long_bodies() -> Iterator[tuple[str, bytes]]:
    yield "long dialect", _repeated(b"1:1", _FRAME, b"{", b"}")
    yield "long string", b'"' + b"\\u0041" * (_FRAME // 6) + b'"'
    yield "numbers", _repeated(b"1", _FRAME, b"[", b"]")
    yield "not UTF-8", b"\xff" * _FRAME
    yield "long settings", b"a=b\n" * (_FRAME // 4)


def _entry(body: bytes, properties: bytes) -> bytes:
    """Return a message of a batch."""
    head = struct.pack(">iiiii", 22 + len(body) + len(properties), 0, 0, 0, len(body))
    return head + body + struct.pack(">h", len(properties)) + properties


_CLIENTS = itertools.count()


def _bodies_of(code: int, *, is_long: bool) -> Iterator[tuple[str, bytes]]:
    """Yield the largest possible bodies of a request."""
    match code:
        case 34:
            yield from _heartbeats()
        case 41 | 42:
            head = b'{"clientId":"c","consumerGroup":"g","mqSet":['
            yield "queues", _numbered(b'{"topic":"t#","brokerName":"b","queueId":1}', _JSON, head, b"]}")
        case 217:
            yield "route", _numbered(b'{"brokerName":"b#"}', _JSON, b'{"queueDatas":[', b"]}")
        case 18:
            yield "topics", _numbered(b'{"topicName":"x#"}', _JSON, b'{"topicConfigList":[', b"]}")
        case 225:
            yield "group list", _numbered(b'{"groupName":"y#"}', _JSON, b'{"groupConfigList":[', b"]}")
        case 200151:
            ack = b'{"c":"T","t":"T","r":"0","so":0,"q":0,"rq":0,"pt":1,"it":1,"b":"AQ==","n":"#"}'
            yield "acks", _numbered(ack, _JSON, b'{"acks":[', b"]}")
        case 3006 | 3007:
            head, allowed = b'{"policies":[{"entries":[', b'"actions":["Pub"],"decision":"Allow"}'
            yield "entries", _numbered(b'{"resource":"Topic:#",' + allowed, _JSON, head, b"]}]}", 2000)
            yield "too many entries", _numbered(b'{"resource":"Topic:#",' + allowed, _JSON, head, b"]}]}")
            ips, end = head + b'{"resource":"*","sourceIps":[', b"]," + allowed + b"]}]}"
            yield "networks", _numbered(b'"1.0.0.0/8"', _JSON, ips, end, 2000)
            yield "too many networks", _numbered(b'"1.0.0.0/8"', _JSON, ips, end)
        case 103:
            yield from _registrations(is_long=is_long)
        case 10 | 310 | 320 | 324 | 325:
            yield "batch", _entry(b"b", b"") * 10_000
            yield "message", b"m" * _MESSAGE
            if is_long:
                yield "long batch", _entry(b"", b"") * (_MESSAGE // 22)
                yield "batch of words", _entry(b"w" * 200, b"KEYS\x01k\x02") * (_MESSAGE // 229)
            keys = b"KEYS\x01" + b"k " * 16_000
            yield "batch of keys", _entry(b"k", keys) * ((_MESSAGE if is_long else 1 << 20) // (len(keys) + 23))
        case _:
            pass


def _heartbeats() -> Iterator[tuple[str, bytes]]:
    def head(kind: bytes) -> bytes:
        return b'{"clientID":"c%d","%s":[' % (next(_CLIENTS), kind)

    one = head(b"consumerDataSet") + b'{"groupName":"s","subscriptionDataSet":['
    yield "groups", _numbered(b'{"groupName":"g#"}', _JSON, head(b"consumerDataSet"), b"]}", 4096)
    yield "too many groups", _numbered(b'{"groupName":"g#"}', _JSON, head(b"consumerDataSet"), b"]}")
    yield "subscriptions", _numbered(b'{"topic":"t#"}', _JSON, one, b"]}]}", 8192)
    sql = b'{"topic":"q#","subString":"' + b" OR ".join([b"a=1"] * 1100) + b'","expressionType":"SQL92"}'
    yield "expressions", _numbered(sql, _JSON, one, b"]}]}", 60)
    yield "producers", _numbered(b'{"groupName":"p#"}', _JSON, head(b"producerDataSet"), b"]}", 4096)


def _registrations(*, is_long: bool) -> Iterator[tuple[str, bytes]]:
    head = b'{"topicConfigSerializeWrapper":{"dataVersion":{"counter":1,"timestamp":1},"topicConfigTable":{'
    yield "few topics", _numbered(b'"t#":{}', _SLOW, head, b"}}}")
    yield "many topics", _numbered(b'"t#":{"topicName":"t#"}', _FRAME if is_long else _JSON, head, b"}}}")
    yield "bomb", zlib.compress(bytes(64 << 20))
    line = struct.pack(">i", 12) + b"t 1 1 6 ABCD"
    count = 500_000 if is_long else 20_000
    yield "compressed", zlib.compress(struct.pack(">i", 2) + b"{}" + struct.pack(">i", count) + line * count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--codes", default="", help="only these codes, separated by commas")
    parser.add_argument("--users", action="store_true", help="sign requests as a user whom policies let do everything")
    parser.add_argument("--uvloop", action="store_true", help="on uvloop instead of asyncio's loop")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    codes = {int(code) for code in arguments.codes.split(",") if code}
    with tempfile.TemporaryDirectory() as root:
        run = uvloop.run if arguments.uvloop else asyncio.run
        found = run(held(Path(root), is_long=True, has_users=arguments.users, codes=codes, tell=True))
    print(f"\n{len(found)} requests; longest:\n{table(found, 30)}")
    return int(found[0].seconds > MAX_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
