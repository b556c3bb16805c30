package interop;

import java.io.PrintStream;
import java.lang.reflect.Method;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.Paths;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.function.BooleanSupplier;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Each behaviour of Apache's client that a broker takes part in, told as facts that name no id, address or time.
 *
 * <p>Arguments: name server, broker name, output file, names of the behaviours. A line of the output is a behaviour, a tab
 * and a fact. All behaviours run side by side, each with topics and groups of its own. The same program against two brokers
 * has to tell the same facts.
 */
public final class ClientBehaviours {
    /**
     * Longer than Apache's broker keeps a member that has left, 130 s, where it carries out a heartbeat of it after its
     * farewell: on a busy machine both may wait for threads.
     */
    private static final int WAIT_SECONDS = 250;

    /** One behaviour under way: what it may use and where its facts go. */
    static final class Run {
        final String namesrv;
        final String brokerName;
        final String name;
        final List<String> facts = Collections.synchronizedList(new ArrayList<>());
        private final List<Runnable> closing = new ArrayList<>();

        Run(String namesrv, String brokerName, String name) {
            this.namesrv = namesrv;
            this.brokerName = brokerName;
            this.name = name;
        }

        void fact(String format, Object... values) {
            facts.add(String.format(format, values).replace('\n', ' '));
        }

        /** Facts that come in no fixed order. */
        void sortedFacts(List<String> unordered) {
            List<String> sorted = new ArrayList<>(unordered);
            Collections.sort(sorted);
            sorted.forEach(text -> fact("%s", text));
        }

        void onClose(Runnable close) {
            closing.add(close);
        }

        void close() {
            Collections.reverse(closing);
            closing.forEach(Runnable::run);
        }

        String topic() {
            return "Behaviour-" + name;
        }

        String group(String suffix) {
            return "behaviour-" + name + "-" + suffix;
        }

        DefaultMQProducer producer() throws Exception {
            return producer(new DefaultMQProducer(group("producer")));
        }

        <P extends DefaultMQProducer> P producer(P producer) throws Exception {
            Patience.with(producer, namesrv).start();
            onClose(producer::shutdown);
            return Patience.started(producer);
        }

        /** A started pull consumer. */
        @SuppressWarnings("deprecation") // the one that takes explicit offsets, in 4.9 and 5.x alike
        DefaultMQPullConsumer puller(String suffix) throws Exception {
            DefaultMQPullConsumer consumer = Patience.with(new DefaultMQPullConsumer(group(suffix)), namesrv);
            consumer.start();
            onClose(consumer::shutdown);
            return Patience.started(consumer);
        }

        /** A push consumer that reads from the first message on; the caller subscribes, registers and starts it. */
        DefaultMQPushConsumer consumer(String suffix) throws Exception {
            DefaultMQPushConsumer consumer = Patience.with(new DefaultMQPushConsumer(group(suffix)), namesrv);
            consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
            onClose(consumer::shutdown);
            return consumer;
        }

        /** Creates a topic and waits until it is routed. */
        void createTopic(DefaultMQProducer producer, String topic, int queues) throws Exception {
            // 5.x wants attributes, 4.9 knows none.
            for (Method method : DefaultMQProducer.class.getMethods()) {
                Class<?>[] types = method.getParameterTypes();
                if (method.getName().equals("createTopic") && types.length == 3) {
                    method.invoke(producer, "TBW102", topic, queues);
                } else if (method.getName().equals("createTopic") && types.length == 4 && types[3] == Map.class) {
                    method.invoke(producer, "TBW102", topic, queues, new HashMap<>());
                }
            }
            await("route of " + topic, () -> routed(producer, topic, queues));
        }

        private boolean routed(DefaultMQProducer producer, String topic, int queues) {
            try {
                return producer.fetchPublishMessageQueues(topic).size() == queues;
            } catch (MQClientException missing) {
                return false;
            }
        }

        MessageQueue queue(String topic, int id) {
            return new MessageQueue(topic, brokerName, id);
        }

