"""Static topics, created as mqadmin's updateStaticTopic does."""

from __future__ import annotations

from typing import Any

import msgspec

from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command

QUEUES = {5: 0, 3: 1}
"""Queues by their numbers in the topic, with their numbers on the broker. The other six queues are on no broker."""


def creation(topic: str, broker_name: str, **changes: Any) -> Command:
    """Return request 513 for a topic of 8 queues, with `QUEUES` on this broker. ``changes`` replace parts of its
    body.
    """
    current = {"bname": broker_name, "gen": 0, "logicOffset": 0, "startOffset": 0, "endOffset": -1}
    detail: dict[str, Any] = {
        "topic": topic,
        "bname": broker_name,
        "scope": "__global__",
        "totalQueues": 8,
        "epoch": 1000,
        "dirty": False,
        "currIdMap": QUEUES,
        "hostedQueues": {number: [{**current, "queueId": local}] for number, local in QUEUES.items()},
    }
    fields = {
        "topic": topic,
        "defaultTopic": "TBW102",
        "readQueueNums": "2",
        "writeQueueNums": "2",
        "perm": "6",
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": "0",
        "order": "false",
        "attributes": "",
        "force": "false",
    }
    body = msgspec.json.encode(detail | changes)
    return Command(RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC, fields=fields, body=body)
