package interop;

import java.nio.charset.StandardCharsets;
import java.nio.file.Paths;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentSkipListSet;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * SQL92 consumers of every kind: push consumers that are there before half of the messages, a lite pull consumer, a
 * pull consumer that carries its expression, and consumers whose expression is refused.
 *
 * <pre>
 *   --namesrv HOST:PORT --topic NAME --out FILE --good EXPRESSION ... --bad EXPRESSION ...
 * </pre>
 */
public final class SqlProbe {
    private static final int HALF = 20;
    private static final int QUEUES = 2;
    private static final String LAST = " OR last = 'yes'";

    private final String namesrv;
    private final String topic;
    private final Report report;
    private final DefaultMQProducer producer = new DefaultMQProducer("sql-producer");
    private List<MessageQueue> queues;

    private SqlProbe(String namesrv, String topic, Report report) {
        this.namesrv = namesrv;
        this.topic = topic;
        this.report = report;
    }

    public static void main(String[] args) {
        Arguments arguments = Arguments.parse(args);
        int code = 2;
        try (Report report = new Report(Paths.get(arguments.one("out")))) {
            new SqlProbe(arguments.one("namesrv"), arguments.one("topic"), report)
                .run(arguments.all("good"), arguments.all("bad"));
            code = 0;
        } catch (Exception e) {
            e.printStackTrace();
        }
        System.exit(code);
    }

    private void run(List<String> good, List<String> bad) throws Exception {
        Patience.with(producer, namesrv).start();
        send(-1);
        queues = awaitQueues();
        for (int index = 0; index < HALF; index++) {
            send(index);
        }
        List<Push> running = new ArrayList<>();
        for (int i = 0; i < good.size(); i++) {
            running.add(new Push("sql-push-" + i, good.get(i)));
        }
        for (Push push : running) {
            push.await("0");
        }
        for (int index = HALF; index < 2 * HALF; index++) {
            send(index);
        }
        for (int queue = 0; queue < QUEUES; queue++) {
            sendLast(queue);
        }
        for (Push push : running) {
            push.await("last-0");
            push.await("last-1");
            note("push", push.expression, push.seen.toString());
        }
        running.forEach(push -> push.consumer.shutdown());
        pullAll(good);
        note("lite", good.get(0), lite(good.get(0)));
        for (String expression : bad) {
            note("refused", expression, refused(expression));
        }
    }

    /** The first queues of the topic, as soon as the name server has heard of it. */
    private List<MessageQueue> awaitQueues() throws Exception {
        long deadline = System.nanoTime() + 100_000_000_000L;
        while (true) {
            try {
                List<MessageQueue> all = new ArrayList<>(producer.fetchPublishMessageQueues(topic));
                all.sort(null);
                return all.subList(0, QUEUES);
            } catch (MQClientException e) {
                if (System.nanoTime() > deadline) {
                    throw e;
                }
                Thread.sleep(20);
            }
        }
    }

    private void send(int index) throws Exception {
        byte[] body = name(index).getBytes(StandardCharsets.UTF_8);
        Message message = new Message(topic, index % 2 == 0 ? "even" : "odd", "key" + index, body);
        message.putUserProperty("index", name(index));
        message.putUserProperty("a", String.valueOf(index - 10));
        message.putUserProperty("price", String.valueOf(index * 0.75));
        message.putUserProperty("region", new String[] {"hangzhou", "shanghai", "\u676d\u5dde"}[Math.floorMod(index, 3)]);
        if (index % 7 == 0) {
            message.putUserProperty("color", "it's red");
        }
        if (index == 0) {
            message.putUserProperty("first", "yes");
        }
        if (queues == null) {
            producer.send(message);
        } else {
            producer.send(message, queues.get(index % QUEUES));
        }
    }

    private void sendLast(int queue) throws Exception {
        Message message = new Message(topic, "last-" + queue, new byte[] {1});
        message.putUserProperty("last", "yes");
        message.putUserProperty("index", "last-" + queue);
        producer.send(message, queues.get(queue));
    }

    private static String name(int index) {
        return String.valueOf(index);
    }

    private void note(String kind, String expression, String outcome) {
        Map<String, Object> event = Report.event(kind);
        event.put("expression", expression);
        event.put("outcome", outcome);
        report.write(event);
    }

