"""Our client reads a golden store through a real Apache broker: every message of the manifest, system topics included.

A running broker changes the store (it delivers due messages), so queues may have grown. No listed message may be
missing.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from rmqkit import PullConsumer
from rmqkit.protocol.record import iter_records
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.store.log.remains import is_filler
from rmqkit.store.offline.repair import repair
from tests.golden_reading import as_listed, expected_messages, order, simple_queues
from tests.golden_stores import unpack_golden
from tests.interop.apache import open_store_with_apache
from tests.interop.kit import ApacheKit
from tests.patience import pulling
from tests.store.stores import golden_settings

OWN_KEYS = ("listenPort", "haListenPort", "namesrvAddr", "brokerIP1")


async def pull_all(namesrv: str, broker_name: str, queues: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    async with PullConsumer("audit", namesrv, settings=pulling()) as consumer:
        for listed in queues:
            queue = MessageQueue(listed["topic"], broker_name, listed["queueId"])
            offset = await consumer.min_offset(queue)
            assert offset == listed["minOffset"]
            while offset < await consumer.max_offset(queue):
                result = await consumer.pull(queue, offset)
                found += [as_listed(message) for message in result.messages]
                offset = result.next_begin_offset
    return found


def test_our_client_pulls_every_listed_message_from_apache_s_broker(apache_kit: ApacheKit, tmp_path: Path) -> None:
    golden = unpack_golden("5.4.0", tmp_path)
    conf = {key: value for key, value in golden.manifest["brokerConf"].items() if key not in OWN_KEYS}
    conf["transactionCheckInterval"] = "3600000"
    queues, expected = simple_queues(golden), expected_messages(golden)
    with open_store_with_apache(apache_kit, golden.root, tmp_path, conf) as pair:
        found = asyncio.run(pull_all(pair.namesrv_addr, "broker-golden", queues))
    at = {order(message): message for message in found}
    assert [at.get(order(message)) for message in expected] == expected
    print(f"{len(expected)} listed messages of {len(queues)} queues found, {len(found) - len(expected)} newer ones")


def test_apache_s_broker_walks_over_the_filler_that_a_repair_wrote(apache_kit: ApacheKit, tmp_path: Path) -> None:
    golden = unpack_golden("5.4.0", tmp_path)
    conf = {key: value for key, value in golden.manifest["brokerConf"].items() if key not in OWN_KEYS}
    conf["transactionCheckInterval"] = "3600000"
    sizes = golden_settings(golden)
    queues, expected = simple_queues(golden), expected_messages(golden)
    # Not the first file: if a pull of Apache's broker meets a blank entry, it skips the rest of the file.
    path = sorted((golden.root / "commitlog").iterdir())[1]
    records = list(iter_records(path.read_bytes()))
    listed = {(one["topic"], one["queueId"], one["queueOffset"]) for one in expected}
    middle = records[len(records) // 2 :]
    lost = next(one for one in middle if (one.topic, one.queue_id, one.queue_offset) in listed)
    content = bytearray(path.read_bytes())
    content[lost.physical_offset % len(content) + 5] ^= 0x10
    path.write_bytes(content)
    repair(golden.root, sizes, is_dry_run=False)
    filler = next(one for one in iter_records(path.read_bytes()) if one.physical_offset == lost.physical_offset)
    assert is_filler(filler) and filler.size == lost.size
    (golden.root / "abort").touch()
    (golden.root / "checkpoint").unlink(missing_ok=True)  # so that the recovery starts with the first file
    with open_store_with_apache(apache_kit, golden.root, tmp_path, conf) as pair:
        found = asyncio.run(pull_all(pair.namesrv_addr, "broker-golden", queues))
    at = {order(message): message for message in found}
    missing = [message for message in expected if at.get(order(message)) != message]
    assert [(one["topic"], one["queueId"], one["queueOffset"]) for one in missing] == [
        (lost.topic, lost.queue_id, lost.queue_offset)
    ]
