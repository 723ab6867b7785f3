import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.producer.TransactionSendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Sends transactional messages and answers the broker's questions, until it is stopped. What message
 * i says after its send is the word i % n of --local; what is said to question k about any message is
 * the k-th --check, and the last one from there on; "odd-rollback:commit" rolls those of odd numbers
 * back and commits the others.
 */
public final class Transact implements TransactionListener {
    private static final int STOP_S = 30;
    private static final int TIMEOUT_MS = 30_000;

    private final Options options;
    private final TransactionMQProducer producer;
    private final CountDownLatch stopping = new CountDownLatch(1);
    private final CountDownLatch ended = new CountDownLatch(1);

    private Transact(Options options) {
        this.options = options;
        producer = Common.told(new TransactionMQProducer(options.one("group")), options);
        producer.setTransactionListener(this);
        producer.setSendMsgTimeout(TIMEOUT_MS);
        producer.setMqClientApiTimeout(TIMEOUT_MS);
    }

    public static void main(String[] arguments) throws Exception {
        Line.exitOnError();
        Transact transact = new Transact(new Options(
            arguments, "namesrv", "group", "topic", "count", "prefix", "local", "check"));
        Runtime.getRuntime().addShutdownHook(new Thread(transact::stop));
        transact.run();
        System.exit(0);
    }

    private void stop() {
        stopping.countDown();
        try {
            ended.await(STOP_S, TimeUnit.SECONDS);
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
        }
    }

    private void run() throws Exception {
        producer.start();
        for (int i = 0; i < options.number("count", 0); i++) {
            String id = options.one("prefix") + "-" + i;
            Message message = Sample.message(options.one("topic"), id, i, 100);
            message.putUserProperty("number", Integer.toString(i));
            TransactionSendResult result = producer.sendMessageInTransaction(message, null);
            Line.of("sent").put("id", id)
                .put("status", result.getSendStatus().name())
                .put("state", result.getLocalTransactionState().name())
                .put("queueOffset", result.getQueueOffset())
                .put("queueId", result.getMessageQueue().getQueueId())
                .put("msgId", result.getMsgId())
                .put("transactionId", result.getTransactionId()).print();
        }
        Line.of("ready").print();
        stopping.await();
        Leaving.quickly(producer::shutdown);
        Line.of("done").print();
        ended.countDown();
    }

    @Override
    public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
        List<String> words = options.all("local");
        return state(words.get(number(message) % words.size()));
    }

    @Override
    public LocalTransactionState checkLocalTransaction(MessageExt message) {
        int times = Integer.parseInt(
            message.getUserProperty(MessageConst.PROPERTY_TRANSACTION_CHECK_TIMES));
        List<String> words = options.all("check");
        String word = words.get(Math.min(times, words.size()) - 1);
        boolean odd = number(message) % 2 == 1;
        if (word.startsWith("odd-rollback:")) {
            word = odd ? "rollback" : word.substring("odd-rollback:".length());
        }
        Line.of("asked").put("id", Sample.id(message)).put("times", times).put("answer", word)
            .put("topic", message.getTopic()).put("queueId", message.getQueueId())
            .put("msgId", message.getMsgId()).put("transactionId", message.getTransactionId())
            .put("whole", Sample.isWhole(message) ? 1 : 0).print();
        return state(word);
    }

    private static int number(Message message) {
        return Integer.parseInt(message.getUserProperty("number"));
    }

    private static LocalTransactionState state(String word) {
        switch (word) {
            case "commit":
                return LocalTransactionState.COMMIT_MESSAGE;
            case "rollback":
                return LocalTransactionState.ROLLBACK_MESSAGE;
            case "unknown":
                return LocalTransactionState.UNKNOW;
            default:
                throw new IllegalArgumentException(word);
        }
    }
}
