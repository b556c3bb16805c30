package rmqkit.errors;

/**
 * A store cannot be read, or is damaged. The name of the class is that of the Python exception: Spark reports it with
 * the text, and {@code rmqkit.spark.failures} raises the Python exception in its place.
 */
public class StoreError extends RuntimeException {
    private static final long serialVersionUID = 1L;

    public StoreError(String text) {
        super(text);
    }
}
