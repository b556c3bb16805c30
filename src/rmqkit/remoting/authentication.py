"""Who sends a request: our side signs, the listening side checks (``AclClientRPCHook``, authentication of 5.x brokers).

What a known user may do is another question, which is not asked here. Source: remoting.md §3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, TypeVar

import msgspec
from msgspec import Struct

from rmqkit.errors import SettingsError
from rmqkit.protocol.acl import ACCESS_KEY, SECURITY_TOKEN, SIGNATURE, sign, verify
from rmqkit.protocol.bodies.access import UserInfo
from rmqkit.protocol.command import Command, decode_fields
from rmqkit.settings import Setting

__all__ = ["Authentication", "AuthenticationSettings", "Credentials", "inner_credentials"]

T = TypeVar("T")


class AuthenticationSettings(Struct, kw_only=True):
    """What a ``broker.conf`` says about users; the keys and their JSON are those of 5.x brokers."""

    enabled: Annotated[bool, Setting("authenticationEnabled", "take requests only from users who sign them")] = False
    initial_user: Annotated[
        str, Setting("initAuthenticationUser", 'first user: {"username":"…","password":"…"}', secret=True)
    ] = ""
    inner_credentials: Annotated[
        str,
        Setting(
            "innerClientAuthenticationCredentials",
            'how the broker signs its own requests: {"accessKey":"…","secretKey":"…"}',
            secret=True,
        ),
    ] = ""


class Credentials(Struct, rename="camel", kw_only=True):
    """A user's name and secret."""

    access_key: str
    secret_key: str
    security_token: str | None = None

    def sign(self, command: Command) -> None:
        """Put name and signature among a request's fields."""
        fields = {**decode_fields(command), ACCESS_KEY: self.access_key}
        if self.security_token is not None:
            fields[SECURITY_TOKEN] = self.security_token
        fields[SIGNATURE] = sign(fields, command.body, self.secret_key)
        command.fields = fields


class _User(Struct):
    username: str
    password: str


class Authentication:
    """Checks signatures against the secrets of known users.

    Args:
        initial: the configuration's first user.
        inner: how brokers sign their own requests, whatever is known of a user of that name.

    Attributes:
        users: looks up who else is known, and those that operators changed; at first, the first user alone.
    """

    def __init__(self, initial: UserInfo, inner: Credentials | None = None) -> None:
        self.initial = initial
        self.users: Callable[[], Mapping[str, UserInfo]] = lambda: {initial.username or "": initial}
        self._inner = inner

    @classmethod
    def of(cls, settings: AuthenticationSettings) -> Authentication | None:
        """The check a configuration asks for, or None.
        Raises SettingsError: the users are missing or not readable JSON."""
        if not settings.enabled:
            return None
        if not settings.initial_user:
            raise SettingsError("authenticationEnabled=true needs initAuthenticationUser: nobody could send")
        user = _decoded("initAuthenticationUser", settings.initial_user, _User)
        initial = UserInfo(username=user.username, password=user.password, user_type="Super", user_status="enable")
        return cls(initial, inner_credentials(settings))

    def refusal(self, command: Command) -> str | None:
        """The reference's remark for a request that is not let in, or None."""
        fields = decode_fields(command)
        name = fields.get(ACCESS_KEY)
        if not name:
            return "username cannot be null."
        if self._inner is not None and name == self._inner.access_key:
            secret = self._inner.secret_key
        elif (user := self.users().get(name)) is None:
            return f"User:{name} is not found."
        elif user.user_status == "disable":
            return f"User:{name} is disabled."
        else:
            secret = user.password or ""
        return None if verify(fields, command.body, secret) else "check signature failed."


def inner_credentials(settings: AuthenticationSettings) -> Credentials | None:
    """How the broker signs its own requests, or None. Raises SettingsError: they are not readable JSON."""
    text = settings.inner_credentials
    return _decoded("innerClientAuthenticationCredentials", text, Credentials) if text else None


def _decoded(key: str, text: str, value_type: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=value_type)
    except msgspec.MsgspecError as error:
        raise SettingsError(f"{key} cannot be read: {error}") from None
