"""Profiles: a user's names for clusters, with their addresses and users, in one file.

``rmq profile`` writes the file. The option ``--profile`` of each command with name servers chooses a profile. The file
is ``$XDG_CONFIG_HOME/rmqkit/profiles.json``, by default in ``~/.config``::

    {"current": "prod",
     "profiles": {"prod": {"nameServers": "ns-a:9876;ns-b:9876", "accessKey": "ada", "secretKeyEnv": "PROD_SECRET"}}}

The file may have secret keys, so only its owner can read it. A file with secret keys is refused if other users can read
it.

The value of an option is the first existing value in this list (`resolved`):

1. the command line: the option itself, then the profile in ``--profile``
2. the environment: the option's variable (``NAMESRV_ADDR``)
3. the profile in ``RMQ_PROFILE``, or else the current profile (``rmq profile use``)
4. the option's default

Servers have settings files and do not read profiles: a broker must not register at the cluster of a user's profile.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from rmqkit.errors import SettingsError

__all__ = ["Profile", "Profiles", "choose", "file_path", "read", "resolved", "secret_of", "write"]

NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_CHOSEN = "rmqkit.profile"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class Profile(Struct, rename="camel", omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """The address of a cluster, and the user for it. Fields have the names of the common options.

    Attributes:
        secret_key_env: the environment variable with the secret key.
        secret_key_file: the file with the secret key in its first line.
    """

    name_servers: str
    timeout_ms: Annotated[int, Meta(ge=1)] | None = None
    access_key: str = ""
    secret_key: str = ""
    secret_key_env: str = ""
    secret_key_file: str = ""
    tls: bool = False
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""

    def __post_init__(self) -> None:
        from rmqkit.remoting.address import split_addresses

        split_addresses(self.name_servers)
        given = [name for name in ("secret_key", "secret_key_env", "secret_key_file") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"the secret key is given {len(given)} times: {', '.join(given)}")
        if given and not self.access_key:
            raise ValueError("there is a secret key and no access key")


class Profiles(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The content of the file: profiles by name, and the name of the profile for commands without the option."""

    current: str = ""
    profiles: dict[str, Profile] = {}

    def named(self, name: str) -> Profile:
        """Return a profile. Raises SettingsError: there is no such profile."""
        if name in self.profiles:
            return self.profiles[name]
        near = difflib.get_close_matches(name, self.profiles, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        known = (
            f"it has {', '.join(sorted(self.profiles))}"
            if self.profiles
            else f"add it with: rmq profile add {shlex.quote(name)} --name-servers 127.0.0.1:9876"
        )
        raise SettingsError(f"there is no profile {name!r} in {file_path()}: {hint}{known}")


def file_path() -> Path:
    """Return the file with the profiles of this user."""
    folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(folder) / "rmqkit" / "profiles.json"


def read() -> Profiles:
    """Return the profiles of this user; without a file, no profiles.
    Raises SettingsError: the file cannot be read, is not valid, or has a secret key that other users can read."""
    path = file_path()
    try:
        with path.open("rb") as file:
            text, mode = file.read(), stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        found = msgspec.json.decode(text, type=Profiles)
    except FileNotFoundError:
        return Profiles()
    except OSError as error:
        raise SettingsError(f"cannot read the profiles in {path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise SettingsError(f"{path} is not a file of profiles: {error}") from None
    holding = sorted(name for name, profile in found.profiles.items() if profile.secret_key)
    if holding and mode & _OTHERS and sys.platform != "win32":
        warning = f"{path} holds the secret key of {', '.join(holding)} and other users can read it (mode {mode:o})"
        raise SettingsError(f"{warning}: chmod 600 {path}")
    return found


def write(profiles: Profiles) -> Path:
    """Write the file atomically, readable only by its owner. Raises SettingsError: the file cannot be written."""
    path = file_path()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        target = path.resolve()  # the file may be a link to another place
        fresh = target.with_name(f".{target.name}.tmp")
        fresh.unlink(missing_ok=True)
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(profiles)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(target)
    except OSError as error:
        raise SettingsError(f"cannot write the profiles to {path}: {error.strerror}") from None
    return path


def secret_of(name: str, profile: Profile) -> str:
    """Return the secret key of a profile, from the profile itself, a variable or a file; empty if there is no key.
    Raises SettingsError: the variable is not set, or the file cannot be read."""
    if variable := profile.secret_key_env:
        secret = os.environ.get(variable, "")
        place = f"environment variable {variable}, which is not set"
    elif profile.secret_key_file:
        path = Path(profile.secret_key_file).expanduser()
        try:
            secret = path.read_text(encoding="utf-8").partition("\n")[0].strip()
        except (OSError, UnicodeDecodeError) as error:
            cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise SettingsError(f"profile {name} has its secret key in {path}, which cannot be read: {cause}") from None
        place = f"{path}, whose first line is empty"
    else:
        return profile.secret_key
    if not secret:
        raise SettingsError(f"profile {name} has its secret key in {place}")
    return secret


# ---------------------------------------------------------------- the options of a command


class _Chosen(Struct):
    name: str
    profile: Profile
    is_first: bool
    """True if the profile is from the command line, which has priority over the environment."""


def choose(context: Any, value: str | None) -> str | None:
    """Store the chosen profile (the callback of ``--profile``, which runs before all others). An empty name means no
    profile. Raises SettingsError: there is no such profile."""
    profiles = read() if value != "" else Profiles()
    if name := profiles.current if value is None else value:
        is_first = context.get_parameter_source("profile").name == "COMMANDLINE"
        context.meta[_CHOSEN] = _Chosen(name, profiles.named(name), is_first)
    return value


def resolved(context: Any, option: Any, value: Any) -> Any:
    """Return an option's value, from the command line, environment, profile or default (the callback of common
    options). Raises SettingsError: the profile's secret key cannot be read."""
    chosen: _Chosen | None = context.meta.get(_CHOSEN)
    if chosen is None or option.name not in Profile.__struct_fields__:
        return value
    source = context.get_parameter_source(option.name).name
    if source == "COMMANDLINE" or (source == "ENVIRONMENT" and not chosen.is_first):
        return value
    kept = secret_of(chosen.name, chosen.profile) if option.name == "secret_key" else None
    return kept or getattr(chosen.profile, option.name) or value


def described(profile: Profile) -> Mapping[str, Any]:
    """Return a profile for display, with a masked secret key."""
    shown = msgspec.to_builtins(profile)
    return {name: "***" if name == "secretKey" else value for name, value in shown.items()}
