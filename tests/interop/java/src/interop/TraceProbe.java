package interop;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.hook.SendMessageContext;
import org.apache.rocketmq.client.hook.SendMessageHook;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.trace.AsyncTraceDispatcher;
import org.apache.rocketmq.client.trace.TraceDispatcher;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Does everything that clients write trace records about, or exchanges messages within a namespace:
 *
 * <pre>
 *   TraceProbe acts --namesrv HOST:PORT --name PREFIX
 *   TraceProbe exchange --namesrv HOST:PORT --name PREFIX --namespace NS
 * </pre>
 *
 * Topics and groups begin with the prefix. Prints the topics and bodies of what arrives.
 */
public final class TraceProbe {
    private static final long SECONDS_MAX = 100;
    private static final long QUIET_MS = 2000;

    private final Arguments arguments;
    private final String name;
    private final ConcurrentLinkedQueue<String> arrived = new ConcurrentLinkedQueue<>();
    private final Set<String> failed = ConcurrentHashMap.newKeySet();
    private volatile boolean isChecked;
    private final AtomicInteger tracesUnderWay = new AtomicInteger();
    private final AtomicLong lastTraceMs = new AtomicLong();

    private TraceProbe(Arguments arguments) {
        this.arguments = arguments;
        this.name = arguments.one("name");
    }

    public static void main(String[] args) {
        Arguments arguments = Arguments.parse(args);
        TraceProbe probe = new TraceProbe(arguments);
        int code = 1;
        try {
            probe.run();
            code = 0;
        } catch (Exception e) {
            e.printStackTrace();
        }
        System.exit(code);
    }

    private void run() throws Exception {
        if ("acts".equals(arguments.command)) {
            sends();
            transactions();
            consumesConcurrently(8);
            consumesInOrder();
            polls();
        } else {
            DefaultMQProducer producer = configured(new DefaultMQProducer(name + "-P"));
            producer.start();
            producer.send(message("T", "from Java", null));
            consumesConcurrently(2);
            producer.shutdown();
        }
    }

    private void sends() throws Exception {
        DefaultMQProducer producer = configured(new DefaultMQProducer(name + "-P", true, null));
        producer.start();
        watch(producer.getTraceDispatcher());
        producer.send(message("T", "plain", null));
        producer.send(message("T", "tagged", "A", "k1", "k2"));
        Message delayed = message("T", "delayed", "A");
        delayed.setDelayTimeLevel(1);
        producer.send(delayed);
        producer.send(Arrays.asList(message("T", "one", "A", "k3"), message("T", "two", "B")));
        producer.sendOneway(message("T", "one way", null));
        producer.send(message("Large", new String(new char[5000]).replace('\0', 'x'), null));
        Message ordered = message("Large", "ordered", null);
        MessageAccessor.putProperty(ordered, "__SHARDINGKEY", "s");
        producer.send(ordered);
        recall(producer);
        end(producer::shutdown);
    }

    /** Exists since 5.3. */
    private void recall(DefaultMQProducer producer) throws Exception {
        Message timed = message("Timed", "recalled", null);
        MessageAccessor.putProperty(timed, "TIMER_DELIVER_MS", String.valueOf(System.currentTimeMillis() + 60_000));
        SendResult sent = producer.send(timed);
        Object handle = SendResult.class.getMethod("getRecallHandle").invoke(sent);
        DefaultMQProducer.class.getMethod("recallMessage", String.class, String.class)
            .invoke(producer, timed.getTopic(), handle);
    }

