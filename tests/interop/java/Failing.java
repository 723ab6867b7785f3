import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Consumers that fail with messages as often as the messages say, until SIGTERM.
 *
 * <p>Each --reader is MODE:GROUP:TOPIC:MAX:LEVEL. MODE is push or orderly, MAX the number of tries
 * (-1: the client's default), LEVEL the delay level that a failed message comes again after.
 *
 * <p>Each --send is TOPIC:ID:RULE:N, sent to queue 0 once all readers have started. By the rule
 * "times" a message fails while it was tried again less than N times, by "deliveries" while this
 * program has been given it less than N times before.
 */
public final class Failing {
    private static final long PAUSE_MS = 100;

    private final Options options;
    private final List<DefaultMQPushConsumer> consumers = new ArrayList<>();
    private final Map<String, AtomicInteger> deliveries = new ConcurrentHashMap<>();

    private Failing(Options options) {
        this.options = options;
    }

    public static void main(String[] arguments) throws Exception {
        Line.exitOnError();
        Options options = new Options(arguments, "namesrv", "reader", "send", "broker");
        Failing failing = new Failing(options);
        List<String> readers = options.all("reader");
        for (int i = 0; i < readers.size(); i++) {
            failing.start(i, readers.get(i).split(":"));
        }
        Runtime.getRuntime().addShutdownHook(new Thread(failing::stop));
        failing.send();
        Line.of("ready").print();
        Thread.currentThread().join();
    }

    private void stop() {
        Leaving.quickly(() -> consumers.forEach(DefaultMQPushConsumer::shutdown));
        Line.of("done").print();
    }

    private void send() throws Exception {
        if (options.all("send").isEmpty()) {
            return;
        }
        DefaultMQProducer producer = Common.told(new DefaultMQProducer("failing"), options);
        producer.start();
        for (String one : options.all("send")) {
            String[] words = one.split(":");
            Message message = new Message(
                words[0], "failing", words[1], words[1].getBytes(StandardCharsets.UTF_8));
            message.putUserProperty("rule", words[2]);
            message.putUserProperty("count", words[3]);
            producer.send(message, new MessageQueue(words[0], options.one("broker"), 0));
        }
        Leaving.atTheEnd(producer::shutdown);
    }

    private void start(int reader, String[] words) throws Exception {
        DefaultMQPushConsumer consumer = Common.told(new DefaultMQPushConsumer(words[1]), options);
        consumer.setInstanceName("reader-" + reader);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setMaxReconsumeTimes(Integer.parseInt(words[3]));
        consumer.setConsumeMessageBatchMaxSize(1);
        consumer.subscribe(words[2], "*");
        int level = Integer.parseInt(words[4]);
        if (words[0].equals("orderly")) {
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
                context.setSuspendCurrentQueueTimeMillis(PAUSE_MS);
                return fails(reader, words[1], messages.get(0))
                    ? ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT
                    : ConsumeOrderlyStatus.SUCCESS;
            });
        } else {
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                context.setDelayLevelWhenNextConsume(level);
                return fails(reader, words[1], messages.get(0))
                    ? ConsumeConcurrentlyStatus.RECONSUME_LATER
                    : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
        }
        consumer.start();
        consumers.add(consumer);
    }

    /** Whether this delivery is to fail; it is printed first. */
    private boolean fails(int reader, String group, MessageExt message) {
        String key = group + " " + message.getKeys();
        int before = deliveries.computeIfAbsent(key, k -> new AtomicInteger()).getAndIncrement();
        int count = Integer.parseInt(message.getUserProperty("count"));
        boolean byTimes = message.getUserProperty("rule").equals("times");
        boolean fails = (byTimes ? message.getReconsumeTimes() : before) < count;
        Line.of("received")
            .put("reader", reader)
            .put("group", group)
            .put("id", message.getKeys())
            .put("topic", message.getTopic())
            .put("queueOffset", message.getQueueOffset())
            .put("times", message.getReconsumeTimes())
            .put("storeMs", message.getStoreTimestamp())
            .put("nowMs", System.currentTimeMillis())
            .put("msgId", message.getMsgId())
            .put("fails", fails ? "true" : "false")
            .put("properties", new TreeMap<>(message.getProperties()))
            .print();
        return fails;
    }
}
