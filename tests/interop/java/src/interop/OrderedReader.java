package interop;

import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Sends so many messages to the queues of a topic, then consumes them in order, slowly; a line for each is its queue and
 * offset. Arguments: name server, topic, messages.
 */
public final class OrderedReader {
    public static void main(String[] args) throws Exception {
        int count = Integer.parseInt(args[2]);
        DefaultMQProducer producer = new DefaultMQProducer("ordered-reader-producer");
        Patience.with(producer, args[0]).start();
        for (int i = 0; i < count; i++) {
            int queue = i % 4;
            producer.send(new Message(args[1], "Tag", ("message " + i).getBytes()),
                (queues, message, argument) -> queues.get(queue % queues.size()), null);
        }
        producer.shutdown();
        Set<String> seen = ConcurrentHashMap.newKeySet();
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("ordered-reader");
        Patience.with(consumer, args[0]);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setPersistConsumerOffsetInterval(500);
        consumer.subscribe(args[1], "*");
        consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
            for (MessageExt message : messages) {
                String place = message.getQueueId() + " " + message.getQueueOffset();
                synchronized (seen) {
                    System.out.println(place);
                    System.out.flush();
                    seen.add(place);
                }
            }
            try {
                Thread.sleep(10);
            } catch (InterruptedException stopped) {
                Thread.currentThread().interrupt();
            }
            return ConsumeOrderlyStatus.SUCCESS;
        });
        consumer.start();
        while (seen.size() < count) {
            Thread.sleep(50);
        }
        System.exit(0);
    }
}
