import java.io.ByteArrayOutputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Callable;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.regex.Pattern;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.store.ReadOffsetType;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.impl.consumer.DefaultMQPushConsumerImpl;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/**
 * Runs mqadmin commands one after the other in one process, and gives each one's output.
 *
 * <p>Each --command is an mqadmin command line, its words separated by tabs; --namesrv is added to
 * it. It gives one "command" line with what was printed to standard output and to standard error.
 * Words in braces, {offsetId} {uniqueKey} {clientId} {now}, stand for what the programs below know.
 *
 * <p>Lines that begin with @ are not mqadmin's: they are the clients that commands look at.
 * @produce GROUP TOPIC QUEUE COUNT sends messages and stays connected; @consume GROUP TOPIC QUEUES
 * starts a push consumer and waits until it has so many queues; @received GROUP COUNT waits until so
 * many came since the last time, and then as @level GROUP does: until all that there is was read,
 * and the broker knows that.
 *
 * <p>A query that got no answer in time, or found no message, is asked again: on a busy machine
 * mqadmin gives up after few seconds, and a broker may be late with its index of keys.
 */
public final class Admin {
    private static final long WAIT_S = 120;
    private static final long POLL_MS = 20;
    private static final Pattern PASSING = Pattern.compile(
        "Remoting(Timeout|SendRequest|Connect|TooMuchRequest)Exception|but no message");

    private final String nameserver;
    private final Map<String, String> known = new HashMap<>();
    private final Map<String, AtomicInteger> received = new HashMap<>();
    private final List<DefaultMQProducer> producers = new ArrayList<>();
    private final Map<String, DefaultMQPushConsumer> consumers = new HashMap<>();

    private Admin(String nameserver) {
        this.nameserver = nameserver;
    }

    public static void main(String[] arguments) throws Exception {
        Line.exitOnError();
        Options options = new Options(arguments, "namesrv", "command");
        Admin admin = new Admin(options.one("namesrv"));
        for (String command : options.all("command")) {
            admin.run(command.split("\t"));
        }
        admin.stop();
        System.exit(0);
    }

    private void run(String[] words) throws Exception {
        known.put("now", Long.toString(System.currentTimeMillis()));
        for (int i = 0; i < words.length; i++) {
            for (Map.Entry<String, String> entry : known.entrySet()) {
                words[i] = words[i].replace("{" + entry.getKey() + "}", entry.getValue());
            }
        }
        switch (words[0]) {
            case "@produce":
                produce(words[1], words[2], Integer.parseInt(words[3]), Integer.parseInt(words[4]));
                break;
            case "@consume":
                consume(words[1], words[2], Integer.parseInt(words[3]));
                break;
            case "@received":
                awaitMessages(words[1], Integer.parseInt(words[2]));
                break;
            case "@level":
                awaitLevel(words[1]);
                break;
            default:
                command(words);
        }
    }

    private void command(String[] words) throws Exception {
        String[] full = new String[words.length + 2];
        System.arraycopy(words, 0, full, 0, words.length);
        full[words.length] = "-n";
        full[words.length + 1] = nameserver;
        String[] printed = printedBy(full);
        for (long end = System.nanoTime() + TimeUnit.SECONDS.toNanos(WAIT_S);
                words[0].startsWith("query") && PASSING.matcher(printed[1]).find()
                    && System.nanoTime() < end; ) {
            Thread.sleep(POLL_MS);
            printed = printedBy(full);
        }
        Line.of("command")
            .put("name", words[0])
            .put("output", printed[0])
            .put("errors", printed[1])
            .print();
    }

