package rmqkit.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.TextNode;
import java.io.IOException;
import java.util.LongSummaryStatistics;
import java.util.Map;
import java.util.Optional;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.connector.read.streaming.Offset;
import org.apache.spark.sql.connector.read.streaming.ReadLimit;
import org.apache.spark.sql.connector.read.streaming.ReadMaxRows;
import org.apache.spark.sql.connector.read.streaming.ReportsSourceMetrics;
import org.apache.spark.sql.connector.read.streaming.SupportsTriggerAvailableNow;

/**
 * A stream of topics. Python computes offsets and plans batches, so a checkpoint has the same offsets with and without
 * the jar; tasks read in the JVM.
 */
record LiveStream(Planner planner, StoreTable.Plan plan)
        implements MicroBatchStream, SupportsTriggerAvailableNow, ReportsSourceMetrics {
    /** Offsets in Python's JSON. */
    private static final class Place extends Offset {
        private final String json;

        Place(JsonNode json) {
            this.json = json.asText();
        }

        @Override
        public String json() {
            return json;
        }
    }

    @Override
    public InputPartition[] planInputPartitions(Offset start, Offset end) {
        return LiveTable.tasks(planner.call("parts", start.json(), end.json()), plan);
    }

    @Override
    public PartitionReaderFactory createReaderFactory() {
        return new StoreTable.Readers(plan);
    }

    @Override
    public Offset initialOffset() {
        return new Place(planner.call("initialOffset"));
    }

    @Override
    public Offset latestOffset() {
        throw new UnsupportedOperationException("Spark passes the start and the limit of a batch");
    }

    @Override
    public Offset latestOffset(Offset start, ReadLimit limit) {
        long rows = limit instanceof ReadMaxRows max ? max.maxRows() : 0;
        return new Place(planner.call("latestOffset", start == null ? null : start.json(), rows));
    }

    @Override
    public ReadLimit getDefaultReadLimit() {
        long rows = planner.call("rowsMax").asLong();
        return rows == 0 ? ReadLimit.allAvailable() : ReadLimit.maxRows(rows);
    }

    @Override
    public Offset reportLatestOffset() {
        JsonNode latest = planner.call("knownLatest");
        return latest.isNull() ? null : new Place(latest);
    }

    @Override
    public void prepareForTriggerAvailableNow() {
        planner.call("endNow");
    }

    @Override
    public Offset deserializeOffset(String json) {
        return new Place(TextNode.valueOf(json));
    }

    @Override
    public void commit(Offset end) {
        planner.call("commit", end.json());
    }

    @Override
    public void stop() {
        planner.close();
    }

    /** Return the numbers of {@code rmqkit.spark.backlog_summary}, as Spark's Kafka source reports them. */
    @Override
    public Map<String, String> metrics(Optional<Offset> consumed) {
        Offset latest = consumed.isPresent() ? reportLatestOffset() : null;
        if (latest == null) {
            return Map.of();
        }
        LongSummaryStatistics behind = new LongSummaryStatistics();
        try {
            JsonNode read = Peer.JSON.readTree(consumed.get().json());
            Peer.JSON.readTree(latest.json()).properties().forEach(topic ->
                    topic.getValue().properties().forEach(broker ->
                            broker.getValue().properties().forEach(queue -> {
                                long done = read.path(topic.getKey()).path(broker.getKey()).path(queue.getKey()).asLong();
                                behind.accept(Math.max(0, queue.getValue().asLong() - done));
                            })));
        } catch (IOException error) {
            throw new IllegalStateException(error);
        }
        return behind.getCount() == 0
                ? Map.of()
                : Map.of("minOffsetsBehindLatest", Long.toString(behind.getMin()),
                        "avgOffsetsBehindLatest", Double.toString(behind.getAverage()),
                        "maxOffsetsBehindLatest", Long.toString(behind.getMax()));
    }
}
