import java.nio.charset.StandardCharsets;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Sends messages that are to come later, and prints when each of them came.
 *
 * <p>Each --send is ID:KIND:VALUE. KIND is level (1 to 18), sec, ms, at (so many ms from now, as an
 * absolute time); or back-sec, back-ms, back-at: the same, and the message is taken back at once. A
 * message that the broker refuses gives a "refused" line. A consumer of --group reads the topic
 * until SIGTERM; without --group there is none, and the program ends by itself.
 *
 * <p>Each --recall is a handle of an earlier run.
 */
public final class Delays {
    private final Options options;
    private final AtomicInteger seen = new AtomicInteger();

    private Delays(Options options) {
        this.options = options;
    }

    public static void main(String[] arguments) throws Exception {
        Line.exitOnError();
        Delays delays = new Delays(
            new Options(arguments, "namesrv", "topic", "group", "send", "recall"));
        DefaultMQPushConsumer consumer = delays.consumer();
        if (consumer != null) {
            Runtime.getRuntime().addShutdownHook(new Thread(() -> {
                Leaving.quickly(consumer::shutdown);
                Line.of("done").put("count", delays.seen.get()).print();
            }));
        }
        delays.send();
        Line.of("ready").print();
        if (consumer == null) {
            System.exit(0);
        }
        Thread.currentThread().join();
    }

    private DefaultMQPushConsumer consumer() throws Exception {
        if (options.all("group").isEmpty()) {
            return null;
        }
        DefaultMQPushConsumer consumer = Common.told(
            new DefaultMQPushConsumer(options.one("group")), options);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(options.one("topic"), "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            messages.forEach(this::received);
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        return consumer;
    }

    private void received(MessageExt message) {
        seen.incrementAndGet();
        Line.of("received")
            .put("id", new String(message.getBody(), StandardCharsets.UTF_8))
            .put("atMs", System.currentTimeMillis())
            .put("queueOffset", message.getQueueOffset())
            .put("properties", message.getProperties())
            .print();
    }

    private void send() throws Exception {
        DefaultMQProducer producer = Common.told(new DefaultMQProducer("delays"), options);
        producer.setRetryTimesWhenSendFailed(0);
        producer.start();
        for (String handle : options.all("recall")) {
            recall(producer, handle, handle);
        }
        for (String one : options.all("send")) {
            String[] words = one.split(":");
            step(producer, words[0], words[1], Long.parseLong(words[2]));
        }
        Leaving.atTheEnd(producer::shutdown);
    }

    private void step(DefaultMQProducer producer, String id, String kind, long value)
        throws Exception {
        Message message = new Message(
            options.one("topic"), "late", id, id.getBytes(StandardCharsets.UTF_8));
        long atMs = System.currentTimeMillis();
        switch (kind.replace("back-", "")) {
            case "level":
                message.setDelayTimeLevel((int) value);
                break;
            case "sec":
                message.setDelayTimeSec(value);
                break;
            case "ms":
                message.setDelayTimeMs(value);
                break;
            case "at":
                message.setDeliverTimeMs(atMs + value);
                break;
            default:
                throw new IllegalArgumentException("no kind " + kind);
        }
        SendResult result;
        try {
            result = producer.send(message);
        } catch (MQBrokerException error) {
            Line.of("refused").put("id", id).put("code", error.getResponseCode())
                .put("reason", error.getErrorMessage()).print();
            return;
        }
        Line.of("sent").put("id", id).put("atMs", atMs).put("msgId", result.getMsgId())
            .put("status", result.getSendStatus().name())
            .put("handle", result.getRecallHandle()).print();
        if (kind.startsWith("back-")) {
            recall(producer, id, result.getRecallHandle());
        }
    }

    private void recall(DefaultMQProducer producer, String id, String handle) throws Exception {
        try {
            String msgId = producer.recallMessage(options.one("topic"), handle);
            Line.of("recalled").put("id", id).put("msgId", msgId).print();
        } catch (MQBrokerException error) {
            Line.of("not recalled").put("id", id).put("code", error.getResponseCode())
                .put("reason", error.getErrorMessage()).print();
        }
    }
}
