"""Logins: users and their roles, sessions with a cookie, and users in a file.

=============  ==============================================================================
role           permission
=============  ==============================================================================
viewer         reads only: the console sends no requests that change something
operator       also sends messages, and pushes messages to consumers
admin          can do everything
=============  ==============================================================================

A *cluster's user* logs in with the access key and the secret of an ACL 2.0 user. Two signed requests verify them: a
request with the secret must pass, a request with a wrong secret must fail. A cluster that accepts both has no users.
Every later request is signed as this user, and the broker decides. A ``Super`` user is an admin, others are operators.

A *file's user* has a line ``name:role:scrypt$n$r$p$salt$hash`` in a file. ``rmq console user`` writes such lines.
Requests are signed as the console's own user.

The key of a session is 32 random bytes in a cookie. Secrets stay in memory. A session expires after 8 h without a
request, and after 24 h in any case.
"""

from __future__ import annotations

import base64
import binascii
import enum
import hashlib
import hmac
import os
import secrets
import shlex
from collections import OrderedDict, deque
from pathlib import Path

from msgspec import Struct

from rmqkit.clock import Clock
from rmqkit.errors import SettingsError
from rmqkit.remoting.authentication import Credentials

__all__ = ["LOCAL", "FileUsers", "LoginRefused", "Role", "Sessions", "Tries", "User", "password_line"]

IDLE_MS, WHOLE_MS = 8 * 3_600_000, 24 * 3_600_000
SESSIONS_MAX = 1_000
TRIES_A_MINUTE = 5
_N, _R, _P = 1 << 14, 8, 1
_SCRYPT_BYTES = 64 << 20


class Role(enum.StrEnum):
    """The role of a user."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    @property
    def may_change(self) -> bool:
        """Return True if the role allows any change."""
        return self is not Role.VIEWER


class User(Struct, frozen=True):
    """A user. ``credentials`` sign requests to brokers; None: the console's own credentials sign them."""

    name: str
    role: Role
    credentials: Credentials | None = None


class LoginRefused(Exception):
    """A login is refused. The text is the reason, for the user and for the audit."""


LOCAL = User("local", Role.ADMIN)
"""The user of a console on loopback without logins."""


class _Session(Struct):
    user: User
    began_ms: float
    seen_ms: float


class Sessions:
    """The sessions of logged-in users, by the text of the cookie. If there are too many sessions, the least recently
    used sessions are dropped. Use it only on the event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: OrderedDict[str, _Session] = OrderedDict()

    def begin(self, user: User) -> str:
        """Start a session and return the text for its cookie."""
        # Use a new text for each login: a cookie that an attacker has set must not become a session.
        text = secrets.token_urlsafe(32)
        now_ms = self._clock.monotonic_ms()
        self._known[text] = _Session(user, now_ms, now_ms)
        while len(self._known) > SESSIONS_MAX:
            self._known.popitem(last=False)
        return text

    def user(self, text: str) -> User | None:
        """Return the user of a session; None if there is no such session, or if it has expired."""
        session = self._known.get(text)
        if session is None:
            return None
        now_ms = self._clock.monotonic_ms()
        if now_ms - session.seen_ms > IDLE_MS or now_ms - session.began_ms > WHOLE_MS:
            del self._known[text]
            return None
        session.seen_ms = now_ms
        self._known.move_to_end(text)
        return session.user

    def end(self, text: str) -> None:
        self._known.pop(text, None)


class Tries:
    """A limit on failed logins: `TRIES_A_MINUTE` from one address, and ten times as many in total. A try is counted at
    its start, so that parallel tries count. A successful try is removed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tried: deque[tuple[float, str]] = deque()

    def may_try(self, address: str) -> bool:
        """Count a try and return True. At the limit, return False and do not count the try."""
        now_ms = self._clock.monotonic_ms()
        while self._tried and now_ms - self._tried[0][0] > 60_000:
            self._tried.popleft()
        own = sum(one == address for _, one in self._tried)
        # The total limit stops tries from many addresses, and also limits the memory for tries.
        if own >= TRIES_A_MINUTE or len(self._tried) >= 10 * TRIES_A_MINUTE:
            return False
        self._tried.append((now_ms, address))
        return True

    def succeeded(self, address: str) -> None:
        """Remove the newest try of an address, because it succeeded."""
        for at in reversed(range(len(self._tried))):
            if self._tried[at][1] == address:
                del self._tried[at]
                return


class FileUsers:
    """The users in a file. Raises SettingsError: the file cannot be read, or a line is not valid."""

    def __init__(self, path: Path) -> None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"users file {path}: {error}") from None
        self._users: dict[str, tuple[Role, str]] = {}
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.startswith("#"):
                continue
            name, _, rest = line.strip().partition(":")
            role, _, password = rest.partition(":")
            if not name or role not in set(Role) or not password.startswith("scrypt$"):
                write = f"rmq console user {shlex.quote(name or 'anna')}"
                raise SettingsError(
                    f"{path}:{number}: {name or 'line'} is not name:role:scrypt$…; write it with: {write}"
                )
            self._users[name] = Role(role), password

    def check(self, name: str, password: str) -> User | None:
        """Return the user if name and password are right, or None. The check takes about 50 ms of CPU in any case."""
        # The check of an unknown name takes the same time, so that the time does not reveal the names of users.
        role, kept = self._users.get(name, (Role.VIEWER, f"scrypt${_N}${_R}${_P}$AAAA$"))
        is_right = _is_password(password, kept)
        return User(name, role) if is_right and name in self._users else None


def password_line(name: str, role: Role, password: str) -> str:
    """Return a line for a file of users."""
    salt = os.urandom(16)
    return f"{name}:{role}:{_hashed(password, salt)}"


def _hashed(password: str, salt: bytes, n: int = _N, r: int = _R, p: int = _P) -> str:
    found = hashlib.scrypt(password.encode(), salt=salt, n=n, r=r, p=p, maxmem=_SCRYPT_BYTES)
    return f"scrypt${n}${r}${p}${base64.b64encode(salt).decode()}${base64.b64encode(found).decode()}"


def _is_password(password: str, kept: str) -> bool:
    try:
        _, n, r, p, salt, _ = kept.split("$")
        made = _hashed(password, base64.b64decode(salt), int(n), int(r), int(p))
    except (ValueError, binascii.Error):
        return False
    return hmac.compare_digest(made, kept)
