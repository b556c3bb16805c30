package rmqkit.spark;

import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.List;
import org.apache.spark.sql.execution.vectorized.OnHeapColumnVector;
import org.apache.spark.sql.execution.vectorized.WritableColumnVector;
import org.apache.spark.sql.types.MapType;
import org.apache.spark.sql.types.StructType;

/**
 * Columns of rows, one loop per column. {@code rmqkit.store.kernels.columns} and
 * {@code rmqkit.spark.kafka_columns} describe the values.
 */
final class Columns {
    private static final long MS_MAX = Long.MAX_VALUE / 1000;
    /** Kafka's number for timestamps that the broker sets. */
    private static final int LOG_APPEND_TIME = 1;
    private static final int QUEUE_ID_AT = 12;
    private static final int FLAG_AT = 16;
    private static final int QUEUE_OFFSET_AT = 20;
    private static final int CRC_AT = 8;
    private static final int BORN_AT = 40;
    private static final int BORN_HOST_AT = 48;
    private static final byte[] DIGITS = "0123456789ABCDEF".getBytes(StandardCharsets.US_ASCII);
    private static final List<String> OF_PROPERTIES = List.of("keys", "tags", "lite_topic", "msgId", "properties", "key", "headers");

    private final String[] names;
    private final StoreOptions options;
    private final OnHeapColumnVector[] vectors;
    private final Rows rows;
    private final byte[] brokerName;
    private final OnHeapColumnVector map;
    private final OnHeapColumnVector headers;
    private final boolean needsProperties;
    private final boolean parses;
    private byte[] hostBytes = {};
    private byte[] hostText = {};

    Columns(StructType schema, StoreOptions options, OnHeapColumnVector[] vectors, Rows rows, boolean parses) {
        this.names = schema.fieldNames();
        this.options = options;
        this.vectors = vectors;
        this.rows = rows;
        this.parses = parses;
        brokerName = options.brokerName.isEmpty() ? null : options.brokerName.getBytes(StandardCharsets.UTF_8);
        int at = Arrays.asList(names).indexOf("properties");
        map = at >= 0 && schema.apply(at).dataType() instanceof MapType ? vectors[at] : null;
        int headersAt = Arrays.asList(names).indexOf("headers");
        headers = headersAt >= 0 ? vectors[headersAt] : null;
        needsProperties = Arrays.stream(names).anyMatch(OF_PROPERTIES::contains);
    }

    /** Find the values of properties before the columns are written, because conditions are about them. */
    void readProperties(RecordWalk walk) {
        for (int row = 0; row < rows.count; row++) {
            setProperties(walk, row);
            rows.parse(row, null, null, options.reserved);
        }
    }

    private void setProperties(RecordWalk walk, int row) {
        Bodies.Member member = rows.member[row];
        int i = rows.record[row];
        if (member == null) {
            rows.setProperties(row, walk.file.bytes, walk.propertiesAt(i), walk.propertiesBytes[i]);
        } else {
            rows.setProperties(row, member.body(), member.propertiesAt(), member.propertiesBytes());
        }
    }

    private void reset(int count) {
        for (OnHeapColumnVector vector : vectors) {
            vector.reset();
            vector.reserve(count);
        }
        rows.mapped = 0;
        rows.headed = 0;
    }

    /** Write the one row that reports damage. */
    void report(RecordWalk walk) {
        reset(1);
        for (int c = 0; c < names.length; c++) {
            switch (names[c]) {
                case "commitLogOffset" -> vectors[c].putLong(0, walk.base + walk.damageAt);
                case "storeSize" -> vectors[c].putInt(0, (int) (walk.damageEnd - walk.damageAt));
                case "brokerName" -> text(vectors[c], 0, brokerName);
                case StoreOptions.CORRUPT -> text(vectors[c], 0, walk.reason.getBytes(StandardCharsets.UTF_8));
                default -> vectors[c].putNull(0);
            }
        }
    }

    /** Write all rows. */
    void write(RecordWalk walk) {
        reset(rows.count);
        if (needsProperties && (parses || map != null || headers != null)) {
            for (int row = 0; row < rows.count; row++) {
                setProperties(walk, row);
                rows.parse(row, map, headers, options.reserved);
            }
        }
        for (int c = 0; c < names.length; c++) {
            write(walk, names[c], vectors[c]);
        }
    }

