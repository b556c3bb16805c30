import com.sun.management.OperatingSystemMXBean;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.lang.management.ManagementFactory;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Maps a commit log file and decodes all its messages for each line that it reads, and answers "done MESSAGES
 * NANOSECONDS": CPU time of the process, so that the garbage collector counts, too.
 */
public class DecodeLoad {
    public static void main(String[] arguments) throws Exception {
        try (FileChannel file = FileChannel.open(Path.of(arguments[0]), StandardOpenOption.READ)) {
            BufferedReader asked = new BufferedReader(new InputStreamReader(System.in));
            OperatingSystemMXBean machine = (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
            System.out.println("ready");
            while (asked.readLine() != null) {
                long start = machine.getProcessCpuTime();
                long count = decode(file.map(FileChannel.MapMode.READ_ONLY, 0, file.size()));
                System.out.println("done " + count + " " + (machine.getProcessCpuTime() - start));
            }
        }
    }

    private static long decode(ByteBuffer log) {
        long count = 0;
        while (log.remaining() > 8 && log.getInt(log.position()) > 0) {
            MessageExt message = MessageDecoder.decode(log, true, true);
            if (message == null) {
                break;
            }
            count++;
        }
        return count;
    }
}
