import java.util.ArrayDeque;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.Executors;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;

/**
 * Sends asynchronously with a bounded number of messages under way, and reports as RocketMQ's own
 * Producer does: every second, the rate of the nine seconds before.
 *
 * <p>Options: -n name server, -t topic, -s bytes of a body, -f messages under way, -ri ms between
 * reports.
 */
public final class AsyncProducer {
    private static final int COUNTS = 10;
    private static final AtomicLong SENT = new AtomicLong();
    private static final AtomicLong FAILED = new AtomicLong();

    public static void main(String[] words) throws Exception {
        Map<String, String> options = new HashMap<>();
        for (int i = 0; i + 1 < words.length; i += 2) {
            options.put(words[i], words[i + 1]);
        }
        // Before the client's classes read it: the header's binary form, as in RocketMQ's programs.
        System.setProperty("rocketmq.serialize.type", "ROCKETMQ");
        DefaultMQProducer producer = new DefaultMQProducer("bench_async_producer");
        producer.setNamesrvAddr(options.get("-n"));
        producer.setCompressMsgBodyOverHowmuch(Integer.MAX_VALUE);
        producer.start();
        report(Long.parseLong(options.get("-ri")));
        send(producer, options);
    }

    private static void send(DefaultMQProducer producer, Map<String, String> options)
            throws Exception {
        String topic = options.get("-t");
        byte[] body = new byte[Integer.parseInt(options.get("-s"))];
        Semaphore underWay = new Semaphore(Integer.parseInt(options.get("-f")));
        SendCallback callback = new SendCallback() {
            @Override
            public void onSuccess(SendResult result) {
                (result.getSendStatus() == SendStatus.SEND_OK ? SENT : FAILED).incrementAndGet();
                underWay.release();
            }

            @Override
            public void onException(Throwable error) {
                FAILED.incrementAndGet();
                underWay.release();
            }
        };
        while (true) {
            underWay.acquire();
            producer.send(new Message(topic, body), callback);
        }
    }

    private static void report(long intervalMs) {
        ArrayDeque<long[]> counts = new ArrayDeque<>();
        Executors.newSingleThreadScheduledExecutor().scheduleAtFixedRate(() -> {
            counts.addLast(new long[] {System.nanoTime(), SENT.get()});
            if (counts.size() < COUNTS) {
                return;
            }
            long[] first = counts.removeFirst();
            long[] last = counts.getLast();
            double rate = (last[1] - first[1]) * 1e9 / (last[0] - first[0]);
            System.out.printf(
                    "Current Time: %d | Send TPS: %d | Send Failed: %d | Response Failed: 0%n",
                    System.currentTimeMillis(), (long) rate, FAILED.get());
        }, intervalMs, intervalMs, TimeUnit.MILLISECONDS);
    }

    private AsyncProducer() {}
}
