import java.lang.reflect.Method;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.TreeSet;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Reads topics in one or several ways at once and prints what comes, until SIGTERM.
 *
 * <p>Each --reader is MODE:GROUP or MODE:GROUP:TAGS, and "received" lines name it by its number.
 * push, orderly, broadcast: a push consumer with that kind of listener or model. lite: a lite pull
 * consumer that subscribes; assign: one that takes all queues itself. pull: the old pull consumer,
 * which waits at the end of each queue and commits. all: every queue from its first offset to the
 * end it has now, whatever the group has committed; a program with such readers only ends by itself.
 *
 * <p>"owns" lines name the queues of a push or orderly reader whenever they change. With --brief
 * true only the id and the place of a message are printed, and a "broken" line if its body is not
 * what its id asks for.
 */
public final class Receive {
    private static final int BATCH = 32;
    private static final int STARTS_MAX = 10;
    private static final long POLL_MS = 200;
    private static final long ERROR_MS = 100;
    private static final long WATCH_MS = 50;

    private final Options options;
    private final List<String> topics;
    private final boolean brief;
    private final AtomicInteger seen = new AtomicInteger();
    private final List<Runnable> stops = new ArrayList<>();
    private final List<Runnable> watches = new ArrayList<>();
    private final Object committing = new Object();
    private volatile boolean stopping;

    private Receive(Options options) {
        this.options = options;
        topics = options.all("topic");
        brief = Boolean.parseBoolean(options.one("brief", "false"));
    }

    public static void main(String[] arguments) throws Exception {
        Line.exitOnError();
        Options options = new Options(arguments, "namesrv", "topic", "reader", "brief");
        Receive receive = new Receive(options);
        List<String> readers = options.all("reader");
        for (int i = 0; i < readers.size(); i++) {
            receive.startAtLast(i, readers.get(i).split(":", 3));
        }
        if (receive.stops.isEmpty()) {
            receive.done();
            System.exit(0);
        }
        Runtime.getRuntime().addShutdownHook(new Thread(receive::stop));
        Line.of("ready").print();
        while (!receive.stopping) {
            receive.watches.forEach(Runnable::run);
            Thread.sleep(WATCH_MS);
        }
    }

    /** A start fails where the nameserver that the client happens to ask first is gone. */
    private void startAtLast(int reader, String[] words) throws Exception {
        for (int tries = 1; ; tries++) {
            try {
                start(reader, words);
                return;
            } catch (IllegalStateException error) {
                if (tries == STARTS_MAX) {
                    throw error;
                }
            }
        }
    }

    private void start(int reader, String[] words) throws Exception {
        String tags = words.length > 2 ? words[2] : "*";
        switch (words[0]) {
            case "push":
            case "orderly":
            case "broadcast":
                push(reader, words[0], words[1], tags);
                break;
            case "lite":
            case "assign":
                lite(reader, words[0], words[1], tags);
                break;
            case "pull":
            case "all":
                pull(reader, words[0], words[1], tags);
                break;
            default:
                throw new IllegalArgumentException("no mode " + words[0]);
        }
    }

    private void stop() {
        stopping = true;
        Leaving.quickly(() -> stops.forEach(Runnable::run));
        done();
    }

    private void done() {
        Line.of("done").put("count", seen.get()).print();
    }

    private void received(int reader, List<MessageExt> messages) {
        seen.addAndGet(messages.size());
        for (MessageExt message : messages) {
            if (!brief) {
                Described.line("received", message)
                    .put("reader", reader).put("id", Sample.id(message)).print();
                continue;
            }
            if (!Sample.isWhole(message)) {
                Described.line("broken", message).put("reader", reader).print();
            }
            Line.of("received")
                .put("reader", reader)
                .put("topic", message.getTopic())
                .put("queueId", message.getQueueId())
                .put("queueOffset", message.getQueueOffset())
                .put("id", Sample.id(message))
                .print();
        }
    }

    private static void failed(int reader, Exception error) {
        Line.of("error").put("reader", reader).put("reason", error.toString()).print();
    }