    // Long: one case for each column.
    private void write(RecordWalk walk, String name, OnHeapColumnVector column) {
        switch (name) {
            case "topic" -> topics(walk, column);
            case "brokerName" -> {
                for (int row = 0; row < rows.count; row++) {
                    text(column, row, brokerName);
                }
            }
            case "queueId" -> ints(walk, column, QUEUE_ID_AT, false);
            case "queueOffset", "offset" -> {
                for (int row = 0; row < rows.count; row++) {
                    column.putLong(row, queueOffset(walk, row));
                }
            }
            case "commitLogOffset" -> {
                for (int row = 0; row < rows.count; row++) {
                    column.putLong(row, walk.offset(rows.record[row]));
                }
            }
            case "storeSize" -> {
                for (int row = 0; row < rows.count; row++) {
                    column.putInt(row, walk.size[rows.record[row]]);
                }
            }
            case "msgId" -> ids(walk, column);
            case "key" -> {
                for (int row = 0; row < rows.count; row++) {
                    rows.put(column, row, rows.keys.length[row] >= 0 ? rows.keys : rows.shardingKeys);
                }
            }
            case "headers" -> {} // written with the properties
            case "partition" -> column.putInts(0, rows.count, options.partition);
            case "timestampType" -> column.putInts(0, rows.count, LOG_APPEND_TIME);
            case "keys" -> values(column, rows.keys);
            case "tags" -> values(column, rows.tags);
            case "lite_topic" -> values(column, rows.liteTopics);
            case "properties" -> {
                if (map == null) {
                    propertyStrings(walk, column);
                }
            }
            case "body", "value" -> bodies(walk, column);
            case "flag" -> flags(walk, column);
            case "sysFlag" -> sysFlags(walk, column);
            case "bodyCrc" -> ints(walk, column, CRC_AT, false);
            case "bornTimestamp" -> {
                for (int row = 0; row < rows.count; row++) {
                    time(column, row, LogFile.longAt(walk.file.bytes, walk.at[rows.record[row]] + BORN_AT));
                }
            }
            case "bornHost" -> hosts(walk, column, false);
            case "storeTimestamp", "timestamp" -> {
                for (int row = 0; row < rows.count; row++) {
                    time(column, row, walk.storedMs(rows.record[row]));
                }
            }
            case "storeHost" -> hosts(walk, column, true);
            case "reconsumeTimes" -> ints(walk, column, -16, true);
            case "preparedTransactionOffset" -> {
                for (int row = 0; row < rows.count; row++) {
                    int i = rows.record[row];
                    column.putLong(row, LogFile.longAt(walk.file.bytes, walk.bodyAt(i) - 12));
                }
            }
            default -> {
                for (int row = 0; row < rows.count; row++) {
                    String reason = rows.reason[row];
                    text(column, row, reason == null ? null : reason.getBytes(StandardCharsets.UTF_8));
                }
            }
        }
    }

    private static void text(WritableColumnVector column, int row, byte[] text) {
        if (text == null) {
            column.putNull(row);
        } else {
            column.putByteArray(row, text, 0, text.length);
        }
    }

    private static void time(WritableColumnVector column, int row, long ms) {
        if (ms < -MS_MAX || ms > MS_MAX) {
            column.putNull(row);
        } else {
            column.putLong(row, ms * 1000);
        }
    }

    private void ints(RecordWalk walk, WritableColumnVector column, int place, boolean isFromBody) {
        byte[] bytes = walk.file.bytes;
        for (int row = 0; row < rows.count; row++) {
            int i = rows.record[row];
            column.putInt(row, LogFile.intAt(bytes, (isFromBody ? walk.bodyAt(i) : walk.at[i]) + place));
        }
    }

    long queueOffset(RecordWalk walk, int row) {
        return LogFile.longAt(walk.file.bytes, walk.at[rows.record[row]] + QUEUE_OFFSET_AT) + rows.number[row];
    }

    private void topics(RecordWalk walk, WritableColumnVector column) {
        byte[] bytes = walk.file.bytes;
        for (int row = 0; row < rows.count; row++) {
            int at = walk.topicAt[rows.record[row]];
            int length = walk.topicBytes[rows.record[row]];
            if (rows.reason[row] != null && !RecordWalk.isText(bytes, at, length)) {
                text(column, row, Rows.replaced(bytes, at, length));
            } else {
                column.putByteArray(row, bytes, at, length);
            }
        }
    }

    private void ids(RecordWalk walk, WritableColumnVector column) {
        Rows.Texts texts = rows.uniqueKeys;
        for (int row = 0; row < rows.count; row++) {
            if (texts.length[row] >= 0) {
                rows.put(column, row, texts);
            } else {
                text(column, row, offsetId(walk, row));
            }
        }
    }

