package interop;

import java.io.IOException;
import java.io.PrintStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.MessageDigest;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.TreeMap;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageClientExt;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.protocol.RemotingSerializable;

/** The output file: one JSON object per line, its kind in "event". Safe to write from listener threads. */
final class Report implements AutoCloseable {
    private final PrintStream out;

    Report(Path file) throws IOException {
        out = new PrintStream(Files.newOutputStream(file), false, "UTF-8");
    }

    synchronized void write(Map<String, Object> event) {
        out.println(RemotingSerializable.toJson(event, false));
    }

    /** The last line; returns true so that callers can end with it. */
    boolean summary(String text) {
        return summary(text, true);
    }

    boolean summary(String text, boolean isComplete) {
        Map<String, Object> event = event("summary");
        event.put("complete", isComplete);
        event.put("text", text);
        write(event);
        return isComplete;
    }

    static Map<String, Object> event(String kind) {
        Map<String, Object> event = new LinkedHashMap<>();
        event.put("event", kind);
        return event;
    }

    /** What a message is to its user, the same on the sending and on the receiving side. */
    static void describe(Map<String, Object> event, Message message) throws Exception {
        event.put("topic", message.getTopic());
        event.put("tags", message.getTags());
        event.put("keys", message.getKeys());
        event.put("flag", message.getFlag());
        event.put("userProperties", userProperties(message));
        event.put("bodyBytes", message.getBody().length);
        event.put("bodySha256", sha256(message.getBody()));
    }

    /** What the broker added to it. */
    static void describePlace(Map<String, Object> event, MessageExt message) {
        event.put("msgId", message.getMsgId());
        event.put("offsetMsgId", ((MessageClientExt) message).getOffsetMsgId());
        event.put("queueId", message.getQueueId());
        event.put("queueOffset", message.getQueueOffset());
        event.put("physicalOffset", message.getCommitLogOffset());
        event.put("storeSizeBytes", message.getStoreSize());
        event.put("bornHost", String.valueOf(message.getBornHost()));
        event.put("storeHost", String.valueOf(message.getStoreHost()));
        event.put("bornTimestampMs", message.getBornTimestamp());
        event.put("storeTimestampMs", message.getStoreTimestamp());
        event.put("reconsumeTimes", message.getReconsumeTimes());
    }

    private static Map<String, String> userProperties(Message message) {
        Map<String, String> properties = new TreeMap<>();
        if (message.getProperties() != null) {
            properties.putAll(message.getProperties());
        }
        properties.keySet().removeAll(MessageConst.STRING_HASH_SET);
        return properties;
    }

    private static String sha256(byte[] body) throws Exception {
        StringBuilder hex = new StringBuilder();
        for (byte b : MessageDigest.getInstance("SHA-256").digest(body)) {
            hex.append(String.format("%02x", b));
        }
        return hex.toString();
    }

    @Override
    public void close() {
        out.close();
    }
}
