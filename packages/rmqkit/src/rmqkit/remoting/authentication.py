"""Signatures that prove the sender of a request (``AclClientRPCHook``, authentication of 5.x brokers).

The client signs and the server checks. `Authentication.authorize` decides which requests a known user has the right to
send.
Source: remoting.md §3.3; behaviour.md §9.8.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, TypeVar

import msgspec
from msgspec import Struct

from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import HeaderError, SettingsError
from rmqkit.protocol.acl import (
    ACCESS_KEY,
    FULL_SIGNATURE,
    SECURITY_TOKEN,
    SIGNATURE,
    FullSignature,
    full_fields,
    sign,
    sign_fully,
    verify,
    verify_fully,
)
from rmqkit.protocol.command import Command, decode_fields
from rmqkit.protocol.schemas.access import UserInfo
from rmqkit.remoting.connection import Connection
from rmqkit.settings import Setting

GRPC_WINDOW_MS = 15 * 3_600_000
"""15 hours. Most SDKs of 5.x sign local time as if it were UTC. Time zones differ from UTC by up to 14 hours, and the
clocks may differ, too."""

_NUMBERS_MAX = 8192
_SESSIONS_MAX = 10_000


@dataclass(slots=True)
class _Session:
    highest: int
    seen: int
    signed_ms: int


class Freshness:
    """A check that accepts each signed request once, at most ``window_ms`` before or after the time of its signature.

    A client numbers the requests in its *session*. For each session the check stores the highest number, and one bit
    for each of the `_NUMBERS_MAX` numbers up to it. Requests may overtake each other within this range; lower numbers
    are refused. A session can be removed when its last request is older than the window. A restart removes all
    sessions. If all `_SESSIONS_MAX` sessions are newer, a further session is refused. The check is called only for
    valid signatures, so unauthenticated clients cannot fill the table. Every broker has its own table: within the
    window, a request to one broker can be replayed to another broker with the same user. Use it only on the event
    loop."""

    def __init__(self, window_ms: int) -> None:
        self._window_ms = window_ms
        self._sessions: dict[tuple[str, str], _Session] = {}

    def fault(self, user: str, signature: FullSignature, now_ms: int) -> str | None:
        """Return the reason for refusing a correctly signed request, or None if the request is accepted. The same
        request is accepted only once."""
        away_ms = abs(now_ms - signature.signed_ms)
        if away_ms > self._window_ms:
            return f"it was signed {away_ms} ms from now, {self._window_ms} are allowed: set the clocks right"
        key = user, signature.session
        session = self._sessions.get(key)
        if session is None:
            if len(self._sessions) >= _SESSIONS_MAX and not self._has_room(now_ms):
                return f"more than {_SESSIONS_MAX} clients sign requests"
            self._sessions[key] = _Session(signature.number, 1, signature.signed_ms)
            return None
        ahead = signature.number - session.highest
        if ahead > 0:
            # Bit n is set if the number ``highest - n`` was received. Limit the shift: a client may send any number,
            # and Python would create an integer with this number of bits.
            session.seen = (session.seen << min(ahead, _NUMBERS_MAX) | 1) & ((1 << _NUMBERS_MAX) - 1)
            session.highest = signature.number
        elif -ahead >= _NUMBERS_MAX or session.seen >> -ahead & 1:
            return "it came before"
        else:
            session.seen |= 1 << -ahead
        session.signed_ms = max(session.signed_ms, signature.signed_ms)
        assert session.seen & 1, "the bit of the highest number is set"
        return None

    def _has_room(self, now_ms: int) -> bool:
        """Remove sessions that are older than the window. Return True if there is room for a new session."""
        oldest_ms = now_ms - self._window_ms
        self._sessions = {key: one for key, one in self._sessions.items() if one.signed_ms >= oldest_ms}
        return len(self._sessions) < _SESSIONS_MAX


T = TypeVar("T")


GRPC_WINDOW = Setting(
    "grpcSignatureWindow",
    "how far the date of a gRPC call's signature may be from now, in ms (SDKs write local time); 0 means any date",
    low=0,
)


class AuthenticationSettings(Struct, kw_only=True):
    """The settings about users in ``broker.conf``, with the keys and the JSON of 5.x brokers."""

    enabled: Annotated[bool, Setting("authenticationEnabled", "accept only requests that a user has signed")] = False
    initial_user: Annotated[
        str, Setting("initAuthenticationUser", 'the first user: {"username":"…","password":"…"}', secret=True)
    ] = ""
    inner_credentials: Annotated[
        str,
        Setting(
            "innerClientAuthenticationCredentials",
            'credentials for the broker\'s own requests: {"accessKey":"…","secretKey":"…"}',
            secret=True,
        ),
    ] = ""
    white_list: Annotated[
        str, Setting("authenticationWhitelist", "request codes that need no signature, separated by commas")
    ] = ""
    full_signatures_only: Annotated[
        bool, Setting("fullSignatureRequired", "refuse signatures that do not cover code and time (such as Apache's)")
    ] = False
    signature_window_ms: Annotated[
        int, Setting("fullSignatureWindow", "maximum age of a signature, in ms", low=1000)
    ] = 300_000
    grpc_window_ms: Annotated[int, GRPC_WINDOW] = GRPC_WINDOW_MS
    authorization_enabled: Annotated[
        bool, Setting("authorizationEnabled", "users may do only what policies allow; needs authenticationEnabled")
    ] = False
    authorization_white_list: Annotated[
        str, Setting("authorizationWhitelist", "request codes that need no policy, separated by commas")
    ] = ""


class Credentials(Struct, rename="camel"):
    """The user and secret for signing every request of a client: ``Credentials("shop", "secret")``."""

    access_key: Annotated[str, Setting("accessKey", "user name (access key)")]
    secret_key: Annotated[str, Setting("secretKey", "secret key of the user", secret=True)]
    security_token: Annotated[
        str | None, Setting("securityToken", "security token to send with the signature", secret=True)
    ] = None

    def sign(self, command: Command, signed: FullSignature | None = None) -> None:
        """Put the user's name and signature into the fields of a request. With ``signed``, add the full signature."""
        fields = {**decode_fields(command), ACCESS_KEY: self.access_key}
        if self.security_token is not None:
            fields[SECURITY_TOKEN] = self.security_token
        if signed is not None:
            fields |= full_fields(signed)
            # Compute the full signature first, because the plain signature covers all fields, including this one.
            fields[FULL_SIGNATURE] = sign_fully(command.code, fields, command.body, self.secret_key)
        fields[SIGNATURE] = sign(fields, command.body, self.secret_key)
        command.fields = fields


