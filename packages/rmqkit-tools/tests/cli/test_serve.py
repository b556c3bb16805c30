"""`rmq standalone`, `rmq broker`, `rmq namesrv`: the ready line and the clean stop as processes, and bad input."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.in_process import rmq
from tests.golden_stores import unpack_golden
from tests.interop.server_process import ServerProcess
from tests.interop.standalone import run_standalone
from tests.ports import free_port

RMQ = Path(sys.executable).with_name("rmq")
SECONDS_MAX = 150


@contextmanager
def server(tmp_path: Path, *arguments: object, env: dict[str, str] | None = None) -> Iterator[ServerProcess]:
    with ServerProcess([RMQ, *arguments], tmp_path / f"{arguments[0]}.log", env) as process:
        yield process


def run_failing(*arguments: object, code: int = 1) -> str:
    """Run a command that must not start, in this process; its stderr."""
    done = rmq(*arguments)
    assert done.returncode == code
    assert done.stdout == ""
    return done.stderr


def failed(*arguments: object, code: int = 1) -> str:
    """Run a command that must not start; its one line on stderr."""
    (line,) = run_failing(*arguments, code=code).splitlines()
    assert line.startswith("rmq: ")
    return line


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file with its size and time of last change."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


def on_free_ports(store: Path) -> list[object]:
    return ["standalone", "--namesrv-port", 0, "--port", 0, "--store", store]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_standalone_says_when_it_is_ready_and_stops_cleanly(tmp_path, how):
    store = tmp_path / "store"
    with server(tmp_path, *on_free_ports(store)) as process:
        process.wait_ready(rf"^ready namesrv=127\.0\.0\.1:\d+ broker=127\.0\.0\.1:\d+ store={store}$", SECONDS_MAX)
        assert (store / "abort").read_text() == str(process.pid)
        assert process.stop(how, SECONDS_MAX) == 0
    assert not (store / "abort").exists()
    assert process.log.read_text().count("\n") == 1


def test_a_start_imports_nothing_that_it_can_do_without(tmp_path):
    env = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    with server(tmp_path, *on_free_ports(tmp_path / "store"), "--set", "grpcServerPort=0", env=env) as process:
        process.wait_ready(r"^ready .* grpc=127\.0\.0\.1:\d+ ", SECONDS_MAX)
    lines = process.log.read_text().splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert {"rmqkit.broker.server", "rmqkit.proxy.schema.messages"} <= imported
    # Each of them costs 7 to 100 ms; what makes SQL92 out of its grammar is for the first expression.
    slow = {"lark", "importlib.resources", "google.protobuf.descriptor_pb2", "rich", "numpy", "pyarrow", "starlette"}
    assert imported & slow == set()


def test_name_server_and_broker_run_as_two_processes(tmp_path):
    with server(tmp_path, "namesrv", "--port", 0, "--host", "127.0.0.1") as names:
        namesrv = names.wait_ready(r"^ready namesrv=(\S+)$", SECONDS_MAX)[1]
        config = tmp_path / "broker.conf"
        config.write_text(
            f"listenPort=0\nbrokerIP1=127.0.0.1\nbrokerName=broker-x\nstorePathRootDir={tmp_path}/store\n"
        )
        env = {**os.environ, "NAMESRV_ADDR": namesrv}
        with server(tmp_path, "broker", "-c", config, env=env) as broker:
            broker.wait_ready(rf"^ready broker=127\.0\.0\.1:\d+ store={tmp_path}/store$", SECONDS_MAX)
            assert broker.stop(signal.SIGTERM, SECONDS_MAX) == 0
        assert names.stop(signal.SIGTERM, SECONDS_MAX) == 0
    assert "was not told" not in broker.log.read_text()


def test_a_proxy_runs_before_a_name_server(tmp_path):
    with (
        server(tmp_path, "namesrv", "--port", 0, "--host", "127.0.0.1") as names,
        server(
            tmp_path, "proxy", "-n", names.wait_ready(r"^ready namesrv=(\S+)$", SECONDS_MAX)[1], "--port", 0
        ) as proxy,
    ):
        proxy.wait_ready(r"^ready grpc=\S+:\d+ remoting=\S+:\d+$", SECONDS_MAX)
        assert proxy.stop(signal.SIGTERM, SECONDS_MAX) == 0
        assert names.stop(signal.SIGTERM, SECONDS_MAX) == 0


def test_a_proxy_reads_apaches_json(tmp_path):
    config = tmp_path / "rmq-proxy.json"
    own = {
        "rocketMQClusterName": "DefaultCluster",
        "proxyMode": "CLUSTER",
        "grpcServerPort": 0,
        "remotingListenPort": -1,
    }
    others = {"proxyName": "proxy-a", "tlsTestModeEnable": True, "namesrvAdr": "127.0.0.1:1"}
    others |= {"maxMessageSize": 4194304, "userPropertyMaxNum": 200, "delayLevelTable": {}}
    config.write_text(json.dumps({**own, **others, "namesrvAddr": "127.0.0.1:1", "bindAddress": "127.0.0.1"}))
    with server(tmp_path, "proxy", "-c", config, "--port", 0) as proxy:
        proxy.wait_ready(r"^ready grpc=127\.0\.0\.1:\d+$", SECONDS_MAX)
        assert proxy.stop(signal.SIGTERM, SECONDS_MAX) == 0
    said = proxy.log.read_text()
    assert f"{config}:1: unknown key namesrvAdr is ignored, did you mean namesrvAddr?" in said
    assert f"{config}: without effect here: proxyName=proxy-a (the name of a proxy is its address)\n" in said
    assert f"{config}: without effect here: userPropertyMaxNum=200 (bounds of messages are Apache's defaults)\n" in said
    assert len(said.splitlines()) == 4, "as many as there is to tell"


def test_certificates_of_apaches_proxy_are_taken_by_its_names(tmp_path):
    config = tmp_path / "rmq-proxy.json"
    told = {"tlsTestModeEnable": False, "tlsKeyPath": "/own.key", "tlsCertPath": "/theirs.crt"}
    told |= {"tlsKeyPassword": "secret", "grpcMaxConcurrentCallsPerConnection": 7}
    config.write_text(json.dumps({**told, "tls.server.certPath": "/own.crt"}))
    done = rmq("proxy", "-c", config, "--port", 0, "--print-config")
    assert done.returncode == 0, done.stderr
    shown = done.stdout
    for line in ("tls.test.mode.enable=false", "tls.server.keyPath=/own.key", "tls.server.certPath=/own.crt"):
        assert f"\n{line}\n" in shown
    assert "\ngrpcMaxConcurrentCallsPerConnection=7\n" in shown
    assert "\n# tls.server.keyPassword is set and not shown\n" in shown


def test_a_broker_without_a_name_server_says_so_and_runs(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "NAMESRV_ADDR"}
    with server(tmp_path, "broker", "--port", 0, "--store", tmp_path / "store", env=env) as broker:
        broker.wait_ready("^ready ", SECONDS_MAX)
        assert broker.stop(signal.SIGTERM, SECONDS_MAX) == 0
    assert "no name server is configured" in broker.log.read_text()


def test_the_vip_port_is_two_below_a_fixed_port(tmp_path):
    port = free_port(-2, 1)
    arguments = ["standalone", "--namesrv-port", 0, "--port", port, "--store", tmp_path / "store"]
    with server(tmp_path, *arguments) as process:
        process.wait_ready(rf"broker=127\.0\.0\.1:{port} ", SECONDS_MAX)
        socket.create_connection(("127.0.0.1", port - 2), SECONDS_MAX).close()
        assert process.stop(signal.SIGTERM, SECONDS_MAX) == 0


@pytest.mark.parametrize("option", ["--port", "--namesrv-port"])
def test_a_port_in_use(tmp_path, option):
    with socket.create_server(("127.0.0.1", 0)) as user:
        port = user.getsockname()[1]
        other = "--namesrv-port" if option == "--port" else "--port"
        line = failed("standalone", option, port, other, 0, "--store", tmp_path / "store")
    assert re.search(
        rf"cannot listen on 127\.0\.0\.1:{port}: in use by [^;]+, pid \d+; stop that program, or choose another port",
        line,
    )
    assert not (tmp_path / "store").exists()


def test_a_configuration_that_cannot_be_read(tmp_path):
    line = failed(*on_free_ports(tmp_path / "store"), "-c", tmp_path / "none.conf", code=2)
    assert line == f"rmq: cannot read configuration {tmp_path}/none.conf: No such file or directory"
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("flushDiskType=SOMETIMES", "flushDiskType=SOMETIMES must be one of ASYNC_FLUSH, SYNC_FLUSH"),
        ("listenPort=eleven", "listenPort=eleven must be a whole number from 0 to 65535"),
        ("brokerRole=OWNER", "brokerRole=OWNER must be one of ASYNC_MASTER, SYNC_MASTER, SLAVE"),
        (
            "enableDLegerCommitLog=true",
            (
                "enableDLegerCommitLog=true is not supported: the controller, DLedger and broker containers are not "
                "built; use enableDLegerCommitLog=false"
            ),
        ),
    ],
)
def test_a_configuration_value_that_cannot_be_used(tmp_path, text, line):
    config = tmp_path / "broker.conf"
    config.write_text(text)
    assert failed(*on_free_ports(tmp_path / "store"), "-c", config, code=2) == f"rmq: {config}:1: {line}"
    assert not (tmp_path / "store").exists()


def test_a_slave_has_an_id_of_its_own(tmp_path):
    config = tmp_path / "broker.conf"
    config.write_text("brokerRole=SLAVE")
    line = failed(*on_free_ports(tmp_path / "store"), "-c", config, code=2)
    assert line == "rmq: brokerRole=SLAVE with brokerId=0, which is the master's: give it brokerId=1 or higher"
    assert not (tmp_path / "store").exists()


def test_unknown_and_useless_configuration_keys_are_reported_and_do_not_matter(tmp_path):
    config = tmp_path / "broker.conf"
    config.write_text(
        "brokerNmae=x\nsendMessageThreadPoolNums=16\nuseEpollNativeSelector=true\nenableCompaction=true\nuseSpinLock=1\n"
    )
    with run_standalone(tmp_path / "store", tmp_path, "-c", str(config)) as standalone:
        standalone.stop()
        log = standalone.process.log.read_text()
    assert "unknown key brokerNmae is ignored, did you mean brokerName?" in log
    assert log.count("without effect here: sendMessageThreadPoolNums=16 (one event loop answers requests, ") == 1
    assert log.count("without effect here: useEpollNativeSelector=true (Netty's sockets and buffers, ") == 1
    assert f"{config}: without effect here: useSpinLock\n" in log
    assert "enableCompaction" not in log  # it is what Apache's broker has, too


def test_a_store_in_use(tmp_path):
    store = tmp_path / "store"
    with run_standalone(store, tmp_path) as standalone:
        before = (store / "abort").read_text()  # who opens a store writes its own process number there
        line = failed(*on_free_ports(store))
        assert line == (
            f"rmq: store {store} is in use by another process: stop that broker or choose another directory"
        )
        assert (store / "abort").read_text() == before
        standalone.stop()


def test_a_store_of_another_segment_size(tmp_path):
    golden = unpack_golden("5.4.0", tmp_path)
    before = files_of(golden.root)
    line = failed(*on_free_ports(golden.root))
    assert str(golden.root / "commitlog/0") in line
    assert "131072" in line
    assert "mappedFileSizeCommitLog" in line
    assert files_of(golden.root) == before


def test_a_segment_file_of_the_wrong_length(tmp_path):
    golden = unpack_golden("5.4.0", tmp_path)
    config = tmp_path / "broker.conf"
    config.write_text(golden.conf)
    segment = golden.root / "commitlog/00000000000000131072"
    os.truncate(segment, 60_000)
    before = files_of(golden.root)
    done = run_failing(*on_free_ports(golden.root), "-c", config)
    line = done.splitlines()[-1]
    assert str(segment) in line
    assert "60000" in line
    assert files_of(golden.root) == before


def test_a_process_that_was_killed_leaves_its_abort_file_and_starts_again(tmp_path):
    store = tmp_path / "store"
    with server(tmp_path, *on_free_ports(store)) as process:
        process.wait_ready("^ready ", SECONDS_MAX)
        process.kill()
    assert (store / "abort").exists()
    with run_standalone(store, tmp_path) as standalone:
        standalone.stop()


def test_help_names_every_command():
    done = rmq("--help")
    assert done.returncode == 0
    assert {"standalone", "broker", "namesrv", "bench"} <= set(re.findall(r"\w+", done.stdout))


@pytest.mark.slow
def test_bench_start_prints_json():
    command = [RMQ, "bench", "start", "--runs", "1", "--brokers", "8", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    rows = {row["ready"]: row for row in json.loads(done.stdout)["figures"]}
    assert set(rows) == {"standalone", "broker", "namesrv", "test broker", "8 of them, 8 at a time"}
    assert all(row["ms_min"] <= row["ms_p50"] <= row["ms_p99"] for row in rows.values())
    assert rows["8 of them, 8 at a time"]["threads_left"] == rows["8 of them, 8 at a time"]["files_left"] == 0
