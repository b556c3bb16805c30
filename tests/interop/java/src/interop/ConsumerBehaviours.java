package interop;

import static interop.ClientBehaviours.body;
import static interop.ClientBehaviours.describe;
import static interop.ClientBehaviours.error;
import static interop.ClientBehaviours.properties;

import interop.ClientBehaviours.Behaviour;
import interop.ClientBehaviours.Run;
import java.lang.reflect.Method;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.stream.Collectors;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.consumer.store.ReadOffsetType;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** What consumers ask of a broker. */
@SuppressWarnings("deprecation") // the pull consumer that takes explicit offsets, in 4.9 and 5.x alike
final class ConsumerBehaviours {
    static void register(Map<String, Behaviour> known) {
        known.put("push", ConsumerBehaviours::push);
        known.put("pull", ConsumerBehaviours::pull);
        known.put("lite-pull", ConsumerBehaviours::litePull);
        known.put("ordered", ConsumerBehaviours::ordered);
        known.put("sql", ConsumerBehaviours::sql);
        known.put("broadcast", ConsumerBehaviours::broadcast);
        known.put("retry", ConsumerBehaviours::retry);
        known.put("rebalance", ConsumerBehaviours::rebalance);
        known.put("offsets", ConsumerBehaviours::offsets);
    }

    private static void fill(Run run, DefaultMQProducer producer, int queues, int count) throws Exception {
        run.createTopic(producer, run.topic(), queues);
        for (int i = 0; i < count; i++) {
            producer.send(run.message(run.topic(), "Tag" + i % 3, "key" + i, "message " + i), run.queue(run.topic(), i % queues));
        }
    }

    /** Everything by tags, and everything. */
    private static void push(Run run) throws Exception {
        fill(run, run.producer(), 4, 60);
        ProducerBehaviours.consumeAll(run, run.topic(), "*", 60, false).forEach(seen -> run.fact("%s", seen));
        List<String> seen = Collections.synchronizedList(new ArrayList<>());
        DefaultMQPushConsumer filtered = run.consumer("tags");
        filtered.subscribe(run.topic(), "Tag1 || Tag2");
        filtered.setConsumeMessageBatchMaxSize(4);
        filtered.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            messages.forEach(message -> seen.add(describe(message)));
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        filtered.start();
        run.await("messages by tags", () -> seen.size() >= 40);
        run.sortedFacts(seen);
    }

    /** Explicit offsets, in range and out of it. */
    private static void pull(Run run) throws Exception {
        fill(run, run.producer(), 1, 40);
        DefaultMQPullConsumer consumer = run.puller("all");
        MessageQueue queue = run.queue(run.topic(), 0);
        run.await("the end of the queue", () -> end(consumer, queue) == 40);
        for (long offset : new long[] {0, 32, 39, 40, 41, 1000, -1}) {
            for (String tags : new String[] {"*", "Tag1", "Nothing"}) {
                try {
                    PullResult result = consumer.pull(queue, tags, offset, 32);
                    int count = result.getMsgFoundList() == null ? 0 : result.getMsgFoundList().size();
                    run.fact("%s at %d: %s %d next=%d min=%d max=%d", tags, offset, result.getPullStatus(), count,
                        result.getNextBeginOffset(), result.getMinOffset(), result.getMaxOffset());
                } catch (Exception error) {
                    run.fact("%s at %d: %s", tags, offset, error(error, run.brokerName));
                }
            }
        }
        for (MessageQueue wrong : Arrays.asList(run.queue(run.topic(), 7), run.queue(run.topic() + "-missing", 0))) {
            try {
                run.fact("%s", consumer.pull(wrong, "*", 0, 1).getPullStatus());
            } catch (Exception error) {
                run.fact("%s", error(error, run.brokerName));
            }
        }
        run.fact("min %d max %d", consumer.minOffset(queue), consumer.maxOffset(queue));
        run.fact("at the beginning of time: %d, in an hour: %d", consumer.searchOffset(queue, 0),
            consumer.searchOffset(queue, System.currentTimeMillis() + 3600000));
        run.fact("stored just now: %b", System.currentTimeMillis() - consumer.earliestMsgStoreTime(queue) < 600000);
        run.fact("offset before: %d", consumer.fetchConsumeOffset(queue, true));
        consumer.updateConsumeOffset(queue, 17);
        consumer.getOffsetStore().persist(queue);
        run.await("stored offset", () -> stored(consumer, queue) == 17);
        run.fact("offset after: %d", stored(consumer, queue));
    }

