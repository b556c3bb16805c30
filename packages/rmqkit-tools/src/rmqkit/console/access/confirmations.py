"""A change takes two steps: a form leads to a *review* of the exact requests, and its button does it, once.

The review has a token. Whoever presses the button twice, or comes back to the page, gets the result of the first time.
What was reviewed is looked at once more before anything is sent: a change by somebody else meanwhile ends it. What
cannot be taken back asks for a name to be typed. Reviews are kept in memory for 10 minutes, 1,000 of them. Loop only.
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
    """What a user needs for a change."""

    SEND = "send messages, replay dead letters"
    ADMINISTER = "change the cluster: of a cluster's user the broker decides"
    CONSOLE = "change the console's own rules, which no broker knows"


class Review(Struct):
    """What is to be done. ``Ask.review`` and ``forms.change`` fill in what they know.

    Attributes:
        user, env: who asked for it, who alone may confirm it, and where.
        right: what the user needs to confirm it.
        action, target: as the audit has them.
        rows: what a person should see: name and value.
        requests: the requests that will be sent, in words.
        command: the same on the command line.
        back: where its form is.
        run: does it.
        typed: what has to be typed to confirm it, such as the topic's name; empty: nothing.
        moves: rows of a table, as of queues.
        look: what is there, by name; `seen` is what it told for the review.
        warning: what cannot be taken back, or empty.
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
    """What is not as it was: a line for each name."""
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
        """Keep a review; its token."""
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
        """The review, if it is that user's and not too old."""
        review = self._known.get(token)
        # Of the same user alone: a token that somebody else has seen confirms nothing.
        if review is None or review.user != user or self._clock.monotonic_ms() - review.made_ms > KEPT_MS:
            return None
        return review
