"""The checks of ``rmq doctor``, which show if a machine is ready for a broker with a certain configuration.

The checks read ``/proc`` and ``/sys`` of Linux, the store and the certificates, and send requests to the name servers.
They change nothing. If the broker's port is free, a check listens on the port for a moment, to see if clients can reach
the port. A value that cannot be read is reported as unknown.

A check is a function of a `Target`. The checks in `CHECKS` are for every machine. The checks in `OF_PRODUCTION` are for
machines that serve other machines. The checks in `OF_EACH_SHARD` are for the ports and the store of one broker. On a
development machine, any broker of rmqkit can use the ports.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ctypes
import enum
import errno
import importlib.util
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from msgspec import Struct

from rmqkit import extras
from rmqkit.admin import Admin
from rmqkit.admin.diagnosis.health import clock_skew_ms
from rmqkit.broker.settings import BrokerSettings
from rmqkit.core import CORE
from rmqkit.errors import RmqError, SettingsError, StoreLocked
from rmqkit.remoting.address import advertised_ip, join_address, split_addresses
from rmqkit.remoting.authentication import AuthenticationSettings, inner_credentials
from rmqkit.remoting.port_users import in_use_by, port_users
from rmqkit.remoting.tls import ClientTls, ClientTlsSettings, ServerTls, ServerTlsSettings
from rmqkit.store.files import StoreLock
from rmqkit.store.retention import used_percent
from rmqkit.store.settings import StoreSettings

_CONNECT_SECONDS = 2.0
_SKEW_WARN_MS, _SKEW_FAIL_MS = 2000, 60_000
_EXPIRES_SOON = timedelta(days=30)
_STA_UNSYNC = 0x40
_FILE_SYSTEMS = {
    **dict.fromkeys(("tmpfs", "ramfs"), "it is memory and forgets every message with the machine: use a disk"),
    "overlay": "it is a container's own layer and goes with the container: mount a volume there",
    **dict.fromkeys(
        ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse", "fuseblk", "ceph", "virtiofs"),
        "mapped files and fdatasync may mean less there than on a local disk: use ext4 or xfs",
    ),
}

_VM: dict[str, tuple[int, int | None, str]] = {
    "max_map_count": (
        262_144,
        None,
        "each file of the log and of the index is a mapping: sysctl -w vm.max_map_count=655360",
    ),
    "overcommit_memory": (0, 1, "2 may refuse memory that is there: sysctl -w vm.overcommit_memory=0"),
    "swappiness": (0, 10, "the page cache should go before the broker's memory: sysctl -w vm.swappiness=1"),
    "dirty_ratio": (0, 50, "so much unwritten data makes long pauses of the disk: sysctl -w vm.dirty_ratio=20"),
    "dirty_background_ratio": (0, 25, "writing begins late and takes long: sysctl -w vm.dirty_background_ratio=10"),
}
"""Name of a kernel setting → lowest value, highest value, and the remedy for other values."""


class State(enum.Enum):
    """The result of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"


class Finding(Struct):
    """The result of a check: the name of the check, the state, the value that was found, and a remedy."""

    check: str
    state: State
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Host:
    """The folders ``/proc`` and ``/sys`` of a machine. Tests use other folders."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")

    def text(self, path: Path) -> str | None:
        """Return the text of a file without white space at both ends, or None if the file cannot be read."""
        try:
            return path.read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None


@dataclass(slots=True)
class Target:
    """The configuration of a broker, and the running process of the broker if there is one."""

    broker: BrokerSettings
    store: StoreSettings
    root: Path
    users: AuthenticationSettings = field(default_factory=AuthenticationSettings)
    server_tls: ServerTlsSettings = field(default_factory=ServerTlsSettings)
    client_tls: ClientTlsSettings = field(default_factory=ClientTlsSettings)
    notes: list[str] = field(default_factory=list)
    machine: Host = field(default_factory=Host)
    is_development: bool = False

    @property
    def is_running(self) -> bool:
        """Return True if a process has locked the store."""
        try:
            StoreLock(self.root).check()
        except (StoreLocked, OSError):
            return True
        return False

    @property
    def pid(self) -> int | None:
        """The process id of the broker that uses the store, or None if it is not known."""
        text = self.machine.text(self.root / "abort") or ""
        return int(text) if self.is_running and text.isdecimal() else None

    @property
    def advertised(self) -> str:
        return self.broker.broker_ip1 or advertised_ip(self.broker.bind_address)

    @property
    def mount(self) -> tuple[str, str] | None:
        """The device number (such as ``8:1``) and the type of the store's file system, or None if not known."""
        best: tuple[int, str, str] | None = None
        for line in (self.machine.text(self.machine.proc / "self/mountinfo") or "").splitlines():
            own, _, rest = line.partition(" - ")
            fields = own.split()
            point = Path(fields[4].encode().decode("unicode_escape"))
            if self.root.is_relative_to(point) and (best is None or len(point.parts) >= best[0]):
                best = (len(point.parts), fields[2], rest.split()[0])
        return None if best is None else best[1:]


