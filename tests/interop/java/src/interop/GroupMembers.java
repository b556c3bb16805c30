package interop;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import org.apache.rocketmq.client.consumer.AllocateMessageQueueStrategy;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragelyByCircle;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueConsistentHash;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Push consumers that come and go as standard input says, until it ends; standard output tells what they get. Argument: name
 * server.
 *
 * <pre>
 *   join NAME GROUP TOPIC concurrent|ordered|broadcast|failing AVG|AVG_BY_CIRCLE|CONSISTENT_HASH     joined NAME
 *   leave NAME                                                                                       left NAME
 *                                                       got NAME QUEUE OFFSET RECONSUME-TIMES NANOSECONDS BODY
 * </pre>
 *
 * The nanoseconds are those of the machine's steady clock, which other programs read, too.
 */
public final class GroupMembers {
    private static final Map<String, DefaultMQPushConsumer> MEMBERS = new ConcurrentHashMap<>();

    public static void main(String[] args) throws Exception {
        ExecutorService threads = Executors.newCachedThreadPool();
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] words = line.split(" ");
            threads.submit(() -> obey(args[0], words));
        }
        System.exit(0);
    }

    private static void obey(String namesrv, String[] words) {
        try {
            if (words[0].equals("join")) {
                join(namesrv, words[1], words[2], words[3], words[4], words[5]);
            } else {
                MEMBERS.remove(words[1]).shutdown();
                tell("left " + words[1]);
            }
        } catch (Exception error) {
            tell("failed " + words[1] + " " + error);
        }
    }

    private static void join(String namesrv, String name, String group, String topic, String mode, String strategy)
        throws Exception {
        DefaultMQPushConsumer consumer = Patience.with(new DefaultMQPushConsumer(group), namesrv);
        consumer.setInstanceName(name);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setAllocateMessageQueueStrategy(strategy(strategy));
        consumer.setPersistConsumerOffsetInterval(200);
        consumer.setConsumeThreadMin(4);
        consumer.setConsumeThreadMax(4);
        consumer.subscribe(topic, "*");
        if (mode.equals("broadcast")) {
            ConsumerBehaviours.broadcast(consumer);
        }
        if (mode.equals("ordered")) {
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
                got(name, messages);
                return ConsumeOrderlyStatus.SUCCESS;
            });
        } else {
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                got(name, messages);
                context.setDelayLevelWhenNextConsume(1);
                return mode.equals("failing") ? ConsumeConcurrentlyStatus.RECONSUME_LATER : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
        }
        MEMBERS.put(name, consumer);
        consumer.start();
        tell("joined " + name);
    }

    private static AllocateMessageQueueStrategy strategy(String name) {
        switch (name) {
            case "AVG":
                return new AllocateMessageQueueAveragely();
            case "AVG_BY_CIRCLE":
                return new AllocateMessageQueueAveragelyByCircle();
            case "CONSISTENT_HASH":
                return new AllocateMessageQueueConsistentHash();
            default:
                throw new IllegalArgumentException("unknown strategy " + name);
        }
    }

    private static void got(String name, List<MessageExt> messages) {
        for (MessageExt message : messages) {
            tell(String.format("got %s %d %d %d %d %s", name, message.getQueueId(), message.getQueueOffset(),
                message.getReconsumeTimes(), System.nanoTime(), new String(message.getBody(), StandardCharsets.UTF_8)));
        }
    }

    private static synchronized void tell(String line) {
        System.out.println(line);
        System.out.flush();
    }
}
