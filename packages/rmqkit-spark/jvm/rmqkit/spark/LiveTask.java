package rmqkit.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import org.apache.spark.sql.connector.read.InputPartition;

/**
 * The range of a queue that one task reads, with all that a pull of it needs: a part that
 * {@code rmqkit.spark.planning} has planned.
 */
final class LiveTask implements InputPartition {
    private static final long serialVersionUID = 1L;

    private final HashMap<String, Object> values;
    final long low;
    final long high;

    private LiveTask(Map<?, ?> values, long low, long high) {
        this.values = new HashMap<>();
        values.forEach((name, value) -> this.values.put((String) name, value));
        this.low = low;
        this.high = high;
    }

    static LiveTask of(JsonNode part) {
        return new LiveTask(Peer.JSON.convertValue(part.path("pull"), Map.class), part.path("low").asLong(),
                part.path("high").asLong());
    }

    private static long number(Object value) {
        return ((Number) value).longValue();
    }

    String text(String name) {
        return (String) values.get(name);
    }

    long number(String name) {
        return number(values.get(name));
    }

    boolean isSet(String name) {
        return (Boolean) values.get(name);
    }

    List<String> texts(String name) {
        return ((List<?>) values.get(name)).stream().map(String.class::cast).toList();
    }

    /** Return the remedy for a response code, or null. */
    String remedy(int code) {
        return (String) ((Map<?, ?>) values.get("remedies")).get(Integer.toString(code));
    }

    /**
     * Return the part that meets conditions on the place of a message, or null if no message can meet them. The records
     * of a queue have its topic and its id, those of a light queue only the topic of their parent.
     */
    LiveTask within(List<Condition> conditions) {
        long from = low;
        long to = high;
        byte[] topic = text("routeTopic").getBytes(StandardCharsets.UTF_8);
        for (Condition condition : conditions) {
            switch (condition.column()) {
                case "topic" -> to = condition.meets(topic, 0, topic.length) ? to : from;
                case "queueId" -> to = isLight() || condition.meets(number("queueId")) ? to : from;
                case "queueOffset" -> {
                    if (isLight()) {
                        continue;
                    }
                    from = Math.max(from, condition.low());
                    to = condition.high() < to ? condition.high() + 1 : to;
                }
                default -> {} // tested on each message
            }
        }
        return from < to ? new LiveTask(values, from, to) : null;
    }

    /** Return true if the queue is a light queue of the topic of the route. */
    private boolean isLight() {
        return !text("routeTopic").equals(text("topicName"));
    }

    /** Return the plan of a scan for this task: its options, and conditions for its range and tags. */
    StoreTable.Plan plan(StoreTable.Plan scan) {
        StoreOptions options = new StoreOptions();
        options.decompress = isSet("decompress");
        options.unwrap = isSet("unwrap");
        options.batchRows = (int) number("batchRows");
        options.brokerName = text("brokerName");
        options.partition = (int) number("partition");
        options.reserved = new HashSet<>(texts("reserved"));
        options.liteTopics = new HashSet<>(texts("liteTopics"));
        options.litePrefix = text("litePrefix");
        List<Condition> conditions = new ArrayList<>(scan.conditions());
        // An inner batch is pulled as a whole; another task reads its messages outside of the range. The messages of a
        // light queue have the offsets of their own queues.
        if (!isLight()) {
            conditions.add(new Condition("queueOffset", null, null, low, high - 1));
        }
        // Brokers compare only hashes of tags.
        if (!texts("tags").isEmpty()) {
            List<byte[]> tags = texts("tags").stream().map(tag -> tag.getBytes(StandardCharsets.UTF_8)).toList();
            conditions.add(new Condition("tags", tags, null, Long.MIN_VALUE, Long.MAX_VALUE));
        }
        return new StoreTable.Plan(options, scan.columns(), conditions, scan.limit());
    }

    @Override
    public String toString() { // without the secret
        return "messages " + low + " to " + (high - 1) + " of " + queue();
    }

    String queue() {
        return "queue " + number("queueId") + " of " + text("topic") + " on " + text("brokerName");
    }
}
