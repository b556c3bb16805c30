"""`from_body_avro` and `from_body_protobuf` with Spark's real packages: bodies of a store become columns.

PySpark does not have these packages, so each is fetched from Maven Central once, without its dependencies, which Spark
has. If the version of the installed Spark is not available, the oldest version that rmqkit supports is used: Spark's
functions that it calls have not changed since. A JVM loads packages only at its start, so the query runs in a separate
process: ``python -m tests.interop.test_spark_bodies JAR STORE KIND``, which prints its rows as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyspark
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from rmqkit.spark import from_body_avro, from_body_protobuf, spark_session
from tests.interop.kit import Unavailable, cache_folder, fetch_jars
from tests.spark.session import SMALL, short_lived, small
from tests.store.stores import message, opened

OLDEST = "4.2.0"
SECONDS_MAX = 300
ORDERS = [(5, "tea"), (-(1 << 40), "K\u00e4se"), (0, "")]
AVRO = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "fields": [{"name": "cents", "type": "long"}, {"name": "item", "type": "string"}],
    }
)
POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>rmqkit.interop</groupId><artifactId>spark-package</artifactId><version>1</version>
  <packaging>pom</packaging>
  <dependencies><dependency>
    <groupId>org.apache.spark</groupId><artifactId>{name}_2.13</artifactId><version>{version}</version>
    <exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>
  </dependency></dependencies>
  <build><plugins><plugin>
    <groupId>org.apache.maven.plugins</groupId><artifactId>maven-dependency-plugin</artifactId><version>3.6.1</version>
  </plugin></plugins></build>
</project>
"""

pytestmark = pytest.mark.interop


def package(name: str, folder: Path) -> Path:
    """Return the jar of one of Spark's packages. Raises Unavailable: no suitable version is available."""
    cache = cache_folder().absolute()
    cache.mkdir(parents=True, exist_ok=True)
    reasons = []
    for version in dict.fromkeys((pyspark.__version__, OLDEST)):
        lib = cache / f"{name}-{version}"
        if not lib.is_dir():
            pom = folder / "pom.xml"
            pom.write_text(POM.format(name=name, version=version))
            try:
                fetch_jars(f"{name} of Spark {version}", lib, pom)
            except Unavailable as reason:
                reasons.append(str(reason))
                continue
        (jar,) = lib.glob("*.jar")
        return jar
    raise Unavailable("; ".join(reasons))


def file_descriptor() -> descriptor_pb2.FileDescriptorProto:
    """``message Order { int64 cents = 1; string item = 2; }``"""
    described = descriptor_pb2.FileDescriptorProto(name="order.proto", package="shop", syntax="proto3")
    order = described.message_type.add(name="Order")
    field = descriptor_pb2.FieldDescriptorProto
    order.field.add(name="cents", number=1, type=field.TYPE_INT64, label=field.LABEL_OPTIONAL)
    order.field.add(name="item", number=2, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    return described


def avro_body(cents: int, item: str) -> bytes:
    """Return a long and a string in Avro's format: numbers in zigzag, seven bits to a byte."""
    text = item.encode()
    return b"".join((_avro_long(cents), _avro_long(len(text)), text))


def _avro_long(value: int) -> bytes:
    left, found = (value << 1) ^ (value >> 63), bytearray()
    while left > 0x7F:
        found.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*found, left])


def protobuf_body(cents: int, item: str) -> bytes:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file_descriptor())
    order = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))
    body: bytes = order(cents=cents, item=item).SerializeToString()
    return body


def rows(jar: Path, store: Path, kind: str) -> list[Any]:
    """Return the result of the query in a process that has the package."""
    command = [sys.executable, "-m", "tests.interop.test_spark_bodies", jar, store, kind]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS_MAX, env=small(), cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("kind", "encode"), [("avro", avro_body), ("protobuf", protobuf_body)], ids=["avro", "protobuf"]
)
def test_bodies_of_a_store_are_columns(kind: str, encode: Any, tmp_path: Path) -> None:
    try:
        jar = package(f"spark-{kind}", tmp_path)
    except Unavailable as reason:
        pytest.skip(str(reason))
    with opened(tmp_path / "store") as store:
        for cents, item in ORDERS:
            store.put(message(topic="Orders", queue_id=0, body=encode(cents, item)))
        store.flusher.flush_log()
    assert rows(jar, tmp_path / "store", kind) == [list(order) for order in ORDERS]


def main(jar: str, store: str, kind: str) -> None:
    """Read a store with the package and print the columns of its bodies."""
    conf = {**SMALL, "spark.jars": jar, "spark.driver.extraJavaOptions": short_lived()}
    spark = spark_session(master="local[1]", conf=conf)
    described = descriptor_pb2.FileDescriptorSet(file=[file_descriptor()]).SerializeToString()
    order = from_body_avro(AVRO) if kind == "avro" else from_body_protobuf("shop.Order", described)
    messages = spark.read.format("rocketmq-store").option("topic", "Orders").load(store)
    found = messages.orderBy("queueOffset").select(order.alias("order")).select("order.cents", "order.item").collect()
    print(json.dumps([list(row) for row in found]))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
