package interop;

import java.nio.charset.StandardCharsets;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ConcurrentSkipListSet;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyContext;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.exception.RemotingException;

/**
 * One broker stores every kind of message there is: what FixedSequence sends; ordered messages, delays, timers,
 * transactions, retries and dead letters.
 *
 * <pre>
 *   EveryKind send --namesrv HOST:PORT --broker NAME --timer true|false [--timeout-seconds S]
 * </pre>
 *
 * The topics of FixedSequence exist, and KindOrder, KindDelay, KindTimer, KindTran, KindRetry. Ends with 0 when
 * everything that comes due soon was delivered, with 1 when the time ran out, with 2 when a call failed.
 */
public final class EveryKind {
    private static final String LONG_GROUP = String.format("%-200s", "kinds_long_").replace(' ', 'x');

    private final String namesrv;
    private final String broker;
    private final Set<String> due = new TreeSet<>();
    private final Set<String> arrived = new ConcurrentSkipListSet<>();
    private final Set<MessageExt> retried = ConcurrentHashMap.newKeySet();

    private EveryKind(String namesrv, String broker) {
        this.namesrv = namesrv;
        this.broker = broker;
    }

    public static void main(String[] args) {
        Arguments arguments = Arguments.parse(args);
        int code = 2;
        try {
            long deadline = System.nanoTime() + Long.parseLong(arguments.one("timeout-seconds", "60")) * 1_000_000_000L;
            EveryKind kinds = new EveryKind(arguments.one("namesrv"), arguments.one("broker"));
            code = kinds.run(Boolean.parseBoolean(arguments.one("timer")), deadline) ? 0 : 1;
            System.out.println("due " + kinds.due + "\narrived " + kinds.arrived);
        } catch (Exception e) {
            e.printStackTrace();
        }
        System.exit(code);
    }

    private boolean run(boolean withTimer, long deadline) throws Exception {
        FixedSequence.runAll(namesrv, broker);
        DefaultMQProducer producer = new DefaultMQProducer("kinds");
        TransactionMQProducer transactions = new TransactionMQProducer("kinds-transactions");
        transactions.setTransactionListener(new ByPlan());
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("kinds");
        DefaultMQPushConsumer retrying = new DefaultMQPushConsumer("kinds-retry");
        try {
            start(producer);
            start(transactions);
            Patience.known(transactions);
            start(consumer, this::take, "KindDelay", "KindTran", "KindTimer");
            retrying.setMaxReconsumeTimes(2);
            start(retrying, this::retry, "KindRetry");
            ordered(producer);
            delayed(producer);
            if (withTimer) {
                timed(producer);
            }
            transactions(transactions);
            retries(producer, deadline);
            while (!arrived.containsAll(due)) {
                if (System.nanoTime() > deadline) {
                    return false;
                }
                Thread.sleep(20);
            }
            return true;
        } finally {
            consumer.shutdown();
            retrying.shutdown();
            transactions.shutdown();
            producer.shutdown();
        }
    }

    private void start(DefaultMQProducer producer) throws Exception {
        Patience.with(producer, namesrv).start();
    }

    private void start(DefaultMQPushConsumer consumer, MessageListenerConcurrently listener, String... topics)
        throws Exception {
        Patience.with(consumer, namesrv);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setPersistConsumerOffsetInterval(1000);
        for (String topic : topics) {
            consumer.subscribe(topic, "*");
        }
        consumer.setMessageListener(listener);
        consumer.start();
    }

    private static Message message(String topic, String key) {
        return new Message(topic, "kind", key, key.getBytes(StandardCharsets.UTF_8));
    }

    private static void check(SendResult result) {
        if (result.getSendStatus() != SendStatus.SEND_OK) {
            throw new IllegalStateException(result.toString());
        }
    }

    private void ordered(DefaultMQProducer producer) throws Exception {
        for (int i = 0; i < 12; i++) {
            Message message = message("KindOrder", "order-" + i);
            check(producer.send(message, (queues, one, key) -> queues.get(key.hashCode() % queues.size()), "order"));
        }
    }

    /** The levels 17 and 18 (and 99, which is the highest there is) stay pending. */
    private void delayed(DefaultMQProducer producer) throws Exception {
        for (int level : new int[] {1, 1, 2, 3, 17, 18, 99}) {
            Message message = message("KindDelay", "delay-" + level);
            message.setDelayTimeLevel(level);
            check(producer.send(message));
            if (level < 17) {
                due.add(message.getKeys());
            }
        }
    }

