"""``rmq standalone``, ``rmq broker``, ``rmq namesrv``: read the settings (`rmqkit.cli.servers.sources`), print one line
when ready, reload on SIGHUP, stop cleanly on SIGTERM."""

from __future__ import annotations

import asyncio
import errno
import gc
import importlib.util
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import typer

from rmqkit import extras
from rmqkit.broker.settings import STANDALONE
from rmqkit.cli import with_options
from rmqkit.cli.servers.logging_setup import LoggingSettings
from rmqkit.cli.servers.sources import BROKER, COMMON, NAMESRV, NameServers, Running, StoreFolder, store_root
from rmqkit.errors import ExtraMissing
from rmqkit.remoting.port_users import in_use_by
from rmqkit.remoting.tls import ClientTls, ClientTlsSettings, ServerTls, ServerTlsSettings
from rmqkit.settings import Given


class _Server(Protocol):
    async def start(self) -> None: ...
    async def stop(self) -> None: ...


S = TypeVar("S", bound=_Server)


app = typer.Typer()
_log = logging.getLogger(__name__)

_Host = Annotated[str | None, typer.Option(help="Address to listen on. (default: 0.0.0.0)")]
_BrokerPort = Annotated[
    int | None, typer.Option(min=0, max=65535, help="Port of the broker; 0 means any free port. (default: 10911)")
]

_Shards = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=100,
        metavar="N",
        help="Run N broker processes NAME-0, NAME-1, … with ports 10 apart and stores STORE/shard-0, … "
        "(default: one broker, no shards)",
        show_default=False,
    ),
]


@app.command()
@with_options(COMMON)
def standalone(
    namesrv_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the name server; 0 means any free port.")
    ] = 9876,
    port: _BrokerPort = None,
    store: StoreFolder = None,
    host: Annotated[str, typer.Option(help="Address to listen on; clients connect to it.")] = "127.0.0.1",
    console: Annotated[
        bool, typer.Option("--console", help="Serve the web console too, in a process of its own.")
    ] = False,
    console_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the web console; 0 means any free port.")
    ] = 9875,
    **common: Any,
) -> None:
    """Run a name server and a broker in one process, for development and tests."""
    console_process = ConsoleProcess(console_port) if console else None
    own = {"listenPort": Given(str(namesrv_port), "command line"), "bindAddress": Given(host, "command line")}
    usual = {key: Given(value, "rmq standalone") for key, value in STANDALONE.items()}
    running = Running.of(
        {NAMESRV[:1]: own, BROKER: {}},
        defaults=lambda given: usual | _grpc_default(given),
        bindAddress=host,
        listenPort=port,
        storePathRootDir=store,
        **common,
    )
    from rmqkit.standalone import Standalone

    namesrv, both = running.configurations
    broker_settings, store_settings, users, _, _, *tls = both.settings
    root, sides = _unsharded(store_root(store_settings)), _tls(*tls)
    settings: dict[str, Any] = {"namesrv": namesrv.settings[0], "broker": broker_settings, "store": store_settings}

    def ready(both: Standalone) -> str:
        if console_process is not None:
            console_process.start(both.namesrv_address)
        return (
            f"ready namesrv={both.namesrv_address} broker={both.broker_address}"
            f"{_grpc(both.broker.grpc_address)}{_metrics(*both.metrics_addresses)} store={root}"
        )

    make = {"authentication": users, "configurations": (namesrv, both), **sides}
    try:
        _run(lambda: Standalone(root, **settings, **make), ready, running.reload)
    finally:
        if console_process is not None:
            console_process.stop()