def within(check: str, text: str | None, low: int, high: int | None, remedy: str, about: str = "") -> Finding:
    """Check that a number is between ``low`` and ``high``. The result is unknown if the text is not a number."""
    if text is None or not text.isdecimal():
        return Finding(check, State.UNKNOWN, "it cannot be read here")
    is_good = int(text) >= low and (high is None or int(text) <= high)
    return Finding(check, State.OK if is_good else State.WARN, text + about, "" if is_good else remedy)


def configuration(target: Target) -> Iterator[Finding]:
    for note in target.notes:
        yield Finding("configuration", State.WARN, note)
    if not target.notes:
        yield Finding("configuration", State.OK, "every key is known and in its bounds")


def open_files(target: Target) -> Iterator[Finding]:
    """Check the limit of open files of the running broker, or of this shell if no broker is running."""
    pid = target.pid
    limits = target.machine.text(target.machine.proc / str(pid or "self") / "limits") or ""
    match = re.search(r"^Max open files +(\w+)", limits, re.MULTILINE)
    about = f" (of the broker, process {pid})" if pid else " (of this shell; a service has its own)"
    remedy = "connections need one each: set LimitNOFILE=655350 in its unit, or ulimit -n 655350"
    if match and match[1] == "unlimited":
        yield Finding("open files", State.OK, match[1] + about)
    else:
        yield within("open files", match and match[1], 65_536, None, remedy, about)


def disk(target: Target) -> Iterator[Finding]:
    store = target.store
    place = next(path for path in (target.root, *target.root.parents) if path.exists())
    try:
        percent, figures = used_percent(place), os.statvfs(place)
    except OSError as error:
        yield Finding("disk space", State.UNKNOWN, f"{place}: {error.strerror}")
        return
    free = figures.f_bavail * figures.f_frsize
    found, state, remedy = f"{percent} % used, {free / 2**30:.1f} GiB free at {place}", State.OK, ""
    if percent >= store.disk_warning_percent:
        state, remedy = State.FAIL, f"from {store.disk_warning_percent} % on no message is taken: make room"
    elif free < 2 * store.commit_log_file_bytes:
        state, remedy = State.WARN, "less than two files of the log: make room, or lower mappedFileSizeCommitLog"
    elif percent >= store.disk_used_percent_max:
        state, remedy = State.WARN, f"from {store.disk_used_percent_max} % on expired files go at any hour: make room"
    yield Finding("disk space", state, found, remedy)
    if not os.access(place, os.W_OK | os.X_OK):
        yield Finding("store", State.FAIL, f"{place} cannot be written by this user", "give it to the broker's user")


def file_system(target: Target) -> Iterator[Finding]:
    if target.mount is None:
        yield Finding("file system", State.UNKNOWN, "/proc/self/mountinfo does not say")
        return
    kind = target.mount[1]
    remedy = _FILE_SYSTEMS.get(kind.split(".")[0], "")
    yield Finding("file system", State.WARN if remedy else State.OK, kind, remedy)


