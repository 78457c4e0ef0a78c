"""Spans of requests."""

import pytest

pytest.importorskip("opentelemetry.sdk", reason="not run: the extra otel isn't installed")

from outrider.serve.http.request_middleware import RequestSpans


def test_a_span_has_the_times_the_parent_and_the_fields_of_a_request():
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    spans = RequestSpans(kept)
    caller = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    fields = {
        "status": 200,
        "method": "POST",
        "prompt_tokens": 7,
        "finish_reasons": ["stop"],
        "first_token_s": None,
        "odd": 1,
    }
    spans.record("POST /v1/completions", caller, seconds=0.5, now_ns=2_000_000_000, fields=fields)
    spans.record("GET /none", {}, seconds=0.1, now_ns=10, fields={"status": 503, "error": "gone"})
    spans.close()
    first, second = kept.get_finished_spans()
    assert (first.start_time, first.end_time) == (1_500_000_000, 2_000_000_000)
    assert f"{first.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert first.parent.span_id == 0xB7AD6B7169203331
    assert dict(first.attributes) == {
        "http.response.status_code": 200,
        "http.request.method": "POST",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.response.finish_reasons": ("stop",),
    }
    assert (first.status.is_ok, second.status.is_ok) == (True, False)
    assert second.parent is None
