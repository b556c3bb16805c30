package rmqkit.spark;

import java.io.IOException;
import java.io.Serializable;
import java.io.UncheckedIOException;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.DirectoryStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Comparator;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.zip.CRC32;
import rmqkit.errors.StoreError;
import rmqkit.errors.StoreMismatch;

/**
 * The files of a commit log and their cut into splits: the JVM's form of {@code rmqkit.arrow.splits}, which describes
 * the snapshot, the anchors, and the end of the newest file. Tests hold both equal.
 */
final class LogFiles {
    private static final int ANCHORS_TRIED = 16;
    private static final int ENTRY_BYTES = 20;
    private static final int NEWEST_BYTES_MIN = 48;
    private static final long TASK_BYTES_MIN = 4 << 20;
    private static final int TASKS_MIN = 16;
    private static final long CLOCK_SLACK_MS = 60_000;
    private static final int WALKED_MAX = 16;

    /** The last walks over the newest files, by path. A broker only appends, so the next walk continues there. */
    private static final Map<String, Walked> WALKED = new LinkedHashMap<>() {
        private static final long serialVersionUID = 1;

        @Override
        protected boolean removeEldestEntry(Map.Entry<String, Walked> eldest) {
            return size() > WALKED_MAX;
        }
    };

    /** One file of the log; {@code base} is the physical offset of its first byte. */
    record Segment(String path, long base, long size) {}

    /** A part of a file that begins and ends at records, or at the end of the records. */
    record Split(String path, long base, long low, long high) implements Serializable {}

    /** A walk without damage from the start of a file: the position and the first bytes of its last record. */
    private record Walked(long last, ByteBuffer head) {
        static Walked of(LogFile file, long last) {
            int at = file.load(last, RecordWalk.RECORD_BYTES_MIN);
            return new Walked(last, ByteBuffer.wrap(Arrays.copyOfRange(file.bytes, at, at + RecordWalk.RECORD_BYTES_MIN)));
        }

        /** Return where to begin the next walk: at the last record, or at the start of a file that has another record there. */
        static long resume(LogFile file, long base, long written) {
            Walked walked;
            synchronized (WALKED) {
                walked = WALKED.get(file.path);
            }
            boolean isThere = walked != null && walked.last + RecordWalk.RECORD_BYTES_MIN <= written
                    && walked.equals(of(file, walked.last))
                    && new RecordWalk(file, base, walked.last, written, 1).run();
            return isThere ? walked.last : 0;
        }
    }

    private LogFiles() {}

    /** List the files that are not empty, in order. */
    static List<Segment> find(List<String> folders) {
        List<Segment> found = new ArrayList<>();
        for (String folder : folders) {
            if (!Files.isDirectory(Path.of(folder))) {
                String what = Files.exists(Path.of(folder)) ? " is not a directory" : " does not exist";
                throw new StoreError(folder + what + ": give the store directory, the one that holds commitlog");
            }
            try (DirectoryStream<Path> files = Files.newDirectoryStream(Path.of(folder))) {
                for (Path file : files) {
                    String name = file.getFileName().toString();
                    if (name.matches("\\d{20}") && Files.isRegularFile(file) && Files.size(file) > 0) {
                        found.add(new Segment(file.toString(), Long.parseLong(name), Files.size(file)));
                    }
                }
            } catch (IOException error) {
                throw LogFile.unreadable(folder, error);
            }
        }
        found.sort(Comparator.comparingLong(Segment::base));
        for (int i = 1; i < found.size(); i++) {
            check(found.get(i - 1), found.get(i));
        }
        return found;
    }

    private static void check(Segment segment, Segment following) {
        long end = segment.base + segment.size;
        if (end > following.base) {
            throw new StoreMismatch(segment.path + " of " + segment.size + " bytes reaches into " + following.path
                    + ": keep one copy of each file");
        }
        if (end < following.base) {
            throw new StoreMismatch("commit log bytes " + end + " to " + following.base + " are missing before "
                    + following.path + ": restore the file between, or move the files before the gap away");
        }
    }

    /** Cut a log into splits of about {@code splitBytes}, up to the last record that is complete now. */
    static List<Split> splits(List<Segment> segments, long splitBytes) {
        List<Split> splits = new ArrayList<>();
        Map<String, Anchors> anchors = new HashMap<>();
        for (int i = segments.size() - 1; i >= 0; i--) {
            Segment segment = segments.get(i);
            try (LogFile file = new LogFile(segment.path)) {
                long high = splits.isEmpty() ? recordsEnd(file, segment.base) : segment.size;
                if (high > 0) {
                    String store = Path.of(segment.path).getParent().resolveSibling("consumequeue").toString();
                    splits.addAll(0, cut(file, segment.base, high, splitBytes,
                            anchors.computeIfAbsent(store, Anchors::new)));
                }
            }
        }
        return splits;
    }

