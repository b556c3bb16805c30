"""The broker that a measurement loads, ours or another: finding it by its name server, requests, and CPU time."""

from __future__ import annotations

import time

from rmqkit.errors import RmqError
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, request
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.schemas.topics import BrokerData, CreateTopicRequest, RouteRequest, TopicRoute
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.connection import Connection

__all__ = ["TIMEOUT_MS", "ask", "cpu_seconds", "create_topic", "expect", "find_broker"]

TIMEOUT_MS = 30_000


async def find_broker(client: RemotingClient, name_server: str) -> BrokerData:
    """Return a broker that creates topics. Raises RmqError: there is none."""
    command = request(RequestCode.GET_ROUTEINFO_BY_TOPIC, RouteRequest("TBW102"))
    answer = await client.call(name_server, command, TIMEOUT_MS)
    brokers = decode_as(answer.payload, TopicRoute).broker_datas if answer.code == ResponseCode.SUCCESS else []
    if not brokers:
        raise RmqError(f"name server {name_server} knows no broker that creates topics: {answer.remark}")
    return brokers[0]


async def create_topic(broker: Connection, topic: str, queues: int) -> None:
    """Create a topic to write and read. Raises RmqError."""
    header = CreateTopicRequest(topic, "TBW102", queues, queues, 6, "SINGLE_TAG")
    await ask(broker, request(RequestCode.UPDATE_AND_CREATE_TOPIC, header))


async def ask(broker: Connection, command: Command) -> Command:
    """Return the answer to a request. Raises RmqError: it is not a success."""
    return expect(await broker.call(command, TIMEOUT_MS))


def expect(answer: Command) -> Command:
    """Return an answer that is a success. Raises RmqError: it is not."""
    if answer.code != ResponseCode.SUCCESS:
        raise RmqError(f"the broker answered {answer.code}: {answer.remark}")
    return answer


def cpu_seconds(pid: int | None) -> float:
    """Return user and system time of a broker's process, or 0 if the process is unknown."""
    if pid is None:
        return 0.0
    return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3): exact, unlike /proc, which counts in 10 ms
