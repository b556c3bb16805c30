"""Changes of topic and group attributes; the texts are those of a 5.4.0 broker (behaviour.md §9.5)."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.broker.operations.topics import GROUP_ATTRIBUTES, TOPIC_ATTRIBUTES, alter, parse_changes
from rmqkit.protocol.codes import RequestCode
from rmqkit.remoting import tasks

TYPES = "value is not in set: [UNSPECIFIED, MIXED, TRANSACTION, PRIORITY, FIFO, DELAY, LITE, NORMAL]"


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("", {}),
        (",", {}),
        ("+message.type=DELAY", {"+message.type": "DELAY"}),
        ("+message.type=DELAY,-reserve.time", {"+message.type": "DELAY", "-reserve.time": ""}),
        ("+a=b=c", {"+a": "b=c"}),
    ],
)
def test_a_text_of_changes(text, changes):
    assert parse_changes(text) == changes


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("message.type=DELAY", "add/alter attribute format is wrong: message.type"),
        ("+message.type", "delete attribute format is wrong: +message.type"),
        ("+", "delete attribute format is wrong: +"),
        ("+message.type=DELAY,+message.type=FIFO", "key duplication: +message.type"),
        ("+message.type=DELAY,x", "delete attribute format is wrong: x"),
    ],
)
def test_a_malformed_text(text, fault):
    with pytest.raises(ValueError) as raised:
        parse_changes(text)
    assert str(raised.value) == fault


def test_what_a_change_leaves():
    current = {"message.type": "NORMAL", "reserve.time": "1"}
    changes = {"+message.type": "FIFO", "-reserve.time": ""}
    assert alter(current, changes, TOPIC_ATTRIBUTES, is_new=False) == {"message.type": "FIFO"}
    assert alter({}, {"+cleanup.policy": "COMPACTION"}, TOPIC_ATTRIBUTES, is_new=True) == {
        "cleanup.policy": "COMPACTION"
    }
    assert alter({}, {"+priority.factor": "100"}, GROUP_ATTRIBUTES, is_new=True) == {"priority.factor": "100"}
    assert current == {"message.type": "NORMAL", "reserve.time": "1"}


@pytest.mark.parametrize(
    ("changes", "is_new", "fault"),
    [
        ({"-message.type": ""}, True, "only add attribute is supported while creating topic. key: message.type"),
        ({"message.type": "FIFO"}, True, "only add attribute is supported while creating topic. key: essage.type"),
        ({"message.type": "FIFO"}, False, "kv string format wrong."),
        ({"-": ""}, True, "kv string format wrong."),
        ({"+": "x"}, True, "kv string format wrong."),
        ({"+a": "b"}, True, "unsupported key: a"),
        ({"+message.type": "X"}, True, TYPES),
        ({"+message.type": ""}, True, TYPES),
        ({"+lite.topic.expiration": "43201"}, True, "value is not in range(-1, 43200)"),
        ({"+lite.topic.expiration": "abc"}, True, 'For input string: "abc"'),
        ({"+queue.type": "X"}, True, "value is not in set: [SimpleCQ, BatchCQ]"),
        ({"+reserve.time": "x"}, True, 'For input string: "x"'),
        ({"+reserve.time": str(1 << 63)}, True, f'For input string: "{1 << 63}"'),
        ({"-reserve.time": ""}, False, "attempt to delete a nonexistent key: reserve.time"),
        ({"+queue.type": "BatchCQ"}, False, "attempt to update an unchangeable attribute. key: queue.type"),
    ],
)
def test_refused_changes_of_a_topic(changes, is_new, fault):
    with pytest.raises(ValueError) as raised:
        alter({}, changes, TOPIC_ATTRIBUTES, is_new=is_new)
    assert str(raised.value) == fault


@pytest.mark.parametrize("value", ["-1", "101"])
def test_a_number_out_of_its_range(value):
    with pytest.raises(ValueError, match=r"^value is not in range\(0, 100\)$"):
        alter({}, {"+priority.factor": value}, GROUP_ATTRIBUTES, is_new=True)


async def test_two_lists_that_change_other_attributes_of_a_topic_both_count(cluster, monkeypatch):
    monkeypatch.setattr(tasks, "SLICE_SECONDS", -1)  # the loop runs one iteration before each topic

    async def change(**attributes):
        others = [{"topicName": f"Other{number}"} for number in range(3)]
        changed = {"topicName": "Both", "attributes": attributes}
        body = {"topicConfigList": [changed, *others]}
        return (await cluster.ask(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, body)).code

    assert await change() == 0
    answers = await asyncio.gather(change(**{"+message.type": "FIFO"}), change(**{"+reserve.time": "7"}))
    assert answers == [0, 0]
    both = cluster.standalone.broker.context.topics.get("Both")
    assert both.attributes == {"message.type": "FIFO", "reserve.time": "7"}
