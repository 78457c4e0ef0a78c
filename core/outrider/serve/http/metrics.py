"""Prometheus metrics of a server, in a separate registry, also under vLLM's names for existing dashboards and routers.

The engine's metrics come from its latest snapshot, so a scrape never waits for the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from outrider.serve.config import ServeConfig
from outrider.serve.connection.engine_client import EngineClient

_ENGINE_LABEL = {"engine": "0"}
"""Label that vLLM's dashboards select by. A server has one engine."""


class MetricAlias(NamedTuple):
    """A second name under which a metric is exported."""

    source: str
    """Name of the metric, without the suffix ``_total`` of counters."""
    name: str
    label: str = ""
    """A label of the metric that changes; empty if none does."""
    new_label: str = ""
    """The label's new name; empty if the alias has the sum over the label."""
    offset: int = 0
    """Number that is added to the label's values."""


ALIASES = (
    MetricAlias("outrider_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
    MetricAlias("outrider_inter_token_seconds", "vllm:inter_token_latency_seconds"),
    MetricAlias("outrider_inter_token_seconds", "vllm:time_per_output_token_seconds"),
    MetricAlias("outrider_request_seconds", "vllm:e2e_request_latency_seconds"),
    MetricAlias("outrider_prompt_tokens_per_request", "vllm:request_prompt_tokens"),
    MetricAlias("outrider_output_tokens_per_request", "vllm:request_generation_tokens"),
    MetricAlias("outrider_prompt_tokens", "vllm:prompt_tokens"),
    MetricAlias("outrider_output_tokens", "vllm:generation_tokens"),
    MetricAlias("outrider_samples", "vllm:request_success", "finish_reason", "finished_reason"),
    MetricAlias("outrider_requests_running", "vllm:num_requests_running"),
    MetricAlias("outrider_requests_waiting", "vllm:num_requests_waiting"),
    MetricAlias("outrider_kv_cache_usage", "vllm:kv_cache_usage_perc"),
    MetricAlias("outrider_kv_cache_usage", "vllm:gpu_cache_usage_perc"),
    MetricAlias("outrider_prefix_cache_queries", "vllm:prefix_cache_queries"),
    MetricAlias("outrider_prefix_cache_hits", "vllm:prefix_cache_hits"),
    MetricAlias("outrider_preemptions", "vllm:num_preemptions"),
    MetricAlias("outrider_drafts", "vllm:spec_decode_num_drafts"),
    MetricAlias("outrider_drafted_tokens", "vllm:spec_decode_num_draft_tokens", "position"),
    MetricAlias("outrider_accepted_tokens", "vllm:spec_decode_num_accepted_tokens", "position"),
    MetricAlias("outrider_accepted_tokens", "vllm:spec_decode_num_accepted_tokens_per_pos", "position", "position", -1),
    MetricAlias("outrider_cache_config_info", "vllm:cache_config_info"),
)


class AliasedRegistry(CollectorRegistry):
    """A registry that has each metric also under its other names."""

    def collect(self) -> Iterator[Metric]:
        """Yield each metric, then its copies under other names."""
        for metric in super().collect():
            yield metric
            for alias in ALIASES:
                if alias.source == metric.name:
                    yield _copy(metric, alias)


def _copy(metric: Metric, alias: MetricAlias) -> Metric:
    copied = Metric(alias.name, metric.documentation, metric.type)
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in metric.samples:
        labels = {**sample.labels, **_ENGINE_LABEL}
        value = labels.pop(alias.label, None)
        if value is not None and alias.new_label:
            labels[alias.new_label] = str(int(value) + alias.offset) if alias.offset else value
        key = (alias.name + sample.name.removeprefix(metric.name), tuple(labels.items()))
        sums[key] = sums.get(key, 0.0) + sample.value
    copied.samples = [Sample(name, dict(labels), total) for (name, labels), total in sums.items()]
    return copied


PROMETHEUS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_REQUEST_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_BUCKETS_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0)
_LENGTH_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
"""Upper bounds of the histogram buckets: seconds of a request, seconds between tokens, tokens of a request."""


