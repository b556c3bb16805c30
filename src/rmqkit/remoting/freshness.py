"""Whether a signed request is new: each is taken once, and not long after it was signed.

A client numbers what it signs, within a *session* of its own. Per session the highest number is kept and which of the
`_NUMBERS_MAX` below it came: those may overtake each other, what is further behind counts as seen. Sessions whose last
request is older than the window are forgotten, as are all with a restart; of `_SESSIONS_MAX` that are full of fresh
requests none is. A request is only looked at when its signature is right, so strangers fill nothing. Every broker keeps
its own: what one took may be sent to another that has the same user, within the window. Loop only.
"""

from __future__ import annotations

from dataclasses import dataclass

from rmqkit.protocol.acl import FullSignature

__all__ = ["Freshness"]

_NUMBERS_MAX = 8192
_SESSIONS_MAX = 10_000


@dataclass(slots=True)
class _Session:
    highest: int
    seen: int
    signed_ms: int


class Freshness:
    """Remembers what was signed within ``window_ms``, in either direction: clocks differ."""

    def __init__(self, window_ms: int) -> None:
        self._window_ms = window_ms
        self._sessions: dict[tuple[str, str], _Session] = {}

    def fault(self, user: str, signature: FullSignature, now_ms: int) -> str | None:
        """Why a request that was signed rightly is not new, or None; it is old from now on."""
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
            session.seen = (session.seen << min(ahead, _NUMBERS_MAX) | 1) & ((1 << _NUMBERS_MAX) - 1)
            session.highest = signature.number
        elif -ahead >= _NUMBERS_MAX or session.seen >> -ahead & 1:
            return "it came before"
        else:
            session.seen |= 1 << -ahead
        session.signed_ms = max(session.signed_ms, signature.signed_ms)
        return None

    def _has_room(self, now_ms: int) -> bool:
        """Forget sessions whose requests would all be too old; whether there is room then."""
        oldest_ms = now_ms - self._window_ms
        self._sessions = {key: one for key, one in self._sessions.items() if one.signed_ms >= oldest_ms}
        return len(self._sessions) < _SESSIONS_MAX
