"""Brokers: figures, settings, replication, cleaning, test messages (``brokerStatus`` … ``deleteExpiredCommitLog``).

The caller names a broker by ``host:port`` or by its name. The name of a cluster stands for all its masters.
Source: behaviour.md §9.9, §9.10.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from msgspec import MsgspecError, Struct, field, json

from rmqkit.admin.calls import AdminCalls, Done
from rmqkit.errors import BodyError
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_header, request
from rmqkit.protocol.fastjson import decode_as, decode_with_texts
from rmqkit.protocol.names import AUTO_CREATE_TOPIC
from rmqkit.protocol.schemas.brokers import HaRuntimeInfo
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.offsets import AllConsumeStatsRequest, ConsumeOffsets, ConsumeStatsList
from rmqkit.protocol.schemas.send import SendMessageResponse, SendMessageV2Request
from rmqkit.sentences import _
from rmqkit.settings import properties_line

__all__ = ["Brokers", "GroupProgress", "TestSend"]

CLEANING = {
    "expired-cq": RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE,
    "unused-topic": RequestCode.CLEAN_UNUSED_TOPIC,
    "expired-commitlog": RequestCode.DELETE_EXPIRED_COMMITLOG,
}
STORED: dict[int, str] = {
    ResponseCode.SUCCESS: "SEND_OK",
    ResponseCode.FLUSH_DISK_TIMEOUT: "FLUSH_DISK_TIMEOUT",
    ResponseCode.FLUSH_SLAVE_TIMEOUT: "FLUSH_SLAVE_TIMEOUT",
    ResponseCode.SLAVE_NOT_AVAILABLE: "SLAVE_NOT_AVAILABLE",
}
"""The status of a stored message, by the response code of its send."""
_PRODUCER_GROUP = "CLIENT_INNER_PRODUCER"
_AT_ONCE_BYTES = 1 << 16
"""Larger answers are decoded in a thread. An answer for a thousand groups has megabytes, and would block the loop."""


class GroupProgress(Struct, rename="camel", kw_only=True, gc=False):
    """A group's progress in a queue of a broker. ``last_timestamp`` is the store time of the last consumed message."""

    topic: str
    group: str
    broker_name: str
    queue_id: int
    broker_offset: int
    consumer_offset: int
    diff: int
    last_timestamp: int


class TestSend(Struct, rename="camel", kw_only=True):
    """The result of one test message, with its round-trip time in ms."""

    broker_name: str
    queue_id: int
    result: str
    rt_ms: float
    msg_id: str = ""


