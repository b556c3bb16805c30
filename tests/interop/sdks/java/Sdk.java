import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.Callable;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.function.BooleanSupplier;
import java.util.function.Predicate;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientException;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.FilterExpressionType;
import org.apache.rocketmq.client.apis.consumer.LitePushConsumer;
import org.apache.rocketmq.client.apis.consumer.MessageListener;
import org.apache.rocketmq.client.apis.consumer.OffsetOption;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.SendReceipt;
import org.apache.rocketmq.client.apis.producer.Transaction;
import org.apache.rocketmq.client.apis.producer.TransactionChecker;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;

/**
 * Apache's Java SDK for gRPC, unmodified: the scenarios of tests/interop/sdks, and as JSON what came of each as soon as it
 * is known.
 *
 * <pre>java Sdk HOST:PORT PREFIX SCENARIO...</pre>
 */
public final class Sdk {
    private static final Duration PATIENT = Duration.ofSeconds(100);
    private static final Duration AWAIT = Duration.ofSeconds(5);
    private static final Duration INVISIBLE = Duration.ofSeconds(60);
    private static final int ARCHIVED = 60;
    private static final Duration LOAD_INVISIBLE = Duration.ofSeconds(15);
    private static final ClientServiceProvider PROVIDER = ClientServiceProvider.loadService();
    private static ClientConfiguration configuration;
    private static String prefix;

    public static void main(String[] arguments) throws Exception {
        configuration = ClientConfiguration.newBuilder().setEndpoints(arguments[0])
            .setRequestTimeout(Duration.ofSeconds(10)).build();
        prefix = arguments[1];
        Map<String, Callable<Map<String, Object>>> scenarios = new TreeMap<>(Map.of("plain", Sdk::plain,
            "invisible", Sdk::invisible, "filters", Sdk::filters, "fifo", Sdk::fifo, "delay", Sdk::delay,
            "transaction", Sdk::transaction, "retries", Sdk::retries, "refused", Sdk::refused, "crossed", Sdk::crossed,
            "load", Sdk::load));
        scenarios.put("archived", Sdk::archived); // Map.of takes ten
        scenarios.put("lite", Sdk::lite);
        ExecutorService threads = Executors.newCachedThreadPool();
        List<Future<?>> running = new ArrayList<>();
        for (String name : Arrays.asList(arguments).subList(2, arguments.length)) {
            running.add(threads.submit(() -> tell(name, run(scenarios.get(name)))));
        }
        for (Future<?> one : running) {
            one.get();
        }
        Runtime.getRuntime().halt(0); // not after the long polls that still run
    }

    private static Map<String, Object> run(Callable<Map<String, Object>> scenario) {
        try {
            return scenario.call();
        } catch (Exception problem) {
            return Map.of("error", problem.toString());
        }
    }

    private static void tell(String name, Object facts) {
        System.out.println(json(List.of(name, facts)));
        System.out.flush();
    }

    private static String json(Object value) {
        List<String> parts = new ArrayList<>();
        if (value instanceof Map) {
            ((Map<?, ?>) value).forEach((key, item) -> parts.add(json(key) + ":" + json(item)));
            return "{" + String.join(",", parts) + "}";
        }
        if (value instanceof Iterable) {
            ((Iterable<?>) value).forEach(item -> parts.add(json(item)));
            return "[" + String.join(",", parts) + "]";
        }
        if (value instanceof Number || value instanceof Boolean) {
            return value.toString();
        }
        String text = value.toString().replace("\\", "\\\\").replace("\"", "\\\"");
        return '"' + text.replace("\n", "\\n").replace("\t", "\\t") + '"';
    }

    // -- what scenarios are made of

    private static String named(String name) {
        return prefix + "-" + name;
    }

    private static String body(MessageView message) {
        return StandardCharsets.UTF_8.decode(message.getBody()).toString();
    }

    /** Notes what comes; "fails" always fails, "fails once" at the first attempt. */
    private static final class Listener implements MessageListener {
        private final List<List<Object>> came = new ArrayList<>();
        private boolean failed;

        @Override
        public synchronized ConsumeResult consume(MessageView message) {
            String body = body(message);
            came.add(List.of(body, message.getDeliveryAttempt()));
            boolean isFailure = body.equals("fails") || body.equals("fails once") && !failed;
            failed |= body.equals("fails once");
            return isFailure ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
        }

        private synchronized List<List<Object>> came() {
            return new ArrayList<>(came);
        }

        private Set<Object> bodies() {
            Set<Object> found = new TreeSet<>();
            came().forEach(one -> found.add(one.get(0)));
            return found;
        }

