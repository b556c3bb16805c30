"""Java clients with and without TLS against our enforcing and permissive ports."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import request
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.tls import ClientTls, Tls
from tests.certificates import OPENSSL, REASON, make_certificate
from tests.interop.apache import ApachePair
from tests.interop.kit import ApacheKit
from tests.interop.probe import run_probe
from tests.interop.standalone import run_standalone
from tests.patience import TIMEOUT_MS

pytestmark = pytest.mark.skipif(OPENSSL is None, reason=REASON)

COUNT = 40
TLS = ("-Dtls.enable=true",)


def configuration(folder: Path, mode: str) -> Path:
    """A broker.conf whose ports, and whose own connections, use TLS."""
    certificate = make_certificate(folder, "server")
    path = folder / "broker.conf"
    path.write_text(
        f"tls.server.mode={mode}\ntls.server.certPath={certificate.certificate}\n"
        f"tls.server.keyPath={certificate.key}\ntls.enable=true\n"
    )
    return path


@pytest.mark.parametrize("mode", ["enforcing", "permissive"])
def test_a_java_client_with_tls_sends_and_consumes(apache_kit: ApacheKit, tmp_path: Path, mode: str) -> None:
    with run_standalone(tmp_path / "store", tmp_path, "-c", str(configuration(tmp_path, mode))) as standalone:
        run = run_probe(
            apache_kit,
            "both",
            namesrv=standalone.namesrv_addr,
            topic="Encrypted",
            work_dir=tmp_path,
            count=COUNT,
            consumers={"everyone": "*"},
            jvm_options=TLS,
        )
        assert run.exit_code == 0, run.outcome
        assert len(run.sent) > COUNT
        assert {m.msg_id for m in run.received} == {m.msg_id for m in run.sent}
        standalone.stop()


def test_a_client_with_tls_is_answered_out_of_the_box_by_both_brokers(apache: ApachePair, tmp_path: Path) -> None:
    """Both brokers create a certificate, because none is configured."""

    async def ask(address: str) -> int:
        client = RemotingClient(tls=ClientTls(Tls(verify=False)))
        try:
            return (await client.call(address, request(RequestCode.GET_BROKER_CONFIG), TIMEOUT_MS)).code
        finally:
            await client.close()

    assert asyncio.run(ask(apache.broker_addr)) == 0
    with run_standalone(tmp_path / "store", tmp_path) as standalone:
        assert asyncio.run(ask(standalone.broker_addr)) == 0
        standalone.stop()
        log = standalone.process.log.read_text()
    assert log.count("a certificate was made for this run") == 1


def test_a_java_client_with_tls_works_out_of_the_box(apache_kit: ApacheKit, tmp_path: Path) -> None:
    config = tmp_path / "broker.conf"
    config.write_text("brokerName=broker-a\n")
    with run_standalone(tmp_path / "store", tmp_path, "-c", str(config)) as standalone:
        run = run_probe(
            apache_kit,
            "send",
            namesrv=standalone.namesrv_addr,
            topic="Encrypted",
            work_dir=tmp_path,
            count=COUNT,
            jvm_options=TLS,
        )
        assert run.exit_code == 0, run.outcome
        assert len(run.sent) >= COUNT
        standalone.stop()


def test_a_plain_java_client_is_refused_by_an_enforcing_port_and_served_by_a_permissive_one(
    apache_kit: ApacheKit, tmp_path: Path
) -> None:
    outcomes = {}
    for mode in ("enforcing", "permissive"):
        folder = tmp_path / mode
        folder.mkdir()
        with run_standalone(folder / "store", folder, "-c", str(configuration(folder, mode))) as standalone:
            run = run_probe(
                apache_kit,
                "send",
                namesrv=standalone.namesrv_addr,
                topic="Plain",
                work_dir=folder,
                count=COUNT,
            )
            outcomes[mode] = run.exit_code
            log = standalone.process.log.read_text()
            assert ("it is not encrypted and tls.server.mode is enforcing" in log) is (mode == "enforcing")
            standalone.stop()
    assert outcomes["enforcing"] != 0
    assert outcomes["permissive"] == 0