class Brokers:
    """Operations on brokers. Each raises the errors of `AdminCalls`."""

    def __init__(self, calls: AdminCalls) -> None:
        self._calls = calls

    async def status(self, broker: str | None = None, cluster: str | None = None) -> dict[str, dict[str, str]]:
        """Return the runtime figures of brokers, by address."""
        found = await self._calls.fan_out(await self._calls.addresses(broker, cluster), self._calls.runtime_info)
        return {address: dict(sorted(table.items())) for address, table in found.items()}

    async def config(self, broker: str | None = None, cluster: str | None = None) -> dict[str, dict[str, str]]:
        """Return the settings of brokers by address. For a cluster, the result includes the slaves."""
        if broker is not None:
            addresses = [await self._calls.address(broker)]
        else:
            known = (await self._calls.cluster()).broker_addr_table
            names = await self._calls.targets(None, cluster)
            addresses = [address for name in names for __, address in sorted(known[name].broker_addrs.items())]
        code = RequestCode.GET_BROKER_CONFIG
        return await self._calls.fan_out(addresses, lambda address: self._calls.fetch_properties(address, code))

    async def update_config(
        self, changes: Mapping[str, str], broker: str | None = None, cluster: str | None = None
    ) -> list[Done]:
        """Change settings. Raises PeerRefused: a setting must not be changed (NO_PERMISSION), or a value is wrong."""
        body = "\n".join(properties_line(key, value) for key, value in changes.items()).encode()
        text = ", ".join(f"{key}={value}" for key, value in changes.items())
        return await self._each(RequestCode.UPDATE_BROKER_CONFIG, text, broker, cluster, body)

    async def clean(self, what: str, broker: str | None = None, cluster: str | None = None) -> list[Done]:
        """Make brokers delete expired or unused files. ``what`` is a key of `CLEANING`."""
        return await self._each(CLEANING[what], _("cleaned {what}", what=what), broker, cluster)

    async def consume_stats(self, broker: str, *, is_order: bool = False, diff_min: int = 0) -> list[GroupProgress]:
        """Return the progress of every group in the queues of a broker. Omit queues with a lag below ``diff_min``."""
        address, header = await self._calls.address(broker), AllConsumeStatsRequest(is_order)
        answer = await self._calls.ask(address, RequestCode.GET_BROKER_CONSUME_STATS, header)
        if len(answer.payload) <= _AT_ONCE_BYTES:
            return _progress(answer.payload, diff_min)
        return await asyncio.to_thread(_progress, answer.payload, diff_min)

    async def ha_status(self, broker: str | None = None, cluster: str | None = None) -> dict[str, HaRuntimeInfo]:
        """Return the replication state of masters and their slaves, by address."""
        code = RequestCode.GET_BROKER_HA_STATUS
        return await self._calls.fan_out(
            await self._calls.addresses(broker, cluster),
            lambda address: self._calls.fetch(HaRuntimeInfo, address, code),
        )

    async def send_test(self, broker: str, topic: str, *, queue_id: int = 0, body_bytes: int = 128) -> TestSend:
        """Send one message to a queue and return its result."""
        (name, address), clock = next(iter((await self._calls.masters(broker=broker)).items())), self._calls.clock
        header = SendMessageV2Request(_PRODUCER_GROUP, topic, AUTO_CREATE_TOPIC, 4, queue_id, 0, clock.now_ms(), 0)
        began_ms = clock.monotonic_ms()
        answer = await self._calls.call(address, request(RequestCode.SEND_MESSAGE_V2, header, b"a" * body_bytes))
        rt_ms = round(clock.monotonic_ms() - began_ms, 3)
        result = STORED.get(answer.code)
        if result is None:
            return TestSend(broker_name=name, queue_id=queue_id, result=answer.remark or str(answer.code), rt_ms=rt_ms)
        msg_id = decode_header(answer, SendMessageResponse).msg_id
        return TestSend(broker_name=name, queue_id=queue_id, result=result, rt_ms=rt_ms, msg_id=msg_id)

    async def _each(
        self, code: int, text: str, broker: str | None, cluster: str | None, body: bytes = b""
    ) -> list[Done]:
        addresses = await self._calls.addresses(broker, cluster)
        await self._calls.fan_out(addresses, lambda address: self._calls.ask(address, code, body=body))
        return [Done(address, text) for address in addresses]


class _Stats(Struct, rename="camel", gc=False):
    offset_table: dict[str, ConsumeOffsets] = field(default_factory=dict)


class _StatsList(Struct, rename="camel"):
    consume_stats_list: list[dict[str, list[_Stats]]] = field(default_factory=list)


_QUEUE = json.Decoder(MessageQueue, strict=False)


def _offset_tables(body: bytes | memoryview) -> list[tuple[str, dict[MessageQueue, ConsumeOffsets]]]:
    """Return the offsets in an answer by queue, with one table for each group and topic. A fast path decodes the usual
    form of an answer."""
    try:
        groups = decode_with_texts(body, _StatsList).consume_stats_list
        return [
            (group, {_QUEUE.decode(text): offsets for text, offsets in stats.offset_table.items()})
            for by_group in groups
            for group, all_stats in by_group.items()
            for stats in all_stats
        ]
    except (BodyError, MsgspecError):
        slow = decode_as(body, ConsumeStatsList).consume_stats_list
        return [(group, stats.offset_table) for one in slow for group, all_stats in one.items() for stats in all_stats]


def _progress(body: bytes | memoryview, diff_min: int) -> list[GroupProgress]:
    """Return the rows of an answer, without the queues in which the lag of the group is below ``diff_min``."""
    return [
        GroupProgress(
            topic=queue.topic,
            group=group,
            broker_name=queue.broker_name,
            queue_id=queue.queue_id,
            broker_offset=offsets.broker_offset,
            consumer_offset=offsets.consumer_offset,
            diff=offsets.broker_offset - offsets.consumer_offset,
            last_timestamp=offsets.last_timestamp,
        )
        for group, table in _offset_tables(body)
        for queue, offsets in sorted(table.items())
        if offsets.broker_offset - offsets.consumer_offset >= diff_min
    ]