    /** A push consumer; it also wants the first message and the last ones, so that it is seen to run and to end. */
    private final class Push {
        final Set<String> seen = new ConcurrentSkipListSet<>();
        final String expression;
        final DefaultMQPushConsumer consumer;

        Push(String group, String expression) throws Exception {
            this.expression = expression;
            consumer = Patience.with(new DefaultMQPushConsumer(group), namesrv);
            consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
            consumer.setConsumeThreadMin(1);
            consumer.setConsumeThreadMax(1);
            consumer.subscribe(topic, MessageSelector.bySql("(" + expression + ") OR first = 'yes'" + LAST));
            consumer.setMessageListener((MessageListenerConcurrently) (messages, context) -> {
                for (MessageExt message : messages) {
                    seen.add(message.getUserProperty("index"));
                }
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
            consumer.start();
        }

        void await(String index) throws Exception {
            long deadline = System.nanoTime() + 100_000_000_000L;
            while (!seen.contains(index)) {
                if (System.nanoTime() > deadline) {
                    throw new IllegalStateException(expression + " has not seen " + index + " but " + seen);
                }
                Thread.sleep(10);
            }
        }
    }

    private void pullAll(List<String> expressions) throws Exception {
        DefaultMQPullConsumer consumer = Patience.with(new DefaultMQPullConsumer("sql-pull"), namesrv);
        consumer.setRegisterTopics(Set.of(topic));
        consumer.start();
        Patience.started(consumer);
        try {
            for (String expression : expressions) {
                Set<String> seen = new ConcurrentSkipListSet<>();
                for (MessageQueue queue : queues) {
                    for (long offset = 0, end = consumer.maxOffset(queue); offset < end; ) {
                        PullResult result = pull(consumer, queue, expression, offset);
                        offset = result.getNextBeginOffset();
                        if (result.getMsgFoundList() != null) {
                            result.getMsgFoundList().forEach(message -> seen.add(message.getUserProperty("index")));
                            seen.remove("-1"); // which queue the first message went to is chance
                        }
                    }
                }
                note("pull", expression, seen.toString());
            }
        } finally {
            consumer.shutdown();
        }
    }

    /** Again until the first heartbeat has told the client the broker's version. */
    private static PullResult pull(DefaultMQPullConsumer consumer, MessageQueue queue, String expression, long offset)
        throws Exception {
        long deadline = System.nanoTime() + 100_000_000_000L;
        while (true) {
            try {
                return consumer.pull(queue, MessageSelector.bySql(expression), offset, 5);
            } catch (MQClientException e) {
                if (!e.getMessage().contains("does not upgrade") || System.nanoTime() > deadline) {
                    throw e;
                }
                Thread.sleep(20);
            }
        }
    }

    private String lite(String expression) throws Exception {
        DefaultLitePullConsumer consumer = Patience.with(new DefaultLitePullConsumer("sql-lite"), namesrv);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, MessageSelector.bySql("(" + expression + ")" + LAST));
        consumer.start();
        Set<String> seen = new ConcurrentSkipListSet<>();
        long deadline = System.nanoTime() + 100_000_000_000L;
        try {
            while (!(seen.contains("last-0") && seen.contains("last-1"))) {
                if (System.nanoTime() > deadline) {
                    throw new IllegalStateException("lite pull has seen " + seen);
                }
                consumer.poll(200).forEach(message -> seen.add(message.getUserProperty("index")));
            }
        } finally {
            consumer.shutdown();
        }
        return seen.toString();
    }

    private String refused(String expression) throws Exception {
        DefaultMQPushConsumer consumer = Patience.with(new DefaultMQPushConsumer("sql-refused"), namesrv);
        consumer.subscribe(topic, MessageSelector.bySql(expression));
        consumer.setMessageListener((MessageListenerConcurrently) (messages, context) ->
            ConsumeConcurrentlyStatus.CONSUME_SUCCESS);
        try {
            consumer.start();
            return "started";
        } catch (MQClientException refusal) {
            Throwable cause = refusal.getCause();
            boolean isBrokers = cause instanceof MQBrokerException;
            return "code " + (isBrokers ? ((MQBrokerException) cause).getResponseCode() : refusal.getResponseCode());
        } finally {
            consumer.shutdown();
        }
    }
}
