package rmqkit.spark;

import java.io.Closeable;
import java.io.IOException;
import java.lang.invoke.MethodHandles;
import java.lang.invoke.VarHandle;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.FileChannel;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.util.Arrays;
import rmqkit.errors.StoreError;

/**
 * The bytes of one file of a store, read in order through a window that moves forward.
 *
 * <p>The window is small, so that the bytes are still in the cache of the CPU when the columns are decoded. It grows
 * only for a record that is larger.
 */
final class LogFile implements Closeable {
    static final int WINDOW_BYTES = 1 << 20;
    private static final int PAGE_BYTES = 4096;
    private static final VarHandle SHORT =
            MethodHandles.byteArrayViewVarHandle(short[].class, ByteOrder.BIG_ENDIAN);
    private static final VarHandle INT = MethodHandles.byteArrayViewVarHandle(int[].class, ByteOrder.BIG_ENDIAN);
    private static final VarHandle LONG =
            MethodHandles.byteArrayViewVarHandle(long[].class, ByteOrder.BIG_ENDIAN);

    final String path;
    final long size;
    /** The bytes are those of a pulled body: all are in the window. */
    final boolean isPulled;
    byte[] bytes;
    private final FileChannel channel;
    private long start;
    private int count;

    LogFile(String path) {
        this.path = path;
        isPulled = false;
        bytes = new byte[WINDOW_BYTES];
        try {
            channel = FileChannel.open(Path.of(path));
            size = channel.size();
        } catch (IOException error) {
            throw unreadable(path, error);
        }
    }

    /** The first bytes of an array with pulled bodies. */
    LogFile(byte[] pulled, int length) {
        path = "a pulled body";
        isPulled = true;
        bytes = pulled;
        channel = null;
        size = length;
        count = length;
    }

    static StoreError unreadable(String path, IOException error) {
        return new StoreError(
                error instanceof NoSuchFileException
                        ? path + " has vanished since the query was planned: the broker's retention removed it;"
                                + " load the store again"
                        : path + " cannot be read: " + error.getMessage());
    }

    static int intAt(byte[] bytes, int at) {
        return (int) INT.get(bytes, at);
    }

    static long longAt(byte[] bytes, int at) {
        return (long) LONG.get(bytes, at);
    }

    static int unsignedShortAt(byte[] bytes, int at) {
        return (short) SHORT.get(bytes, at) & 0xFFFF;
    }

    /** The position in the file after the last byte of the window. */
    long windowEnd() {
        return start + count;
    }

    /**
     * Move the window so that it has {@code length} bytes from a position on, and return the index of the position in
     * {@link #bytes}. The caller must stay within the file: a shorter file has changed since it was planned.
     */
    int load(long position, int length) {
        long index = position - start;
        return index >= 0 && index + length <= count ? (int) index : move(position, length);
    }

    private int move(long position, int length) {
        byte[] target = length <= bytes.length ? bytes : new byte[length];
        int kept = position >= start && position < windowEnd() ? (int) (windowEnd() - position) : 0;
        System.arraycopy(bytes, (int) (kept == 0 ? 0 : position - start), target, 0, kept);
        bytes = target;
        start = position;
        count = kept;
        try {
            while (count < bytes.length) {
                int read = channel.read(ByteBuffer.wrap(bytes, count, bytes.length - count), start + count);
                if (read <= 0) {
                    break;
                }
                count += read;
            }
        } catch (IOException error) {
            throw unreadable(path, error);
        }
        if (count < length) {
            throw new StoreError(path + " ended at byte " + windowEnd() + " while it was read: load the store again");
        }
        return 0;
    }

    /** Return a position after which the file has only zeros, but not in the middle of a record that ends with zeros. */
    long writtenEnd() {
        byte[] zeros = new byte[WINDOW_BYTES];
        long end = size;
        while (end > 0) {
            int length = (int) Math.min(WINDOW_BYTES, end);
            int at = load(end - length, length);
            if (Arrays.mismatch(bytes, at, at + length, zeros, 0, length) >= 0) {
                int last = at + length;
                while (bytes[last - 1] == 0) {
                    last--;
                }
                return Math.min(size, end - length + (last - at) + PAGE_BYTES);
            }
            end -= length;
        }
        return 0;
    }

    @Override
    public void close() {
        if (isPulled) {
            return;
        }
        try {
            channel.close();
        } catch (IOException error) {
            throw unreadable(path, error);
        }
    }
}