    private static String[] printedBy(String[] words) {
        ByteArrayOutputStream output = new ByteArrayOutputStream();
        ByteArrayOutputStream errors = new ByteArrayOutputStream();
        PrintStream realOut = System.out;
        PrintStream realErr = System.err;
        System.setOut(new PrintStream(output, true, StandardCharsets.UTF_8));
        System.setErr(new PrintStream(errors, true, StandardCharsets.UTF_8));
        try {
            Leaving.quickly(() -> MQAdminStartup.main0(words, null));
        } finally {
            System.out.flush();
            System.err.flush();
            System.setOut(realOut);
            System.setErr(realErr);
        }
        return new String[] {
            output.toString(StandardCharsets.UTF_8), errors.toString(StandardCharsets.UTF_8)};
    }

    private void produce(String group, String topic, int queue, int count) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer(group);
        producer.setNamesrvAddr(nameserver);
        producer.setInstanceName(group);
        producer.start();
        producers.add(producer);
        for (int i = 0; i < count; i++) {
            byte[] body = ("body-" + i).getBytes(StandardCharsets.UTF_8);
            Message message = new Message(topic, "TagA", "key-" + i, body);
            SendResult result = producer.send(
                message, (queues, ignored, id) -> chosen(queues, (Integer) id), queue);
            known.put("offsetId", result.getOffsetMsgId());
            known.put("uniqueKey", result.getMsgId());
        }
        // What producerConnection shows comes with the heartbeat.
        producer.getDefaultMQProducerImpl().getMqClientFactory().sendHeartbeatToAllBrokerWithLock();
        Line.of("produced").put("offsetId", known.get("offsetId"))
            .put("uniqueKey", known.get("uniqueKey")).print();
    }

    private static MessageQueue chosen(List<MessageQueue> queues, int id) {
        return queues.stream().filter(queue -> queue.getQueueId() == id).findFirst().get();
    }

    private void consume(String group, String topic, int queues) throws Exception {
        AtomicInteger count = received.computeIfAbsent(group, name -> new AtomicInteger());
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr(nameserver);
        consumer.setInstanceName(group);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setPersistConsumerOffsetInterval(200);
        consumer.setPollNameServerInterval(1_000);
        consumer.setHeartbeatBrokerInterval(1_000);
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            count.addAndGet(messages.size());
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        consumers.put(group, consumer);
        known.put("clientId", consumer.getDefaultMQPushConsumerImpl().getmQClientFactory()
            .getClientId());
        await(group + " has all queues", () -> consumer.getDefaultMQPushConsumerImpl()
            .getRebalanceImpl().getProcessQueueTable().size() == queues);
    }

    private void awaitMessages(String group, int count) throws Exception {
        AtomicInteger have = received.get(group);
        await(group + " gets messages", () -> have.get() >= count);
        have.addAndGet(-count);
        awaitLevel(group);
        Line.of("received").put("group", group).print();
    }

    private void awaitLevel(String group) throws Exception {
        DefaultMQPushConsumerImpl consumer =
            consumers.get(group).getDefaultMQPushConsumerImpl();
        await(group + " has read all", () -> {
            consumer.persistConsumerOffset();
            for (MessageQueue queue : consumer.getRebalanceImpl().getProcessQueueTable().keySet()) {
                long end = consumer.maxOffset(queue);
                long committed = consumer.getOffsetStore().readOffset(
                    queue, ReadOffsetType.READ_FROM_STORE);
                if (end > 0 && committed < end) {
                    return false;
                }
            }
            return true;
        });
    }

    private static void await(String what, Callable<Boolean> holds) throws Exception {
        long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(WAIT_S);
        while (true) {
            Exception reason = null;
            try {
                if (holds.call()) {
                    return;
                }
            } catch (MQClientException error) {
                reason = error;  // on a busy machine an answer may come too late
            }
            if (System.nanoTime() > deadline) {
                throw new IllegalStateException("waited in vain until " + what, reason);
            }
            Thread.sleep(POLL_MS);
        }
    }

    private void stop() {
        Leaving.quickly(() -> consumers.values().forEach(DefaultMQPushConsumer::shutdown));
        Leaving.quickly(() -> producers.forEach(DefaultMQProducer::shutdown));
    }
}
