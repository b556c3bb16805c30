package interop;

import static interop.ClientBehaviours.body;
import static interop.ClientBehaviours.describe;
import static interop.ClientBehaviours.error;
import static interop.ClientBehaviours.properties;

import interop.ClientBehaviours.Behaviour;
import interop.ClientBehaviours.Run;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ConcurrentSkipListMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.QueryResult;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.producer.TransactionSendResult;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageClientIDSetter;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** What producers ask of a broker. */
final class ProducerBehaviours {
    static void register(Map<String, Behaviour> known) {
        known.put("send", ProducerBehaviours::send);
        known.put("refusals", ProducerBehaviours::refusals);
        known.put("batch", ProducerBehaviours::batch);
        known.put("auto-batch", ProducerBehaviours::autoBatch);
        known.put("static-topic", ProducerBehaviours::staticTopic);
        known.put("delay", ProducerBehaviours::delay);
        known.put("transactions", ProducerBehaviours::transactions);
        known.put("request-reply", ProducerBehaviours::requestReply);
        known.put("query", ProducerBehaviours::query);
        known.put("trace", ProducerBehaviours::trace);
    }

    /** Synchronous, asynchronous and one-way sends, and what a consumer sees of them. */
    private static void send(Run run) throws Exception {
        DefaultMQProducer producer = run.producer();
        run.createTopic(producer, run.topic(), 2);
        Message flagged = run.message(run.topic(), "TagA", "k1 k2", "synchronous");
        flagged.setFlag(7);
        flagged.putUserProperty("city", "東京");
        run.fact("%s", describe(producer.send(flagged, run.queue(run.topic(), 0))));
        CountDownLatch answered = new CountDownLatch(1);
        producer.send(run.message(run.topic(), null, null, "asynchronous"), run.queue(run.topic(), 0), new SendCallback() {
            @Override
            public void onSuccess(SendResult result) {
                run.fact("%s", describe(result));
                answered.countDown();
            }

            @Override
            public void onException(Throwable error) {
                run.fact("FAILED %s", error);
                answered.countDown();
            }
        });
        answered.await(Patience.MS, TimeUnit.MILLISECONDS);
        producer.sendOneway(run.message(run.topic(), "", "", "one-way"), run.queue(run.topic(), 1));
        List<String> seen = consumeAll(run, run.topic(), "*", 3, true);
        run.sortedFacts(seen);
    }

    /** What a broker refuses, by code and remark. */
    private static void refusals(Run run) throws Exception {
        DefaultMQProducer producer = run.producer();
        producer.setRetryTimesWhenSendFailed(0);
        run.createTopic(producer, run.topic(), 2);
        refused(run, "queue 99", () -> producer.send(run.message(run.topic(), "A", "k", "x"), run.queue(run.topic(), 99)));
        refused(run, "no body", () -> producer.send(new Message(run.topic(), new byte[0]), run.queue(run.topic(), 0)));
        for (String topic : new String[] {"SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC", "SELF_TEST_TOPIC"}) {
            refused(run, topic, () -> producer.send(run.message(topic, "A", "k", "x"), run.queue(topic, 0)));
        }
        String retry = "%RETRY%" + run.group("nobody");
        refused(run, "retry topic", () -> producer.send(run.message(retry, "A", "k", "x"), run.queue(retry, 0)));
        refused(run, "view", () -> producer.viewMessage(run.topic(), "7F00000100002A9F00000000FFFFFF00"));
    }

    private interface Call {
        Object run() throws Exception;
    }

    private static void refused(Run run, String what, Call call) {
        try {
            Object answer = call.run();
            run.fact("%s: taken %s", what, answer instanceof SendResult ? ((SendResult) answer).getSendStatus() : answer);
        } catch (Exception error) {
            run.fact("%s: %s", what, error(error, run.brokerName));
        }
    }

