import java.util.ArrayList;
import java.util.List;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.exception.RemotingException;
import org.apache.rocketmq.remoting.protocol.heartbeat.MessageModel;

/**
 * Sends numbered messages and reads them by filters in several ways at once, until SIGTERM.
 *
 * <p>Each --reader is MODE:GROUP:KIND:EXPRESSION with KIND tag or sql; "received" lines name the
 * reader by its number and the message by its property n. push, broadcast: a push consumer of that
 * model; again: a push consumer that asks for each message a second time; lite: a lite pull consumer;
 * pull: plain pulls of all that is there. Where a reader cannot start there is a "refused" line.
 * Half of the --count messages are sent one by one before the readers start, half in batches after.
 */
public final class Filter {
    private static final int BATCH = 16;
    private static final long POLL_MS = 200;
    private static final int TRIES_MAX = 100;
    private static final int SEND_MS = 30_000;

    private final Options options;
    private final String topic;
    private final List<Runnable> stops = new ArrayList<>();
    private final List<Runnable> pulls = new ArrayList<>();
    private volatile boolean stopping;

    private Filter(Options options) {
        this.options = options;
        topic = options.one("topic");
    }

    public static void main(String[] arguments) throws Exception {
        Line.exitOnError();
        Options options = new Options(arguments, "namesrv", "topic", "reader", "count");
        new Filter(options).run(options.number("count", 100));
    }

    private void run(int count) throws Exception {
        DefaultMQProducer producer = Common.told(new DefaultMQProducer("filter-senders"), options);
        producer.setSendMsgTimeout(SEND_MS);
        producer.start();
        for (int i = 0; i < count / 2; i++) {
            producer.send(message(i));
        }
        List<String> readers = options.all("reader");
        for (int i = 0; i < readers.size(); i++) {
            String[] words = readers.get(i).split(":", 4);
            try {
                start(i, words, words[2].equals("sql")
                    ? MessageSelector.bySql(words[3]) : MessageSelector.byTag(words[3]));
            } catch (MQClientException error) {
                Line.of("refused").put("reader", i).put("code", error.getResponseCode())
                    .put("reason", String.valueOf(error.getErrorMessage())).print();
            }
        }
        for (int i = count / 2; i < count; i += BATCH) {
            List<Message> batch = new ArrayList<>();
            for (int k = i; k < Math.min(count, i + BATCH); k++) {
                batch.add(message(k));
            }
            producer.send(batch);
        }
        pulls.forEach(Runnable::run);
        Line.of("ready").print();
        Runtime.getRuntime().addShutdownHook(new Thread(() -> {
            stopping = true;
            Leaving.quickly(() -> stops.forEach(Runnable::run));
            Leaving.quickly(producer::shutdown);
            Line.of("done").print();
        }));
        Thread.currentThread().join();
    }

    /** Number i: a tag of three, a colour but for every fifth, and its number. */
    private Message message(int i) {
        Message message = new Message(topic, "Tag" + (char) ('A' + i % 3), ("body-" + i).getBytes());
        message.putUserProperty("n", Integer.toString(i));
        if (i % 5 != 0) {
            message.putUserProperty("colour", i % 2 == 0 ? "red" : "blue");
        }
        return message;
    }

    private void start(int reader, String[] words, MessageSelector selector) throws Exception {
        switch (words[0]) {
            case "push":
            case "broadcast":
            case "again":
                push(reader, words[0], words[1], selector);
                break;
            case "lite":
                lite(reader, words[1], selector);
                break;
            case "pull":
                pull(reader, words[1], selector);
                break;
            default:
                throw new IllegalArgumentException("no mode " + words[0]);
        }
    }

    private static void received(int reader, List<MessageExt> messages) {
        for (MessageExt message : messages) {
            Line.of("received")
                .put("reader", reader)
                .put("n", Integer.parseInt(message.getUserProperty("n")))
                .put("times", message.getReconsumeTimes())
                .print();
        }
    }

    private void push(int reader, String mode, String group, MessageSelector selector)
            throws Exception {
        DefaultMQPushConsumer consumer = Common.told(new DefaultMQPushConsumer(group), options);
        consumer.setInstanceName("filter-" + reader);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setMessageModel(
            mode.equals("broadcast") ? MessageModel.BROADCASTING : MessageModel.CLUSTERING);
        consumer.subscribe(topic, selector);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            received(reader, messages);
            if (mode.equals("again") && messages.get(0).getReconsumeTimes() == 0) {
                context.setDelayLevelWhenNextConsume(1);
                return ConsumeConcurrentlyStatus.RECONSUME_LATER;
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        stops.add(consumer::shutdown);
    }

    private void lite(int reader, String group, MessageSelector selector) throws Exception {
        DefaultLitePullConsumer consumer = Common.told(new DefaultLitePullConsumer(group), options);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, selector);
        consumer.start();
        Thread poller = new Thread(() -> {
            while (!stopping) {
                received(reader, consumer.poll(POLL_MS));
            }
        });
        poller.start();
        stops.add(() -> {
            try {
                poller.join();
            } catch (InterruptedException error) {
                Thread.currentThread().interrupt();
            }
            consumer.shutdown();
        });
    }

    /** When everything is sent: every queue from its first offset to its end. */
    private void pull(int reader, String group, MessageSelector selector) throws Exception {
        DefaultMQPullConsumer consumer = Common.told(new DefaultMQPullConsumer(group), options);
        consumer.start();
        stops.add(consumer::shutdown);
        pulls.add(() -> {
            try {
                for (MessageQueue queue : consumer.fetchSubscribeMessageQueues(topic)) {
                    long end = consumer.maxOffset(queue);
                    for (long offset = 0; offset < end; ) {
                        offset = pulled(reader, consumer, queue, selector, offset);
                    }
                }
            } catch (Exception error) {
                Line.of("error").put("reader", reader).put("reason", error.toString()).print();
            }
        });
    }

    /**
     * One pull, and where the next one begins. A client that has not had a broker's heartbeat yet
     * takes it for one that knows no SQL; and on a busy machine an answer may come too late.
     */
    private static long pulled(int reader, DefaultMQPullConsumer consumer, MessageQueue queue,
            MessageSelector selector, long offset) throws Exception {
        for (int tries = 1; ; tries++) {
            try {
                PullResult result = consumer.pull(queue, selector, offset, 32);
                if (result.getPullStatus() == PullStatus.FOUND) {
                    received(reader, result.getMsgFoundList());
                }
                return result.getNextBeginOffset();
            } catch (RemotingException | MQClientException error) {
                if (tries == TRIES_MAX) {
                    throw error;
                }
                Thread.sleep(POLL_MS);
            }
        }
    }
}
