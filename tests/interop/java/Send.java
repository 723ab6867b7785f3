import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Sends numbered messages and prints each result the moment it is known.
 *
 * <p>Step i of prefix P sends message "P-i" in the mode i % modes of --mode: sync, async, oneway, or
 * batch, which sends --batch messages "P-i.k". It goes to topic i % topics and to queue
 * (i / topics) % queues; with --queues 0 the client chooses the queue.
 *
 * <p>"sent" lines name what was acknowledged, "oneway" lines what was only handed to the network,
 * "failed" lines what was not acknowledged. After --failures of them the program ends, so it
 * survives the broker being killed under it; with --retry true it tries until it succeeds instead.
 * SIGTERM ends it after the sends that are under way.
 */
public final class Send {
    private static final int IN_FLIGHT_MAX = 32;
    private static final long RETRY_MS = 50;
    private static final long STOP_S = 30;

    private final Options options;
    private final List<String> modes;
    private final int queues;
    private final boolean retry;
    private final boolean brief;
    private final DefaultMQProducer producer;
    private final AtomicInteger next = new AtomicInteger();
    private final AtomicInteger failures = new AtomicInteger();
    private final Semaphore inFlight = new Semaphore(IN_FLIGHT_MAX);
    private final ScheduledExecutorService timer = Executors.newSingleThreadScheduledExecutor();
    private final CountDownLatch ended = new CountDownLatch(1);
    private volatile boolean stopping;
    private long startNs;

    private Send(Options options) {
        this.options = options;
        modes = options.all("mode").isEmpty() ? List.of("sync") : options.all("mode");
        queues = options.number("queues", 1);
        retry = Boolean.parseBoolean(options.one("retry", "false"));
        brief = Boolean.parseBoolean(options.one("brief", "false"));
        producer = Common.told(
            new DefaultMQProducer(options.one("group", "interop-producer")), options);
        producer.setRetryTimesWhenSendFailed(0);
        producer.setRetryTimesWhenSendAsyncFailed(0);
        producer.setSendMsgTimeout(options.number("timeout-ms", 30_000));
    }

    public static void main(String[] arguments) throws Exception {
        Line.exitOnError();
        Send send = new Send(new Options(arguments, "namesrv", "group", "broker", "topic", "queues",
            "count", "prefix", "body-bytes", "threads", "timeout-ms", "failures", "mode", "batch",
            "per-second", "retry", "brief"));
        Runtime.getRuntime().addShutdownHook(new Thread(send::stop));
        send.run();
        System.exit(0);
    }

    private void stop() {
        stopping = true;
        try {
            ended.await(STOP_S, TimeUnit.SECONDS);
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
        }
    }

    private void run() throws Exception {
        producer.start();
        startNs = System.nanoTime();
        Thread[] workers = new Thread[options.number("threads", 1)];
        for (int t = 0; t < workers.length; t++) {
            workers[t] = new Thread(this::work);
            workers[t].start();
        }
        for (Thread worker : workers) {
            worker.join();
        }
        inFlight.acquire(IN_FLIGHT_MAX);
        timer.shutdown();
        Leaving.quickly(producer::shutdown);
        Line.of("done").put("failures", failures.get()).print();
        ended.countDown();
    }

    private void work() {
        int count = options.number("count", 1);
        int failuresMax = options.number("failures", 1);
        try {
            for (int i = next.getAndIncrement(); i < count; i = next.getAndIncrement()) {
                pace(i);
                if (stopping || (!retry && failures.get() >= failuresMax)) {
                    return;
                }
                step(i);
            }
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
        }
    }

    /** Step i begins i / per-second after the first one; what is late is not made up for. */
    private void pace(int i) throws InterruptedException {
        int perSecond = options.number("per-second", 0);
        if (perSecond > 0) {
            long earlyNs = startNs + i * 1_000_000_000L / perSecond - System.nanoTime();
            if (earlyNs > 0) {
                TimeUnit.NANOSECONDS.sleep(earlyNs);
            }
        }
    }

