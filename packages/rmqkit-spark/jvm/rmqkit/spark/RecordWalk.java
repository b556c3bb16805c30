package rmqkit.spark;

import java.nio.ByteBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import rmqkit.errors.Failure;

/**
 * The records of a part of a commit log file, or of a pulled body, run by run: the JVM's form of
 * {@code rmqkit.store.log.scan}, which describes the format, the checks, and the ends of a chain. Tests hold both equal.
 */
final class RecordWalk {
    /** The results of {@link #next}. */
    enum Found { RUN, DAMAGE, END }

    static final int ROWS_MAX = 4096;
    static final int RECORD_BYTES_MIN = 91;
    static final int COMPRESSED = 0x1;
    static final long EIGHT_SIGNS = 0x8080808080808080L;
    private static final int MAGIC_V1 = 0xDAA320A7;
    private static final int MAGIC_V2 = 0xDAA320AB;
    private static final int BLANK_MAGIC = 0xCBD43194;
    private static final int BLANK_BYTES = 8;
    private static final int[] HEAD_BYTES = {88, 100, 100, 112};
    private static final int V1_TOPIC_BYTES_MAX = 127;
    private static final int HEAD_BYTES_MIN = 88;

    final LogFile file;
    final long base;
    /** The run: a number per record. Places are indexes in {@code file.bytes}. */
    int count;
    final int[] at = new int[ROWS_MAX];
    final int[] size = new int[ROWS_MAX];
    final int[] head = new int[ROWS_MAX];
    final int[] bodyBytes = new int[ROWS_MAX];
    final int[] topicAt = new int[ROWS_MAX];
    final int[] topicBytes = new int[ROWS_MAX];
    final int[] propertiesBytes = new int[ROWS_MAX];
    /** The position in the file of the first record of the run. */
    long first;
    /** The damage: the position where a record was expected, and where the next record begins. */
    long damageAt;
    long damageEnd;
    String reason;

    private long position;
    private final long low;
    private final long high;
    private final int rowsMax;
    private long lastStoredMs;
    /** The parts of a record, as {@link #unfit} found them; the place of the topic counts from the record. */
    private int headBytes;
    private int body;
    private int topic;
    private int topicLength;

    RecordWalk(LogFile file, long base, long low, long high, int rowsMax) {
        this.file = file;
        this.base = base;
        this.position = low;
        this.low = low;
        this.high = high;
        this.rowsMax = Math.min(rowsMax, ROWS_MAX);
    }

    /** Return a walk through pulled bodies, whose records are contiguous wherever they are in the log. */
    static RecordWalk ofPulled(byte[] bodies, int length, int rowsMax) {
        return new RecordWalk(new LogFile(bodies, length), 0, 0, length, rowsMax);
    }

    long bytes() {
        return high - low;
    }

    /** The physical offset of the record at an index of the run. */
    long offset(int index) {
        return LogFile.longAt(file.bytes, at[index] + 28);
    }

    /** The position in the file of the record at an index of the run. */
    long positionOf(int index) {
        return first + at[index] - at[0];
    }

    int sysFlag(int index) {
        return LogFile.intAt(file.bytes, at[index] + 36);
    }

    long storedMs(int index) {
        return LogFile.longAt(file.bytes, at[index] + 56 + (head[index] > HEAD_BYTES_MIN && bornIsV6(index) ? 12 : 0));
    }

    boolean bornIsV6(int index) {
        return (sysFlag(index) & 0x10) != 0;
    }

    int bodyAt(int index) {
        return at[index] + head[index];
    }

    int propertiesAt(int index) {
        return topicAt[index] + topicBytes[index] + 2;
    }

