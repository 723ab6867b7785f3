import java.nio.charset.StandardCharsets;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.selector.SelectMessageQueueByHash;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Messages that have to be read in the order of their keys.
 *
 * <p>--role send: --count messages for each of --shards keys, each key in the queue that its hash
 * says. --role read: a member of --group that takes --work-ms for each message, until SIGTERM; it
 * prints when it began with a message and when it was done.
 */
public final class Orders {
    private Orders() {
    }

    public static void main(String[] arguments) throws Exception {
        Line.exitOnError();
        Options options = new Options(
            arguments, "namesrv", "role", "topic", "group", "shards", "count", "work-ms", "pause-ms");
        if (options.one("role").equals("send")) {
            send(options);
            System.exit(0);
        }
        read(options);
    }

    private static void send(Options options) throws Exception {
        DefaultMQProducer producer = Common.told(new DefaultMQProducer("orders"), options);
        producer.start();
        int shards = options.number("shards", 1);
        for (int number = 0; number < options.number("count", 1); number++) {
            for (int shard = 0; shard < shards; shard++) {
                String id = shard + "-" + number;
                Message message = new Message(
                    options.one("topic"), "order", id, id.getBytes(StandardCharsets.UTF_8));
                SendResult result = producer.send(
                    message, new SelectMessageQueueByHash(), "shard-" + shard);
                Line.of("sent").put("id", id)
                    .put("queueId", result.getMessageQueue().getQueueId()).print();
            }
            Thread.sleep(options.number("pause-ms", 0));
        }
        Leaving.quickly(producer::shutdown);
        Line.of("done").print();
    }

    private static void read(Options options) throws Exception {
        DefaultMQPushConsumer consumer = Common.told(
            new DefaultMQPushConsumer(options.one("group")), options);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setConsumeMessageBatchMaxSize(1);
        consumer.subscribe(options.one("topic"), "*");
        int workMs = options.number("work-ms", 0);
        consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
            for (MessageExt message : messages) {
                say("begin", message);
                try {
                    Thread.sleep(workMs);
                } catch (InterruptedException error) {
                    Thread.currentThread().interrupt();
                }
                say("end", message);
            }
            return ConsumeOrderlyStatus.SUCCESS;
        });
        consumer.start();
        Runtime.getRuntime().addShutdownHook(new Thread(() -> {
            Leaving.quickly(consumer::shutdown);
            Line.of("done").print();
        }));
        Line.of("ready").print();
        Thread.currentThread().join();
    }

    private static void say(String event, MessageExt message) {
        Line.of(event)
            .put("id", message.getKeys())
            .put("queueId", message.getQueueId())
            .put("queueOffset", message.getQueueOffset())
            .put("nowMs", System.currentTimeMillis())
            .print();
    }
}
