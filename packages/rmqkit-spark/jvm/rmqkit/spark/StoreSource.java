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
 * to the Python source with the same options, and with what the query needs. {@code rmqkit.spark.register} registers
 * that source as {@code rocketmq-store-python}.
 */
public final class StoreSource implements TableProvider, DataSourceRegister {
    static final String NAME = "rocketmq-store";
    static final String TWIN = "rocketmq-store-python";
    private static final String NEW_TABLE = "provider";
    private static final String TABLE_OPTION = "option.";

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
        Map<String, String> options = options(given.asCaseSensitiveMap());
        StoreOptions served = StoreOptions.of(options);
        StructType columns = served == null ? null : served.chosen();
        // With all properties of a new table, of which the Python source refuses secrets.
        return columns == null ? twin().inferSchema(given) : columns;
    }

    @Override
    public Table getTable(StructType schema, Transform[] partitioning, Map<String, String> given) {
        Map<String, String> options = options(given);
        StoreOptions served = StoreOptions.of(options);
        return new StoreTable(served != null && served.canRead(schema) ? served : null, schema, options);
    }

    /** Return the options of a read. The properties of a new table of a catalog hold its options. */
    static Map<String, String> options(Map<String, String> given) {
        if (!given.containsKey(NEW_TABLE)) {
            return given;
        }
        Map<String, String> found = new HashMap<>();
        given.forEach((name, value) -> {
            if (name.startsWith(TABLE_OPTION)) {
                found.put(name.substring(TABLE_OPTION.length()), value);
            } else if (name.equals("path")) {
                found.put(name, value);
            }
        });
        return found;
    }

    static PythonDataSourceV2 twin() {
        return python(TWIN);
    }

    /** Return a source in Python; a new one for each read, because it keeps the options of its first one. */
    static PythonDataSourceV2 python(String name) {
        if (!SparkSession.active().sessionState().dataSourceManager().dataSourceExists(name)) {
            throw new SettingsError(name.replace("-python", "") + ": the read needs the Python source: call"
                    + " rmqkit.spark.register(spark) first");
        }
        PythonDataSourceV2 source = new PythonDataSourceV2();
        source.setShortName(name);
        return source;
    }
}
