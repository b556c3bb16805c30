package interop;

import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Paths;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/**
 * Runs several commands of Apache's mqadmin in one virtual machine.
 *
 * <p>The only argument is a file with a command per line, its words separated by tabs. Before the output of each comes an
 * empty line and a line "#### " with its number from 0, after the last one "#### end".
 */
public final class AdminCommands {
    public static void main(String[] args) throws Exception {
        int number = 0;
        for (String line : Files.readAllLines(Paths.get(args[0]), StandardCharsets.UTF_8)) {
            separator(String.valueOf(number++));
            MQAdminStartup.main0(line.split("\t"), null);
        }
        separator("end");
        // Client threads may linger.
        System.exit(0);
    }

    private static void separator(String text) {
        System.out.flush();
        System.err.flush();
        System.out.println("\n#### " + text);
        System.out.flush();
    }
}
