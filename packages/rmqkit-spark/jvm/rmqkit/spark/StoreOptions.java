package rmqkit.spark;

import java.io.Serializable;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashSet;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructType;

/**
 * The options of a read that this reader can serve. {@code rmqkit.spark.options} describes them, and reports mistakes:
 * a read with an option that is not understood here goes to the Python source.
 */
final class StoreOptions implements Serializable {
    private static final long serialVersionUID = 1L;
    private static final Pattern SIZE = Pattern.compile("(\\d{1,15})\\s*(?:([kmg])b?)?", Pattern.CASE_INSENSITIVE);
    private static final Pattern ADDRESS = Pattern.compile("([a-zA-Z][a-zA-Z0-9+.-]+):/+(.*)", Pattern.DOTALL);
    private static final Set<String> TIMES = Set.of("startingtimestamp", "endingtimestamp");
    /** The columns, in order; the properties are a map, or one text. */
    static final StructType COLUMNS = new StructType()
            .add("topic", "string").add("brokerName", "string").add("queueId", "int").add("queueOffset", "bigint")
            .add("commitLogOffset", "bigint").add("storeSize", "int").add("msgId", "string").add("keys", "string")
            .add("tags", "string").add("lite_topic", "string").add("properties", "map<string,string>")
            .add("body", "binary").add("flag", "int").add("sysFlag", "int").add("bodyCrc", "int").add("bornTimestamp", "timestamp").add("bornHost", "string")
            .add("storeTimestamp", "timestamp").add("storeHost", "string").add("reconsumeTimes", "int")
            .add("preparedTransactionOffset", "bigint");
    static final String CORRUPT = "_corrupt";

    String path = "";
    List<String> logPaths = List.of();
    List<String> topics = List.of();
    /** Only messages with one of these keys or unique keys, at which the index points. */
    Set<String> keys = Set.of();
    /** Only messages of these lite topics, or of those with this prefix; an empty one means all messages. */
    Set<String> liteTopics = Set.of();
    String litePrefix = "";
    List<String> columns = List.of();
    int[] queueIds = {};
    boolean includeBody = true;
    String properties = "map";
    long splitBytes = 128 << 20;
    int batchRows = RecordWalk.ROWS_MAX;
    String verifyCrc = "none";
    String corruptRecords = "fail";
    boolean decompress = true;
    boolean unwrap = true;
    String brokerName = "";
    long startMs = Long.MIN_VALUE;
    long endMs = Long.MAX_VALUE;
    /** The number of the queue in Kafka's column, and the names of properties that are no headers. */
    int partition;
    Set<String> reserved = Set.of();

    /** Return the options, or null if the Python source has to serve or refuse the read. */
    static StoreOptions of(Map<String, String> given) {
        StoreOptions options = new StoreOptions();
        for (Map.Entry<String, String> option : new TreeMap<>(given).entrySet()) {
            if (!options.accept(option.getKey().toLowerCase(Locale.ROOT), option.getValue().strip())) {
                return null;
            }
        }
        boolean isIncomplete = options.path.isEmpty() && options.logPaths.isEmpty()
                || !options.keys.isEmpty() && options.topics.isEmpty();
        return isIncomplete ? null : options;
    }

    // Long: one case for each option.
    private boolean accept(String name, String value) {
        String word = value.toLowerCase(Locale.ROOT);
        switch (name) {
            case "path":
                path = local(value);
                return path != null;
            case "storepathcommitlog":
                logPaths = words(value).stream().map(StoreOptions::local).toList();
                return !logPaths.contains(null);
            case "entity":
                return word.equals("messages");
            case "offsetsfrom":
                return word.equals("walk");
            case "key":
                keys = Set.copyOf(new HashSet<>(words(value)));
                return true;
            case "litetopic":
                liteTopics = Set.copyOf(new HashSet<>(words(value)));
                return true;
            case "litetopicprefix":
                litePrefix = value;
                return true;
            case "maxhashslotnum":
                return number(value) > 0;
            case "topic":
                topics = words(value);
                return true;
            case "columns":
                columns = words(value);
                return true;
            case "queueid":
                queueIds = words(value).stream().mapToInt(id -> (int) Math.min(number(id), Integer.MAX_VALUE)).toArray();
                return Arrays.stream(queueIds).allMatch(id -> id >= 0 && id < Integer.MAX_VALUE);
            case "includebody":
                includeBody = word.equals("true");
                return isBoolean(word);
            case "includeproperties":
                properties = word;
                return List.of("map", "string", "none").contains(word);
            case "splitbytes":
                splitBytes = number(value);
                return splitBytes > 0;
            case "batchrows":
                batchRows = (int) Math.min(number(value), Integer.MAX_VALUE);
                return batchRows > 0 && batchRows <= 1 << 20;
            case "verifycrc":
                verifyCrc = word;
                return List.of("none", "fail", "drop", "column").contains(word);
            case "corruptrecordmode":
                corruptRecords = word;
                return List.of("fail", "skip", "report").contains(word);
            case "decompress":
                decompress = word.equals("true");
                return isBoolean(word);
            case "unwrap":
                unwrap = word.equals("true");
                return isBoolean(word);
            case "brokername":
                brokerName = value;
                return true;
            default:
                return TIMES.contains(name) && acceptTime(name, number(value));
        }
    }

