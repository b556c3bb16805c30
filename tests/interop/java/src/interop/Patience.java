package interop;

import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.impl.MQClientManager;
import org.apache.rocketmq.client.impl.factory.MQClientInstance;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Time for a machine that does much else: where a client gives a request 3 s, a lost answer has a message sent twice, a
 * group unknown for 30 s, or a filter unchecked. What it does every 30 s it does every second.
 */
final class Patience {
    static final int MS = 60_000;
    private static final String DEFAULT_TOPIC = "TBW102";

    private Patience() {
    }

    /** Before the client is started. */
    static <C extends ClientConfig> C with(C client, String namesrv) {
        client.setNamesrvAddr(namesrv);
        client.setMqClientApiTimeout(MS);
        client.setPollNameServerInterval(1000);
        client.setHeartbeatBrokerInterval(1000);
        if (client instanceof DefaultMQProducer) {
            ((DefaultMQProducer) client).setSendMsgTimeout(MS);
        }
        if (client instanceof DefaultMQPullConsumer) {
            ((DefaultMQPullConsumer) client).setConsumerPullTimeoutMillis(MS);
        }
        return client;
    }

    /** When it is started: questions about routes, offsets and messages. */
    static <C extends ClientConfig> C started(C client) {
        MQClientManager.getInstance().getOrCreateMQClientInstance(client).getMQAdminImpl().setTimeoutMillis(MS);
        return client;
    }

    /** When the brokers know its group, too: a question about a transaction for which nobody is there counts as asked. */
    static TransactionMQProducer known(TransactionMQProducer producer) throws Exception {
        MQClientInstance client = MQClientManager.getInstance().getOrCreateMQClientInstance(started(producer));
        long deadline = System.nanoTime() + MS * 1_000_000L;
        while (!isKnown(producer, client)) {
            if (System.nanoTime() > deadline) {
                throw new IllegalStateException("no broker knows " + producer.getProducerGroup() + " within " + MS + " ms");
            }
            Thread.sleep(20);
        }
        return producer;
    }

    private static boolean isKnown(TransactionMQProducer producer, MQClientInstance client) {
        client.updateTopicRouteInfoFromNameServer(DEFAULT_TOPIC);
        client.sendHeartbeatToAllBrokerWithLock();
        try {
            for (MessageQueue queue : producer.fetchPublishMessageQueues(DEFAULT_TOPIC)) {
                String address = client.findBrokerAddressInPublish(queue.getBrokerName());
                client.getMQClientAPIImpl().getProducerConnectionList(address, producer.getProducerGroup(), MS);
            }
            return true;
        } catch (Exception unknown) {
            return false;
        }
    }
}