class Signer:
    """The signer of one client's requests. Every full signature is different, so that a server can detect a replay."""

    def __init__(self, credentials: Credentials, clock: Clock) -> None:
        self._credentials = credentials
        self._clock = clock
        self._session = secrets.token_hex(8)
        self._number = 0

    def sign(self, command: Command) -> None:
        """Put the user's name and the signatures into the fields of a request. Sign a request again before each
        retry."""
        self._number += 1
        self._credentials.sign(command, FullSignature(self._clock.now_ms(), self._session, self._number))


class _User(Struct):
    username: str
    password: str


class Authentication:
    """A check of signatures with the secrets of known users.

    Args:
        initial: the first user, from the configuration.
        inner: the credentials of the brokers' own requests. They replace a user with the same name.
        white_list: codes of requests that need no signature.
        freshness: requires full signatures, and accepts each of them once. None accepts plain signatures, too.
        grpc_window_ms: maximum difference between the signed date of a gRPC call and now; 0 means no limit.

    Attributes:
        users: returns the known users by name, with the changes of operators. Initially only the first user is known.
        authorize: returns the remark of a refusal, or None to allow the request. The arguments are the user's name, the
            extFields, the request, and the addresses of its hops (`Link.addresses`).
    """

    def __init__(
        self,
        initial: UserInfo,
        inner: Credentials | None = None,
        white_list: frozenset[int] = frozenset(),
        *,
        freshness: Freshness | None = None,
        clock: Clock = SYSTEM_CLOCK,
        grpc_window_ms: int = GRPC_WINDOW_MS,
    ) -> None:
        self.initial = initial
        self._grpc_window_ms = grpc_window_ms
        self._freshness = freshness
        self._clock = clock
        self.users: Callable[[], Mapping[str, UserInfo]] = lambda: {initial.username or "": initial}
        self.authorize: Callable[[str | None, Mapping[str, str], Command, Sequence[str]], str | None] | None = None
        self._inner = inner
        self._white_list = white_list

    @classmethod
    def of(cls, settings: AuthenticationSettings, clock: Clock = SYSTEM_CLOCK) -> Authentication | None:
        """Return the check for a configuration, or None if authentication is disabled.
        Raises SettingsError: users are missing or not readable JSON, or policies are enabled without authentication."""
        if not settings.enabled:
            if settings.authorization_enabled:
                raise SettingsError(
                    "authorizationEnabled=true needs authenticationEnabled=true: users could be anybody"
                )
            return None
        if not settings.initial_user:
            raise SettingsError(
                "authenticationEnabled=true needs initAuthenticationUser: without it no user could send"
            )
        user = _decoded("initAuthenticationUser", settings.initial_user, _User)
        initial = UserInfo(username=user.username, password=user.password, user_type="Super", user_status="enable")
        return cls(
            initial,
            inner_credentials(settings.inner_credentials),
            codes_of(settings.white_list),
            freshness=Freshness(settings.signature_window_ms) if settings.full_signatures_only else None,
            clock=clock,
            grpc_window_ms=settings.grpc_window_ms,
        )

    @property
    def inner_name(self) -> str | None:
        """The user name of the brokers' own requests, or None."""
        return None if self._inner is None else self._inner.access_key

    def is_trusted(self, name: str | None) -> bool:
        """Return True if an authenticated user is a broker (the inner user) or an operator (a super user)."""
        if name is None:
            return False
        return name == self.inner_name or getattr(self.users().get(name), "user_type", None) == "Super"

    def refusal(self, connection: Connection, command: Command) -> str | None:
        """Return the remark with which the reference refuses a request, or None if the request is accepted."""
        fields = decode_fields(command)
        remark = self._unknown(fields, command)
        # Set the user even for codes of the white list, so that a handler never reads the user of an earlier request.
        connection.user = fields.get(ACCESS_KEY) if remark is None else None
        if remark is not None and command.code not in self._white_list:
            return remark
        return (
            None if self.authorize is None else self.authorize(connection.user, fields, command, connection.addresses)
        )

    def grpc_signer(self, date: str | None, signed: str | None) -> str:
        """Return the user who signed a gRPC call. ``date`` and ``signed`` are its metadata, see `CallSignature.of`.
        Raises HeaderError: no known user signed the call. The text is the reference's remark."""
        signature = CallSignature.of(date, signed)
        secret, remark = secret_of(signature.user, self._inner, self.users().get)
        signature.check(secret, remark, self._clock.now_ms(), self._grpc_window_ms)
        return signature.user

    def _unknown(self, fields: Mapping[str, str], command: Command) -> str | None:
        """Return the remark that refuses a request without a valid signature of a known user, or None."""
        name = fields.get(ACCESS_KEY)
        secret, remark = secret_of(name, self._inner, self.users().get)
        if remark is not None or name is None:
            return remark
        if not verify(fields, command.body, secret):
            return "check signature failed."
        # A full signature must be valid even if it is not required.
        try:
            signed = verify_fully(command.code, fields, command.body, secret)
        except HeaderError as error:
            return f"check signature failed: {error}."
        if self._freshness is None:
            return None
        if signed is None:
            return "check signature failed: fullSignatureRequired=true, and the request has none of these."
        # Check the freshness last. Only a valid signature can use a number; otherwise an attacker could use the numbers
        # of other users.
        fault = self._freshness.fault(name, signed, self._clock.now_ms())
        return None if fault is None else f"check signature failed: {fault}."


