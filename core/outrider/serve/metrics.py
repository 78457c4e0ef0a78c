"""Metrics of a server, in a registry of its own. The engine's come from its latest snapshot: a scrape waits for nothing."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.serve.client import EngineClient
from outrider.serve.config import ServeConfig

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_SHORT = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class Metrics:
    """What the server counts. ``engine``: where the engine's part comes from."""

    def __init__(self, engine: EngineClient, config: ServeConfig) -> None:
        self.registry = registry = CollectorRegistry()
        model = config.names[0]
        self._vllm = _VllmHistograms(registry, model)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ["model_name"], registry=registry, buckets=buckets).labels(model)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ["model_name", *labels], registry=registry)

        self._first = histogram(
            "outrider_time_to_first_token_seconds", "From a request's arrival to its first token.", _SECONDS
        )
        self._between = histogram(
            "outrider_inter_token_seconds",
            "Between two outputs of a sample, divided by the tokens of the second; once for each output.",
            _SHORT,
        )
        self._whole = histogram("outrider_request_seconds", "From a request's arrival to its last token.", _SECONDS)
        self._prompt_sizes = histogram("outrider_prompt_tokens_per_request", "Tokens of a request's prompts.", _TOKENS)
        self._output_sizes = histogram("outrider_output_tokens_per_request", "Tokens of a request's outputs.", _TOKENS)
        self._prompt_tokens = counter("outrider_prompt_tokens", "Tokens of prompts.").labels(model)
        self._output_tokens = counter("outrider_output_tokens", "Tokens of outputs.").labels(model)
        self._aborted = counter("outrider_aborted", "Samples that ended because nobody reads them.").labels(model)
        self._finished = counter("outrider_samples", "Samples that ended, by why.", "finish_reason")
        self._model = model
        self._requests = Counter("outrider_http_requests", "Answers of the server.", ["route", "status"], registry=registry)
        drafts = _Drafts(model, engine.info.draft_tokens)
        self._proposed, self._passed = drafts.proposed, drafts.passed
        registry.register(drafts)
        registry.register(_EngineCollector(engine, config))

    def first_token(self, seconds: float) -> None:
        """A request's first token came so long after the request."""
        self._first.observe(seconds)
        self._vllm.first.observe(seconds)

    def output(self, seconds: float | None, tokens: int, drafted: int, proposed: int) -> None:
        """A sample got ``tokens``, ``seconds`` after those before; of ``proposed`` by a draft, ``drafted`` passed."""
        if seconds is not None and tokens:
            self._between.observe(seconds / tokens)
            self._vllm.between.observe(seconds / tokens)
        if proposed:
            self._proposed[proposed] += 1
            self._passed[drafted] += 1

    def ended(self, seconds: float, prompt_tokens: int, output_tokens: int, reasons: list[str]) -> None:
        """A request was answered in full."""
        self._whole.observe(seconds)
        self._prompt_sizes.observe(prompt_tokens)
        self._output_sizes.observe(output_tokens)
        self.counted(prompt_tokens, output_tokens)
        for reason in reasons:
            self._finished.labels(self._model, reason).inc()
        self._vllm.whole.observe(seconds)

    def counted(self, prompt_tokens: int, output_tokens: int) -> None:
        """So many tokens were read and written."""
        self._prompt_tokens.inc(prompt_tokens)
        self._output_tokens.inc(output_tokens)
        self._vllm.prompt_tokens.inc(prompt_tokens)
        self._vllm.output_tokens.inc(output_tokens)

    def aborted(self, samples: int) -> None:
        """Samples were ended before their time."""
        self._aborted.inc(samples)

    def answered(self, route: str, status: int) -> None:
        """The server answered."""
        self._requests.labels(route, str(status)).inc()

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)


