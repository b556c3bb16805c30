"""Tag subscriptions (``FilterAPI``): ``A || B`` becomes tag codes for brokers and tags for clients.

A broker compares only the 32-bit hashes of tags. Two tags may have the same hash, so the client also compares the
texts.
Source: behaviour.md §6.1, store.md §17.1.
"""

from __future__ import annotations

from rmqkit.protocol.properties import java_hash
from rmqkit.protocol.schemas.clients import SubscriptionData

ALL = "*"
TAG = "TAG"
SQL92 = "SQL92"


def is_tag_type(expression_type: str | None) -> bool:
    """Return True if an expression type is TAG. A missing type means TAG, too."""
    return expression_type is None or expression_type in ("", TAG)


def subscription(
    topic: str, expression: str | None, *, expression_type: str = TAG, version: int = 0
) -> SubscriptionData:
    """Return the subscription that a client sends to brokers, which filter by it.

    Args:
        topic: the subscribed topic.
        expression: ``*``, an empty text or None for all messages; ``A || B`` for tags; or a text of another type.
        version: ms since the epoch. A broker uses the newest subscription of a group.

    Raises:
        ValueError: a tag expression contains no tag.
    """
    text = (expression or "").strip()
    if not is_tag_type(expression_type):
        return SubscriptionData(topic=topic, sub_string=text, expression_type=expression_type, sub_version=version)
    if text in ("", ALL):
        return SubscriptionData(topic=topic, sub_string=ALL, sub_version=version)
    tags = list(dict.fromkeys(tag for part in text.split("||") if (tag := part.strip())))
    if not tags:
        raise ValueError(f"subscription expression {expression!r} contains no tag: use '*' or 'A || B'")
    return SubscriptionData(
        topic=topic, sub_string=text, tags_set=tags, code_set=[java_hash(tag) for tag in tags], sub_version=version
    )


def codes_of(data: SubscriptionData) -> frozenset[int] | None:
    """Return the tag codes of a subscription, or None if tags do not restrict it."""
    if data.sub_string in ("", ALL) or not is_tag_type(data.expression_type):
        return None
    return frozenset(data.code_set)


def matches_tags(data: SubscriptionData, tags: str | None) -> bool:
    """Return True if a subscription includes the tag of a message. This is the exact check of the client."""
    return not data.tags_set or (tags is not None and tags in data.tags_set)
