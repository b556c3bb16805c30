package interop;

import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.impl.MQClientManager;
import org.apache.rocketmq.client.producer.DefaultMQProducer;

/**
 * Time for a machine that does much else: where a client gives a request 3 s, a lost answer has a message sent twice, a
 * group unknown for 30 s, or a filter unchecked. What it does every 30 s it does every second.
 */
final class Patience {
    static final int MS = 60_000;

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
}