    /** Batches lie in one queue, one behind the other. */
    private static void batch(Run run) throws Exception {
        DefaultMQProducer producer = run.producer();
        run.createTopic(producer, run.topic(), 1);
        for (int round = 0; round < 2; round++) {
            List<Message> messages = new ArrayList<>();
            for (int i = 0; i < 10; i++) {
                Message message = run.message(run.topic(), i % 2 == 0 ? "Even" : null, "b" + i, round + "-" + i);
                message.putUserProperty("n", String.valueOf(i));
                messages.add(message);
            }
            SendResult result = producer.send(messages);
            run.fact("%s ids=%d offset ids=%d", describe(result), result.getMsgId().split(",").length,
                result.getOffsetMsgId().split(",").length);
        }
        consumeAll(run, run.topic(), "*", 20, true).forEach(seen -> run.fact("%s", seen));
    }

    /** Single sends of several threads that the client puts into batches; each has the result of its own message. */
    private static void autoBatch(Run run) throws Exception {
        DefaultMQProducer producer = run.producer();
        run.createTopic(producer, run.topic(), 1);
        DefaultMQProducer.class.getMethod("setAutoBatch", boolean.class).invoke(producer, true); // 4.9 has none
        Map<Long, String> placed = new ConcurrentHashMap<>();
        List<Thread> threads = new ArrayList<>();
        for (int number = 0; number < 12; number++) {
            Message message = run.message(run.topic(), "Auto", "a" + number, "auto " + number);
            threads.add(new Thread(() -> {
                try {
                    SendResult result = producer.send(message);
                    placed.put(result.getQueueOffset(), body(message) + " " + result.getSendStatus() + " own id: "
                        + MessageClientIDSetter.getUniqID(message).equals(result.getMsgId()));
                } catch (Exception error) {
                    run.fact("FAILED %s", error);
                }
            }));
        }
        threads.forEach(Thread::start);
        for (Thread thread : threads) {
            thread.join();
        }
        run.sortedFacts(new ArrayList<>(placed.values()));
        List<String> seen = consumeAll(run, run.topic(), "*", 12, true);
        for (int offset = 0; offset < 12; offset++) {
            String told = placed.get((long) offset);
            run.fact("%d at its place: %b", offset, told != null && seen.get(offset).startsWith(told.split(" SEND")[0] + " "));
        }
        run.fact("stored with: %s", seen.get(0).substring(seen.get(0).indexOf('{')).replaceAll("a\\d+", "a?"));
    }

    /** A static topic, which is there already: queues 5 and 3 of 8. */
    private static void staticTopic(Run run) throws Exception {
        DefaultMQProducer producer = run.producer();
        List<MessageQueue> queues = new ArrayList<>();
        run.await("8 queues", () -> {
            queues.clear();
            try {
                queues.addAll(producer.fetchPublishMessageQueues(run.topic()));
            } catch (Exception missing) {
                return false;
            }
            return queues.size() == 8;
        });
        for (MessageQueue queue : queues) {
            try {
                run.fact("%s %d: %s", queue.getBrokerName(), queue.getQueueId(),
                    describe(producer.send(run.message(run.topic(), "S", "s", "to " + queue.getQueueId()), queue)));
            } catch (Exception error) {
                run.fact("%s %d: %s", queue.getBrokerName(), queue.getQueueId(), error.getClass().getSimpleName());
            }
        }
        consumeAll(run, run.topic(), "*", 2, false).forEach(seen -> run.fact("%s", seen));
    }

