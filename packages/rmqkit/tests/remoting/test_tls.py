"""TLS on the port that also accepts plain connections (remoting.md §2.1)."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from rmqkit import Message, Producer, ProducerSettings, Tls
from rmqkit.errors import ConnectFailed, ConnectionLost, RemotingError, SettingsError
from rmqkit.protocol.command import reply, request
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.router import Router
from rmqkit.remoting.server import RemotingServer
from rmqkit.remoting.tls import (
    ClientTls,
    NeedClientAuth,
    ServerTls,
    ServerTlsSettings,
    TlsMode,
)
from rmqkit.standalone import Standalone
from tests.certificates import OPENSSL, REASON, Certificate, make_certificate
from tests.virtual_time import run as run_virtual
from tests.waiting import SECONDS

pytestmark = pytest.mark.skipif(OPENSSL is None, reason=REASON)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def server_certificate(folder) -> Certificate:
    return make_certificate(folder, "server")


@pytest.fixture(scope="module")
def client_certificate(folder) -> Certificate:
    return make_certificate(folder, "client")


def server_tls(certificate: Certificate, mode=TlsMode.PERMISSIVE, **more) -> ServerTls:
    return ServerTls(ServerTlsSettings(mode=mode, certificate=certificate.certificate, key=certificate.key, **more))


def talk(tls: ServerTls | None, *clients: ClientTls | None, body: bytes = b"hello", between=None) -> list[object]:
    """Return each client's answer from an echo server, or its error."""

    async def main() -> list[object]:
        dispatch = Router()
        dispatch.register(1, lambda connection, command: reply(command, body=command.body))
        server = RemotingServer(dispatch, tls=tls)
        port = await server.listen("127.0.0.1", 0)
        heard: list[object] = []
        for i, client_tls in enumerate(clients):
            if i and between is not None:
                between()
            client = RemotingClient(tls=client_tls)
            try:
                answer = await client.call(f"127.0.0.1:{port}", request(1, body=body), 60_000)
                heard.append(answer.payload)
            except RemotingError as error:
                heard.append(error)
            await client.close()
        await server.close()
        return heard

    return run_virtual(main())


ANYONE = Tls(verify=False)


@pytest.mark.virtual_time
def test_a_permissive_port_speaks_both(server_certificate):
    assert talk(server_tls(server_certificate), ClientTls(ANYONE), None) == [b"hello", b"hello"]


@pytest.mark.virtual_time
def test_large_bodies_go_both_ways(server_certificate):
    body = bytes(range(256)) * 16384
    assert talk(server_tls(server_certificate), ClientTls(ANYONE), body=body) == [body]


@pytest.mark.virtual_time
def test_an_enforcing_port_closes_plain_connections_with_one_line(server_certificate, caplog):
    heard = talk(server_tls(server_certificate, TlsMode.ENFORCING), None, ClientTls(ANYONE))
    assert isinstance(heard[0], ConnectionLost)
    assert heard[1] == b"hello"
    assert [r.getMessage().partition(": ")[2] for r in caplog.records if r.levelname == "WARNING"] == [
        "it is not encrypted and tls.server.mode is enforcing"
    ]


@pytest.mark.virtual_time
@pytest.mark.parametrize("tls", [None, ServerTlsSettings(mode=TlsMode.DISABLED), ServerTlsSettings(makes_own=False)])
def test_a_port_without_tls_closes_handshakes(tls, caplog):
    heard = talk(None if tls is None else ServerTls(tls), ClientTls(ANYONE), None)
    assert isinstance(heard[0], ConnectionLost | ConnectFailed)
    assert heard[1] == b"hello"
    assert "TLS is disabled" in caplog.text


@pytest.mark.virtual_time
def test_a_client_checks_the_server_when_asked(server_certificate, client_certificate):
    trusts = ClientTls(Tls(trusted=server_certificate.certificate))
    distrusts = ClientTls(Tls(trusted=client_certificate.certificate))
    heard = talk(server_tls(server_certificate), trusts, distrusts)
    assert heard[0] == b"hello"
    assert isinstance(heard[1], ConnectionLost)
    assert heard[1].reason == "TLS handshake failed: CERTIFICATE_VERIFY_FAILED"


@pytest.mark.virtual_time
def test_a_server_checks_clients_when_asked(server_certificate, client_certificate):
    tls = server_tls(
        server_certificate, need_client_auth=NeedClientAuth.REQUIRE, trusted=client_certificate.certificate
    )
    known = ClientTls(Tls(verify=False, certificate=client_certificate.certificate, key=client_certificate.key))
    heard = talk(tls, known, ClientTls(ANYONE))
    assert heard[0] == b"hello"
    assert isinstance(heard[1], ConnectionLost)


@pytest.mark.virtual_time
def test_changed_certificate_files_are_used_by_the_next_connection(tmp_path):
    first = make_certificate(tmp_path, "first")
    second = make_certificate(tmp_path, "second")
    used = Certificate(str(tmp_path / "used.crt"), str(tmp_path / "used.key"))

    def install(certificate: Certificate) -> None:
        shutil.copy(certificate.certificate, used.certificate)
        shutil.copy(certificate.key, used.key)

    install(first)
    tls = server_tls(used)
    trusts = [ClientTls(Tls(trusted=c.certificate)) for c in (first, second)]
    heard = talk(tls, trusts[0], trusts[1], between=lambda: install(second))
    assert heard == [b"hello", b"hello"]


@pytest.mark.virtual_time
def test_changed_files_that_cannot_be_used_leave_the_earlier_ones_in_force(tmp_path, caplog):
    used = make_certificate(tmp_path, "used")
    tls = server_tls(used)
    heard = talk(
        tls, ClientTls(ANYONE), ClientTls(ANYONE), between=lambda: Path(used.certificate).write_text("nonsense")
    )
    assert heard == [b"hello", b"hello"]
    assert "cannot use the changed certificate files" in caplog.text


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"mode": TlsMode.ENFORCING}, "tls.server.mode=enforcing needs tls.server.certPath"),
        ({"certificate": "/none.crt", "key": "/none.key"}, "certificate /none.crt with key /none.key cannot be used"),
    ],
)
def test_settings_that_cannot_be_used(settings, text):
    with pytest.raises(SettingsError, match=text):
        ServerTls(ServerTlsSettings(**settings))


@pytest.mark.virtual_time
def test_garbage_after_a_client_hello_closes_that_connection(server_certificate, caplog):
    async def main() -> bytes:
        server = RemotingServer(Router(), tls=server_tls(server_certificate))
        port = await server.listen("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\x16\x03\x01\x00\x05hello")
        heard = await asyncio.wait_for(reader.read(), SECONDS)
        writer.close()
        await server.close()
        return heard

    run_virtual(main())
    assert "TLS handshake failed" in caplog.text


@pytest.mark.virtual_time
def test_producer_broker_and_name_server_speak_tls_only(tmp_path, server_certificate):
    tls = server_tls(server_certificate, TlsMode.ENFORCING)
    settings = ProducerSettings(tls=Tls(trusted=server_certificate.certificate))

    async def main() -> str:
        async with (
            Standalone(tmp_path / "store", tls=tls, client_tls=ClientTls(settings.tls)) as standalone,
            Producer("p", standalone.namesrv_address, settings=settings) as producer,
        ):
            return (await producer.send(Message(topic="T", body=b"secret"))).status.value

    assert run_virtual(main()) == "SEND_OK"
