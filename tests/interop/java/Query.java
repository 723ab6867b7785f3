import java.util.HashMap;
import java.util.Map;
import org.apache.rocketmq.client.QueryResult;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.protocol.admin.ConsumeStats;
import org.apache.rocketmq.remoting.protocol.admin.OffsetWrapper;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/**
 * Asks a broker by key, by unique key, by message id, and for a group's progress.
 *
 * <p>Each --key, --unique, --id of --topic gives "found" lines that repeat what was asked; a key
 * without a message gives a "missing" line. --group gives one "progress" line a queue.
 */
public final class Query {
    private static final int RESULTS_MAX = 64;

    private final Options options;
    private final DefaultMQAdminExt admin = new DefaultMQAdminExt();

    private Query(Options options) {
        this.options = options;
        admin.setNamesrvAddr(options.one("namesrv"));
        admin.setInstanceName("interop-query-" + System.nanoTime());
    }

    public static void main(String[] arguments) throws Exception {
        Line.exitOnError();
        Query query = new Query(
            new Options(arguments, "namesrv", "topic", "key", "unique", "id", "group"));
        query.admin.start();
        for (String key : query.options.all("key")) {
            query.byKey(key);
        }
        for (String unique : query.options.all("unique")) {
            query.one("unique", unique);
        }
        for (String id : query.options.all("id")) {
            query.one("id", id);
        }
        for (String group : query.options.all("group")) {
            query.progress(group);
        }
        Leaving.quickly(query.admin::shutdown);
        System.exit(0);
    }

    private void byKey(String key) throws Exception {
        try {
            QueryResult result = admin.queryMessage(
                options.one("topic"), key, RESULTS_MAX, 0, Long.MAX_VALUE);
            for (MessageExt message : result.getMessageList()) {
                Described.line("found", message).put("by", "key").put("asked", key).print();
            }
        } catch (Exception error) {
            missing("key", key, error);
        }
    }

    /** A unique key and an offset id are both taken by viewMessage; it tells them apart itself. */
    private void one(String by, String asked) {
        try {
            MessageExt message = admin.viewMessage(options.one("topic"), asked);
            if (message == null) {
                throw new IllegalStateException("null");
            }
            Described.line("found", message).put("by", by).put("asked", asked).print();
        } catch (Exception error) {
            missing(by, asked, error);
        }
    }

    private void progress(String group) throws Exception {
        ConsumeStats stats = admin.examineConsumeStats(group);
        Map<MessageQueue, OffsetWrapper> table = new HashMap<>(stats.getOffsetTable());
        for (Map.Entry<MessageQueue, OffsetWrapper> entry : table.entrySet()) {
            Line.of("progress")
                .put("group", group)
                .put("topic", entry.getKey().getTopic())
                .put("queueId", entry.getKey().getQueueId())
                .put("committed", entry.getValue().getConsumerOffset())
                .put("end", entry.getValue().getBrokerOffset())
                .print();
        }
    }

    private static void missing(String by, String asked, Exception error) {
        Line.of("missing").put("by", by).put("asked", asked).put("reason", error.toString()).print();
    }
}
