package interop;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Random;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageBatch;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Sends the same messages in the same order to the same queues at every run: what two brokers store of them may differ
 * in times and addresses alone. Unique keys are counted, not made of address, process and time.
 *
 * <pre>
 *   --target HOST:PORT/NAME ...      name server and broker; one after the other
 * </pre>
 *
 * The topics Bytes (3 queues), BytesBatch (2), BytesInner (1, BatchCQ) and one with a name of 127 characters exist.
 */
public final class FixedSequence {
    static final String LONG_TOPIC = String.format("%-127s", "Bytes-long-").replace(' ', 'x');
    private static final int SINGLE_COUNT = 300;

    private final String broker;
    private final DefaultMQProducer producer;
    private final Random noise = new Random(5);
    private int uniqueKeys;
    private int sends;

    private FixedSequence(String broker, DefaultMQProducer producer) {
        this.broker = broker;
        this.producer = producer;
    }

    public static void main(String[] args) {
        int code = 1;
        try {
            for (String target : Arguments.parse(args).all("target")) {
                String[] parts = target.split("/");
                System.out.println(target + ": " + runAll(parts[0], parts[1]) + " sends");
            }
            code = 0;
        } catch (Exception e) {
            e.printStackTrace();
        }
        System.exit(code);
    }

    static int runAll(String namesrv, String broker) throws Exception {
        return run(namesrv, broker, "ZLIB", 1000) + run(namesrv, broker, "LZ4", 2000) + run(namesrv, broker, "ZSTD", 3000);
    }

    private static int run(String namesrv, String broker, String type, int firstKey) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("fixed-" + type);
        producer.setInstanceName("fixed-" + type + namesrv);
        Patience.with(producer, namesrv);
        if (!type.equals("ZLIB")) {
            compressWith(producer, type);
        }
        producer.start();
        try {
            FixedSequence sequence = new FixedSequence(broker, producer);
            sequence.uniqueKeys = firstKey;
            if (type.equals("ZLIB")) {
                sequence.singles();
                sequence.oddProperties();
                sequence.batches();
            }
            sequence.compressed(type);
            return sequence.sends;
        } finally {
            producer.shutdown();
        }
    }

    /** By name, as a 4.x client does not know it: all programs here are compiled with either. */
    private static void compressWith(DefaultMQProducer producer, String type) throws Exception {
        Class<?> types = Class.forName("org.apache.rocketmq.common.compression.CompressionType");
        Object chosen = types.getMethod("of", String.class).invoke(null, type);
        DefaultMQProducer.class.getMethod("setCompressType", types).invoke(producer, chosen);
    }

    /** Tags (colliding, of negative hash, not ASCII), keys, user properties, flags; small bodies and some large ones. */
    private void singles() throws Exception {
        String[] tags = {"TagA", null, "polygenelubricants", "AaAa", "BBBB", "\u4e2d\u6587", "\ud83d\ude80", "tag-negative"};
        for (int i = 0; i < SINGLE_COUNT; i++) {
            Message message = new Message(i % 40 == 7 ? LONG_TOPIC : "Bytes", bytes(i % 15 == 3 ? 3000 + 13 * i : 1 + i % 90));
            if (tags[i % tags.length] != null) {
                message.setTags(tags[i % tags.length]);
            }
            if (i % 3 == 1) {
                message.setKeys("order-" + i);
            } else if (i % 3 == 2) {
                message.setKeys(Arrays.asList("order-" + i, "shared", "\u952e-" + i % 7));
            }
            for (int p = 0; p < i % 6; p++) {
                message.putUserProperty("property-" + p * 31, "value " + i);
            }
            message.putUserProperty("\u5c5e\u6027", "\u503c \ud83d\ude00 " + i);
            message.setFlag(i * 7919);
            message.setWaitStoreMsgOK(i % 11 != 0);
            send(message, i % 40 == 7 ? 0 : i % 3);
        }
    }

    /** What a broker takes apart and puts together again. */
    private void oddProperties() throws Exception {
        Message empty = new Message("Bytes", "", "", bytes(5));
        empty.setTags("");
        MessageAccessor.putProperty(empty, "empty", "");
        send(empty, 0);
        Message stamped = new Message("Bytes", "t", " two  words ", bytes(5));
        MessageAccessor.putProperty(stamped, MessageConst.PROPERTY_CLUSTER, "mine");
        MessageAccessor.putProperty(stamped, MessageConst.PROPERTY_MSG_REGION, "mine");
        MessageAccessor.putProperty(stamped, MessageConst.PROPERTY_TRACE_SWITCH, "false");
        send(stamped, 1);
        for (int count : new int[] {90, 150, 400}) {
            Message many = new Message("Bytes", "many", bytes(5));
            for (int i = 0; i < count; i++) {
                many.putUserProperty("name-" + i * i, Integer.toString(i));
            }
            send(many, 2);
        }
        Message colliding = new Message("Bytes", "collide", bytes(5));
        for (String name : new String[] {"BBBB", "AaBB", "AaAa", "BBAa"}) {
            colliding.putUserProperty(name, name);
        }
        send(colliding, 0);
    }

    private void batches() throws Exception {
        for (int b = 0; b < 40; b++) {
            for (String topic : new String[] {"BytesBatch", "BytesInner"}) {
                List<Message> members = new ArrayList<>();
                for (int i = 0; i < 1 + b % 5; i++) {
                    Message member = new Message(topic, "b" + i % 2, "batch-" + b + "-" + i, bytes(10 + 50 * (b % 7)));
                    member.putUserProperty("member", "\u00fc" + i);
                    member.setFlag(i);
                    MessageAccessor.putProperty(member, MessageConst.PROPERTY_UNIQ_CLIENT_MESSAGE_ID_KEYIDX, uniqueKey());
                    members.add(member);
                }
                MessageBatch batch = MessageBatch.generateFromList(members);
                MessageAccessor.putProperty(batch, MessageConst.PROPERTY_UNIQ_CLIENT_MESSAGE_ID_KEYIDX, uniqueKey());
                batch.setBody(batch.encode());
                check(producer.send(batch, new MessageQueue(topic, broker, topic.equals("BytesBatch") ? b % 2 : 0)));
            }
        }
    }

    private void compressed(String tag) throws Exception {
        for (int i = 0; i < 5; i++) {
            StringBuilder text = new StringBuilder();
            while (text.length() < 5000 + 900 * i) {
                text.append(tag).append(" line ").append(text.length() % 89).append('\n');
            }
            send(new Message("Bytes", tag, "compressed-" + i, text.toString().getBytes(StandardCharsets.UTF_8)), i % 3);
        }
    }

    private void send(Message message, int queueId) throws Exception {
        MessageAccessor.putProperty(message, MessageConst.PROPERTY_UNIQ_CLIENT_MESSAGE_ID_KEYIDX, uniqueKey());
        check(producer.send(message, new MessageQueue(message.getTopic(), broker, queueId)));
    }

    private void check(SendResult result) {
        if (result.getSendStatus() != SendStatus.SEND_OK) {
            throw new IllegalStateException(result.toString());
        }
        sends++;
    }

    private String uniqueKey() {
        return String.format("7F0000010000000000000000%08X", uniqueKeys++);
    }

    private byte[] bytes(int count) {
        byte[] bytes = new byte[count];
        noise.nextBytes(bytes);
        return bytes;
    }
}