class ConsoleProcess:
    """``rmq console`` as a child process, so that rendering does not block the broker's loop. The child prints its own
    ready line, and stops when its pipe closes, also if this process is killed.
    Raises ExtraMissing: the extra ``console`` is not installed."""

    def __init__(self, port: int) -> None:
        if importlib.util.find_spec("starlette") is None:
            raise ExtraMissing("--console", "starlette", extras.install("console"))
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, name_servers: str) -> None:
        """Start the console for a running cluster."""
        command = [sys.executable, "-m", "rmqkit", "console", "-n", name_servers, "--port", str(self._port)]
        self._process = subprocess.Popen([*command, "--ends-with-stdin"], stdin=subprocess.PIPE)

    def stop(self) -> None:
        """Stop the console and wait for its exit."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()


@app.command()
@with_options(COMMON)
def broker(
    name_servers: NameServers = None,
    port: _BrokerPort = None,
    store: StoreFolder = None,
    host: _Host = None,
    shards: _Shards = None,
    ends_with_stdin: Annotated[bool, typer.Option(hidden=True)] = False,
    **common: Any,
) -> None:
    """Run a broker; or, with a verb as in rmq broker status, inspect and change running brokers.

    With --shards, run several brokers on this machine to use more of its cores."""
    common |= {"bindAddress": host, "listenPort": port, "namesrvAddr": name_servers, "storePathRootDir": store}
    if shards is not None:
        _run_shards(shards, common)
        return
    running = Running.of({BROKER: {}}, defaults=_grpc_default, **common)
    from rmqkit.broker.server import Broker

    (everything,) = running.configurations
    broker_settings, store_settings, users, _, _, *tls = everything.settings
    root, sides = _unsharded(store_root(store_settings)), _tls(*tls)
    make = {"authentication": users, "configuration": everything, **sides}
    _run(
        lambda: Broker(broker_settings, store_settings, root, **make),
        lambda server: (
            f"ready broker={server.address}{_grpc(server.grpc_address)}{_metrics(server.metrics_address)} store={root}"
        ),
        running.reload,
        ends_with_stdin=ends_with_stdin,
    )


def _run_shards(count: int, common: dict[str, Any]) -> None:
    from rmqkit.cli.servers.shards import Shards

    shards = Shards.of(count, **common)
    _run(
        lambda: shards,
        lambda _: f"ready broker={','.join(shards.addresses)}{_metrics(*shards.metrics_addresses)} store={shards.root}",
        shards.reload,
    )


@app.command()
@with_options(COMMON)
def namesrv(
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on; 0 means any free port. (default: 9876)")
    ] = None,
    host: _Host = None,
    **common: Any,
) -> None:
    """Run a name server; or, with a verb as in rmq namesrv settings, inspect and change running name servers."""
    running = Running.of({NAMESRV: {}}, bindAddress=host, listenPort=port, **common)
    from rmqkit.namesrv.server import NameServer

    (everything,) = running.configurations
    settings, users, _, *tls = everything.settings
    sides = _tls(*tls)
    _run(
        lambda: NameServer(settings, authentication=users, configuration=everything, **sides),
        lambda server: f"ready namesrv={server.address}{_metrics(server.metrics_address)}",
        running.reload,
    )


@app.command()
@with_options(COMMON)
def proxy(
    name_servers: NameServers = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on; 0 means any free port. (default: 8081)")
    ] = None,
    host: _Host = None,
    **common: Any,
) -> None:
    """Run a proxy in front of a cluster: a gRPC endpoint for the RocketMQ 5.x SDKs, and a remoting port."""
    with extras.needed("grpc", "rmq proxy"):
        from rmqkit.proxy.remote.users import ProxyUserSettings
        from rmqkit.proxy.server.server import Proxy, ProxySettings
        from rmqkit.proxy.server.unused_settings import RENAMED, UNUSED, UnusedSettings
    types = (ProxySettings, ProxyUserSettings, UnusedSettings, LoggingSettings, ServerTlsSettings, ClientTlsSettings)
    running = Running.of(
        {types: {}},
        without_effect=frozenset(),
        unused=UNUSED,
        renamed=RENAMED,
        defaults=_remoting_default,
        bindAddress=host,
        grpcServerPort=port,
        namesrvAddr=name_servers,
        **common,
    )
    (everything,) = running.configurations
    settings, users, _, _, *tls = everything.settings
    sides = _tls(*tls)
    _run(
        lambda: Proxy(settings, users, **sides),
        lambda server: (
            f"ready grpc={server.address}{_remoting(server.remoting_address)}{_metrics(server.metrics_address)}"
        ),
        running.reload,
    )


def _tls(server: ServerTlsSettings, client: ClientTlsSettings) -> dict[str, Any]:
    """Return the TLS of listening ports and of connections to name servers."""
    return {"tls": ServerTls(server), "client_tls": None if client.tls is None else ClientTls(client.tls)}


def _unsharded(root: Path) -> Path:
    """Return the directory. Raises StoreMismatch: the directory has shards, which a single broker would not serve."""
    from rmqkit.cli.servers.shards import check_layout

    check_layout(root, None)
    return root


_GRPC_PORT = 8081


def _grpc_default(given: Mapping[str, Given]) -> dict[str, Given]:
    """Return the default port for 5.x SDKs, if no port is set. There is no default if the broker uses free ports or is
    a slave, if the extra is not installed, or if the port is in use, for example by a second broker."""
    texts = {key: one.text for key, one in given.items()}
    if "grpcServerPort" in texts or texts.get("listenPort") == "0" or texts.get("brokerRole") == "SLAVE":
        return {}
    host = texts.get("bindAddress") or "0.0.0.0"
    if importlib.util.find_spec("hpack") is None:
        _log.info("no gRPC port for the 5.x SDKs: %s", extras.install("grpc"))
        return {}
    try:
        with socket.create_server((host, _GRPC_PORT), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return {"grpcServerPort": Given(str(_GRPC_PORT), "rmq")}
    except OSError as error:
        cause = in_use_by(_GRPC_PORT) if error.errno == errno.EADDRINUSE else error.strerror
        _log.warning("no gRPC port for the 5.x SDKs: %s:%d: %s; set grpcServerPort", host, _GRPC_PORT, cause)
        return {}


def _remoting_default(given: Mapping[str, Given]) -> dict[str, Given]:
    """Return a free remoting port as default for a proxy whose gRPC port is any free port."""
    takes_any = "grpcServerPort" in given and given["grpcServerPort"].text == "0"
    return {"remotingListenPort": Given("0", "rmq")} if takes_any and "remotingListenPort" not in given else {}


def _remoting(address: str) -> str:
    """Return the part of the ready line with the port for remoting clients, if it is open."""
    return f" remoting={address}" if address else ""


def _grpc(address: str) -> str:
    """Return the part of the ready line with the port for 5.x SDKs, if it is open."""
    return f" grpc={address}" if address else ""


def _metrics(*addresses: str) -> str:
    """Return the part of the ready line with the ports for Prometheus, if any is open."""
    listed = ",".join(filter(None, addresses))
    return f" metrics={listed}" if listed else ""


def settle() -> None:
    """Exclude the objects of a started server from garbage collection: a full collection would block the event loop."""
    gc.collect()
    gc.freeze()


def _run(
    make: Callable[[], S], ready: Callable[[S], str], reload: Callable[[], None], *, ends_with_stdin: bool = False
) -> None:
    """Run a server on a new event loop: start it, print the ready line, reload on SIGHUP, and stop on SIGTERM, SIGINT,
    or the end of standard input (with ``ends_with_stdin``: the parent has exited)."""

    async def serve() -> None:
        server = make()
        asked_to_stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, asked_to_stop.set)
        loop.add_signal_handler(signal.SIGHUP, reload)

        def left_alone() -> None:
            loop.remove_reader(0)
            asked_to_stop.set()

        if ends_with_stdin:
            loop.add_reader(0, left_alone)
        await server.start()
        if not asked_to_stop.is_set():
            print(ready(server), flush=True)
        settle()  # takes about 20 ms, so after the ready line, for which a caller may wait
        await asked_to_stop.wait()
        await server.stop()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve())


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return uvloop's loop factory if uvloop is installed, or else asyncio's."""
    try:
        import uvloop
    except ImportError:
        _log.info("on asyncio's own event loop; uvloop's is faster: %s", extras.install("server"))
        return asyncio.new_event_loop
    return uvloop.new_event_loop