        /** What came, as soon as the condition holds for it, or at last. */
        private List<List<Object>> until(Predicate<List<List<Object>>> condition) throws InterruptedException {
            waitFor(() -> condition.test(came()));
            return came();
        }

        /** The bodies that came: a broker may send one again before it has noted an answer. */
        private Set<Object> untilBodies(String... wanted) throws InterruptedException {
            waitFor(() -> bodies().containsAll(List.of(wanted)));
            return bodies();
        }
    }

    private static void waitFor(BooleanSupplier condition) throws InterruptedException {
        long deadline = System.nanoTime() + PATIENT.toNanos();
        while (!condition.getAsBoolean() && System.nanoTime() < deadline) {
            Thread.sleep(20);
        }
    }

    private static MessageBuilder made(String topic, String body) {
        return PROVIDER.newMessageBuilder().setTopic(named(topic)).setBody(body.getBytes(StandardCharsets.UTF_8));
    }

    private static Producer producer(String topic) throws ClientException {
        return PROVIDER.newProducerBuilder().setClientConfiguration(configuration).setTopics(named(topic)).build();
    }

    private static SimpleConsumer simple(String group, String topic, FilterExpression filter) throws ClientException {
        return PROVIDER.newSimpleConsumerBuilder().setClientConfiguration(configuration).setConsumerGroup(named(group))
            .setAwaitDuration(AWAIT).setSubscriptionExpressions(Map.of(topic, filter)).build();
    }

    private static SimpleConsumer simple(String group) throws ClientException {
        return simple(group, named(group), FilterExpression.SUB_ALL);
    }

    private static void push(String group, String topic, MessageListener listener) throws ClientException {
        PROVIDER.newPushConsumerBuilder().setClientConfiguration(configuration).setConsumerGroup(named(group))
            .setConsumptionThreadCount(4).setMessageListener(listener)
            .setSubscriptionExpressions(Map.of(named(topic), FilterExpression.SUB_ALL)).build();
    }

    private static List<MessageView> received(SimpleConsumer consumer, int count, boolean acknowledges)
        throws ClientException {
        List<MessageView> found = new ArrayList<>();
        long deadline = System.nanoTime() + PATIENT.toNanos();
        while (found.size() < count && System.nanoTime() < deadline) {
            for (MessageView message : consumer.receive(32, INVISIBLE)) {
                if (acknowledges) {
                    consumer.ack(message);
                }
                found.add(message);
            }
        }
        return found;
    }

    private static List<String> bodies(List<MessageView> messages) {
        List<String> found = new ArrayList<>();
        messages.forEach(message -> found.add(body(message)));
        Collections.sort(found);
        return found;
    }

    /** Waits for a topic that is there with its first message. */
    private static List<String> deadLetters(String group) throws Exception {
        for (long deadline = System.nanoTime() + PATIENT.toNanos();; Thread.sleep(100)) {
            SimpleConsumer consumer;
            try {
                consumer = simple("dead-" + group, "%DLQ%" + named(group), FilterExpression.SUB_ALL);
            } catch (ClientException | IllegalStateException missing) {
                if (System.nanoTime() > deadline) {
                    throw missing;
                }
                continue;
            }
            List<String> found = bodies(received(consumer, 1, true));
            consumer.close();
            return found;
        }
    }

    // -- scenarios

    private static Map<String, Object> plain() throws Exception {
        SimpleConsumer consumer = simple("plain");
        Producer sender = producer("plain");
        Message message = made("plain", "hello").setTag("a").setKeys("k1", "k2").addProperty("x", "y").build();
        SendReceipt receipt = sender.send(message);
        MessageView found = received(consumer, 1, true).get(0);
        consumer.close();
        sender.close();
        List<Object> told = List.of(body(found), found.getTag().orElse(""), new TreeSet<>(found.getKeys()),
            new TreeMap<>(found.getProperties()), found.getDeliveryAttempt());
        return Map.of("message", told, "same id", found.getMessageId().equals(receipt.getMessageId()));
    }

    private static Map<String, Object> invisible() throws Exception {
        Producer sender = producer("invisible");
        SimpleConsumer consumer = simple("invisible");
        sender.send(made("invisible", "changed").build());
        MessageView first = received(consumer, 1, false).get(0);
        consumer.changeInvisibleDuration(first, Duration.ofSeconds(1));
        MessageView second = received(consumer, 1, true).get(0);
        List<Integer> attempts = List.of(first.getDeliveryAttempt(), second.getDeliveryAttempt());
        return Map.of("attempts", attempts, "body", body(second));
    }

