"""What operators ask a name server (the administrative half of ``DefaultRequestProcessor``).

===============  =====================================================  ==============================================
codes            request                                                open to
===============  =====================================================  ==============================================
101, 219         KV configuration: one value, a namespace               everybody
206, 224, 304    all topics, a cluster's, the system's                  everybody, unless switched off
311, 312, 313    topics by unit flags                                   everybody, unless switched off
319              settings as properties text                            everybody
100, 102         put or delete a KV value                               ``adminAllowedAddresses``
205, 327         take or give back the write bit of a broker's topics   ``adminAllowedAddresses``
216              delete a topic                                         ``adminAllowedAddresses``
318              change settings                                        ``adminAllowedAddresses``
===============  =====================================================  ==============================================

By default a peer on another machine gets NO_PERMISSION there. Source: behaviour.md §1.7.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from rmqkit import settings as configuration
from rmqkit.errors import SettingsError
from rmqkit.namesrv.kv import KeyValues
from rmqkit.namesrv.routes import RouteTable
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.protocol.bodies.namesrv import KVTable, TopicList
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header, reply
from rmqkit.protocol.headers.namesrv import (
    AddWritePermResponse,
    BrokerNameRequest,
    ClusterRequest,
    DeleteTopicRequest,
    KVKey,
    KVNamespace,
    KVPut,
    KVValue,
    WipeWritePermResponse,
)
from rmqkit.remoting.admission import for_admins
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.dispatch import Dispatch, Handler, Lane

__all__ = ["AdminHandlers"]

_REQUESTS_MAX = 10_000
"""Changes under way at a time (the default processor\'s queue of behaviour.md §1.1)."""
_UNIT = 1
_UNIT_SUB = 2
_BAD_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\u(?![0-9a-fA-F]{4})")
"""What makes Java's properties reader give up."""


class AdminHandlers:
    """Answers operators."""

    def __init__(self, settings: NamesrvSettings, routes: RouteTable, kv: KeyValues) -> None:
        self._settings = settings
        self._routes = routes
        self._kv = kv

    def register(self, dispatch: Dispatch) -> None:
        """Answer the codes of operators."""
        for code, handler in (
            (RequestCode.GET_KV_CONFIG, self.kv_value),
            (RequestCode.GET_KVLIST_BY_NAMESPACE, self.kv_namespace),
            (RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, self.all_topics),
            (RequestCode.GET_TOPICS_BY_CLUSTER, self.topics_of_cluster),
            (RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS, self.system_topics),
            (RequestCode.GET_UNIT_TOPIC_LIST, self._topics_by_flags(lambda flags: bool(flags & _UNIT))),
            (RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST, self._topics_by_flags(lambda flags: bool(flags & _UNIT_SUB))),
            (
                RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST,
                self._topics_by_flags(lambda flags: flags & (_UNIT | _UNIT_SUB) == _UNIT_SUB),
            ),
            (RequestCode.GET_NAMESRV_CONFIG, self.config),
        ):
            dispatch.register(code, handler)
        guarded: tuple[tuple[RequestCode, Handler], ...] = (
            (RequestCode.PUT_KV_CONFIG, self.put_kv),
            (RequestCode.DELETE_KV_CONFIG, self.delete_kv),
            (RequestCode.WIPE_WRITE_PERM_OF_BROKER, self.wipe_write_perm),
            (RequestCode.ADD_WRITE_PERM_OF_BROKER, self.add_write_perm),
            (RequestCode.DELETE_TOPIC_IN_NAMESRV, self.delete_topic),
            (RequestCode.UPDATE_NAMESRV_CONFIG, self.update_config),
        )
        lane = Lane("administration", _REQUESTS_MAX)
        for code, handler in guarded:
            dispatch.register(code, for_admins(handler, self._settings.admin_addresses), lane)

    # -- KV configuration

    async def put_kv(self, connection: Connection, command: Command) -> Command:
        """Set a value; it is on the disk when this is answered."""
        header = decode_header(command, KVPut)
        if header.namespace is None or header.key is None:
            return reply(command, ResponseCode.SYSTEM_ERROR, "namespace or key is null")
        await self._kv.put(header.namespace, header.key, header.value)
        return reply(command)

    def kv_value(self, connection: Connection, command: Command) -> Command:
        """One value."""
        header = decode_header(command, KVKey)
        value = self._kv.get(header.namespace, header.key)
        if value is None:
            remark = f"No config item, Namespace: {header.namespace} Key: {header.key}"
            return reply(command, ResponseCode.QUERY_NOT_FOUND, remark)
        return reply(command, header=KVValue(value))

    async def delete_kv(self, connection: Connection, command: Command) -> Command:
        """Remove a value, whether or not it is there."""
        header = decode_header(command, KVKey)
        await self._kv.delete(header.namespace, header.key)
        return reply(command)

    def kv_namespace(self, connection: Connection, command: Command) -> Command:
        """All values of a namespace."""
        header = decode_header(command, KVNamespace)
        values = self._kv.namespace(header.namespace)
        if values is None:
            return reply(command, ResponseCode.QUERY_NOT_FOUND, f"No config item, Namespace: {header.namespace}")
        return reply(command, body=msgspec.json.encode(KVTable(dict(values))))

    # -- permissions and topics

    def wipe_write_perm(self, connection: Connection, command: Command) -> Command:
        """Have producers avoid a broker, until it registers a changed table."""
        header = decode_header(command, BrokerNameRequest)
        return reply(command, header=WipeWritePermResponse(self._routes.wipe_write_perm(header.broker_name)))

    def add_write_perm(self, connection: Connection, command: Command) -> Command:
        """Let producers use a broker again."""
        header = decode_header(command, BrokerNameRequest)
        return reply(command, header=AddWritePermResponse(self._routes.add_write_perm(header.broker_name)))

    def delete_topic(self, connection: Connection, command: Command) -> Command:
        """Forget a topic, whether or not it is known."""
        header = decode_header(command, DeleteTopicRequest)
        self._routes.delete_topic(header.topic, header.cluster_name or None)
        return reply(command)

    # -- lists

    def all_topics(self, connection: Connection, command: Command) -> Command:
        """Every topic."""
        if not self._settings.all_topic_list_enable:
            return reply(command, ResponseCode.SYSTEM_ERROR, "disable")
        return _topic_list(command, self._routes.topics())

    def topics_of_cluster(self, connection: Connection, command: Command) -> Command:
        """The topics of one cluster."""
        if not self._settings.topic_list_enable:
            return reply(command, ResponseCode.SYSTEM_ERROR, "disable")
        header = decode_header(command, ClusterRequest)
        return _topic_list(command, self._routes.topics_of_cluster(header.cluster))

    def system_topics(self, connection: Connection, command: Command) -> Command:
        """The topics named like clusters and brokers, and a broker to ask for its own."""
        clusters = self._routes.clusters()
        names = [name for cluster, brokers in clusters.cluster_addr_table.items() for name in (cluster, *brokers)]
        addresses = [
            address for broker in clusters.broker_addr_table.values() for address in broker.broker_addrs.values()
        ]
        return _topic_list(command, list(dict.fromkeys(names)), broker_addr=addresses[0] if addresses else None)

    def _topics_by_flags(self, wanted: Callable[[int], bool]) -> Handler:
        def topics(connection: Connection, command: Command) -> Command:
            if not self._settings.topic_list_enable:
                return reply(command, ResponseCode.SYSTEM_ERROR, "disable")
            return _topic_list(command, self._routes.topics_with_flags(wanted))

        return topics

    # -- settings

    def config(self, connection: Connection, command: Command) -> Command:
        """All settings, sorted, a line each."""
        texts = configuration.to_properties(self._settings)
        return reply(command, body="".join(f"{key}={texts[key]}\n" for key in sorted(texts)).encode())

    def update_config(self, connection: Connection, command: Command) -> Command:
        """Change settings: all that are asked for, or none."""
        properties = _properties(command.payload)
        if properties is None:
            return reply(command, ResponseCode.SYSTEM_ERROR, "string2Properties error")
        table = configuration.setting_table(NamesrvSettings)
        black_list = {"rocketmqHome", *self._settings.config_black_list.split(";")}
        if any(key in black_list or (key in table and not table[key][2].hot) for key in properties):
            return reply(command, ResponseCode.NO_PERMISSION, "Can not update config in black list.")
        try:
            loaded = configuration.load([NamesrvSettings], properties, source="request")
        except SettingsError as error:
            return reply(command, ResponseCode.SYSTEM_ERROR, str(error))
        if loaded.unknown:
            key, nearest = loaded.unknown[0]
            hint = f", did you mean {nearest}?" if nearest else ""
            return reply(command, ResponseCode.SYSTEM_ERROR, f"unknown key {key}{hint}; nothing was changed")
        (changed,) = loaded.values
        for key in properties:
            name = table[key][0]
            setattr(self._settings, name, getattr(changed, name))
        return reply(command)


def _topic_list(command: Command, topics: list[str], *, broker_addr: str | None = None) -> Command:
    return reply(command, body=msgspec.json.encode(TopicList(topics, broker_addr)))


def _properties(body: bytes) -> dict[str, str] | None:
    """A properties text, or None when Java could not read it."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return None
    return None if _BAD_ESCAPE.search(text) else configuration.parse_properties(text)
