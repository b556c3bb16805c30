package rmqkit.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.BufferedReader;
import java.io.Closeable;
import java.io.File;
import java.io.IOException;
import java.io.OutputStream;
import java.io.UncheckedIOException;
import java.nio.channels.ClosedByInterruptException;
import java.nio.charset.StandardCharsets;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Deque;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.FutureTask;
import java.util.concurrent.TimeUnit;
import java.util.stream.Collectors;
import org.apache.spark.SparkFiles;
import org.apache.spark.api.python.PythonFunction;
import org.apache.spark.api.python.PythonUtils;
import org.apache.spark.sql.classic.SparkSession;
import rmqkit.errors.SettingsError;

/**
 * A process of Python that plans reads of topics, and looks up keys in the index of a store. {@code rmqkit.spark.planner} describes its calls.
 *
 * <p>Spark's own processes for Python sources import PySpark and Arrow, which takes longer than a plan. A process that
 * has planned its read waits some minutes for the next read of this JVM. It exits when its input is closed, at the latest
 * when the JVM exits.
 */
final class Planner implements Closeable {
    private static final String MODULE = "rmqkit.spark.planner";
    private static final String PATH = "PYTHONPATH";
    private static final int IDLE_MAX = 2;
    /** An idle process keeps its connections open, and logs if its name servers are gone. */
    private static final int IDLE_MINUTES = 2;
    /** A process keeps the connections of every read with other options. */
    private static final int READS_MAX = 100;
    private static final Deque<Planner> IDLE = new ArrayDeque<>();

    /** The Python of a session: the one of its Python sources. */
    record Python(String executable, Map<String, String> variables, List<String> includes) {
        /** Return the Python of a registered source. */
        static Python of(String source) {
            PythonFunction function =
                    SparkSession.active().sessionState().dataSourceManager().lookupDataSource(source).dataSourceCls();
            return new Python(function.pythonExec(), Map.copyOf(function.envVars()), List.copyOf(function.pythonIncludes()));
        }

        Process start() throws IOException {
            ProcessBuilder builder = new ProcessBuilder(executable, "-m", MODULE);
            Map<String, String> all = builder.environment();
            List<String> path = new ArrayList<>(includes.stream().map(SparkFiles::get).toList());
            path.addAll(Arrays.asList(PythonUtils.sparkPythonPath(), variables.get(PATH), all.get(PATH)));
            all.putAll(variables);
            all.put(PATH, path.stream().filter(one -> one != null && !one.isEmpty())
                    .collect(Collectors.joining(File.pathSeparator)));
            return builder.redirectError(ProcessBuilder.Redirect.INHERIT).start();
        }
    }

    private final Python python;
    private final Process process;
    private final BufferedReader answers;
    private int reads = 1;
    private boolean hasFailed;

    private Planner(Python python) {
        this.python = python;
        try {
            process = python.start();
        } catch (IOException error) {
            throw new SettingsError(LiveSource.NAME + ": Python cannot be started, " + error.getMessage()
                    + ": set PYSPARK_PYTHON");
        }
        answers = process.inputReader(StandardCharsets.UTF_8);
    }

    /** Return a planner for a read. The schema is that of the caller, or null. Return it with {@link #close}. */
    static Planner open(Python python, Map<String, String> options, String schema, boolean isStream) {
        Planner planner = take(python);
        boolean isOpen = false;
        try {
            planner.call("open", options, schema, isStream);
            isOpen = true;
        } finally {
            if (!isOpen) {
                planner.close();
            }
        }
        return planner;
    }

    /** Return a planner without a read. Return it with {@link #close}. */
    static Planner take(Python python) {
        Planner planner = idle(python);
        return planner == null ? new Planner(python) : planner;
    }

    private static Planner idle(Python python) {
        synchronized (IDLE) {
            IDLE.removeIf(planner -> !planner.process.isAlive());
            Planner found = IDLE.stream().filter(planner -> planner.python.equals(python)).findFirst().orElse(null);
            if (found != null) {
                IDLE.remove(found);
                found.reads++;
            }
            return found;
        }
    }

    /** Let Python execute a call, and return its value. */
    synchronized JsonNode call(String name, Object... arguments) {
        List<Object> request = new ArrayList<>(List.of(name));
        request.addAll(Arrays.asList(arguments));
        try {
            OutputStream requests = process.getOutputStream();
            requests.write(Peer.JSON.writeValueAsBytes(request));
            requests.write('\n');
            requests.flush();
            // Spark interrupts the thread of a stream that is stopped. A read of a pipe cannot be interrupted.
            FutureTask<String> answering = new FutureTask<>(answers::readLine);
            Thread reader = new Thread(answering, MODULE);
            reader.setDaemon(true);
            reader.start();
            String line = answering.get();
            if (line == null) {
                throw new IOException("it exited");
            }
            JsonNode answer = Peer.JSON.readTree(line);
            if (answer.has("error")) {
                throw new PlanFailed(answer.path("error").asText());
            }
            return answer.path("value");
        } catch (InterruptedException error) {
            hasFailed = true;
            // Spark's form of an interrupt: a stream that is stopped has not failed.
            throw new UncheckedIOException("the read was cancelled", new ClosedByInterruptException());
        } catch (IOException | ExecutionException error) {
            hasFailed = true;
            throw new IllegalStateException(LiveSource.NAME + ": the planner in Python does not answer, "
                    + error.getMessage() + ": see its output, and check that " + python.executable + " has rmqkit", error);
        }
    }

    @Override
    public void close() {
        synchronized (IDLE) {
            if (!hasFailed && reads < READS_MAX && IDLE.size() < IDLE_MAX) {
                IDLE.addFirst(this);
                int before = reads;
                CompletableFuture.delayedExecutor(IDLE_MINUTES, TimeUnit.MINUTES).execute(() -> expire(before));
                return;
            }
        }
        process.destroy();
    }

    /** End an idle process that has planned no other read since. */
    private void expire(int before) {
        synchronized (IDLE) {
            if (reads == before && IDLE.remove(this)) {
                process.destroy();
            }
        }
    }

    /** Python refused a read; the text has the class of its exception. PySpark raises it as one of its exceptions. */
    private static final class PlanFailed extends IllegalArgumentException {
        private static final long serialVersionUID = 1L;

        PlanFailed(String text) {
            super(text + "\n"); // Spark appends a code to the text, which is not a part of the error
        }
    }
}
