package interop;

import java.lang.reflect.Method;
import java.nio.charset.StandardCharsets;
import java.nio.file.Paths;
import java.util.Arrays;
import java.util.Map;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.selector.SelectMessageQueueByHash;
import org.apache.rocketmq.common.message.Message;

/**
 * Messages both ways between two kinds of clients, in one run:
 *
 * <pre>
 *   ExchangeProbe run --read TOPIC --send TOPIC --ask TOPIC --namesrv HOST:PORT --out FILE
 * </pre>
 *
 * Reports every message of the first topic; sends one of each kind to the second, named by its key; asks in the third,
 * where a consumer has to reply.
 */
public final class ExchangeProbe {
    private static final String[] COMPRESSIONS = {"ZLIB", "LZ4", "ZSTD"};
    private static final int BATCH_COUNT = 3;

    private final DefaultMQProducer producer = new DefaultMQProducer("probe-exchange");
    private final Report report;
    private final String topic;

    private ExchangeProbe(Report report, String topic) {
        this.report = report;
        this.topic = topic;
    }

    public static void main(String[] args) {
        Arguments arguments = Arguments.parse(args);
        int code = 2;
        try (Report report = new Report(Paths.get(arguments.one("out")))) {
            QueueReader.read(arguments.one("namesrv"), arguments.one("read"), report);
            new ExchangeProbe(report, arguments.one("send")).run(arguments);
            code = 0;
        } catch (Exception e) {
            e.printStackTrace();
        }
        System.exit(code);
    }

    private void run(Arguments arguments) throws Exception {
        Patience.with(producer, arguments.one("namesrv")).start();
        try {
            send(message("plain"));
            for (String compression : COMPRESSIONS) {
                compressWith(compression);
                send(message(compression));
            }
            Message delayed = message("delayed");
            delayed.setDelayTimeLevel(1);
            send(delayed);
            sendBatch();
            for (String key : new String[] {"order-1", "Zürich", "polygenelubricants"}) {
                Message message = message("hash " + key);
                note(message, producer.send(message, new SelectMessageQueueByHash(), key), 0);
            }
            ask(arguments.one("ask"));
        } finally {
            producer.shutdown();
        }
    }

    /** Older clients know one kind of compression only, and no name for it. */
    private void compressWith(String compression) throws Exception {
        for (Method method : DefaultMQProducer.class.getMethods()) {
            if (method.getName().equals("setCompressType")) {
                method.invoke(producer, method.getParameterTypes()[0].getMethod("of", String.class).invoke(null, compression));
            }
        }
    }

    private Message message(String kind) {
        int repeats = Arrays.asList(COMPRESSIONS).contains(kind) ? 1000 : 1;
        StringBuilder text = new StringBuilder();
        for (int i = 0; i < repeats; i++) {
            text.append(kind).append(" grün ");
        }
        Message message = new Message(topic, "TagÄ", text.toString().getBytes(StandardCharsets.UTF_8));
        message.setKeys(kind.replace(' ', '_') + " common");
        message.putUserProperty("city", "東京");
        message.setFlag(-5);
        return message;
    }

    private void send(Message message) throws Exception {
        note(message, producer.send(message), 0);
    }

    private void sendBatch() throws Exception {
        Message[] messages = new Message[BATCH_COUNT];
        for (int i = 0; i < BATCH_COUNT; i++) {
            messages[i] = message("batch" + i);
        }
        SendResult result = producer.send(Arrays.asList(messages));
        for (int i = 0; i < BATCH_COUNT; i++) {
            note(messages[i], result, i);
        }
    }

    private void note(Message message, SendResult result, int position) throws Exception {
        Map<String, Object> event = Report.event("sent");
        Report.describe(event, message);
        event.put("msgId", result.getMsgId().split(",")[position]);
        event.put("offsetMsgId", result.getOffsetMsgId().split(",")[position]);
        event.put("queueId", result.getMessageQueue().getQueueId());
        event.put("queueOffset", result.getQueueOffset() + position);
        report.write(event);
    }

    private void ask(String askTopic) throws Exception {
        Message question = new Message(askTopic, "asked", "2+3".getBytes(StandardCharsets.UTF_8));
        Message answer = producer.request(question, Patience.MS);
        Map<String, Object> event = Report.event("reply");
        event.put("body", new String(answer.getBody(), StandardCharsets.UTF_8));
        event.put("by", answer.getUserProperty("by"));
        report.write(event);
    }
}
