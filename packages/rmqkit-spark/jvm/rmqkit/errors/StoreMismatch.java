package rmqkit.errors;

/** The files of a store do not fit together. */
public final class StoreMismatch extends StoreError {
    private static final long serialVersionUID = 1L;

    public StoreMismatch(String text) {
        super(text);
    }
}