@dataclass(frozen=True, slots=True)
class CallSignature:
    """The unchecked signature of a gRPC call: the user's name, the signed date and the digest."""

    user: str
    date: str
    digest: bytes

    @classmethod
    def of(cls, date: str | None, signed: str | None) -> CallSignature:
        """Read the metadata ``x-mq-date-time`` and ``authorization`` of a call. The format differs between SDKs.
        Raises HeaderError: the user is missing, or the metadata is malformed. The text is the reference's remark.
        Source: grpc.md §2.2."""
        if not signed:
            raise HeaderError("username cannot be null.")
        if not date:
            raise HeaderError("datetime is null.")
        _, found, values = signed.partition(" ")
        if not found:
            raise HeaderError("authentication header is incorrect.")
        parts: dict[str, str] = {}
        for piece in values.split(","):
            pair = piece.strip().split("=")
            if len(pair) != 2:
                raise HeaderError(f"authentication keyValues length is incorrect, actual length={len(pair)}.")
            parts[pair[0]] = pair[1]
        try:
            digest = bytes.fromhex(parts.get("Signature", ""))
        except ValueError:
            raise HeaderError("create authentication context error.") from None
        return cls(parts.get("Credential", "").partition("/")[0], date, digest)

    def check(self, secret: str, remark: str | None, now_ms: int, window_ms: int) -> None:
        """Check the signature with the result of `secret_of`.
        Raises HeaderError: there is a ``remark``, the user signed with another secret, or the signed date differs from
        now by more than ``window_ms`` (0 means no limit)."""
        if remark is None and not hmac.compare_digest(
            hmac.digest(secret.encode(), self.date.encode(), "sha1"), self.digest
        ):
            remark = "check signature failed."
        if remark is None and window_ms and (away_ms := self._away_ms(now_ms)) > window_ms:
            remark = f"the call was signed at {self.date}, {away_ms} ms from now, and {window_ms} are allowed."
        if remark is not None:
            raise HeaderError(remark)

    def _away_ms(self, now_ms: int) -> int:
        """Return the difference between the signed date and now in ms. Raises HeaderError: the date is invalid."""
        try:
            signed = datetime.fromisoformat(self.date)
        except ValueError:
            raise HeaderError(f"datetime {self.date[:40]!r} is not like 20260131T235959Z.") from None
        return abs(now_ms - int(signed.replace(tzinfo=signed.tzinfo or UTC).timestamp() * 1000))