    private static Map<String, Object> filters() throws Exception {
        Producer sender = producer("filters");
        for (String[] one : new String[][] {{"one", "red", "1"}, {"two", "green", "7"}, {"three", "blue", "9"}}) {
            sender.send(made("filters", one[0]).setTag(one[1]).addProperty("size", one[2]).build());
        }
        FilterExpression sql = new FilterExpression("size > 5 AND TAGS <> 'blue'", FilterExpressionType.SQL92);
        SimpleConsumer byTag = simple("tags", named("filters"), new FilterExpression("red || blue"));
        SimpleConsumer bySql = simple("sql", named("filters"), sql);
        return Map.of("tags", bodies(received(byTag, 2, true)), "sql", bodies(received(bySql, 1, true)));
    }

    /** What is in an archive and what is in the log, in the order in which it comes; and what is sent after it. */
    private static Map<String, Object> archived() throws Exception {
        SimpleConsumer consumer = simple("archived");
        Producer sender = producer("archived");
        List<MessageView> found = received(consumer, ARCHIVED, true);
        sender.send(made("archived", "after").build());
        found.addAll(received(consumer, 1, true));
        List<Object> ordered = new ArrayList<>();
        found.forEach(one -> ordered.add(body(one)));
        Listener listener = new Listener();
        push("archived-fifo", "archived-fifo", listener);
        List<Object> pushed = new ArrayList<>();
        listener.until(all -> all.size() >= ARCHIVED).forEach(one -> pushed.add(one.get(0)));
        return Map.of("simple", ordered, "push", pushed);
    }

    private static Map<String, Object> fifo() throws Exception {
        Listener listener = new Listener();
        Producer sender = producer("fifo");
        push("fifo", "fifo", listener);
        for (String body : List.of("f0", "f1", "fails once", "f3", "f4", "fails", "f6")) {
            sender.send(made("fifo", body).setMessageGroup("g").build());
        }
        List<List<Object>> came = listener.until(all -> all.size() >= 9);
        return Map.of("came", came, "dead", deadLetters("fifo"));
    }

    private static Map<String, Object> delay() throws Exception {
        Listener listener = new Listener();
        Producer sender = producer("delay");
        push("delay", "delay", listener);
        long now = System.currentTimeMillis();
        sender.send(made("delay", "past").setDeliveryTimestamp(1000).build());
        SendReceipt recalled = sender.send(made("delay", "recalled").setDeliveryTimestamp(now + 8000).build());
        boolean isRecalled = sender.recallMessage(named("delay"), recalled.getRecallHandle()).getMessageId()
            .equals(recalled.getMessageId());
        sender.send(made("delay", "due").setDeliveryTimestamp(now + 9000).build());
        Set<Object> came = listener.untilBodies("past", "due");
        return Map.of("came", came, "early", System.currentTimeMillis() < now + 9000, "recalled", isRecalled);
    }

    private static Map<String, Object> transaction() throws Exception {
        Listener listener = new Listener();
        Listener asked = new Listener();
        TransactionChecker checker = message -> {
            asked.consume(message);
            boolean isGood = List.of("checked", "commit").contains(body(message)); // slow ones are asked before they commit
            return isGood ? TransactionResolution.COMMIT : TransactionResolution.ROLLBACK;
        };
        Producer sender = PROVIDER.newProducerBuilder().setClientConfiguration(configuration)
            .setTopics(named("transaction")).setTransactionChecker(checker).build();
        push("transaction", "transaction", listener);
        for (String body : List.of("checked", "dropped", "commit", "rollback")) {
            Transaction begun = sender.beginTransaction();
            sender.send(made("transaction", body).build(), begun);
            if (body.equals("commit")) {
                begun.commit();
            } else if (body.equals("rollback")) {
                begun.rollback();
            }
        }
        Set<Object> came = listener.untilBodies("checked", "commit");
        return Map.of("came", came, "asked", asked.untilBodies("checked", "dropped"));
    }

    private static Map<String, Object> retries() throws Exception {
        Listener listener = new Listener();
        Producer sender = producer("retries");
        push("retries", "retries", listener);
        for (String body : List.of("fails once", "fails")) {
            sender.send(made("retries", body).build());
        }
        List<String> dead = deadLetters("retries");
        List<List<Object>> came = listener.until(all -> all.size() >= 4);
        came.sort((a, b) -> a.toString().compareTo(b.toString()));
        return Map.of("came", came, "dead", dead);
    }

