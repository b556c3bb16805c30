"""Encrypted connections and signed requests, with separate servers that know one user and accept both TLS and plain
connections. Source: behaviour.md §9.8; remoting.md §2.1, §3.3."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from rmqkit import Message, NoRoute, PeerRefused, Producer, SendFailed, SendResult
from rmqkit.protocol.codes import ResponseCode
from rmqkit.remoting.authentication import Credentials
from rmqkit.remoting.tls import Tls
from tests.certificates import OPENSSL, REASON, make_certificate
from tests.interop.apache import open_store_with_apache
from tests.interop.standalone import run_standalone
from tests.interop.suite.scene import Peer, Scene
from tests.patience import producing

pytestmark = [pytest.mark.patient, pytest.mark.skipif(OPENSSL is None, reason=REASON)]

USER = Credentials(access_key="suite-user", secret_key="suite-secret")
SIGNED = {"auth": USER}
PROVIDER = "org.apache.rocketmq.auth.authentication.provider"


@dataclass
class Secured:
    """Servers that accept only signed requests, and their certificate."""

    namesrv: str
    broker_addr: str
    certificate: str
    other_certificate: str


async def secured(peer: Peer) -> Secured:
    return await asyncio.to_thread(lambda: peer.kept.enter_context(run_secured(peer)))


@contextlib.contextmanager
def run_secured(peer: Peer) -> Iterator[Secured]:
    work_dir = peer.work_dir / "secured"
    work_dir.mkdir()
    own, other = make_certificate(work_dir, "own"), make_certificate(work_dir, "other")
    tls = {"tls.server.mode": "permissive", "tls.server.certPath": own.certificate, "tls.server.keyPath": own.key}
    conf = {
        "authenticationEnabled": "true",
        "initAuthenticationUser": json.dumps({"username": USER.access_key, "password": USER.secret_key}),
        "innerClientAuthenticationCredentials": json.dumps({"accessKey": "inner", "secretKey": "inner-secret"}),
    }
    if peer.is_ours:
        path = work_dir / "broker.conf"
        path.write_text("".join(f"{key}={value}\n" for key, value in {**conf, **tls}.items()))
        with run_standalone(work_dir / "store", work_dir, "--config", str(path)) as running:
            yield Secured(running.namesrv_addr, running.broker_addr, own.certificate, other.certificate)
            running.stop()
        return
    conf |= {
        "authenticationProvider": f"{PROVIDER}.DefaultAuthenticationProvider",
        "authenticationMetadataProvider": f"{PROVIDER}.LocalAuthenticationMetadataProvider",
    }
    options = ["-Dtls.test.mode.enable=false", *(f"-D{key}={value}" for key, value in tls.items())]
    with open_store_with_apache(
        peer.kit(), work_dir / "store", work_dir, conf, jvm_options=options, credentials=USER
    ) as pair:
        yield Secured(pair.namesrv_addr, pair.broker_addr, own.certificate, other.certificate)


async def send(scene: Scene, **settings: Any) -> SendResult:
    """Send one message to the secured servers."""
    servers = await scene.peer.shared(secured)
    made = producing(**{"retries": 0, **settings})
    async with Producer(scene.group, servers.namesrv, settings=made) as producer:
        return await producer.send(Message(topic=scene.topic, body=b"signed", properties={"a": "ä"}))


async def test_a_user_who_signs_sends(scene: Scene) -> None:
    """remoting.md §3.3."""
    assert (await send(scene, **SIGNED)).queue_offset == 0


async def test_a_wrong_secret_is_refused(scene: Scene) -> None:
    """behaviour.md §9.8: check signature failed."""
    with pytest.raises(SendFailed, match="check signature failed") as failure:
        await send(scene, auth=Credentials(access_key=USER.access_key, secret_key="wrong"))
    assert isinstance(failure.value.cause, PeerRefused)
    assert failure.value.cause.code == ResponseCode.NO_PERMISSION


async def test_an_unknown_user_is_refused(scene: Scene) -> None:
    """behaviour.md §9.8: User:<u> is not found."""
    with pytest.raises(SendFailed, match="User:nobody is not found"):
        await send(scene, auth=Credentials(access_key="nobody", secret_key="secret"))


async def test_who_does_not_sign_is_refused(scene: Scene) -> None:
    """behaviour.md §9.8: username cannot be null."""
    with pytest.raises(SendFailed, match="username cannot be null"):
        await send(scene)


async def test_a_signed_message_is_read_by_a_signed_consumer(scene: Scene) -> None:
    """remoting.md §3.3: every request is signed."""
    await send(scene, **SIGNED)
    scene.namesrv = (await scene.peer.shared(secured)).namesrv
    await scene.reader(**SIGNED)
    assert [one.body for one in await scene.stored(1)] == [b"signed"]


async def test_a_consumer_who_does_not_sign_is_refused(scene: Scene) -> None:
    """behaviour.md §9.8: username cannot be null."""
    await send(scene, **SIGNED)
    scene.namesrv = (await scene.peer.shared(secured)).namesrv
    await scene.reader()
    with pytest.raises(PeerRefused, match="username cannot be null"):
        await scene.stored(1)


async def test_a_signed_batch_and_a_signed_one_way_message_are_taken(scene: Scene) -> None:
    """remoting.md §3.3: the body is signed, too."""
    scene.namesrv = (await scene.peer.shared(secured)).namesrv
    producer = await scene.producer(**SIGNED)
    result = await producer.send_batch([Message(topic=scene.topic, body=b"%d" % i) for i in range(3)])
    await producer.send_one_way(Message(topic=scene.topic, body=b"one way"), queue=result.queue)
    await scene.reader(**SIGNED)
    assert [one.body for one in await scene.stored(4)] == [b"0", b"1", b"2", b"one way"]


async def test_an_encrypted_connection_carries_messages(scene: Scene) -> None:
    """behaviour.md §9.8; remoting.md §2.1."""
    assert (await send(scene, tls=Tls(verify=False), **SIGNED)).queue_offset == 0


async def test_a_server_whose_certificate_is_trusted_is_used(scene: Scene) -> None:
    """behaviour.md §9.8: tls.client.authServer, tls.client.trustCertPath."""
    servers = await scene.peer.shared(secured)
    trusted = Tls(trusted=servers.certificate)
    assert (await send(scene, tls=trusted, **SIGNED)).queue_offset == 0


async def test_a_server_whose_certificate_is_not_trusted_is_refused(scene: Scene) -> None:
    """behaviour.md §9.8."""
    servers = await scene.peer.shared(secured)
    trusted = Tls(trusted=servers.other_certificate)
    with pytest.raises(NoRoute, match="TLS handshake failed: CERTIFICATE_VERIFY_FAILED"):
        await send(scene, tls=trusted, **SIGNED)
