"""The server's log, as JSON or as text, and OpenTelemetry spans of its requests.

A span needs the extra ``otel``. OpenTelemetry's environment variables (``OTEL_EXPORTER_OTLP_ENDPOINT`` and others) configure
the export.
"""

from __future__ import annotations

import json
import logging
import sys
import time
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


class JsonFormatter(logging.Formatter):
    """A formatter that writes one JSON object per line, in ASCII: data of a client can't forge a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON: time, level, event, the record's ``fields`` and its traceback."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {"time": f"{at}.{int(record.msecs):03d}Z", "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """A formatter that writes the message and the record's ``fields`` as text for people."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line, with the traceback of an error on further lines."""
        fields = " ".join(f"{name}={value!r}" for name, value in getattr(record, "fields", {}).items())
        text = f"outrider: {record.getMessage()} {fields}".rstrip()
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def log_to_stderr(form: str) -> None:
    """Write all log records to standard error. ``form`` is ``json`` or ``text``. Replaces the handlers of the root logger."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
