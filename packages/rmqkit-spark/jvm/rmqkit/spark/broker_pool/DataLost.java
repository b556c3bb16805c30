package rmqkit.spark.broker_pool;

/** Messages that had to be read were deleted. The package is the module of the Python class. */
public final class DataLost extends RuntimeException {
    private static final long serialVersionUID = 1L;

    public DataLost(String text) {
        super(text);
    }
}
