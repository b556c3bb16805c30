package rmqkit.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.Map;
import java.util.Objects;
import java.util.Set;
import java.util.stream.StreamSupport;
import org.apache.spark.sql.connector.catalog.Column;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.SupportsWrite;
import org.apache.spark.sql.connector.catalog.Table;
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
import org.apache.spark.sql.sources.Filter;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * Topics as a table, and a scan of it. A planner in Python plans each scan. The Python source writes. A batch is a
 * snapshot of the topics at its first scan.
 */
final class LiveTable implements SupportsRead, SupportsWrite {
    private final Table twin;
    private final StructType schema;
    private final Map<String, String> given;
    private final Planner.Python python;
    /** The schema if Python has to check it, or null. */
    private final String unchecked;
    private JsonNode batch;

    LiveTable(Table twin, StructType schema, Map<String, String> given, Planner.Python python, boolean isChecked) {
        this.twin = twin;
        this.schema = schema;
        this.given = given;
        this.python = python;
        unchecked = isChecked ? null : schema.json();
    }

    /** Return the parts of all batches, which were planned at the first call. */
    private synchronized JsonNode batch() {
        if (batch == null) {
            try (Planner planner = planner(false)) {
                batch = planner.call("batch");
            }
        }
        return batch;
    }

    private Planner planner(boolean isStream) {
        return Planner.open(python, given, unchecked, isStream);
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
                return new LiveScan(plan(null), pushed);
            }
        };
    }

    /** Make tasks of planned parts, without those that have no wanted message. */
    static InputPartition[] tasks(JsonNode parts, StoreTable.Plan plan) {
        return StreamSupport.stream(parts.spliterator(), false)
                .map(part -> LiveTask.of(part).within(plan.conditions()))
                .filter(Objects::nonNull)
                .toArray(InputPartition[]::new);
    }

    private final class LiveScan implements Scan, Batch {
        private final StoreTable.Plan plan;
        private final Filter[] pushed;

        LiveScan(StoreTable.Plan plan, Filter[] pushed) {
            this.plan = plan;
            this.pushed = pushed;
        }

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
            return new LiveStream(planner(true), plan);
        }

        @Override
        public InputPartition[] planInputPartitions() {
            return tasks(batch(), plan);
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
