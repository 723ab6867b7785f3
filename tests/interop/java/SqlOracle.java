import java.io.DataInputStream;
import java.io.FileInputStream;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.broker.filter.MessageEvaluationContext;
import org.apache.rocketmq.common.filter.ExpressionType;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.filter.FilterFactory;
import org.apache.rocketmq.filter.expression.Expression;

/**
 * Tells what RocketMQ's own SQL filter says to expressions and messages: a "judged" line for each
 * expression, with "refused", or a letter for each message: 1 where it is wanted and 0 where not.
 *
 * <p>The --cases file holds two lists, of expressions and of properties in their stored form: a
 * count, then for each text its bytes' count and its UTF-8 bytes.
 */
public final class SqlOracle {
    private SqlOracle() {
    }

    public static void main(String[] arguments) throws Exception {
        Line.exitOnError();
        Options options = new Options(arguments, "cases");
        List<String> expressions;
        List<Map<String, String>> messages = new ArrayList<>();
        try (DataInputStream file =
                new DataInputStream(new FileInputStream(options.one("cases")))) {
            expressions = texts(file);
            for (String properties : texts(file)) {
                messages.add(MessageDecoder.string2messageProperties(properties));
            }
        }
        for (int i = 0; i < expressions.size(); i++) {
            Line.of("judged").put("at", i).put("said", said(expressions.get(i), messages)).print();
        }
        System.exit(0);
    }

    private static List<String> texts(DataInputStream file) throws IOException {
        int count = file.readInt();
        List<String> found = new ArrayList<>();
        for (int i = 0; i < count; i++) {
            byte[] bytes = new byte[file.readInt()];
            file.readFully(bytes);
            found.add(new String(bytes, StandardCharsets.UTF_8));
        }
        return found;
    }

    private static String said(String text, List<Map<String, String>> messages) {
        Expression expression;
        try {
            expression = FilterFactory.INSTANCE.get(ExpressionType.SQL92).compile(text);
        } catch (Throwable error) {
            return "refused";
        }
        StringBuilder letters = new StringBuilder();
        for (Map<String, String> message : messages) {
            letters.append(isWanted(expression, message) ? '1' : '0');
        }
        return letters.toString();
    }

    /** As the broker does it: what fails is not wanted. */
    private static boolean isWanted(Expression expression, Map<String, String> message) {
        try {
            return Boolean.TRUE.equals(expression.evaluate(new MessageEvaluationContext(message)));
        } catch (Throwable error) {
            return false;
        }
    }
}
