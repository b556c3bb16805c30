package rmqkit.spark;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.read.SupportsPushDownFilters;
import org.apache.spark.sql.connector.read.SupportsPushDownLimit;
import org.apache.spark.sql.connector.read.SupportsPushDownRequiredColumns;
import org.apache.spark.sql.sources.Filter;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;

/** The columns, filters and limit that Spark pushes into a scan. Without {@code isExact} Spark tests all filters. */
abstract class PushDowns
        implements ScanBuilder, SupportsPushDownRequiredColumns, SupportsPushDownFilters, SupportsPushDownLimit {
    private final StructType schema;
    private final boolean isExact;
    StructType required;
    Filter[] pushed = {};
    final List<Condition> conditions = new ArrayList<>();
    private int limit = Integer.MAX_VALUE;

    PushDowns(StructType schema, boolean isExact) {
        this.schema = schema;
        required = schema;
        this.isExact = isExact;
    }

    /** Return the plan of a scan; the options may be null. */
    StoreTable.Plan plan(StoreOptions options) {
        return new StoreTable.Plan(options, required, List.copyOf(conditions), limit);
    }

    @Override
    public void pruneColumns(StructType columns) {
        // Spark also prunes fields inside of a column. A column is decoded as a whole.
        required = new StructType(
                Arrays.stream(columns.fieldNames()).map(schema::apply).toArray(StructField[]::new));
    }

    @Override
    public Filter[] pushFilters(Filter[] filters) {
        List<Filter> kept = new ArrayList<>();
        for (Filter filter : filters) {
            Condition condition = Condition.of(filter);
            if (condition != null) {
                conditions.add(condition);
            }
            if (condition == null || !isExact) {
                kept.add(filter);
            }
        }
        pushed = Arrays.stream(filters).filter(filter -> !kept.contains(filter)).toArray(Filter[]::new);
        return kept.toArray(Filter[]::new);
    }

    @Override
    public Filter[] pushedFilters() {
        return pushed;
    }

    @Override
    public boolean pushLimit(int count) {
        limit = count;
        return isExact;
    }

    @Override
    public boolean isPartiallyPushed() {
        return true; // each task stops after so many rows
    }
}
