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
from typing import Any, Protocol, TypeVar

import msgspec

from rmqkit import settings as configuration
from rmqkit.broker import settings as broker_keys
from rmqkit.broker.settings import NOT_BUILT, BrokerSettings, refuse_unsupported
from rmqkit.namesrv import settings as namesrv_keys
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.remoting.authentication import AuthenticationSettings
from rmqkit.remoting.tls import ClientTls, ClientTlsSettings, ServerTls, ServerTlsSettings
from rmqkit.store.settings import StoreSettings

__all__ = ["broker", "namesrv", "standalone"]

PROMISES = {**broker_keys.PROMISES, **namesrv_keys.PROMISES}
WITHOUT_EFFECT = broker_keys.WITHOUT_EFFECT | namesrv_keys.WITHOUT_EFFECT
_TLS: tuple[type[msgspec.Struct], ...] = (ServerTlsSettings, ClientTlsSettings)
_BROKER: tuple[type[msgspec.Struct], ...] = (BrokerSettings, StoreSettings, AuthenticationSettings, *_TLS)

_log = logging.getLogger("rmqkit")


class _Server(Protocol):
    async def start(self) -> None: ...
    async def stop(self) -> None: ...


S = TypeVar("S", bound=_Server)


def standalone(
    *,
    namesrv_port: int,
    port: int | None,
    store: Path | None,
    host: str,
    config: Path | None,
    verbose: bool,
    print_config: bool,
) -> None:
    """Run both until SIGTERM or SIGINT."""
    _log_to_stderr(verbose)
    namesrv_settings, broker_settings, store_settings, users, *tls = _load([NamesrvSettings, *_BROKER], config)
    _override(broker_settings, bind_address=host, listen_port=port)
    _override(namesrv_settings, bind_address=host, listen_port=namesrv_port)
    if print_config:
        _print_settings(namesrv_settings, broker_settings, store_settings, users, *tls)
        return
    from rmqkit.standalone import Standalone

    root = _store_root(store, store_settings)
    server_tls, client_tls = _tls(*tls)

    def make() -> Standalone:
        return Standalone(
            root,
            namesrv=namesrv_settings,
            broker=broker_settings,
            store=store_settings,
            tls=server_tls,
            client_tls=client_tls,
            authentication=users,
        )

    _run(make, lambda both: f"ready namesrv={both.namesrv_address} broker={both.broker_address} store={root}")


def broker(
    *,
    name_servers: str | None,
    port: int | None,
    store: Path | None,
    host: str | None,
    config: Path | None,
    verbose: bool,
    print_config: bool,
) -> None:
    """Run a broker until SIGTERM or SIGINT."""
    _log_to_stderr(verbose)
    broker_settings, store_settings, users, *tls = _load(_BROKER, config)
    _override(broker_settings, bind_address=host, listen_port=port, namesrv_addr=name_servers)
    if print_config:
        _print_settings(broker_settings, store_settings, users, *tls)
        return
    from rmqkit.broker.server import Broker

    root = _store_root(store, store_settings)
    server_tls, client_tls = _tls(*tls)
    _run(
        lambda: Broker(
            broker_settings, store_settings, root, tls=server_tls, client_tls=client_tls, authentication=users
        ),
        lambda server: f"ready broker={server.address} store={root}",
    )


def namesrv(*, port: int | None, host: str | None, config: Path | None, verbose: bool, print_config: bool) -> None:
    """Run a name server until SIGTERM or SIGINT."""
    _log_to_stderr(verbose)
    namesrv_settings, *tls = _load([NamesrvSettings, *_TLS], config)
    _override(namesrv_settings, bind_address=host, listen_port=port)
    if print_config:
        _print_settings(namesrv_settings, *tls)
        return
    from rmqkit.namesrv.server import NameServer

    server_tls, client_tls = _tls(*tls)
    _run(
        lambda: NameServer(namesrv_settings, tls=server_tls, client_tls=client_tls),
        lambda server: f"ready namesrv={server.address}",
    )


def _load(types: Sequence[type[msgspec.Struct]], config: Path | None) -> tuple[Any, ...]:
    """Settings from a file or the defaults; what the file has and nobody uses is told in the log."""
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


def _tls(server: ServerTlsSettings, client: ClientTlsSettings) -> tuple[ServerTls, ClientTls | None]:
    """The TLS sides of listening ports and of connections to name servers."""
    return ServerTls(server), ClientTls(client) if client.tls_enable else None


def _override(settings: msgspec.Struct, **values: Any) -> None:
    for name, value in values.items():
        if value is not None:
            setattr(settings, name, value)


def _store_root(option: Path | None, settings: StoreSettings) -> Path:
    return (option or Path(settings.store_path_root_dir)).expanduser().absolute()


def _print_settings(*settings: msgspec.Struct) -> None:
    merged: dict[str, str] = {}
    for one in settings:
        merged.update(configuration.to_properties(one))
    for key in sorted(merged):
        print(f"{key}={merged[key]}")


def _log_to_stderr(verbose: bool) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


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
