"""Classes whose methods answer requests: beside each method stands which code it answers, and for whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rmqkit.remoting.admission import AdminAddresses, for_admins
from rmqkit.remoting.dispatch import Dispatch, Lane

__all__ = ["Answering", "answers"]

LANE_REQUESTS_MAX = 10_000
"""Requests of a lane under way at a time (the thread pools' queues of behaviour.md §1.1, §2.4)."""

M = TypeVar("M", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class _Answered:
    code: int
    admins_only: bool
    lane: str | None


def answers(code: int, *, admins_only: bool = False, lane: str | None = None) -> Callable[[M], M]:
    """Make a method of an `Answering` the one that answers a code.
    ``admins_only``: it changes the server; who may ask is what ``adminAllowedAddresses`` says.
    ``lane``: bounds the requests under way, together with the others of that name in the class."""

    def mark(method: M) -> M:
        method.__dict__.setdefault("answered", []).append(_Answered(code, admins_only, lane))
        return method

    return mark


class Answering:
    """Has methods that answer requests, each marked with `answers`."""

    def __init__(self, admins: AdminAddresses) -> None:
        self._admins = admins
        self._lanes: dict[str, Lane] = {}

    def register(self, dispatch: Dispatch) -> None:
        """Answer the codes from a port; lanes are shared by all ports."""
        for name, method in vars(type(self)).items():
            for answered in getattr(method, "answered", ()):
                handler = getattr(self, name)
                if answered.admins_only:
                    handler = for_admins(handler, self._admins)
                dispatch.register(answered.code, handler, self._lane(answered.lane))

    def _lane(self, name: str | None) -> Lane | None:
        return None if name is None else self._lanes.setdefault(name, Lane(name, LANE_REQUESTS_MAX))
