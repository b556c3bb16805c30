package interop;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Load on a broker, as a conversation with whoever measures it: a line on standard input is a job, the answer a line of its
 * figures.
 *
 * <pre>
 * send THREADS COUNT        each thread waits for its answers
 * inflight WINDOW COUNT     one thread, so many sends under way
 * batch SIZE COUNT          one thread, batches
 * consume COUNT GROUP       a new group reads the backlog
 * latency RATE SECONDS      from before the send to the listener, for messages at a steady rate
 * </pre>
 */
public final class BrokerLoad {
    private static final String TOPIC = "BrokerLoad";
    private static final String LATENCY_TOPIC = "BrokerLoadLatency";

    private final String namesrv;
    private final byte[] body;
    private final DefaultMQProducer producer;

    private BrokerLoad(String namesrv, int bodyBytes) throws Exception {
        this.namesrv = namesrv;
        body = new byte[bodyBytes];
        Arrays.fill(body, (byte) 'x');
        producer = new DefaultMQProducer("broker-load");
        producer.setNamesrvAddr(namesrv);
        producer.setSendMsgTimeout(20000);
        producer.setCompressMsgBodyOverHowmuch(1 << 20);
        producer.start();
        producer.send(message(TOPIC, 0));
        producer.send(message(LATENCY_TOPIC, 0));
    }

    public static void main(String[] args) throws Exception {
        BrokerLoad load = new BrokerLoad(args[0], Integer.parseInt(args[1]));
        System.out.println("ready");
        BufferedReader jobs = new BufferedReader(new InputStreamReader(System.in));
        for (String line = jobs.readLine(); line != null; line = jobs.readLine()) {
            String[] job = line.trim().split(" ");
            int first = Integer.parseInt(job[1]);
            switch (job[0]) {
                case "send":
                    load.send(first, Integer.parseInt(job[2]));
                    break;
                case "inflight":
                    load.inFlight(first, Integer.parseInt(job[2]));
                    break;
                case "batch":
                    load.batch(first, Integer.parseInt(job[2]));
                    break;
                case "consume":
                    load.consume(first, job[2]);
                    break;
                default:
                    load.latency(first, Integer.parseInt(job[2]));
            }
        }
        System.exit(0);
    }

    private Message message(String topic, int number) {
        return new Message(topic, "Tag" + number % 4, "key" + number, body);
    }

    private static void done(long count, long startedNanos) {
        System.out.printf("done %d %.6f%n", count, (System.nanoTime() - startedNanos) / 1e9);
    }

    private void send(int threads, int count) throws Exception {
        AtomicInteger next = new AtomicInteger();
        List<Thread> all = new ArrayList<>();
        long started = System.nanoTime();
        for (int i = 0; i < threads; i++) {
            Thread thread = new Thread(() -> {
                for (int number = next.getAndIncrement(); number < count; number = next.getAndIncrement()) {
                    try {
                        producer.send(message(TOPIC, number));
                    } catch (Exception error) {
                        throw new IllegalStateException(error);
                    }
                }
            });
            thread.start();
            all.add(thread);
        }
        for (Thread thread : all) {
            thread.join();
        }
        done(count, started);
    }

    private void inFlight(int window, int count) throws Exception {
        Semaphore free = new Semaphore(window);
        AtomicInteger failed = new AtomicInteger();
        long started = System.nanoTime();
        for (int i = 0; i < count; i++) {
            free.acquire();
            producer.send(message(TOPIC, i), new SendCallback() {
                @Override
                public void onSuccess(SendResult result) {
                    free.release();
                }

                @Override
                public void onException(Throwable error) {
                    failed.incrementAndGet();
                    free.release();
                }
            });
        }
        free.acquire(window);
        done(count - failed.get(), started);
    }

    private void batch(int size, int count) throws Exception {
        long started = System.nanoTime();
        for (int sent = 0; sent < count; sent += size) {
            List<Message> batch = new ArrayList<>(size);
            for (int i = 0; i < size; i++) {
                batch.add(message(TOPIC, sent + i));
            }
            producer.send(batch);
        }
        done((count + size - 1) / size * size, started);
    }

    private void consume(int count, String group) throws Exception {
        AtomicInteger seen = new AtomicInteger();
        DefaultMQPushConsumer consumer = consumer(group, TOPIC);
        AtomicLong first = new AtomicLong();
        AtomicLong last = new AtomicLong();
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            first.compareAndSet(0, System.nanoTime());
            if (seen.addAndGet(messages.size()) >= count) {
                last.compareAndSet(0, System.nanoTime());
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        while (last.get() == 0) {
            Thread.sleep(5);
        }
        System.out.printf("done %d %.6f%n", count, (last.get() - first.get()) / 1e9);
        consumer.shutdown();
    }

    private DefaultMQPushConsumer consumer(String group, String topic) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr(namesrv);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setConsumeMessageBatchMaxSize(32);
        consumer.subscribe(topic, "*");
        return consumer;
    }

    private void latency(int perSecond, int seconds) throws Exception {
        int count = perSecond * seconds;
        long[] micros = new long[count];
        AtomicInteger seen = new AtomicInteger();
        AtomicInteger read = new AtomicInteger();
        DefaultMQPushConsumer consumer = consumer("broker-load-latency-" + System.nanoTime(), LATENCY_TOPIC);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            long now = System.nanoTime();
            for (MessageExt message : messages) {
                String sent = message.getUserProperty("sentNanos");
                int number = sent == null ? -1 : Integer.parseInt(message.getUserProperty("number"));
                if (number >= 0 && Long.parseLong(sent) > 0) {
                    micros[number] = (now - Long.parseLong(sent)) / 1000;
                    seen.incrementAndGet();
                }
            }
            read.addAndGet(messages.size());
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        while (read.get() == 0) {
            Thread.sleep(5); // it has no queues yet; those of a new group are now and then given after 20 seconds only
        }
        Thread.sleep(3000); // what earlier jobs have sent
        seen.set(0);
        long started = System.nanoTime();
        for (int i = 0; i < count; i++) {
            long due = started + i * 1_000_000_000L / perSecond;
            long wait = due - System.nanoTime();
            if (wait > 0) {
                TimeUnit.NANOSECONDS.sleep(wait);
            }
            Message message = message(LATENCY_TOPIC, i);
            message.putUserProperty("number", String.valueOf(i));
            message.putUserProperty("sentNanos", String.valueOf(System.nanoTime()));
            producer.sendOneway(message);
        }
        for (int i = 0; i < 6000 && seen.get() < count; i++) {
            Thread.sleep(5);
        }
        consumer.shutdown();
        if (seen.get() < count) {
            System.out.printf("done 0 of %d messages within 30 seconds: %d%n", count, seen.get());
            return;
        }
        long[] sorted = Arrays.copyOf(micros, count);
        Arrays.sort(sorted);
        System.out.printf("done %d %.6f p50_us=%d p99_us=%d max_us=%d%n", seen.get(), (System.nanoTime() - started) / 1e9,
            sorted[count / 2], sorted[count * 99 / 100], sorted[count - 1]);
    }
}
