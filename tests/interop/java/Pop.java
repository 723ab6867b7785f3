import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.TreeMap;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Consumers that let the broker divide the queues, and so pop where the broker says so; until SIGTERM.
 *
 * <p>Each --reader is GROUP:TOPIC:TAGS. Each --send is TOPIC:ID:TAG:RULE: by the rule "ok" a message
 * succeeds, by a number it fails while it was tried again less than so many times, by "hang" whoever
 * gets it in a program with --hang true never comes back.
 */
public final class Pop {
    private static final long INVISIBLE_MS = 5_000;

    private final Options options;
    private final List<DefaultMQPushConsumer> consumers = new ArrayList<>();

    private Pop(Options options) {
        this.options = options;
    }

    public static void main(String[] arguments) throws Exception {
        Line.exitOnError();
        Pop pop = new Pop(new Options(arguments, "namesrv", "reader", "send", "hang"));
        List<String> readers = pop.options.all("reader");
        for (int i = 0; i < readers.size(); i++) {
            pop.start(i, readers.get(i).split(":"));
        }
        Runtime.getRuntime().addShutdownHook(new Thread(pop::stop));
        pop.send();
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
        DefaultMQProducer producer = Common.told(new DefaultMQProducer("popping"), options);
        producer.start();
        for (String one : options.all("send")) {
            String[] words = one.split(":");
            Message message = new Message(
                words[0], words[2], words[1], words[1].getBytes(StandardCharsets.UTF_8));
            message.putUserProperty("rule", words[3]);
            producer.send(message);
        }
        Leaving.atTheEnd(producer::shutdown);
    }

    private void start(int reader, String[] words) throws Exception {
        DefaultMQPushConsumer consumer = Common.told(new DefaultMQPushConsumer(words[0]), options);
        consumer.setInstanceName("reader-" + reader);
        consumer.setClientRebalance(false);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setPopInvisibleTime(INVISIBLE_MS);
        consumer.setPopBatchNums(4);
        consumer.setConsumeMessageBatchMaxSize(1);
        consumer.subscribe(words[1], words[2]);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) ->
            consume(reader, words[0], messages.get(0)));
        consumer.start();
        consumers.add(consumer);
    }

    private ConsumeConcurrentlyStatus consume(int reader, String group, MessageExt message) {
        String rule = message.getUserProperty("rule");
        Line.of("received")
            .put("reader", reader)
            .put("group", group)
            .put("id", message.getKeys())
            .put("topic", message.getTopic())
            .put("queue", message.getQueueId())
            .put("times", message.getReconsumeTimes())
            .put("nowMs", System.currentTimeMillis())
            .put("properties", new TreeMap<>(message.getProperties()))
            .print();
        if (rule.equals("hang")) {
            while (options.one("hang", "false").equals("true")) {
                try {
                    Thread.sleep(1_000);
                } catch (InterruptedException ignored) {
                    // Whoever waits for this one waits in vain.
                }
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        }
        int fails = rule.equals("ok") ? 0 : Integer.parseInt(rule);
        return message.getReconsumeTimes() < fails
            ? ConsumeConcurrentlyStatus.RECONSUME_LATER
            : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
    }
}