    private static Map<String, Object> lite() throws Exception {
        Listener listener = new Listener(); // with several threads, this SDK handles the messages of one answer at once
        LitePushConsumer consumer = PROVIDER.newLitePushConsumerBuilder().setClientConfiguration(configuration)
            .setConsumerGroup(named("lite-push")).bindTopic(named("lite")).setConsumptionThreadCount(1)
            .setMessageListener(listener).build();
        consumer.subscribeLite("s1");
        consumer.subscribeLite("s2", OffsetOption.MIN_OFFSET);
        Producer sender = producer("lite");
        for (String body : List.of("a0", "fails once", "a2", "b0", "b1", "b2")) {
            sender.send(made("lite", body).setLiteTopic(body.startsWith("b") ? "s2" : "s1").build());
        }
        Set<Object> bodies = listener.untilBodies("a0", "fails once", "a2", "b0", "b1", "b2");
        List<List<Object>> came = listener.until(all -> all.contains(List.of("fails once", 2)));
        consumer.unsubscribeLite("s2");
        Set<String> left = consumer.getLiteTopicSet();
        List<Object> inOrder = new ArrayList<>();
        came.forEach(one -> {
            if (one.get(0).toString().startsWith("b")) {
                inOrder.add(one.get(0));
            }
        });
        return Map.of("push", bodies, "redelivered", came.contains(List.of("fails once", 2)), "s2", inOrder, "left",
            left);
    }

    private static Map<String, Object> refused() throws Exception {
        Producer sender = producer("plain");
        Map<String, Object> told = new TreeMap<>();
        Map<String, Message> attempts = Map.of("type", made("plain", "x").setMessageGroup("g").build(),
            "topic", made("nowhere", "x").build());
        for (Map.Entry<String, Message> one : attempts.entrySet()) {
            try {
                sender.send(one.getValue());
            } catch (Exception problem) {
                told.put(one.getKey(), problem.toString());
            }
        }
        return told;
    }

    /** Bodies that clients of the other protocol compressed; and a long one of ours. */
    private static Map<String, Object> crossed() throws Exception {
        SimpleConsumer consumer = simple("crossed");
        Producer sender = producer("long");
        sender.send(made("long", (prefix + " ").repeat(4000)).build());
        Map<String, Object> came = new TreeMap<>();
        for (MessageView message : received(consumer, 3, true)) {
            came.put(body(message).substring(0, 4), body(message).length());
        }
        List<Object> told = new ArrayList<>();
        came.forEach((body, length) -> told.add(List.of(body, length)));
        return Map.of("came", told);
    }

    /** Send and consume through a restart; every body is the time it was sent at, in ms. */
    private static Map<String, Object> load() throws Exception {
        Map<String, Set<String>> came = Map.of("push", ConcurrentHashMap.newKeySet(), "simple", ConcurrentHashMap.newKeySet());
        Set<String> answered = ConcurrentHashMap.newKeySet();
        Producer sender = producer("load");
        SimpleConsumer consumer = simple("load-simple", named("load"), FilterExpression.SUB_ALL);
        push("load-push", "load", message -> {
            note(came, "push", message);
            return ConsumeResult.SUCCESS;
        });
        daemon(() -> {
            while (true) {
                try {
                    for (MessageView message : consumer.receive(32, LOAD_INVISIBLE)) {
                        note(came, "simple", message);
                        consumer.ack(message);
                    }
                } catch (Exception away) {
                    Thread.sleep(100);
                }
            }
        });
        CountDownLatch stopped = new CountDownLatch(1);
        daemon(() -> {
            System.in.readAllBytes();
            stopped.countDown();
            return null;
        });
        while (!stopped.await(100, TimeUnit.MILLISECONDS)) {
            String body = String.valueOf(System.currentTimeMillis());
            try {
                sender.send(made("load", body).build());
                answered.add(body);
            } catch (Exception away) { // gRPC's own, too
                continue;
            }
        }
        waitFor(() -> missing(answered, came.get("push")) + missing(answered, came.get("simple")) == 0);
        return Map.of("push", missing(answered, came.get("push")), "simple", missing(answered, came.get("simple")));
    }

    private static void note(Map<String, Set<String>> came, String how, MessageView message) {
        came.get(how).add(body(message));
        tell(how, body(message));
    }

    private static long missing(Set<String> answered, Set<String> came) {
        return answered.stream().filter(body -> !came.contains(body)).count();
    }

    private static void daemon(Callable<?> work) {
        Thread thread = new Thread(() -> {
            try {
                work.call();
            } catch (Exception problem) {
                throw new IllegalStateException(problem);
            }
        });
        thread.setDaemon(true);
        thread.start();
    }
}
