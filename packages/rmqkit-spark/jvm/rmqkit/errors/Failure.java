package rmqkit.errors;

import java.util.List;
import java.util.stream.Collectors;

/** A failed request to a broker or a name server, with the classes and texts of {@code rmqkit.errors} in Python. */
public abstract class Failure extends RuntimeException {
    private static final long serialVersionUID = 1L;
    private static final int SYSTEM_BUSY = 2;
    private static final int SERVICE_NOT_AVAILABLE = 14;
    private static final int TOPIC_NOT_EXIST = 17;

    private final boolean isPassing;
    private String place = "";

    Failure(String text, boolean isPassing) {
        super(text);
        this.isPassing = isPassing;
    }

    /** Return true if the request may succeed later. */
    public boolean isPassing() {
        return isPassing;
    }

    /** Return true if a broker has no such topic. */
    public boolean isMissingTopic() {
        return false;
    }

    /** Return this failure, with a place before its text. */
    public Failure at(String place) {
        this.place = place + ": ";
        return this;
    }

    @Override
    public String getMessage() {
        return place + super.getMessage();
    }

    public static Failure notConnected(String address, String reason, String remedy) {
        return new ConnectFailed("cannot connect to " + address + ": " + reason + "; " + remedy);
    }

    public static Failure lost(String address, String reason) {
        return new ConnectionLost("connection to " + address + " closed before the answer: " + reason
                + "; it may have executed the request");
    }

    public static Failure late(String address, String request, long timeoutMs) {
        return new RequestTimedOut(address + " did not answer " + request + " within " + timeoutMs + " ms; it may have"
                + " executed the request: check whether it is overloaded, or allow more time");
    }

    /** Return the failure for a response with an error code; the remedy may be null. */
    public static Failure refused(String address, int code, String remark, String remedy) {
        String text = (remark == null || remark.isEmpty() ? "no remark" : remark).split("\nSee http", 2)[0];
        return new PeerRefused(address + " answered with code " + code + ": " + text.strip().replaceAll("\\s+", " ")
                + (remedy == null ? "" : "; " + remedy), code == SYSTEM_BUSY || code == SERVICE_NOT_AVAILABLE,
                code == TOPIC_NOT_EXIST);
    }

    public static Failure noNameServer(List<Failure> causes) {
        return new NoNameServer("no name server answered, check the addresses: "
                + causes.stream().map(Failure::getMessage).collect(Collectors.joining("; ")));
    }

    public static Failure ofBody(String text) {
        return new BodyError(text);
    }
}

final class ConnectFailed extends Failure {
    private static final long serialVersionUID = 1L;

    ConnectFailed(String text) {
        super(text, true);
    }
}

final class ConnectionLost extends Failure {
    private static final long serialVersionUID = 1L;

    ConnectionLost(String text) {
        super(text, true);
    }
}

final class RequestTimedOut extends Failure {
    private static final long serialVersionUID = 1L;

    RequestTimedOut(String text) {
        super(text, true);
    }
}

final class NoNameServer extends Failure {
    private static final long serialVersionUID = 1L;

    NoNameServer(String text) {
        super(text, true);
    }
}

final class PeerRefused extends Failure {
    private static final long serialVersionUID = 1L;

    private final boolean isMissingTopic;

    PeerRefused(String text, boolean isPassing, boolean isMissingTopic) {
        super(text, isPassing);
        this.isMissingTopic = isMissingTopic;
    }

    @Override
    public boolean isMissingTopic() {
        return isMissingTopic;
    }
}

final class BodyError extends Failure {
    private static final long serialVersionUID = 1L;

    BodyError(String text) {
        super(text, false);
    }
}
