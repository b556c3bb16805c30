package interop;

import java.util.Map;
import java.util.TreeSet;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Pulls every readable message of a topic, queue by queue, and each queue's bounds. */
@SuppressWarnings("deprecation") // the pull consumer that takes explicit offsets, in 4.9 and 5.x alike
final class QueueReader {
    static void read(String namesrv, String topic, Report report) throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("probe-reader");
        Patience.with(consumer, namesrv).start();
        Patience.started(consumer);
        try {
            for (MessageQueue queue : new TreeSet<>(consumer.fetchSubscribeMessageQueues(topic))) {
                Map<String, Object> event = Report.event("queue");
                event.put("topic", topic);
                event.put("queueId", queue.getQueueId());
                event.put("minOffset", consumer.minOffset(queue));
                event.put("maxOffset", consumer.maxOffset(queue));
                report.write(event);
                readQueue(consumer, queue, report);
            }
        } finally {
            consumer.shutdown();
        }
    }

    private static void readQueue(DefaultMQPullConsumer consumer, MessageQueue queue, Report report) throws Exception {
        long offset = consumer.minOffset(queue);
        long end = consumer.maxOffset(queue);
        while (offset < end) {
            PullResult pulled = consumer.pull(queue, "*", offset, 32);
            if (pulled.getPullStatus() == PullStatus.FOUND) {
                for (MessageExt message : pulled.getMsgFoundList()) {
                    Map<String, Object> event = Report.event("received");
                    event.put("group", "");
                    Report.describe(event, message);
                    Report.describePlace(event, message);
                    report.write(event);
                }
            }
            if (pulled.getNextBeginOffset() <= offset) {
                throw new IllegalStateException(queue + ": " + pulled.getPullStatus() + " at " + offset + ", no way on");
            }
            offset = pulled.getNextBeginOffset();
        }
    }
}
