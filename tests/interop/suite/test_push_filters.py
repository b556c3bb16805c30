"""The messages of a topic that a consumer gets: tags, SQL92. Source: behaviour.md §6, §8.3, §8.6."""

from __future__ import annotations

import pytest

from rmqkit import PeerRefused, Pulling, SettingsError
from tests.interop.suite.consuming import Received, connection, eventually, is_committed, send
from tests.interop.suite.scene import Scene


async def test_tags_choose_messages(scene: Scene) -> None:
    """behaviour.md §6.1."""
    await scene.create_topic()
    for tag in "ABCA":
        await send(scene, tag, tags=tag)
    received = Received()
    consumer = scene.push_consumer()
    consumer.subscribe(scene.topic, " A ||C|| ", received)
    await consumer.start()
    await is_committed(scene, 4)
    assert received.bodies == ["A", "C", "A"]


async def test_without_an_expression_everything_comes(scene: Scene) -> None:
    """behaviour.md §6.1: `*`, empty."""
    await scene.create_topic()
    await send(scene, "with", tags="A")
    await send(scene, "without")
    star, empty = Received(), Received()
    for group, expression, received in (("star", "*", star), ("empty", "", empty)):
        consumer = scene.push_consumer(f"{scene.group}-{group}")
        consumer.subscribe(scene.topic, expression, received)
        await consumer.start()
    assert await star.at_least(2) == await empty.at_least(2) == ["with", "without"]


async def test_tags_with_equal_hashes_are_distinguished(scene: Scene) -> None:
    """behaviour.md §6.1: the client compares the text."""
    await scene.create_topic()
    for tag in ("Aa", "BB", "Aa", "BB"):
        await send(scene, tag, tags=tag)
    received = Received()
    consumer = scene.push_consumer()
    consumer.subscribe(scene.topic, "BB", received)
    await consumer.start()
    await is_committed(scene, 4)
    assert received.bodies == ["BB", "BB"]


async def test_a_message_without_a_tag_is_not_for_who_wants_tags(scene: Scene) -> None:
    """behaviour.md §6.1."""
    await scene.create_topic()
    await send(scene, "without")
    await send(scene, "with", tags="A")
    received = Received()
    consumer = scene.push_consumer()
    consumer.subscribe(scene.topic, "A", received)
    await consumer.start()
    await is_committed(scene, 2)
    assert received.bodies == ["with"]


async def test_the_offset_passes_what_nobody_wants(scene: Scene) -> None:
    """behaviour.md §8.6: NO_MATCHED_MSG."""
    await scene.create_topic()
    for _ in range(3):
        await send(scene, "x", tags="A")
    received = Received()
    consumer = scene.push_consumer()
    consumer.subscribe(scene.topic, "B", received)
    await consumer.start()
    await is_committed(scene, 3)
    assert received.bodies == []


async def test_an_expression_of_nothing_is_refused(scene: Scene) -> None:
    """behaviour.md §6.1: `||`."""
    with pytest.raises(SettingsError, match=scene.topic):
        scene.push_consumer().subscribe(scene.topic, "||", Received())


async def test_sql_chooses_by_properties(scene: Scene) -> None:
    """behaviour.md §6.2, §6.3."""
    await scene.create_topic()
    for i in range(12):
        await send(scene, str(i), tags="AB"[i % 2], properties={"n": str(i)} | ({"region": "east"} if i > 5 else {}))
    received = Received()
    # The offset passes the last message when a pull finds no match.
    consumer = scene.push_consumer(pull=Pulling(suspend_ms=500))
    consumer.subscribe(
        scene.topic, "(n BETWEEN 2 AND 3 OR region = 'east') AND TAGS = 'A'", received, expression_type="SQL92"
    )
    await consumer.start()
    await is_committed(scene, 12)
    assert received.bodies == ["2", "6", "8", "10"]


async def test_sql_that_cannot_be_parsed_makes_the_start_fail(scene: Scene) -> None:
    """behaviour.md §8.3: CHECK_CLIENT_CONFIG."""
    await scene.create_topic()
    consumer = scene.push_consumer()
    consumer.subscribe(scene.topic, "n BETWEEN", Received(), expression_type="SQL92")
    with pytest.raises(PeerRefused, match="code 23"):
        await consumer.start()


async def test_a_changed_subscription_counts_from_then_on(scene: Scene) -> None:
    """behaviour.md §8.3: subscribe after start."""
    await scene.create_topic()
    received = Received()
    consumer = scene.push_consumer(pull=Pulling(suspend_ms=1000))
    consumer.subscribe(scene.topic, "A", received)
    await consumer.start()
    await send(scene, "0", tags="A")
    await received.at_least(1)
    consumer.subscribe(scene.topic, "B", received)
    await eventually(
        lambda: connection(scene), lambda seen: seen.subscription_table[scene.topic].sub_string == "B", "the new tag"
    )
    await send(scene, "1", tags="A")
    await send(scene, "2", tags="B")
    await is_committed(scene, 3)
    assert received.bodies == ["0", "2"]


async def test_one_consumer_filters_each_topic_in_its_own_way(scene: Scene) -> None:
    """behaviour.md §6.1, §6.2."""
    await scene.create_topic()
    other = await scene.create_topic(f"{scene.topic}-other")
    received = Received()
    consumer = scene.push_consumer()
    consumer.subscribe(scene.topic, "A", received)
    consumer.subscribe(other, "n > 1", received, expression_type="SQL92")
    await consumer.start()
    for i in range(3):
        await send(scene, f"here {i}", tags="AB"[i % 2])
        await send(scene, f"there {i}", topic=other, properties={"n": str(i)})
    await is_committed(scene, 3)
    await is_committed(scene, 3, topic=other)
    assert sorted(received.bodies) == ["here 0", "here 2", "there 2"]
