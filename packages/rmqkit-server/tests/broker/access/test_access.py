"""Users and policies: 3001 to 3010 (remoting.md §4.4.1). Refusals are compared with Apache's broker in
``tests/interop/test_admin_codes.py``."""

from __future__ import annotations

import json
import stat

import msgspec
import pytest

from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command
from rmqkit.remoting.authentication import AuthenticationSettings, Credentials
from rmqkit.remoting.client import RemotingClient
from rmqkit.standalone import Standalone
from tests.virtual_time import run as run_virtual

OK, NO_PERMISSION = 0, 16
ENTRY = {"resource": "Topic:orders", "actions": ["Pub"], "decision": "Allow"}
ROOT = Credentials(access_key="root", secret_key="secret12")
INNER = Credentials(access_key="inner", secret_key="inner-secret")
USERS = AuthenticationSettings(
    enabled=True,
    initial_user='{"username":"root","password":"secret12"}',
    inner_credentials='{"accessKey":"inner","secretKey":"inner-secret"}',
)


async def ask(address, credentials, code, body=None, **fields):
    client = RemotingClient(credentials=credentials)
    try:
        command = Command(code, fields=fields or None, body=b"" if body is None else json.dumps(body).encode())
        return await client.call(address, command, 60_000)
    finally:
        await client.close()


async def remark(address, credentials):
    return (await ask(address, credentials, RequestCode.GET_BROKER_HA_STATUS)).remark


@pytest.mark.virtual_time
def test_users_and_policies_are_there_after_a_restart_for_the_owner_alone(tmp_path):
    async def session(*requests):
        async with Standalone(tmp_path) as servers:
            return [await ask(servers.broker_address, None, code, body, **fields) for code, body, fields in requests]

    user, subject = {"username": "anna"}, {"subject": "User:anna"}
    made = run_virtual(
        session(
            (RequestCode.AUTH_CREATE_USER, {"password": "secret12", "userType": "super"}, user),
            (RequestCode.AUTH_CREATE_ACL, {"policies": [{"policyType": "Custom", "entries": [ENTRY]}]}, subject),
        )
    )
    assert [answer.code for answer in made] == [OK, OK]
    file = tmp_path / "config" / "access.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    users, acl = run_virtual(session((RequestCode.AUTH_LIST_USER, None, {}), (RequestCode.AUTH_GET_ACL, None, subject)))
    assert json.loads(bytes(users.payload)) == [
        {"username": "anna", "password": "secret12", "userType": "Super", "userStatus": "enable"}
    ]
    assert json.loads(bytes(acl.payload)) == subject | {"policies": [{"policyType": "Custom", "entries": [ENTRY]}]}


@pytest.mark.virtual_time
def test_a_change_decides_at_once_who_is_let_in_and_outlives_the_broker(tmp_path):
    anna = Credentials(access_key="anna", secret_key="first123")
    other = Credentials(access_key="anna", secret_key="other123")

    async def first():
        async with Standalone(tmp_path, authentication=USERS) as servers:
            address = servers.broker_address
            assert await remark(address, anna) == "User:anna is not found."
            await ask(address, ROOT, RequestCode.AUTH_CREATE_USER, {"password": "first123"}, username="anna")
            assert not await remark(address, anna)
            await ask(address, ROOT, RequestCode.AUTH_UPDATE_USER, {"password": "other123"}, username="anna")
            assert await remark(address, anna) == "check signature failed."
            assert not await remark(address, other)
            await ask(address, ROOT, RequestCode.AUTH_UPDATE_USER, {"userStatus": "disable"}, username="anna")
            assert await remark(address, other) == "User:anna is disabled."
            await ask(address, ROOT, RequestCode.AUTH_UPDATE_USER, {"password": "changed1"}, username="root")

    async def second():
        async with Standalone(tmp_path, authentication=USERS) as servers:
            assert await remark(servers.broker_address, other) == "User:anna is disabled."
            assert await remark(servers.broker_address, ROOT) == "check signature failed."
            assert not await remark(servers.broker_address, Credentials(access_key="root", secret_key="changed1"))
            assert not await remark(servers.broker_address, INNER)

    run_virtual(first())
    run_virtual(second())


async def test_a_resource_that_is_none_forgets_nothing(cluster):
    address = cluster.standalone.broker_address
    await ask(address, None, RequestCode.AUTH_CREATE_USER, {"password": "p"}, username="u")
    body = {"policies": [{"policyType": "Custom", "entries": [ENTRY]}]}
    await ask(address, None, RequestCode.AUTH_CREATE_ACL, body, subject="User:u")
    refused = await ask(address, None, RequestCode.AUTH_DELETE_ACL, subject="User:u", resource="orders")
    assert (refused.code, refused.remark) == (NO_PERMISSION, "The resource is null.")
    kept = await ask(address, None, RequestCode.AUTH_GET_ACL, subject="User:u")
    assert msgspec.json.decode(kept.payload)["policies"] == body["policies"]


async def test_only_super_users_look_after_super_users(tmp_path):
    """The remarks are compared in tests/interop/test_authorization.py."""

    async with Standalone(tmp_path, authentication=USERS) as servers:

        async def answer(credentials, code, name, **body):
            answer = await ask(servers.broker_address, credentials, code, body, username=name)
            return answer.code, answer.remark

        anna = Credentials(access_key="anna", secret_key="secret12")
        assert await answer(ROOT, RequestCode.AUTH_CREATE_USER, "anna", password="secret12") == (OK, None)
        create, update = (f"The super user can only be {verb} by super user" for verb in ("create", "update"))
        made = {"password": "p", "userType": "super"}
        assert await answer(anna, RequestCode.AUTH_CREATE_USER, "bert", **made) == (1, create)
        assert await answer(anna, RequestCode.AUTH_UPDATE_USER, "anna", userType="Super") == (1, update)
        assert await answer(anna, RequestCode.AUTH_UPDATE_USER, "root", password="p") == (NO_PERMISSION, update)
        assert await answer(anna, RequestCode.AUTH_DELETE_USER, "root") == (NO_PERMISSION, update)
        assert await answer(INNER, RequestCode.AUTH_CREATE_USER, "bert", **made) == (OK, None)
        assert await answer(ROOT, RequestCode.AUTH_UPDATE_USER, "bert", userType="Normal") == (OK, None)
        assert await answer(anna, RequestCode.AUTH_DELETE_USER, "bert") == (OK, None)
