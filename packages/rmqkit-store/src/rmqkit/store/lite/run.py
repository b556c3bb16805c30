"""The lite topics of plain sends that are stored together."""

from __future__ import annotations

from collections.abc import Iterator

from rmqkit.protocol.core import Sends

__all__ = ["LiteRun"]


class LiteRun:
    """Messages that are stored together, of which some are in lite topics.

    Attributes:
        sends: the messages, with their numbers.
        created: the slots of lite topics that did not exist.
        generation: `LiteTable.generation` after the numbers were assigned.
    """

    __slots__ = ("created", "generation", "sends")

    def __init__(self, sends: Sends) -> None:
        self.sends = sends
        self.created: list[int] = []
        self.generation = -1

    def lite_topics(self) -> Iterator[tuple[str, str]]:
        """Yield parent and lite topic of the messages in lite topics."""
        for place in self.sends.lite:
            if place[1]:
                yield place