class _VllmHistograms:
    """The same under the names that vLLM's dashboards and routers read."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", text, ["model_name"], registry=registry, buckets=buckets).labels(model)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, ["model_name"], registry=registry).labels(model)

        self.first = histogram("time_to_first_token_seconds", "See outrider_time_to_first_token_seconds.", _SECONDS)
        self.between = histogram("inter_token_latency_seconds", "See outrider_inter_token_seconds.", _SHORT)
        self.whole = histogram("e2e_request_latency_seconds", "See outrider_request_seconds.", _SECONDS)
        self.prompt_tokens = counter("prompt_tokens", "See outrider_prompt_tokens_total.")
        self.output_tokens = counter("generation_tokens", "See outrider_output_tokens_total.")


class _Drafts(Collector):
    """Drafts by their length, and by how much of them was accepted: two plain additions for each output."""

    def __init__(self, model: str, longest: int) -> None:
        self._model = model
        self.proposed = [0] * (longest + 1)
        self.passed = [0] * (longest + 1)

    def describe(self) -> Iterator[Metric]:
        """See :class:`prometheus_client.registry.Collector`."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """For each place of a draft, how many drafts had it, and how many were accepted up to it."""
        yield self._family("outrider_drafted_tokens", "Drafts that had a token at this place.", self.proposed)
        yield self._family("outrider_accepted_tokens", "Drafts that were accepted up to this place.", self.passed)

    def _family(self, name: str, text: str, counts: list[int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name", "position"])
        for place in range(1, len(counts)):
            family.add_metric([self._model, str(place)], sum(counts[place:]))
        return family


class _EngineCollector(Collector):
    """Reads the engine's latest snapshot."""

    def __init__(self, engine: EngineClient, config: ServeConfig) -> None:
        self._engine = engine
        self._model = config.names[0]

    def describe(self) -> Iterator[Metric]:
        """Nothing: what there is depends on the engine."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Metrics of the engine; those alone that don't need a snapshot where there is none."""
        yield self._gauge("outrider_up", "Whether the engine works.", float(self._engine.error is None))
        snapshot, info = self._engine.snapshot, self._engine.info
        if snapshot is None:
            return
        stats, load = snapshot.stats, snapshot.load
        used = 1 - load.free_pages / load.pages if load.pages else 0.0
        gauges = [
            ("outrider_requests_running", "num_requests_running", "Samples that the engine runs.", load.running),
            ("outrider_requests_waiting", "num_requests_waiting", "Samples that wait for room.", load.waiting),
            ("outrider_kv_cache_usage", "kv_cache_usage_perc", "Share of the KV pages that requests hold, 0 to 1.", used),
            ("outrider_kv_pages_cached", None, "Pages that no request holds, kept for their prefix.", load.cached_pages),
        ]
        counters = [
            ("outrider_prefix_cache_queries", "prefix_cache_queries", "Tokens looked up.", stats.prefix_looked_up),
            ("outrider_prefix_cache_hits", "prefix_cache_hits", "Tokens found in the cache.", stats.prefix_hits),
            ("outrider_preemptions", "num_preemptions", "Requests that gave up their pages.", stats.preemptions),
            ("outrider_iterations", None, "Batches that were launched.", stats.iterations),
            ("outrider_verifications", None, "Verifications of single requests.", stats.request_iterations),
            ("outrider_verified_tokens", None, "Tokens that verifications yielded.", stats.verified_tokens),
            ("outrider_step_seconds", None, "Time of the engine's steps.", snapshot.step_s),
            ("outrider_device_wait_seconds", None, "Of these, the host waited for the device.", stats.blocked_s),
        ]
        for name, other, text, value in gauges:
            yield self._gauge(name, text, value)
            if other is not None:
                yield self._gauge(f"vllm:{other}", text, value)
        for name, other, text, count in counters:
            yield self._counter(name, text, count)
            if other is not None:
                yield self._counter(f"vllm:{other}", text, count)
        shape = {
            "block_size": str(info.page_size),
            "num_gpu_blocks": str(info.num_pages),
            "enable_prefix_caching": str(info.prefix_cache),
            "cache_dtype": info.cache_dtype,
        }
        yield self._info("outrider_cache_config_info", shape)
        yield self._info("vllm:cache_config_info", shape)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _info(self, name: str, labels: dict[str, str]) -> Metric:
        family = GaugeMetricFamily(name, "Shape of the KV cache.", labels=["model_name", *labels])
        family.add_metric([self._model, *labels.values()], 1.0)
        return family
