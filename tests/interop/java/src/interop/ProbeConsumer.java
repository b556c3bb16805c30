package interop;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.stream.Collectors;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.store.ReadOffsetType;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * One push consumer with a group of its own; several run at once. It is finished when it has the number of
 * messages it expects and has consumed every queue to its end, so that one message too many is seen as well.
 * An expression other than * is widened by Sender.LAST_TAG, which ends every queue.
 */
final class ProbeConsumer {
    private final String group;
    private final String expression;
    private final long expected;
    private final String topic;
    private final Report report;
    private final DefaultMQPushConsumer consumer;
    private final Set<String> places = ConcurrentHashMap.newKeySet();

    private ProbeConsumer(String namesrv, String topic, String description, List<Sender.Sent> sent, Report report) {
        String[] parts = description.split(":");
        group = parts[0];
        expression = parts[1].equals("*") ? "*" : parts[1] + " || " + Sender.LAST_TAG;
        expected = parts.length > 2 ? Long.parseLong(parts[2]) : matching(sent);
        this.topic = topic;
        this.report = report;
        consumer = Patience.with(new DefaultMQPushConsumer(group), namesrv);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setConsumeThreadMin(2);
        consumer.setConsumeThreadMax(2);
        consumer.setMessageListener((MessageListenerConcurrently) (messages, context) -> {
            messages.forEach(this::receive);
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
    }

    /** @return whether every consumer got all it expected before the deadline. */
    static boolean consume(String namesrv, String topic, List<String> descriptions, List<Sender.Sent> sent, long deadline,
        Report report) throws Exception {
        List<ProbeConsumer> running = new ArrayList<>();
        try {
            for (String description : descriptions) {
                ProbeConsumer one = new ProbeConsumer(namesrv, topic, description, sent, report);
                running.add(one);
                one.consumer.subscribe(topic, one.expression);
                one.consumer.start();
                Patience.started(one.consumer);
            }
            boolean isComplete = awaitAll(running, deadline);
            String text = running.stream()
                .map(one -> one.group + " " + one.places.size() + " of " + one.expected)
                .collect(Collectors.joining("; "));
            return report.summary(text, isComplete);
        } finally {
            running.forEach(one -> one.consumer.shutdown());
        }
    }

    private static boolean awaitAll(List<ProbeConsumer> running, long deadline) throws Exception {
        for (ProbeConsumer one : running) {
            while (!one.isFinished()) {
                if (System.nanoTime() > deadline) {
                    return false;
                }
                Thread.sleep(20);
            }
        }
        return true;
    }

    private boolean isFinished() throws Exception {
        return places.size() >= expected && hasConsumedToTheEnd();
    }

    private boolean hasConsumedToTheEnd() throws Exception {
        Set<MessageQueue> queues;
        try {
            queues = consumer.fetchSubscribeMessageQueues(topic);
        } catch (MQClientException noRouteYet) {
            return false;
        }
        for (MessageQueue queue : queues) {
            long consumed = consumer.getOffsetStore().readOffset(queue, ReadOffsetType.READ_FROM_MEMORY);
            if (consumed < consumer.maxOffset(queue)) {
                return false;
            }
        }
        return true;
    }

    private void receive(MessageExt message) {
        try {
            Map<String, Object> event = Report.event("received");
            event.put("group", group);
            Report.describe(event, message);
            Report.describePlace(event, message);
            report.write(event);
            places.add(message.getStoreHost() + " " + message.getCommitLogOffset());
        } catch (Exception e) {
            throw new IllegalStateException(e);
        }
    }

    private long matching(List<Sender.Sent> sent) {
        if (sent == null) {
            throw new IllegalArgumentException("consume needs GROUP:EXPRESSION:EXPECTED");
        }
        List<String> tags = Arrays.asList(expression.split("\\s*\\|\\|\\s*"));
        return sent.stream().filter(one -> expression.equals("*") || tags.contains(one.tags)).count();
    }
}
