package rmqkit.spark;

import com.github.luben.zstd.ZstdInputStreamNoFinalizer;
import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.EOFException;
import java.io.IOException;
import java.io.InputStream;
import java.util.ArrayList;
import java.util.List;
import java.util.zip.DataFormatException;
import java.util.zip.Inflater;
import net.jpountz.lz4.LZ4FrameInputStream;

/**
 * Compressed bodies and inner batches: the JVM's form of {@code rmqkit.protocol.compression} and of
 * {@code decode_batch}, with the same limit and the same reasons.
 */
final class Bodies {
    static final int BYTES_MAX = 64 << 20;
    private static final int CHUNK_BYTES = 64 << 10;
    private static final int BATCH_HEAD_BYTES = 20;
    private static final int LZ4 = 1;
    private static final int ZSTD = 2;
    private static final int ZLIB = 3;

    /** The body cannot be unpacked; the text is the reason. */
    static final class BodyError extends Exception {
        private static final long serialVersionUID = 1L;

        BodyError(String reason) {
            super(reason);
        }
    }

    /** A message of an inner batch: places in the body of its record. */
    record Member(byte[] body, int bodyAt, int bodyBytes, int propertiesAt, int propertiesBytes, int flag) {}

    private Bodies() {}

    static byte[] decompress(byte[] bytes, int from, int length, int sysFlag) throws BodyError {
        switch ((sysFlag & 0x700) >> 8) {
            case 0, ZLIB:
                return inflate(bytes, from, length);
            case LZ4:
                return read("lz4", bytes, from, length);
            case ZSTD:
                return read("zstd", bytes, from, length);
            default:
                throw new BodyError(String.format("compression type %d in sysFlag %#x is not known: use 1, 2 or 3",
                        (sysFlag & 0x700) >> 8, sysFlag));
        }
    }

    private static byte[] inflate(byte[] bytes, int from, int length) throws BodyError {
        Inflater inflater = new Inflater();
        try {
            inflater.setInput(bytes, from, length);
            ByteArrayOutputStream plain = new ByteArrayOutputStream((int) Math.min(4L * length, BYTES_MAX));
            byte[] chunk = new byte[CHUNK_BYTES];
            while (!inflater.finished()) {
                int count = inflater.inflate(chunk);
                if (count == 0 && !inflater.finished()) {
                    throw cut("zlib", length);
                }
                plain.write(chunk, 0, count);
                check("zlib", length, plain.size());
            }
            return plain.toByteArray();
        } catch (DataFormatException error) {
            throw new BodyError("zlib body of " + length + " bytes is damaged: " + error.getMessage());
        } finally {
            inflater.end();
        }
    }

    private static byte[] read(String name, byte[] bytes, int from, int length) throws BodyError {
        ByteArrayOutputStream plain = new ByteArrayOutputStream((int) Math.min(4L * length, BYTES_MAX));
        byte[] chunk = new byte[CHUNK_BYTES];
        InputStream body = new ByteArrayInputStream(bytes, from, length);
        try (InputStream stream =
                name.equals("lz4") ? new LZ4FrameInputStream(body, true) : new ZstdInputStreamNoFinalizer(body)) {
            for (int count = stream.read(chunk); count >= 0; count = stream.read(chunk)) {
                plain.write(chunk, 0, count);
                check(name, length, plain.size());
            }
        } catch (EOFException error) {
            throw cut(name, length);
        } catch (IOException error) {
            boolean isCut = String.valueOf(error.getMessage()).matches("(?i).*(premature end|truncated).*");
            throw isCut
                    ? cut(name, length)
                    : new BodyError(name + " body of " + length + " bytes is damaged: " + error.getMessage());
        }
        return plain.toByteArray();
    }

    private static BodyError cut(String name, int length) {
        return new BodyError(name + " body of " + length + " bytes ends in the middle of its stream");
    }

    private static void check(String name, int length, int plainBytes) throws BodyError {
        if (plainBytes > BYTES_MAX) {
            throw new BodyError(
                    name + " body of " + length + " bytes grows beyond the limit of " + BYTES_MAX + " bytes");
        }
    }

    /** Return the messages of an inner batch. */
    static List<Member> members(byte[] body, int from, int length) throws BodyError {
        List<Member> members = new ArrayList<>();
        int position = 0;
        while (position < length) {
            if (length - position < BATCH_HEAD_BYTES + 2) {
                throw new BodyError("batch entry at byte " + position + " is cut off: " + (length - position)
                        + " bytes left");
            }
            int at = from + position;
            int size = LogFile.intAt(body, at);
            int bodyBytes = LogFile.intAt(body, at + 16);
            long end = (long) position + size;
            long properties = (long) position + BATCH_HEAD_BYTES + bodyBytes + 2;
            if (bodyBytes < 0 || end > length || properties > end) {
                throw new BodyError("batch entry at byte " + position + ": size " + size + " with a body of "
                        + bodyBytes + " bytes is impossible");
            }
            short count = (short) LogFile.unsignedShortAt(body, from + (int) properties - 2);
            if (properties + count != end) {
                throw new BodyError("batch entry at byte " + position + ": its parts do not add up to its size "
                        + size);
            }
            members.add(new Member(body, at + BATCH_HEAD_BYTES, bodyBytes, from + (int) properties, count,
                    LogFile.intAt(body, at + 12)));
            position = (int) end;
        }
        return members;
    }
}
