package rmqkit.spark;

import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.HashMap;
import java.util.HashSet;
import java.util.Map;
import java.util.Set;
import org.apache.spark.sql.execution.vectorized.WritableColumnVector;

/**
 * The rows made of a run of records, before they become columns. A record is one row, or one row per message of its
 * inner batch. The arrays have an element per row.
 */
final class Rows {
    private static final int NAME_END = 1;
    private static final int ENTRY_END = 2;
    private static final int KEYS = 0x4B455953;
    private static final int TAGS = 0x54414753;
    private static final byte[] UNIQ_KEY = "UNIQ_KEY".getBytes(StandardCharsets.US_ASCII);
    private static final byte[] SHARDING_KEY = "__SHARDINGKEY".getBytes(StandardCharsets.US_ASCII);
    private static final byte[] LITE_TOPIC = "__LITE_TOPIC".getBytes(StandardCharsets.US_ASCII);
    private static final int COMPARED_MAX = 32;
    private static final long EIGHT_THREES = 0x0303030303030303L;

    int count;
    /** The index of the record in its run, and of the message in its inner batch. */
    int[] record = new int[RecordWalk.ROWS_MAX];
    int[] number = new int[RecordWalk.ROWS_MAX];
    /** The message of an inner batch, or null. */
    Bodies.Member[] member = new Bodies.Member[RecordWalk.ROWS_MAX];
    /** The decompressed body, or null. */
    byte[][] plain = new byte[RecordWalk.ROWS_MAX][];
    /** The reason why the row is damaged, or null. */
    String[] reason = new String[RecordWalk.ROWS_MAX];
    /** The body could not be decompressed: sysFlag still says that it is compressed. */
    boolean[] isPacked = new boolean[RecordWalk.ROWS_MAX];
    /** The property string, and the places of five values in it; a length of -1 means that there is no such value. */
    byte[][] properties = new byte[RecordWalk.ROWS_MAX][];
    int[] propertiesAt = new int[RecordWalk.ROWS_MAX];
    int[] propertiesBytes = new int[RecordWalk.ROWS_MAX];
    final Texts keys = new Texts();
    final Texts tags = new Texts();
    final Texts uniqueKeys = new Texts();
    final Texts shardingKeys = new Texts();
    final Texts liteTopics = new Texts();
    private final Texts[] found = {keys, tags, uniqueKeys, shardingKeys, liteTopics};

    /** The numbers of entries in the map column and in the column of headers. */
    int mapped;
    int headed;

    private int entries;
    /** A bit for each name: without two names of one bit no name is repeated. */
    private long nameBits;
    private boolean mayRepeat;
    private int[] nameAt = new int[COMPARED_MAX];
    private int[] equalsAt = new int[COMPARED_MAX];
    private int[] valueEnd = new int[COMPARED_MAX];
    private final byte[][] namesBefore = new byte[COMPARED_MAX][];
    private final boolean[] wereReserved = new boolean[COMPARED_MAX];

    /** The places of one value per row in the property strings. */
    static final class Texts {
        int[] at = new int[RecordWalk.ROWS_MAX];
        int[] length = new int[RecordWalk.ROWS_MAX];

        void put(int row, int from, int bytes) {
            at[row] = from;
            length[row] = bytes;
        }
    }

    /** Add a row and return its number. */
    int add(int index, int inBatch, Bodies.Member message) {
        if (count == record.length) {
            grow(2 * count);
        }
        record[count] = index;
        number[count] = inBatch;
        member[count] = message;
        plain[count] = null;
        reason[count] = null;
        isPacked[count] = false;
        return count++;
    }

    private void grow(int capacity) {
        record = Arrays.copyOf(record, capacity);
        number = Arrays.copyOf(number, capacity);
        member = Arrays.copyOf(member, capacity);
        plain = Arrays.copyOf(plain, capacity);
        reason = Arrays.copyOf(reason, capacity);
        isPacked = Arrays.copyOf(isPacked, capacity);
        properties = Arrays.copyOf(properties, capacity);
        propertiesAt = Arrays.copyOf(propertiesAt, capacity);
        propertiesBytes = Arrays.copyOf(propertiesBytes, capacity);
        for (Texts texts : found) {
            texts.at = Arrays.copyOf(texts.at, capacity);
            texts.length = Arrays.copyOf(texts.length, capacity);
        }
    }

