"""Attributes of topics and groups (``TopicAttributes``, ``SubscriptionGroupAttributes``, ``AttributeUtil``).

A change is a map of signed names: ``+name`` → value adds or alters, ``-name`` deletes; a topic request writes it as
``+message.type=DELAY,-reserve.time``. Stored are the bare names. Texts of refusals are the reference's, seen from a
5.4.0 broker. Source: behaviour.md §9.5; store.md §9.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["GROUP_ATTRIBUTES", "TOPIC_ATTRIBUTES", "Attribute", "alter", "parse_changes"]

_LONG = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True, slots=True)
class Attribute:
    """What an attribute may hold: one of some words, or a whole number in a range."""

    values: tuple[str, ...] | range
    is_changeable: bool = True

    def check(self, value: str) -> None:
        """Raises ValueError: the value is not allowed."""
        if isinstance(self.values, tuple):
            if value not in self.values:
                raise ValueError(f"value is not in set: [{', '.join(self.values)}]")
            return
        try:
            number = int(value)
        except ValueError:
            number = _LONG.stop
        if number not in _LONG:
            raise ValueError(f'For input string: "{value}"')
        if number not in self.values:
            raise ValueError(f"value is not in range({self.values.start}, {self.values.stop - 1})")


TOPIC_ATTRIBUTES: Mapping[str, Attribute] = {
    "queue.type": Attribute(("SimpleCQ", "BatchCQ"), is_changeable=False),
    "cleanup.policy": Attribute(("DELETE", "COMPACTION"), is_changeable=False),
    "message.type": Attribute(("UNSPECIFIED", "MIXED", "TRANSACTION", "PRIORITY", "FIFO", "DELAY", "NORMAL")),
    "reserve.time": Attribute(_LONG),
}
GROUP_ATTRIBUTES: Mapping[str, Attribute] = {"priority.factor": Attribute(range(101))}


def parse_changes(text: str) -> dict[str, str]:
    """Signed name → value, from the text of a topic request. Raises ValueError: it is malformed."""
    changes: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if equals and "+" not in name:
            raise ValueError(f"add/alter attribute format is wrong: {name}")
        if not equals and "-" not in name:
            raise ValueError(f"delete attribute format is wrong: {name}")
        if name in changes:
            raise ValueError(f"key duplication: {name}")
        changes[name] = value
    return changes


def alter(
    current: Mapping[str, str], changes: Mapping[str, str], known: Mapping[str, Attribute], *, is_new: bool
) -> dict[str, str]:
    """The attributes after a change.
    Raises ValueError: an unknown or fixed name, a value that is not allowed, a deletion of what is not there."""
    attributes = dict(current)
    for signed, value in changes.items():
        sign, name = signed[:1], signed[1:]
        if is_new and name and sign != "+":
            raise ValueError(f"only add attribute is supported while creating topic. key: {name}")
        if sign not in ("+", "-") or not name:
            raise ValueError("kv string format wrong.")
        attribute = known.get(name)
        if attribute is None:
            raise ValueError(f"unsupported key: {name}")
        if sign == "-" and name not in current:
            raise ValueError(f"attempt to delete a nonexistent key: {name}")
        if not is_new and not attribute.is_changeable:
            raise ValueError(f"attempt to update an unchangeable attribute. key: {name}")
        if sign == "+":
            attribute.check(value)
            attributes[name] = value
        else:
            del attributes[name]
    return attributes
