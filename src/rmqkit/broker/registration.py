"""Telling the name servers who we are and which topics we have (``BrokerOuterAPI``).

Every name server is told everything in parallel; one that fails is logged and never fails the others. A changed topic
is sent at once with only that topic. Topics that the name servers list as ordered are marked so here, from the answers
to full registrations. Source: behaviour.md §1.7, §2.3; remoting.md §10.1.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from collections.abc import Callable, Iterable

import msgspec

from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.topics import TopicTable
from rmqkit.errors import BodyError, PeerRefused, RemotingError, StoreError
from rmqkit.protocol import fastjson
from rmqkit.protocol.bodies.namesrv import BrokerMemberGroupBody, KVTable, compress_registration
from rmqkit.protocol.bodies.topics import Permission, RegisterBrokerBody, TopicConfig, TopicConfigTable
from rmqkit.protocol.codes import CURRENT_VERSION, RequestCode
from rmqkit.protocol.command import Command, decode_header_leniently, request
from rmqkit.protocol.headers.registration import (
    BrokerIdentity,
    BrokerMemberGroupRequest,
    DataVersionResponse,
    RegisterBrokerRequest,
)
from rmqkit.remoting.address import split_addresses
from rmqkit.remoting.client import RemotingClient, expect_success

__all__ = ["Registration"]

_MakeCommand = Callable[[], Command]

_SETTLED_SECONDS = 3.0
_FIRST_REPEAT_SECONDS = 10.0
_GOODBYE_TIMEOUT_MS = 3000
_NAMESAKE_TIMEOUT_MS = 1000
_CHANGED = {"changed": "true"}
_READ_WRITE = Permission.READ | Permission.WRITE

_log = logging.getLogger(__name__)


class Registration:
    """Keeps one broker registered; loop only.

    Args:
        address: where clients reach the broker.
        ha_address: where slaves reach it.
    """

    def __init__(
        self, settings: BrokerSettings, topics: TopicTable, client: RemotingClient, *, address: str, ha_address: str
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._client = client
        self._address = address
        self._ha_address = ha_address
        self._name_servers = split_addresses(settings.namesrv_addr) if settings.namesrv_addr else []
        self._repeat: asyncio.Task[None] | None = None
        self._changed: list[TopicConfig] = []
        self._single: set[asyncio.Task[int]] = set()

    async def start(self) -> int:
        """Register now and then regularly; returns how many name servers know us now."""
        reached = await self.register()
        if self._name_servers:
            self._repeat = asyncio.create_task(self._keep_registered(), name="registration")
        return reached

    async def stop(self) -> None:
        """Say good-bye to every name server."""
        self._changed.clear()
        for task in (self._repeat, *self._single):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        await self._tell_all(lambda: request(RequestCode.UNREGISTER_BROKER, self._identity), _GOODBYE_TIMEOUT_MS)

    async def register(self, topics: list[TopicConfig] | None = None) -> int:
        """Send all topics, or some; returns how many name servers took them."""
        table = self._with_broker_permission(self._topics.snapshot(topics))
        content = RegisterBrokerBody(topic_config_serialize_wrapper=table)
        is_compressed = self._settings.compressed_register
        body = (
            compress_registration(content, version=CURRENT_VERSION) if is_compressed else msgspec.json.encode(content)
        )
        header = RegisterBrokerRequest(
            **msgspec.structs.asdict(self._identity),
            ha_server_addr=self._ha_address,
            enable_acting_master=False,
            compressed=is_compressed,
            body_crc32=zlib.crc32(body) & 0x7FFFFFFF,
        )
        timeout_ms = self._settings.register_timeout_ms
        answers = await self._tell_all(lambda: request(RequestCode.REGISTER_BROKER, header, body), timeout_ms)
        if topics is None and answers and answers[0].payload:
            self._mark_ordered(answers[0])
        return len(answers)

    def _mark_ordered(self, answer: Command) -> None:
        try:
            self._topics.mark_ordered(fastjson.decode_as(answer.payload, KVTable).table)
        except (BodyError, StoreError) as error:
            _log.warning("the order topics of a name server were not taken over: %s", error)

    def topics_changed(self, topics: list[TopicConfig]) -> None:
        """Tell the name servers of changed topics, soon: those of one tick go together."""
        if self._name_servers and self._repeat is not None:
            if not self._changed:
                asyncio.get_running_loop().call_soon(self._tell_changes)
            self._changed += topics

    def _tell_changes(self) -> None:
        topics, self._changed = self._changed, []
        if topics:
            task = asyncio.create_task(self.register(topics), name="registration of changed topics")
            self._single.add(task)
            task.add_done_callback(self._single.discard)

    async def settled(self) -> None:
        """Wait until the name servers were told of every change so far, or for 3 s."""
        self._tell_changes()
        if self._single:
            await asyncio.wait(self._single, timeout=_SETTLED_SECONDS)

    async def ask_namesakes(self, command: _MakeCommand) -> list[Command]:
        """Ask the other brokers of this name, as the name servers know them; the answers of those that succeed."""
        asked = BrokerMemberGroupRequest(self._settings.cluster_name, self._settings.broker_name)
        addresses: set[str] = set()
        for answer in await self._ask_all(
            self._name_servers, lambda: request(RequestCode.GET_BROKER_MEMBER_GROUP, asked), _NAMESAKE_TIMEOUT_MS
        ):
            group = fastjson.decode_as(answer.payload, BrokerMemberGroupBody).broker_member_group
            addresses.update(group.broker_addrs.values())
        return await self._ask_all(addresses - {self._address}, command, _NAMESAKE_TIMEOUT_MS)

    @property
    def _identity(self) -> BrokerIdentity:
        return BrokerIdentity(
            broker_name=self._settings.broker_name,
            broker_addr=self._address,
            cluster_name=self._settings.cluster_name,
            broker_id=self._settings.broker_id,
        )

    async def is_outdated(self) -> bool:
        """Whether a name server does not have the topics as they are now, or does not answer."""
        body = msgspec.json.encode(self._topics.data_version)
        answers = await self._tell_all(
            lambda: request(RequestCode.QUERY_DATA_VERSION, self._identity, body), self._settings.register_timeout_ms
        )
        headers = [decode_header_leniently(answer, DataVersionResponse, missing=_CHANGED) for answer in answers]
        return len(headers) < len(self._name_servers) or any(header.changed for header in headers)

    def _with_broker_permission(self, table: TopicConfigTable) -> TopicConfigTable:
        perm = self._settings.broker_permission
        if perm & _READ_WRITE != _READ_WRITE:
            table.topic_config_table = {
                name: msgspec.structs.replace(config, perm=config.perm & perm)
                for name, config in table.topic_config_table.items()
            }
        return table

    async def _keep_registered(self) -> None:
        await asyncio.sleep(_FIRST_REPEAT_SECONDS)
        while True:
            if self._settings.force_register or await self.is_outdated():
                await self.register()
            await asyncio.sleep(self._settings.register_interval_ms / 1000)

    async def _tell_all(self, command: _MakeCommand, timeout_ms: int) -> list[Command]:
        return await self._ask_all(self._name_servers, command, timeout_ms)

    async def _ask_all(self, servers: Iterable[str], command: _MakeCommand, timeout_ms: int) -> list[Command]:
        told = await asyncio.gather(*(self._ask(server, command(), timeout_ms) for server in servers))
        return [answer for answer in told if answer is not None]

    async def _ask(self, server: str, command: Command, timeout_ms: int) -> Command | None:
        try:
            return expect_success(await self._client.call(server, command, timeout_ms), server)
        except (RemotingError, PeerRefused) as error:
            _log.warning("%s did not take request %s: %s", server, command.code, error)
            return None