    /** Set the property string of a row; bytes that are not UTF-8 become U+FFFD. */
    void setProperties(int row, byte[] bytes, int from, int length) {
        boolean isText = RecordWalk.isText(bytes, from, length);
        properties[row] = isText ? bytes : replaced(bytes, from, length);
        propertiesAt[row] = isText ? from : 0;
        propertiesBytes[row] = isText ? length : properties[row].length;
    }

    static byte[] replaced(byte[] bytes, int from, int length) {
        return new String(bytes, from, length, StandardCharsets.UTF_8).getBytes(StandardCharsets.UTF_8);
    }

    /** Write a value of a row, or null. */
    void put(WritableColumnVector column, int row, Texts texts) {
        if (texts.length[row] >= 0) {
            column.putByteArray(row, properties[row], texts.at[row], texts.length[row]);
        } else {
            column.putNull(row);
        }
    }

    /**
     * Find the four values of a row. Append all its properties to a map column if there is one, and those that are not
     * reserved to a column of Kafka's headers. An entry needs a name and a value; the last of several entries with one
     * name counts.
     */
    void parse(int row, WritableColumnVector map, WritableColumnVector headers, Set<String> reserved) {
        for (Texts texts : found) {
            texts.length[row] = -1;
        }
        entries = 0;
        nameBits = 0;
        mayRepeat = false;
        byte[] bytes = properties[row];
        int from = propertiesAt[row];
        int end = from + propertiesBytes[row];
        int equals = -1;
        for (int word = from; word < end; word += 8) {
            for (long ends = separators(bytes, word, end); ends != 0; ends &= ends - 1) {
                int at = word + Long.numberOfTrailingZeros(ends) / 8;
                if (bytes[at] == ENTRY_END) {
                    addEntry(row, bytes, from, equals, at);
                    from = at + 1;
                    equals = -1;
                } else if (bytes[at] == NAME_END && equals < 0) {
                    equals = at;
                }
            }
        }
        addEntry(row, bytes, from, equals, end);
        if (map != null) {
            int kept = append(row, map.getChild(0), map.getChild(1), mapped, Set.of());
            map.putArray(row, mapped, kept);
            mapped += kept;
        }
        if (headers != null) {
            WritableColumnVector header = headers.arrayData();
            header.reserve(headed + entries);
            int kept = append(row, header.getChild(0), header.getChild(1), headed, reserved);
            if (kept == 0) {
                headers.putNull(row);
            } else {
                headers.putArray(row, headed, kept);
            }
            headed += kept;
        }
    }

    /** Return a bit for each of the next eight bytes that is below 3: the highest bit of its byte, little-endian. */
    private static long separators(byte[] bytes, int at, int end) {
        long eight = 0;
        if (at + 8 <= bytes.length) {
            eight = Long.reverseBytes(LogFile.longAt(bytes, at));
        } else {
            for (int i = end - 1; i >= at; i--) {
                eight = eight << 8 | bytes[i] & 0xFF;
            }
        }
        long found = ~((eight | RecordWalk.EIGHT_SIGNS) - EIGHT_THREES) & ~eight & RecordWalk.EIGHT_SIGNS;
        return end - at >= 8 ? found : found & (1L << 8 * (end - at)) - 1;
    }

    private void note(int row, byte[] bytes, int from, int equals, int stop) {
        int length = equals - from;
        if (length == 4) {
            int name = LogFile.intAt(bytes, from);
            if (name == KEYS) {
                keys.put(row, equals + 1, stop - equals - 1);
            } else if (name == TAGS) {
                tags.put(row, equals + 1, stop - equals - 1);
            }
        } else if (length == UNIQ_KEY.length && Arrays.equals(bytes, from, equals, UNIQ_KEY, 0, length)) {
            uniqueKeys.put(row, equals + 1, stop - equals - 1);
        } else if (length == SHARDING_KEY.length && Arrays.equals(bytes, from, equals, SHARDING_KEY, 0, length)) {
            shardingKeys.put(row, equals + 1, stop - equals - 1);
        } else if (length == LITE_TOPIC.length && Arrays.equals(bytes, from, equals, LITE_TOPIC, 0, length)) {
            liteTopics.put(row, equals + 1, stop - equals - 1);
        }
    }

