package rmqkit.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.IOException;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.function.Supplier;
import org.apache.spark.TaskContext;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;
import rmqkit.errors.Failure;
import rmqkit.spark.broker_pool.DataLost;

/**
 * Pulls the records of a task, some MiB at a time: the JVM's form of {@code bodies} in {@code rmqkit.spark.broker_pool},
 * with the same waits and errors.
 */
final class Pulls implements Supplier<RecordWalk> {
    private static final Logger LOG = LoggerFactory.getLogger(Pulls.class);
    private static final int PULL_MESSAGE = 11;
    private static final int GET_ROUTE = 105;
    private static final int FOUND = 0;
    private static final int TOPIC_NOT_EXIST = 17;
    private static final int PULL_NOT_FOUND = 19;
    private static final int PULL_RETRY_IMMEDIATELY = 20;
    private static final int PULL_OFFSET_MOVED = 21;
    private static final int WITH_SUBSCRIPTION = 4;
    private static final int LOG_OFFSET_AT = 28;
    /** The bodies of several pulls are decoded together, while the cache of the CPU still has them. */
    private static final int CHUNK_BYTES = 1 << 20;
    private static final long RETRY_PAUSE_MS = 500;

    private final LiveTask task;
    private final int rowsMax;
    private final Peer.Buffer bodies = new Peer.Buffer();
    private String address;
    private long offset;

    Pulls(LiveTask task, int rowsMax) {
        this.task = task;
        this.rowsMax = rowsMax;
        address = task.text("address");
        offset = task.low;
    }

    /** Return the next records. They use the memory of the previous ones. */
    @Override
    public RecordWalk get() {
        bodies.count = 0;
        while (offset < task.high && bodies.count < CHUNK_BYTES) {
            int before = bodies.count;
            if (!pull(before)) {
                bodies.count = before;
            }
        }
        return bodies.count == 0 ? null : RecordWalk.ofPulled(bodies.bytes, bodies.count, rowsMax);
    }

    /** Pull once, into the bodies from a place on. Return false if the body has no records. */
    private boolean pull(int at) {
        Peer.Answer answer = patiently(at);
        if (answer == null) {
            offset = task.high;
            return false;
        }
        long next = answer.number("nextBeginOffset");
        if (answer.code() == PULL_OFFSET_MOVED && next > offset) {
            // Retention deleted the messages. Only move forward: going back would return rows twice.
            lost(Math.min(next, task.high), "the queue begins at " + answer.number("minOffset"));
        }
        // A filter may exclude all messages that the broker read, but an answer with messages must advance.
        offset = Math.max(next, offset + (answer.code() == FOUND ? 1 : 0));
        return answer.code() == FOUND;
    }

    /**
     * Pull until a broker answers. Return null if the queue ends before the offset, although it had a message there, if
     * its topic was deleted, or if it was created again.
     */
    private Peer.Answer patiently(int at) {
        long deadline = System.nanoTime() + task.number("patienceMs") * 1_000_000;
        while (true) {
            try {
                bodies.count = at;
                Peer.Answer answer = request();
                boolean isShort = answer.code() == PULL_NOT_FOUND || answer.number("maxOffset") <= offset;
                if (answer.code() == FOUND && isOfAnotherQueue(at)) {
                    return null;
                }
                if (!isShort || answer.code() == FOUND) {
                    return answer;
                }
                if (System.nanoTime() > deadline) {
                    lost(task.high, "the queue ends at " + answer.number("maxOffset"));
                    return null;
                }
            } catch (Failure failure) {
                if (failure.isMissingTopic() && isDeleted(address)) {
                    lost(task.high, "its topic was deleted");
                    return null;
                }
                if (System.nanoTime() > deadline || !failure.isPassing()) {
                    throw failure.at(task.queue() + ", from offset " + offset);
                }
                LOG.info("trying again: {}", failure.getMessage());
            }
            try {
                Thread.sleep(RETRY_PAUSE_MS);
                if (TaskContext.get().isInterrupted()) {
                    throw new InterruptedException();
                }
                findBroker();
            } catch (InterruptedException error) {
                throw new IllegalStateException("the task was cancelled", error);
            } catch (Failure failure) {
                LOG.info("no route of topic {}: {}", task.text("topic"), failure.getMessage());
            }
        }
    }

