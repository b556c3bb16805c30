"""``rmq profile``: store clusters by name (the file is described in `profiles`)."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from typer.core import TyperGroup

from rmqkit.cli.frame.nouns import PROFILE_NAMES, PROFILE_VARIABLE, Yes, confirm, show
from rmqkit.cli.frame.profiles import NAME, Profile, described, read, write
from rmqkit.errors import SettingsError

_HELP = """Save clusters by name: their name servers, users and TLS files.

Commands use the profile that --profile names, else RMQ_PROFILE, else the current one (rmq profile use). Servers do not
read profiles."""

app = typer.Typer(cls=TyperGroup, name="profile", help=_HELP, no_args_is_help=True, add_completion=False)

_Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False, autocompletion=PROFILE_NAMES)]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Letters, digits, - _ and .", show_default=False)],
    name_servers: Annotated[
        str, typer.Option("-n", "--name-servers", help="Name servers, as host:port;host:port.", show_default=False)
    ],
    access_key: Annotated[
        str, typer.Option(help="User name (access key) that signs the requests.", show_default=False)
    ] = "",
    secret_key: Annotated[
        str, typer.Option(help="Secret key of that user, stored in the file; - prompts for it.", show_default=False)
    ] = "",
    secret_key_env: Annotated[
        str, typer.Option(metavar="VARIABLE", help="Environment variable with the secret key.", show_default=False)
    ] = "",
    secret_key_file: Annotated[
        str, typer.Option(metavar="FILE", help="File with the secret key as its first line.", show_default=False)
    ] = "",
    tls: Annotated[
        bool, typer.Option("--tls", help="Encrypt every connection. Certificates are not verified without --tls-ca.")
    ] = False,
    tls_ca: Annotated[str, typer.Option(help="PEM file of the CA.", show_default=False)] = "",
    tls_cert: Annotated[str, typer.Option(help="PEM file of the client certificate.", show_default=False)] = "",
    tls_key: Annotated[str, typer.Option(help="PEM file of the private key.", show_default=False)] = "",
    timeout_ms: Annotated[
        int | None, typer.Option("--timeout", min=1, help="Timeout of each request in ms.", show_default=False)
    ] = None,
    use: Annotated[bool, typer.Option("--use", help="Make it the current profile.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Replace a profile of this name.")] = False,
    as_json: _Json = False,
) -> None:
    """Add a profile.

    If the profile holds a secret key, only you can read its file. It is better
    to store the key elsewhere and to name its environment variable or file."""
    if not NAME.fullmatch(name):
        raise SettingsError(f"profile name {name!r} must be 1 to 64 letters, digits, - _ and .")
    profiles = read()
    if name in profiles.profiles and not replace:
        raise SettingsError(f"profile {name} exists already: --replace replaces it")
    if secret_key == "-":
        secret_key = _asked(f"Secret key of {access_key}: ")
    try:
        profiles.profiles[name] = Profile(
            name_servers=name_servers,
            timeout_ms=timeout_ms,
            access_key=access_key,
            secret_key=secret_key,
            secret_key_env=secret_key_env,
            secret_key_file=_anywhere(secret_key_file),
            tls=tls,
            tls_ca=_anywhere(tls_ca),
            tls_cert=_anywhere(tls_cert),
            tls_key=_anywhere(tls_key),
        )
    except ValueError as error:
        raise SettingsError(f"profile {name}: {error}") from None
    if use:
        profiles.current = name
    show(f"profile {name} is saved in {write(profiles)}", as_json=as_json)


def _anywhere(path: str) -> str:
    """Return a path that means the same file from any folder."""
    return str(Path(path).expanduser().absolute()) if path else ""


def _asked(question: str) -> str:
    return getpass.getpass(question) if _is_terminal() else sys.stdin.readline().rstrip("\n")


def _is_terminal() -> bool:
    return sys.stdin.isatty()


class ProfileRow(msgspec.Struct, rename="camel"):
    """One row of the list of profiles."""

    name: str
    name_servers: str
    user: str
    tls: bool
    current: bool


@app.command("list")
def list_profiles(as_json: _Json = False) -> None:
    """List the profiles."""
    profiles = read()
    rows = [
        ProfileRow(
            name=name,
            name_servers=one.name_servers,
            user=one.access_key,
            tls=one.tls or bool(one.tls_ca or one.tls_cert),
            current=name == profiles.current,
        )
        for name, one in sorted(profiles.profiles.items())
    ]
    show(
        rows or ([] if as_json else "no profiles; add one with: rmq profile add local --name-servers 127.0.0.1:9876"),
        as_json=as_json,
    )


@app.command("show")
def show_profile(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            envvar=PROFILE_VARIABLE,
            show_envvar=False,
            help="Profile. (default: RMQ_PROFILE, else the current one)",
            show_default=False,
            autocompletion=PROFILE_NAMES,
        ),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Show a profile. Its secret key is hidden."""
    profiles = read()
    if not (name := name or profiles.current):
        raise SettingsError("no profile is current: name one, or choose one with: rmq profile use")
    show({"name": name, **described(profiles.named(name))}, as_json=as_json)


@app.command()
def use(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", show_default=False, autocompletion=PROFILE_NAMES)
    ] = None,
    none: Annotated[bool, typer.Option("--none", help="Use no profile.")] = False,
    as_json: _Json = False,
) -> None:
    """Make a profile the current one. Commands without --profile use it."""
    if none == (name is not None):
        raise typer.BadParameter("give NAME, or --none")
    profiles = read()
    if name is not None:
        profiles.named(name)
    profiles.current = name or ""
    write(profiles)
    show(f"commands use {name or 'no profile'} now", as_json=as_json)


@app.command()
def remove(name: _Name, yes: Yes = False, as_json: _Json = False) -> None:
    """Remove a profile."""
    profiles = read()
    profiles.named(name)
    confirm(f"Remove profile {name}", yes=yes)
    del profiles.profiles[name]
    if profiles.current == name:
        profiles.current = ""
    write(profiles)
    show(f"removed {name}", as_json=as_json)
