"""``rmq standalone``, ``rmq broker``, ``rmq namesrv``: settings in, one line when ready, a clean stop on SIGTERM.

What the command line says wins over the file, the file over the defaults.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
import typer

from rmqkit import settings as configuration
from rmqkit.broker import settings as broker_keys
from rmqkit.broker.settings import NOT_BUILT, BrokerSettings, refuse_unsupported
from rmqkit.namesrv import settings as namesrv_keys
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.remoting.authentication import AuthenticationSettings
from rmqkit.remoting.tls import ClientTls, ClientTlsSettings, ServerTls, ServerTlsSettings
from rmqkit.store.settings import StoreSettings

__all__ = ["app"]

PROMISES = {**broker_keys.PROMISES, **namesrv_keys.PROMISES}
WITHOUT_EFFECT = broker_keys.WITHOUT_EFFECT | namesrv_keys.WITHOUT_EFFECT
_TLS: tuple[type[msgspec.Struct], ...] = (ServerTlsSettings, ClientTlsSettings)
_BROKER: tuple[type[msgspec.Struct], ...] = (BrokerSettings, StoreSettings, AuthenticationSettings, *_TLS)
_BOTH: tuple[type[msgspec.Struct], ...] = (NamesrvSettings, *_BROKER)

_log = logging.getLogger("rmqkit")


class _Server(Protocol):
    async def start(self) -> None: ...
    async def stop(self) -> None: ...


S = TypeVar("S", bound=_Server)


app = typer.Typer()

_Config = Annotated[
    Path | None, typer.Option("-c", "--config", help="Properties file, as Java's broker.conf.", show_default=False)
]
_NameServers = Annotated[
    str | None,
    typer.Option(
        "-n",
        "--name-servers",
        envvar="NAMESRV_ADDR",
        help="host:port;host:port of the name servers.",
        show_default=False,
    ),
]
_Host = Annotated[str | None, typer.Option(help="Address to listen on. [default: 0.0.0.0]")]
_BrokerPort = Annotated[
    int | None, typer.Option(min=0, max=65535, help="Broker port; 0 picks a free one. [default: 10911]")
]
_StoreFolder = Annotated[Path | None, typer.Option(help="Store directory. [default: ~/store]")]
_Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Log what happens, not only what goes wrong.")]
_PrintConfig = Annotated[bool, typer.Option("-p", "--print-config", help="Print the settings and exit.")]


@app.command()
def standalone(
    namesrv_port: Annotated[int, typer.Option(min=0, max=65535, help="Name server port; 0 picks a free one.")] = 9876,
    port: _BrokerPort = None,
    store: _StoreFolder = None,
    host: Annotated[str, typer.Option(help="Address to listen on and to tell clients.")] = "127.0.0.1",
    config: _Config = None,
    verbose: _Verbose = False,
    print_config: _PrintConfig = False,
) -> None:
    """Run a name server and a broker in one process, for development."""
    loaded = namesrv_settings, broker_settings, store_settings, users, *tls = _load(_BOTH, config, verbose=verbose)
    _override(broker_settings, bind_address=host, listen_port=port)
    _override(namesrv_settings, bind_address=host, listen_port=namesrv_port)
    if print_config:
        _print_settings(*loaded)
        return
    from rmqkit.standalone import Standalone

    root, sides = _store_root(store, store_settings), _tls(*tls)
    settings = {"namesrv": namesrv_settings, "broker": broker_settings, "store": store_settings}
    _run(
        lambda: Standalone(root, **settings, authentication=users, **sides),
        lambda both: f"ready namesrv={both.namesrv_address} broker={both.broker_address} store={root}",
    )


@app.command()
def broker(
    name_servers: _NameServers = None,
    port: _BrokerPort = None,
    store: _StoreFolder = None,
    host: _Host = None,
    config: _Config = None,
    verbose: _Verbose = False,
    print_config: _PrintConfig = False,
) -> None:
    """Run a broker."""
    loaded = broker_settings, store_settings, users, *tls = _load(_BROKER, config, verbose=verbose)
    _override(broker_settings, bind_address=host, listen_port=port, namesrv_addr=name_servers)
    if print_config:
        _print_settings(*loaded)
        return
    from rmqkit.broker.server import Broker

    root, sides = _store_root(store, store_settings), _tls(*tls)
    _run(
        lambda: Broker(broker_settings, store_settings, root, authentication=users, **sides),
        lambda server: f"ready broker={server.address} store={root}",
    )


@app.command()
def namesrv(
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; 0 picks a free one. [default: 9876]")
    ] = None,
    host: _Host = None,
    config: _Config = None,
    verbose: _Verbose = False,
    print_config: _PrintConfig = False,
) -> None:
    """Run a name server."""
    loaded = namesrv_settings, *tls = _load((NamesrvSettings, *_TLS), config, verbose=verbose)
    _override(namesrv_settings, bind_address=host, listen_port=port)
    if print_config:
        _print_settings(*loaded)
        return
    from rmqkit.namesrv.server import NameServer

    sides = _tls(*tls)
    _run(lambda: NameServer(namesrv_settings, **sides), lambda server: f"ready namesrv={server.address}")


def _load(types: Sequence[type[msgspec.Struct]], config: Path | None, *, verbose: bool) -> tuple[Any, ...]:
    """Settings from a file or the defaults; what the file has and nobody uses is told in the log, which begins here."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    if config is None:
        return tuple(settings_type() for settings_type in types)
    properties = configuration.read_properties(config)
    tls_file = properties.pop("tls.config.file", None)
    if tls_file is not None:
        properties = configuration.read_properties(Path(tls_file)) | properties
    refuse_unsupported(properties, source=str(config), promises=PROMISES)
    accepted = WITHOUT_EFFECT | NOT_BUILT | PROMISES.keys()
    loaded = configuration.load(types, properties, source=str(config), without_effect=accepted)
    for key, nearest in loaded.unknown:
        hint = f", did you mean {nearest}?" if nearest else ""
        _log.warning("%s: unknown key %s is ignored%s", config, key, hint)
    for what, keys in (("without effect here", WITHOUT_EFFECT), ("not supported yet and ignored", NOT_BUILT)):
        named = sorted(keys.intersection(loaded.without_effect))
        if named:
            _log.warning("%s: %s: %s", config, what, ", ".join(named))
    return loaded.values


def _tls(server: ServerTlsSettings, client: ClientTlsSettings) -> dict[str, Any]:
    """The TLS sides of listening ports and of connections to name servers."""
    return {"tls": ServerTls(server), "client_tls": ClientTls(client) if client.tls_enable else None}


def _override(settings: msgspec.Struct, **values: Any) -> None:
    for name, value in values.items():
        if value is not None:
            setattr(settings, name, value)


def _store_root(option: Path | None, settings: StoreSettings) -> Path:
    return (option or Path(settings.store_path_root_dir)).expanduser().absolute()


def _print_settings(*settings: msgspec.Struct) -> None:
    merged = {key: text for one in settings for key, text in configuration.to_properties(one).items()}
    for key in sorted(merged):
        print(f"{key}={merged[key]}")


def _run(make: Callable[[], S], ready: Callable[[S], str]) -> None:
    """Start a server on a fresh event loop, say so, and stop it on SIGTERM or SIGINT."""

    async def serve() -> None:
        server = make()
        asked_to_stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, asked_to_stop.set)
        await server.start()
        gc.collect()
        gc.freeze()  # what stands now stays: later collections need not look at it
        gc.set_threshold(50_000, 50, 100)
        print(ready(server), flush=True)
        await asked_to_stop.wait()
        await server.stop()

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(serve())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop where it exists."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop
