"""Real Apache RocketMQ servers on free loopback ports, over any store directory."""

import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, FrameSplitter, decode_command, encode_command
from rmqkit.protocol.schemas.topics import KVTable
from rmqkit.remoting.authentication import Credentials
from tests.interop.kit import LOGGING_OFF, ApacheKit
from tests.interop.server_process import ServerProcess, wait_until
from tests.ports import free_ports

HOST = "127.0.0.1"
CLUSTER = "InteropCluster"
BROKER_NAME = "broker-interop"

NAME_SERVER_HEAP_MB = 128
BROKER_HEAP_MB = 700
READY_SECONDS = 150
# A broker stops one service thread after the other: 11 to 18 s were measured.
BROKER_STOP_SECONDS = 150

WITH_TLS, WITHOUT_TLS = ("-Dtls.server.mode=permissive",), ("-Dtls.server.mode=disabled",)
"""By default a server accepts TLS, and generates two RSA keys for it: 2 of the 3 s of CPU time of a start."""

# Undecided transactions are checked every two seconds and given up soon, so that tests see the end of them, but late
# enough for the answers of producers on a busy machine.
TRANSACTION_CONF: Mapping[str, object] = {
    "transactionTimeOut": 2000,
    "transactionCheckInterval": 2000,
    "transactionCheckMax": 6,
    "transactionOpBatchInterval": 500,
}

# Short intervals of the broker for tests, and no refusal of sends that waited long on a busy machine.
QUICK_CONF: Mapping[str, object] = {
    "waitTimeMillsInSendQueue": 60_000,
    "messageDelayLevel": "1s 2s 2s 3s 3s 4s 4s 4s 4s 4s 4s 4s 4s 4s 4s 4s 4s 4s",
    **TRANSACTION_CONF,
}

# Small files, so that a test's store has several files and stays small. Everything else is as Apache ships it, except
# three threads that would use up the cores. One compares the 37 MB of the timer wheel byte by byte: once a second, this
# takes a quarter of a core. The second spins for 10 s after the start, until it first writes the metrics of
# transactions (`TransactionMetricsFlushService`): this takes a whole core. In 5.5.0 the third spins for ever when its
# newest op message is older than the interval (`TransactionalOpBatchService`); so op messages are written at once.
BROKER_CONF: Mapping[str, object] = {
    "brokerClusterName": CLUSTER,
    "brokerName": BROKER_NAME,
    "brokerId": 0,
    "brokerRole": "ASYNC_MASTER",
    "flushDiskType": "ASYNC_FLUSH",
    "autoCreateTopicEnable": "true",
    "autoCreateSubscriptionGroup": "true",
    "enablePropertyFilter": "true",
    "mappedFileSizeCommitLog": 1 << 20,
    "mappedFileSizeConsumeQueue": 6000,
    "maxHashSlotNum": 1000,
    "maxIndexNum": 4000,
    "diskMaxUsedSpaceRatio": 95,
    "timerFlushIntervalMs": 60_000,
    "transactionMetricFlushInterval": 200,
    **QUICK_CONF,
    "transactionOpBatchInterval": 3_600_000,
    "transactionOpMsgMaxSize": 1,
    # Requests that wait long for a thread on a busy machine are still executed. One-way requests, such as the end of a
    # transaction, would otherwise be lost after 3 s.
    **{f"waitTimeMillsIn{kind}Queue": 60_000 for kind in ("Pull", "LitePull", "Transaction", "Ack", "AdminBroker")},
    "osPageCacheBusyTimeOutMills": 60_000,
}


@dataclass(frozen=True, slots=True)
class ApachePair:
    """A running name server and the broker that registers with it."""

    kit: ApacheKit
    name_server: ServerProcess
    broker: ServerProcess
    namesrv_addr: str
    broker_addr: str
    store_dir: Path

    def stop_broker(self) -> None:
        """Stop the broker cleanly: it flushes, writes its configuration files and removes `abort`. This takes 11 to 18
        s.
        """
        exit_code = self.broker.stop(signal.SIGTERM, BROKER_STOP_SECONDS)
        # The JVM exits with 128 + 15 after its shutdown hooks ran.
        assert exit_code in (0, 128 + signal.SIGTERM), f"broker ended with {exit_code}; {self.broker.log_tail()}"

    def kill_broker(self) -> None:
        self.broker.kill()


@contextmanager
def open_store_with_apache(
    kit: ApacheKit,
    store_dir: Path,
    work_dir: Path,
    conf: Mapping[str, object] | None = None,
    *,
    jvm_options: Sequence[str] = (),
    credentials: Credentials | None = None,
) -> Iterator[ApachePair]:
    """Run a real name server and a real broker on any store directory, also an empty or missing one.

    Args:
        kit: what `prepare` returned.
        store_dir: becomes `storePathRootDir`. The broker writes to it: pass a copy of a store that must not change.
        work_dir: an existing folder for configuration, logs and the rest; not the store.
        conf: added to `BROKER_CONF`. The file sizes must be those that the store was written with.
        jvm_options: of both Java programs; `WITH_TLS` for a test that wants it.
        credentials: a user who may change the broker, if the broker requires signed requests.

    Both are killed at the end. Call `stop_broker` before, if the store must be clean.
    """
    # One after the other: the broker's own registration needs a listening name server.
    with (
        run_apache_name_server(kit, work_dir, jvm_options) as (name_server, namesrv_addr),
        run_apache_broker(
            kit, store_dir, work_dir, namesrv_addr, conf, jvm_options=jvm_options, credentials=credentials
        ) as (broker, broker_addr),
    ):
        yield ApachePair(
            kit=kit,
            name_server=name_server,
            broker=broker,
            namesrv_addr=namesrv_addr,
            broker_addr=broker_addr,
            store_dir=store_dir,
        )


