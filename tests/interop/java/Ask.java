import java.nio.charset.StandardCharsets;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.exception.RequestTimeoutException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.RequestCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.protocol.ResponseCode;

/**
 * Asks and replies, with traces of every message in the topic of --trace-topic.
 *
 * <p>A consumer replies to each request whose body is not "silence" with its body in capital
 * letters. "reply" lines say what came for a request, and how it was asked; "timeout" that none came;
 * "failed" that a reply could not be handed over, and why. The "sent" line is of a usual message.
 */
public final class Ask {
    private static final long WAIT_MS = 30_000;
    private static final long SHORT_MS = 1_500;
    private static final long PAUSE_MS = 50;

    private Ask() {
    }

    public static void main(String[] arguments) throws Exception {
        Line.exitOnError();
        Options options = new Options(arguments, "namesrv", "topic", "trace-topic", "count");
        String topic = options.one("topic");
        String traces = options.one("trace-topic");
        DefaultMQProducer replier = Common.told(
            new DefaultMQProducer("repliers", null, true, traces), options);
        replier.setInstanceName("replier");
        replier.setRetryTimesWhenSendFailed(0);
        replier.setSendMsgTimeout((int) WAIT_MS);
        replier.start();
        DefaultMQPushConsumer consumer = Common.told(
            new DefaultMQPushConsumer("answering", null,
                new org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely(),
                true, traces),
            options);
        consumer.setInstanceName("answering");
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        CountDownLatch usual = new CountDownLatch(1);
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                answer(replier, message);
                if (message.getTags() != null) {
                    usual.countDown();
                }
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        DefaultMQProducer asker = Common.told(
            new DefaultMQProducer("askers", null, true, traces), options);
        asker.setInstanceName("asker");
        asker.setSendMsgTimeout((int) WAIT_MS);
        asker.start();
        ask(asker, topic, options.number("count", 5));
        SendResult sent = asker.send(
            new Message(topic, "usual", "key-1", "usual".getBytes(StandardCharsets.UTF_8)));
        Line.of("sent").put("msgId", sent.getMsgId()).put("offsetMsgId", sent.getOffsetMsgId())
            .print();
        if (!usual.await(WAIT_MS, TimeUnit.MILLISECONDS)) {
            throw new IllegalStateException("the usual message was not consumed");
        }
        awaitTraces(asker, consumer, traces, sent.getMsgId());
        Leaving.quickly(consumer::shutdown);
        Leaving.quickly(asker::shutdown);
        Leaving.quickly(replier::shutdown);
        Line.of("done").print();
        System.exit(0);
    }

    /**
     * Waits until both ends of a message are in the trace topic. A client that is shut down does not
     * wait for its last traces: neither for a listener that is about to return, nor for their sends.
     */
    private static void awaitTraces(DefaultMQProducer asker, DefaultMQPushConsumer consumer,
            String traces, String messageId) throws Exception {
        long deadline = System.currentTimeMillis() + WAIT_MS;
        while (true) {
            asker.getTraceDispatcher().flush();
            consumer.getTraceDispatcher().flush();
            String written = written(asker, traces, messageId);
            if (written.contains("Pub\u0001") && written.contains("SubAfter\u0001")) {
                return;
            }
            if (System.currentTimeMillis() > deadline) {
                throw new IllegalStateException("the traces were not written, only: " + written);
            }
            Thread.sleep(PAUSE_MS);
        }
    }

    private static String written(DefaultMQProducer asker, String traces, String messageId)
            throws Exception {
        StringBuilder text = new StringBuilder();
        try {
            for (MessageExt trace : asker.queryMessage(
                    traces, messageId, 32, 0, Long.MAX_VALUE).getMessageList()) {
                text.append(new String(trace.getBody(), StandardCharsets.UTF_8));
            }
        } catch (MQClientException error) {
            // None is there yet.
            if (error.getResponseCode() != ResponseCode.NO_MESSAGE) {
                throw error;
            }
        }
        return text.toString();
    }

    private static void ask(DefaultMQProducer asker, String topic, int count) throws Exception {
        for (int i = 0; i < count; i++) {
            reply("sync", "sync-" + i, asker.request(request(topic, "sync-" + i), WAIT_MS));
        }
        CountDownLatch answered = new CountDownLatch(count);
        for (int i = 0; i < count; i++) {
            String body = "async-" + i;
            asker.request(request(topic, body), new RequestCallback() {
                @Override
                public void onSuccess(Message message) {
                    reply("async", body, message);
                    answered.countDown();
                }

                @Override
                public void onException(Throwable error) {
                    Line.of("failed").put("reason", error.toString()).print();
                    answered.countDown();
                }
            }, WAIT_MS);
        }
        answered.await(WAIT_MS, TimeUnit.MILLISECONDS);
        try {
            reply("sync", "silence", asker.request(request(topic, "silence"), SHORT_MS));
        } catch (RequestTimeoutException error) {
            Line.of("timeout").put("asked", "silence").print();
        }
    }

    private static Message request(String topic, String body) {
        return new Message(topic, body.getBytes(StandardCharsets.UTF_8));
    }

    private static void reply(String way, String asked, Message message) {
        Line.of("reply").put("way", way).put("asked", asked)
            .put("body", new String(message.getBody(), StandardCharsets.UTF_8))
            .put("properties", message.getProperties()).print();
    }

    /** The usual message has no one to reply to: the broker says so. */
    private static void answer(DefaultMQProducer replier, MessageExt message) {
        String body = new String(message.getBody(), StandardCharsets.UTF_8);
        if (body.equals("silence")) {
            return;
        }
        try {
            if (message.getTags() != null) {
                Message orphan = new Message(
                    message.getProperty("CLUSTER") + "_REPLY_TOPIC", "lost".getBytes());
                orphan.putUserProperty("note", "nobody asked");
                orphan.getProperties().put("MSG_TYPE", "reply");
                orphan.getProperties().put("REPLY_TO_CLIENT", "nobody");
                replier.send(orphan);
                return;
            }
            replier.send(MessageUtil.createReplyMessage(
                message, body.toUpperCase().getBytes(StandardCharsets.UTF_8)));
        } catch (Exception error) {
            Line.of("failed").put("reason", error + " " + error.getCause()).print();
        }
    }
}
