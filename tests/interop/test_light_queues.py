"""Light queues (LMQ): the same sends leave the same messages, reads and offsets in Apache's broker and in ours. Source:
behaviour.md §9.6; store.md §9.2, §11."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import decode_fields, request
from rmqkit.protocol.fastjson import loads
from rmqkit.protocol.record import decode_record, iter_records
from rmqkit.protocol.schemas.offsets import QueryConsumerOffsetRequest, QueueRequest, UpdateConsumerOffsetRequest
from rmqkit.protocol.schemas.pull import PullFlag, PullMessageRequest, ViewMessageRequest
from rmqkit.protocol.schemas.send import SendMessageV2Request
from rmqkit.protocol.schemas.topics import TopicRequest
from tests.interop.apache import CLUSTER, ApachePair, ask
from tests.interop.conftest import LIGHT_CONF
from tests.interop.server_process import wait_until
from tests.interop.standalone import Standalone, run_standalone

TOPIC, A, B, GROUP = "Light", "%LMQ%light-a", "%LMQ%light-b", "%LMQ%light-group"
SENDS = (
    (TOPIC, {"INNER_MULTI_DISPATCH": f"{A},{B}", "TAGS": "Tag", "WAIT": "true", "colour": "blue"}),
    (TOPIC, {"INNER_MULTI_DISPATCH": B, "KEYS": "key"}),
    (TOPIC, {}),
    (TOPIC, {"INNER_MULTI_DISPATCH": f"{A},,"}),
    (TOPIC, {"INNER_MULTI_DISPATCH": " "}),
    (TOPIC, {"INNER_MULTI_DISPATCH": A, "INNER_MULTI_QUEUE_OFFSET": "77"}),
    ("%LMQ%light-direct", {}),
    (TOPIC, {"INNER_MULTI_DISPATCH": f"{B},{B}", "TAGS": "Tag"}),
)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with started(tmp_path_factory.mktemp("light")) as running:
        yield running


def started(work_dir: Path) -> AbstractContextManager[Standalone]:
    conf = work_dir / "broker.conf"
    conf.write_text("".join(f"{key}={value}\n" for key, value in (LIGHT_CONF | {"brokerClusterName": CLUSTER}).items()))
    return run_standalone(work_dir / "store", work_dir, "-c", str(conf))


def asked(address: str, code: RequestCode, header: msgspec.Struct, body: bytes = b"") -> tuple[Any, ...]:
    answer = ask(address, request(code, header, body))
    return answer.code, answer.remark or "", decode_fields(answer), bytes(answer.payload)


def sent(address: str, number: int) -> list[Any]:
    """Send a message. Return the answer and the stored message."""
    topic, properties = SENDS[number]
    given = {"UNIQ_KEY": f"{number:032X}", **properties}
    header = SendMessageV2Request(
        producer_group="light-producers",
        topic=topic,
        default_topic="TBW102",
        default_topic_queue_nums=1,
        queue_id=0,
        sys_flag=0,
        born_timestamp=1,
        flag=0,
        properties="".join(f"{name}\x01{value}\x02" for name, value in given.items()),
    )
    code, remark, fields, _ = asked(address, RequestCode.SEND_MESSAGE_V2, header, b"light %d" % number)
    assert code == 0, remark
    view = ViewMessageRequest(int(fields["msgId"][16:], 16), topic)
    record = decode_record(asked(address, RequestCode.VIEW_MESSAGE_BY_ID, view)[3])
    return [fields["queueOffset"], record.topic, record.queue_id, record.queue_offset, record.properties]


def pulled(address: str, topic: str, offset: int, tags: str = "*") -> list[Any]:
    header = PullMessageRequest(
        consumer_group=GROUP,
        topic=topic,
        queue_id=0,
        queue_offset=offset,
        max_msg_nums=32,
        sys_flag=PullFlag.SUBSCRIPTION,
        commit_offset=0,
        suspend_timeout_millis=0,
        sub_version=0,
        subscription=tags,
        expression_type="TAG",
    )
    code, remark, fields, body = asked(address, RequestCode.PULL_MESSAGE, header)
    bounds = [fields.get(name) for name in ("nextBeginOffset", "minOffset", "maxOffset")]
    return [code, remark, bounds, [(one.topic, one.queue_offset, one.body) for one in iter_records(body)]]


def max_offset(address: str, topic: str) -> int:
    return int(asked(address, RequestCode.GET_MAX_OFFSET, QueueRequest(topic, 0))[2]["offset"])


def facts(address: str) -> list[Any]:
    told = [sent(address, number) for number in range(len(SENDS))]
    wait_until(lambda: max_offset(address, TOPIC) == 7, 150, "everything in its queues")
    for topic in (A, B, "%LMQ%light-direct", "%LMQ%light-none"):
        told += [pulled(address, topic, offset, tags) for offset in (0, 1, 9) for tags in ("*", "Tag")]
    told += [max_offset(address, topic) for topic in (A, B)]
    for group, topic in ((GROUP, A), (GROUP, TOPIC)):
        update = UpdateConsumerOffsetRequest(group, topic, 0, 2)
        told.append(asked(address, RequestCode.UPDATE_CONSUMER_OFFSET, update)[:2])
        query = QueryConsumerOffsetRequest(group, topic, 0, None)
        told.append(asked(address, RequestCode.QUERY_CONSUMER_OFFSET, query)[:3])
    told.append(msgspec.json.decode(asked(address, RequestCode.GET_TOPIC_CONFIG, TopicRequest(A))[3]))
    return told


def written(store: Path) -> tuple[Any, ...]:
    """Return the entries of the light queues, numbered from the first record on, and the offsets on the disk."""
    table = loads((store / "config/lmqConsumerOffset.json").read_bytes())["lmqOffsetTable"]
    queues = [(store / "consumequeue" / topic / "0" / f"{0:020}").read_bytes() for topic in (A, B)]
    sizes = [[int.from_bytes(queue[at + 8 : at + 12]) for at in range(0, 100, 20)] for queue in queues]
    codes = [[queue[at + 12 : at + 20] for at in range(0, 100, 20)] for queue in queues]
    return table, sizes, codes


def test_messages_in_light_queues_are_stored_read_and_remembered_as_by_apaches(
    apache: ApachePair, ours: Standalone
) -> None:
    theirs, own = facts(apache.broker_addr), facts(ours.broker_addr)
    assert own == theirs
    stores = [apache.store_dir, ours.store_dir]

    def is_written() -> bool:
        files = [store / "config/lmqConsumerOffset.json" for store in stores]
        return all(file.exists() and f"{TOPIC}@{GROUP}" in file.read_text() for file in files)

    wait_until(is_written, 150, "offsets on the disk")
    assert written(stores[1]) == written(stores[0])


def test_light_queues_come_back_after_a_kill(tmp_path: Path) -> None:
    with started(tmp_path) as ours:
        for number in range(len(SENDS)):
            sent(ours.broker_addr, number)
        was = [pulled(ours.broker_addr, topic, 0) for topic in (A, B)]
        assert was[0][3]
        ours.process.kill()
    with started(tmp_path) as again:
        assert [pulled(again.broker_addr, topic, 0) for topic in (A, B)] == was
        again.stop()
