package rmqkit.spark;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Iterator;
import java.util.List;
import java.util.function.Supplier;
import java.util.regex.Pattern;
import org.apache.spark.sql.connector.metric.CustomTaskMetric;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.execution.vectorized.OnHeapColumnVector;
import org.apache.spark.sql.vectorized.ColumnarBatch;
import rmqkit.errors.StoreError;

/**
 * The reader of one task: runs of records, of a store or of pulled bodies, become batches of columns.
 *
 * <p>Conditions on heads and topics are tested first, then records are unpacked, then conditions on properties are
 * tested, and only the rows that are left are decoded. What a row shows is described at
 * {@code rmqkit.store.kernels.batch}.
 */
final class StoreReader implements PartitionReader<ColumnarBatch> {
    private static final int PLAIN_BYTES_MAX = 32 << 20;
    private static final int INNER = 0xC0;
    private static final long MS_MAX = Long.MAX_VALUE / 1000;
    /** The characters at which Python splits keys. */
    private static final Pattern BLANKS = Pattern.compile("[\\s\\x1c-\\x1f]+", Pattern.UNICODE_CHARACTER_CLASS);
    private static final List<String> OF_ROWS = List.of("queueOffset", "keys", "tags", "lite_topic", "msgId");

    private final StoreTable.Plan plan;
    private final StoreOptions options;
    private final Supplier<RecordWalk> walks;
    private final List<Condition> ofOptions;
    private final List<Condition> ofRecords = new ArrayList<>();
    private final List<Condition> ofRows = new ArrayList<>();
    private final boolean needsBodies;
    private final boolean needsTopics;
    private final boolean testsOptions;
    private final boolean testsProperties;
    private final Columns columns;
    private final Rows rows = new Rows();
    private final OnHeapColumnVector[] vectors;
    private final ColumnarBatch batch;
    private RecordWalk walk;
    private int cursor;
    private long left;
    private long bytesRead;
    private long bytesSkipped;

    /** Read the records of walks until the supplier returns null. */
    StoreReader(Supplier<RecordWalk> walks, StoreTable.Plan plan) {
        this.plan = plan;
        this.options = plan.options();
        this.walks = walks;
        this.left = plan.limit();
        List<String> names = Arrays.asList(plan.columns().fieldNames());
        needsBodies = names.contains("body") || names.contains("value");
        needsTopics = names.contains("topic");
        ofOptions = conditions(options);
        for (Condition condition : plan.conditions()) {
            if (!condition.isAlwaysMet()) {
                (OF_ROWS.contains(condition.column()) ? ofRows : ofRecords).add(condition);
            }
        }
        testsOptions = !options.keys.isEmpty() || options.isOfLiteTopics();
        testsProperties = testsOptions
                || ofRows.stream().anyMatch(condition -> !condition.column().equals("queueOffset"));
        vectors = OnHeapColumnVector.allocateColumns(Math.min(options.batchRows, RecordWalk.ROWS_MAX), plan.columns());
        batch = new ColumnarBatch(vectors);
        columns = new Columns(plan.columns(), options, vectors, rows, !testsProperties);
    }

    static StoreReader ofSplits(List<LogFiles.Split> splits, StoreTable.Plan plan) {
        Iterator<LogFiles.Split> left = splits.iterator();
        return new StoreReader(() -> left.hasNext() ? open(left.next(), plan.options().batchRows) : null, plan);
    }

    private static List<Condition> conditions(StoreOptions options) {
        List<Condition> conditions = new ArrayList<>();
        if (!options.topics.isEmpty()) {
            List<byte[]> topics = options.topics.stream().map(topic -> topic.getBytes(StandardCharsets.UTF_8)).toList();
            conditions.add(new Condition("topic", topics, null, Long.MIN_VALUE, Long.MAX_VALUE));
        }
        if (options.queueIds.length > 0) {
            long[] ids = Arrays.stream(options.queueIds).asLongStream().toArray();
            conditions.add(new Condition("queueId", null, ids, Long.MIN_VALUE, Long.MAX_VALUE));
        }
        if (options.startMs != Long.MIN_VALUE || options.endMs != Long.MAX_VALUE) {
            long low = options.startMs == Long.MIN_VALUE ? options.startMs : options.startMs * 1000;
            long high = options.endMs == Long.MAX_VALUE ? options.endMs : options.endMs * 1000 - 1;
            conditions.add(new Condition("storeTimestamp", null, null, low, high));
        }
        return conditions;
    }

