package interop;

import java.io.ByteArrayOutputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Paths;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/**
 * Runs several commands of Apache's mqadmin in one virtual machine.
 *
 * <p>The only argument is a file with a command per line, its words separated by tabs; an empty line asks for the list
 * of commands. A number as the first word is the lines of output after which a command that never ends is interrupted. One
 * that had no answer within the tool's seconds is run again: the machine does much else.
 * Before the output of each comes an empty line and a line "#### " with its number from 0, after the last one
 * "#### end".
 */
public final class AdminCommands {
    private static final int TRIES = 3;

    public static void main(String[] args) throws Exception {
        endClientsAtOnce(Thread.currentThread());
        int number = 0;
        for (String line : Files.readAllLines(Paths.get(args[0]), StandardCharsets.UTF_8)) {
            separator(String.valueOf(number++));
            String[] words = line.isEmpty() ? new String[0] : line.split("\t");
            if (words.length > 0 && words[0].matches("\\d+")) {
                interruptAfter(Integer.parseInt(words[0]), java.util.Arrays.copyOfRange(words, 1, words.length));
            } else {
                untilAnswered(words);
            }
        }
        separator("end");
        // Client threads may linger.
        System.exit(0);
    }

    /**
     * Every command has a client of its own. Its thread for events of connections sees that it shall end when it next
     * wakes up, which takes up to three seconds: it is woken up while somebody waits for it.
     */
    private static void endClientsAtOnce(Thread commands) {
        Thread waker = new Thread(() -> {
            while (true) {
                boolean waits = java.util.Arrays.stream(commands.getStackTrace())
                    .anyMatch(frame -> frame.getClassName().endsWith(".ServiceThread") && frame.getMethodName().equals("shutdown"));
                if (waits) {
                    Thread.getAllStackTraces().keySet().stream()
                        .filter(thread -> thread.getName().startsWith("NettyEventExecutor"))
                        .forEach(Thread::interrupt);
                }
                try {
                    Thread.sleep(20);
                } catch (InterruptedException e) {
                    return;
                }
            }
        }, "waker");
        waker.setDaemon(true);
        waker.start();
    }

    private static void untilAnswered(String[] words) throws Exception {
        String text = "";
        for (int tries = 0; tries < TRIES && (tries == 0 || text.contains("RemotingTimeoutException")); tries++) {
            text = printed(said -> MQAdminStartup.main0(words, null));
        }
        System.out.print(text);
    }

    private static void interruptAfter(int lines, String[] words) throws Exception {
        System.out.print(printed(said -> {
            Thread thread = new Thread(() -> MQAdminStartup.main0(words, null));
            thread.start();
            for (int i = 0; i < 600 && thread.isAlive() && said.toString().split("\n").length < lines; i++) {
                thread.join(100);
            }
            // A command may take one interruption for a failed send and go on.
            while (thread.isAlive()) {
                thread.interrupt();
                thread.join(200);
            }
        }));
    }

    private interface Printing {
        void run(ByteArrayOutputStream said) throws Exception;
    }

    private static String printed(Printing command) throws Exception {
        PrintStream out = System.out;
        PrintStream err = System.err;
        ByteArrayOutputStream said = new ByteArrayOutputStream();
        PrintStream both = new PrintStream(said, true, "UTF-8");
        System.setOut(both);
        System.setErr(both);
        try {
            command.run(said);
        } finally {
            System.setOut(out);
            System.setErr(err);
        }
        return said.toString("UTF-8");
    }

    private static void separator(String text) {
        System.out.flush();
        System.err.flush();
        System.out.println("\n#### " + text);
        System.out.flush();
    }
}
