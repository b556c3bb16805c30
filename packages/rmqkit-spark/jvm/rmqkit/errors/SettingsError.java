package rmqkit.errors;

/** An option is unknown, or its value is not valid. */
public final class SettingsError extends RuntimeException {
    private static final long serialVersionUID = 1L;

    public SettingsError(String text) {
        super(text);
    }
}
