"""The page of request codes: the catalog, and what is served of it, asked of running servers and of clients."""

from __future__ import annotations

import asyncio
import tempfile
import typing
from pathlib import Path

from rmqkit.broker.operations.brokers import REASONS
from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.errors import RequestTimedOut
from rmqkit.protocol.catalog import CATALOG
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command
from rmqkit.protocol.operation import Content, Operation, Server
from rmqkit.remoting.client import RemotingClient
from rmqkit.standalone import Standalone

TIERS = {
    1: "Producing, consuming, transactions, retry, queries; brokers that register",
    2: "Tools, replication, access control",
    3: "POP, controller, static topics, cold data, lite topics",
}
ANSWER_TIMEOUT_MS = 3000

_HEAD = """---
hide: [toc]
---

# Request codes

Every request of RocketMQ's remoting protocol, who answers it, and whether rmqkit does. The types are declared in
`rmqkit.protocol.schemas`, except for requests that nothing here speaks (*undeclared*); the
table behind this page is `rmqkit.protocol.catalog`. Bodies in *italics* are not JSON. A request that is not answered
gets code 3, `REQUEST_CODE_NOT_SUPPORTED`.

This page is generated: `make docs` writes it, and a test fails while it is out of date.
"""
_REASONS = """## Refused with a reason

Apache's broker answers these; the remark of the refusal says why rmqkit does not.

| Code | Name | Reason |
|---|---|---|"""
_COLUMNS = (
    "| Code | Name | Answered by | rmqkit | Header → response header | Body → response body |\n" + "|---" * 6 + "|"
)
_UNDECLARED = "*undeclared*"


def codes_page() -> str:
    """The text of ``reference/codes.md``."""
    with tempfile.TemporaryDirectory() as folder:
        served = asyncio.run(served_codes(Path(folder)))
    parts = [_HEAD]
    for tier, title in TIERS.items():
        rows = [operation for operation in CATALOG.values() if operation.tier == tier]
        count = sum(_is_served(operation, served) for operation in rows)
        parts.append(f"## Tier {tier}: {title}\n\n{count} of {len(rows)} are answered.\n\n{_COLUMNS}")
        parts.extend(_row(operation, served) for operation in rows)
        parts.append("")
    reasons = (f"| {int(code)} | {RequestCode(code).name} | {reason} |" for code, reason in sorted(REASONS.items()))
    return "\n".join([*parts, _REASONS, *reasons]) + "\n"


def _is_served(operation: Operation, served: dict[Server, frozenset[int]]) -> bool:
    return any(operation.code in served.get(server, ()) for server in operation.servers)


def _row(operation: Operation, served: dict[Server, frozenset[int]]) -> str:
    cells = (
        str(int(operation.code)),
        operation.name,
        ", ".join(operation.servers),
        ", ".join(server for server in operation.servers if operation.code in served.get(server, ())) or "–",
        _pair(operation.request_header, operation.response_header) if operation.is_typed else _UNDECLARED,
        _pair(operation.request_body, operation.response_body) if operation.is_typed else _UNDECLARED,
    )
    return f"| {' | '.join(cells)} |"


def _pair(of_request: object, of_response: object) -> str:
    return f"{_type(of_request)} → {_type(of_response)}" if of_response is not None else _type(of_request)


def _type(shown: object) -> str:
    if shown is None:
        return "–"
    if isinstance(shown, Content):
        return f"*{shown}*"
    items = typing.get_args(shown)
    return f"list of `{items[0].__name__}`" if items else f"`{getattr(shown, '__name__', shown)}`"


async def served_codes(store_root: Path) -> dict[Server, frozenset[int]]:
    """Which codes our name server, broker and clients answer."""
    standalone = Standalone(store_root)
    remoting = RemotingClient()
    await standalone.start()
    try:
        servers = {Server.NAME_SERVER: standalone.namesrv_address, Server.BROKER: standalone.broker_address}
        found = {server: await _answered(remoting, address) for server, address in servers.items()}
    finally:
        await remoting.close()
        await standalone.stop()
    found[Server.CLIENT] = _answered_by_clients()
    return found


async def _answered(remoting: RemotingClient, address: str) -> frozenset[int]:
    """Asked without header and body: most answers are refusals, and nothing is changed."""
    codes = set()
    for code in CATALOG:
        try:
            response = await remoting.call(address, Command(code), ANSWER_TIMEOUT_MS)
            is_known = response.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        except RequestTimedOut:
            is_known = True
        if is_known:
            codes.add(code)
    return frozenset(codes)


def _answered_by_clients() -> frozenset[int]:
    runtime = ClientRuntime("127.0.0.1:9876")
    for kind in (Producer, PushConsumer, PullConsumer):
        kind("group", runtime=runtime)
    return runtime.dispatch.codes
