"""The number of retries of a message after a handler failed, and the delay before each retry."""

from __future__ import annotations

import random

from msgspec import Struct

from rmqkit.errors import SettingsError
from rmqkit.times import Duration, duration_ms

_EXPONENT_MAX = 64


class Retry(Struct, frozen=True, kw_only=True):
    """The retries of a handler. The delays grow. Each delay has a random part, so that messages that failed together
    are not delivered together again::

        @consumer.on("Orders", retry=Retry(times=5, first=1, longest=60))

    The broker's timer has a precision of seconds. A broker without a timer (4.x) uses the next longer delay level.

    Attributes:
        times: the number of retries before the message goes to the dead letters; None means ``retries_max`` of the
            settings.
        first: the delay of the first retry, in seconds or as a `timedelta`.
        factor: each delay is the previous delay times this factor.
        longest: the maximum delay, without its random part.
        jitter: the random part: 0.2 makes each delay up to 20 % shorter or longer.

    Raises SettingsError: a number is out of its bounds. Raises TimeIllegal: a delay is not valid.
    """

    times: int | None = None
    first: Duration = 10
    factor: float = 2
    longest: Duration = 7200
    jitter: float = 0.2

    def __post_init__(self) -> None:
        if self.times is not None and self.times < 0:
            raise SettingsError(f"times of Retry is {self.times}: it must be at least 0")
        if not 1 <= self.factor <= 1000:
            raise SettingsError(f"factor of Retry is {self.factor}: it must be at least 1 and at most 1000")
        if not 0 <= self.jitter <= 1:
            raise SettingsError(f"jitter of Retry is {self.jitter}: it must be at least 0 and at most 1")
        duration_ms(self.first, "first")
        duration_ms(self.longest, "longest")

    def delay_ms(self, retries: int) -> int:
        """Return the delay before the next attempt in ms. ``retries``: number of previous retries."""
        grown_ms = duration_ms(self.first, "first") * self.factor ** min(retries, _EXPONENT_MAX)
        bounded_ms = min(grown_ms, duration_ms(self.longest, "longest"))
        return round(bounded_ms * random.uniform(1 - self.jitter, 1 + self.jitter))
