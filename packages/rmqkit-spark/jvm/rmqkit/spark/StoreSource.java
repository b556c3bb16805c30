package rmqkit.spark;

import java.util.HashMap;
import java.util.Map;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2;
import org.apache.spark.sql.classic.SparkSession;
import org.apache.spark.sql.sources.DataSourceRegister;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import rmqkit.errors.SettingsError;

/**
 * The Spark format {@code rocketmq-store} in the JVM: it prunes columns, applies filters before it decodes, and moves
 * no row between processes.
 *
 * <p>It serves the messages of local files. Other reads (object stores, tables of queues and index, wrong options) go
 * to the Python source with the same options, which {@code rmqkit.spark.register} registers as
 * {@code rocketmq-store-python}.
 */
public final class StoreSource implements TableProvider, DataSourceRegister {
    public static final String NAME = "rocketmq-store";
    private static final String TWIN = "rocketmq-store-python";
    private static final String NEW_TABLE = "provider";
    private static final String TABLE_OPTION = "option.";

    private PythonDataSourceV2 twin;

    @Override
    public String shortName() {
        return NAME;
    }

    @Override
    public boolean supportsExternalMetadata() {
        return true;
    }

    @Override
    public StructType inferSchema(CaseInsensitiveStringMap given) {
        StoreOptions options = served(given.asCaseSensitiveMap());
        StructType columns = options == null ? null : options.chosen();
        return columns == null ? twin(given.asCaseSensitiveMap()).inferSchema(given) : columns;
    }

    @Override
    public Table getTable(StructType schema, Transform[] partitioning, Map<String, String> given) {
        StoreOptions options = served(given);
        return options != null && options.canRead(schema)
                ? new StoreTable(options, schema)
                : twin(given).getTable(schema, partitioning, given);
    }

    /** Return the options if this reader serves the read. The properties of a table of a catalog hold its options. */
    private static StoreOptions served(Map<String, String> given) {
        if (!given.containsKey(NEW_TABLE)) {
            return StoreOptions.of(given);
        }
        Map<String, String> found = new HashMap<>();
        given.forEach((name, value) -> {
            if (name.startsWith(TABLE_OPTION)) {
                found.put(name.substring(TABLE_OPTION.length()), value);
            } else if (name.equals("path")) {
                found.put(name, value);
            }
        });
        return StoreOptions.of(found);
    }

    private PythonDataSourceV2 twin(Map<String, String> given) {
        if (!SparkSession.active().sessionState().dataSourceManager().dataSourceExists(TWIN)) {
            throw new SettingsError(NAME + ": the options " + given.keySet() + " with these values need the Python source:"
                    + " call rmqkit.spark.register(spark) first");
        }
        if (twin == null) {
            twin = new PythonDataSourceV2();
            twin.setShortName(TWIN);
        }
        return twin;
    }
}