    private boolean acceptTime(String name, long ms) {
        if (name.startsWith("start")) {
            startMs = ms == 0 ? Long.MIN_VALUE : ms;
        } else {
            endMs = ms == 0 ? Long.MAX_VALUE : ms;
        }
        return ms >= 0;
    }

    private static boolean isBoolean(String word) {
        return word.equals("true") || word.equals("false");
    }

    /** Return a whole number, which may have the suffix k, m or g, or -1. */
    private static long number(String text) {
        Matcher found = SIZE.matcher(text);
        if (!found.matches()) {
            return -1;
        }
        int shift = found.group(2) == null ? 0 : 10 * (1 + "kmg".indexOf(found.group(2).toLowerCase(Locale.ROOT)));
        long number = Long.parseLong(found.group(1));
        return number > Long.MAX_VALUE >> shift ? -1 : number << shift;
    }

    private static List<String> words(String text) {
        return Arrays.stream(text.split(",")).map(String::strip).filter(word -> !word.isEmpty()).toList();
    }

    /** Return an absolute path, or null for an address of another file system. */
    private static String local(String text) {
        Matcher address = ADDRESS.matcher(text);
        if (!address.matches()) {
            return Path.of(text).toAbsolutePath().toString();
        }
        return address.group(1).equalsIgnoreCase("file") ? "/" + address.group(2) : null;
    }

    boolean isOfLiteTopics() {
        return !liteTopics.isEmpty() || !litePrefix.isEmpty();
    }

    List<String> folders() {
        return logPaths.isEmpty() ? List.of(Path.of(path, "commitlog").toString()) : logPaths;
    }

    /** Return true if rows report damage, in a column of their own. */
    boolean reports() {
        return corruptRecords.equals("report") || verifyCrc.equals("column");
    }

    /** List the columns that exist with these options. */
    StructType available() {
        StructType available = new StructType();
        for (var field : COLUMNS.fields()) {
            boolean isProperties = field.name().equals("properties");
            if (isProperties ? properties.equals("none") : field.name().equals("body") && !includeBody) {
                continue;
            }
            DataType type = isProperties && properties.equals("string") ? DataTypes.StringType : field.dataType();
            available = available.add(field.name(), type);
        }
        return reports() ? available.add(CORRUPT, DataTypes.StringType) : available;
    }

    /** Return the columns of the option, or all, or null if there is no such column. */
    StructType chosen() {
        StructType available = available();
        StructType chosen = new StructType();
        for (String name : columns.isEmpty() ? Arrays.asList(available.fieldNames()) : columns) {
            if (!Arrays.asList(available.fieldNames()).contains(name)) {
                return null;
            }
            chosen = chosen.add(available.apply(name));
        }
        return canRead(chosen) ? chosen : null;
    }

    /** Return true if a schema has only existing columns with their types, each once, and shows damage if it must. */
    boolean canRead(StructType schema) {
        StructType available = available();
        List<String> seen = new ArrayList<>();
        for (var field : schema.fields()) {
            if (!Arrays.asList(available.fieldNames()).contains(field.name()) || seen.contains(field.name())
                    || !available.apply(field.name()).dataType().equals(field.dataType())) {
                return false;
            }
            seen.add(field.name());
        }
        return !reports() || seen.contains(CORRUPT);
    }
}
