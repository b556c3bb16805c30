"""Name server and broker in one process: the name server's persistent files."""

from __future__ import annotations

import json

import pytest

from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import request
from rmqkit.protocol.schemas.topics import KVPut
from rmqkit.remoting.client import RemotingClient
from rmqkit.standalone import Standalone
from tests.virtual_time import run as run_virtual


@pytest.mark.virtual_time
@pytest.mark.parametrize("chosen", ["", "elsewhere/kv.json"])
def test_the_kv_file_is_beside_the_broker_s_tables_unless_it_is_set(tmp_path, chosen):
    async def put():
        namesrv = NamesrvSettings(listen_port=0, bind_address="127.0.0.1")
        namesrv.kv_config_path = str(tmp_path / chosen) if chosen else ""
        client = RemotingClient()
        async with Standalone(tmp_path / "store", namesrv=namesrv) as both:
            command = request(RequestCode.PUT_KV_CONFIG, KVPut("v", "NS", "k"))
            assert (await client.call(both.namesrv_address, command, 60_000)).code == ResponseCode.SUCCESS
            await client.close()

    run_virtual(put())
    path = tmp_path / (chosen or "store/config/kvConfig.json")
    assert json.loads(path.read_bytes()) == {"configTable": {"NS": {"k": "v"}}}
