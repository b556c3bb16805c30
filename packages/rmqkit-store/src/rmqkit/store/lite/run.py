"""The lite topics of plain sends that are stored together."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["LiteRun"]


class LiteRun:
    """The places of several messages in lite topics, in the order of the messages.

    Attributes:
        places: parent and lite topic of each message. The lite topic is empty for a message in no lite topic.
        slots, numbers, epochs: the slot of each lite topic, the number of the message there, and the life of the lite
            topic. The slot is -1, and the others are 0, for a message in no lite topic.
        ends: by slot, one past the number of the last message of the run.
        created: the slots of lite topics that did not exist.
        generation: `LiteTable.generation` after the numbers were assigned.
        store_timestamp: storeTimestamp of the messages.
    """

    __slots__ = ("created", "ends", "epochs", "generation", "numbers", "places", "slots", "store_timestamp")

    def __init__(self, places: Sequence[tuple[str, str]]) -> None:
        self.places = places
        self.slots: list[int] = []
        self.numbers: list[int] = []
        self.epochs: list[int] = []
        self.ends: dict[int, int] = {}
        self.created: list[int] = []
        self.generation = -1
        self.store_timestamp = 0

    @property
    def lite_topics(self) -> list[tuple[str, str]]:
        """Parent and lite topic of the messages in lite topics."""
        return [place for place in self.places if place[1]]
