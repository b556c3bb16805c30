package interop;

import java.nio.file.Paths;
import java.util.List;

/**
 * Drives Apache's Java client against any name server and writes down, one JSON object per line, what it saw.
 *
 * <pre>
 *   send    --count N                                    ordinary, large and batched messages
 *   consume --consumer GROUP:EXPRESSION:EXPECTED ...     push consumers, all at once
 *   both    --count N --consumer GROUP:EXPRESSION ...    send, then consume; the expected counts follow from the sends
 *   read                                                 pull every message of every queue, and the queues' bounds
 * common: --namesrv HOST:PORT --topic NAME --out FILE [--timeout-seconds S]
 * </pre>
 *
 * Ends with 0 when everything expected arrived, with 1 and a summary line when the time ran out, with 2 when a call failed.
 */
public final class JavaClientProbe {
    public static void main(String[] args) {
        Arguments arguments = Arguments.parse(args);
        int code = 2;
        try (Report report = new Report(Paths.get(arguments.one("out")))) {
            code = run(arguments, report) ? 0 : 1;
        } catch (Exception e) {
            e.printStackTrace();
        }
        // Client threads of a failed start may linger: leave for certain.
        System.exit(code);
    }

    private static boolean run(Arguments arguments, Report report) throws Exception {
        String namesrv = arguments.one("namesrv");
        String topic = arguments.one("topic");
        long deadline = System.nanoTime() + Long.parseLong(arguments.one("timeout-seconds", "60")) * 1_000_000_000L;
        switch (arguments.command) {
            case "send":
                Sender.send(namesrv, topic, Integer.parseInt(arguments.one("count")), deadline, report);
                return report.summary("sent everything");
            case "consume":
                return ProbeConsumer.consume(namesrv, topic, arguments.all("consumer"), null, deadline, report);
            case "both":
                List<Sender.Sent> sent =
                    Sender.send(namesrv, topic, Integer.parseInt(arguments.one("count")), deadline, report);
                return ProbeConsumer.consume(namesrv, topic, arguments.all("consumer"), sent, deadline, report);
            case "read":
                QueueReader.read(namesrv, topic, report);
                return report.summary("read everything");
            default:
                throw new IllegalArgumentException("unknown command " + arguments.command);
        }
    }
}
