package rmqkit.spark;

import java.io.Serializable;
import java.nio.charset.StandardCharsets;
import java.sql.Timestamp;
import java.time.Instant;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.stream.Collectors;
import org.apache.spark.sql.sources.EqualNullSafe;
import org.apache.spark.sql.sources.EqualTo;
import org.apache.spark.sql.sources.Filter;
import org.apache.spark.sql.sources.GreaterThan;
import org.apache.spark.sql.sources.GreaterThanOrEqual;
import org.apache.spark.sql.sources.In;
import org.apache.spark.sql.sources.IsNotNull;
import org.apache.spark.sql.sources.LessThan;
import org.apache.spark.sql.sources.LessThanOrEqual;

/**
 * One pushed filter: the column is one of some texts, or a number (a time in µs) from {@code low} to {@code high}.
 * Without texts and bounds it says that the column is not null.
 *
 * <p>Rows are tested before they are decoded, and exactly: Spark does not test them again. As in SQL, null meets no
 * condition.
 */
record Condition(String column, List<byte[]> texts, long[] numbers, long low, long high) implements Serializable {
    private static final List<String> TEXTS = List.of("topic", "keys", "tags", "lite_topic", "msgId");
    private static final List<String> TIMES = List.of("storeTimestamp", "bornTimestamp");
    private static final List<String> NUMBERS = List.of("queueId", "queueOffset", "commitLogOffset");
    private static final List<String> NEVER_NULL = List.of("topic", "queueId", "queueOffset", "commitLogOffset", "msgId");

    /** Return the condition of a filter, or null if Spark has to test the filter itself. */
    static Condition of(Filter filter) {
        if (filter instanceof IsNotNull test) {
            return new Condition(test.attribute(), null, null, Long.MIN_VALUE, Long.MAX_VALUE).known();
        }
        if (filter instanceof EqualTo test) {
            return in(test.attribute(), test.value());
        }
        if (filter instanceof EqualNullSafe test) {
            return in(test.attribute(), test.value());
        }
        if (filter instanceof In test) {
            return in(test.attribute(), test.values());
        }
        if (filter instanceof GreaterThanOrEqual test) {
            return range(test.attribute(), test.value(), 0, Long.MAX_VALUE);
        }
        if (filter instanceof GreaterThan test) {
            return range(test.attribute(), test.value(), 1, Long.MAX_VALUE);
        }
        if (filter instanceof LessThanOrEqual test) {
            return range(test.attribute(), test.value(), 0, Long.MIN_VALUE);
        }
        if (filter instanceof LessThan test) {
            return range(test.attribute(), test.value(), -1, Long.MIN_VALUE);
        }
        return null;
    }

    private Condition known() {
        return TEXTS.contains(column) || TIMES.contains(column) || NUMBERS.contains(column) ? this : null;
    }

    private static Condition in(String column, Object... values) {
        if (TEXTS.contains(column)) {
            List<byte[]> texts = new ArrayList<>();
            for (Object value : values) {
                if (!(value instanceof String text)) {
                    return null;
                }
                texts.add(text.getBytes(StandardCharsets.UTF_8));
            }
            return new Condition(column, texts, null, Long.MIN_VALUE, Long.MAX_VALUE);
        }
        long[] numbers = new long[values.length];
        for (int i = 0; i < values.length; i++) {
            Long number = number(column, values[i]);
            if (number == null) {
                return null;
            }
            numbers[i] = number;
        }
        long low = Arrays.stream(numbers).min().orElse(1);
        return new Condition(column, null, numbers, low, Arrays.stream(numbers).max().orElse(0));
    }

    private static Condition range(String column, Object value, int step, long open) {
        Long number = number(column, value);
        if (number == null || number == Long.MAX_VALUE || number == Long.MIN_VALUE) {
            return null;
        }
        long bound = number + step;
        return open == Long.MAX_VALUE
                ? new Condition(column, null, null, bound, open)
                : new Condition(column, null, null, open, bound);
    }

    private static Long number(String column, Object value) {
        if (TIMES.contains(column)) {
            Instant time = value instanceof Timestamp stamp ? stamp.toInstant() : value instanceof Instant at ? at : null;
            return time == null ? null : Math.addExact(Math.multiplyExact(time.getEpochSecond(), 1_000_000L),
                    time.getNano() / 1000);
        }
        return NUMBERS.contains(column) && (value instanceof Integer || value instanceof Long)
                ? Long.valueOf(((Number) value).longValue())
                : null;
    }

    /** Return true if the column is null in no record. It may be null in the rows that report damage. */
    boolean isAlwaysMet() {
        return texts == null && numbers == null && low == Long.MIN_VALUE && high == Long.MAX_VALUE
                && NEVER_NULL.contains(column);
    }

    /** Return options of the format that let through every row that meets the condition. */
    Map<String, String> asOptions() {
        Map<String, String> options = new HashMap<>();
        if (column.equals("topic") && texts != null) {
            List<String> topics = texts.stream().map(text -> new String(text, StandardCharsets.UTF_8)).toList();
            // An option is split at commas and stripped.
            if (topics.stream().allMatch(topic -> topic.matches("[^,\\s]+"))) {
                options.put("topic", String.join(",", topics));
            }
        }
        if (column.equals("queueId") && numbers != null && low >= 0) {
            options.put("queueId", Arrays.stream(numbers).mapToObj(Long::toString).collect(Collectors.joining(",")));
        }
        if (column.equals("storeTimestamp") && low >= 1000) {
            options.put("startingTimestamp", Long.toString(low / 1000));
        }
        if (column.equals("storeTimestamp") && high >= 0 && high < Long.MAX_VALUE) {
            options.put("endingTimestamp", Long.toString(high / 1000 + 1));
        }
        return options;
    }

    boolean meets(long number) {
        if (number < low || number > high) {
            return false;
        }
        if (numbers == null) {
            return true;
        }
        for (long one : numbers) {
            if (one == number) {
                return true;
            }
        }
        return false;
    }

    boolean meets(byte[] bytes, int from, int length) {
        if (texts == null) {
            return true;
        }
        for (byte[] text : texts) {
            if (Arrays.equals(text, 0, text.length, bytes, from, from + length)) {
                return true;
            }
        }
        return false;
    }

    @Override
    public String toString() {
        if (texts != null) {
            return column + " in " + texts.stream().map(text -> new String(text, StandardCharsets.UTF_8)).toList();
        }
        return numbers != null
                ? column + " in " + Arrays.toString(numbers)
                : column + (low == Long.MIN_VALUE ? "" : " >= " + low) + (high == Long.MAX_VALUE ? "" : " <= " + high)
                        + (low == Long.MIN_VALUE && high == Long.MAX_VALUE ? " is not null" : "");
    }
}