    private static long end(DefaultMQPullConsumer consumer, MessageQueue queue) {
        try {
            return consumer.maxOffset(queue);
        } catch (Exception error) {
            return -9;
        }
    }

    private static long stored(DefaultMQPullConsumer consumer, MessageQueue queue) {
        try {
            return consumer.fetchConsumeOffset(queue, true);
        } catch (Exception error) {
            return -9;
        }
    }

    /** Assigned queues with seek, then a subscription that goes on where it committed. */
    private static void litePull(Run run) throws Exception {
        fill(run, run.producer(), 2, 30);
        DefaultLitePullConsumer assigned = lite(run, "assigned");
        assigned.setAutoCommit(false);
        assigned.start();
        MessageQueue queue = run.queue(run.topic(), 0);
        assigned.assign(Collections.singletonList(queue));
        List<String> seen = new ArrayList<>();
        // Apache's client now and then keeps what a pull in flight brings in from before the seek: then it is told again.
        for (int tries = 0; tries < 20 && seen.indexOf("message 20") != 0; tries++) {
            seen.clear();
            assigned.seek(queue, 10);
            pollUntil(run, assigned, seen, 5);
        }
        run.fact("from 10 on: %s", seen);
        assigned.seekToBegin(queue);
        seen.clear();
        pollUntil(run, assigned, seen, 15);
        run.fact("from the beginning: %s", seen);
        for (int round = 1; round <= 2; round++) {
            DefaultLitePullConsumer subscribed = lite(run, "subscribed");
            subscribed.setAutoCommit(false);
            subscribed.setPullBatchSize(5);
            subscribed.subscribe(run.topic(), "*");
            subscribed.start();
            seen.clear();
            pollUntil(run, subscribed, seen, round == 1 ? 30 : 4);
            Collections.sort(seen);
            run.fact("round %d: %s", round, seen);
            subscribed.commitSync();
            DefaultMQProducer producer = run.producer(new DefaultMQProducer(run.group("producer" + round)));
            for (int id = 0; id < 2; id++) { // it does not wait for an answer, and the next round asks on another connection
                MessageQueue each = run.queue(run.topic(), id);
                long end = producer.maxOffset(each);
                subscribed.getOffsetStore().persist(each);
                run.await("commit", () -> subscribed.getOffsetStore().readOffset(each, ReadOffsetType.READ_FROM_STORE) == end);
            }
            subscribed.shutdown();
            for (int i = 0; i < 4; i++) {
                producer.send(run.message(run.topic(), "Late", "late", "late " + round + i), run.queue(run.topic(), i % 2));
            }
        }
    }

    private static DefaultLitePullConsumer lite(Run run, String suffix) {
        DefaultLitePullConsumer consumer = Patience.with(new DefaultLitePullConsumer(run.group(suffix)), run.namesrv);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        run.onClose(consumer::shutdown);
        return consumer;
    }

    private static void pollUntil(Run run, DefaultLitePullConsumer consumer, List<String> seen, int count) throws Exception {
        run.await(count + " polled messages", () -> {
            consumer.poll(200).forEach(message -> seen.add(body(message)));
            return seen.size() >= count;
        });
    }