    private void push(int reader, String mode, String group, String tags) throws Exception {
        DefaultMQPushConsumer consumer = Common.told(
            new DefaultMQPushConsumer(group), options);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        for (String topic : topics) {
            consumer.subscribe(topic, tags);
        }
        if (mode.equals("orderly")) {
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
                received(reader, messages);
                return ConsumeOrderlyStatus.SUCCESS;
            });
        } else {
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                received(reader, messages);
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
        }
        if (mode.equals("broadcast")) {
            consumer.setInstanceName("reader-" + reader);
            setBroadcasting(consumer);
        }
        consumer.start();
        // The last batch's offsets are committed by the shutdown.
        stops.add(consumer::shutdown);
        watches.add(new Owned(reader, group, consumer));
    }

    /** Between 4.9 and 5 the enum has moved to another package: the setter's type tells where. */
    @SuppressWarnings({"unchecked", "rawtypes"})
    private static void setBroadcasting(DefaultMQPushConsumer consumer) throws Exception {
        Method setter = Arrays.stream(DefaultMQPushConsumer.class.getMethods())
            .filter(method -> method.getName().equals("setMessageModel")).findFirst().get();
        Class type = setter.getParameterTypes()[0];
        setter.invoke(consumer, Enum.valueOf(type, "BROADCASTING"));
    }

    /** Prints the queues that a push consumer has, whenever they are others than before. */
    private final class Owned implements Runnable {
        private final int reader;
        private final String group;
        private final DefaultMQPushConsumer consumer;
        private String before = "";

        private Owned(int reader, String group, DefaultMQPushConsumer consumer) {
            this.reader = reader;
            this.group = group;
            this.consumer = consumer;
        }

        @Override
        public void run() {
            TreeSet<String> names = new TreeSet<>();
            for (MessageQueue queue : consumer.getDefaultMQPushConsumerImpl().getRebalanceImpl()
                    .getProcessQueueTable().keySet()) {
                if (topics.contains(queue.getTopic())) {
                    names.add(queue.getTopic() + "/" + queue.getQueueId());
                }
            }
            String now = String.join(" ", names);
            if (!now.equals(before)) {
                before = now;
                Line.of("owns").put("reader", reader).put("group", group).put("queues", now).print();
            }
        }
    }

    private void lite(int reader, String mode, String group, String tags) throws Exception {
        DefaultLitePullConsumer consumer = Common.told(
            new DefaultLitePullConsumer(group), options);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        if (mode.equals("lite")) {
            for (String topic : topics) {
                consumer.subscribe(topic, tags);
            }
        }
        consumer.start();
        if (mode.equals("assign")) {
            List<MessageQueue> queues = new ArrayList<>();
            for (String topic : topics) {
                queues.addAll(consumer.fetchMessageQueues(topic));
            }
            consumer.assign(queues);
        }
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
            consumer.commitSync();
            consumer.shutdown();
        });
    }

    private void pull(int reader, String mode, String group, String tags) throws Exception {
        DefaultMQPullConsumer consumer = Common.told(
            new DefaultMQPullConsumer(group), options);
        consumer.start();
        List<MessageQueue> queues = new ArrayList<>();
        for (String topic : topics) {
            queues.addAll(consumer.fetchSubscribeMessageQueues(topic));
        }
        if (mode.equals("all")) {
            for (MessageQueue queue : queues) {
                all(reader, consumer, queue, tags);
            }
            Leaving.quickly(consumer::shutdown);
            return;
        }
        for (MessageQueue queue : queues) {
            Thread puller = new Thread(() -> follow(reader, consumer, queue, tags));
            puller.setDaemon(true);
            puller.start();
        }
        stops.add(() -> {
            // What was printed is committed first; a pull that only waits is left alone.
            synchronized (committing) {
                consumer.shutdown();
            }
        });
    }

    /** With plain pulls: a lite pull consumer breaks its own connection when a seek falls into a
     * pull. */
    private void all(int reader, DefaultMQPullConsumer consumer, MessageQueue queue, String tags)
            throws Exception {
        long offset = consumer.minOffset(queue);
        long end = consumer.maxOffset(queue);
        while (offset < end) {
            PullResult result = consumer.pull(queue, tags, offset, BATCH);
            if (result.getPullStatus() == PullStatus.FOUND) {
                received(reader, result.getMsgFoundList());
            }
            if (result.getNextBeginOffset() <= offset) {
                throw new IllegalStateException(queue + " stops at " + offset + ": " + result);
            }
            offset = result.getNextBeginOffset();
        }
    }

    /** From the committed offset on; each pull waits for messages, and what came is committed. */
    private void follow(int reader, DefaultMQPullConsumer consumer, MessageQueue queue, String tags) {
        long offset = -1;
        while (!stopping) {
            try {
                if (offset < 0) {
                    offset = Math.max(0, consumer.fetchConsumeOffset(queue, true));
                }
                PullResult result = consumer.pullBlockIfNotFound(queue, tags, offset, BATCH);
                synchronized (committing) {
                    if (result.getPullStatus() == PullStatus.FOUND) {
                        received(reader, result.getMsgFoundList());
                    }
                    offset = result.getNextBeginOffset();
                    // For the client's own commits, which come from time to time and at its end.
                    consumer.updateConsumeOffset(queue, offset);
                    consumer.getOffsetStore().updateConsumeOffsetToBroker(queue, offset, false);
                }
            } catch (Exception error) {
                if (stopping) {
                    return;
                }
                failed(reader, error);
                pause();
            }
        }
    }

    private static void pause() {
        try {
            Thread.sleep(ERROR_MS);
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
        }
    }
}
