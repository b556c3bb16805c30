"""A store with waiting timed messages moves from our broker to Apache's and back, each killed with SIGKILL.

| Message | Sent to | Delivered by |
|---|---|---|
| before | ours | ours |
| waiting, recalled | ours | Apache's, which leaves out the recalled one |
| theirs, recalled there | Apache's | ours, which leaves out the recalled one |

Messages that a broker delivered within a second before its kill may be delivered again (at least once). Source:
store.md §18.2 to §18.6.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command, decode_fields
from rmqkit.protocol.message import read_messages
from rmqkit.remoting.client import RemotingClient
from rmqkit.store.timer.files import load_timer_checkpoint
from tests.interop.apache import BROKER_CONF, CLUSTER
from tests.interop.kit import ApacheKit
from tests.interop.standalone import run_broker, run_name_server
from tests.interop.store_files import has_topic, opened_by_apache
from tests.patience import TIMEOUT_MS

TOPIC = "TimedMoves"
SECONDS_MAX = 150
CONF: Mapping[str, object] = {
    **BROKER_CONF,
    "brokerClusterName": CLUSTER,
    "recallMessageEnable": "true",
    "mappedFileSizeTimerLog": 3 * 52 + 16,
    "timerFlushIntervalMs": 1000,  # the state of a killed broker is at most this old
}


class Link:
    """A client of one broker."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.client = RemotingClient()

    async def ask(self, code: int, body: bytes = b"", **fields: object) -> tuple[dict[str, str], bytes]:
        texts = {name: str(value) for name, value in fields.items()}
        answer = await self.client.call(self.address, Command(code, fields=texts, body=body), TIMEOUT_MS)
        assert answer.code in (0, 19, 20), answer.remark
        return decode_fields(answer), bytes(answer.payload) if answer.code == 0 else b""

    async def send(self, body: str, seconds: float) -> str:
        """Send a message for a time. Return its recall handle."""
        properties = f"TIMER_DELIVER_MS\x01{int((time.time() + seconds) * 1000)}\x02UNIQ_KEY\x01{body:0>32}\x02"
        values = ("p", TOPIC, "TBW102", 1, 0, 0, 1_700_000_000_000, 0, properties, 0, "false")
        header = dict(zip("abcdefghijk", values, strict=True))
        answer, _ = await self.ask(RequestCode.SEND_MESSAGE_V2, body.encode(), **header)
        return answer["recallHandle"]

    async def recall(self, handle: str) -> None:
        await self.ask(RequestCode.RECALL_MESSAGE, producerGroup="p", topic=TOPIC, recallHandle=handle)

    async def delivered(self, last: str) -> list[str]:
        """Return the bodies of the topic, as soon as ``last`` is among them."""
        pull: dict[str, Any] = {
            "consumerGroup": "g",
            "topic": TOPIC,
            "queueId": 0,
            "queueOffset": 0,
            "maxMsgNums": 32,
            "sysFlag": 4,
        }
        pull |= {"commitOffset": 0, "suspendTimeoutMillis": 1000, "subVersion": 0, "subscription": "*"}
        async with asyncio.timeout(SECONDS_MAX):
            while True:
                _, body = await self.ask(RequestCode.PULL_MESSAGE, **pull, expressionType="TAG")
                found = [one.body.decode() for one in read_messages(body)]
                if last in found:
                    return found
                await asyncio.sleep(0.05)


async def noted(store: Path, queue_offset: int) -> None:
    """Wait until a broker has stored its progress, the queue offset and the present second, and the file of topics."""
    async with asyncio.timeout(SECONDS_MAX):
        while True:
            known = load_timer_checkpoint(store / "config" / "timercheck")
            is_late = known.last_read_time_ms < (time.time() - 5) * 1000
            if known.last_timer_queue_offset >= queue_offset and not is_late and has_topic(store, TOPIC):
                return
            await asyncio.sleep(0.05)


def at(address: str, scenario: Callable[[Link], Awaitable[None]]) -> None:
    async def main() -> None:
        link = Link(address)
        try:
            await scenario(link)
        finally:
            await link.client.close()

    asyncio.run(main())


def without_repeats(found: list[str]) -> list[str]:
    return list(dict.fromkeys(found))


def test_waiting_messages_and_recalls_move_both_ways(apache_kit: ApacheKit, tmp_path: Path) -> None:
    store = tmp_path / "store"

    async def first(ours: Link) -> None:
        await ours.send("before", 1.5)
        await ours.send("waiting", 8)
        await ours.recall(await ours.send("recalled", 8))
        await ours.send("last", 10)
        assert await ours.delivered("before") == ["before"]
        await noted(store, 5)

    async def second(theirs: Link) -> None:
        assert without_repeats(await theirs.delivered("last")) == ["before", "waiting", "last"]
        await theirs.send("theirs", 8)
        await theirs.recall(await theirs.send("recalled-there", 8))
        await theirs.send("last of theirs", 10)
        await noted(store, 9)

    async def third(ours: Link) -> None:
        found = without_repeats(await ours.delivered("last of theirs"))
        assert found == ["before", "waiting", "last", "theirs", "last of theirs"]

    with run_name_server(tmp_path) as (_, namesrv):
        with run_broker(store, tmp_path, namesrv, CONF) as (_, address):
            at(address, first)
        with opened_by_apache(apache_kit, store, tmp_path, CONF) as pair:
            at(pair.broker_addr, second)
        with run_broker(store, tmp_path, namesrv, CONF) as (_, address):
            at(address, third)
