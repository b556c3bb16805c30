"""The two steps of a change: a form leads to a *review* of the exact requests, and a button sends the requests once.

The review has a token. If a user presses the button twice, or returns to the page, the page shows the first result.
Before it sends a request, the console checks the reviewed state again. If another user has changed the state, the
console refuses the change. A change that cannot be undone requires a typed name. At most 1,000 reviews are in memory,
each for 10 minutes. Use this module only on the event loop.
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
    """A change that a user has to confirm. ``Ask.review`` and ``forms.change`` set some of the fields.

    Attributes:
        user, env: the user who requested the change and can confirm it, and the cluster.
        right: the right that the user needs for the confirmation.
        action, target: the values for the audit.
        rows: the names and values to show.
        requests: the requests that will be sent, in words.
        command: the equivalent command line.
        back: the address of the form.
        run: the function that makes the change.
        typed: the text that the user must type, such as the topic's name; or empty.
        moves: the rows of a table, for example one row for each queue.
        look: a function that returns the current state by name; ``seen`` is its result for the review.
        warning: a text about the part that cannot be undone, or empty.
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
    """Return a line for each name with a changed value."""
    absent = _("not there")
    return [
        _("{name}: {before} → {after}", name=name, before=seen.get(name, absent), after=now.get(name, absent))
        for name in sorted({*seen, *now})
        if seen.get(name) != now.get(name)
    ]


class Reviews:
    """The open reviews by token."""

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
        """Return the review of a token; None if it belongs to another user or has expired."""
        review = self._known.get(token)
        # Check the user: a user who has only seen the token must not confirm the change.
        if review is None or review.user != user or self._clock.monotonic_ms() - review.made_ms > KEPT_MS:
            return None
        return review
