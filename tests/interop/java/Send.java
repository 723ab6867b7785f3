import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Sends numbered messages and prints each result the moment it is known.
 *
 * <p>Message i of prefix P has the unique text "P-i": it is the first of its keys, its user property
 * "id" and the start of its body. It goes to topic i % topics and queue (i / topics) % queues. Every
 * third message has no tag. "failed" lines name the sends that were not acknowledged; after
 * --failures of them the program ends, so it survives the broker being killed under it.
 */
public final class Send {
    private final Options options;
    private final DefaultMQProducer producer;
    private final AtomicInteger next = new AtomicInteger();
    private final AtomicInteger failures = new AtomicInteger();

    private Send(Options options) {
        this.options = options;
        producer = new DefaultMQProducer(options.one("group", "interop-producer"));
        producer.setNamesrvAddr(options.one("namesrv"));
        producer.setRetryTimesWhenSendFailed(0);
        producer.setSendMsgTimeout(options.number("timeout-ms", 10_000));
    }

    public static void main(String[] arguments) throws Exception {
        Line.exitOnError();
        Options options = new Options(arguments, "namesrv", "group", "broker", "topic", "queues",
            "count", "prefix", "body-bytes", "threads", "timeout-ms", "failures");
        new Send(options).run();
        System.exit(0);
    }

    private void run() throws Exception {
        producer.start();
        int threads = options.number("threads", 1);
        Thread[] workers = new Thread[threads];
        for (int t = 0; t < threads; t++) {
            workers[t] = new Thread(this::work);
            workers[t].start();
        }
        for (Thread worker : workers) {
            worker.join();
        }
        producer.shutdown();
        Line.of("done").put("failures", failures.get()).print();
    }

    private void work() {
        int count = options.number("count", 1);
        int failuresMax = options.number("failures", 1);
        for (int i = next.getAndIncrement(); i < count; i = next.getAndIncrement()) {
            if (failures.get() >= failuresMax) {
                return;
            }
            send(i);
        }
    }

    private void send(int i) {
        List<String> topics = options.all("topic");
        String topic = topics.get(i % topics.size());
        int queueId = (i / topics.size()) % options.number("queues", 1);
        String id = options.one("prefix") + "-" + i;
        Line line = Line.of("failed");
        try {
            byte[] body = body(id, options.number("body-bytes", 100));
            Message message = new Message(topic, body);
            if (i % 3 != 2) {
                message.setTags(i % 3 == 0 ? "TagA" : "TagB");
            }
            message.setKeys(id + " shared-" + (i % 7));
            message.setFlag(i);
            message.putUserProperty("id", id);
            message.putUserProperty("text", "caf\u00e9 \u4e2d\u6587 \ud83d\ude00");
            SendResult result = producer.send(
                message, new MessageQueue(topic, options.one("broker"), queueId));
            line = Line.of("sent")
                .put("status", result.getSendStatus().name())
                .put("topic", topic)
                .put("queueId", result.getMessageQueue().getQueueId())
                .put("queueOffset", result.getQueueOffset())
                .put("msgId", result.getMsgId())
                .put("offsetMsgId", result.getOffsetMsgId())
                .put("flag", i)
                .put("bodySha256", Described.sha256(body));
        } catch (Exception error) {
            failures.incrementAndGet();
            line.put("reason", error.toString());
        }
        line.put("id", id).print();
    }

    /** Text that is as long as asked, starts with the id and compresses like text. */
    private static byte[] body(String id, int sizeBytes) {
        StringBuilder text = new StringBuilder(id);
        for (int i = 0; text.length() < sizeBytes; i++) {
            text.append(' ').append(id).append(':').append(i);
        }
        text.setLength(Math.max(sizeBytes, id.length()));
        return text.toString().getBytes(StandardCharsets.US_ASCII);
    }
}
