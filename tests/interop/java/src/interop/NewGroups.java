package interop;

import java.util.ArrayList;
import java.util.List;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Starts a consumer of a new group for each topic, and sends ten messages to the topic as soon as the consumer has
 * started. Prints how many messages were sent and how many of them no consumer got. Arguments: name server, how many
 * seconds to wait for messages, topics.
 */
public final class NewGroups {
    private static final int MESSAGES = 10;

    public static void main(String[] args) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("new-groups-producer");
        Patience.with(producer, args[0]).setInstanceName("producer");
        producer.start();
        for (int i = 2; i < args.length; i++) {
            // The route is known before the consumer starts: the sends must follow at once.
            producer.fetchPublishMessageQueues(args[i]);
        }
        Set<String> missing = ConcurrentHashMap.newKeySet();
        List<DefaultMQPushConsumer> consumers = new ArrayList<>();
        for (int i = 2; i < args.length; i++) {
            DefaultMQPushConsumer consumer = consumer(args[0], args[i], missing);
            consumer.start();
            consumers.add(consumer);
            for (int k = 0; k < MESSAGES; k++) {
                String body = args[i] + " " + k;
                missing.add(body);
                producer.send(new Message(args[i], "Tag", body.getBytes()));
            }
        }
        long deadline = System.nanoTime() + Long.parseLong(args[1]) * 1_000_000_000L;
        while (!missing.isEmpty() && System.nanoTime() < deadline) {
            Thread.sleep(50);
        }
        System.out.println("sent " + consumers.size() * MESSAGES + " missed " + missing.size());
        System.exit(0);
    }

    private static DefaultMQPushConsumer consumer(String namesrv, String topic, Set<String> missing) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("group-of-" + topic);
        Patience.with(consumer, namesrv).setInstanceName(topic);
        consumer.setConsumeThreadMin(1);
        consumer.setConsumeThreadMax(1);
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                missing.remove(new String(message.getBody()));
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        return consumer;
    }
}