    private static List<Split> cut(LogFile file, long base, long high, long splitBytes, Anchors anchors) {
        List<Split> splits = new ArrayList<>();
        long low = 0;
        for (long target = splitBytes; target < high; target += splitBytes) {
            long next = Math.max(target, low + 1);
            long anchored = anchors.exist ? anchored(file, base, next, high, anchors) : -1;
            next = anchored < 0 ? firstBehind(file, base, low, next, high) : anchored;
            if (next >= high) {
                break;
            }
            splits.add(new Split(file.path, base, low, next));
            low = next;
        }
        splits.add(new Split(file.path, base, low, high));
        return splits;
    }

    /** Return the first of the next few records that a queue points at, the end if no record follows, or -1. */
    private static long anchored(LogFile file, long base, long low, long high, Anchors anchors) {
        RecordWalk walk = new RecordWalk(file, base, 0, high, 1);
        for (int tried = 0; tried < ANCHORS_TRIED; tried++) {
            low = walk.findRecord(low);
            if (low >= high) {
                return tried > 0 ? -1 : high;
            }
            RecordWalk one = new RecordWalk(file, base, low, high, 1);
            one.next();
            if (anchors.pointAt(one)) {
                return low;
            }
            low++;
        }
        return -1;
    }

    private static long firstBehind(LogFile file, long base, long low, long target, long high) {
        RecordWalk walk = new RecordWalk(file, base, low, high, RecordWalk.ROWS_MAX);
        for (RecordWalk.Found found = walk.next(); found != RecordWalk.Found.END; found = walk.next()) {
            for (int i = 0; found == RecordWalk.Found.RUN && i < walk.count; i++) {
                if (walk.positionOf(i) >= target) {
                    return walk.positionOf(i);
                }
            }
        }
        return high;
    }

    /** Return the end of the records of a file that may be the newest, or 0 if nothing was written to it. */
    private static long recordsEnd(LogFile file, long base) {
        long written = file.writtenEnd();
        if (written < NEWEST_BYTES_MIN) {
            return 0;
        }
        long end = chainEnd(file, base, written);
        return end > 0 || !isForeign(file, base) ? end : written;
    }

    private static long chainEnd(LogFile file, long base, long written) {
        RecordWalk walk = new RecordWalk(file, base, Walked.resume(file, base, written), written, RecordWalk.ROWS_MAX);
        boolean damaged = false;
        boolean isWhole = true;
        long last = -1;
        long end = 0;
        long storedMs = 0;
        boolean complete = false;
        for (RecordWalk.Found found = walk.next(); found != RecordWalk.Found.END; found = walk.next()) {
            if (found == RecordWalk.Found.DAMAGE) {
                damaged = true;
                continue;
            }
            // Records that were stored earlier than those before them are left of a log that a recovery cut.
            if (damaged && last >= 0 && walk.storedMs(0) < storedMs) {
                break;
            }
            isWhole &= !damaged;
            damaged = false;
            int i = walk.count - 1;
            last = walk.positionOf(i);
            end = last + walk.size[i];
            storedMs = walk.storedMs(i);
            complete = isComplete(walk, i);
        }
        if (isWhole && complete) {
            synchronized (WALKED) {
                WALKED.put(file.path, Walked.of(file, last));
            }
        }
        return last < 0 ? 0 : complete ? end : last;
    }

    private static boolean isComplete(RecordWalk walk, int i) {
        byte[] bytes = walk.file.bytes;
        boolean hasEnd = walk.propertiesBytes[i] == 0 || bytes[walk.at[i] + walk.size[i] - 1] != 0;
        return hasEnd && crcMatches(walk, i);
    }

    static boolean crcMatches(RecordWalk walk, int i) {
        CRC32 crc = new CRC32();
        crc.update(walk.file.bytes, walk.bodyAt(i), walk.bodyBytes[i]);
        return ((int) crc.getValue() & 0x7FFFFFFF) == LogFile.intAt(walk.file.bytes, walk.at[i] + 8);
    }

