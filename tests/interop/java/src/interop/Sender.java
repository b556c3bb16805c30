package interop;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageClientIDSetter;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Sends a fixed mixture, a function of the index alone: messages with each of three tags and with none; with no, one and
 * several keys; with no, plain and non-ASCII user properties; every 25th above the client's 4 KiB compression threshold;
 * BATCH_COUNT of them as one batch. Then one message tagged LAST_TAG into each queue: a consumer that has it has seen
 * the whole queue.
 */
final class Sender {
    static final String LAST_TAG = "last";
    private static final String[] TAGS = {"TagA", "TagB", "TagC", null};
    private static final int BATCH_COUNT = 20;
    private static final int LARGE_EVERY = 25;
    private static final int LARGE_BYTES = 6000;

    /** What the consumers need to know about a sent message. */
    static final class Sent {
        final String tags;

        Sent(String tags) {
            this.tags = tags;
        }
    }

    private final DefaultMQProducer producer;
    private final String topic;
    private final Report report;
    private final List<Sent> sent = new ArrayList<>();

    private Sender(DefaultMQProducer producer, String topic, Report report) {
        this.producer = producer;
        this.topic = topic;
        this.report = report;
    }

    static List<Sent> send(String namesrv, String topic, int count, long deadline, Report report) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("probe-producer");
        Patience.with(producer, namesrv).start();
        try {
            Sender sender = new Sender(producer, topic, report);
            int batchCount = Math.min(BATCH_COUNT, count / 2);
            for (int index = 0; index < count - batchCount; index++) {
                sender.sendOne(index);
            }
            sender.sendBatch(count - batchCount, count);
            sender.sendLast(deadline);
            return sender.sent;
        } finally {
            producer.shutdown();
        }
    }

    private void sendOne(int index) throws Exception {
        Message message = message(index, index % LARGE_EVERY == 0 ? LARGE_BYTES + index : 64 + index % 64);
        // The client compresses the body in place and puts it back; describe the message as the user made it.
        Map<String, Object> event = Report.event("sent");
        Report.describe(event, message);
        note(event, message, "single", producer.send(message), 0);
    }

    private void sendBatch(int start, int end) throws Exception {
        List<Message> messages = new ArrayList<>();
        for (int index = start; index < end; index++) {
            messages.add(message(index, 100));
        }
        SendResult result = producer.send(messages);
        for (int i = 0; i < messages.size(); i++) {
            Map<String, Object> event = Report.event("sent");
            Report.describe(event, messages.get(i));
            note(event, messages.get(i), "batch", result, i);
        }
    }

    private void sendLast(long deadline) throws Exception {
        for (MessageQueue queue : publishQueues(deadline)) {
            Message message = new Message(topic, LAST_TAG, ("last of " + queue.getQueueId()).getBytes(StandardCharsets.UTF_8));
            Map<String, Object> event = Report.event("sent");
            Report.describe(event, message);
            note(event, message, "last", producer.send(message, queue), 0);
        }
    }

    /** The queues, as soon as the broker has told the name server about a topic that the first send created. */
    private List<MessageQueue> publishQueues(long deadline) throws Exception {
        while (true) {
            try {
                return producer.fetchPublishMessageQueues(topic);
            } catch (MQClientException e) {
                if (System.nanoTime() > deadline) {
                    throw e;
                }
                Thread.sleep(20);
            }
        }
    }

    private Message message(int index, int bodyBytes) {
        Message message = new Message(topic, body(index, bodyBytes));
        String tag = TAGS[index % TAGS.length];
        if (tag != null) {
            message.setTags(tag);
        }
        if (index % 3 == 1) {
            message.setKeys("order-" + index);
        } else if (index % 3 == 2) {
            message.setKeys("order-" + index + " customer-" + index % 17);
        }
        if (index % 5 != 0) {
            message.putUserProperty("index", Integer.toString(index));
            message.putUserProperty("city", index % 2 == 0 ? "Zürich" : "東京");
        }
        message.setFlag(index % 7);
        return message;
    }

    private static byte[] body(int index, int bodyBytes) {
        StringBuilder text = new StringBuilder();
        while (text.length() < bodyBytes) {
            text.append("message ").append(index).append(" byte ").append(text.length()).append('\n');
        }
        return text.substring(0, bodyBytes).getBytes(StandardCharsets.US_ASCII);
    }

    /** A batch has one result: joined ids, and the queue offset of its first message. */
    private void note(Map<String, Object> event, Message message, String kind, SendResult result, int position) {
        event.put("kind", kind);
        event.put("status", result.getSendStatus().name());
        event.put("msgId", MessageClientIDSetter.getUniqID(message));
        event.put("resultMsgId", result.getMsgId().split(",")[position]);
        event.put("offsetMsgId", result.getOffsetMsgId().split(",")[position]);
        event.put("queueId", result.getMessageQueue().getQueueId());
        event.put("queueOffset", result.getQueueOffset() + position);
        report.write(event);
        sent.add(new Sent(message.getTags()));
    }
}
