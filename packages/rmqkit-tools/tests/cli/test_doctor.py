"""`rmq doctor` on machines with one thing wrong each, and on this one."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import socket
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rmqkit.admin.diagnosis import doctor
from rmqkit.admin.diagnosis.doctor import Host, State, Target
from rmqkit.broker.settings import BrokerSettings
from rmqkit.cli.servers.doctor import app
from rmqkit.core import CORE
from rmqkit.errors import ConnectFailed
from rmqkit.extras import install
from rmqkit.remoting.port_users import PortUser
from rmqkit.remoting.tls import ServerTlsSettings
from rmqkit.store.files import StoreLock
from rmqkit.store.settings import StoreSettings
from tests.certificates import OPENSSL, REASON, make_certificate
from tests.interop.standalone import run_standalone
from tests.ports import free_port, silent_port

OK, WARN, FAIL, UNKNOWN = State.OK, State.WARN, State.FAIL, State.UNKNOWN
LIMITS = "Limit              Soft Limit   Hard Limit   Units\nMax open files            {}   9999   files\n"
SOUND = {
    "proc/self/limits": LIMITS.format(655350),
    "proc/self/mountinfo": "1 0 0:9 / / rw - overlay overlay rw\n2 1 8:1 / {root} rw shared:1 - ext4 /dev/sda1 rw\n",
    "proc/sys/vm/max_map_count": "655360\n",
    "proc/sys/vm/overcommit_memory": "0\n",
    "proc/sys/vm/swappiness": "1\n",
    "proc/sys/vm/dirty_ratio": "20\n",
    "proc/sys/vm/dirty_background_ratio": "10\n",
    "sys/devices/sda/queue/scheduler": "none [mq-deadline] kyber\n",
    "sys/devices/sda/queue/read_ahead_kb": "128\n",
    "sys/devices/sda/sda1/partition": "1\n",
}
HOST = (doctor.open_files, doctor.file_system, doctor.block_device, doctor.memory)


def plant(folder: Path, **broker):
    """A sound machine, and a broker that would use it."""
    root = folder / "store"
    for name, text in SOUND.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(root=root))
    (folder / "sys/dev/block").mkdir(parents=True)
    (folder / "sys/dev/block/8:1").symlink_to(folder / "sys/devices/sda/sda1")
    settings = BrokerSettings(bind_address="127.0.0.1", **broker)
    return Target(settings, StoreSettings(), root, machine=Host(folder / "proc", folder / "sys"))


def test_who_reads_plain_sends(tmp_path, monkeypatch):
    target = plant(tmp_path)
    monkeypatch.setattr(CORE, "fault", "RMQKIT_NATIVE=0")
    assert "plain Python" in found(target, doctor.sends)["sends"].found
    monkeypatch.setattr(CORE, "fault", "rmqkit_native has format 1")
    finding = found(target, doctor.sends)["sends"]
    assert (finding.state, finding.remedy) == (doctor.State.WARN, "rmqkit_native has format 1")


def test_who_connects_with_grpc(tmp_path, monkeypatch):
    assert found(plant(tmp_path), doctor.grpc)["grpc"].found == "installed"
    asked = plant(tmp_path / "asked", grpc_port=8081)
    assert found(asked, doctor.grpc)["grpc"].found == "installed, grpcServerPort=8081"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    finding = found(asked, doctor.grpc)["grpc"]
    assert (finding.state, finding.remedy) == (doctor.State.FAIL, f"{install('grpc')}, or set -1")
    assert found(plant(tmp_path / "none"), doctor.grpc)["grpc"].state is doctor.State.OK


def found(target, *checks):
    return {finding.check: finding for check in checks for finding in check(target)}


def test_a_sound_machine(tmp_path):
    findings = found(plant(tmp_path), *HOST)
    assert {finding.state for finding in findings.values()} == {OK}
    assert {finding.remedy for finding in findings.values()} == {""}
    assert findings["open files"].found == "655350 (of this shell; a service has its own)"
    assert findings["scheduler"].found == "mq-deadline (sda)"
    assert findings["read-ahead"].found == "128 KiB (sda)"
    assert findings["file system"].found == "ext4"


@pytest.mark.parametrize(
    ("file", "text", "check", "value", "remedy"),
    [
        ("proc/self/limits", LIMITS.format(1024), "open files", "1024", "LimitNOFILE"),
        ("proc/self/mountinfo", "1 0 8:1 / / rw - tmpfs tmpfs rw\n", "file system", "tmpfs", "use a disk"),
        ("proc/self/mountinfo", "1 0 8:1 / / rw - fuse.sshfs x rw\n", "file system", "fuse.sshfs", "ext4 or xfs"),
        ("proc/self/mountinfo", "1 0 8:1 / / rw - overlay o rw\n", "file system", "overlay", "mount a volume"),
        ("sys/devices/sda/queue/scheduler", "none [bfq]\n", "scheduler", "bfq (sda)", "echo mq-deadline"),
        ("sys/devices/sda/queue/read_ahead_kb", "8192\n", "read-ahead", "8192 KiB (sda)", "read_ahead_kb"),
        ("proc/sys/vm/max_map_count", "65530\n", "vm.max_map_count", "65530", "sysctl -w vm.max_map_count=655360"),
        ("proc/sys/vm/overcommit_memory", "2\n", "vm.overcommit_memory", "2", "sysctl"),
        ("proc/sys/vm/swappiness", "60\n", "vm.swappiness", "60", "sysctl"),
        ("proc/sys/vm/dirty_ratio", "80\n", "vm.dirty_ratio", "80", "sysctl"),
    ],
)
def test_what_is_not_as_it_should_be_is_named_with_its_remedy(tmp_path, file, text, check, value, remedy):
    target = plant(tmp_path)
    (tmp_path / file).write_text(text)
    findings = found(target, *HOST)
    wrong = [name for name, finding in findings.items() if finding.state is not OK]
    assert wrong == [check]
    assert findings[check].state is WARN
    assert findings[check].found.startswith(value)
    assert remedy in findings[check].remedy


def test_what_cannot_be_read_is_unknown_and_neither_good_nor_bad(tmp_path):
    target = plant(tmp_path)
    shutil.rmtree(tmp_path / "proc")
    shutil.rmtree(tmp_path / "sys")
    findings = found(target, *HOST)
    assert {finding.state for finding in findings.values()} == {UNKNOWN}
    assert {"open files", "file system", "block device", "vm.swappiness"} <= set(findings)


@pytest.mark.parametrize(
    ("limits", "state", "remedy"),
    [
        ({}, OK, ""),
        ({"disk_used_percent_max": 1}, WARN, "from 1 % on expired files go at any hour"),
        ({"commit_log_file_bytes": 1 << 60}, WARN, "less than two files of the log"),
        ({"disk_warning_percent": 0}, FAIL, "from 0 % on no message is taken"),
    ],
)
def test_the_disk(tmp_path, monkeypatch, limits, state, remedy):
    monkeypatch.setattr(doctor, "used_percent", lambda path: 20)
    target = plant(tmp_path)
    target.store = StoreSettings(**{"commit_log_file_bytes": 1024, **limits})
    (finding,) = doctor.disk(target)
    assert finding.state is state
    assert finding.remedy.startswith(remedy)
    assert finding.found.startswith("20 % used, ")


def test_a_store_that_runs_that_was_killed_and_that_was_stopped(tmp_path):
    target = plant(tmp_path)

    def said():
        (finding,) = doctor.leftovers(target)
        return finding.state, finding.found

    assert said() == (OK, f"{target.root} is new")
    target.root.mkdir()
    assert said() == (OK, f"{target.root} was stopped cleanly")
    (target.root / "abort").write_text("77")
    assert said() == (WARN, f"{target.root}/abort exists and no broker runs: the last one was not stopped cleanly")
    lock = StoreLock(target.root)
    lock.acquire()
    assert said() == (OK, f"{target.root} is in use by process 77: a broker runs on it")
    (tmp_path / "proc/77").mkdir()
    (tmp_path / "proc/77/limits").write_text(LIMITS.format(70000))
    assert found(target, doctor.open_files)["open files"].found == "70000 (of the broker, process 77)"
    lock.release()


def test_a_port_in_use_is_reported_with_its_user(tmp_path):
    port = free_port(-2, 1)
    with socket.create_server(("127.0.0.1", port)):
        target = plant(tmp_path, listen_port=port)
        target.machine = Host()
        finding = found(target, doctor.ports)[f"port {port} (listenPort)"]
        assert finding.state is FAIL
        assert finding.found == f"in use by {Path('/proc/self/comm').read_text().strip()}, pid {os.getpid()}"
        target.machine = Host(tmp_path / "proc")  # which sees no sockets
        finding = found(target, doctor.ports)[f"port {port} (listenPort)"]
        assert (finding.state, finding.found) == (FAIL, "in use by a program that cannot be seen from here")
    finding = found(target, doctor.ports)[f"port {port} (listenPort)"]
    assert (finding.state, finding.found) == (OK, "free")


def test_the_ports_of_a_running_broker_are_in_order(tmp_path, monkeypatch):
    """In production only if the broker runs on the store that is checked: another one would keep it from starting."""
    port = free_port(-2, 1)
    target = plant(tmp_path, listen_port=port)
    monkeypatch.setattr(doctor, "port_users", lambda port, proc: [PortUser(77, "the rmq broker", is_broker=True)])
    monkeypatch.setattr(doctor, "in_use_by", lambda port, proc: "in use by the rmq broker, pid 77")

    def said():
        with socket.create_server(("127.0.0.1", port)):
            return found(target, doctor.ports)[f"port {port} (listenPort)"]

    assert (said().state, said().found) == (FAIL, "in use by the rmq broker, pid 77")
    target.is_development = True
    assert (said().state, said().found, said().remedy) == (OK, "in use by the rmq broker, pid 77", "")
    monkeypatch.setattr(doctor, "port_users", lambda port, proc: [PortUser(78, "nginx")])
    assert said().state is FAIL
    target.is_development = False
    monkeypatch.setattr(doctor, "port_users", lambda port, proc: [PortUser(77, "the rmq broker", is_broker=True)])
    target.root.mkdir()
    (target.root / "abort").write_text("77")
    lock = StoreLock(target.root)
    lock.acquire()
    assert said().state is OK
    lock.release()


@pytest.mark.parametrize(
    ("options", "is_production"),
    [
        ([], False),
        (["-c", "broker.conf"], True),
        (["--shards", "2"], True),
        (["--for", "production"], True),
        (["-c", "broker.conf", "--for", "development"], False),
    ],
)
def test_a_development_machine_is_not_checked_as_a_server(tmp_path, monkeypatch, options, is_production):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broker.conf").write_text("listenPort=0\n")
    command = ["--store", str(tmp_path / "store"), "--set", "bindAddress=127.0.0.1", *options]
    told = CliRunner().invoke(app, [*command, "--json"], env={"NAMESRV_ADDR": None}, catch_exceptions=False)
    rows = {row["check"]: row["state"] for row in json.loads(told.stdout)}
    of_servers = {"open files", "vm.swappiness", "clock"}
    assert of_servers <= rows.keys() if is_production else not of_servers & rows.keys()
    assert rows["name servers"] == ("warn" if is_production else "ok")
    shown = CliRunner().invoke(app, command, env={"NAMESRV_ADDR": None})
    assert ("rmq doctor --for production" in shown.stderr) != is_production


@pytest.mark.parametrize(
    ("listens", "told", "state", "text"),
    [
        ("127.0.0.1", "127.0.0.1", WARN, "is this machine only"),
        ("127.0.0.2", "127.0.0.1", FAIL, "cannot be reached from here: Connection refused"),
        ("127.0.0.1", "0.0.0.0", FAIL, "is no address of anything"),
    ],
)
def test_the_advertised_address_is_tried(tmp_path, listens, told, state, text):
    port = free_port()
    target = plant(tmp_path, listen_port=port, broker_ip1=told)
    target.broker.bind_address = listens
    (finding,) = doctor.advertised(target)
    assert (finding.state, finding.found) == (state, f"{told}:{port} {text}")
    assert "set brokerIP1 to an address that clients reach" in finding.remedy


@pytest.mark.parametrize(
    ("runtime", "state", "text"),
    [
        ("[ 0 days, 0 hours, 1 minutes, 0 seconds ]", OK, "+0 s from this one's"),
        ("[ 0 days, 0 hours, 1 minutes, 9 seconds ]", WARN, "+9 s from this one's"),
        ("[ 1 days, 0 hours, 0 minutes, 0 seconds ]", FAIL, "+86340 s from this one's"),
        (None, UNKNOWN, "it does not report when it started"),
    ],
)
def test_the_clock_of_a_broker(monkeypatch, runtime, state, text):
    class Brokers:
        async def status(self, broker):
            return {broker: {"bootTimestamp": "940000"} | ({"runtime": runtime} if runtime else {})}

    class Admin:
        brokers = Brokers()

    monkeypatch.setattr(doctor.time, "time", lambda: 1000.5)
    finding = asyncio.run(doctor.clock_of(Admin(), "127.0.0.1:10911"))
    assert (finding.state, finding.found) == (state, text)


def test_name_servers_and_their_brokers(tmp_path):
    with silent_port() as port, run_standalone(tmp_path / "running", tmp_path) as running:
        dead = f"127.0.0.1:{port}"
        findings = found(plant(tmp_path, namesrv_addr=f"{running.namesrv_addr};{dead}"), doctor.name_servers)
        running.stop()
    answer = findings[f"name server {running.namesrv_addr}"]
    assert (answer.state, answer.found) == (OK, "answers, knows 1 brokers")
    assert findings[f"clock of {running.broker_addr}"].state is OK
    refused = findings[f"name server {dead}"]
    assert refused.state is FAIL
    assert str(ConnectFailed(dead, "Connection refused")).partition(";")[0] in refused.found
    assert found(plant(tmp_path / "none"), doctor.name_servers)["name servers"].state is WARN


@pytest.mark.skipif(OPENSSL is None, reason=REASON)
def test_certificates(tmp_path):
    own = make_certificate(tmp_path, "own")
    target = plant(tmp_path)
    target.server_tls = ServerTlsSettings(certificate=own.certificate, key=own.key, trusted=str(tmp_path / "none"))
    near, missing = doctor.certificates(target)
    assert near.state is WARN
    assert near.found.startswith(f"{own.certificate} is valid until 20")
    assert (missing.state, missing.found) == (
        FAIL,
        f"{tmp_path}/none: [Errno 2] No such file or directory: '{tmp_path}/none'",
    )
    target.server_tls = ServerTlsSettings(certificate=own.certificate, key=make_certificate(tmp_path, "other").key)
    near, mismatch = doctor.certificates(target)
    assert mismatch.state is FAIL
    assert "cannot be used" in mismatch.found


def pem(der: bytes) -> str:
    return f"-----BEGIN CERTIFICATE-----\n{base64.b64encode(der).decode()}\n-----END CERTIFICATE-----\n"


def test_the_validity_of_certificates_is_read():
    """A certificate is a sequence whose first part is one, too, in which two times stand."""
    utc, general = b"\x17\x0d200101000000Z", b"\x18\x0f20990101000000Z"
    times = b"\x30" + bytes([len(utc + general)]) + utc + general
    signed = bytes.fromhex("020101 3000 3000") + times
    certificate = b"\x30\x81" + bytes([len(signed) + 2, 0x30, len(signed)]) + signed
    assert doctor.validity(pem(certificate)) == datetime(2099, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("inside", ["", "MAA=", "MAMwAQ==", "/w==", "!"])
def test_what_is_no_certificate_is_refused(inside):
    with pytest.raises(ValueError, match="a certificate in it cannot be read"):
        doctor.validity(f"-----BEGIN CERTIFICATE-----\n{inside}\n-----END CERTIFICATE-----")
    with pytest.raises(ValueError, match="no certificate in it"):
        doctor.validity(inside)


@pytest.mark.parametrize(("conf", "code"), [("", 0), ("diskSpaceWarningLevelRatio=0\n", 1)])
def test_the_exit_code_says_whether_something_fails(tmp_path, conf, code):
    config = tmp_path / "broker.conf"
    config.write_text(f"bindAddress=127.0.0.1\nlistenPort=0\nbrokerNmae=x\n{conf}")
    command = ["-c", str(config), "--store", str(tmp_path / "store")]
    env = {"NAMESRV_ADDR": None}
    told = CliRunner().invoke(app, [*command, "--json"], env=env, catch_exceptions=False)
    rows = json.loads(told.stdout)
    assert told.exit_code == code
    assert {row["state"] for row in rows} <= {"ok", "warn", "fail", "unknown"}
    assert [row["found"] for row in rows if row["check"] == "configuration"] == [
        f"{config}:3: unknown key brokerNmae is ignored, did you mean brokerName?"
    ]
    lines = CliRunner().invoke(app, command, env=env).stdout.splitlines()
    assert len(lines) == len(rows)
    assert not (tmp_path / "store").exists()


def test_each_shard_has_ports_and_a_store_of_its_own(tmp_path):
    def look(*options):
        command = ["--store", str(tmp_path), "--set", "bindAddress=127.0.0.1", "--set", "brokerIP1=127.0.0.1", *options]
        rows = json.loads(CliRunner().invoke(app, [*command, "--json"], env={"NAMESRV_ADDR": None}).stdout)
        return {row["check"]: row for row in rows}

    (tmp_path / "shard-1").mkdir()
    (tmp_path / "shard-1/abort").write_text("77")
    with socket.create_server(("127.0.0.1", 0)) as user:
        port = user.getsockname()[1]
        rows = look("--set", f"listenPort={port - 10}", "--shards", "2")
        assert rows["shard-0 store"]["found"] == f"{tmp_path}/shard-0 is new"
        assert rows["shard-1 store"]["found"].startswith(f"{tmp_path}/shard-1/abort exists and no broker runs")
        assert rows[f"shard-1 port {port} (listenPort)"]["state"] == "fail"
        assert {f"shard-1 port {port + 1} (haListenPort)", "shard-0 advertised address"} <= rows.keys()
    alone, few, high = look(), look("--shards", "1"), look("--shards", "2", "--set", "listenPort=65530")
    assert [rows["shards"]["state"] for rows in (alone, few, high)] == ["fail"] * 3
    assert "start it with --shards 2" in alone["shards"]["found"]
    assert "would leave unserved: use --shards 2" in few["shards"]["found"]
    assert "above 65535" in high["shards"]["found"]
    assert not (tmp_path / "shard-0").exists()