    private void timed(DefaultMQProducer producer) throws Exception {
        long now = System.currentTimeMillis();
        String[][] times = {{"TIMER_DELIVER_MS", Long.toString(now + 2000)}, {"TIMER_DELIVER_MS", Long.toString(now - 1000)},
            {"TIMER_DELAY_SEC", "2"}, {"TIMER_DELAY_MS", "1500"}, {"TIMER_DELIVER_MS", Long.toString(now + 3600_000)}};
        for (int i = 0; i < times.length; i++) {
            Message message = message("KindTimer", "timer-" + i);
            MessageAccessor.putProperty(message, times[i][0], times[i][1]);
            check(producer.send(message));
            if (i < times.length - 1) {
                due.add(message.getKeys());
            }
        }
    }

    private void transactions(TransactionMQProducer producer) throws Exception {
        for (String plan : new String[] {"COMMIT_MESSAGE:UNKNOW", "ROLLBACK_MESSAGE:UNKNOW", "UNKNOW:COMMIT_MESSAGE",
            "UNKNOW:ROLLBACK_MESSAGE", "UNKNOW:UNKNOW"}) {
            check(producer.sendMessageInTransaction(message("KindTran", plan), plan));
            if (plan.contains("COMMIT")) {
                due.add(plan);
            }
        }
    }

    /** What the local transaction answers, and what every question is answered with about one that is not decided. */
    private static final class ByPlan implements TransactionListener {
        @Override
        public LocalTransactionState executeLocalTransaction(Message message, Object plan) {
            return LocalTransactionState.valueOf(message.getKeys().split(":")[0]);
        }

        @Override
        public LocalTransactionState checkLocalTransaction(MessageExt message) {
            String[] plan = message.getKeys().split(":");
            return LocalTransactionState.valueOf(plan[0].equals("UNKNOW") ? plan[1] : plan[0]);
        }
    }

    private void retries(DefaultMQProducer producer, long deadline) throws Exception {
        for (String key : new String[] {"once", "dead", "always", "default-level"}) {
            check(producer.send(message("KindRetry", key)));
        }
        due.add("once@1");
        due.add("always@2");
        due.add("default-level@1");
        while (retried.isEmpty() && System.nanoTime() < deadline) {
            Thread.sleep(20);
        }
        fallBack(retried.iterator().next(), deadline);
    }

    /**
     * The broker refuses a group of such a name; the client sends the message to its own retry topic instead. It gives
     * that three seconds, which may be too short for a busy machine: then again. The retry topic may exist by then with
     * its one queue while the client still thinks of more; that is refused until the client asks for the route.
     */
    @SuppressWarnings("deprecation")
    private void fallBack(MessageExt message, long deadline) throws Exception {
        DefaultMQPullConsumer consumer = Patience.with(new DefaultMQPullConsumer("kinds-fallback"), namesrv);
        consumer.start();
        Patience.started(consumer);
        consumer.fetchSubscribeMessageQueues("KindRetry");
        for (boolean isSent = false; !isSent; ) {
            try {
                consumer.sendMessageBack(message, 1, broker, LONG_GROUP);
                isSent = true;
            } catch (MQBrokerException | MQClientException | RemotingException e) {
                if (System.nanoTime() > deadline) {
                    throw e;
                }
                e.printStackTrace();
                Thread.sleep(100);
            }
        }
        consumer.shutdown();
    }

    private ConsumeConcurrentlyStatus take(java.util.List<MessageExt> messages, ConsumeConcurrentlyContext context) {
        messages.forEach(message -> arrived.add(message.getKeys()));
        return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
    }

    private ConsumeConcurrentlyStatus retry(java.util.List<MessageExt> messages, ConsumeConcurrentlyContext context) {
        MessageExt message = messages.get(0); // a listener gets one at a time
        retried.add(message);
        arrived.add(message.getKeys() + "@" + message.getReconsumeTimes());
        context.setDelayLevelWhenNextConsume(message.getKeys().equals("dead") ? -1 : message.getKeys().equals("default-level") ? 0 : 1);
        return message.getReconsumeTimes() == 0 || message.getKeys().equals("always")
            ? ConsumeConcurrentlyStatus.RECONSUME_LATER
            : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
    }
}
