"""Reports of clients on their work: hooks, trace topic, OpenTelemetry, status."""
