package rmqkit.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.OptionalLong;
import java.util.Set;
import org.apache.spark.sql.connector.catalog.Column;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.connector.metric.CustomMetric;
import org.apache.spark.sql.connector.metric.CustomSumMetric;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.read.Statistics;
import org.apache.spark.sql.connector.read.SupportsReportStatistics;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.sources.Filter;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import org.apache.spark.sql.vectorized.ColumnarBatch;

/**
 * A store as a table, and a scan of it. A table of messages is a snapshot of the log at its first scan. Without options
 * that this reader serves, the scan is that of the Python source, with the columns and messages that a query needs.
 */
final class StoreTable implements SupportsRead {
    private final StoreOptions options;
    private final StructType schema;
    private final Map<String, String> given;
    private List<LogFiles.Segment> segments;
    private List<LogFiles.Split> splits;

    StoreTable(StoreOptions options, StructType schema, Map<String, String> given) {
        this.options = options;
        this.schema = schema;
        this.given = given;
    }

    @Override
    public String name() {
        // An address of an object store may contain a secret.
        return StoreSource.NAME + (options == null ? "" : " " + String.join(",", options.folders()));
    }

    @Override
    public Map<String, String> properties() {
        return options == null ? Map.of() : given;
    }

    @Override
    public Column[] columns() {
        return columns(schema);
    }

    static Column[] columns(StructType schema) {
        return Arrays.stream(schema.fields())
                .map(field -> Column.create(field.name(), field.dataType(), field.nullable()))
                .toArray(Column[]::new);
    }

    @Override
    public Set<TableCapability> capabilities() {
        return Set.of(TableCapability.BATCH_READ);
    }

    @Override
    public ScanBuilder newScanBuilder(CaseInsensitiveStringMap ofScan) {
        return new Builder(isServed());
    }

    /** Return the splits of all files, as they were at the first call. */
    private synchronized List<LogFiles.Split> splits() {
        if (splits == null && options.keys.isEmpty()) {
            segments = LogFiles.find(options.folders());
            splits = LogFiles.splits(segments, options.splitBytes);
        }
        return splits;
    }

    /** Return true if this reader can serve a scan. Otherwise the Python source reads or reports why it cannot. */
    private synchronized boolean isServed() {
        if (options == null || options.keys.isEmpty() || splits != null) {
            return options != null;
        }
        // The records at which the index points are a snapshot, too.
        try (Planner planner = Planner.take(Planner.Python.of(StoreSource.TWIN))) {
            JsonNode found = planner.call("indexed", given);
            if (found.isNull()) {
                return false;
            }
            splits = new ArrayList<>();
            for (JsonNode at : found) {
                splits.add(new LogFiles.Split(
                        at.get(0).asText(), at.get(1).asLong(), at.get(2).asLong(), at.get(3).asLong()));
            }
        }
        return true;
    }

    /** The bytes of the log that the tasks read. Spark makes metrics by their class: each needs a class of its own. */
    public static final class BytesRead extends CustomSumMetric {
        @Override
        public String name() {
            return "logBytesRead";
        }

        @Override
        public String description() {
            return "bytes of the commit log that were read";
        }
    }

    /** The bytes of the records that conditions excluded before they were decoded. */
    public static final class BytesSkipped extends CustomSumMetric {
        @Override
        public String name() {
            return "logBytesSkipped";
        }

        @Override
        public String description() {
            return "bytes of messages that were excluded before they were decoded";
        }
    }

    private final class Builder extends PushDowns {
        private final boolean isServed;

        Builder(boolean isServed) {
            super(schema, isServed);
            this.isServed = isServed;
        }

        @Override
        public Scan build() {
            if (!isServed) {
                // A read without columns would be one of all columns there.
                StructType columns = required.isEmpty() ? new StructType().add(schema.apply(0)) : required;
                Map<String, String> narrowed = narrowed();
                return ((SupportsRead) StoreSource.twin().getTable(columns, new Transform[0], narrowed))
                        .newScanBuilder(new CaseInsensitiveStringMap(narrowed))
                        .build();
            }
            return new StoreScan(plan(options), pushed);
        }

