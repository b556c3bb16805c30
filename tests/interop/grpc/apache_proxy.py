"""Apache's proxy in local mode: a broker and the gRPC endpoint in one Java process, with a name server of its own."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.interop.apache import (
    BROKER_CONF,
    BROKER_HEAP_MB,
    CLUSTER,
    HOST,
    READY_SECONDS,
    register_now,
    run_apache_name_server,
)
from tests.interop.grpc.scene import BROKER, Place
from tests.interop.kit import LOGGING_OFF, ApacheKit, Unavailable, cache_folder, fetch_jars, find_java
from tests.interop.server_process import ServerProcess, wait_until
from tests.ports import free_port

PROXY_POM = Path(__file__).with_name("pom.xml")
# Recall and priority are off, as Apache ships it. Transaction checks are frequent enough for a test.
PROXY_BROKER_CONF = {
    **BROKER_CONF,
    "brokerName": BROKER,
    "recallMessageEnable": "true",
    "enableMixedMessageType": "true",
    "mappedFileSizeCommitLog": 64 << 20,  # bodies of 4 MiB
}


def prepare_proxy(version: str) -> ApacheKit:
    """Return Java and the proxy's jars, fetched on first use. Raises Unavailable."""
    java = find_java()
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    lib = cache / f"proxy-{version}"
    if not lib.is_dir():
        fetch_jars(version, lib, PROXY_POM)
    if not any(lib.glob("rocketmq-proxy-*.jar")):
        raise Unavailable(f"no rocketmq-proxy jar in {lib}")
    return ApacheKit(version=version, java=java, lib=lib, classes=lib)


@contextmanager
def run_apache_proxy(kit: ApacheKit, work_dir: Path) -> Iterator[tuple[ServerProcess, Place]]:
    """Run a proxy until its broker is registered. Both Java processes are killed by their ids at the end."""
    with run_apache_name_server(kit, work_dir) as (_, namesrv_addr):
        broker, ha, grpc, remoting = free_port(-2), free_port(), free_port(), free_port()
        store = work_dir / "store"
        conf = {
            **PROXY_BROKER_CONF,
            "listenPort": broker,
            "bindAddress": HOST,
            "haListenPort": ha,
            "brokerIP1": HOST,
            "namesrvAddr": namesrv_addr,
            "storePathRootDir": store,
            "storePathCommitLog": store / "commitlog",
        }
        broker_conf = work_dir / "broker.conf"
        broker_conf.write_text("".join(f"{key}={value}\n" for key, value in conf.items()))
        proxy_conf = work_dir / "rmq-proxy.json"
        proxy_conf.write_text(
            json.dumps(
                {
                    "rocketMQClusterName": CLUSTER,
                    "proxyName": "proxy-a",
                    "namesrvAddr": namesrv_addr,
                    "grpcServerPort": grpc,
                    "remotingListenPort": remoting,
                    "localServeAddr": HOST,
                }
            )
        )
        home = work_dir / "home"
        for name in ("proxy", "broker"):
            (home / "conf").mkdir(parents=True, exist_ok=True)
            (home / "conf" / f"rmq.{name}.logback.xml").write_text(LOGGING_OFF)
        arguments = ["-pm", "local", "-pc", proxy_conf, "-bc", broker_conf, "-n", namesrv_addr]
        command = proxy_command(kit, arguments, work_dir)
        env = {**os.environ, "ROCKETMQ_HOME": str(home), "RMQ_PROXY_HOME": str(home)}
        with ServerProcess(command, work_dir / "proxy.log", env) as process:
            process.wait_ready("rocketmq-proxy startup successfully", READY_SECONDS)
            place = Place("apache", f"{HOST}:{grpc}", namesrv_addr, f"{HOST}:{broker}")
            wait_until(lambda: listens(grpc), READY_SECONDS, f"listening at {place.grpc_addr}")
            register_now(namesrv_addr, place.broker_addr)
            yield process, place


@contextmanager
def run_apache_cluster_proxy(
    kit: ApacheKit, work_dir: Path, namesrv_addr: str, conf: Mapping[str, object]
) -> Iterator[tuple[ServerProcess, str]]:
    """Run Apache's proxy in front of the brokers of a name server. Yield its process and address. Killed at the end."""
    grpc, remoting = free_port(), free_port()
    proxy_conf = work_dir / "rmq-proxy.json"
    own = {
        "rocketMQClusterName": CLUSTER,
        "proxyName": "proxy-a",
        "namesrvAddr": namesrv_addr,
        "grpcServerPort": grpc,
        "remotingListenPort": remoting,
        "localServeAddr": HOST,
    }
    proxy_conf.write_text(json.dumps({**own, **conf}))
    (work_dir / "conf").mkdir()
    (work_dir / "conf/rmq.proxy.logback.xml").write_text(LOGGING_OFF)
    arguments = ["-pm", "cluster", "-pc", proxy_conf, "-n", namesrv_addr]
    command = proxy_command(kit, arguments, work_dir)
    env = {**os.environ, "ROCKETMQ_HOME": str(work_dir), "RMQ_PROXY_HOME": str(work_dir)}
    with ServerProcess(command, work_dir / "proxy.log", env) as process:
        process.wait_ready("rocketmq-proxy startup successfully", READY_SECONDS)
        wait_until(lambda: listens(grpc), READY_SECONDS, f"listening at {HOST}:{grpc}")
        yield process, f"{HOST}:{grpc}"


def proxy_command(kit: ApacheKit, arguments: Sequence[object], work_dir: Path) -> list[str]:
    """Return the command that starts a proxy with TLS. Without TLS the gRPC port refuses Java's SDK, which always uses
    it.
    """
    main = "org.apache.rocketmq.proxy.ProxyStartup"
    return kit.jvm(main, arguments, heap_mb=BROKER_HEAP_MB, work_dir=work_dir)


def listens(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True
