"""A certificate that a server makes for itself, when a peer wants TLS and none is given."""

from __future__ import annotations

import asyncio
import subprocess

import pytest

from rmqkit.errors import ConnectFailed, ConnectionLost, RemotingError
from rmqkit.protocol.command import reply, request
from rmqkit.remoting import tls
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.router import Router
from rmqkit.remoting.server import RemotingServer
from rmqkit.remoting.tls import ClientTls, NeedClientAuth, ServerTls, ServerTlsSettings, Tls, TlsMode
from rmqkit.system import threads
from tests.certificates import OPENSSL, REASON
from tests.virtual_time import run as run_virtual
from tests.waiting import SECONDS

needs_openssl = pytest.mark.skipif(OPENSSL is None, reason=REASON)


async def asked(port, tls):
    client = RemotingClient(tls=ClientTls(Tls(verify=False)) if tls else None)
    try:
        return bytes((await client.call(f"127.0.0.1:{port}", request(1, body=b"hello"), 60_000)).payload)
    except RemotingError as error:
        return error
    finally:
        await client.close()


def served(scenario, **settings):
    async def main():
        dispatch = Router()
        dispatch.register(1, lambda connection, command: reply(command, body=command.body))
        server = RemotingServer(dispatch, tls=ServerTls(ServerTlsSettings(**settings)))
        try:
            async with asyncio.timeout(SECONDS):
                return await scenario(await server.listen("127.0.0.1", 0))
        finally:
            await server.close()

    return run_virtual(main())


def warnings(caplog):
    return [one.getMessage() for one in caplog.records if one.name == tls.__name__]


@pytest.mark.virtual_time
@needs_openssl
def test_it_is_made_once_for_all_who_want_tls_and_the_log_says_what_it_is_worth(caplog, monkeypatch):
    made = []
    make = tls.make_context
    monkeypatch.setattr(tls, "make_context", lambda: made.append(1) or make())

    async def scenario(port):
        at_once = await asyncio.gather(*(asked(port, tls) for tls in (True, True, False, True)))
        return [*at_once, await asked(port, tls=True)]

    assert served(scenario) == [b"hello"] * 5
    assert len(made) == 1
    (line,) = [line for line in warnings(caplog) if "a certificate was made" in line]
    assert "protects against eavesdropping only" in line


@pytest.mark.virtual_time
@needs_openssl
def test_others_are_answered_while_it_is_made(monkeypatch):
    begun, goes_on = threads.Event(), threads.Event()
    make = tls.make_context
    monkeypatch.setattr(tls, "make_context", lambda: begun.set() or (goes_on.wait(SECONDS) and make()))

    async def scenario(port):
        waiting = asyncio.create_task(asked(port, tls=True))
        try:
            await asyncio.to_thread(begun.wait, SECONDS)
            plain = await asked(port, tls=False)
            assert not waiting.done()
            return plain
        finally:
            goes_on.set()
            assert await waiting == b"hello"

    assert served(scenario) == b"hello"


@pytest.mark.virtual_time
@needs_openssl
def test_a_peer_that_goes_while_it_is_made_does_not_matter(monkeypatch):
    begun, goes_on = threads.Event(), threads.Event()
    make = tls.make_context
    monkeypatch.setattr(tls, "make_context", lambda: begun.set() or (goes_on.wait(SECONDS) and make()))

    async def scenario(port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\x16\x03\x01")
        await asyncio.to_thread(begun.wait, SECONDS)
        writer.transport.abort()
        goes_on.set()
        return await asked(port, tls=True)

    assert served(scenario) == b"hello"


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (FileNotFoundError(2, "No such file or directory", "openssl"), "No such file or directory: 'openssl'"),
        (subprocess.CalledProcessError(1, "openssl", b"", b"x\nunknown option\n"), "(unknown option)"),
        (subprocess.TimeoutExpired("openssl", 30), "timed out after 30 seconds"),
    ],
)
def test_where_none_can_be_made_such_peers_are_sent_away_and_others_served(caplog, monkeypatch, error, reason):
    def fail():
        raise error

    monkeypatch.setattr(tls, "make_context", fail)

    async def scenario(port):
        return [await asked(port, tls) for tls in (True, False, True)]

    first, plain, second = served(scenario)
    assert isinstance(first, ConnectionLost | ConnectFailed)
    assert plain == b"hello"
    assert isinstance(second, ConnectionLost | ConnectFailed)
    (line,) = warnings(caplog)
    assert reason in line


@pytest.mark.parametrize(
    "settings",
    [{"mode": TlsMode.DISABLED}, {"makes_own": False}, {"need_client_auth": NeedClientAuth.REQUIRE}, {"key": "a.key"}],
)
def test_none_is_made_where_tls_is_off_or_set_up_in_part(settings):
    tls = ServerTls(ServerTlsSettings(**settings))
    assert tls.own is None
    assert tls.mode is TlsMode.DISABLED
