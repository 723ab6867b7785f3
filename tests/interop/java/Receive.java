import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Prints messages until all have come, or --timeout-s have passed.
 *
 * <p>--mode all: every queue of the topics from its first offset to the end it has now, whatever the
 * group has committed. --mode push: as a member of --group, from its
 * committed offsets, with the tag expression --tags, until --count messages have come.
 */
public final class Receive {
    private static final int BATCH = 32;

    private final Options options;
    private final int count;
    private final long deadlineNs;

    private Receive(Options options) {
        this.options = options;
        count = options.number("count", Integer.MAX_VALUE);
        deadlineNs = System.nanoTime() + options.number("timeout-s", 30) * 1_000_000_000L;
    }

    public static void main(String[] arguments) throws Exception {
        Line.exitOnError();
        Options options = new Options(
            arguments, "namesrv", "group", "topic", "tags", "mode", "count", "timeout-s");
        Receive receive = new Receive(options);
        int seen = options.one("mode", "all").equals("push") ? receive.push() : receive.all();
        Line.of("done").put("count", seen).print();
        System.exit(0);
    }

    /** One queue after the other with plain pulls: a lite pull consumer breaks its own
     * connection when a seek falls into a pull. */
    private int all() throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer(options.one("group"));
        consumer.setNamesrvAddr(options.one("namesrv"));
        consumer.start();
        int seen = 0;
        for (String topic : options.all("topic")) {
            for (MessageQueue queue : consumer.fetchSubscribeMessageQueues(topic)) {
                seen += all(consumer, queue);
            }
        }
        consumer.shutdown();
        return seen;
    }

    private int all(DefaultMQPullConsumer consumer, MessageQueue queue) throws Exception {
        long offset = consumer.minOffset(queue);
        long end = consumer.maxOffset(queue);
        int seen = 0;
        while (offset < end && System.nanoTime() < deadlineNs) {
            PullResult result = consumer.pull(queue, "*", offset, BATCH);
            if (result.getPullStatus() == PullStatus.FOUND) {
                for (MessageExt message : result.getMsgFoundList()) {
                    Described.print("received", message);
                    seen++;
                }
            }
            if (result.getNextBeginOffset() <= offset) {
                throw new IllegalStateException(queue + " stops at " + offset + ": " + result);
            }
            offset = result.getNextBeginOffset();
        }
        return seen;
    }

    private int push() throws Exception {
        AtomicInteger seen = new AtomicInteger();
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(options.one("group"));
        consumer.setNamesrvAddr(options.one("namesrv"));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        for (String topic : options.all("topic")) {
            consumer.subscribe(topic, options.one("tags", "*"));
        }
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                try {
                    Described.print("received", message);
                } catch (Exception error) {
                    Line.of("error").put("reason", error.toString()).print();
                }
                seen.incrementAndGet();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        while (seen.get() < count && System.nanoTime() < deadlineNs) {
            Thread.sleep(50);
        }
        // The last batch's offsets are committed by the shutdown.
        consumer.shutdown();
        return seen.get();
    }
}
