"""OpenTelemetry spans, one for each request. Needs the extra ``otel``.

OpenTelemetry's environment variables (``OTEL_EXPORTER_OTLP_ENDPOINT`` and others) configure the export.
"""

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
"""Span attribute of each field of the request log, named by OpenTelemetry's conventions if they have such a name."""


class RequestSpans:
    """An exporter of request spans. A background thread sends them in batches, by OTLP over HTTP or with ``exporter``.

    Raises :class:`ConfigError` if the extra isn't installed.
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
        """Queue the span of a finished request, which ended at ``now_ns`` (Unix time) and took ``seconds``.

        ``headers`` are the request's trace headers: a ``traceparent`` names the parent span. ``fields`` are the fields of the
        request's log record.
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
        """Export the queued spans, and stop the background thread."""
        self._provider.shutdown()