    @Override
    public boolean next() {
        while (left > 0) {
            if (walk != null && cursor < walk.count) {
                if (fill()) {
                    return true;
                }
                continue;
            }
            if (walk == null) {
                walk = walks.get();
                if (walk == null) {
                    return false;
                }
                bytesRead += walk.bytes();
            }
            switch (walk.next()) {
                case RUN:
                    cursor = 0;
                    break;
                case DAMAGE:
                    walk.count = 0;
                    if (damage()) {
                        return true;
                    }
                    break;
                default:
                    closeFile();
            }
        }
        return false;
    }

    private static RecordWalk open(LogFiles.Split split, int rowsMax) {
        LogFile file = new LogFile(split.path());
        if (file.size < split.high()) {
            file.close();
            throw new StoreError(split.path() + " has " + file.size + " bytes, " + split.high()
                    + " when the query was planned: load it again");
        }
        return new RecordWalk(file, split.base(), split.low(), split.high(), rowsMax);
    }

    private void closeFile() {
        if (walk != null) {
            walk.file.close();
            walk = null;
            cursor = 0;
        }
    }

    /** Treat damage: fail, skip it, or return true with a batch of one row that reports it. */
    private boolean damage() {
        if (options.corruptRecords.equals("fail")) {
            throw damaged(walk.damageAt, walk.reason);
        }
        if (options.corruptRecords.equals("skip")) {
            return false;
        }
        for (Condition condition : plan.conditions()) {
            if (!condition.column().equals("commitLogOffset") || !condition.meets(walk.base + walk.damageAt)) {
                return false; // the other columns are null
            }
        }
        columns.report(walk);
        emit(1);
        return true;
    }

    private StoreError damaged(long position, String reason) {
        return new StoreError(walk.file.path + ": damage at byte " + position + " (commitLogOffset "
                + (walk.base + position) + "): " + reason
                + "; corruptRecordMode=skip reads on, report shows it in rows");
    }

    private void emit(int count) {
        int emitted = (int) Math.min(count, left);
        left -= emitted;
        batch.setNumRows(emitted);
    }

    /** Make a batch of the next records of the run; false if none of them has a row. */
    private boolean fill() {
        rows.count = 0;
        int budget = PLAIN_BYTES_MAX;
        while (cursor < walk.count && budget > 0) {
            int i = cursor++;
            if (meets(i, ofOptions) && meets(i, ofRecords)) {
                if (verified(i)) {
                    budget -= addRows(i);
                }
            } else {
                bytesSkipped += walk.size[i];
            }
        }
        if (testsProperties) {
            columns.readProperties(walk);
        }
        if (!ofRows.isEmpty() || testsOptions) {
            keepMatching();
        }
        if (rows.count == 0) {
            return false;
        }
        columns.write(walk);
        emit(rows.count);
        return true;
    }

    private boolean meets(int i, List<Condition> conditions) {
        for (int k = 0; k < conditions.size(); k++) {
            Condition condition = conditions.get(k);
            boolean met = switch (condition.column()) {
                case "topic" -> condition.meets(walk.file.bytes, walk.topicAt[i], walk.topicBytes[i]);
                case "queueId" -> condition.meets(LogFile.intAt(walk.file.bytes, walk.at[i] + 12));
                case "commitLogOffset" -> condition.meets(walk.offset(i));
                case "storeTimestamp" -> meetsMs(condition, walk.storedMs(i));
                default -> meetsMs(condition, LogFile.longAt(walk.file.bytes, walk.at[i] + 40));
            };
            if (!met) {
                return false;
            }
        }
        return true;
    }

    private static boolean meetsMs(Condition condition, long ms) {
        return ms >= -MS_MAX && ms <= MS_MAX && condition.meets(ms * 1000);
    }

    /** Check the CRC of a record if the options say so; false if the record is left out. */
    private boolean verified(int i) {
        if (options.verifyCrc.equals("none") || LogFiles.crcMatches(walk, i)) {
            return true;
        }
        if (options.verifyCrc.equals("fail")) {
            long position = walk.positionOf(i);
            throw new StoreError(walk.file.path + ": the body at byte " + position + " (commitLogOffset "
                    + (walk.base + position) + ") does not match its CRC; verifyCrc=drop leaves such messages out,"
                    + " column marks them");
        }
        return options.verifyCrc.equals("column");
    }

