"""What clients tell of their work: hooks, trace topic, OpenTelemetry, status."""