    Found next() {
        if (position >= high) {
            return Found.END;
        }
        if (run()) {
            lastStoredMs = storedMs(count - 1);
            position += at[count - 1] - at[0] + size[count - 1];
            return Found.RUN;
        }
        if (file.isPulled) {
            throw Failure.ofBody("a pulled body of " + high + " bytes has no record at byte " + position);
        }
        if (high - position < BLANK_BYTES) {
            return Found.END;
        }
        if (closesFile()) {
            long resumed = behindBlank();
            if (resumed == high) {
                position = high;
                return Found.END;
            }
            reason = "a blank that closes the file, with records after it";
            damageEnd = resumed;
        } else {
            damageEnd = findRecord(position + 1);
            String why = unsound(position);
            reason = why == null ? "not a record" : why;
        }
        damageAt = position;
        position = damageEnd;
        return Found.DAMAGE;
    }

    /** Read the sound records from the position on that are in the window; at least one, whatever its size. */
    boolean run() {
        count = 0;
        first = position;
        long place = position;
        while (count < rowsMax && high - place >= RECORD_BYTES_MIN) {
            // Only the first record may move the window: the others would lose their bytes.
            if (count > 0 && place + HEAD_BYTES_MIN > file.windowEnd()) {
                break;
            }
            int length = sizeOf(place);
            if (length == 0 || count > 0 && place + length > file.windowEnd()) {
                break;
            }
            if (!add(place, length)) {
                break;
            }
            place += length;
        }
        return count > 0;
    }

    /** Return the size of what may be a record, or 0. */
    private int sizeOf(long place) {
        int index = file.load(place, HEAD_BYTES_MIN);
        byte[] bytes = file.bytes;
        int length = LogFile.intAt(bytes, index);
        int magic = LogFile.intAt(bytes, index + 4);
        return (magic == MAGIC_V1 || magic == MAGIC_V2)
                        && length >= RECORD_BYTES_MIN
                        && length <= high - place
                        && (file.isPulled || LogFile.longAt(bytes, index + 28) == base + place)
                ? length
                : 0;
    }

    /** Add the record at a position to the run if its parts make its size. */
    private boolean add(long place, int length) {
        // A damaged size may claim most of the file: look at the few bytes that decide before loading them all.
        if (length > LogFile.WINDOW_BYTES && unfit(place, length) != null) {
            return false;
        }
        int index = file.load(place, length);
        if (unfit(place, length) != null) {
            return false;
        }
        at[count] = index;
        size[count] = length;
        head[count] = headBytes;
        bodyBytes[count] = body;
        topicAt[count] = index + topic;
        topicBytes[count] = topicLength;
        propertiesBytes[count] = length - topic - topicLength - 2;
        count++;
        return true;
    }

    private boolean closesFile() {
        int index = file.load(position, BLANK_BYTES);
        return LogFile.intAt(file.bytes, index + 4) == BLANK_MAGIC
                && LogFile.intAt(file.bytes, index) >= file.size - position;
    }

    private long behindBlank() {
        long found = findRecord(position + BLANK_BYTES);
        if (found == high) {
            return high;
        }
        return storedAt(found) >= lastStoredMs ? found : high;
    }

    private long storedAt(long place) {
        int index = file.load(place, (int) Math.min(HEAD_BYTES_MIN + 12, file.size - place));
        int born = LogFile.intAt(file.bytes, index + 36) & 0x10;
        return LogFile.longAt(file.bytes, index + 56 + (born != 0 ? 12 : 0));
    }

    /** Return the position of the first sound record at or after {@code low}, or the end of the part. */
    long findRecord(long low) {
        long place = low;
        while (place + RECORD_BYTES_MIN <= high) {
            int length = (int) Math.min(LogFile.WINDOW_BYTES / 2, high - place);
            int index = file.load(place, length);
            byte[] bytes = file.bytes;
            int last = index + length - RECORD_BYTES_MIN;
            int found = index;
            while (found <= last
                    && !(bytes[found + 4] == (byte) 0xDA
                            && bytes[found + 5] == (byte) 0xA3
                            && bytes[found + 6] == 0x20
                            && LogFile.longAt(bytes, found + 28) == base + place + found - index)) {
                found++;
            }
            place += found - index;
            if (found <= last && unsound(place) == null) {
                return place;
            }
            place += found <= last ? 1 : 0;
        }
        return high;
    }