    /** Each queue in order, and a message that is put off holds up the ones behind it. */
    private static void ordered(Run run) throws Exception {
        fill(run, run.producer(), 3, 30);
        Map<Integer, List<String>> seen = new ConcurrentHashMap<>();
        Map<String, Integer> tries = new ConcurrentHashMap<>();
        DefaultMQPushConsumer consumer = run.consumer("all");
        consumer.subscribe(run.topic(), "*");
        consumer.setSuspendCurrentQueueTimeMillis(50);
        consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
            for (MessageExt message : messages) {
                List<String> queue = seen.computeIfAbsent(message.getQueueId(), id -> Collections.synchronizedList(new ArrayList<>()));
                queue.add(body(message));
                if (message.getQueueOffset() == 4 && tries.merge(body(message), 1, Integer::sum) < 3) {
                    return ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT;
                }
            }
            return ConsumeOrderlyStatus.SUCCESS;
        });
        consumer.start();
        run.await("ordered messages", () -> seen.values().stream().mapToInt(List::size).sum() >= 36);
        new TreeMap<>(seen).forEach((queue, bodies) -> run.fact("queue %d: %s", queue, bodies));
    }

    /** SQL92 over properties. */
    private static void sql(Run run) throws Exception {
        DefaultMQProducer producer = run.producer();
        run.createTopic(producer, run.topic(), 2);
        for (int i = 0; i < 24; i++) {
            Message message = run.message(run.topic(), "Tag" + i % 3, null, "sql " + i);
            message.putUserProperty("n", String.valueOf(i));
            message.putUserProperty("half", i / 2.0 + "");
            if (i % 4 != 0) {
                message.putUserProperty("region", i % 2 == 0 ? "east" : "west coast");
            }
            producer.send(message, run.queue(run.topic(), i % 2));
        }
        producer.send(run.message(run.topic(), "Last", null, "end"), run.queue(run.topic(), 0));
        producer.send(run.message(run.topic(), "Last", null, "end"), run.queue(run.topic(), 1));
        String[] expressions = {
            "n > 5 AND n <= 9", "n BETWEEN 20 AND 22 OR region IS NULL", "region IN ('east', 'north') AND TAGS = 'Tag1'",
            "NOT (half >= 2.5) AND region IS NOT NULL", "region = 'west coast' AND n <> 7", "missing > 3", "region CONTAINS 'coast'",
        };
        for (int i = 0; i < expressions.length; i++) {
            // Counting goes through the list while the listener adds to it: a synchronized one breaks that off.
            List<String> seen = new CopyOnWriteArrayList<>();
            DefaultMQPushConsumer consumer = run.consumer("sql" + i);
            consumer.setConsumeThreadMin(1); // with more the ends may be seen before what comes before them
            consumer.setConsumeThreadMax(1);
            consumer.subscribe(run.topic(), MessageSelector.bySql("TAGS = 'Last' OR (" + expressions[i] + ")"));
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                messages.forEach(message -> seen.add(body(message)));
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
            consumer.start();
            run.await("the ends of both queues", () -> Collections.frequency(seen, "end") >= 2);
            consumer.shutdown();
            List<String> sorted = new ArrayList<>(seen);
            Collections.sort(sorted);
            run.fact("%s: %s", expressions[i], sorted);
        }
        for (String wrong : new String[] {"n >", "n = 'open", "n ==== 3", ""}) {
            DefaultMQPushConsumer consumer = run.consumer("wrong");
            consumer.registerMessageListener(
                (MessageListenerConcurrently) (messages, context) -> ConsumeConcurrentlyStatus.CONSUME_SUCCESS);
            try {
                consumer.subscribe(run.topic(), MessageSelector.bySql(wrong));
                consumer.start();
                run.fact("%s: taken", wrong);
            } catch (Exception error) {
                run.fact("%s: %s", wrong, error(error, run.brokerName));
            }
        }
    }

    /** Every member gets every message, once. */
    private static void broadcast(Run run) throws Exception {
        fill(run, run.producer(), 2, 12);
        Map<String, List<String>> seen = new ConcurrentHashMap<>();
        for (String member : new String[] {"a", "b"}) {
            List<String> mine = seen.computeIfAbsent(member, name -> Collections.synchronizedList(new ArrayList<>()));
            DefaultMQPushConsumer consumer = run.consumer("all");
            consumer.setInstanceName("broadcast-" + member);
            broadcast(consumer);
            consumer.subscribe(run.topic(), "*");
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                messages.forEach(message -> mine.add(describe(message)));
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
            consumer.start();
        }
        run.await("messages at both", () -> seen.values().stream().allMatch(mine -> mine.size() >= 12));
        for (String member : new String[] {"a", "b"}) {
            run.fact("member %s", member);
            run.sortedFacts(seen.get(member));
        }
    }

    /** The type of the model moved between 4.9 and 5.x, so it is taken from the setter. */
    static void broadcast(DefaultMQPushConsumer consumer) throws Exception {
        for (Method setter : DefaultMQPushConsumer.class.getMethods()) {
            if (setter.getName().equals("setMessageModel")) {
                for (Object model : setter.getParameterTypes()[0].getEnumConstants()) {
                    if (model.toString().equals("BROADCASTING")) {
                        setter.invoke(consumer, model);
                    }
                }
            }
        }
    }

    /** Tried again after its delay, then in the dead-letter topic. */
    private static void retry(Run run) throws Exception {
        DefaultMQProducer producer = run.producer();
        run.createTopic(producer, run.topic(), 1);
        List<String> seen = Collections.synchronizedList(new ArrayList<>());
        DefaultMQPushConsumer consumer = run.consumer("all");
        consumer.subscribe(run.topic(), "*");
        consumer.setMaxReconsumeTimes(2);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                seen.add(String.format("%s try %d topic=%s queue=%d %s", body(message), message.getReconsumeTimes(), message.getTopic(),
                    message.getQueueId(), properties(message)));
                if (body(message).equals("bad")) {
                    context.setDelayLevelWhenNextConsume(message.getReconsumeTimes() == 0 ? 1 : 0);
                    return ConsumeConcurrentlyStatus.RECONSUME_LATER;
                }
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        producer.send(run.message(run.topic(), "Good", "good-key", "good"));
        producer.send(run.message(run.topic(), "Bad", "bad-key", "bad"));
        run.await("tries", () -> seen.size() >= 4);
        run.sortedFacts(seen);
        String dead = "%DLQ%" + run.group("all");
        DefaultMQPullConsumer reader = run.puller("reader");
        MessageQueue queue = run.queue(dead, 0);
        List<String> buried = new ArrayList<>();
        run.await("dead letter", () -> {
            try {
                PullResult result = reader.pull(queue, "*", 0, 32);
                if (result.getMsgFoundList() != null) {
                    result.getMsgFoundList().forEach(message -> buried.add(describe(message) + " " + properties(message)));
                }
            } catch (Exception missing) {
                return false;
            }
            return !buried.isEmpty();
        });
        run.sortedFacts(buried);
    }

    /** Two members share the queues, and one takes over when the other leaves. */
    private static void rebalance(Run run) throws Exception {
        DefaultMQProducer producer = run.producer();
        run.createTopic(producer, run.topic(), 4);
        List<String> seen = Collections.synchronizedList(new ArrayList<>());
        List<DefaultMQPushConsumer> members = new ArrayList<>();
        for (String name : new String[] {"a", "b"}) {
            DefaultMQPushConsumer consumer = run.consumer("all");
            consumer.setInstanceName("rebalance-" + name);
            consumer.subscribe(run.topic(), "*");
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                messages.forEach(message -> seen.add(body(message)));
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
            consumer.start();
            members.add(consumer);
        }
        run.await("an even share", () -> owned(members.get(0), run).size() == 2 && owned(members.get(1), run).size() == 2);
        run.fact("shares: %s", members.stream().map(member -> owned(member, run)).sorted((a, b) -> a.get(0) - b.get(0))
            .collect(Collectors.toList()));
        members.get(0).shutdown();
        run.await("all queues at one", () -> owned(members.get(1), run).size() == 4);
        for (int i = 0; i < 8; i++) {
            producer.send(run.message(run.topic(), "R", "r" + i, "after " + i), run.queue(run.topic(), i % 4));
        }
        run.await("messages", () -> seen.size() >= 8);
        run.sortedFacts(seen);
    }

    private static List<Integer> owned(DefaultMQPushConsumer consumer, Run run) {
        return consumer.getDefaultMQPushConsumerImpl().getRebalanceImpl().getProcessQueueTable().keySet().stream()
            .filter(queue -> queue.getTopic().equals(run.topic())).map(MessageQueue::getQueueId).sorted()
            .collect(Collectors.toList());
    }

    /** Where a new group begins, and where a known one goes on. */
    private static void offsets(Run run) throws Exception {
        DefaultMQProducer producer = run.producer();
        fill(run, producer, 1, 10);
        for (ConsumeFromWhere where : new ConsumeFromWhere[] {
            ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET, ConsumeFromWhere.CONSUME_FROM_TIMESTAMP}) {
            for (int round = 1; round <= 2; round++) {
                List<String> seen = Collections.synchronizedList(new ArrayList<>());
                DefaultMQPushConsumer consumer = run.consumer(where.name().toLowerCase());
                consumer.setConsumeFromWhere(where);
                consumer.subscribe(run.topic(), "*");
                consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                    messages.forEach(message -> seen.add(body(message)));
                    return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
                });
                consumer.start();
                String mark = "mark " + where + round;
                producer.send(run.message(run.topic(), "Mark", "mark", mark));
                run.await("mark", () -> seen.contains(mark));
                // What is shut down between a listener's end and the note of it would tell the last messages again.
                long end = producer.maxOffset(run.queue(run.topic(), 0));
                run.await("offset", () -> consumer.getDefaultMQPushConsumerImpl().getOffsetStore()
                    .readOffset(run.queue(run.topic(), 0), ReadOffsetType.READ_FROM_MEMORY) == end);
                consumer.shutdown();
                List<String> sorted = new ArrayList<>(seen);
                Collections.sort(sorted);
                run.fact("%s round %d: %s", where, round, sorted);
            }
        }
    }
}
