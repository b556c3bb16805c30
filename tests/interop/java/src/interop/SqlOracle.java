package interop;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.Base64;
import java.util.Map;
import org.apache.rocketmq.broker.filter.MessageEvaluationContext;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.filter.SqlFilter;
import org.apache.rocketmq.filter.expression.Expression;

/**
 * Apache's own SQL92 filter, asked line by line: an expression and a property string, both in Base64, parted by a
 * space. The answer is "compile" (it does not compile, and the message), "error" (it does not evaluate) or "value".
 */
public final class SqlOracle {
    private SqlOracle() {
    }

    public static void main(String[] args) throws Exception {
        // Apache's parser writes to both streams; the answers keep the first one for themselves.
        PrintStream answers = new PrintStream(System.out, false, StandardCharsets.UTF_8);
        System.setOut(System.err);
        BufferedReader questions = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = questions.readLine(); line != null; line = questions.readLine()) {
            String[] parts = line.split(" ", 2);
            answers.println(answer(decoded(parts[0]), MessageDecoder.string2messageProperties(decoded(parts[1]))));
        }
        answers.flush();
    }

    private static String answer(String text, Map<String, String> properties) {
        Expression expression;
        try {
            expression = new SqlFilter().compile(text);
        } catch (Throwable refusal) {
            return "compile " + encoded(String.valueOf(refusal.getMessage()));
        }
        try {
            return "value " + expression.evaluate(new MessageEvaluationContext(properties));
        } catch (Throwable failure) {
            return "error";
        }
    }

    private static String decoded(String text) {
        return new String(Base64.getDecoder().decode(text), StandardCharsets.UTF_8);
    }

    private static String encoded(String text) {
        return Base64.getEncoder().encodeToString(text.getBytes(StandardCharsets.UTF_8));
    }
}
