import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/** A message that is made from its id alone, so that who reads it can tell whether it is whole. */
final class Sample {
    private Sample() {
    }

    /** Every third message has no tag; the id is the first key, a property and starts the body. */
    static Message message(String topic, String id, int number, int bodyBytes) {
        Message message = new Message(topic, body(id, bodyBytes));
        if (number % 3 != 2) {
            message.setTags(number % 3 == 0 ? "TagA" : "TagB");
        }
        message.setKeys(id + " shared-" + (number % 7));
        message.setFlag(number);
        message.putUserProperty("id", id);
        message.putUserProperty("text", "caf\u00e9 \u4e2d\u6587 \ud83d\ude00");
        return message;
    }

    static String id(Message message) {
        return message.getUserProperty("id");
    }

    static boolean isWhole(MessageExt message) {
        byte[] body = message.getBody();
        return id(message) != null && Arrays.equals(body, body(id(message), body.length));
    }

    /** Text that is as long as asked, starts with the id and compresses like text. */
    private static byte[] body(String id, int sizeBytes) {
        StringBuilder text = new StringBuilder(id);
        for (int i = 0; text.length() < sizeBytes; i++) {
            text.append(' ').append(id).append(':').append(i);
        }
        text.setLength(Math.max(sizeBytes, id.length()));
        return text.toString().getBytes(StandardCharsets.US_ASCII);
    }
}
