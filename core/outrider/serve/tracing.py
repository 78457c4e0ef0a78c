"""A span of OpenTelemetry for each request; needs the extra ``otel``. Where spans go, OpenTelemetry's variables say."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from outrider.device.errors import ConfigError

_NAMES: Mapping[str, str] = {
    "request_id": "outrider.request_id",
    "status": "http.response.status_code",
    "method": "http.request.method",
    "path": "url.path",
    "client": "client.address",
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "finish_reasons": "gen_ai.response.finish_reasons",
    "accepted_draft_tokens": "outrider.accepted_draft_tokens",
    "aborted": "outrider.aborted",
    "first_token_s": "outrider.first_token_s",
    "error": "error.message",
    "outcome": "outrider.outcome",
}
"""Fields of the log, as spans name them: by OpenTelemetry's conventions where there are any."""


class Spans:
    """Makes spans, and sends them in batches from a thread of its own: over OTLP, or by ``exporter``.

    Raises :class:`ConfigError` where the extra isn't installed.
    """

    def __init__(self, exporter: Any = None) -> None:
        if any(find_spec(name) is None for name in ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter")):
            raise ConfigError("spans need OpenTelemetry, which isn't installed; run: pip install 'outrider[serve,otel]'")
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter()
        self._provider = TracerProvider(resource=Resource.create({"service.name": "outrider"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("outrider.serve")
        self._propagator = TraceContextTextMapPropagator()

    def record(
        self, name: str, headers: Mapping[str, str], *, seconds: float, now_ns: int, fields: Mapping[str, Any]
    ) -> None:
        """A request that is over: it took ``seconds``, until ``now_ns`` since 1970. ``headers`` may name the caller's span
        (``traceparent``); ``fields``: those of the log.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode

        parent = self._propagator.extract(dict(headers))
        began = now_ns - int(seconds * 1e9)
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, start_time=began)
        span.set_attributes({_NAMES[key]: value for key, value in fields.items() if key in _NAMES and value is not None})
        if fields["status"] >= 500 or fields["status"] == 0:
            span.set_status(Status(StatusCode.ERROR, str(fields.get("error") or fields.get("outcome"))))
        span.end(now_ns)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()
