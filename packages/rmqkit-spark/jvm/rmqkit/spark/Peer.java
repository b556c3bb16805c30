package rmqkit.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedInputStream;
import java.io.ByteArrayOutputStream;
import java.io.Closeable;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.EOFException;
import java.io.IOException;
import java.io.InputStream;
import java.net.InetSocketAddress;
import java.net.Socket;
import java.net.SocketTimeoutException;
import java.net.UnknownHostException;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.GeneralSecurityException;
import java.security.KeyStore;
import java.security.cert.CertificateFactory;
import java.security.cert.X509Certificate;
import java.util.ArrayDeque;
import java.util.Arrays;
import java.util.Base64;
import java.util.Deque;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.UUID;
import java.util.concurrent.atomic.AtomicInteger;
import javax.crypto.Mac;
import javax.crypto.spec.SecretKeySpec;
import javax.net.ssl.SSLContext;
import javax.net.ssl.SSLSocket;
import javax.net.ssl.TrustManager;
import javax.net.ssl.TrustManagerFactory;
import javax.net.ssl.X509TrustManager;
import rmqkit.errors.Failure;

/**
 * A connection to a broker or a name server: the client of the remoting protocol that a read needs.
 *
 * <p>A connection carries one request at a time, as a task waits for each answer. The tasks of an executor share the
 * idle connections, and each is closed after a minute. Source: remoting.md §1, §2, §3.3.
 */
final class Peer implements Closeable {
    private static final int CONNECT_TIMEOUT_MS = 3000;
    private static final long IDLE_MS = 60_000;
    private static final int FRAME_BYTES_MAX = 16 << 20;
    private static final int GO_AWAY = 1500;
    private static final int VERSION = 493;
    private static final int PYTHON = 3;
    private static final int BINARY = 1;
    private static final int FIELDS_AT = 29;
    private static final String REMEDY = "check whether it runs and can be reached";
    private static final String SESSION = UUID.randomUUID().toString().replace("-", "").substring(16);
    private static final AtomicInteger NUMBERS = new AtomicInteger();
    private static final Map<String, Deque<Peer>> IDLE = new HashMap<>();
    static final ObjectMapper JSON = new ObjectMapper();

    /** The bodies of responses, one after the other. */
    static final class Buffer {
        byte[] bytes = {};
        int count;

        private void read(DataInputStream input, int length) throws IOException {
            if (count + length > bytes.length) {
                bytes = Arrays.copyOf(bytes, Math.max(count + length, 2 * bytes.length));
            }
            input.readFully(bytes, count, length);
            count += length;
        }
    }

    /** The response to a request, without its body. */
    record Answer(int code, String remark, Map<String, String> fields) {
        long number(String field) {
            return Long.parseLong(fields.getOrDefault(field, "0"));
        }
    }

    private final String address;
    private final Socket socket;
    private final DataInputStream input;
    private long idleSinceMs;

    private Peer(String address, LiveTask task, int timeoutMs) throws IOException, GeneralSecurityException {
        this.address = address;
        int colon = address.lastIndexOf(':');
        String host = address.substring(0, Math.max(colon, 0)).replaceAll("[\\[\\]]", "");
        Socket plain = new Socket();
        try {
            int port = Integer.parseInt(address.substring(colon + 1));
            plain.connect(new InetSocketAddress(host, port), Math.min(timeoutMs, CONNECT_TIMEOUT_MS));
            plain.setTcpNoDelay(true);
            plain.setSoTimeout(timeoutMs);
            socket = task.isSet("useTls") ? encrypted(plain, host, port, task.text("trusted")) : plain;
        } catch (IOException | GeneralSecurityException | RuntimeException error) {
            plain.close();
            throw error;
        }
        input = new DataInputStream(new BufferedInputStream(socket.getInputStream(), 1 << 16));
    }