    /** Return the reason why the bytes at a position are not a sound record, or null if they are one. */
    String unsound(long place) {
        long left = high - place;
        int index = file.load(place, (int) Math.min(left, HEAD_BYTES_MIN));
        byte[] bytes = file.bytes;
        if (left < BLANK_BYTES || LogFile.longAt(bytes, index) == 0) {
            return isZero(bytes, index, (int) Math.min(left, BLANK_BYTES))
                    ? "zeros where a record should begin"
                    : "only " + left + " bytes left";
        }
        int length = LogFile.intAt(bytes, index);
        int magic = LogFile.intAt(bytes, index + 4);
        if (magic == BLANK_MAGIC) {
            return "a blank that says " + length + " bytes where " + (file.size - place) + " are left";
        }
        if (left < HEAD_BYTES_MIN) {
            return "only " + left + " bytes left";
        }
        if (magic != MAGIC_V1 && magic != MAGIC_V2) {
            return String.format("magic is %08x", magic);
        }
        if (length < HEAD_BYTES_MIN || length > left) {
            return "announced size is " + length + " and " + left + " bytes are left";
        }
        String why = unfit(place, length);
        if (why != null) {
            return why;
        }
        if (!isText(file.bytes, file.load(place + topic, topicLength), topicLength)) {
            return "the topic is not UTF-8";
        }
        long said = LogFile.longAt(file.bytes, file.load(place, HEAD_BYTES_MIN) + 28);
        return said == base + place
                ? null
                : "it says physical offset " + said + " and lies at " + (base + place);
    }

    /**
     * Return the reason why the parts of a record do not make its size, or null. Sets the numbers of the parts, and
     * reads nothing else.
     */
    private String unfit(long place, int length) {
        int index = file.load(place, HEAD_BYTES_MIN);
        boolean isV2 = LogFile.intAt(file.bytes, index + 4) == MAGIC_V2;
        headBytes = HEAD_BYTES[(LogFile.intAt(file.bytes, index + 36) & 0x30) >> 4];
        if (headBytes > length) {
            return "announced size " + length + " is smaller than its head";
        }
        index = file.load(place, headBytes);
        body = LogFile.intAt(file.bytes, index + headBytes - 4);
        long topicStart = (long) headBytes + body + (isV2 ? 2 : 1);
        if (body < 0 || topicStart + 2 > length) {
            return "body length " + body + " does not fit into size " + length;
        }
        topic = (int) topicStart;
        index = file.load(place + topic - 2, 2) + 2;
        topicLength = isV2 ? (short) LogFile.unsignedShortAt(file.bytes, index - 2) : file.bytes[index - 1] & 0xFF;
        if (topicLength < 0 || !isV2 && topicLength > V1_TOPIC_BYTES_MAX || topicStart + topicLength + 2 > length) {
            return "topic length " + topicLength + " does not fit into size " + length;
        }
        short properties = (short) LogFile.unsignedShortAt(file.bytes, file.load(place + topic + topicLength, 2));
        return properties < 0 || topic + topicLength + 2 + properties != length
                ? "its parts do not add up to the announced size " + length
                : null;
    }

    private static boolean isZero(byte[] bytes, int index, int length) {
        for (int i = index; i < index + length; i++) {
            if (bytes[i] != 0) {
                return false;
            }
        }
        return true;
    }

    static boolean isText(byte[] bytes, int from, int length) {
        int i = from;
        while (i + 8 <= from + length && (LogFile.longAt(bytes, i) & EIGHT_SIGNS) == 0) {
            i += 8;
        }
        for (; i < from + length; i++) {
            if (bytes[i] < 0) {
                try {
                    StandardCharsets.UTF_8.newDecoder().decode(ByteBuffer.wrap(bytes, from, length));
                    return true;
                } catch (CharacterCodingException error) {
                    return false;
                }
            }
        }
        return true;
    }
}
