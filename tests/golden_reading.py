"""Golden stores as our client reads them: their queues, and their messages under the names of the manifest."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from rmqkit.protocol.fastjson import loads
from rmqkit.protocol.message import ReceivedMessage
from tests.golden_stores import GoldenStore

__all__ = ["as_listed", "expected_messages", "order", "simple_queues"]


def simple_queues(golden: GoldenStore) -> list[dict[str, Any]]:
    """Return the queues of the manifest, without those of topics that have BatchConsumeQueues."""
    left_out = batch_topics(golden.root)
    return [queue for queue in golden.manifest["queues"] if queue["topic"] not in left_out]


def expected_messages(golden: GoldenStore) -> list[dict[str, Any]]:
    """Return the messages of the manifest in `simple_queues`, with the keys of `as_listed`, in `order`."""
    left_out = batch_topics(golden.root)
    listed = [message for message in golden.manifest["messages"] if message["topic"] not in left_out]
    for message in listed:
        message["sysFlagAfterDecode"] &= ~1  # a 4.9 client leaves the compressed bit set
    return [{key: message.get(key) for key in LISTED} for message in sorted(listed, key=order)]


def order(message: dict[str, Any]) -> tuple[Any, ...]:
    """Return a sort key: queue, then offset."""
    return message["topic"], message["queueId"], message["queueOffset"]


def batch_topics(store: Path) -> set[str]:
    """Return the topics whose queues are BatchConsumeQueues."""
    table = loads((store / "config/topics.json").read_bytes())["topicConfigTable"]
    return {name for name, config in table.items() if config.get("attributes", {}).get("queue.type") == "BatchCQ"}


def as_listed(message: ReceivedMessage) -> dict[str, Any]:
    """Return a message under the names of the manifest."""
    return {
        "topic": message.topic,
        "queueId": message.queue_id,
        "queueOffset": message.queue_offset,
        "physicalOffset": message.physical_offset,
        "size": message.store_size,
        "tags": message.tags,
        "msgId": message.msg_id,
        "offsetMsgId": message.offset_msg_id,
        "bodyCRC": message.body_crc,
        "bodyLength": len(message.body),
        "bodySha256": hashlib.sha256(message.body).hexdigest(),
        "sysFlagAfterDecode": message.sys_flag,
        "flag": message.flag,
        "bornTimestamp": message.born_timestamp,
        "storeTimestamp": message.store_timestamp,
        "bornHost": "/" + message.born_host,
        "storeHost": "/" + message.store_host,
        "reconsumeTimes": message.reconsume_times,
        "preparedTransactionOffset": message.prepared_transaction_offset,
        # The Java client adds these two when it pulls. The manifest omits them, also if they are stored.
        "properties": {k: v for k, v in message.properties.items() if k not in ("MIN_OFFSET", "MAX_OFFSET")},
    }


LISTED = (
    *("topic", "queueId", "queueOffset", "physicalOffset", "size", "tags", "msgId", "offsetMsgId", "bodyCRC"),
    *("bodyLength", "bodySha256", "sysFlagAfterDecode", "flag", "bornTimestamp", "storeTimestamp", "bornHost"),
    *("storeHost", "reconsumeTimes", "preparedTransactionOffset", "properties"),
)
