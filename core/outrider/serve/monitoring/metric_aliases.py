"""The table of metrics under vLLM's names, for dashboards and routers that were written for vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

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
    """A view of a registry that has each metric also under its other names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._source = registry

    def collect(self) -> Iterator[Metric]:
        """Yield each metric of the registry, then its copies under other names."""
        for metric in self._source.collect():
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
