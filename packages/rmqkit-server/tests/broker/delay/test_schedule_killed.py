"""SIGKILL in the middle of delays and retries: every message that was acknowledged comes, and nothing is stuck.

A producer sends messages of delay levels, or for a time; a consumer gets them and gives some back to be retried, and
the broker process is killed again and again while it delivers; the last broker is left to finish. At least once:
deliveries since the offsets were written last are repeated.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from rmqkit.errors import RemotingError
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_header, request
from rmqkit.protocol.record import iter_records
from rmqkit.protocol.schemas.pull import PullFlag, PullMessageRequest, PullMessageResponse
from rmqkit.protocol.schemas.send import ConsumerSendBackRequest, SendMessageV2Request
from rmqkit.remoting.client import RemotingClient
from tests.examples import chosen_seed
from tests.interop.standalone import run_standalone

KILLS = 3
IN_FLIGHT = 4
SENT_MAX = 200
EVENTS_MAX = 2 * SENT_MAX - 20  # every message is sent and arrives
SECONDS_MAX = 150
TOPIC, RETRY_TOPIC = "T", "%RETRY%g"
BROKER_CONF = """
messageDelayLevel=1s 1s 2s
flushDelayOffsetInterval=100
mappedFileSizeCommitLog=65536
flushDiskType={flush_disk_type}
timerPrecisionMs=50
timerFlushIntervalMs=50
mappedFileSizeTimerLog=5300
"""


class Traffic:
    """Numbers that were acknowledged: sent ones and returned ones. ``delay(number)``: the property that delays it."""

    def __init__(self, delay):
        self.delay = delay
        self.sent = set()
        self.returned = set()
        self.numbers = iter(range(1_000_000))


class Client:
    """A producer and consumer of one run of the broker."""

    def __init__(self, running):
        self.running = running
        self.client = RemotingClient()

    async def call(self, code, header, body=b""):
        return await self.client.call(self.running.broker_addr, request(code, header, body), 60_000)

    async def send(self, number, delay):
        header = SendMessageV2Request("p", TOPIC, "TBW102", 1, 0, 0, 1, 0, properties=delay(number))
        answer = await self.call(RequestCode.SEND_MESSAGE_V2, header, b"%d" % number)
        assert answer.code == ResponseCode.SUCCESS, answer.remark

    async def give_back(self, record):
        header = ConsumerSendBackRequest(record.physical_offset, "g", 1 + int(record.body) % 3)
        answer = await self.call(RequestCode.CONSUMER_SEND_MSG_BACK, header)
        assert answer.code == ResponseCode.SUCCESS, answer.remark

    async def pull(self, topic, offset):
        """Records from an offset on, and the next offset; waits a second for the first one."""
        header = PullMessageRequest(
            consumer_group="g",
            topic=topic,
            queue_id=0,
            queue_offset=offset,
            max_msg_nums=32,
            sys_flag=PullFlag.SUBSCRIPTION | PullFlag.SUSPEND,
            commit_offset=0,
            suspend_timeout_millis=1000,
            sub_version=0,
            subscription="*",
        )
        answer = await self.call(RequestCode.PULL_MESSAGE, header)
        records = list(iter_records(answer.payload)) if answer.code == ResponseCode.SUCCESS else []
        return records, decode_header(answer, PullMessageResponse).next_begin_offset if records else offset


def by_level(number):
    return f"DELAY\x01{1 + number % 3}\x02"


def by_time(number):
    return f"TIMER_DELAY_MS\x01{200 + number % 7 * 150}\x02"


async def _until_killed(running, traffic, after):
    """Send, consume and give back; after so many events the broker is killed, and all end."""
    client = Client(running)
    events = 0

    def happened():
        nonlocal events
        events += 1
        if events == after:
            running.process.kill()

    async def sender(count):
        for _ in range(count):
            number = next(traffic.numbers)
            await client.send(number, traffic.delay)
            traffic.sent.add(number)
            happened()

    async def consumer():
        offset = 0
        while True:
            records, offset = await client.pull(TOPIC, offset)
            for record in records:
                number = int(record.body)
                if number % 2 and number not in traffic.returned:
                    await client.give_back(record)
                    traffic.returned.add(number)
                happened()

    work = [sender(SENT_MAX // IN_FLIGHT) for _ in range(IN_FLIGHT)]
    async with asyncio.timeout(SECONDS_MAX):
        ended = await asyncio.gather(consumer(), *work, return_exceptions=True)
    await client.client.close()
    assert isinstance(ended[0], RemotingError), ended
    assert all(one is None or isinstance(one, RemotingError) for one in ended[1:]), ended


async def _finish(running, traffic):
    client = Client(running)
    async with asyncio.timeout(SECONDS_MAX):
        for topic, wanted in ((TOPIC, traffic.sent), (RETRY_TOPIC, traffic.returned)):
            missing, offset = set(wanted), 0
            while missing:
                records, offset = await client.pull(topic, offset)
                missing -= {int(record.body) for record in records}
    await client.client.close()


@pytest.mark.faults
@pytest.mark.parametrize(
    ("flush_disk_type", "delay"),
    [
        pytest.param("ASYNC_FLUSH", by_level, id="async"),
        pytest.param("SYNC_FLUSH", by_level, id="sync", marks=pytest.mark.slow),
        pytest.param("ASYNC_FLUSH", by_time, id="async timed", marks=pytest.mark.slow),
    ],
)
def test_delays_and_retries_survive_kills(tmp_path, flush_disk_type, delay):
    seed = chosen_seed()
    chance = random.Random(seed)
    conf = tmp_path / "broker.conf"
    conf.write_text(BROKER_CONF.format(flush_disk_type=flush_disk_type))
    traffic = Traffic(delay)
    for _ in range(KILLS):
        with run_standalone(tmp_path / "store", tmp_path, "--config", str(conf)) as running:
            asyncio.run(_until_killed(running, traffic, chance.randrange(SENT_MAX // 2, EVENTS_MAX)))
    assert traffic.sent
    with run_standalone(tmp_path / "store", tmp_path, "--config", str(conf)) as running:
        asyncio.run(_finish(running, traffic))
        running.stop()
