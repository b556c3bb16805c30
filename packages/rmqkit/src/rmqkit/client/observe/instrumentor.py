"""OpenTelemetry's instrumentor: ``opentelemetry-instrument python app.py`` traces every client without code changes.

It is the entry point of that command, and programs may call it::

    RmqkitInstrumentor().instrument(tracer_provider=provider)

Clients created afterwards have the hook of `otel`, unless they have their own. Needs the extra ``otel``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rmqkit import extras
from rmqkit.client.observe.hooks import default_hooks
from rmqkit.client.observe.otel import Telemetry

with extras.needed("otel", "rmqkit.client.observe.instrumentor"):
    from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]

__all__ = ["RmqkitInstrumentor"]


class RmqkitInstrumentor(BaseInstrumentor):  # type: ignore[misc]
    """Switches tracing on (`instrument`) or off (`uninstrument`) for all clients that are created afterwards.
    ``tracer_provider``: None uses the process's provider."""

    def instrumentation_dependencies(self) -> Collection[str]:
        return ("rmqkit",)

    def _instrument(self, **options: Any) -> None:
        default_hooks.append(Telemetry(options.get("tracer_provider")))

    def _uninstrument(self, **options: Any) -> None:
        default_hooks[:] = [hook for hook in default_hooks if not isinstance(hook, Telemetry)]
