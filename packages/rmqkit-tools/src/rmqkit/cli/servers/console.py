"""``rmq console``: serve the web console for clusters; ``rmq console user``: print a line for the file of users."""

from __future__ import annotations

import asyncio
import getpass
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rmqkit import extras
from rmqkit.cli import with_options
from rmqkit.cli.frame.nouns import COMMON, LOCAL, tls_settings
from rmqkit.errors import SettingsError
from rmqkit.remoting.authentication import Credentials
from rmqkit.remoting.tls import ClientTls

PORT = 9875
_BANNER = "This console was started with --insecure: anyone can read it. It refuses changes and hides bodies."

app = typer.Typer(name="console", invoke_without_command=True, add_completion=False)
_OPTIONS = {name: option for name, option in COMMON.items() if name != "as_json"}


# Long: it declares the command's options.
@app.callback()
@with_options(_OPTIONS)
def console(
    ctx: typer.Context,
    envs: Annotated[
        list[str] | None,
        typer.Option(
            "--env", metavar="NAME=HOST:PORT", help="Name and address of a cluster; repeatable.", show_default=False
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = PORT,
    read_only: Annotated[bool, typer.Option("--read-only", help="Refuse all changes.")] = False,
    login: Annotated[bool, typer.Option("--login", help="Log in as a user of the cluster (ACL 2.0).")] = False,
    users: Annotated[
        Path | None, typer.Option(help="File of users. rmq console user prints its lines.", show_default=False)
    ] = None,
    oidc: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON file of an OpenID Connect provider for logins.", show_default=False),
    ] = None,
    cert: Annotated[Path | None, typer.Option(help="Certificate for https, PEM.", show_default=False)] = None,
    key: Annotated[Path | None, typer.Option(help="Private key of the certificate, PEM.", show_default=False)] = None,
    behind_proxy: Annotated[
        str,
        typer.Option(metavar="NETWORKS", help="Networks of the proxies that do TLS: 10.0.0.0/8,…", show_default=False),
    ] = "",
    host_names: Annotated[
        list[str] | None,
        typer.Option("--host-name", help="Host name that browsers may use; repeatable.", show_default=False),
    ] = None,
    hide_bodies: Annotated[bool, typer.Option("--hide-bodies", help="Hide message bodies from viewers.")] = False,
    audit: Annotated[
        Path | None,
        typer.Option(help="Audit file (default ~/.local/state/rmqkit/console-audit.jsonl).", show_default=False),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder for history and alerts (default ~/.local/state/rmqkit/console).",
            show_default=False,
        ),
    ] = None,
    rules: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON file of alert rules and channels, read at start.", show_default=False),
    ] = None,
    jobs: Annotated[
        Path | None,
        typer.Option(help="Folder for replays (default ~/.local/state/rmqkit/console-jobs).", show_default=False),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow any address without users; read-only, no bodies.")
    ] = False,
    ends_with_stdin: Annotated[bool, typer.Option(hidden=True)] = False,
    **common: Any,
) -> None:
    """Serve the web console: what is wrong in a cluster, why, and what to do."""
    if ctx.invoked_subcommand is not None:
        return
    with extras.needed("console", "rmq console"):
        from rmqkit.console.access.security import is_loopback, listen_fault

    if (cert is None) != (key is None):
        raise SettingsError("--cert and --key belong together: give both")
    fault = listen_fault(
        host,
        has_users=login or users is not None or oidc is not None,
        has_tls=cert is not None,
        is_behind_proxy=bool(behind_proxy),
        is_insecure=insecure,
    )
    if fault:
        raise SettingsError(fault)
    is_open = insecure and not is_loopback(host)
    _serve(
        env=_clusters(envs, common["name_servers"]),
        host=host,
        port=port,
        cert=cert,
        key=key,
        behind_proxy=[one for one in behind_proxy.split(",") if one],
        ends_with_stdin=ends_with_stdin,
        read_only=read_only or is_open,
        login=login,
        users=users,
        oidc=oidc,
        hide_bodies=hide_bodies,
        hide_all_bodies=is_open,
        banner=_BANNER if is_open else "",
        host_names=[*(host_names or ()), host, *(["*"] if is_open else [])],
        audit=audit,
        state=state,
        rules=rules,
        jobs=jobs,
        is_secure=cert is not None or bool(behind_proxy),
        common=common,
    )


def _clusters(envs: list[str] | None, name_servers: str) -> str | dict[str, str]:
    """Return name servers by cluster name. Raises SettingsError: a text is not NAME=HOST:PORT."""
    if not envs:
        return name_servers or LOCAL
    found: dict[str, str] = {}
    for text in envs:
        name, sign, addresses = text.partition("=")
        if not sign or not name or not addresses or name in found:
            raise SettingsError(f"--env {text} must be NAME=HOST:PORT, each name once")
        found[name] = addresses
    return found


def _serve(
    *,
    host: str,
    port: int,
    cert: Path | None,
    key: Path | None,
    behind_proxy: list[str],
    ends_with_stdin: bool,
    audit: Path | None,
    state: Path | None,
    jobs: Path | None,
    common: dict[str, Any],
    **options: Any,
) -> None:
    with extras.needed("console", "rmq console"):
        from rmqkit.console.server.app import Console
        from rmqkit.console.server.serve import serve, state_folder
    tls, access_key = tls_settings(common), common["access_key"]
    signing = None
    if access_key:
        token = common["security_token"] or None
        signing = Credentials(access_key=access_key, secret_key=common["secret_key"], security_token=token)

    def ready(address: str) -> None:
        settle()
        print(f"ready console={address}", flush=True)

    async def run() -> None:
        console = Console(
            **options,
            state=state or state_folder() / "console",
            audit=audit or state_folder() / "console-audit.jsonl",
            jobs=jobs or state_folder() / "console-jobs",
            credentials=signing,
            tls=None if tls is None else ClientTls(tls),
            timeout_ms=min(common["timeout_ms"], 3_000),
        )
        await serve(
            console,
            host,
            port,
            cert=cert,
            key=key,
            behind_proxy=behind_proxy,
            ready=ready,
            ends_with_stdin=ends_with_stdin,
        )

    from rmqkit.cli.servers.serve import loop_factory, settle

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run())


@app.command()
def user(
    name: Annotated[str, typer.Argument(help="Name to log in with.", show_default=False)],
    role: Annotated[str, typer.Option(help="viewer, operator or admin.")] = "viewer",
) -> None:
    """Print a line for the file of users. Enter the password when prompted, or pipe it to standard input."""
    from rmqkit.console.access.logins import Role, password_line

    if role not in set(Role):
        raise typer.BadParameter(f"--role {role} must be {', '.join(Role)}")
    if not name or ":" in name or name != name.strip():
        raise typer.BadParameter(f"name {name!r} must have no colon and no blanks around it")
    password = getpass.getpass(f"Password of {name}: ") if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
    if not password:
        raise SettingsError("the password is empty")
    print(password_line(name, Role(role), password))
