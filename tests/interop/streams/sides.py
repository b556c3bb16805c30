"""The two sides of a situation: RocketMQ's broker of this project, and Kafka's broker, each in a process of its own.

Kafka's jars and those of ``spark-sql-kafka-0-10`` come from Maven Central, once, into the cache of `tests.interop.kit`.
The connector was built for Spark 4.2 and runs in Spark 4.3. Topics of Kafka are changed by Kafka's own clients, in the
Java machine of the Spark session.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import subprocess
from collections.abc import Coroutine, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from rmqkit import Message, sync
from rmqkit.admin import Admin
from rmqkit.errors import UnknownName
from rmqkit.protocol.schemas.clients import MessageQueue
from tests.faults.client.servers import Servers
from tests.faults.spark.servers import set_queues
from tests.interop.kit import cache_folder, fetch_jars, find_java
from tests.interop.server_process import ServerProcess, wait_until
from tests.patience import producing
from tests.ports import HOST, free_port

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["KAFKA_VERSION", "KafkaSide", "RocketmqSide", "kafka_jars"]

T = TypeVar("T")

BROKER, FILLER = "broker-a", "filler"
KAFKA_VERSION = "4.2.2"
SECONDS = 150
POLL_MS = 5000
_LOG_FILE_BYTES = 256 << 10
_CONF = f"mappedFileSizeCommitLog={_LOG_FILE_BYTES}\nmaxHashSlotNum=1000\nmaxIndexNum=4000\n"
_ROOT = Path(__file__).parents[3]
_KAFKA_POM = _ROOT / "bench" / "peers" / "kafka" / "pom.xml"
_CONNECTOR_POM = Path(__file__).with_name("pom.xml")
_OF_SPARK = ("hadoop-", "jsr305", "lz4-", "scala-library", "slf4j-", "snappy-", "spark-tags")
"""Jars that Spark has in versions of its own."""


class RocketmqSide:
    """A name server and a broker of this project, and ``format("rocketmq")``."""

    name = "rocketmq"
    format = "rocketmq"
    body = "body"
    session: Mapping[str, str] = {}

    def __init__(self, folder: Path, conf: str = _CONF) -> None:
        self._runner = asyncio.Runner()
        self._servers = Servers(folder, conf=conf)

    def __enter__(self) -> Self:
        self._run(self._servers.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._servers.__aexit__(kind, error, trace))
        self._runner.close()

    @property
    def pids(self) -> set[int]:
        """Return the process ids of the name server and the broker."""
        return {self._servers.broker.pid, *(server.pid for server in self._servers.name_servers)}

    def options(self) -> dict[str, str]:
        return {"nameServer": self._servers.namesrv_addr}

    def offsets(self, offsets: Mapping[str, Mapping[int, int]]) -> str:
        return json.dumps({topic: {BROKER: queues} for topic, queues in offsets.items()})

    def create(self, topic: str, queues: int) -> None:
        self.widen(topic, queues)

    def widen(self, topic: str, queues: int) -> None:
        set_queues(self._servers.broker.address, topic, queues)
        wait_until(lambda: self._queue_count(topic) == queues, SECONDS, f"a route with {queues} queues of {topic}")

    def delete(self, topic: str) -> None:
        async def deleted(admin: Admin) -> None:
            await admin.topics.delete(topic)

        self._with_admin(deleted)
        wait_until(lambda: self._queue_count(topic) == 0, SECONDS, f"the end of the route of {topic}")

    def send(self, topic: str, queue: int, bodies: Iterable[str]) -> None:
        with sync.Producer("streams", self._servers.namesrv_addr, settings=producing()) as producer:
            for body in bodies:
                producer.send(Message(topic=topic, body=body.encode()), queue=MessageQueue(topic, BROKER, queue))

    def expire(self, topics: Iterable[str]) -> None:
        # Retention deletes whole files of the log, and never the newest file: fill it, so that the next one begins.
        # Random text, because a producer compresses large bodies.
        if self._queue_count(FILLER) == 0:
            self.create(FILLER, 1)
        self.send(FILLER, 0, [os.urandom(_LOG_FILE_BYTES // 2 - 1000).hex() for _ in range(2)])

        async def cleaned(admin: Admin) -> bool:
            await admin.brokers.update_config({"fileReservedTime": "0"}, broker=BROKER)
            await admin.brokers.clean("expired-commitlog", broker=BROKER)
            await admin.brokers.clean("expired-cq", broker=BROKER)
            await admin.brokers.update_config({"fileReservedTime": "72"}, broker=BROKER)
            found = [await admin.topics.status(topic) for topic in topics]
            return all(queue.min_offset == queue.max_offset for status in found for queue in status.queues)

        def is_empty() -> bool:
            return bool(self._with_admin(cleaned))

        wait_until(is_empty, SECONDS, "the end of all messages")

    def kill(self) -> None:
        self._servers.broker.kill()

    def start(self) -> None:
        self._run(self._servers.broker.start())

    def _queue_count(self, topic: str) -> int:
        async def counted(admin: Admin) -> int:
            try:
                route = await admin.topics.route(topic)
            except UnknownName:
                return 0
            return sum(queues.read_queue_nums for queues in route.queue_datas)

        return self._with_admin(counted)

    def _with_admin(self, work: Any) -> Any:
        async def done() -> Any:
            async with Admin(self._servers.namesrv_addr) as admin:
                return await work(admin)

        return self._run(done())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)


class KafkaSide:
    """A broker of Kafka in KRaft mode, and ``format("kafka")``. It does not create topics automatically."""

    name = "kafka"
    format = "kafka"
    body = "value"

    def __init__(self, folder: Path) -> None:
        """Raises Unavailable: Java, Maven or the jars are missing."""
        connector, kafka = kafka_jars()
        jars = [str(jar) for jar in sorted(connector.glob("*.jar")) if not jar.name.startswith(_OF_SPARK)]
        path = os.pathsep.join(jars)
        self.session = {"spark.driver.extraClassPath": path, "spark.executor.extraClassPath": path}
        self._folder = folder
        self._port, controller = free_port(), free_port()
        self._address = f"{HOST}:{self._port}"
        options = ["-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        self._java = [str(find_java()), *options, "-cp", f"{kafka}/*"]
        self._conf = folder / "server.properties"
        settings = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "listeners": f"PLAINTEXT://{self._address},CONTROLLER://{HOST}:{controller}",
            "controller.listener.names": "CONTROLLER",
            "controller.quorum.voters": f"1@{HOST}:{controller}",
            "log.dirs": folder / "data",
            "offsets.topic.replication.factor": 1,
            "transaction.state.log.replication.factor": 1,
            "auto.create.topics.enable": "false",
        }
        self._conf.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        self._process: ServerProcess | None = None
        self._gateway: Any = None
        self._jvm: Any = None
        self._admin: Any = None

    def __enter__(self) -> Self:
        command = [*self._java, "kafka.tools.StorageTool", "format", "-t", "rmqkitStreamsBeside00A", "-c"]
        subprocess.run([*command, str(self._conf)], check=True, stdout=subprocess.DEVNULL)
        self._start_process()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def attach(self, spark: SparkSession) -> None:
        """Connect to the broker with the clients in the session's Java machine, and wait until it answers."""
        self._gateway = spark.sparkContext._gateway
        self._jvm = spark._jvm
        self._admin = self._jvm.org.apache.kafka.clients.admin.Admin.create(self._properties())
        self._wait_ready()

    @property
    def pids(self) -> set[int]:
        """Return the process id of the broker."""
        assert self._process is not None, "the broker runs"
        return {self._process.pid}

    def options(self) -> dict[str, str]:
        # A task that reads a deleted topic waits this long for each try, by default two minutes.
        return {"kafka.bootstrap.servers": self._address, "kafkaConsumer.pollTimeoutMs": str(POLL_MS)}

    def offsets(self, offsets: Mapping[str, Mapping[int, int]]) -> str:
        return json.dumps(offsets)

    def create(self, topic: str, queues: int) -> None:
        one = self._jvm.java.lang.Short.valueOf("1")
        new = self._jvm.org.apache.kafka.clients.admin.NewTopic(topic, queues, one)
        self._admin.createTopics([new]).all().get()
        wait_until(lambda: self._partition_count(topic) == queues, SECONDS, f"{topic} with {queues} partitions")

    def widen(self, topic: str, queues: int) -> None:
        new = self._jvm.org.apache.kafka.clients.admin.NewPartitions.increaseTo(queues)
        self._admin.createPartitions({topic: new}).all().get()
        wait_until(lambda: self._partition_count(topic) == queues, SECONDS, f"{topic} with {queues} partitions")

    def delete(self, topic: str) -> None:
        self._admin.deleteTopics([topic]).all().get()
        wait_until(lambda: self._partition_count(topic) == 0, SECONDS, f"the end of {topic}")

    def send(self, topic: str, queue: int, bodies: Iterable[str]) -> None:
        properties = self._properties()
        serializer = self._jvm.org.apache.kafka.common.serialization.StringSerializer
        producer = self._jvm.org.apache.kafka.clients.producer.KafkaProducer(properties, serializer(), serializer())
        record = self._jvm.org.apache.kafka.clients.producer.ProducerRecord
        try:
            for sent in [producer.send(record(topic, queue, None, body)) for body in bodies]:
                sent.get()
        finally:
            producer.close()

    def expire(self, topics: Iterable[str]) -> None:
        package = self._jvm.org.apache.kafka
        partitions = [
            package.common.TopicPartition(topic, number)
            for topic in topics
            for number in range(self._partition_count(topic))
        ]
        latest = package.clients.admin.OffsetSpec.latest()
        ends = self._admin.listOffsets(dict.fromkeys(partitions, latest)).all().get()
        wanted = {one: self._before(end) for one in partitions if (end := ends[one].offset())}
        self._admin.deleteRecords(wanted).all().get()

    def _before(self, offset: int) -> Any:
        """Return ``RecordsToDelete.beforeOffset(offset)``. Py4J cannot call it, because a method of the object has the
        same name."""
        found = self._jvm.java.lang.Class.forName("org.apache.kafka.clients.admin.RecordsToDelete").getMethods()
        method = next(one for one in found if one.getName() == "beforeOffset" and one.getParameterCount() == 1)
        arguments = self._gateway.new_array(self._jvm.java.lang.Object, 1)
        arguments[0] = offset
        return method.invoke(None, arguments)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def start(self) -> None:
        self._start_process()
        self._wait_ready()

    def _start_process(self) -> None:
        self._process = ServerProcess([*self._java, "kafka.Kafka", str(self._conf)], self._folder / "kafka.log")

    def _wait_ready(self) -> None:
        from py4j.protocol import Py4JJavaError

        def is_ready() -> bool:
            with contextlib.suppress(Py4JJavaError):  # an answer is late while the broker starts
                return bool(self._admin.describeCluster().nodes().get().size() == 1)
            return False

        wait_until(is_ready, SECONDS, "Kafka's broker")

    def _properties(self) -> Any:
        properties = self._jvm.java.util.HashMap()
        properties.put("bootstrap.servers", self._address)
        return properties

    def _partition_count(self, topic: str) -> int:
        if not self._admin.listTopics().names().get().contains(topic):
            return 0
        from py4j.protocol import Py4JJavaError

        try:
            return int(self._admin.describeTopics([topic]).allTopicNames().get()[topic].partitions().size())
        except Py4JJavaError:  # deleted since it was listed
            return 0


def kafka_jars() -> tuple[Path, Path]:
    """Return the folders with the jars of the connector and of the broker, fetched on first use. Raises Unavailable."""
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    connector, kafka = cache / "spark-sql-kafka", cache / "kafka"
    with (cache / "lock-kafka").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other processes of a run wait, and then find all jars
        for pom, folder in ((_CONNECTOR_POM, connector), (_KAFKA_POM, kafka)):
            if not folder.is_dir():
                fetch_jars(folder.name, folder, pom)
    return connector, kafka
