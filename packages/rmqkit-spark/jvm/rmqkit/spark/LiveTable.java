package rmqkit.spark;

import java.util.Arrays;
import java.util.Map;
import java.util.Objects;
import java.util.Set;
import java.util.stream.Stream;
import org.apache.spark.sql.connector.catalog.Column;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.SupportsWrite;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.metric.CustomMetric;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.connector.write.LogicalWriteInfo;
import org.apache.spark.sql.connector.write.WriteBuilder;
import org.apache.spark.sql.execution.datasources.v2.python.PythonInputPartition;
import org.apache.spark.sql.execution.datasources.v2.python.PythonMicroBatchStreamWithTriggerAvailableNow;
import org.apache.spark.sql.sources.Filter;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * Topics as a table, and a scan of it. The table of the Python source plans each scan, with all columns of the schema,
 * because it checks them; it also writes. A batch is a snapshot of the topics at its first scan.
 */
final class LiveTable implements SupportsRead, SupportsWrite {
    private final SupportsRead twin;
    private final StructType schema;
    private final CaseInsensitiveStringMap given;

    LiveTable(SupportsRead twin, StructType schema, Map<String, String> given) {
        this.twin = twin;
        this.schema = schema;
        this.given = new CaseInsensitiveStringMap(given);
    }

    @Override
    public String name() {
        return LiveSource.NAME;
    }

    @Override
    public Column[] columns() {
        return StoreTable.columns(schema);
    }

    @Override
    public Set<TableCapability> capabilities() {
        return twin.capabilities();
    }

    @Override
    public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
        return ((SupportsWrite) twin).newWriteBuilder(info);
    }

    @Override
    public ScanBuilder newScanBuilder(CaseInsensitiveStringMap ofScan) {
        return new PushDowns(schema, true) {
            @Override
            public Scan build() {
                return new LiveScan(twin.newScanBuilder(given).build(), plan(null), pushed);
            }
        };
    }

    /** Make tasks of the partitions that Python has planned, without those that have no wanted message. */
    static InputPartition[] tasks(Stream<byte[]> pickled, StoreTable.Plan plan) {
        return pickled.map(LiveTask::of)
                .filter(Objects::nonNull)
                .map(task -> task.within(plan.conditions()))
                .filter(Objects::nonNull)
                .toArray(InputPartition[]::new);
    }

    private record LiveScan(Scan twin, StoreTable.Plan plan, Filter[] pushed) implements Scan, Batch {
        @Override
        public StructType readSchema() {
            return plan.columns();
        }

        @Override
        public String description() {
            return LiveSource.NAME + plan.shown(pushed);
        }

        @Override
        public Batch toBatch() {
            return this;
        }

        @Override
        public MicroBatchStream toMicroBatchStream(String checkpoint) {
            return new LiveStream(
                    (PythonMicroBatchStreamWithTriggerAvailableNow) twin.toMicroBatchStream(checkpoint), plan);
        }

        @Override
        public InputPartition[] planInputPartitions() {
            return tasks(Arrays.stream(twin.toBatch().planInputPartitions())
                    .map(one -> ((PythonInputPartition) one).pickedPartition()), plan);
        }

        @Override
        public PartitionReaderFactory createReaderFactory() {
            return new StoreTable.Readers(plan);
        }

        @Override
        public CustomMetric[] supportedCustomMetrics() {
            return new CustomMetric[] {new StoreTable.BytesRead(), new StoreTable.BytesSkipped()};
        }
    }
}