def block_device(target: Target) -> Iterator[Finding]:
    """Check the scheduler and the read-ahead of the disk under the file system."""
    device = target.mount and target.machine.sys / "dev/block" / target.mount[0]
    if not device or not device.exists():
        yield Finding("block device", State.UNKNOWN, "no block device is known for the file system")
        return
    device = device.resolve()
    queue = (device.parent if (device / "partition").exists() else device) / "queue"
    name, schedulers = queue.parent.name, target.machine.text(queue / "scheduler") or ""
    chosen = re.search(r"\[([\w-]+)\]", schedulers)
    scheduler = chosen[1] if chosen else schedulers or "it cannot be read here"
    is_slow = scheduler in ("bfq", "cfq")
    remedy = f"it is made for desktops: echo mq-deadline > /sys/block/{name}/queue/scheduler" if is_slow else ""
    state = State.WARN if is_slow else State.OK if schedulers else State.UNKNOWN
    yield Finding("scheduler", state, f"{scheduler} ({name})", remedy)
    ahead = target.machine.text(queue / "read_ahead_kb")
    remedy = f"consumers far behind read at many places: echo 128 > /sys/block/{name}/queue/read_ahead_kb"
    yield within("read-ahead", ahead, 16, 1024, remedy, f" KiB ({name})")


def memory(target: Target) -> Iterator[Finding]:
    """Check the ``vm`` settings of the kernel that affect mapped files."""
    for name, (low, high, remedy) in _VM.items():
        text = target.machine.text(target.machine.proc / "sys/vm" / name)
        yield within(f"vm.{name}", text, low, high, remedy)


def clock(target: Target) -> Iterator[Finding]:
    """Check if the kernel reports that its clock is synchronised (``adjtimex``)."""
    status = _clock_status()
    if status is None:
        yield Finding("clock", State.UNKNOWN, "the kernel does not report if the clock is synchronised")
    elif status & _STA_UNSYNC:
        remedy = "delays, timers and time stamps follow it: run chrony or systemd-timesyncd"
        yield Finding("clock", State.WARN, "not synchronised", remedy)
    else:
        yield Finding("clock", State.OK, "synchronised")


def _clock_status() -> int | None:
    """Return the kernel's clock status word, or None if the system has no ``adjtimex``."""
    try:
        timex = ctypes.create_string_buffer(512)  # modes 0: read only
        failed = ctypes.CDLL(None, use_errno=True).adjtimex(timex) < 0
    except (OSError, AttributeError):
        return None
    # struct timex: modes; offset, freq, maxerror, esterror as longs; status
    return None if failed else ctypes.c_int.from_buffer(timex, 5 * ctypes.sizeof(ctypes.c_long)).value


def ports(target: Target) -> Iterator[Finding]:
    settings = target.broker
    first = settings.listen_port
    if not first:
        yield Finding("ports", State.OK, "picked at the start (listenPort=0)")
        return
    wanted = {"listenPort": first, "VIP": first - 2, "haListenPort": settings.ha_listen_port or first + 1}
    for name, port in wanted.items():
        check, error = f"port {port} ({name})", _bind_error(settings.bind_address, port)
        users = port_users(port, target.machine.proc)
        if error is None:
            yield Finding(check, State.OK, "free")
        elif error.errno != errno.EADDRINUSE:
            yield Finding(check, State.FAIL, f"{settings.bind_address}: {error.strerror}", "change bindAddress")
        elif users and all(one.pid == target.pid or (target.is_development and one.is_broker) for one in users):
            yield Finding(check, State.OK, f"in use by the rmq broker, pid {users[0].pid}")
        else:
            used = in_use_by(port, target.machine.proc)
            yield Finding(check, State.FAIL, used, "stop it, or choose another listenPort")


def _bind_error(host: str, port: int) -> OSError | None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            return error
    return None