    /** Delay levels: never early, with what is left of the detour in the properties. */
    private static void delay(Run run) throws Exception {
        DefaultMQProducer producer = run.producer();
        run.createTopic(producer, run.topic(), 2);
        Map<String, Long> due = new ConcurrentHashMap<>();
        List<String> seen = Collections.synchronizedList(new ArrayList<>());
        DefaultMQPushConsumer consumer = run.consumer("all");
        consumer.subscribe(run.topic(), "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                boolean early = System.currentTimeMillis() < due.getOrDefault(body(message), 0L);
                boolean late = message.getStoreTimestamp() > due.getOrDefault(body(message), 0L) + Patience.MS;
                seen.add(String.format("%s early=%b late=%b queue=%d %s", body(message), early, late, message.getQueueId(),
                    properties(message)));
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        int[] seconds = {0, 1, 2, 2, 3};
        for (int level = 0; level <= 4; level++) {
            Message message = run.message(run.topic(), "Tag" + level, "key" + level, "level " + level);
            message.setDelayTimeLevel(level);
            due.put(body(message), System.currentTimeMillis() + seconds[level] * 1000L);
            SendResult result = producer.send(message, run.queue(run.topic(), level % 2));
            run.fact("level %d: %s queue=%d", level, result.getSendStatus(), result.getMessageQueue().getQueueId());
        }
        run.await("delayed messages", () -> seen.size() >= 5);
        run.sortedFacts(seen);
    }

    /** Committed, rolled back, and left open for the broker to ask. */
    private static void transactions(Run run) throws Exception {
        Map<String, Integer> checks = new ConcurrentHashMap<>();
        TransactionMQProducer producer = new TransactionMQProducer(run.group("producer"));
        producer.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
                switch (body(message)) {
                    case "commit":
                        return LocalTransactionState.COMMIT_MESSAGE;
                    case "rollback":
                        return LocalTransactionState.ROLLBACK_MESSAGE;
                    case "throws":
                        throw new IllegalStateException("on purpose");
                    default:
                        return LocalTransactionState.UNKNOW;
                }
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                int count = checks.merge(body(message), 1, Integer::sum);
                switch (body(message)) {
                    case "commit": // a broker that was late with what it was told asks, too
                    case "check commit":
                        return LocalTransactionState.COMMIT_MESSAGE;
                    case "check twice":
                        return count < 2 ? LocalTransactionState.UNKNOW : LocalTransactionState.COMMIT_MESSAGE;
                    default:
                        return LocalTransactionState.ROLLBACK_MESSAGE;
                }
            }
        });
        Patience.known(run.producer(producer));
        run.createTopic(producer, run.topic(), 1);
        for (String body : new String[] {"commit", "rollback", "check commit", "check rollback", "check twice", "throws"}) {
            Message message = run.message(run.topic(), "Tx", "key-" + body.replace(' ', '-'), body);
            message.putUserProperty("kept", "yes");
            TransactionSendResult result = producer.sendMessageInTransaction(message, null);
            run.fact("%s: %s %s", body, result.getSendStatus(), result.getLocalTransactionState());
        }
        List<String> seen = Collections.synchronizedList(new ArrayList<>());
        DefaultMQPushConsumer consumer = run.consumer("all");
        consumer.subscribe(run.topic(), "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                Map<String, String> shown = properties(message);
                shown.remove("TRANSACTION_CHECK_TIMES");
                seen.add(String.format("%s tags=%s keys=%s tries=%d sysFlag=%d prepared=%b %s", body(message), message.getTags(),
                    message.getKeys(), message.getReconsumeTimes(), message.getSysFlag(),
                    message.getPreparedTransactionOffset() > 0, shown));
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        run.await("committed messages", () -> new TreeSet<>(seen).size() >= 3 && checks.containsKey("check rollback")
            && checks.containsKey("throws"));
        run.sortedFacts(new ArrayList<>(new TreeSet<>(seen))); // a check under way may have one delivered twice
        checks.keySet().removeAll(Arrays.asList("commit", "rollback"));
        run.fact("asked about: %s", new TreeSet<>(checks.keySet()));
    }

    /** An answer comes back to the one who asked. */
    private static void requestReply(Run run) throws Exception {
        DefaultMQProducer producer = run.producer();
        run.createTopic(producer, run.topic(), 2);
        DefaultMQProducer answering = run.producer(new DefaultMQProducer(run.group("answering")));
        DefaultMQPushConsumer consumer = run.consumer("all");
        consumer.subscribe(run.topic(), "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                try {
                    run.fact("asked: %s %s", body(message), properties(message).keySet());
                    Message answer = MessageUtil.createReplyMessage(message, ("re: " + body(message)).getBytes());
                    run.fact("answered: %s", answering.send(answer).getSendStatus());
                } catch (Exception error) {
                    run.fact("FAILED %s", error);
                }
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        run.await("consumer", () -> consumer.getDefaultMQPushConsumerImpl().getRebalanceImpl().getProcessQueueTable().keySet()
            .stream().filter(queue -> queue.getTopic().equals(run.topic())).count() == 2); // that for retries comes or came
        Message answer = producer.request(run.message(run.topic(), "Ask", "q1", "question"), Patience.MS);
        run.fact("got: %s", body(answer));
        try {
            run.createTopic(producer, run.topic() + "-silent", 1);
            producer.request(run.message(run.topic() + "-silent", "Ask", "q2", "nobody hears"), 15000);
        } catch (Exception error) {
            run.fact("nobody: %s", error(error, run.brokerName));
        }
        run.await("facts", () -> run.facts.size() >= 4);
        Collections.sort(run.facts);
    }

    /** Messages by offset id, unique key and key. */
    private static void query(Run run) throws Exception {
        DefaultMQProducer producer = run.producer();
        run.createTopic(producer, run.topic(), 1);
        List<SendResult> results = new ArrayList<>();
        long begin = System.currentTimeMillis() - 60000;
        for (int i = 0; i < 6; i++) {
            results.add(producer.send(run.message(run.topic(), "Q", "common own" + i, "query " + i)));
        }
        run.fact("by offset id: %s", describe(producer.viewMessage(run.topic(), results.get(2).getOffsetMsgId())));
        // The index follows the log: what was sent last is in it last.
        run.await("unique key in the index", () -> found(producer, run, results.get(5).getMsgId()) != null);
        run.fact("by unique key: %s", describe(found(producer, run, results.get(3).getMsgId())));
        long end = System.currentTimeMillis() + 60000;
        for (String key : new String[] {"common", "own4", "missing"}) {
            for (int most : new int[] {64, 2}) {
                try {
                    QueryResult result = producer.queryMessage(run.topic(), key, most, begin, end);
                    List<String> bodies = new ArrayList<>();
                    result.getMessageList().forEach(message -> bodies.add(body(message)));
                    Collections.sort(bodies);
                    run.fact("key %s, at most %d: %s", key, most, bodies);
                } catch (Exception error) {
                    run.fact("key %s, at most %d: %s", key, most, error(error, run.brokerName));
                }
            }
        }
        try {
            run.fact("too early: %d", producer.queryMessage(run.topic(), "common", 64, begin - 9000000, begin).getMessageList().size());
        } catch (Exception error) {
            run.fact("too early: %s", error(error, run.brokerName));
        }
    }

    private static MessageExt found(DefaultMQProducer producer, Run run, String id) {
        try {
            return producer.viewMessage(run.topic(), id);
        } catch (Exception missing) {
            return null;
        }
    }

    /** Trace messages of a send and of its consumption. */
    private static void trace(Run run) throws Exception {
        String traceTopic = run.topic() + "-trace";
        DefaultMQProducer plain = run.producer();
        run.createTopic(plain, run.topic(), 1);
        run.createTopic(plain, traceTopic, 1);
        DefaultMQProducer traced = run.producer(new DefaultMQProducer(run.group("traced"), true, traceTopic));
        DefaultMQPushConsumer consumer = Patience.with(new DefaultMQPushConsumer(run.group("all"), true, traceTopic), run.namesrv);
        run.onClose(consumer::shutdown);
        consumer.subscribe(run.topic(), "*");
        consumer.registerMessageListener(
            (MessageListenerConcurrently) (messages, context) -> ConsumeConcurrentlyStatus.CONSUME_SUCCESS);
        consumer.start();
        run.fact("%s", describe(traced.send(run.message(run.topic(), "Traced", "traced-key", "traced"))));
        List<String> kinds = Collections.synchronizedList(new ArrayList<>());
        DefaultMQPushConsumer reader = run.consumer("reader");
        reader.subscribe(traceTopic, "*");
        reader.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                for (String record : body(message).split("\u0002")) {
                    String[] fields = record.split("\u0001");
                    kinds.add(fields[0] + " of " + fields.length + " fields");
                }
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        reader.start();
        run.await("three trace records", () -> kinds.size() >= 3);
        run.sortedFacts(kinds);
    }

    /** Consumes so many messages; in order of their offsets when the topic has one queue. */
    static List<String> consumeAll(Run run, String topic, String expression, int count, boolean withProperties)
        throws Exception {
        Map<String, String> seen = new ConcurrentSkipListMap<>();
        DefaultMQPushConsumer consumer = run.consumer("all");
        consumer.subscribe(topic, expression);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                String place = String.format("%03d-%06d", message.getQueueId(), message.getQueueOffset());
                seen.put(place, describe(message) + (withProperties ? " " + properties(message) : ""));
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        run.await(count + " messages of " + topic, () -> seen.size() >= count);
        return new ArrayList<>(seen.values());
    }
}