    /**
     * Send a request and return the response with any code; its body is appended to the bodies. Throws Failure: there is
     * no response.
     */
    static Answer call(
            String address, LiveTask task, int code, String name, Map<String, String> fields, Buffer bodies) {
        int timeoutMs = (int) Math.min(task.number("pullTimeoutMs"), Integer.MAX_VALUE);
        String key = address + " " + task.isSet("useTls") + " " + task.text("trusted");
        Peer peer = idle(key);
        boolean isFresh = peer == null;
        boolean wasSentAway = false;
        while (true) {
            try {
                if (isFresh) {
                    peer = new Peer(address, task, timeoutMs);
                }
            } catch (SocketTimeoutException | UnknownHostException error) {
                boolean isUnknown = error instanceof UnknownHostException;
                throw Failure.notConnected(address, isUnknown ? "Name or service not known" : "no answer in "
                        + Math.min(timeoutMs, CONNECT_TIMEOUT_MS) + " ms", REMEDY);
            } catch (IOException | GeneralSecurityException | RuntimeException error) {
                throw Failure.notConnected(address, error.getMessage(), REMEDY);
            }
            try {
                Answer answer = peer.ask(code, signed(fields, code, task), timeoutMs, bodies);
                if (answer.code() != GO_AWAY || wasSentAway) {
                    idle(key, peer);
                    return answer;
                }
                wasSentAway = true;
                peer.close();
            } catch (SocketTimeoutException error) {
                peer.close();
                throw Failure.late(address, name + " (" + code + ")", timeoutMs);
            } catch (IOException | RuntimeException error) {
                peer.close();
                if (isFresh) { // an idle connection may have been closed by its peer
                    throw Failure.lost(address, error instanceof EOFException
                            ? "the peer closed it" : String.valueOf(error.getMessage()));
                }
            }
            isFresh = true;
        }
    }

    private static Peer idle(String key) {
        synchronized (IDLE) {
            long now = System.nanoTime() / 1_000_000;
            for (Deque<Peer> peers : IDLE.values()) {
                while (!peers.isEmpty() && now - peers.peekLast().idleSinceMs > IDLE_MS) {
                    peers.pollLast().close();
                }
            }
            return IDLE.getOrDefault(key, new ArrayDeque<>()).pollFirst();
        }
    }

    private static void idle(String key, Peer peer) {
        synchronized (IDLE) {
            peer.idleSinceMs = System.nanoTime() / 1_000_000;
            IDLE.computeIfAbsent(key, one -> new ArrayDeque<>()).addFirst(peer);
        }
    }

    private Answer ask(int code, Map<String, String> fields, int timeoutMs, Buffer bodies) throws IOException {
        int opaque = NUMBERS.incrementAndGet();
        int before = bodies.count;
        socket.setSoTimeout(timeoutMs);
        socket.getOutputStream().write(frame(code, opaque, fields));
        while (true) {
            bodies.count = before;
            int length = input.readInt();
            int head = input.readInt();
            int headerBytes = head & 0xFFFFFF;
            if (length < 4 + headerBytes || length > FRAME_BYTES_MAX) {
                throw new IOException("a frame of " + length + " bytes with a header of " + headerBytes);
            }
            byte[] header = new byte[headerBytes];
            input.readFully(header);
            bodies.read(input, length - 4 - headerBytes);
            Answer answer = head >>> 24 == 0 ? json(header, opaque) : binary(ByteBuffer.wrap(header), opaque);
            if (answer != null) {
                return answer;
            }
        }
    }

    /** Return a request with a header in RocketMQ's binary form, which costs less than JSON. */
    private static byte[] frame(int code, int opaque, Map<String, String> fields) throws IOException {
        ByteArrayOutputStream bytes = new ByteArrayOutputStream(512);
        DataOutputStream frame = new DataOutputStream(bytes);
        frame.write(new byte[8]); // the sizes
        frame.writeShort(code);
        frame.writeByte(PYTHON);
        frame.writeShort(VERSION);
        frame.writeInt(opaque);
        frame.writeInt(0); // flags
        frame.writeInt(0); // no remark
        frame.writeInt(0); // the size of the fields
        for (Map.Entry<String, String> field : fields.entrySet()) {
            byte[] name = field.getKey().getBytes(StandardCharsets.UTF_8);
            byte[] value = field.getValue().getBytes(StandardCharsets.UTF_8);
            frame.writeShort(name.length);
            frame.write(name);
            frame.writeInt(value.length);
            frame.write(value);
        }
        byte[] made = bytes.toByteArray();
        ByteBuffer.wrap(made)
                .putInt(0, made.length - 4)
                .putInt(4, BINARY << 24 | made.length - 8)
                .putInt(FIELDS_AT - 4, made.length - FIELDS_AT);
        return made;
    }

    /** Return the response of a header in JSON, or null if it is not that to the request. */
    private static Answer json(byte[] header, int opaque) throws IOException {
        JsonNode answer = JSON.readTree(header);
        Map<String, String> fields = new HashMap<>();
        answer.path("extFields").properties().forEach(one -> fields.put(one.getKey(), one.getValue().asText()));
        return (answer.path("flag").asInt() & 1) == 1 && answer.path("opaque").asInt() == opaque
                ? new Answer(answer.path("code").asInt(), answer.path("remark").asText(""), fields)
                : null;
    }

