package rmqkit.spark;

import java.util.Map;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2;
import org.apache.spark.sql.sources.DataSourceRegister;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * The Spark format {@code rocketmq} in the JVM: Python plans the ranges of a read, and tasks in the JVM pull and decode
 * them.
 *
 * <p>The Python source parses the options, finds offsets, waits for brokers and writes. {@code rmqkit.spark.register}
 * registers it as {@code rocketmq-python}.
 */
public final class LiveSource implements TableProvider, DataSourceRegister {
    static final String NAME = "rocketmq";
    private static final String TWIN = NAME + "-python";

    private PythonDataSourceV2 twin;
    private StructType inferred;

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
        inferred = twin().inferSchema(given);
        return inferred;
    }

    @Override
    public Table getTable(StructType schema, Transform[] partitioning, Map<String, String> given) {
        Map<String, String> options = StoreSource.options(given);
        return new LiveTable(twin().getTable(schema, partitioning, options), schema, options, Planner.Python.of(TWIN),
                schema.equals(inferred));
    }

    /** Return the source in Python; Spark makes instances of this class without a session, to read their names. */
    private PythonDataSourceV2 twin() {
        if (twin == null) {
            twin = StoreSource.python(TWIN);
        }
        return twin;
    }
}
