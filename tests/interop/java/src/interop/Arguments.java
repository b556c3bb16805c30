package interop;

import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/** A command followed by `--name value` pairs; a name may come more than once. */
final class Arguments {
    final String command;
    private final Map<String, List<String>> values = new HashMap<>();

    private Arguments(String command) {
        this.command = command;
    }

    static Arguments parse(String[] args) {
        Arguments parsed = new Arguments(args[0]);
        for (int i = 1; i + 1 < args.length; i += 2) {
            parsed.values.computeIfAbsent(args[i].substring(2), name -> new ArrayList<>()).add(args[i + 1]);
        }
        return parsed;
    }

    String one(String name) {
        String value = one(name, null);
        if (value == null) {
            throw new IllegalArgumentException(command + " needs --" + name);
        }
        return value;
    }

    String one(String name, String otherwise) {
        return values.containsKey(name) ? values.get(name).get(0) : otherwise;
    }

    List<String> all(String name) {
        return values.getOrDefault(name, new ArrayList<>());
    }
}