class ServerMetrics(Collector):
    """Counters and histograms of the server, and the metrics of ``engine``, which are collected from its latest snapshot.

    Counting a draft costs two additions.
    """

    def __init__(self, engine: EngineClient, config: ServeConfig) -> None:
        self.registry = registry = AliasedRegistry()
        self._model = config.names[0]
        self._time_to_first_token = self._histogram(
            "outrider_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            _REQUEST_BUCKETS_S,
        )
        self._inter_token = self._histogram(
            "outrider_inter_token_seconds",
            "Between two outputs of a sample, divided by the tokens of the second; once for each output.",
            _TOKEN_BUCKETS_S,
        )
        self._request_time = self._histogram(
            "outrider_request_seconds", "From a request's arrival to its last token.", _REQUEST_BUCKETS_S
        )
        self._prompt_lengths = self._histogram(
            "outrider_prompt_tokens_per_request", "Tokens of a request's prompts.", _LENGTH_BUCKETS
        )
        self._output_lengths = self._histogram(
            "outrider_output_tokens_per_request", "Tokens of a request's outputs.", _LENGTH_BUCKETS
        )
        self._prompt_tokens = self._counter("outrider_prompt_tokens", "Tokens of prompts.")
        self._output_tokens = self._counter("outrider_output_tokens", "Tokens of outputs.")
        self._aborted = self._counter("outrider_aborted", "Samples that were aborted: client gone, timeout or error.")
        self._finished = Counter(
            "outrider_samples",
            "Samples that ended, by finish reason, also by an error.",
            ["model_name", "finish_reason"],
            registry=registry,
        )
        labels = ["model_name", "route", "status"]
        self._requests = Counter("outrider_http_requests", "HTTP responses; status 0: none.", labels, registry=registry)
        self._engine = engine
        self._proposed = [0] * (engine.info.draft_tokens + 1)
        """Number of drafts by the number of their tokens."""
        self._accepted = list(self._proposed)
        """Number of drafts by the number of their accepted tokens."""
        registry.register(self)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ["model_name"], registry=self.registry, buckets=buckets).labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self.registry).labels(self._model)

    def record_first_token(self, seconds: float) -> None:
        """Record the time from a request's arrival to its first token."""
        self._time_to_first_token.observe(seconds)

    def record_output(self, seconds: float | None, tokens: int, drafted: int, proposed: int) -> None:
        """Record the time per token of one output of a sample, and the lengths of its draft and of the accepted part."""
        if seconds is not None and tokens:
            self._inter_token.observe(seconds / tokens)
        if proposed:
            self._proposed[proposed] += 1
            self._accepted[drafted] += 1

    def record_finished(self, seconds: float, prompt_tokens: int, output_tokens: int) -> None:
        """Record the time and the lengths of a request all of whose choices have ended without an error."""
        self._request_time.observe(seconds)
        self._prompt_lengths.observe(prompt_tokens)
        self._output_lengths.observe(output_tokens)

    def count_samples(self, reasons: list[str]) -> None:
        """Count the choices of a request that have ended, by their finish reasons."""
        for reason in reasons:
            self._finished.labels(self._model, reason).inc()

    def count_tokens(self, prompt_tokens: int, output_tokens: int) -> None:
        """Add the tokens of a request to the counters, however it ended."""
        self._prompt_tokens.inc(prompt_tokens)
        self._output_tokens.inc(output_tokens)

    def count_aborted(self, samples: int) -> None:
        """Count samples that were aborted before they finished."""
        self._aborted.inc(samples)

    def count_response(self, route: str, status: int) -> None:
        """Count one HTTP response of ``route``. Status 0: the client disconnected before the response."""
        self._requests.labels(self._model, route, str(status)).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def describe(self) -> Iterator[Metric]:
        """Return no metric: the set of metrics depends on whether the engine has sent a snapshot."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the number of drafts (all, and by position those with a token there and those accepted up to it) and the
        engine's metrics. Before the first snapshot, the only one of these is ``outrider_up``.
        """
        yield self._metric(CounterMetricFamily, "outrider_drafts", "Drafts that were verified.", sum(self._proposed))
        yield self._by_position("outrider_drafted_tokens", "Drafts that had a token at this position.", self._proposed)
        yield self._by_position("outrider_accepted_tokens", "Drafts that were accepted up to this position.", self._accepted)
        up = float(self._engine.error is None)
        yield self._metric(GaugeMetricFamily, "outrider_up", "1 while the engine runs, 0 once it is gone.", up)
        snapshot, info = self._engine.snapshot, self._engine.info
        if snapshot is None:
            return
        stats, load = snapshot.stats, snapshot.load
        used = 1 - load.free_pages / load.pages if load.pages else 0.0
        # (name, help text, value)
        gauges = [
            ("outrider_requests_running", "Samples that the engine runs.", load.running),
            ("outrider_requests_waiting", "Samples that wait for a row or for pages.", load.waiting),
            ("outrider_kv_cache_usage", "Share of the KV pages that requests hold, 0 to 1.", used),
            ("outrider_kv_pages_cached", "Pages that only the prefix cache holds.", load.cached_pages),
            ("outrider_state_checkpoints", "Prefixes whose recurrent states are kept.", load.state_checkpoints),
        ]
        counters = [
            ("outrider_prefix_cache_queries", "Tokens looked up.", stats.prefix_looked_up),
            ("outrider_prefix_cache_hits", "Tokens found in the cache.", stats.prefix_hits),
            ("outrider_preemptions", "Requests that gave up their pages.", stats.preemptions),
            ("outrider_iterations", "Batches that were launched.", stats.iterations),
            ("outrider_verifications", "Verifications of single requests.", stats.request_iterations),
            ("outrider_verified_tokens", "Tokens that verifications yielded.", stats.verified_tokens),
            ("outrider_step_seconds", "Time of the engine's steps.", snapshot.step_s),
            ("outrider_device_wait_seconds", "Time in steps that the host waited for the device.", stats.blocked_s),
        ]
        for kind, rows in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, text, value in rows:
                yield self._metric(kind, name, text, value)
        cache_config = {
            "block_size": str(info.page_size),
            "num_gpu_blocks": str(info.num_pages),
            "enable_prefix_caching": str(info.prefix_cache),
            "cache_dtype": info.cache_dtype,
        }
        family = GaugeMetricFamily(
            "outrider_cache_config_info", "Shape of the KV cache.", labels=["model_name", *cache_config]
        )
        family.add_metric([self._model, *cache_config.values()], 1.0)
        yield family

    def _metric(self, kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, value: float) -> Metric:
        family = kind(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _by_position(self, name: str, text: str, counts: list[int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name", "position"])
        for position in range(1, len(counts)):
            family.add_metric([self._model, str(position)], sum(counts[position:]))
        return family
