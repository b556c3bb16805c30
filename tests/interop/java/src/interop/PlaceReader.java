package interop;

import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.LongAdder;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * A push consumer of a new group reads topics to their end and tells, per queue, what it got:
 *
 * <pre>
 *   PlaceReader read --namesrv HOST:PORT --group NAME --expected N --topic NAME ... [--timeout-seconds S]
 *                    queue TOPIC QUEUE COUNT SUM
 * </pre>
 *
 * SUM adds `queue offset * 1000003 + physical offset` of each distinct message, in 64 bits. Ends with 0 after N distinct
 * messages, with 1 when the time ran out.
 */
public final class PlaceReader {
    private static final long PRIME = 1000003;

    private static final class Tally {
        final Set<Long> offsets = ConcurrentHashMap.newKeySet();
        final LongAdder sum = new LongAdder();
    }

    public static void main(String[] args) throws Exception {
        Arguments arguments = Arguments.parse(args);
        int expected = Integer.parseInt(arguments.one("expected"));
        long deadline = System.nanoTime() + Long.parseLong(arguments.one("timeout-seconds", "60")) * 1_000_000_000L;
        Map<MessageQueue, Tally> tallies = new ConcurrentHashMap<>();
        AtomicInteger count = new AtomicInteger();
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(arguments.one("group"));
        Patience.with(consumer, arguments.one("namesrv"));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setConsumeMessageBatchMaxSize(32);
        for (String topic : arguments.all("topic")) {
            consumer.subscribe(topic, "*");
        }
        consumer.setMessageListener((MessageListenerConcurrently) (messages, context) -> {
            Tally tally = tallies.computeIfAbsent(context.getMessageQueue(), queue -> new Tally());
            count.addAndGet(add(tally, messages));
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        while (count.get() < expected && System.nanoTime() < deadline) {
            Thread.sleep(10);
        }
        tallies.forEach((queue, tally) -> System.out.printf(
            "queue %s %d %d %d%n", queue.getTopic(), queue.getQueueId(), tally.offsets.size(), tally.sum.sum()));
        consumer.shutdown();
        System.exit(count.get() < expected ? 1 : 0);
    }

    private static int add(Tally tally, List<MessageExt> messages) {
        int added = 0;
        for (MessageExt message : messages) {
            if (tally.offsets.add(message.getQueueOffset())) {
                tally.sum.add(message.getQueueOffset() * PRIME + message.getCommitLogOffset());
                added++;
            }
        }
        return added;
    }
}
