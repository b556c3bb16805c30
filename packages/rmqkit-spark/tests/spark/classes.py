"""Make the archive of Java classes that the Spark sessions of the tests start from (``java -XX:ArchiveClassesAtExit``).

``python -m tests.spark.classes`` runs in one session what the tests run in many: a start costs some 6 s of CPU then, in
place of 11. Where there is no Java, or an archive, it says so and makes none.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmqkit.errors import SettingsError
from rmqkit.spark import spark_session
from tests.golden_stores import unpack_golden
from tests.spark.session import CLASSES, HOME, SHORT_LIVED, SMALL, small

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run_what_tests_run(spark: SparkSession, folder: Path) -> None:
    """Read our source, group, join, sort, write files and stream, so that the classes for these are loaded."""
    store = unpack_golden("5.4.0", folder / "store").root
    messages = spark.read.format("rocketmq-store").load(str(store))
    messages.createOrReplaceTempView("messages")
    spark.sql(
        "select a.topic, count(*), max(b.queueOffset) from messages a join messages b using (commitLogOffset)"
        " where a.topic like 'Gold%' group by a.topic order by 1"
    ).collect()
    messages.select("topic", "queueId").repartition(2, "topic").write.partitionBy("topic").parquet(f"{folder}/parquet")
    spark.read.parquet(f"{folder}/parquet").filter("queueId = 0").count()
    spark.read.json(spark.sparkContext.parallelize(['{"a": 1}'])).collect()
    stream = spark.readStream.schema("queueId int").parquet(f"{folder}/parquet").writeStream.format("parquet")
    stream = stream.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True)
    stream.start(f"{folder}/streamed").awaitTermination()


def main() -> None:
    if CLASSES.exists():
        return
    os.environ.update(small())
    with tempfile.TemporaryDirectory(dir=HOME) as name:
        made = Path(name, CLASSES.name)
        options = f"{SHORT_LIVED} -XX:ArchiveClassesAtExit={made} -Xlog:disable"
        try:
            spark = spark_session("classes", "local[2]", {**SMALL, "spark.driver.extraJavaOptions": options})
        except SettingsError as exc:
            print(f"env: no archive of Spark's classes: {exc}")
            return
        gateway: Any = spark.sparkContext._gateway
        run_what_tests_run(spark, Path(name))
        spark.stop()
        # Java writes the archive when it ends, and it ends with the pipe to us.
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait()
        if made.exists():
            made.rename(CLASSES)
        else:
            print("env: no archive of Spark's classes: this Java makes none")


if __name__ == "__main__":
    main()