        Message message(String topic, String tags, String keys, String body) {
            return new Message(topic, tags, keys, body.getBytes(StandardCharsets.UTF_8));
        }

        void await(String what, BooleanSupplier condition) throws Exception {
            long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(WAIT_SECONDS);
            while (!condition.getAsBoolean()) {
                if (System.nanoTime() > deadline) {
                    throw new IllegalStateException("no " + what + " within " + WAIT_SECONDS + " s");
                }
                Thread.sleep(20);
            }
        }
    }

    /** A behaviour. */
    interface Behaviour {
        void run(Run run) throws Exception;
    }

    static String body(Message message) {
        return new String(message.getBody(), StandardCharsets.UTF_8);
    }

    static String describe(MessageExt message) {
        return String.format("%s tags=%s keys=%s flag=%d queue=%d offset=%d tries=%d", body(message), message.getTags(),
            message.getKeys(), message.getFlag(), message.getQueueId(), message.getQueueOffset(), message.getReconsumeTimes());
    }

    static String describe(SendResult result) {
        return String.format("%s queue=%d offset=%d region=%s trace=%s", result.getSendStatus(),
            result.getMessageQueue().getQueueId(), result.getQueueOffset(), result.getRegionId(), result.isTraceOn());
    }

    /** Properties by name; values that hold an id, an address or a time by their kind. */
    static Map<String, String> properties(Message message) {
        Map<String, String> shown = new TreeMap<>();
        message.getProperties().forEach((name, value) -> shown.put(name, isFixed(name) ? value : "*"));
        return shown;
    }

    private static boolean isFixed(String name) {
        switch (name) {
            case "UNIQ_KEY":
            case "CORRELATION_ID":
            case "REPLY_TO_CLIENT":
            case "ARRIVE_TIME":
            case "PUSH_REPLY_TIME":
            case "ORIGIN_MESSAGE_ID":
            case "DLQ_ORIGIN_MESSAGE_ID":
            case "CONSUME_START_TIME":
            case "TRAN_PREPARED_QUEUE_OFFSET":
            case "__transactionId__":
            case "BORN_TIMESTAMP":
            case "MAX_OFFSET":
            case "CLUSTER":
                return false;
            default:
                return true;
        }
    }

    static String error(Exception error, String brokerName) {
        String text = error.getClass().getSimpleName();
        if (error instanceof MQBrokerException) {
            text += " " + ((MQBrokerException) error).getResponseCode() + " " + ((MQBrokerException) error).getErrorMessage();
        } else if (error instanceof MQClientException) {
            text += " " + ((MQClientException) error).getResponseCode();
        }
        return text.replaceAll("\\d+\\.\\d+\\.\\d+\\.\\d+(:\\d+)?", "<address>").replace(brokerName, "<broker>");
    }

    public static void main(String[] args) throws Exception {
        Map<String, Behaviour> known = new LinkedHashMap<>();
        ProducerBehaviours.register(known);
        ConsumerBehaviours.register(known);
        Path out = Paths.get(args[2]);
        ExecutorService threads = Executors.newCachedThreadPool();
        Map<Run, Future<?>> runs = new ConcurrentHashMap<>();
        for (String name : new TreeSet<>(Arrays.asList(args).subList(3, args.length))) {
            Run run = new Run(args[0], args[1], name);
            runs.put(run, threads.submit(() -> tell(run, known.get(name))));
        }
        for (Future<?> under : runs.values()) {
            under.get();
        }
        try (PrintStream lines = new PrintStream(Files.newOutputStream(out), false, "UTF-8")) {
            for (Run run : runs.keySet()) {
                run.facts.forEach(fact -> lines.println(run.name + "\t" + fact));
            }
        }
        // Client threads may linger.
        System.exit(0);
    }

    private static void tell(Run run, Behaviour behaviour) {
        try {
            behaviour.run(run);
            run.fact("end");
        } catch (Throwable failure) {
            run.fact("FAILED %s", failure);
            failure.printStackTrace();
        } finally {
            run.close();
        }
    }
}
