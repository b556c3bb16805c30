"""Deliberate split histories: a slave with messages that its master does not have must stop, log the offset, and serve
nothing.

After a common history the slave's store is started as a separate master and stores messages, or the master's store is
replaced by an earlier copy. Then the slave follows the master again. It must log the offset at which the histories
differ: a warning while it is only ahead, then one final error. It never serves messages of its own history, and after
the error it serves none at all, also when the master is gone. Its log does not change, and no send is acknowledged
because of it.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from pathlib import Path
from typing import NamedTuple

from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, request
from rmqkit.protocol.schemas.send import SendMessageV2Request
from tests.faults.ha.history import History, Watch
from tests.faults.ha.pair import MASTER, QUEUES, SLAVE, TOPIC, Pair

__all__ = ["SPLITS", "Split", "judge"]

COMMON_COUNT = 8
SAY_SECONDS = 120.0
BODY_BYTES = 100
READS_AT_END = 5
COPIED = (ResponseCode.SUCCESS, ResponseCode.FLUSH_SLAVE_TIMEOUT)
"""If the send waits for the copy, it may take longer than `slaveTimeout` on a busy machine."""
_POLL_SECONDS = 0.01


class Split(NamedTuple):
    """The number of messages that each side stores and the other does not get. ``is_old_copy``: the slave gets its
    messages by replication, before the master's store is replaced by the copy."""

    name: str
    slave_count: int
    master_count: int
    is_old_copy: bool = False


SPLITS = [
    Split("slave took less than its master", 3, 6),
    Split("slave took more than its master", 6, 3),
    Split("both took the same size", 4, 4),
    Split("slave ahead, master took nothing", 4, 0),
    Split("master put back to an old copy", 5, 0, is_old_copy=True),
    Split("old copy that went on", 3, 5, is_old_copy=True),
]


async def judge(split: Split, folder: Path) -> str:
    """Run the split and return the line that the slave logged. Raises AssertionError: the slave behaves wrongly."""
    async with Pair(folder) as pair:
        await _put(pair, MASTER, COMMON_COUNT, *COPIED)
        parting = await pair.converge()
        if split.is_old_copy:
            await _put_back(pair, split)
        else:
            await _part(pair, split)
        before = _log_bytes(pair)
        history = History()
        watch = Watch(pair, SLAVE, history)
        await pair.brokers[SLAVE].start()
        await _said(pair, watch, parting)
        seen = history.counts.total()
        sending = asyncio.create_task(_put(pair, MASTER, 1, ResponseCode.FLUSH_SLAVE_TIMEOUT))
        line = await _said(pair, watch, parting, level=" ERROR ")
        await sending
        pair.brokers[MASTER].kill()
        for _ in range(READS_AT_END):
            watch.go_back()
            await watch.pull_all()
        assert history.counts.total() == seen, f"it serves after it said {line!r}"
        own = [message for message in history.served.values() if message.physical_offset >= parting]
        assert not own, f"it served {len(own)} messages of its own history, which begins at {parting}: {own[0]}"
        lines = _lines(pair, parting, " ERROR ")
        assert lines == [line], f"it says it more than once: {lines}"
        pair.brokers[SLAVE].kill()
        assert _log_bytes(pair) == before, "the slave's log does not change"
        return line


async def _part(pair: Pair, split: Split) -> None:
    slave = pair.brokers[SLAVE]
    slave.kill()
    pair.configure(SLAVE, brokerRole="ASYNC_MASTER", brokerId=0, namesrvAddr="")
    await slave.start()
    await _put(pair, SLAVE, split.slave_count, ResponseCode.SUCCESS)
    slave.kill()
    pair.configure(SLAVE)
    await _put(pair, MASTER, split.master_count, ResponseCode.FLUSH_SLAVE_TIMEOUT)


async def _put_back(pair: Pair, split: Split) -> None:
    master, slave = pair.brokers[MASTER], pair.brokers[SLAVE]
    copy = pair.stores[MASTER].with_name("copy")
    master.kill()
    shutil.copytree(pair.stores[MASTER], copy)
    await master.start()
    await pair.converge()  # the slave is connected again
    await _put(pair, MASTER, split.slave_count, *COPIED)
    await pair.converge()
    for broker in (master, slave):
        broker.kill()
    shutil.rmtree(pair.stores[MASTER])
    copy.rename(pair.stores[MASTER])
    await master.start()
    await _put(pair, MASTER, split.master_count, ResponseCode.FLUSH_SLAVE_TIMEOUT)


async def _put(pair: Pair, role: str, count: int, *codes: ResponseCode) -> None:
    """Send messages to a broker, all at once. Raises AssertionError: an answer has another code."""
    answers = await asyncio.gather(*(_send(pair, role, number) for number in range(count)))
    wrong = [answer for answer in answers if answer.code not in codes]
    assert not wrong, f"{role} answered {wrong[0].code} {wrong[0].remark}, not {codes[0].name}"


async def _send(pair: Pair, role: str, number: int) -> Command:
    now_ms = time.time_ns() // 1_000_000
    header = SendMessageV2Request("PG", TOPIC, "TBW102", QUEUES, number % QUEUES, 0, now_ms, 0, "TAGS\x01t\x02", 0)
    body = (b"%d of the %s " % (number, role.encode())).ljust(BODY_BYTES, b".")
    return await pair.ask(role, request(RequestCode.SEND_MESSAGE_V2, header, body))


async def _said(pair: Pair, watch: Watch, parting: int, level: str = "") -> str:
    """Return the slave's log line about the offset at which the histories differ. Until it appears, read from the
    slave.
    """
    try:
        async with asyncio.timeout(SAY_SECONDS):
            while not (lines := _lines(pair, parting, level)):
                await watch.pull_all()
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        text = pair.log_text(SLAVE)
        raise AssertionError(f"no{level} line with {parting} within {SAY_SECONDS:g} s, but: {text}") from None
    return lines[0]


def _lines(pair: Pair, offset: int, level: str) -> list[str]:
    lines = pair.log_text(SLAVE).splitlines()
    return [line for line in lines if level in line and re.search(rf"\b{offset}\b", line)]


def _log_bytes(pair: Pair) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (pair.stores[SLAVE] / "commitlog").iterdir()}
