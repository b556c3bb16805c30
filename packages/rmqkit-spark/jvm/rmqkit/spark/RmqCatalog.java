package rmqkit.spark;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import java.util.stream.Stream;
import org.apache.spark.sql.catalyst.analysis.NoSuchTableException;
import org.apache.spark.sql.connector.catalog.Identifier;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCatalog;
import org.apache.spark.sql.connector.catalog.TableChange;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import rmqkit.errors.SettingsError;

/**
 * A catalog whose tables are topics: {@code select * from rmq.Orders}. With a setting {@code path} they are the topics
 * of a store, otherwise those of the brokers at {@code nameServer}. Further settings are options of the format.
 */
public final class RmqCatalog implements TableCatalog {
    private String name;
    private Map<String, String> options;

    @Override
    public void initialize(String name, CaseInsensitiveStringMap options) {
        this.name = name;
        this.options = options.asCaseSensitiveMap();
    }

    @Override
    public String name() {
        return name;
    }

    /** Return the folders with the queues of a topic, or of all topics. */
    private List<Path> queues(String topic) {
        return Stream.of("consumequeue", "batchconsumequeue")
                .map(tree -> Path.of(options.get("path"), tree, topic))
                .filter(Files::isDirectory)
                .toList();
    }

    @Override
    public Identifier[] listTables(String[] namespace) {
        if (!options.containsKey("path")) {
            throw new SettingsError("catalog " + name + " lists topics of a store only; for those of brokers run:"
                    + " rmq topic list");
        }
        Set<String> topics = new TreeSet<>();
        for (Path folder : queues("")) {
            try (var files = Files.list(folder)) {
                files.forEach(file -> topics.add(file.getFileName().toString()));
            } catch (IOException error) {
                throw LogFile.unreadable(folder.toString(), error);
            }
        }
        return topics.stream().map(topic -> Identifier.of(namespace, topic)).toArray(Identifier[]::new);
    }

    @Override
    public Table loadTable(Identifier table) throws NoSuchTableException {
        boolean isStore = options.containsKey("path");
        String topic = table.name();
        boolean isName = topic.matches("[^/,\\s]+") && !topic.startsWith(".");
        if (table.namespace().length > 0 || !isName || isStore && queues(topic).isEmpty()) {
            throw new NoSuchTableException(table);
        }
        Map<String, String> chosen = new HashMap<>(options);
        chosen.put("topic", topic);
        TableProvider source = isStore ? new StoreSource() : new LiveSource();
        StructType columns = source.inferSchema(new CaseInsensitiveStringMap(chosen));
        return source.getTable(columns, new Transform[0], chosen);
    }

    private UnsupportedOperationException refused() {
        return new UnsupportedOperationException("catalog " + name + " is read only: its tables are topics; use rmq topic"
                + " create, rmq topic delete, or write with format(\"rocketmq\")");
    }

    @Override
    public Table alterTable(Identifier topic, TableChange... changes) {
        throw refused();
    }

    @Override
    public boolean dropTable(Identifier topic) {
        throw refused();
    }

    @Override
    public void renameTable(Identifier topic, Identifier other) {
        throw refused();
    }
}
