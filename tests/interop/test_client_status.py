"""Apache's ``mqadmin consumerStatus`` shows a Python consumer, and the reason why one of its queues makes no progress.

Source: behaviour.md §8.15; remoting.md §6.4.12.
"""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

from rmqkit import sync
from rmqkit.client.runtime.settings import StartFrom
from rmqkit.protocol.message import Message, ReceivedMessage
from tests.interop.apache import ApachePair
from tests.interop.kit import ApacheKit
from tests.interop.mqadmin import named_outputs
from tests.patience import TIMEOUT_MS, producing, pushing

TOPIC, GROUP = "Watched", "watched"


def test_mqadmin_shows_rates_queues_and_the_reason(apache: ApachePair, apache_kit: ApacheKit, tmp_path: Path) -> None:
    gate = threading.Event()

    def handler(message: ReceivedMessage) -> None:
        if message.body == b"5":
            gate.wait(600)

    settings = pushing(start_from=StartFrom.FIRST_OFFSET, stall_after_ms=100)
    consumer = sync.PushConsumer(GROUP, apache.namesrv_addr, settings=settings)
    consumer.subscribe(TOPIC, "*", handler)
    with sync.Producer("PG-watched", apache.namesrv_addr, settings=producing()) as producer, consumer:
        try:
            queue = producer.queues(TOPIC)[1]
            for number in range(6):
                sent = producer.send(Message(topic=TOPIC, body=b"%d" % number), queue=queue, timeout=TIMEOUT_MS / 1000)
            deadline = time.monotonic() + 100
            while not consumer.status().stalled:
                assert time.monotonic() < deadline, consumer.status()
                time.sleep(0.01)
            client_id = consumer.status().client_id
            commands = {"status": f"consumerStatus -g {GROUP} -i {client_id}"}
            shown = named_outputs(apache_kit, commands, apache.namesrv_addr, apache.broker_addr, tmp_path)["status"]
        finally:
            gate.set()
    assert re.search(r"^PROP_NAMESERVER_ADDR +: +NAMESRV$", shown, re.MULTILINE), shown
    assert re.search(rf"^{TOPIC} +{queue.broker_name} +1 ", shown, re.MULTILINE), shown
    assert f"busy: the handler works on message {sent.msg_id} at offset 5 since" in shown, shown
    rates = re.search(rf"^{TOPIC} +([0-9.]+) +([0-9.]+) +([0-9.]+) +([0-9.]+) +([0-9.]+) +(\d+)$", shown, re.MULTILINE)
    assert rates is not None, shown
    _, pull_tps, _, ok_tps, failed_tps, failed = rates.groups()
    assert float(pull_tps) >= float(ok_tps) > float(failed_tps) == int(failed) == 0
