"""The command line: what is asked and what is printed; the work is done below.

Every command imports what it needs when it runs, so that each starts as fast as it can.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(
    name="rmq",
    help="RocketMQ-compatible messaging: name server, broker, tools.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
bench_commands = typer.Typer(help="Measure; every figure also as JSON.", no_args_is_help=True)
app.add_typer(bench_commands, name="bench")

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
_Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Log what happens, not only what goes wrong.")]
_PrintConfig = Annotated[bool, typer.Option("-p", "--print-config", help="Print the settings and exit.")]


@app.command()
def standalone(
    namesrv_port: Annotated[int, typer.Option(min=0, max=65535, help="Name server port; 0 picks a free one.")] = 9876,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Broker port; 0 picks a free one. [default: 10911]")
    ] = None,
    store: Annotated[Path | None, typer.Option(help="Store directory. [default: ~/store]")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on and to tell clients.")] = "127.0.0.1",
    config: _Config = None,
    verbose: _Verbose = False,
    print_config: _PrintConfig = False,
) -> None:
    """Run a name server and a broker in one process, for development."""
    from rmqkit.cli import serve

    serve.standalone(
        namesrv_port=namesrv_port,
        port=port,
        store=store,
        host=host,
        config=config,
        verbose=verbose,
        print_config=print_config,
    )


@app.command()
def namesrv(
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; 0 picks a free one. [default: 9876]")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. [default: 0.0.0.0]")] = None,
    config: _Config = None,
    verbose: _Verbose = False,
    print_config: _PrintConfig = False,
) -> None:
    """Run a name server."""
    from rmqkit.cli import serve

    serve.namesrv(port=port, host=host, config=config, verbose=verbose, print_config=print_config)


@app.command()
def broker(
    name_servers: _NameServers = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; 0 picks a free one. [default: 10911]")
    ] = None,
    store: Annotated[Path | None, typer.Option(help="Store directory. [default: ~/store]")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. [default: 0.0.0.0]")] = None,
    config: _Config = None,
    verbose: _Verbose = False,
    print_config: _PrintConfig = False,
) -> None:
    """Run a broker."""
    from rmqkit.cli import serve

    serve.broker(
        name_servers=name_servers,
        port=port,
        store=store,
        host=host,
        config=config,
        verbose=verbose,
        print_config=print_config,
    )


@bench_commands.command("start")
def bench_start(
    runs: Annotated[int, typer.Option(min=1, help="Starts of each process.")] = 5,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """How long standalone, broker and name server take until ready, and their memory when idle."""
    from rmqkit.cli import bench

    bench.start(runs=runs, as_json=json)


@bench_commands.command("wire")
def bench_wire(
    connections: Annotated[int, typer.Option(min=1, help="Idle connections to hold.")] = 10_000,
    requests: Annotated[int, typer.Option(min=1, help="Requests through sockets.")] = 100_000,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """What commands cost to read and write, and requests through sockets; server CPU, not wall time."""
    from rmqkit.cli import bench

    bench.wire(connections=connections, requests=requests, as_json=json)
