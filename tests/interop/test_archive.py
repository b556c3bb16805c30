"""Clients in Java, Go, Node and C++ read messages that are in our archive, and continue in the log, without a change.
Apache's SDKs for gRPC do the same with simple consumers and ordered push consumers.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from rmqkit.admin import Admin
from rmqkit.broker.archive import LogArchive
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command
from rmqkit.store.message_store import MessageStore
from rmqkit.store.settings import StoreSettings
from tests.broker.sealing import sealed_in_a_thread
from tests.faults.grpc_broker import GrpcBroker
from tests.faults.spark.servers import set_queues
from tests.golden_reading import batch_topics, expected_messages
from tests.golden_stores import GoldenStore, unpack_golden
from tests.interop.apache import ask
from tests.interop.go_and_node import prepare_cpp, prepare_go, prepare_node, told
from tests.interop.kit import ApacheKit, Unavailable
from tests.interop.probe import run_probe
from tests.interop.sdks.programs import SDKS, Running
from tests.interop.server_process import wait_until
from tests.interop.standalone import Standalone, run_standalone
from tests.store.stores import golden_settings, message
from tests.waiting import SECONDS

NAME = "broker-golden"
TOPICS = ("ArchivedGo", "ArchivedNode", "ArchivedCpp-archived")
ARCHIVED = {"archived": "NORMAL", "archived-fifo": "FIFO"}
COUNT, FILE_BYTES = 60, 32 << 10
SIZES = ("mappedFileSize", "mapperFileSize", "maxHashSlotNum", "maxIndexNum")


async def archive_golden(golden: GoldenStore, place: Path) -> int:
    """Archive every full file of a store and delete it. Return the new start of the log."""
    settings = msgspec.structs.replace(golden_settings(golden), archive=str(place), file_reserved_hours=0)
    batches = batch_topics(golden.root)
    store = MessageStore(golden.root, settings, is_batch_topic=lambda topic: topic in batches)
    store.open()
    return await archive_all(store, settings)


async def archive_all(store: MessageStore, settings: StoreSettings) -> int:
    """Archive and delete the full files of a store and close it. Return the new start of the log."""
    try:
        store.flusher.flush_log()
        archive = LogArchive(store, settings, NAME, writes=True)
        store.kept_from = lambda: archive.kept_from
        with sealed_in_a_thread():
            await archive.round()
        for path in (store.root / "commitlog").iterdir():
            os.utime(path, (0, 0))
        for _ in range(5):
            store.retention.request()
            store.retention_round()
        return store.min_physical_offset
    finally:
        store.close()


@pytest.mark.interop
def test_java_reads_across_the_border(apache_kit: ApacheKit, tmp_path: Path) -> None:
    golden = unpack_golden("5.4.0", tmp_path)
    expected = expected_messages(golden)
    assert asyncio.run(archive_golden(golden, tmp_path / "archive")) >= 3 * 131072
    written = {key: value for key, value in golden.manifest["brokerConf"].items() if key.startswith(SIZES)}
    conf = {**written, "brokerName": NAME, "archive": tmp_path / "archive", "grpcServerPort": -1}
    options = [word for key, value in conf.items() for word in ("--set", f"{key}={value}")]
    with run_standalone(golden.root, tmp_path, *options) as server:
        for topic in ("GoldBig", "GoldKey"):
            run = run_probe(apache_kit, "read", namesrv=server.namesrv_addr, topic=topic, work_dir=tmp_path)
            assert run.exit_code == 0, run.outcome
            of_topic = [one for one in expected if one["topic"] == topic]
            found = [(one.queue_id, one.queue_offset) for one in run.received]
            assert sorted(found) == sorted((one["queueId"], one["queueOffset"]) for one in of_topic)
            for queue_id in {queue_id for queue_id, _ in found}:
                numbers = [number for at, number in found if at == queue_id]
                assert numbers == sorted(numbers)
            assert {queue.min_offset for queue in run.queues} == {0}
        server.stop()


def fill(folder: Path, topics: Sequence[str], **properties: str) -> dict[str, object]:
    """Fill a store with topics of one queue each and archive most messages. Return the configuration of its broker."""
    place = str(folder / "archive")
    settings = StoreSettings(commit_log_file_bytes=FILE_BYTES, archive=place, file_reserved_hours=0)
    store = MessageStore(folder / "store", settings)
    store.open()
    for number in range(COUNT):
        for topic in topics:
            store.put(message(topic=topic, queue_id=0, body=b"m%02d" % number, filler="x" * 1000, **properties))
    assert asyncio.run(archive_all(store, settings)) >= FILE_BYTES
    return {"brokerName": NAME, "archive": place, "mappedFileSizeCommitLog": FILE_BYTES}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """Run a broker with the archived topics of three clients."""
    folder = tmp_path_factory.mktemp("archived")
    conf = {**fill(folder, TOPICS), "grpcServerPort": -1}
    options = [word for key, value in conf.items() for word in ("--set", f"{key}={value}")]
    with run_standalone(folder / "store", folder, *options) as server:
        for topic in (*TOPICS, *(f"%RETRY%{topic}" for topic in TOPICS)):
            set_queues(server.broker_addr, topic, 1)
            command = Command(RequestCode.GET_ROUTEINFO_BY_TOPIC, fields={"topic": topic})
            wait_until(
                lambda command=command: ask(server.namesrv_addr, command).code == ResponseCode.SUCCESS, SECONDS, topic
            )
        yield server


@pytest.mark.interop
@pytest.mark.parametrize(("prepare", "topic"), [(prepare_go, TOPICS[0]), (prepare_node, TOPICS[1])], ids=["go", "node"])
def test_a_push_consumer_begins_in_the_archive(prepare, topic: str, server: Standalone, tmp_path: Path) -> None:
    try:
        program = prepare()
    except Unavailable as reason:
        pytest.skip(str(reason))
    running = program.start(tmp_path, server.namesrv_addr, server.broker_addr, topic, "stay")
    assert running.stdout is not None
    found = [running.stdout.readline().strip() for _ in range(COUNT)]
    assert sorted(found) == [f"m{number:02d}" for number in range(COUNT)]  # the client's threads race
    assert len(told(running)["stay"]["bodies"]) == COUNT


@pytest.mark.interop
def test_cpp_pulls_across_the_border_in_order(server: Standalone, tmp_path: Path) -> None:
    try:
        program = prepare_cpp()
    except Unavailable as reason:
        pytest.skip(str(reason))
    found = program.run(tmp_path, server.namesrv_addr, server.broker_addr, "ArchivedCpp", "archived")
    assert found["archived"] == ["first 0", *(f"m{number:02d}" for number in range(COUNT))]


@pytest.fixture(scope="module")
def sdks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GrpcBroker, Path]]:
    """Run a broker with a gRPC endpoint and archived topics of each SDK."""
    folder = tmp_path_factory.mktemp("sdks")
    topics = {f"{language}-{topic}": kind for language in SDKS for topic, kind in ARCHIVED.items()}
    broker = GrpcBroker(folder, fill(folder, list(topics), __SHARDINGKEY="g"))
    try:
        broker.start()
        asyncio.run(make(broker, topics))
        yield broker, folder
    finally:
        broker.kill()


async def make(broker: GrpcBroker, topics: Mapping[str, str]) -> None:
    async with Admin(broker.name_server) as admin:
        for topic, kind in topics.items():
            how = {"read_queues": 1, "write_queues": 1, "attributes": f"+message.type={kind}"}
            await admin.topics.create(topic, broker=broker.broker, **how)
        for topic, kind in topics.items():  # topics and groups have the same names
            await admin.groups.update(topic, {"consume_message_orderly": kind == "FIFO"}, broker.broker)
            await admin.offsets.reset(topic, topic, 0)  # a new group starts at the end, as with Apache's broker


@pytest.mark.interop
@pytest.mark.parametrize("language", SDKS)
def test_an_sdk_for_grpc_reads_across_the_border_in_order(language: str, sdks: tuple[GrpcBroker, Path]) -> None:
    try:
        program = SDKS[language]()
    except Unavailable as reason:
        pytest.skip(str(reason))
    broker, folder = sdks
    with Running(program, folder / language, broker.address, language, "archived") as running:
        wait_until(lambda: running.has_told("archived"), 2 * SECONDS, f"what {language} reads")
        found = running.facts("archived")
    expected = [f"m{number:02d}" for number in range(COUNT)]
    assert found == {"simple": [*expected, "after"], "push": expected}
