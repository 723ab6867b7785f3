import java.net.InetSocketAddress;
import java.net.SocketAddress;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.Base64;
import java.util.TreeMap;
import org.apache.rocketmq.common.message.MessageClientExt;
import org.apache.rocketmq.common.message.MessageExt;

/** Everything a client can see of a message, as one line; short bodies also in full. */
final class Described {
    private static final int BODY_SHOWN_BYTES_MAX = 512;

    private Described() {
    }

    static Line line(String event, MessageExt message) {
        byte[] body = message.getBody();
        String offsetId = message instanceof MessageClientExt
            ? ((MessageClientExt) message).getOffsetMsgId() : message.getMsgId();
        Line line = Line.of(event)
            .put("topic", message.getTopic())
            .put("queueId", message.getQueueId())
            .put("queueOffset", message.getQueueOffset())
            .put("position", message.getCommitLogOffset())
            .put("msgId", message.getMsgId())
            .put("offsetMsgId", offsetId)
            .put("keys", message.getKeys())
            .put("tags", message.getTags())
            .put("flag", message.getFlag())
            .put("sysFlag", message.getSysFlag())
            .put("bornMs", message.getBornTimestamp())
            .put("storeMs", message.getStoreTimestamp())
            .put("bornHost", host(message.getBornHost()))
            .put("storeHost", host(message.getStoreHost()))
            .put("reconsumeTimes", message.getReconsumeTimes())
            .put("storeBytes", message.getStoreSize())
            .put("properties", new TreeMap<>(message.getProperties()))
            .put("bodyBytes", body.length)
            .put("bodySha256", sha256(body));
        if (body.length <= BODY_SHOWN_BYTES_MAX) {
            line.put("body", Base64.getEncoder().encodeToString(body));
        }
        return line;
    }

    static String sha256(byte[] data) {
        StringBuilder hex = new StringBuilder();
        try {
            for (byte b : MessageDigest.getInstance("SHA-256").digest(data)) {
                hex.append(Character.forDigit(b >> 4 & 15, 16)).append(Character.forDigit(b & 15, 16));
            }
        } catch (NoSuchAlgorithmException error) {
            throw new AssertionError("every Java has SHA-256", error);
        }
        return hex.toString();
    }

    private static String host(SocketAddress address) {
        InetSocketAddress inet = (InetSocketAddress) address;
        return inet.getAddress().getHostAddress() + ":" + inet.getPort();
    }
}
