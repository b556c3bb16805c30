"""The two steps of a change: a form leads to a *review* of the exact requests, and the review's button sends them once.

The review has a token. If a user presses the button twice, or returns to the page, the page shows the first result. The
console checks the reviewed state again before it sends a request: if another user has changed it since, it refuses the
change. A change that cannot be undone requires a typed name. 1,000 reviews are held in memory for 10 minutes. Loop
only.
"""

from __future__ import annotations

import asyncio
import enum
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import Struct

from rmqkit.clock import Clock
from rmqkit.sentences import _

KEPT_MS = 600_000
REVIEWS_MAX = 1_000


class Right(enum.Enum):
    """The right that a user needs for a change."""

    SEND = "send messages, replay dead letters"
    ADMINISTER = "change the cluster: of a cluster's user the broker decides"
    CONSOLE = "change the console's own rules, which no broker knows"


class Review(Struct):
    """A change to confirm. ``Ask.review`` and ``forms.change`` fill in the fields that they know.

    Attributes:
        user, env: the user who requested the change and may confirm it, and the cluster.
        right: the right that the user needs to confirm it.
        action, target: the values for the audit.
        rows: names and values to show.
        requests: the requests that will be sent, in words.
        command: the equivalent command line.
        back: the address of its form.
        run: makes the change.
        typed: the text that the user must type, such as the topic's name; or empty.
        moves: rows of a table, for example one for each queue.
        look: returns the current state by name; `seen` is its result for the review.
        warning: the part that cannot be undone, or empty.
    """

    rows: list[tuple[str, str]]
    requests: list[str]
    run: Callable[[], Awaitable[Any]]
    action: str = ""
    target: str = ""
    command: str = ""
    back: str = ""
    right: Right = Right.ADMINISTER
    user: str = ""
    env: str = ""
    typed: str = ""
    moves: list[Any] = []
    look: Callable[[], Awaitable[dict[str, str]]] | None = None
    seen: dict[str, str] = {}
    warning: str = ""
    made_ms: float = 0.0
    done: asyncio.Future[Any] | None = None


def difference(seen: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return the differences: a line for each name whose value has changed."""
    absent = _("not there")
    return [
        _("{name}: {before} → {after}", name=name, before=seen.get(name, absent), after=now.get(name, absent))
        for name in sorted({*seen, *now})
        if seen.get(name) != now.get(name)
    ]


class Reviews:
    """Open reviews by token."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: OrderedDict[str, Review] = OrderedDict()

    def open(self, review: Review) -> str:
        """Store a review and return its token."""
        now_ms = self._clock.monotonic_ms()
        while self._known and (
            len(self._known) >= REVIEWS_MAX or now_ms - next(iter(self._known.values())).made_ms > KEPT_MS
        ):
            self._known.popitem(last=False)
        token = secrets.token_urlsafe(16)
        review.made_ms = now_ms
        self._known[token] = review
        return token

    def find(self, token: str, user: str) -> Review | None:
        """Return the review if it belongs to the user and has not expired."""
        review = self._known.get(token)
        # Check the user: a token that another user has seen must not confirm the change.
        if review is None or review.user != user or self._clock.monotonic_ms() - review.made_ms > KEPT_MS:
            return None
        return review