    /** Report the rest of the range as lost, and return true, if its first record is newer than the plan allows. */
    private boolean isOfAnotherQueue(int at) {
        long max = task.number("logOffsetMax");
        if (max < 0 || bodies.count - at < LOG_OFFSET_AT + 8) {
            return false; // unknown, or not a record, which the decoder reports
        }
        long logOffset = LogFile.longAt(bodies.bytes, at + LOG_OFFSET_AT);
        if (logOffset <= max) {
            return false;
        }
        lost(task.high, "the queue was deleted and created again: its message " + offset + " is at log offset "
                + logOffset + ", greater than " + max);
        return true;
    }

    /** Return true if the broker that has no such topic is the master, or if no route names it any more. */
    private boolean isDeleted(String refusing) {
        try {
            return !findBroker() || address.equals(refusing);
        } catch (Failure failure) {
            return false;
        }
    }

    private Peer.Answer request() {
        if (address.isEmpty()) {
            findBroker();
        }
        if (address.isEmpty()) {
            throw Failure.notConnected(task.text("brokerName"), "no route of topic " + task.text("topic")
                    + " names a broker of that name", "check whether it runs and registers with these name servers");
        }
        Map<String, String> fields = new TreeMap<>();
        fields.put("consumerGroup", task.text("group"));
        fields.put("topic", task.text("topicName"));
        fields.put("queueId", Long.toString(task.number("queueId")));
        fields.put("queueOffset", Long.toString(offset));
        fields.put("maxMsgNums", Long.toString(Math.min(task.number("pullCount"), task.high - offset)));
        // Neither a wait at the end of the range, nor a commit: the checkpoint stores the progress.
        fields.put("sysFlag", Integer.toString(WITH_SUBSCRIPTION));
        fields.put("commitOffset", "0");
        fields.put("suspendTimeoutMillis", "0");
        fields.put("subVersion", Long.toString(System.currentTimeMillis()));
        fields.put("subscription", task.text("expression"));
        fields.put("expressionType", task.text("expressionType"));
        fields.put("bname", task.text("brokerName"));
        Peer.Answer answer = Peer.call(address, task, PULL_MESSAGE, "PULL_MESSAGE", fields, bodies);
        return switch (answer.code()) {
            case FOUND, PULL_NOT_FOUND, PULL_RETRY_IMMEDIATELY, PULL_OFFSET_MOVED -> answer;
            default -> throw Failure.refused(address, answer.code(), answer.remark(), task.remedy(answer.code()));
        };
    }

    /**
     * Request the route of the topic, and set the address of the broker: its master, or else its first slave. Return
     * false if the route does not name the broker.
     */
    private boolean findBroker() {
        List<Failure> failures = new ArrayList<>();
        Map<String, String> fields = Map.of("topic", task.text("routeTopic"), "acceptStandardJsonOnly", "true");
        for (String nameServer : task.texts("nameServers")) {
            try {
                Peer.Buffer route = new Peer.Buffer();
                Peer.Answer answer = Peer.call(nameServer, task, GET_ROUTE, "GET_ROUTEINFO_BY_TOPIC", fields, route);
                if (answer.code() != FOUND && answer.code() != TOPIC_NOT_EXIST) {
                    throw Failure.refused(nameServer, answer.code(), answer.remark(), task.remedy(answer.code()));
                }
                boolean isFound = false;
                for (JsonNode broker : Peer.JSON.readTree(route.bytes, 0, route.count).path("brokerDatas")) {
                    if (broker.path("brokerName").asText().equals(task.text("brokerName"))) {
                        TreeMap<Integer, String> addresses = new TreeMap<>();
                        broker.path("brokerAddrs").properties().forEach(
                                one -> addresses.put(Integer.valueOf(one.getKey()), one.getValue().asText()));
                        address = addresses.isEmpty() ? address : addresses.firstEntry().getValue();
                        isFound = true;
                    }
                }
                return isFound;
            } catch (IOException error) {
                throw Failure.refused(nameServer, FOUND, "the route cannot be read: " + error.getMessage(), null);
            } catch (Failure failure) {
                failures.add(failure);
            }
        }
        throw Failure.noNameServer(failures);
    }

    /** Throw DataLost for the messages from the offset to an end if the option says so, otherwise log them. */
    private void lost(long end, String why) {
        String text = "messages " + offset + " to " + (end - 1) + " of " + task.queue() + " are gone: " + why
                + "; failOnDataLoss=false continues without them";
        if (task.isSet("failOnDataLoss")) {
            throw new DataLost(text);
        }
        LOG.warn(text);
    }
}