        /** Return the options, with those that say what the conditions say. Spark tests the conditions again. */
        private Map<String, String> narrowed() {
            CaseInsensitiveStringMap all = new CaseInsensitiveStringMap(given);
            Map<String, String> narrowed = new HashMap<>(given);
            for (Condition condition : all.getOrDefault("entity", "messages").equals("messages") ? conditions : List.<Condition>of()) {
                condition.asOptions().forEach((name, value) -> {
                    if (!all.containsKey(name)) {
                        narrowed.putIfAbsent(name, value);
                    }
                });
            }
            return narrowed;
        }
    }

    /** All that a task needs to know of a read. */
    record Plan(StoreOptions options, StructType columns, List<Condition> conditions, int limit)
            implements java.io.Serializable {
        /** Return the text that EXPLAIN shows for pushed filters and a limit. */
        String shown(Filter[] pushed) {
            return " PushedFilters: " + Arrays.toString(pushed)
                    + (limit == Integer.MAX_VALUE ? "" : ", PushedLimit: " + limit);
        }
    }

    /** The splits that one task reads. */
    record Part(List<LogFiles.Split> splits) implements InputPartition {}

    /** Makes the readers of the tasks. */
    record Readers(Plan plan) implements PartitionReaderFactory {
        @Override
        public boolean supportColumnarReads(InputPartition partition) {
            return true;
        }

        @Override
        public PartitionReader<InternalRow> createReader(InputPartition partition) {
            throw new UnsupportedOperationException("rows are read in columns");
        }

        @Override
        public PartitionReader<ColumnarBatch> createColumnarReader(InputPartition partition) {
            if (partition instanceof LiveTask task) {
                Plan ofTask = task.plan(plan);
                return new StoreReader(new Pulls(task, ofTask.options().batchRows), ofTask);
            }
            return StoreReader.ofSplits(((Part) partition).splits(), plan);
        }
    }

    private final class StoreScan implements Scan, Batch, SupportsReportStatistics {
        private final Plan plan;
        private final Filter[] pushed;

        StoreScan(Plan plan, Filter[] pushed) {
            this.plan = plan;
            this.pushed = pushed;
        }

        @Override
        public StructType readSchema() {
            return plan.columns();
        }

        @Override
        public String description() {
            return name() + plan.shown(pushed);
        }

        @Override
        public Batch toBatch() {
            return this;
        }

        /** Return the splits of the files that may have messages of the wanted times. */
        private List<LogFiles.Split> chosen() {
            long startUs = Long.MIN_VALUE;
            long endUs = Long.MAX_VALUE;
            for (Condition condition : plan.conditions()) {
                if (condition.column().equals("storeTimestamp")) {
                    startUs = Math.max(startUs, condition.low());
                    endUs = Math.min(endUs, condition.high());
                }
            }
            long startMs = Math.max(options.startMs, startUs == Long.MIN_VALUE ? startUs : startUs / 1000);
            long endMs = Math.min(options.endMs, endUs == Long.MAX_VALUE ? endUs : endUs / 1000);
            List<LogFiles.Split> all = splits();
            if (!options.keys.isEmpty()) {
                return all;
            }
            List<String> within = LogFiles.within(segments, startMs, endMs).stream().map(LogFiles.Segment::path).toList();
            return all.stream().filter(split -> within.contains(split.path())).toList();
        }

        @Override
        public InputPartition[] planInputPartitions() {
            return LogFiles.grouped(chosen(), options.splitBytes).stream()
                    .map(Part::new)
                    .toArray(InputPartition[]::new);
        }

        @Override
        public PartitionReaderFactory createReaderFactory() {
            return new Readers(plan);
        }

        @Override
        public Statistics estimateStatistics() {
            long bytes = chosen().stream().mapToLong(split -> split.high() - split.low()).sum();
            boolean hasBodies = Arrays.asList(plan.columns().fieldNames()).contains("body");
            return new Statistics() {
                @Override
                public OptionalLong sizeInBytes() {
                    return OptionalLong.of(hasBodies ? bytes : bytes / 4);
                }

                @Override
                public OptionalLong numRows() {
                    return OptionalLong.empty();
                }
            };
        }

        @Override
        public CustomMetric[] supportedCustomMetrics() {
            return new CustomMetric[] {new BytesRead(), new BytesSkipped()};
        }
    }
}
