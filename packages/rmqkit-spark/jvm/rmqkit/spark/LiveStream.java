package rmqkit.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.IOException;
import java.util.Arrays;
import java.util.LongSummaryStatistics;
import java.util.Map;
import java.util.Optional;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.connector.read.streaming.Offset;
import org.apache.spark.sql.connector.read.streaming.ReadLimit;
import org.apache.spark.sql.connector.read.streaming.ReportsSourceMetrics;
import org.apache.spark.sql.connector.read.streaming.SupportsTriggerAvailableNow;
import org.apache.spark.sql.execution.datasources.v2.python.PythonMicroBatchStreamWithTriggerAvailableNow;
import org.apache.spark.sql.execution.datasources.v2.python.PythonStreamingInputPartition;

/**
 * A stream of topics. The Python stream reader computes offsets and plans batches, so a checkpoint has the same offsets
 * with and without the jar; tasks read in the JVM.
 */
record LiveStream(PythonMicroBatchStreamWithTriggerAvailableNow python, StoreTable.Plan plan)
        implements MicroBatchStream, SupportsTriggerAvailableNow, ReportsSourceMetrics {
    @Override
    public InputPartition[] planInputPartitions(Offset start, Offset end) {
        return LiveTable.tasks(Arrays.stream(python.planInputPartitions(start, end))
                .map(one -> ((PythonStreamingInputPartition) one).pickedPartition()), plan);
    }

    @Override
    public PartitionReaderFactory createReaderFactory() {
        return new StoreTable.Readers(plan);
    }

    @Override
    public Offset initialOffset() {
        return python.initialOffset();
    }

    @Override
    public Offset latestOffset() {
        return python.latestOffset();
    }

    @Override
    public Offset latestOffset(Offset start, ReadLimit limit) {
        return python.latestOffset(start, limit);
    }

    @Override
    public ReadLimit getDefaultReadLimit() {
        return python.getDefaultReadLimit();
    }

    @Override
    public Offset reportLatestOffset() {
        return python.reportLatestOffset();
    }

    @Override
    public void prepareForTriggerAvailableNow() {
        python.prepareForTriggerAvailableNow();
    }

    @Override
    public Offset deserializeOffset(String json) {
        return python.deserializeOffset(json);
    }

    @Override
    public void commit(Offset end) {
        python.commit(end);
    }

    @Override
    public void stop() {
        python.stop();
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