    /** Return the packed store host and the physical offset in upper-case hexadecimal. */
    byte[] offsetId(RecordWalk walk, int row) {
        int i = rows.record[row];
        int at = hostAt(walk, i, true);
        int hostBytes = hostBytes(walk, i, true);
        byte[] id = new byte[2 * (hostBytes + 8)];
        long offset = walk.offset(i);
        for (int k = 0; k < hostBytes + 8; k++) {
            int octet = k < hostBytes ? walk.file.bytes[at + k] : (int) (offset >> 8 * (hostBytes + 7 - k));
            id[2 * k] = DIGITS[octet >> 4 & 15];
            id[2 * k + 1] = DIGITS[octet & 15];
        }
        return id;
    }

    private void values(WritableColumnVector column, Rows.Texts texts) {
        for (int row = 0; row < rows.count; row++) {
            rows.put(column, row, texts);
        }
    }

    private void propertyStrings(RecordWalk walk, WritableColumnVector column) {
        for (int row = 0; row < rows.count; row++) {
            column.putByteArray(row, rows.properties[row], rows.propertiesAt[row], rows.propertiesBytes[row]);
        }
    }

    private void bodies(RecordWalk walk, WritableColumnVector column) {
        for (int row = 0; row < rows.count; row++) {
            Bodies.Member member = rows.member[row];
            int i = rows.record[row];
            if (member != null) {
                column.putByteArray(row, member.body(), member.bodyAt(), member.bodyBytes());
            } else if (rows.plain[row] != null) {
                column.putByteArray(row, rows.plain[row], 0, rows.plain[row].length);
            } else {
                column.putByteArray(row, walk.file.bytes, walk.bodyAt(i), walk.bodyBytes[i]);
            }
        }
    }

    private void flags(RecordWalk walk, WritableColumnVector column) {
        for (int row = 0; row < rows.count; row++) {
            Bodies.Member member = rows.member[row];
            column.putInt(row, member == null
                    ? LogFile.intAt(walk.file.bytes, walk.at[rows.record[row]] + FLAG_AT)
                    : member.flag());
        }
    }

    private void sysFlags(RecordWalk walk, WritableColumnVector column) {
        for (int row = 0; row < rows.count; row++) {
            int flags = walk.sysFlag(rows.record[row]);
            boolean isClear = (options.decompress || rows.member[row] != null) && !rows.isPacked[row];
            column.putInt(row, isClear ? flags & ~RecordWalk.COMPRESSED : flags);
        }
    }

    // ------------------------------------------------------------ hosts

    private static int hostBytes(RecordWalk walk, int i, boolean isStore) {
        return (walk.sysFlag(i) & (isStore ? 0x20 : 0x10)) != 0 ? 20 : 8;
    }

    private static int hostAt(RecordWalk walk, int i, boolean isStore) {
        return walk.at[i] + BORN_HOST_AT + (isStore ? hostBytes(walk, i, false) + 8 : 0);
    }

    private void hosts(RecordWalk walk, WritableColumnVector column, boolean isStore) {
        byte[] bytes = walk.file.bytes;
        for (int row = 0; row < rows.count; row++) {
            int i = rows.record[row];
            int at = hostAt(walk, i, isStore);
            int length = hostBytes(walk, i, isStore);
            if (!Arrays.equals(bytes, at, at + length, hostBytes, 0, hostBytes.length)) {
                hostBytes = Arrays.copyOfRange(bytes, at, at + length);
                hostText = hostText(hostBytes).getBytes(StandardCharsets.US_ASCII);
            }
            column.putByteArray(row, hostText, 0, hostText.length);
        }
    }

    private static String hostText(byte[] host) {
        int port = LogFile.intAt(host, host.length - 4);
        if (host.length == 8) {
            return (host[0] & 255) + "." + (host[1] & 255) + "." + (host[2] & 255) + "." + (host[3] & 255) + ":" + port;
        }
        return "[" + addressText(host) + "]:" + port;
    }

    /** Return an IPv6 address with its longest run of two or more zero groups as {@code ::} (RFC 5952). */
    private static String addressText(byte[] host) {
        int[] groups = new int[8];
        for (int i = 0; i < 8; i++) {
            groups[i] = LogFile.unsignedShortAt(host, 2 * i);
        }
        int from = -1;
        int longest = 1;
        for (int i = 0; i < 8; i++) {
            int end = i;
            while (end < 8 && groups[end] == 0) {
                end++;
            }
            if (end - i > longest) {
                longest = end - i;
                from = i;
            }
        }
        StringBuilder text = new StringBuilder();
        for (int i = 0; i < 8; i++) {
            if (i == from) {
                text.append("::");
                i += longest - 1;
            } else {
                text.append(text.isEmpty() || text.charAt(text.length() - 1) == ':' ? "" : ":");
                text.append(Integer.toHexString(groups[i]));
            }
        }
        return text.toString();
    }
}
