"""What the classes of handlers share: they work with the broker's parts and say beside each method what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rmqkit.broker.parts import Parts
from rmqkit.protocol.codes import RequestCode
from rmqkit.remoting.admission import for_admins
from rmqkit.remoting.dispatch import Dispatch, Lane

__all__ = ["Handlers", "answers"]

LANE_REQUESTS_MAX = 10_000
"""Requests of a lane under way at a time (the thread pools' queues of behaviour.md §2.4)."""

M = TypeVar("M", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class _Answered:
    code: RequestCode
    admins_only: bool
    lane: str | None


def answers(code: RequestCode, *, admins_only: bool = False, lane: str | None = None) -> Callable[[M], M]:
    """Make a method of `Handlers` the one that answers a code.

    Args:
        admins_only: it changes the server; who may ask is what ``adminAllowedAddresses`` says.
        lane: bounds the requests under way, together with the others of that name in the class.
    """

    def mark(method: M) -> M:
        method.__dict__.setdefault("answered", []).append(_Answered(code, admins_only, lane))
        return method

    return mark


class Handlers:
    """Methods that answer requests, each marked with `answers`."""

    def __init__(self, parts: Parts) -> None:
        self._settings = parts.settings
        self._identity = parts.identity
        self._clock = parts.clock
        self._store = parts.store
        self._topics = parts.topics
        self._groups = parts.groups
        self._offsets = parts.offsets
        self._clients = parts.clients
        self._long_polling = parts.long_polling
        self._durability = parts.durability
        self._queue_locks = parts.queue_locks
        self._schedule = parts.schedule
        self._statistics = parts.statistics
        self._told = parts.told
        self._ask_namesakes = parts.ask_namesakes
        self._lanes: dict[str, Lane] = {}

    def register(self, dispatch: Dispatch) -> None:
        """Answer the codes from a port; lanes are shared by all ports."""
        for name, method in vars(type(self)).items():
            for answered in getattr(method, "answered", ()):
                handler = getattr(self, name)
                if answered.admins_only:
                    handler = for_admins(handler, self._settings.admin_addresses)
                dispatch.register(answered.code, handler, self._lane(answered.lane))

    def _lane(self, name: str | None) -> Lane | None:
        return None if name is None else self._lanes.setdefault(name, Lane(name, LANE_REQUESTS_MAX))
