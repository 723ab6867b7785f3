import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/** Command line of the form --name value; a name the program does not know is an error. */
final class Options {
    private final Map<String, List<String>> values = new HashMap<>();

    Options(String[] arguments, String... known) {
        for (int i = 0; i < arguments.length; i += 2) {
            String name = arguments[i];
            if (!name.startsWith("--") || !Arrays.asList(known).contains(name.substring(2))) {
                throw new IllegalArgumentException("unknown option " + name);
            }
            if (i + 1 == arguments.length) {
                throw new IllegalArgumentException(name + " needs a value");
            }
            values.computeIfAbsent(name.substring(2), k -> new ArrayList<>()).add(arguments[i + 1]);
        }
    }

    List<String> all(String name) {
        return values.getOrDefault(name, List.of());
    }

    String one(String name) {
        List<String> found = all(name);
        if (found.size() != 1) {
            throw new IllegalArgumentException("exactly one --" + name + " is needed");
        }
        return found.get(0);
    }

    String one(String name, String fallback) {
        return all(name).isEmpty() ? fallback : one(name);
    }

    int number(String name, int fallback) {
        return Integer.parseInt(one(name, Integer.toString(fallback)));
    }
}
