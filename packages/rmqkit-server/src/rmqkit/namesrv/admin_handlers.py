"""Requests of operators to a name server (the administrative half of ``DefaultRequestProcessor``).

===============  =====================================================  ==============================================
codes            request                                                permitted for
===============  =====================================================  ==============================================
101, 219         KV configuration: one value, a namespace               everybody
206, 224, 304    all topics, a cluster's, the system's                  everybody, unless switched off
311, 312, 313    topics by unit flags                                   everybody, unless switched off
319              settings as properties text                            everybody
100, 102         put or delete a KV value                               ``adminAllowedAddresses``
205, 327         remove or restore the write bit of a broker's topics   ``adminAllowedAddresses``
216              delete a topic                                         ``adminAllowedAddresses``
318              change settings                                        ``adminAllowedAddresses``
===============  =====================================================  ==============================================

By default ``adminAllowedAddresses`` is the local machine; other peers get NO_PERMISSION. Source: behaviour.md §1.7.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from rmqkit.namesrv.handlers import KeyValues, TableHandlers
from rmqkit.namesrv.routes import RouteTable
from rmqkit.namesrv.settings import WITHOUT_EFFECT, NamesrvSettings
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header, reply
from rmqkit.protocol.schemas.topics import (
    AddWritePermResponse,
    BrokerNameRequest,
    ClusterRequest,
    DeleteTopicRequest,
    KVKey,
    KVNamespace,
    KVPut,
    KVTable,
    KVValue,
    TopicList,
    WipeWritePermResponse,
)
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import answers, change_settings, settings_reply
from rmqkit.settings import Configuration

_UNIT = 1
_UNIT_SUB = 2


class AdminHandlers(TableHandlers):
    """The handlers of operators' requests."""

    def __init__(
        self, settings: NamesrvSettings, routes: RouteTable, kv: KeyValues, configuration: Configuration
    ) -> None:
        super().__init__(settings, routes, kv)
        self._configuration = configuration

    # -- KV configuration

    @answers(RequestCode.PUT_KV_CONFIG, admins_only=True, lane="administration")
    async def put_kv(self, connection: Connection, command: Command) -> Command:
        """Set a value, and answer after it is on the disk."""
        header = decode_header(command, KVPut)
        if header.namespace is None or header.key is None:
            return reply(command, ResponseCode.SYSTEM_ERROR, "namespace or key is null")
        await self._kv.put(header.namespace, header.key, header.value)
        return reply(command)

    @answers(RequestCode.GET_KV_CONFIG)
    def kv_value(self, connection: Connection, command: Command) -> Command:
        header = decode_header(command, KVKey)
        value = self._kv.get(header.namespace, header.key)
        if value is None:
            remark = f"No config item, Namespace: {header.namespace} Key: {header.key}"
            return reply(command, ResponseCode.QUERY_NOT_FOUND, remark)
        return reply(command, header=KVValue(value))

    @answers(RequestCode.DELETE_KV_CONFIG, admins_only=True, lane="administration")
    async def delete_kv(self, connection: Connection, command: Command) -> Command:
        """Remove a value, if it exists."""
        header = decode_header(command, KVKey)
        await self._kv.delete(header.namespace, header.key)
        return reply(command)

    @answers(RequestCode.GET_KVLIST_BY_NAMESPACE)
    def kv_namespace(self, connection: Connection, command: Command) -> Command:
        header = decode_header(command, KVNamespace)
        values = self._kv.namespace(header.namespace)
        if values is None:
            return reply(command, ResponseCode.QUERY_NOT_FOUND, f"No config item, Namespace: {header.namespace}")
        return reply(command, body=msgspec.json.encode(KVTable(dict(values))))

    # -- permissions and topics

    @answers(RequestCode.WIPE_WRITE_PERM_OF_BROKER, admins_only=True, lane="administration")
    def wipe_write_perm(self, connection: Connection, command: Command) -> Command:
        """Remove a broker's write permission, so that producers avoid the broker until it registers a changed table."""
        header = decode_header(command, BrokerNameRequest)
        return reply(command, header=WipeWritePermResponse(self._routes.wipe_write_perm(header.broker_name)))

    @answers(RequestCode.ADD_WRITE_PERM_OF_BROKER, admins_only=True, lane="administration")
    def add_write_perm(self, connection: Connection, command: Command) -> Command:
        """Restore a broker's write permission, so that producers use it again."""
        header = decode_header(command, BrokerNameRequest)
        return reply(command, header=AddWritePermResponse(self._routes.add_write_perm(header.broker_name)))

    @answers(RequestCode.DELETE_TOPIC_IN_NAMESRV, admins_only=True, lane="administration")
    def delete_topic(self, connection: Connection, command: Command) -> Command:
        """Remove a topic, if it exists."""
        header = decode_header(command, DeleteTopicRequest)
        self._routes.delete_topic(header.topic, header.cluster_name or None)
        return reply(command)

    # -- lists

    @answers(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
    def all_topics(self, connection: Connection, command: Command) -> Command:
        if not self._settings.all_topic_list_enable:
            return reply(command, ResponseCode.SYSTEM_ERROR, "disable")
        return _topic_list(command, self._routes.topics())

    @answers(RequestCode.GET_TOPICS_BY_CLUSTER)
    def topics_of_cluster(self, connection: Connection, command: Command) -> Command:
        if not self._settings.topic_list_enable:
            return reply(command, ResponseCode.SYSTEM_ERROR, "disable")
        header = decode_header(command, ClusterRequest)
        return _topic_list(command, self._routes.topics_of_cluster(header.cluster))

    @answers(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS)
    def system_topics(self, connection: Connection, command: Command) -> Command:
        """Return the topics named after clusters and brokers, and the address of a broker with more system topics."""
        clusters = self._routes.clusters()
        names = [name for cluster, brokers in clusters.cluster_addr_table.items() for name in (cluster, *brokers)]
        addresses = [
            address for broker in clusters.broker_addr_table.values() for address in broker.broker_addrs.values()
        ]
        return _topic_list(command, list(dict.fromkeys(names)), broker_addr=addresses[0] if addresses else None)

    @answers(RequestCode.GET_UNIT_TOPIC_LIST)
    def unit_topics(self, connection: Connection, command: Command) -> Command:
        return self._topics_by_flags(command, lambda flags: bool(flags & _UNIT))

    @answers(RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST)
    def unit_sub_topics(self, connection: Connection, command: Command) -> Command:
        return self._topics_by_flags(command, lambda flags: bool(flags & _UNIT_SUB))

    @answers(RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST)
    def only_unit_sub_topics(self, connection: Connection, command: Command) -> Command:
        return self._topics_by_flags(command, lambda flags: flags & (_UNIT | _UNIT_SUB) == _UNIT_SUB)

    def _topics_by_flags(self, command: Command, wanted: Callable[[int], bool]) -> Command:
        if not self._settings.topic_list_enable:
            return reply(command, ResponseCode.SYSTEM_ERROR, "disable")
        return _topic_list(command, self._routes.topics_with_flags(wanted))

    # -- settings

    @answers(RequestCode.GET_NAMESRV_CONFIG)
    def config(self, connection: Connection, command: Command) -> Command:
        return settings_reply(self._configuration, command)

    @answers(RequestCode.UPDATE_NAMESRV_CONFIG, admins_only=True, lane="administration")
    def update_config(self, connection: Connection, command: Command) -> Command:
        return change_settings(self._configuration, command, self._settings.config_black_list, WITHOUT_EFFECT)


def _topic_list(command: Command, topics: list[str], *, broker_addr: str | None = None) -> Command:
    return reply(command, body=msgspec.json.encode(TopicList(topics, broker_addr)))
