import java.nio.charset.StandardCharsets;
import java.util.Map;

/** One JSON object on one line of standard output, written and flushed whole; ASCII only. */
final class Line {
    private final StringBuilder text = new StringBuilder("{");

    /** The client's own threads would keep a program alive whose main thread has failed. */
    static void exitOnError() {
        Thread.currentThread().setUncaughtExceptionHandler((thread, error) -> {
            error.printStackTrace();
            System.exit(1);
        });
    }

    static Line of(String event) {
        return new Line().put("event", event);
    }

    Line put(String name, String value) {
        begin(name);
        if (value == null) {
            text.append("null");
        } else {
            quote(value);
        }
        return this;
    }

    Line put(String name, long value) {
        begin(name);
        text.append(value);
        return this;
    }

    Line put(String name, Map<String, String> values) {
        begin(name);
        text.append('{');
        String separator = "";
        for (Map.Entry<String, String> entry : values.entrySet()) {
            text.append(separator);
            quote(entry.getKey());
            text.append(':');
            quote(entry.getValue());
            separator = ",";
        }
        text.append('}');
        return this;
    }

    void print() {
        byte[] line = text.append("}\n").toString().getBytes(StandardCharsets.US_ASCII);
        synchronized (Line.class) {
            System.out.write(line, 0, line.length);
            System.out.flush();
        }
    }

    private void begin(String name) {
        if (text.length() > 1) {
            text.append(',');
        }
        quote(name);
        text.append(':');
    }

    private void quote(String value) {
        text.append('"');
        for (int i = 0; i < value.length(); i++) {
            char c = value.charAt(i);
            if (c == '"' || c == '\\') {
                text.append('\\').append(c);
            } else if (c < 0x20 || c > 0x7e) {
                text.append(String.format("\\u%04x", (int) c));
            } else {
                text.append(c);
            }
        }
        text.append('"');
    }
}
