"""Apache's Java client against our name server and broker; and, to prove the probe, against Apache's own.

One run of the Java probe per pair of server and client version: it sends ordinary, large (compressed) and batched
messages, then consumes them with push consumers of two groups, one of them filtered by tags.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path

import pytest

from tests.faults.spark.servers import set_queues
from tests.interop.conftest import kit_or_skip
from tests.interop.kit import ApacheKit
from tests.interop.probe import LAST_TAG, Message, ProbeRun, run_probe
from tests.interop.server_process import ServerProcess
from tests.interop.standalone import READY_SECONDS, RMQ, run_name_server

BATCH_COUNT = 20  # Sender.java: the last of them go as one batch, and every 25th of the others is large
LARGE_EVERY = 25
COMPRESSED_ABOVE_BYTES = 4096  # the client's default of compressMsgBodyOverHowmuch
EVERYTHING = "group-everything"
FILTERED = "group-filtered"
FILTER_TAGS = ("TagA", "TagC")


@dataclass(frozen=True, slots=True)
class Exchange:
    """One finished run of the probe, and its server."""

    run: ProbeRun
    count: int
    broker_addr: str


@pytest.fixture(
    scope="module",
    params=[("apache", "5.4.0", 200), ("standalone", "5.4.0", 1000), ("standalone", "4.9.4", 1000)],
    ids=lambda peers: f"{peers[0]}-server-{peers[1]}-client",
)
def exchange(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exchange:
    server_name, client_version, count = request.param
    kit = kit_or_skip(client_version)
    server = request.getfixturevalue(server_name)
    run = run_probe(
        kit,
        "both",
        namesrv=server.namesrv_addr,
        topic=f"JavaClient-{client_version.replace('.', '_')}",
        count=count,
        consumers={EVERYTHING: "*", FILTERED: " || ".join(FILTER_TAGS)},
        work_dir=tmp_path_factory.mktemp("probe"),
    )
    assert run.exit_code == 0, run.outcome
    return Exchange(run, count, server.broker_addr)


def as_message(message: Message) -> Message:
    """Return only the fields that both sender and receiver know."""
    return Message(**{name: getattr(message, name) for name in Message.__struct_fields__})


def test_every_send_is_acknowledged_at_the_next_queue_offset(exchange: Exchange) -> None:
    sent = exchange.run.sent
    queues = {message.queue_id for message in sent}

    assert len(sent) == exchange.count + len(queues)
    assert {message.status for message in sent} == {"SEND_OK"}
    assert Counter(message.kind for message in sent) == {
        "single": exchange.count - BATCH_COUNT,
        "batch": BATCH_COUNT,
        "last": len(queues),
    }
    offsets_by_queue = defaultdict(list)
    for message in sent:
        offsets_by_queue[message.queue_id].append(message.queue_offset)
    for offsets in offsets_by_queue.values():
        assert offsets == list(range(len(offsets)))
    assert [message.result_msg_id for message in sent] == [message.msg_id for message in sent]


def test_the_mixture_has_what_the_other_tests_rely_on(exchange: Exchange) -> None:
    sent = exchange.run.sent

    assert {message.tags for message in sent} == {"TagA", "TagB", "TagC", None, LAST_TAG}
    assert {len(message.keys.split()) if message.keys else 0 for message in sent} == {0, 1, 2}
    assert {message.user_properties.get("city") for message in sent} == {None, "Zürich", "東京"}
    assert len([message for message in sent if message.body_bytes > COMPRESSED_ABOVE_BYTES]) == ceil(
        (exchange.count - BATCH_COUNT) / LARGE_EVERY
    )


def test_a_push_consumer_receives_exactly_what_was_sent(exchange: Exchange) -> None:
    sent = {message.msg_id: as_message(message) for message in exchange.run.sent}
    received = exchange.run.received_by(EVERYTHING)

    assert len(received) == len(sent)
    assert {message.msg_id: as_message(message) for message in received} == sent


def test_a_consumer_filtered_by_tags_receives_exactly_its_tags(exchange: Exchange) -> None:
    wanted = {
        message.msg_id: as_message(message) for message in exchange.run.sent if message.tags in {*FILTER_TAGS, LAST_TAG}
    }
    received = exchange.run.received_by(FILTERED)

    assert len(received) == len(wanted)
    assert {message.msg_id: as_message(message) for message in received} == wanted


def test_nothing_is_delivered_as_a_redelivery(exchange: Exchange) -> None:
    assert {message.reconsume_times for message in exchange.run.received} == {0}


def test_the_offset_message_id_names_broker_and_physical_offset(exchange: Exchange) -> None:
    host, _, port = exchange.broker_addr.rpartition(":")
    address = bytes(map(int, host.split("."))) + int(port).to_bytes(4)

    for message in exchange.run.received:
        assert bytes.fromhex(message.offset_msg_id) == address + message.physical_offset.to_bytes(8)
        assert message.store_host == f"/{exchange.broker_addr}"


def test_stored_records_follow_each_other(exchange: Exchange) -> None:
    received = sorted(exchange.run.received_by(EVERYTHING), key=lambda message: message.physical_offset)

    for message, following in pairwise(received):
        assert message.physical_offset + message.store_size_bytes <= following.physical_offset
        assert message.store_timestamp_ms <= following.store_timestamp_ms
    assert all(message.born_host.startswith("/127.0.0.1:") for message in received)


def test_large_bodies_are_stored_compressed(exchange: Exchange) -> None:
    large = [message for message in exchange.run.received_by(EVERYTHING) if message.body_bytes > COMPRESSED_ABOVE_BYTES]

    assert large
    assert all(message.store_size_bytes < message.body_bytes for message in large)


def test_a_java_client_balances_over_shards(apache_kit: ApacheKit, tmp_path: Path) -> None:
    with run_name_server(tmp_path) as (_, namesrv):
        command = [RMQ, "broker", "--shards", "2", "--host", "127.0.0.1", "--port", "0", "-n", namesrv]
        with ServerProcess([*command, "--store", tmp_path / "store"], tmp_path / "shards.log") as parent:
            addresses = parent.wait_ready(r"^ready broker=(\S+) ", READY_SECONDS)[1].split(",")
            for address in addresses:
                set_queues(address, "Sharded", 2)
            run = run_probe(
                apache_kit,
                "both",
                namesrv=namesrv,
                topic="Sharded",
                count=60,
                consumers={EVERYTHING: "*"},
                work_dir=tmp_path,
            )
    assert run.exit_code == 0, run.outcome
    ports = Counter(int.from_bytes(bytes.fromhex(message.offset_msg_id)[4:8]) for message in run.sent)
    assert set(ports) == {int(address.rpartition(":")[2]) for address in addresses}
    assert all(count >= 60 / 2 - BATCH_COUNT for count in ports.values())
    assert Counter(message.msg_id for message in run.received) == Counter(message.msg_id for message in run.sent)
