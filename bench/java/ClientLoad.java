import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyContext;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * What the programs in bench/clients do, with RocketMQ's own client.
 *
 * <p>Options: -k sync, async, batched or consume, -n name server, -t topic, -g group, -s bytes of a
 * body, -w seconds to get warm, -m seconds to measure, -c messages that the topic holds.
 */
public final class ClientLoad {
    private static final int WINDOW = 1_000;
    private static final int BATCHED_WINDOW = 10_000;
    private static final AtomicLong DONE = new AtomicLong();
    private static volatile Throwable error;

    public static void main(String[] words) throws Exception {
        Map<String, String> options = new HashMap<>();
        for (int i = 0; i + 1 < words.length; i += 2) {
            options.put(words[i], words[i + 1]);
        }
        // Before the client's classes read it: the header's binary form, as in RocketMQ's programs.
        System.setProperty("rocketmq.serialize.type", "ROCKETMQ");
        try {
            if (options.get("-k").equals("consume")) {
                consume(options);
            } else {
                send(options);
            }
        } catch (Throwable failure) {
            failure.printStackTrace();
            System.exit(1); // the client's threads would go on
        }
        System.exit(0);
    }

    private static double seconds(Map<String, String> options, String name) {
        return Double.parseDouble(options.get(name));
    }

    private static void send(Map<String, String> options) throws Exception {
        String kind = options.get("-k");
        DefaultMQProducer producer = new DefaultMQProducer(options.get("-g"));
        producer.setNamesrvAddr(options.get("-n"));
        producer.setCompressMsgBodyOverHowmuch(Integer.MAX_VALUE);
        producer.setSendMsgTimeout(30_000);
        if (kind.equals("batched")) {
            producer.setAutoBatch(true);
            producer.batchMaxDelayMs(5);
            producer.batchMaxBytes(60 * 1024);
        }
        producer.start();
        String topic = options.get("-t");
        byte[] body = new byte[Integer.parseInt(options.get("-s"))];
        Semaphore underWay = new Semaphore(kind.equals("async") ? WINDOW : BATCHED_WINDOW);
        SendCallback callback = new SendCallback() {
            @Override
            public void onSuccess(SendResult result) {
                DONE.incrementAndGet();
                underWay.release();
            }

            @Override
            public void onException(Throwable failure) {
                error = failure;
                underWay.release();
            }
        };
        double[] phases = {seconds(options, "-w"), seconds(options, "-m")};
        for (int phase = 0; phase < phases.length; phase++) {
            long begin = System.nanoTime();
            long before = DONE.get();
            while (System.nanoTime() - begin < phases[phase] * 1e9) {
                if (kind.equals("sync")) {
                    producer.send(new Message(topic, body));
                    DONE.incrementAndGet();
                } else {
                    underWay.acquire();
                    producer.send(new Message(topic, body), callback);
                }
            }
            if (error != null) {
                throw new IllegalStateException("a send failed", error);
            }
            if (phase == 1) {
                report(DONE.get() - before, begin);
            }
        }
    }

    private static void consume(Map<String, String> options) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(options.get("-g"));
        consumer.setNamesrvAddr(options.get("-n"));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(options.get("-t"), "*");
        consumer.registerMessageListener(new MessageListenerConcurrently() {
            @Override
            public ConsumeConcurrentlyStatus consumeMessage(
                    List<MessageExt> messages, ConsumeConcurrentlyContext context) {
                DONE.addAndGet(messages.size());
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            }
        });
        consumer.start();
        long total = Long.parseLong(options.get("-c"));
        long started = 0;
        while (DONE.get() == 0) {
            Thread.sleep(1);
        }
        started = System.nanoTime();
        while (System.nanoTime() - started < seconds(options, "-w") * 1e9 && DONE.get() < total / 5) {
            Thread.sleep(1);
        }
        long begin = System.nanoTime();
        long before = DONE.get();
        while (System.nanoTime() - begin < seconds(options, "-m") * 1e9 && DONE.get() < total) {
            Thread.sleep(1);
        }
        report(DONE.get() - before, begin);
    }

    private static void report(long count, long begin) {
        double took = (System.nanoTime() - begin) / 1e9;
        System.out.printf("{\"count\": %d, \"seconds\": %f}%n", count, took);
    }

    private ClientLoad() {}
}