    private void addEntry(int row, byte[] bytes, int from, int equals, int stop) {
        if (equals <= from || stop <= equals + 1) {
            return;
        }
        note(row, bytes, from, equals, stop);
        if (entries == nameAt.length) {
            nameAt = Arrays.copyOf(nameAt, 2 * entries);
            equalsAt = Arrays.copyOf(equalsAt, 2 * entries);
            valueEnd = Arrays.copyOf(valueEnd, 2 * entries);
        }
        long bit = 1L << (bytes[from] + 31 * bytes[equals - 1] + 7 * (equals - from));
        mayRepeat |= (nameBits & bit) != 0;
        nameBits |= bit;
        nameAt[entries] = from;
        equalsAt[entries] = equals;
        valueEnd[entries++] = stop;
    }

    /**
     * Append the names and values of the entries behind the first {@code count} ones, and return their number. Both
     * columns get the whole property string at once, and places in it.
     */
    private int append(
            int row, WritableColumnVector names, WritableColumnVector values, int count, Set<String> reserved) {
        byte[] bytes = properties[row];
        names.reserve(count + entries);
        values.reserve(count + entries);
        int shift = names.arrayData().appendBytes(propertiesBytes[row], bytes, propertiesAt[row]) - propertiesAt[row];
        int same = values.arrayData().appendBytes(propertiesBytes[row], bytes, propertiesAt[row]) - propertiesAt[row];
        assert same == shift : "both columns have the same bytes";
        Set<Integer> dropped = mayRepeat && entries > COMPARED_MAX ? repeatedOfMany(bytes) : null;
        int kept = 0;
        for (int i = 0; i < entries; i++) {
            boolean isDropped = mayRepeat && (dropped == null ? isRepeated(bytes, i) : dropped.contains(i));
            if (!isDropped && (reserved.isEmpty() || !isReserved(bytes, i, reserved))) {
                names.putArray(count + kept, nameAt[i] + shift, equalsAt[i] - nameAt[i]);
                values.putArray(count + kept, equalsAt[i] + 1 + shift, valueEnd[i] - equalsAt[i] - 1);
                kept++;
            }
        }
        return kept;
    }

    /** Look up a name. Most messages have the name of the message before at the same place. */
    private boolean isReserved(byte[] bytes, int entry, Set<String> reserved) {
        int place = entry % COMPARED_MAX;
        byte[] before = namesBefore[place];
        if (before == null || !Arrays.equals(before, 0, before.length, bytes, nameAt[entry], equalsAt[entry])) {
            namesBefore[place] = Arrays.copyOfRange(bytes, nameAt[entry], equalsAt[entry]);
            wereReserved[place] = reserved.contains(nameOf(bytes, entry));
        }
        return wereReserved[place];
    }

    private String nameOf(byte[] bytes, int entry) {
        return new String(bytes, nameAt[entry], equalsAt[entry] - nameAt[entry], StandardCharsets.UTF_8);
    }

    /** Return true if a later entry has the same name. */
    private boolean isRepeated(byte[] bytes, int entry) {
        int length = equalsAt[entry] - nameAt[entry];
        for (int i = entry + 1; i < entries; i++) {
            if (equalsAt[i] - nameAt[i] == length
                    && bytes[nameAt[i]] == bytes[nameAt[entry]]
                    && Arrays.equals(bytes, nameAt[i], equalsAt[i], bytes, nameAt[entry], equalsAt[entry])) {
                return true;
            }
        }
        return false;
    }

    private Set<Integer> repeatedOfMany(byte[] bytes) {
        Map<String, Integer> last = new HashMap<>();
        Set<Integer> repeated = new HashSet<>();
        for (int i = 0; i < entries; i++) {
            Integer before = last.put(nameOf(bytes, i), i);
            if (before != null) {
                repeated.add(before);
            }
        }
        return repeated;
    }

    /** Move a row to another place, further up. */
    void move(int from, int to) {
        record[to] = record[from];
        number[to] = number[from];
        member[to] = member[from];
        plain[to] = plain[from];
        reason[to] = reason[from];
        isPacked[to] = isPacked[from];
        properties[to] = properties[from];
        propertiesAt[to] = propertiesAt[from];
        propertiesBytes[to] = propertiesBytes[from];
        for (Texts texts : found) {
            texts.put(to, texts.at[from], texts.length[from]);
        }
    }
}