    /** Return the response of a binary header, or null: a broker may send requests of its own on the connection. */
    private static Answer binary(ByteBuffer header, int opaque) {
        int code = header.getShort();
        header.position(header.position() + 3); // language, version
        int number = header.getInt();
        boolean isResponse = (header.getInt() & 1) == 1;
        String remark = text(header, header.getInt());
        Map<String, String> fields = new HashMap<>();
        header.getInt();
        while (header.hasRemaining()) {
            fields.put(text(header, header.getShort()), text(header, header.getInt()));
        }
        return isResponse && number == opaque ? new Answer(code, remark, fields) : null;
    }

    private static String text(ByteBuffer bytes, int length) {
        byte[] text = new byte[length];
        bytes.get(text);
        return new String(text, StandardCharsets.UTF_8);
    }

    // ------------------------------------------------------------ users and TLS

    /** Return the fields of a request with both signatures of {@code rmqkit.protocol.acl} if there is a user. */
    private static Map<String, String> signed(Map<String, String> fields, int code, LiveTask task) {
        if (task.text("accessKey").isEmpty()) {
            return fields;
        }
        Map<String, String> all = new TreeMap<>(fields);
        all.put("AccessKey", task.text("accessKey"));
        all.put("RmqSigned", System.currentTimeMillis() + " " + SESSION + " " + NUMBERS.incrementAndGet());
        Mac full = mac("HmacSHA256", task);
        full.update("rmqkit request 1".getBytes(StandardCharsets.US_ASCII));
        full.update(int32(code));
        all.forEach((name, value) -> List.of(name, value).forEach(text -> {
            byte[] bytes = text.getBytes(StandardCharsets.UTF_8);
            full.update(int32(bytes.length));
            full.update(bytes);
        }));
        full.update(int32(-1));
        all.put("RmqSignature", Base64.getEncoder().encodeToString(full.doFinal()));
        Mac plain = mac("HmacSHA1", task);
        all.values().forEach(value -> plain.update(value.getBytes(StandardCharsets.UTF_8)));
        all.put("Signature", Base64.getEncoder().encodeToString(plain.doFinal()));
        return all;
    }

    private static byte[] int32(int number) {
        return ByteBuffer.allocate(4).putInt(number).array();
    }

    private static Mac mac(String algorithm, LiveTask task) {
        try {
            byte[] secret = task.text("secretKey").getBytes(StandardCharsets.UTF_8);
            Mac mac = Mac.getInstance(algorithm);
            mac.init(new SecretKeySpec(secret.length == 0 ? new byte[1] : secret, algorithm));
            return mac;
        } catch (GeneralSecurityException error) {
            throw new IllegalStateException(error);
        }
    }

    private static SSLSocket encrypted(Socket plain, String host, int port, String trusted)
            throws IOException, GeneralSecurityException {
        TrustManager[] managers = {new Anybody()};
        if (!trusted.isEmpty()) {
            KeyStore store = KeyStore.getInstance(KeyStore.getDefaultType());
            store.load(null, null);
            try (InputStream file = Files.newInputStream(Path.of(trusted))) {
                for (var one : CertificateFactory.getInstance("X.509").generateCertificates(file)) {
                    store.setCertificateEntry("ca" + store.size(), one);
                }
            }
            TrustManagerFactory factory = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
            factory.init(store);
            managers = factory.getTrustManagers();
        }
        SSLContext context = SSLContext.getInstance("TLS");
        context.init(null, managers, null);
        SSLSocket socket = (SSLSocket) context.getSocketFactory().createSocket(plain, host, port, true);
        socket.startHandshake(); // host names are not checked: clients connect to addresses
        return socket;
    }

    /** Trusts every certificate: without trustCertPath connections are encrypted, but not verified. */
    private static final class Anybody implements X509TrustManager {
        @Override
        public void checkClientTrusted(X509Certificate[] chain, String type) {}

        @Override
        public void checkServerTrusted(X509Certificate[] chain, String type) {}

        @Override
        public X509Certificate[] getAcceptedIssuers() {
            return new X509Certificate[0];
        }
    }

    @Override
    public void close() {
        try {
            socket.close();
        } catch (IOException error) {
            // it is closed
        }
    }
}
