"""Stores with light queues and with deleted topics move from our broker to Apache's and back, stopped or killed.

| Store | Left by | Opened by |
|---|---|---|
| stopped | our clean stop, after a kill -9 and our recovery | Apache's broker |
| killed | our kill -9 | Apache's broker, which recovers, takes more and is killed |
| back | Apache's kill -9 | Apache's broker, and ours, which recover |

Source: behaviour.md §9.6; store.md §4.5, §11, §12."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.schemas.offsets import QueueRequest
from rmqkit.protocol.schemas.send import SendMessageV2Request
from rmqkit.protocol.schemas.topics import CreateTopicRequest, TopicRequest
from tests.interop.apache import BROKER_CONF
from tests.interop.conftest import LIGHT_CONF
from tests.interop.kit import ApacheKit
from tests.interop.server_process import wait_until
from tests.interop.standalone import run_standalone
from tests.interop.store_files import has_topic, opened_by_apache
from tests.interop.test_light_queues import asked, max_offset, pulled

CONF: Mapping[str, object] = {
    **BROKER_CONF,
    **LIGHT_CONF,
    "brokerName": "light-mover",
    "brokerClusterName": "LightCluster",
    "mappedFileSizeCommitLog": 65536,
    "mappedFileSizeConsumeQueue": 600,
}
TOPIC, A, B = "LightMoving", "%LMQ%moving-a", "%LMQ%moving-b"
COUNT = 150
"""Number of messages of a sender: more than a file of a queue or of the log holds."""


def send(address: str, topic: str, queue_id: int, count: int, mark: str, **properties: str) -> None:
    header = SendMessageV2Request(
        producer_group="light-movers",
        topic=topic,
        default_topic="TBW102",
        default_topic_queue_nums=2,
        queue_id=queue_id,
        sys_flag=0,
        born_timestamp=1,
        flag=0,
        properties="".join(f"{name}\x01{value}\x02" for name, value in properties.items()),
    )
    for i in range(count):
        code, remark, _, _ = asked(address, RequestCode.SEND_MESSAGE_V2, header, f"{mark} {i} ".encode() * 40)
        assert code == 0, remark


def send_light(address: str, mark: str) -> None:
    for names, count in ((f"{A},{B}", COUNT), (B, COUNT // 3)):
        send(address, TOPIC, 0, count, mark, INNER_MULTI_DISPATCH=names, TAGS="Tag")


def make_again(address: str, topic: str) -> None:
    """Delete a topic with messages in two queues, create it again, and send messages to the first one."""
    create = CreateTopicRequest(topic, "TBW102", 2, 2, 6, "SINGLE_TAG")
    for mark, queue_ids in (("old", (0, 1)), ("new", (0,))):
        assert asked(address, RequestCode.UPDATE_AND_CREATE_TOPIC, create)[0] == 0
        for queue_id in queue_ids:
            send(address, topic, queue_id, 20 if mark == "old" else 5, mark)
            expected = 20 if mark == "old" else 5
            wait_until(
                lambda at=queue_id, n=expected: bounds(address, topic)[at][1] == n, 150, "messages in their queue"
            )
        if mark == "old":
            assert asked(address, RequestCode.DELETE_TOPIC_IN_BROKER, TopicRequest(topic))[0] == 0


def bounds(address: str, topic: str) -> list[tuple[int, int]]:
    codes = RequestCode.GET_MIN_OFFSET, RequestCode.GET_MAX_OFFSET
    return [
        tuple(int(asked(address, code, QueueRequest(topic, queue_id))[2]["offset"]) for code in codes)
        for queue_id in (0, 1)
    ]


def messages(address: str, topic: str) -> list[Any]:
    """Return all of queue 0: topic, number and body, with the bounds."""
    found: list[Any] = bounds(address, topic)[:1]
    offset, end = found[0]
    while offset < end:
        code, remark, (following, _, _), records = pulled(address, topic, offset)
        assert code == 0, remark
        found += records
        offset = int(following)
    return found


def look(address: str) -> dict[str, list[Any]]:
    wait_until(lambda: max_offset(address, TOPIC) >= COUNT * 4 // 3, 150, "everything in its queues")
    return {topic: messages(address, topic) for topic in (TOPIC, A, B)}


@contextmanager
def opened(kit: ApacheKit | None, store: Path) -> Iterator[tuple[str, Any]]:
    """Open a store with Apache's broker, or without the kit with ours. Yield its address, and a function that kills
    it.
    """
    folder = store.parent
    if kit is not None:
        with opened_by_apache(kit, store, folder, CONF) as theirs:
            yield theirs.broker_addr, theirs
        return
    (folder / "ours.conf").write_text("".join(f"{key}={value}\n" for key, value in CONF.items()))
    with run_standalone(store, folder, "-c", str(folder / "ours.conf")) as ours:
        yield ours.broker_addr, ours


@dataclass
class Visits:
    """The light queues and the recreated topics as each broker showed them."""

    light: dict[str, dict[str, list[Any]]]
    again: dict[str, tuple[list[tuple[int, int]], list[Any]]]


def left(store: Path, name: str) -> Path:
    copy = store.parent.parent / name / "store"
    shutil.copytree(store, copy)
    return copy


@pytest.fixture(scope="module")
def visits(apache_kit: ApacheKit, tmp_path_factory: pytest.TempPathFactory) -> Visits:
    store = tmp_path_factory.mktemp("light-moves") / "ours" / "store"
    store.parent.mkdir()
    seen = Visits({}, {})

    def again(name: str, address: str, topic: str) -> None:
        seen.again[name] = bounds(address, topic), messages(address, topic)

    with opened(None, store) as (address, running):
        send_light(address, "ours")
        make_again(address, "Ours")
        seen.light["ours"] = look(address)
        # Apache's broker reads the topics from their file, which follows the journal after a second.
        wait_until(lambda: all(has_topic(store, topic) for topic in (TOPIC, "Ours")), 150, "the topics in their file")
        running.process.kill()
    killed = left(store, "killed")
    with opened(None, store) as (address, running):
        seen.light["ours, killed"] = look(address)
        again("ours", address, "Ours")
        running.stop()
    with opened(apache_kit, store) as (address, _):
        seen.light["stopped"] = look(address)
        again("stopped", address, "Ours")
    with opened(apache_kit, killed) as (address, running):
        seen.light["killed"] = look(address)
        again("killed", address, "Ours")
        send_light(address, "theirs")
        make_again(address, "Theirs")
        wait_until(lambda: max_offset(address, B) == COUNT * 8 // 3, 150, "everything in its queues")
        seen.light["theirs"] = look(address)
        running.kill_broker()
    back = left(killed, "back")
    with opened(apache_kit, killed) as (address, _):
        seen.light["theirs, killed"] = look(address)
        again("theirs", address, "Theirs")
    with opened(None, back) as (address, _):
        seen.light["back"] = look(address)
        again("back", address, "Theirs")
    return seen


@pytest.mark.parametrize("name", ["ours, killed", "stopped", "killed"])
def test_light_queues_of_ours_are_read_the_same(visits: Visits, name: str) -> None:
    for topic, found in visits.light["ours"].items():
        assert visits.light[name][topic] == found, topic
    assert visits.light[name][A][0] == (0, COUNT)


@pytest.mark.parametrize("name", ["theirs, killed", "back"])
def test_light_queues_that_apache_s_broker_went_on_with_are_read_the_same(visits: Visits, name: str) -> None:
    assert visits.light[name] == visits.light["theirs"]
    before, after = visits.light["ours"][B], visits.light["theirs"][B]
    assert after[1 : len(before)] == before[1:], "Apache's broker continues after our last message"


@pytest.mark.parametrize("name", ["ours", "stopped", "killed", "theirs", "back"])
def test_a_topic_made_again_keeps_what_it_got_with_its_numbers(visits: Visits, name: str) -> None:
    (first, _), (_, *found) = visits.again[name]
    assert first == (0, 5)
    assert [(number, body[:5]) for _, number, body in found] == [(i, b"new %d" % i) for i in range(5)]


def test_only_ours_knows_what_was_deleted(visits: Visits) -> None:
    """The messages of the deleted topic in the queue to which the new topic sent nothing."""
    assert {name: second for name, ((_, second), _) in visits.again.items()} == {
        "ours": (0, 0),
        "stopped": (0, 0),
        "killed": (0, 20),
        "theirs": (0, 20),
        "back": (0, 20),
    }
