"""OpenTelemetry's instrumentor: ``opentelemetry-instrument python app.py`` traces every client without code changes.

`RmqkitInstrumentor` is the entry point of this command. A program can also call it::

    RmqkitInstrumentor().instrument(tracer_provider=provider)

Clients created afterwards have the hook of `otel`, unless they have their own. This module needs the extra ``otel``.
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
    """The switch for the tracing of all clients that are created afterwards: `instrument` enables tracing,
    `uninstrument` disables it.
    ``tracer_provider``: None means the provider of the process."""

    def instrumentation_dependencies(self) -> Collection[str]:
        return ("rmqkit",)

    def _instrument(self, **options: Any) -> None:
        default_hooks.append(Telemetry(options.get("tracer_provider")))

    def _uninstrument(self, **options: Any) -> None:
        default_hooks[:] = [hook for hook in default_hooks if not isinstance(hook, Telemetry)]
