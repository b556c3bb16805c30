"""A name server on a loopback port, and a client for its requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import asynccontextmanager

from rmqkit.namesrv.server import NameServer
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import decode_fields, request
from rmqkit.protocol.schemas.brokers import RegisterBrokerRequest
from rmqkit.remoting.client import RemotingClient
from tests.waiting import SECONDS

CALL_TIMEOUT_MS = 60_000


class Asker:
    """A client that sends requests over one connection."""

    def __init__(self, server):
        self.server = server
        self.client = RemotingClient()

    async def __call__(self, code, header=None, body=b"", version=493, fields=None):
        command = request(code, header, body)
        command.version = version
        if fields is not None:
            command.fields = {**(command.fields or {}), **fields}
        return await self.client.call(self.server.address, command, CALL_TIMEOUT_MS)

    async def result(self, code, header=None, body=b"", **options):
        """Return the code, remark, header fields and JSON body of the answer."""
        answer = await self(code, header, body, **options)
        parsed = json.loads(answer.payload) if answer.payload else None
        return answer.code, answer.remark, decode_fields(answer), parsed

    async def register(self, *topics, body=None, **changes):
        content = registration_body(*topics) if body is None else body
        return await self(RequestCode.REGISTER_BROKER, register_header(**changes), content)


@asynccontextmanager
async def serving(tmp_path, *, clock=None, **settings):
    """Yield a name server and its client. The KV file is in ``tmp_path``."""
    chosen = {"listen_port": 0, "bind_address": "127.0.0.1", "kv_config_path": str(tmp_path / "kvConfig.json")}
    made = NamesrvSettings(**{**chosen, **settings})
    server = NameServer(made) if clock is None else NameServer(made, clock)
    await server.start()
    ask = Asker(server)
    try:
        async with asyncio.timeout(SECONDS):
            yield ask
    finally:
        await ask.client.close()
        await server.stop()


async def until(condition: Callable[[], object]) -> None:
    """Let the loop run until a condition holds; the scenario's deadline is the bound."""
    while not condition():
        await asyncio.sleep(0.001)


def registration_body(*topics, counter=2, state_version=0, perm=6, flags=0, **wrapper):
    table = {
        name: {"topicName": name, "perm": perm, "readQueueNums": 4, "writeQueueNums": 4, "topicSysFlag": flags}
        for name in topics or ("T", "U")
    }
    version = {"counter": counter, "stateVersion": state_version, "timestamp": 1795224574705}
    inner = {"dataVersion": version, "topicConfigTable": table, **wrapper}
    return json.dumps({"filterServerList": [], "topicConfigSerializeWrapper": inner}).encode()


def register_header(**changes):
    fields = {"broker_name": "broker-a", "broker_addr": "127.0.0.1:21911", "cluster_name": "DefaultCluster"}
    return RegisterBrokerRequest(**{**fields, "broker_id": 0, "ha_server_addr": "127.0.0.1:21912", **changes})
