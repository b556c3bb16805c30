package interop;

import java.nio.charset.StandardCharsets;
import java.nio.file.Paths;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.producer.TransactionSendResult;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * One transaction for each way it can end, and a push consumer on their topic:
 *
 * <pre>
 *   TransactionProbe run --namesrv HOST:PORT --topic NAME --out FILE --checks-max N [--timeout-seconds S]
 * </pre>
 *
 * A message's key names its kind: what the local transaction answers, then what every question about it is answered
 * with ("throw" throws). Ends with 0 when all questions came and all commits arrived, with 1 when the time ran out.
 */
public final class TransactionProbe implements TransactionListener {
    private static final String GROUP = "probe-transactions";
    private static final int LARGE_BYTES = 6000;
    private static final String[][] KINDS = {
        {"commit", "unknown"}, {"commit-large", "unknown"}, {"rollback", "unknown"}, {"unknown", "commit"},
        {"unknown", "rollback"}, {"unknown", "unknown"}, {"unknown", "throw"}, {"throw", "commit"},
        {"null", "rollback"}, {"unknown-immune", "commit"}, {"commit-tagged", "unknown"}};

    private final Report report;
    private final Map<String, Integer> questions = new ConcurrentHashMap<>();
    private final Map<String, Boolean> arrived = new ConcurrentHashMap<>();

    private TransactionProbe(Report report) {
        this.report = report;
    }

    public static void main(String[] args) {
        Arguments arguments = Arguments.parse(args);
        int code = 2;
        try (Report report = new Report(Paths.get(arguments.one("out")))) {
            code = new TransactionProbe(report).run(arguments) ? 0 : 1;
        } catch (Exception e) {
            e.printStackTrace();
        }
        System.exit(code);
    }

    private boolean run(Arguments arguments) throws Exception {
        long deadline = System.nanoTime() + Long.parseLong(arguments.one("timeout-seconds", "60")) * 1_000_000_000L;
        int checksMax = Integer.parseInt(arguments.one("checks-max"));
        TransactionMQProducer producer = new TransactionMQProducer(GROUP);
        Patience.with(producer, arguments.one("namesrv"));
        producer.setTransactionListener(this);
        DefaultMQPushConsumer consumer = consumer(arguments);
        producer.start();
        try {
            Patience.known(producer);
            for (String[] kind : KINDS) {
                send(producer, arguments.one("topic"), kind[0], kind[1]);
            }
            consumer.start();
            while (!isFinished(checksMax)) {
                if (System.nanoTime() > deadline) {
                    return report.summary(questions + " " + arrived.keySet(), false);
                }
                Thread.sleep(20);
            }
            return report.summary("every transaction ended");
        } finally {
            consumer.shutdown();
            producer.shutdown();
        }
    }

    private void send(TransactionMQProducer producer, String topic, String local, String later) throws Exception {
        byte[] body = local.endsWith("large") ? new byte[LARGE_BYTES] : (local + " " + later).getBytes(StandardCharsets.UTF_8);
        Message message = new Message(topic, local.endsWith("tagged") ? "TagA" : "", local + ":" + later, body);
        message.putUserProperty("city", "Zürich");
        if (local.endsWith("immune")) {
            message.putUserProperty(MessageConst.PROPERTY_CHECK_IMMUNITY_TIME_IN_SECONDS, "3");
        }
        TransactionSendResult result = producer.sendMessageInTransaction(message, local);
        Map<String, Object> event = Report.event("sent");
        event.put("kind", message.getKeys());
        event.put("status", String.valueOf(result.getSendStatus()));
        event.put("state", String.valueOf(result.getLocalTransactionState()));
        event.put("hasTransactionId", result.getMsgId().equals(result.getTransactionId()));
        event.put("uniqKey", result.getMsgId());
        report.write(event);
    }

    @Override
    public LocalTransactionState executeLocalTransaction(Message message, Object local) {
        return state(((String) local).split("-")[0]);
    }

    @Override
    public LocalTransactionState checkLocalTransaction(MessageExt message) {
        String kind = message.getKeys();
        String later = kind.split(":")[1];
        try {
            Map<String, Object> event = Report.event("question");
            event.put("kind", kind);
            event.put("count", message.getUserProperty(MessageConst.PROPERTY_TRANSACTION_CHECK_TIMES));
            event.put("group", message.getProperty(MessageConst.PROPERTY_PRODUCER_GROUP));
            event.put("hasTransactionId", message.getMsgId().equals(message.getTransactionId()));
            Report.describe(event, message);
            report.write(event);
        } catch (Exception e) {
            throw new IllegalStateException(e);
        }
        questions.merge(kind, 1, Integer::sum);
        String local = kind.split(":")[0].split("-")[0];
        boolean isDecided = local.equals("commit") || local.equals("rollback"); // and what was said of it came late
        return state(isDecided ? local : later);
    }

    private static LocalTransactionState state(String name) {
        switch (name) {
            case "commit":
                return LocalTransactionState.COMMIT_MESSAGE;
            case "rollback":
                return LocalTransactionState.ROLLBACK_MESSAGE;
            case "unknown":
                return LocalTransactionState.UNKNOW;
            case "null":
                return null;
            default:
                throw new IllegalStateException("as asked for");
        }
    }

    private boolean isFinished(int checksMax) {
        Map<String, Integer> expected = new LinkedHashMap<>();
        for (String[] kind : KINDS) {
            String name = kind[0] + ":" + kind[1];
            boolean isDecided = kind[0].startsWith("commit") || kind[0].startsWith("rollback");
            boolean isOpen = kind[1].equals("unknown") || kind[1].equals("throw");
            expected.put(name, isDecided ? 0 : isOpen ? checksMax : 1);
            boolean isCommitted = kind[0].startsWith("commit") || !isDecided && kind[1].equals("commit");
            if (isCommitted && !arrived.containsKey(name)) {
                return false;
            }
        }
        return expected.entrySet().stream().allMatch(one -> questions.getOrDefault(one.getKey(), 0) >= one.getValue());
    }

    private DefaultMQPushConsumer consumer(Arguments arguments) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(GROUP + "-consumer");
        Patience.with(consumer, arguments.one("namesrv"));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(arguments.one("topic"), "*");
        consumer.setMessageListener((MessageListenerConcurrently) (messages, context) -> {
            messages.forEach(this::receive);
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        return consumer;
    }

    private void receive(MessageExt message) {
        try {
            Map<String, Object> event = Report.event("received");
            event.put("kind", message.getKeys());
            event.put("hasTransactionId", message.getMsgId().equals(message.getTransactionId()));
            event.put("preparedOffset", message.getPreparedTransactionOffset());
            event.put("sysFlag", message.getSysFlag());
            event.put("properties", new java.util.TreeMap<>(message.getProperties()));
            Report.describe(event, message);
            Report.describePlace(event, message);
            report.write(event);
            arrived.put(message.getKeys(), true);
        } catch (Exception e) {
            throw new IllegalStateException(e);
        }
    }
}