@contextmanager
def run_apache_name_server(
    kit: ApacheKit, work_dir: Path, jvm_options: Sequence[str] = ()
) -> Iterator[tuple[ServerProcess, str]]:
    """Run a real name server. Yield its process and address."""
    port = free_ports()[0]
    conf = {"listenPort": port, "bindAddress": HOST}
    main = "org.apache.rocketmq.namesrv.NamesrvStartup"
    with start_apache(kit, "namesrv", main, conf, NAME_SERVER_HEAP_MB, work_dir, jvm_options) as process:
        process.wait_ready("boot success", READY_SECONDS)
        yield process, f"{HOST}:{port}"


@contextmanager
def run_apache_broker(
    kit: ApacheKit,
    store_dir: Path,
    work_dir: Path,
    namesrv_addr: str,
    conf: Mapping[str, object] | None = None,
    *,
    jvm_options: Sequence[str] = (),
    credentials: Credentials | None = None,
) -> Iterator[tuple[ServerProcess, str]]:
    """Run a real broker that registers with a name server of any maker. Yield its process and address."""
    _, port, ha_port = free_ports()
    broker_conf = {
        **BROKER_CONF,
        "listenPort": port,
        "bindAddress": HOST,
        "haListenPort": ha_port,
        "brokerIP1": HOST,
        "namesrvAddr": namesrv_addr,
        "storePathRootDir": store_dir,
        "storePathCommitLog": store_dir / "commitlog",
        **(conf or {}),
    }
    main = "org.apache.rocketmq.broker.BrokerStartup"
    with start_apache(kit, "broker", main, broker_conf, BROKER_HEAP_MB, work_dir, jvm_options) as process:
        process.wait_ready("boot success", READY_SECONDS)
        address = f"{HOST}:{broker_conf['listenPort']}"
        register_now(namesrv_addr, address, credentials)
        yield process, address


def start_apache(
    kit: ApacheKit,
    name: str,
    main: str,
    conf: Mapping[str, object],
    heap_mb: int,
    work_dir: Path,
    jvm_options: Sequence[str] = (),
) -> ServerProcess:
    """Start one of Apache's servers. All its files but the store are below `work_dir`."""
    home = work_dir / "home"
    (home / "conf").mkdir(parents=True, exist_ok=True)
    (home / "conf" / f"logback_{name}.xml").write_text(LOGGING_OFF)  # 4.x does not start without this file
    conf_file = work_dir / f"{name}.conf"
    conf_file.write_text("".join(f"{key}={value}\n" for key, value in conf.items()))
    java, *rest = kit.jvm(main, ["-c", conf_file], heap_mb=heap_mb, work_dir=work_dir)
    options = [*(WITHOUT_TLS if kit.is_short_lived else ()), *jvm_options]  # the last of two equal options is used
    return ServerProcess([java, *options, *rest], work_dir / f"{name}.log", {**os.environ, "ROCKETMQ_HOME": str(home)})


def register_now(namesrv_addr: str, broker_addr: str, credentials: Credentials | None = None) -> None:
    """Register the broker with the name servers at once.

    A 5.x broker registers at its start, but its connection to the name server is not ready and nothing is sent. It
    registers again after ten seconds. A change of `brokerPermission` (here to its present value) registers the broker
    completely.
    """
    update_config = Command(RequestCode.UPDATE_BROKER_CONFIG, body=b"brokerPermission=6")

    def is_registered() -> bool:
        if all(is_member(address, broker_addr) for address in namesrv_addr.split(";")):
            return True
        if credentials is not None:
            credentials.sign(update_config)
        updated = ask(broker_addr, update_config)
        assert updated.code == ResponseCode.SUCCESS, f"{broker_addr} answered {updated.code}: {updated.remark}"
        return False

    wait_until(is_registered, READY_SECONDS, f"registration of {broker_addr} at {namesrv_addr}")


def is_member(namesrv_addr: str, broker_addr: str) -> bool:
    """Return True if a name server knows a broker."""
    members = ask(namesrv_addr, Command(RequestCode.GET_BROKER_CLUSTER_INFO))
    return f'"{broker_addr}"'.encode() in members.payload


def log_end(broker_addr: str) -> int:
    """Return the end offset of a broker's log. In its first second Apache's broker cannot answer, before it has sampled
    rates.
    """
    told: list[Command] = []

    def is_told() -> bool:
        told.append(ask(broker_addr, Command(RequestCode.GET_BROKER_RUNTIME_INFO)))
        return told[-1].code == ResponseCode.SUCCESS

    wait_until(is_told, READY_SECONDS, f"runtime information from {broker_addr}")
    return int(msgspec.json.decode(told[-1].payload, type=KVTable).table["commitLogMaxOffset"])


def ask(address: str, command: Command) -> Command:
    """Send one request over a new connection, and return the response."""
    host, _, port = address.rpartition(":")
    splitter = FrameSplitter()
    with socket.create_connection((host, int(port)), timeout=READY_SECONDS) as connection:
        connection.sendall(b"".join(encode_command(command)))
        while chunk := connection.recv(65536):
            for frame in splitter.feed(chunk):
                return decode_command(frame)
    raise ConnectionError(f"{address} closed the connection without an answer to request {command.code}")