    private static boolean isForeign(LogFile file, long base) {
        int at = file.load(0, NEWEST_BYTES_MIN);
        int magic = LogFile.intAt(file.bytes, at + 4);
        boolean isBlank = magic == 0xCBD43194;
        return magic != 0 && magic != 0xDAA320A7 && magic != 0xDAA320AB && !isBlank
                || LogFile.longAt(file.bytes, at + 28) != base
                        && LogFile.longAt(file.bytes, at + 40) != 0
                        && !isBlank;
    }

    /** Leave out the files at both ends that cannot have messages stored from {@code low} up to {@code high}, ms. */
    static List<Segment> within(List<Segment> segments, long lowMs, long highMs) {
        List<Segment> kept = new ArrayList<>(segments);
        while (kept.size() > 1 && highMs < Long.MAX_VALUE
                && firstStored(kept.get(kept.size() - 1)) > highMs + CLOCK_SLACK_MS) {
            kept.remove(kept.size() - 1);
        }
        while (kept.size() > 1 && lowMs > Long.MIN_VALUE) {
            long second = firstStored(kept.get(1));
            if (second <= 0 || second >= lowMs - CLOCK_SLACK_MS) {
                break;
            }
            kept.remove(0);
        }
        return kept;
    }

    private static long firstStored(Segment segment) {
        try (LogFile file = new LogFile(segment.path)) {
            RecordWalk walk = new RecordWalk(file, segment.base, 0, file.size, 1);
            return file.size >= RecordWalk.RECORD_BYTES_MIN && walk.run()
                    ? walk.storedMs(0)
                    : 0;
        }
    }

    /** Group small consecutive splits into one task each: a task costs as much as several MiB. */
    static List<List<Split>> grouped(List<Split> splits, long splitBytes) {
        long total = splits.stream().mapToLong(split -> split.high - split.low).sum();
        long room = Math.min(splitBytes, Math.max(TASK_BYTES_MIN, total / TASKS_MIN));
        List<List<Split>> groups = new ArrayList<>();
        long left = 0;
        for (Split split : splits) {
            long size = split.high - split.low;
            if (groups.isEmpty() || size > left) {
                groups.add(new ArrayList<>());
                left = room;
            }
            groups.get(groups.size() - 1).add(split);
            left -= size;
        }
        return groups;
    }

    /** The consume queues of a store: an entry that points at a record proves that a broker wrote the record. */
    private static final class Anchors {
        final boolean exist;
        private final String folder;
        private final Map<String, long[]> starts = new HashMap<>();

        Anchors(String folder) {
            this.folder = folder;
            exist = Files.isDirectory(Path.of(folder));
        }

        boolean pointAt(RecordWalk walk) {
            byte[] bytes = walk.file.bytes;
            String topic = new String(bytes, walk.topicAt[0], walk.topicBytes[0], StandardCharsets.UTF_8);
            long offset = LogFile.longAt(bytes, walk.at[0] + 20);
            // Bytes that only look like a record may have any text as topic.
            if (offset < 0 || offset > Long.MAX_VALUE / ENTRY_BYTES || topic.contains("/") || topic.contains("\0")
                    || topic.isEmpty() || topic.equals(".") || topic.equals("..")) {
                return false;
            }
            Path queue = Path.of(folder, topic, Integer.toString(LogFile.intAt(bytes, walk.at[0] + 12)));
            long[] files = starts.computeIfAbsent(queue.toString(), key -> list(queue));
            int number = Arrays.binarySearch(files, offset * ENTRY_BYTES);
            number = number < 0 ? -number - 2 : number;
            if (number < 0) {
                return false;
            }
            long position = offset * ENTRY_BYTES - files[number];
            try (LogFile file = new LogFile(queue.resolve(String.format("%020d", files[number])).toString())) {
                if (position + ENTRY_BYTES > file.size) {
                    return false;
                }
                int at = file.load(position, ENTRY_BYTES);
                return LogFile.longAt(file.bytes, at) == LogFile.longAt(bytes, walk.at[0] + 28)
                        && LogFile.intAt(file.bytes, at + 8) == walk.size[0];
            } catch (StoreError error) {
                return false; // deleted by retention: proves nothing, like a missing entry
            }
        }

        private static long[] list(Path queue) {
            if (!Files.isDirectory(queue)) {
                return new long[0];
            }
            try (var files = Files.list(queue)) {
                return files.map(file -> file.getFileName().toString())
                        .filter(name -> name.matches("\\d{20}"))
                        .mapToLong(Long::parseLong)
                        .sorted()
                        .toArray();
            } catch (IOException | UncheckedIOException error) {
                return new long[0];
            }
        }
    }
}
