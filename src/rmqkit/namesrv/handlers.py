"""What the name server answers (``DefaultRequestProcessor``, ``ClientRequestProcessor``). Source: remoting.md §4.2."""

from __future__ import annotations

import zlib

import msgspec

from rmqkit.namesrv.routes import MASTER_ID, Registration, RouteTable
from rmqkit.protocol import fastjson
from rmqkit.protocol.bodies.topics import DataVersion, RegisterBrokerBody
from rmqkit.protocol.codes import FAQ, RequestCode, ResponseCode, version_number
from rmqkit.protocol.command import Command, decode_header, reply
from rmqkit.protocol.headers.registration import (
    BrokerIdentity,
    DataVersionResponse,
    RegisterBrokerRequest,
    RegisterBrokerResponse,
)
from rmqkit.protocol.headers.topics import TopicRequest
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.dispatch import Dispatch

__all__ = ["namesrv_dispatch"]

_STRICT_JSON_SINCE = version_number(4, 9, 4)


def namesrv_dispatch(routes: RouteTable) -> Dispatch:
    """The dispatch of a name server over its route table."""
    handlers = _Handlers(routes)
    dispatch = Dispatch()
    dispatch.register(RequestCode.GET_ROUTEINFO_BY_TOPIC, handlers.route)
    dispatch.register(RequestCode.REGISTER_BROKER, handlers.register)
    dispatch.register(RequestCode.UNREGISTER_BROKER, handlers.unregister)
    dispatch.register(RequestCode.QUERY_DATA_VERSION, handlers.data_version)
    dispatch.register(RequestCode.GET_BROKER_CLUSTER_INFO, handlers.cluster_info)
    dispatch.register(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, handlers.topic_list)
    return dispatch


class _Handlers:
    def __init__(self, routes: RouteTable) -> None:
        self._routes = routes

    def route(self, connection: Connection, command: Command) -> Command:
        header = decode_header(command, TopicRequest)
        route = self._routes.route(header.topic)
        if route is None:
            remark = f"No topic route info in name server for the topic: {header.topic}{FAQ}"
            return reply(command, ResponseCode.TOPIC_NOT_EXIST, remark)
        is_strict = command.version >= _STRICT_JSON_SINCE or header.accept_standard_json_only
        return reply(command, body=msgspec.json.encode(route) if is_strict else fastjson.dumps(route))

    def register(self, connection: Connection, command: Command) -> Command:
        header = decode_header(command, RegisterBrokerRequest)
        body = command.payload
        if header.body_crc32 and zlib.crc32(body) & 0x7FFFFFFF != header.body_crc32:
            return reply(command, ResponseCode.SYSTEM_ERROR, "crc32 not match")
        topics = fastjson.decode_as(body, RegisterBrokerBody) if body else RegisterBrokerBody()
        accepted = self._routes.register(
            Registration(
                cluster=header.cluster_name,
                address=header.broker_addr,
                broker_name=header.broker_name,
                broker_id=header.broker_id,
                ha_address=header.ha_server_addr,
                timeout_ms=header.heartbeat_timeout_millis,
                enable_acting_master=header.enable_acting_master,
                topics=topics.topic_config_serialize_wrapper,
                connection=connection,
            )
        )
        if not accepted:
            return reply(command, ResponseCode.SYSTEM_ERROR, "register broker failed")
        answer = RegisterBrokerResponse()
        master = self._routes.master_of(header.cluster_name, header.broker_name)
        if header.broker_id != MASTER_ID and master is not None:
            answer = RegisterBrokerResponse(ha_server_addr=master[1], master_addr=master[0])
        return reply(command, header=answer)

    def unregister(self, connection: Connection, command: Command) -> Command:
        header = decode_header(command, BrokerIdentity)
        self._routes.unregister([(header.cluster_name, header.broker_addr)])
        return reply(command)

    def data_version(self, connection: Connection, command: Command) -> Command:
        header = decode_header(command, BrokerIdentity)
        asked = fastjson.decode_as(command.payload, DataVersion)
        stored = self._routes.refresh((header.cluster_name, header.broker_addr))
        body = b"" if stored is None else msgspec.json.encode(stored)
        return reply(command, header=DataVersionResponse(changed=stored != asked), body=body)

    def cluster_info(self, connection: Connection, command: Command) -> Command:
        return reply(command, body=fastjson.dumps(self._routes.clusters()))

    def topic_list(self, connection: Connection, command: Command) -> Command:
        return reply(command, body=msgspec.json.encode({"topicList": self._routes.topics()}))