    /** Add the rows of a record, and return the bytes of memory that they need beside the window. */
    private int addRows(int i) {
        int flags = walk.sysFlag(i);
        boolean isInner = options.unwrap && (flags & INNER) == INNER;
        boolean isPacked = (flags & RecordWalk.COMPRESSED) != 0 && (isInner || needsBodies && options.decompress);
        String reason = null;
        byte[] plain = null;
        List<Bodies.Member> members = null;
        try {
            if (isPacked) {
                plain = Bodies.decompress(walk.file.bytes, walk.bodyAt(i), walk.bodyBytes[i], flags);
            }
            if (isInner) {
                members = plain == null
                        ? Bodies.members(walk.file.bytes, walk.bodyAt(i), walk.bodyBytes[i])
                        : Bodies.members(plain, 0, plain.length);
            }
        } catch (Bodies.BodyError error) {
            reason = error.getMessage();
        }
        boolean needsTopic = needsTopics && (members == null || !members.isEmpty());
        if (reason == null && needsTopic && !RecordWalk.isText(walk.file.bytes, walk.topicAt[i], walk.topicBytes[i])) {
            reason = "the topic is not UTF-8";
        }
        if (reason != null && options.corruptRecords.equals("fail")) {
            throw damaged(walk.positionOf(i), reason);
        }
        if (reason != null && options.corruptRecords.equals("skip")) {
            return 0;
        }
        if (reason == null && options.verifyCrc.equals("column") && !LogFiles.crcMatches(walk, i)) {
            reason = "the body does not match its CRC";
        }
        if (members == null) {
            int row = rows.add(i, 0, null);
            rows.plain[row] = options.decompress ? plain : null;
            rows.isPacked[row] = isPacked && plain == null;
            rows.reason[row] = reason;
        } else {
            for (int k = 0; k < members.size(); k++) {
                rows.reason[rows.add(i, k, members.get(k))] = reason;
            }
        }
        return plain == null ? 0 : plain.length;
    }

    private void keepMatching() {
        int kept = 0;
        for (int row = 0; row < rows.count; row++) {
            if (meetsRow(row)) {
                rows.move(row, kept++);
            } else {
                bytesSkipped += rows.member[row] == null ? walk.size[rows.record[row]] : 0;
            }
        }
        rows.count = kept;
    }

    private boolean meetsOptions(int row) {
        if (!options.keys.isEmpty() && !hasKey(row)) {
            return false;
        }
        String lite = options.isOfLiteTopics() ? text(row, rows.liteTopics) : "";
        return (options.liteTopics.isEmpty() || options.liteTopics.contains(lite)) && lite.startsWith(options.litePrefix);
    }

    private boolean hasKey(int row) {
        if (options.keys.contains(text(row, rows.uniqueKeys))) {
            return true;
        }
        return BLANKS.splitAsStream(text(row, rows.keys)).anyMatch(options.keys::contains);
    }

    private String text(int row, Rows.Texts texts) {
        return texts.length[row] < 0
                ? ""
                : new String(rows.properties[row], texts.at[row], texts.length[row], StandardCharsets.UTF_8);
    }

    private boolean meetsRow(int row) {
        if (testsOptions && !meetsOptions(row)) {
            return false;
        }
        for (Condition condition : ofRows) {
            boolean met = switch (condition.column()) {
                case "queueOffset" -> condition.meets(columns.queueOffset(walk, row));
                case "keys" -> meetsText(condition, row, rows.keys);
                case "tags" -> meetsText(condition, row, rows.tags);
                case "lite_topic" -> meetsText(condition, row, rows.liteTopics);
                default -> rows.uniqueKeys.length[row] >= 0
                        ? meetsText(condition, row, rows.uniqueKeys)
                        : meetsId(condition, columns.offsetId(walk, row));
            };
            if (!met) {
                return false;
            }
        }
        return true;
    }

    private boolean meetsText(Condition condition, int row, Rows.Texts texts) {
        return texts.length[row] >= 0 && condition.meets(rows.properties[row], texts.at[row], texts.length[row]);
    }

    private static boolean meetsId(Condition condition, byte[] id) {
        return condition.meets(id, 0, id.length);
    }

    @Override
    public ColumnarBatch get() {
        return batch;
    }

    @Override
    public CustomTaskMetric[] currentMetricsValues() {
        return new CustomTaskMetric[] {
            new Value(new StoreTable.BytesRead().name(), bytesRead),
            new Value(new StoreTable.BytesSkipped().name(), bytesSkipped)
        };
    }

    private record Value(String name, long value) implements CustomTaskMetric {}

    @Override
    public void close() {
        closeFile();
        batch.close();
    }
}
