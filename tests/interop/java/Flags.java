import java.lang.reflect.Field;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import org.apache.commons.cli.Option;
import org.apache.commons.cli.OptionGroup;
import org.apache.rocketmq.tools.command.MQAdminStartup;
import org.apache.rocketmq.tools.command.SubCommand;

/**
 * Prints the flags of every mqadmin command: a "flags" line each, by short name or by long name
 * where there is no short one. A value is the long name, then " x" if the flag takes a value, then
 * " !" if mqadmin does not go on without it.
 */
public final class Flags {
    private Flags() {
    }

    public static void main(String[] arguments) throws Exception {
        Line.exitOnError();
        MQAdminStartup.initCommand();
        Field commands = MQAdminStartup.class.getDeclaredField("SUB_COMMANDS");
        commands.setAccessible(true);
        for (Object each : (List<?>) commands.get(null)) {
            SubCommand command = (SubCommand) each;
            org.apache.commons.cli.Options options =
                command.buildCommandlineOptions(new org.apache.commons.cli.Options());
            Line.of("flags").put("name", command.commandName()).put("flags", told(options)).print();
        }
        System.exit(0);
    }

    private static Map<String, String> told(org.apache.commons.cli.Options options) {
        Map<String, String> flags = new TreeMap<>();
        for (Option option : options.getOptions()) {
            OptionGroup group = options.getOptionGroup(option);
            boolean alone = group == null && option.isRequired();
            String name = option.getOpt() == null ? option.getLongOpt() : option.getOpt();
            flags.put(name, option.getLongOpt() + (option.hasArg() ? " x" : "")
                + (alone ? " !" : ""));
        }
        return flags;
    }
}