def advertised(target: Target) -> Iterator[Finding]:
    """Check if this machine can connect to the address that the broker advertises to clients."""
    host, settings = target.advertised, target.broker
    if not settings.listen_port:
        yield Finding("advertised address", State.UNKNOWN, f"{host}, with a port that is picked at the start")
        return
    where, remedy = join_address(host, settings.listen_port), "set brokerIP1 to an address that clients reach"
    if host in ("0.0.0.0", "::"):
        yield Finding("advertised address", State.FAIL, f"{where} is no address of anything", remedy)
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # another process may already listen on the port
            family = socket.AF_INET6 if ":" in settings.bind_address else socket.AF_INET
            own = (settings.bind_address, settings.listen_port)
            stack.enter_context(socket.create_server(own, family=family))
        try:
            socket.create_connection((host, settings.listen_port), _CONNECT_SECONDS).close()
        except OSError as error:
            reason = f"{where} cannot be reached from here: {error.strerror or error}"
            yield Finding("advertised address", State.FAIL, reason, f"{remedy}; a firewall or NAT may be between")
            return
    if (host.startswith("127.") or host == "::1") and not target.is_development:
        yield Finding("advertised address", State.WARN, f"{where} is this machine only", f"for others {remedy}")
    else:
        yield Finding("advertised address", State.OK, f"{where} can be reached from here")


def name_servers(target: Target) -> Iterator[Finding]:
    """Check every name server, and the clocks of the brokers that the name servers know."""
    if not target.broker.namesrv_addr and target.is_development:
        yield Finding("name servers", State.OK, "none, and none is needed by: rmq standalone")
        return
    if not target.broker.namesrv_addr:
        yield Finding("name servers", State.WARN, "none", "clients find the broker by them: set namesrvAddr or -n")
        return
    try:
        addresses = split_addresses(target.broker.namesrv_addr)
    except ValueError as error:
        yield Finding("name servers", State.FAIL, str(error), "correct namesrvAddr")
        return
    yield from asyncio.run(_ask(target, addresses))


async def _ask(target: Target, addresses: list[str]) -> list[Finding]:
    findings, clocks = [], {}
    settings = target.client_tls
    for address in addresses:
        check = f"name server {address}"
        try:
            tls = None if settings.tls is None else ClientTls(settings.tls)
            credentials = inner_credentials(target.users.inner_credentials)
            async with Admin(address, timeout_ms=1000 * _CONNECT_SECONDS, tls=tls, credentials=credentials) as admin:
                cluster = await admin.calls.cluster()
                findings.append(Finding(check, State.OK, f"answers, knows {len(cluster.broker_addr_table)} brokers"))
                for broker in (
                    one for group in cluster.broker_addr_table.values() for one in group.broker_addrs.values()
                ):
                    if broker not in clocks:
                        clocks[broker] = await clock_of(admin, broker)
        except RmqError as error:
            findings.append(Finding(check, State.FAIL, str(error), "start it, or correct namesrvAddr"))
    return [*findings, *clocks.values()]


async def clock_of(admin: Admin, broker: str) -> Finding:
    """Check the clock of a broker. The difference is calculated from the broker's start time and run time, to the
    second."""
    check = f"clock of {broker}"
    try:
        asked_ms = time.time() * 1000
        (table,) = (await admin.brokers.status(broker)).values()
        skew_ms = clock_skew_ms(table, (asked_ms + time.time() * 1000) / 2)
    except RmqError as error:
        return Finding(check, State.UNKNOWN, f"it does not report its figures: {error}")
    if skew_ms is None:
        return Finding(check, State.UNKNOWN, "it does not report when it started")
    state = State.OK if abs(skew_ms) < _SKEW_WARN_MS else State.WARN if abs(skew_ms) < _SKEW_FAIL_MS else State.FAIL
    remedy = "" if state is State.OK else "delays and look-ups by time go wrong: run chrony on both machines"
    return Finding(check, state, f"{round(skew_ms / 1000):+d} s from this one's", remedy)


def certificates(target: Target) -> Iterator[Finding]:
    server, client = target.server_tls, target.client_tls
    for name in (server.certificate, server.trusted, client.tls_certificate, client.tls_trusted):
        if name:
            yield _certificate(Path(name))
    try:
        ServerTls(server)
        if client.tls is not None:
            ClientTls(client.tls)
    except SettingsError as error:
        yield Finding("TLS", State.FAIL, str(error), "correct the files that tls.* names")


