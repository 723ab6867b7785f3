import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Sends single messages with properties of any kind, and reads topics until SIGTERM.
 *
 * <p>Each --send is TOPIC BODY NAME=VALUE..., with tabs between. Names keys, tags, priority, delay
 * (a level), queue and way stand for what the client has a method for; others are user properties. A
 * way is sync, oneway, commit or rollback (of a transaction), or patient: until the broker is not
 * busy. Each --batch is TOPIC KEYS..., a message for each key. What is sent gives a "sent" line, or a
 * "refused" one with the broker's code and remark.
 * Each --reader is GROUP:TOPIC, a push consumer. Without one the program ends by itself.
 */
public final class Features implements TransactionListener {
    private static final int SEND_TIMEOUT_MS = 20_000;
    private static final int BUSY = 2;
    private static final int TRIES_MAX = 300;
    private static final long TRY_MS = 100;

    private final Options options;
    private final TransactionMQProducer producer;
    private final List<DefaultMQPushConsumer> consumers = new ArrayList<>();

    private Features(Options options) {
        this.options = options;
        producer = Common.told(new TransactionMQProducer("feature-senders"), options);
        producer.setTransactionListener(this);
        producer.setSendMsgTimeout(SEND_TIMEOUT_MS);
        producer.setRetryTimesWhenSendFailed(0);
    }

    public static void main(String[] arguments) throws Exception {
        Line.exitOnError();
        new Features(new Options(arguments, "namesrv", "broker", "send", "batch", "reader")).run();
    }

    private void run() throws Exception {
        producer.start();
        for (String send : options.all("send")) {
            String[] words = send.split("\t");
            tell(words[1], send.endsWith("\tway=patient") ? TRIES_MAX : 1, () -> send(words));
        }
        for (String batch : options.all("batch")) {
            String[] words = batch.split("\t");
            tell(words[1], 1, () -> sendBatch(words));
        }
        for (String reader : options.all("reader")) {
            String[] words = reader.split(":");
            consume(words[0], words[1]);
        }
        if (consumers.isEmpty()) {
            stop();
            System.exit(0);
        }
        Runtime.getRuntime().addShutdownHook(new Thread(this::stop));
        Line.of("ready").print();
        Thread.currentThread().join();
    }

    private void stop() {
        Leaving.quickly(() -> consumers.forEach(DefaultMQPushConsumer::shutdown));
        Leaving.quickly(producer::shutdown);
        Line.of("done").print();
    }

    private interface Sends {
        SendResult send() throws Exception;
    }

    private static void tell(String name, int tries, Sends sends) throws Exception {
        for (int i = 1; ; i++) {
            MQBrokerException error;
            try {
                sent(name, sends.send());
                return;
            } catch (MQBrokerException refusal) {
                error = refusal;
            } catch (MQClientException failure) {
                if (!(failure.getCause() instanceof MQBrokerException)) {
                    throw failure;
                }
                error = (MQBrokerException) failure.getCause();
            }
            if (i == tries || error.getResponseCode() != BUSY) {
                Line.of("refused").put("body", name).put("code", error.getResponseCode())
                    .put("remark", error.getErrorMessage()).print();
                return;
            }
            Thread.sleep(TRY_MS);
        }
    }

    private static void sent(String name, SendResult result) {
        Line line = Line.of("sent").put("body", name);
        if (result != null) {
            line.put("status", result.getSendStatus().name())
                .put("msgId", result.getMsgId())
                .put("offsetMsgId", result.getOffsetMsgId())
                .put("queueId", result.getMessageQueue().getQueueId())
                .put("queueOffset", result.getQueueOffset())
                .put("transactionId", result.getTransactionId());
        }
        line.print();
    }

    private SendResult send(String[] words) throws Exception {
        Message message = new Message(words[0], words[1].getBytes(StandardCharsets.UTF_8));
        String way = "sync";
        int queue = -1;
        for (int i = 2; i < words.length; i++) {
            String[] pair = words[i].split("=", 2);
            switch (pair[0]) {
                case "keys":
                    message.setKeys(pair[1]);
                    break;
                case "tags":
                    message.setTags(pair[1]);
                    break;
                case "priority":
                    message.setPriority(Integer.parseInt(pair[1]));
                    break;
                case "delay":
                    message.setDelayTimeLevel(Integer.parseInt(pair[1]));
                    break;
                case "queue":
                    queue = Integer.parseInt(pair[1]);
                    break;
                case "way":
                    way = pair[1];
                    break;
                default:
                    message.putUserProperty(pair[0], pair[1]);
            }
        }
        switch (way) {
            case "oneway":
                producer.sendOneway(message);
                return null;
            case "commit":
            case "rollback":
                return producer.sendMessageInTransaction(message, way);
            default:
                return queue < 0 ? producer.send(message)
                    : producer.send(message, new MessageQueue(words[0], options.one("broker"), queue));
        }
    }

    private SendResult sendBatch(String[] words) throws Exception {
        List<Message> messages = new ArrayList<>();
        for (int i = 1; i < words.length; i++) {
            messages.add(new Message(words[0], "", words[i],
                ("in-batch-" + words[i]).getBytes(StandardCharsets.UTF_8)));
        }
        return producer.send(messages);
    }

    private void consume(String group, String topic) throws Exception {
        DefaultMQPushConsumer consumer = Common.told(new DefaultMQPushConsumer(group), options);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setPersistConsumerOffsetInterval(500);
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                Line.of("received")
                    .put("group", group)
                    .put("topic", topic)
                    .put("queueId", message.getQueueId())
                    .put("queueOffset", message.getQueueOffset())
                    .put("text", new String(message.getBody(), StandardCharsets.UTF_8))
                    .print();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        consumers.add(consumer);
    }

    @Override
    public LocalTransactionState executeLocalTransaction(Message message, Object way) {
        return "commit".equals(way)
            ? LocalTransactionState.COMMIT_MESSAGE : LocalTransactionState.ROLLBACK_MESSAGE;
    }

    @Override
    public LocalTransactionState checkLocalTransaction(MessageExt message) {
        return LocalTransactionState.UNKNOW;
    }
}