    private void step(int i) throws InterruptedException {
        List<String> topics = options.all("topic");
        String topic = topics.get(i % topics.size());
        MessageQueue queue = queues == 0 ? null : new MessageQueue(
            topic, options.one("broker"), (i / topics.size()) % queues);
        String id = options.one("prefix") + "-" + i;
        int bodyBytes = options.number("body-bytes", 100);
        String mode = modes.get(i % modes.size());
        if (mode.equals("batch")) {
            int batch = options.number("batch", 8);
            List<Message> messages = new ArrayList<>();
            for (int k = 0; k < batch; k++) {
                messages.add(Sample.message(topic, id + "." + k, i * batch + k, bodyBytes));
            }
            waiting(messages, () -> queue == null
                ? producer.send(messages) : producer.send(messages, queue));
            return;
        }
        Message message = Sample.message(topic, id, i, bodyBytes);
        switch (mode) {
            case "sync":
                waiting(List.of(message), () -> queue == null
                    ? producer.send(message) : producer.send(message, queue));
                break;
            case "async":
                inFlight.acquire();
                async(message, queue);
                break;
            case "oneway":
                oneway(message, queue);
                break;
            default:
                throw new IllegalArgumentException("no mode " + mode);
        }
    }

    private interface Attempt {
        SendResult send() throws Exception;
    }

    private void waiting(List<Message> messages, Attempt attempt) throws InterruptedException {
        while (true) {
            try {
                sent(messages, attempt.send());
                return;
            } catch (Exception error) {
                failed(messages, error);
            }
            if (!retry || stopping) {
                return;
            }
            Thread.sleep(RETRY_MS);
        }
    }

    private void async(Message message, MessageQueue queue) {
        SendCallback callback = new SendCallback() {
            @Override
            public void onSuccess(SendResult result) {
                sent(List.of(message), result);
                inFlight.release();
            }

            @Override
            public void onException(Throwable error) {
                asyncFailed(message, queue, error);
            }
        };
        try {
            if (queue == null) {
                producer.send(message, callback);
            } else {
                producer.send(message, queue, callback);
            }
        } catch (Exception error) {
            asyncFailed(message, queue, error);
        }
    }

    private void asyncFailed(Message message, MessageQueue queue, Throwable error) {
        failed(List.of(message), error);
        if (retry && !stopping) {
            timer.schedule(() -> async(message, queue), RETRY_MS, TimeUnit.MILLISECONDS);
        } else {
            inFlight.release();
        }
    }

    private void oneway(Message message, MessageQueue queue) {
        try {
            if (queue == null) {
                producer.sendOneway(message);
            } else {
                producer.sendOneway(message, queue);
            }
            Line.of("oneway").put("id", Sample.id(message)).print();
        } catch (Exception error) {
            failed(List.of(message), error);
        }
    }

    /** Messages of a batch have offsets in a row; their ids come in one text, with commas. */
    private void sent(List<Message> messages, SendResult result) {
        String[] unique = result.getMsgId().split(",");
        String[] offsetIds = String.valueOf(result.getOffsetMsgId()).split(",");
        for (int k = 0; k < messages.size(); k++) {
            Message message = messages.get(k);
            Line line = Line.of("sent").put("status", result.getSendStatus().name());
            if (!brief) {
                line.put("topic", message.getTopic())
                    .put("queueId", result.getMessageQueue().getQueueId())
                    .put("queueOffset", result.getQueueOffset() + k)
                    .put("msgId", unique[k])
                    .put("offsetMsgId", offsetIds[k])
                    .put("flag", message.getFlag())
                    .put("bodySha256", Described.sha256(message.getBody()));
            }
            line.put("id", Sample.id(message)).print();
        }
    }

    private void failed(List<Message> messages, Throwable error) {
        failures.incrementAndGet();
        for (Message message : messages) {
            Line.of("failed").put("id", Sample.id(message)).put("reason", error.toString()).print();
        }
    }
}