def _certificate(path: Path) -> Finding:
    try:
        until = validity(path.read_text())
    except (OSError, UnicodeDecodeError, ValueError) as error:
        return Finding("certificate", State.FAIL, f"{path}: {error}", "give a PEM file that this user may read")
    left = until - datetime.now(UTC)
    state = State.FAIL if left <= timedelta(0) else State.WARN if left < _EXPIRES_SOON else State.OK
    remedy = "" if state is State.OK else "replace it; the running broker loads the new file"
    return Finding("certificate", state, f"{path} is valid until {until:%Y-%m-%d %H:%M} UTC", remedy)


def validity(pem: str) -> datetime:
    """Return the time until which all certificates of a PEM text are valid.
    Raises ValueError: there is no certificate, or a certificate cannot be read."""
    blocks = re.findall("-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", pem, re.DOTALL)
    if not blocks:
        raise ValueError("no certificate in it")
    return min(map(_not_after, blocks))


def _not_after(block: str) -> datetime:
    """Return the end of a certificate's validity: the second time in the first sequence of two times in
    tbsCertificate."""
    try:
        (_, certificate), *_ = _der(base64.b64decode(block))
        (_, signed), *_ = _der(certificate)
        for tag, content in _der(signed):
            parts = list(_der(content)) if tag == 0x30 else []
            if len(parts) == 2 and all(kind in (0x17, 0x18) for kind, _ in parts):
                kind, text = parts[1]
                form = "%y%m%d%H%M%SZ" if kind == 0x17 else "%Y%m%d%H%M%SZ"
                return datetime.strptime(text.decode(), form).replace(tzinfo=UTC)
    except (IndexError, ValueError):
        pass
    raise ValueError("a certificate in it cannot be read")


def _der(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the tag and content of each value in a sequence of DER values."""
    at = 0
    while at < len(data):
        tag, length, at = data[at], data[at + 1], at + 2
        if length & 0x80:
            count = length & 0x7F
            length, at = int.from_bytes(data[at : at + count]), at + count
        yield tag, data[at : at + length]
        at += length


def leftovers(target: Target) -> Iterator[Finding]:
    """Check the files ``lock`` and ``abort`` in the store. Brokers of Java and of rmqkit lock ``lock`` while they run,
    and delete ``abort`` when they stop cleanly."""
    abort = target.root / "abort"
    if target.is_running:
        by = f"process {target.pid}" if target.pid else "a process"
        yield Finding("store", State.OK, f"{target.root} is in use by {by}: a broker runs on it")
    elif abort.exists():
        remedy = "nothing to do: the next start recovers it; do not delete the file"
        yield Finding(
            "store", State.WARN, f"{abort} exists and no broker runs: the last one was not stopped cleanly", remedy
        )
    else:
        yield Finding("store", State.OK, f"{target.root} {'was stopped cleanly' if target.root.exists() else 'is new'}")


def sends(target: Target) -> Iterator[Finding]:
    """Check if the compiled core reads plain sends, which doubles the messages per CPU second."""
    fault = CORE.fault
    if not fault:
        yield Finding("sends", State.OK, "read by the compiled core")
    elif "format" in fault:
        yield Finding("sends", State.WARN, "read in plain Python", fault)
    else:
        yield Finding("sends", State.OK, f"read in plain Python: {fault}")


def grpc(target: Target) -> Iterator[Finding]:
    """Check if the port for 5.x SDKs can be opened."""
    port = target.broker.grpc_port
    if importlib.util.find_spec("hpack") is not None:
        yield Finding("grpc", State.OK, "installed" if port < 0 else f"installed, grpcServerPort={port}")
    elif port < 0:
        yield Finding("grpc", State.OK, "not installed: SDKs of 5.x do not connect")
    else:
        yield Finding(
            "grpc", State.FAIL, f"grpcServerPort={port}, not installed", f"{extras.install('grpc')}, or set -1"
        )


Check = Callable[[Target], Iterator[Finding]]
CHECKS: tuple[Check, ...] = (configuration, disk, name_servers, certificates, sends, grpc)
OF_PRODUCTION: tuple[Check, ...] = (open_files, file_system, block_device, memory, clock)
"""The checks for machines that serve other machines. A development machine does not need these checks."""
OF_EACH_SHARD: tuple[Check, ...] = (leftovers, ports, advertised)