    private void transactions() throws Exception {
        TransactionMQProducer producer = configured(new TransactionMQProducer(null, name + "-X", null, true, null));
        producer.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object state) {
                return (LocalTransactionState) state;
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                isChecked = true;
                return LocalTransactionState.COMMIT_MESSAGE;
            }
        });
        producer.start();
        Patience.known(producer);
        watch(producer.getTraceDispatcher());
        producer.sendMessageInTransaction(message("X", "c", "A", "k4"), LocalTransactionState.COMMIT_MESSAGE);
        producer.sendMessageInTransaction(message("X", "r", null), LocalTransactionState.ROLLBACK_MESSAGE);
        producer.sendMessageInTransaction(message("X", "u", null), LocalTransactionState.UNKNOW);
        await(() -> isChecked, "the question about the unknown transaction");
        end(producer::shutdown);
    }

    private void consumesConcurrently(int count) throws Exception {
        DefaultMQPushConsumer consumer = configured(new DefaultMQPushConsumer(name + "-C", true, null));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(name + "-T", "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            String body = note(messages.get(0));
            boolean isFirst = failed.add(body);
            if ("plain".equals(body) && isFirst) {
                return ConsumeConcurrentlyStatus.RECONSUME_LATER;
            }
            if ("tagged".equals(body) && isFirst) {
                throw new IllegalStateException("not yet");
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        watch(consumer.getTraceDispatcher());
        await(() -> arrived.size() >= count, count + " messages");
        end(consumer::shutdown);
    }

    private void consumesInOrder() throws Exception {
        DefaultMQPushConsumer consumer = configured(new DefaultMQPushConsumer(name + "-O", true, null));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setSuspendCurrentQueueTimeMillis(10);
        consumer.subscribe(name + "-Large", "*");
        arrived.clear();
        consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
            String body = note(messages.get(0));
            boolean isFirst = failed.add(body);
            return "ordered".equals(body) && isFirst
                ? ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT : ConsumeOrderlyStatus.SUCCESS;
        });
        consumer.start();
        watch(consumer.getTraceDispatcher());
        await(() -> arrived.size() >= 3, "three ordered messages");
        end(consumer::shutdown);
    }

    private void polls() throws Exception {
        DefaultLitePullConsumer consumer = configured(new DefaultLitePullConsumer(name + "-L"));
        consumer.setEnableMsgTrace(true);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(name + "-Large", "*");
        consumer.start();
        watch(consumer.getTraceDispatcher());
        List<MessageExt> polled = new ArrayList<>();
        await(() -> polled.addAll(consumer.poll(100)) & polled.size() >= 2, "two polled messages");
        end(consumer::shutdown);
    }

    /** Note when traces are sent and answered. */
    private void watch(TraceDispatcher dispatcher) {
        ((AsyncTraceDispatcher) dispatcher).getTraceProducer().getDefaultMQProducerImpl().registerSendMessageHook(new SendMessageHook() {
            @Override
            public String hookName() {
                return "watch";
            }

            @Override
            public void sendMessageBefore(SendMessageContext context) {
                tracesUnderWay.incrementAndGet();
            }

            @Override
            public void sendMessageAfter(SendMessageContext context) {
                lastTraceMs.set(System.currentTimeMillis());
                tracesUnderWay.decrementAndGet();
            }
        });
    }

    /** A shutdown loses the traces that are under way: when there are none, and there were none for a while. */
    private void end(Runnable shutdown) throws Exception {
        lastTraceMs.set(System.currentTimeMillis());
        await(() -> tracesUnderWay.get() <= 0 && System.currentTimeMillis() - lastTraceMs.get() > QUIET_MS, "an end of traces");
        tracesUnderWay.set(0);
        shutdown.run();
    }

    private String note(MessageExt message) {
        String body = new String(message.getBody(), StandardCharsets.UTF_8);
        System.out.println(message.getTopic() + " " + (body.length() > 100 ? body.length() : body));
        arrived.add(body);
        return body;
    }

    private <C extends ClientConfig> C configured(C client) {
        Patience.with(client, arguments.one("namesrv"));
        if (arguments.one("namespace", null) != null) {
            client.setNamespace(arguments.one("namespace"));
        }
        try { // exists since 5.1; records go out at once, as a shutdown loses those that are under way
            ClientConfig.class.getMethod("setTraceMsgBatchNum", int.class).invoke(client, 1);
        } catch (ReflectiveOperationException e) {
            System.err.println(e);
        }
        return client;
    }

    private Message message(String topic, String body, String tags, String... keys) {
        return new Message(name + "-" + topic, tags, String.join(" ", keys), body.getBytes(StandardCharsets.UTF_8));
    }

    private interface Condition {
        boolean holds() throws Exception;
    }

    private static void await(Condition condition, String what) throws Exception {
        long deadline = System.nanoTime() + SECONDS_MAX * 1_000_000_000L;
        while (!condition.holds()) {
            if (System.nanoTime() > deadline) {
                throw new IllegalStateException("not within " + SECONDS_MAX + " s: " + what);
            }
            Thread.sleep(20);
        }
    }
}
