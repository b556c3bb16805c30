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
store_commands = typer.Typer(help="Look into a store directory without a broker, and repair it.", no_args_is_help=True)
app.add_typer(store_commands, name="store")

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
_BrokerPort = Annotated[
    int | None, typer.Option(min=0, max=65535, help="Broker port; 0 picks a free one. [default: 10911]")
]
_StoreFolder = Annotated[Path | None, typer.Option(help="Store directory. [default: ~/store]")]
_Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Log what happens, not only what goes wrong.")]
_StoreRoot = Annotated[Path, typer.Argument(metavar="DIR", help="Store directory (storePathRootDir).")]
_StoreConfig = Annotated[
    Path | None,
    typer.Option("-c", "--config", help="broker.conf of the store, for its file sizes.", show_default=False),
]
_ReadOnly = Annotated[bool, typer.Option("--read-only", help="Look at a store that a broker holds, as it is now.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
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
    port: _BrokerPort = None,
    store: _StoreFolder = None,
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


@bench_commands.command("store")
def bench_store(
    messages: Annotated[int, typer.Option(min=256, help="Messages of a round.")] = 50_000,
    body_bytes: Annotated[int, typer.Option(min=1, max=1 << 20, help="Bytes of a body.")] = 1024,
    directory: Annotated[Path | None, typer.Option(help="Where the files lie meanwhile. [default: $TMPDIR]")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """What the store puts, dispatches, reads and recovers in a second, beside the naive way to do the same."""
    from rmqkit.cli import bench

    bench.store(messages=messages, body_bytes=body_bytes, directory=directory, as_json=json)


@store_commands.command("verify")
def store_verify(
    root: _StoreRoot, config: _StoreConfig = None, read_only: _ReadOnly = False, json: _Json = False
) -> None:
    """Check every record, queue entry, extension unit and index chain; exit code 1 when something is damaged."""
    from rmqkit.cli import store

    store.verify(root, config=config, read_only=read_only, as_json=json)


@store_commands.command("rebuild")
def store_rebuild(
    root: _StoreRoot,
    queues: Annotated[bool, typer.Option("--queues", help="Consume queues, with batch and extension files.")] = False,
    index: Annotated[bool, typer.Option("--index", help="Index files.")] = False,
    config: _StoreConfig = None,
    json: _Json = False,
) -> None:
    """Make queues or index files anew from the commit log; a running broker's store is refused."""
    from rmqkit.cli import store

    store.rebuild(root, config=config, queues=queues, index=index, as_json=json)


@store_commands.command("repair")
def store_repair(
    root: _StoreRoot,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    config: _StoreConfig = None,
    json: _Json = False,
) -> None:
    """Repair what the commit log determines, and name the rest; exit code 1 when something stays damaged."""
    from rmqkit.cli import store

    store.repair(root, config=config, is_dry_run=dry_run, as_json=json)


@store_commands.command("stat")
def store_stat(
    root: _StoreRoot, config: _StoreConfig = None, read_only: _ReadOnly = False, json: _Json = False
) -> None:
    """Count what the log holds, in all and for each queue."""
    from rmqkit.cli import store

    store.stat(root, config=config, read_only=read_only, as_json=json)


@store_commands.command("dump")
def store_dump(
    root: _StoreRoot,
    topic: Annotated[str | None, typer.Option(help="Only this topic.", show_default=False)] = None,
    queue: Annotated[int | None, typer.Option(min=0, help="Only this queue id.", show_default=False)] = None,
    begin: Annotated[
        str | None, typer.Option("--from", help="Stored at or after: ms or ISO time.", show_default=False)
    ] = None,
    end: Annotated[
        str | None, typer.Option("--to", help="Stored at or before: ms or ISO time.", show_default=False)
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="Only messages with this key or unique key.", show_default=False)
    ] = None,
    limit: Annotated[int | None, typer.Option(min=0, help="Most messages. [default: 50; all with --json]")] = None,
    config: _StoreConfig = None,
    read_only: _ReadOnly = False,
    json: _Json = False,
) -> None:
    """Print the messages of the log in its order."""
    from rmqkit.cli import store

    store.dump(
        root,
        config=config,
        topic=topic,
        queue_id=queue,
        begin=begin,
        end=end,
        key=key,
        limit=limit,
        read_only=read_only,
        as_json=json,
    )