def secret_of(
    name: str | None, inner: Credentials | None, find: Callable[[str], UserInfo | None]
) -> tuple[str, str | None]:
    """Return the secret of a user, and the reference's remark if the user is unknown or disabled.
    ``inner``: the credentials of brokers, which replace a user with the same name."""
    if not name:
        return "", "username cannot be null."
    if inner is not None and name == inner.access_key:
        return inner.secret_key, None
    if (user := find(name)) is None:
        return "", f"User:{name} is not found."
    if user.user_status == "disable":
        return "", f"User:{name} is disabled."
    return user.password or "", None


def codes_of(white_list: str) -> frozenset[int]:
    """Return the request codes of a white list. Ignore other parts, such as names of requests to a proxy."""
    return frozenset(int(part) for part in white_list.split(",") if part.strip().isdecimal())


def inner_credentials(text: str) -> Credentials | None:
    """Return a server's credentials from the text of ``innerClientAuthenticationCredentials``, or None if it is empty.
    Raises SettingsError: the text is not readable JSON."""
    return _decoded("innerClientAuthenticationCredentials", text, Credentials) if text else None


def _decoded(key: str, text: str, value_type: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=value_type)
    except msgspec.MsgspecError as error:
        raise SettingsError(f"{key} cannot be read: {error}") from None
