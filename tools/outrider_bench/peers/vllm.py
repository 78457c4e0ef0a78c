"""vLLM: dummy weights, an EAGLE draft, and its own synthetic rejection sampling."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from outrider_bench.child import ChildFailed
from outrider_bench.mixed_load import Arrived
from outrider_bench.peers.measuring import Counted, Peer
from outrider_bench.peers.session import serve
from outrider_bench.peers.work import Work, cache_bytes, checkpoints

_COUNTERS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")


class VLLM(Peer):
    """See :class:`~outrider_bench.peers.measuring.Peer`."""

    def __init__(self, vllm: Any, engine: Any, *, drafts: bool, quantized: str | None = None) -> None:
        how = "synthetic rejection sampling by place" if drafts else "no speculation"
        self.version = version("vllm")
        weights = "" if quantized is None else f", compressed-tensors {quantized}"
        self.settings = f"LLM.generate, defaults, {how}{weights}"
        self._vllm, self._engine, self._drafts = vllm, engine, drafts
        self._number = 0

    def generate(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[int]:
        """See :class:`~outrider_bench.peers.measuring.Peer`."""
        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        made = self._engine.generate(given, [self._params(count) for count in counts], use_tqdm=False)
        return [len(each.outputs[0].token_ids) for each in made]

    def _params(self, count: int, **more: object) -> Any:
        return self._vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False, **more)

    def counted(self) -> Counted | None:
        """See :class:`~outrider_bench.peers.measuring.Peer`. Raises :class:`ChildFailed` where it doesn't say."""
        if not self._drafts:
            return None
        values = {metric.name: getattr(metric, "value", None) for metric in self._engine.get_metrics()}
        found = [values.get(name) for name in _COUNTERS]
        if any(value is None for value in found):
            raise ChildFailed(f"this vLLM doesn't say how much it accepted ({', '.join(_COUNTERS)} are missing)")
        verified, drafted, passed = (float(value or 0) for value in found)
        return Counted(verified, drafted, passed)

    def stream(self, prompts: Sequence[Sequence[int]], counts: Sequence[int], arrived: Arrived) -> None:
        """The loop of ``LLM.generate``, with outputs as they come."""
        kinds = import_module("vllm.sampling_params").RequestOutputKind
        engine = self._engine.llm_engine
        for prompt, count in zip(prompts, counts, strict=True):
            self._number += 1
            params = self._params(count, output_kind=kinds.DELTA)
            engine.add_request(f"stream-{self._number}", {"prompt_token_ids": list(prompt)}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = len(output.outputs[0].token_ids)
                if tokens:
                    arrived(output.request_id, tokens)


@contextmanager
def opened(work: Work, speculate: str, place: Path) -> Generator[VLLM]:
    """Its defaults: compiled, in its graphs. The cache is as large as the work needs, since others use the device too."""
    vllm = import_module("vllm")
    drafts = speculate != "none"
    target, draft = checkpoints(work, place)
    options: dict[str, object] = {
        "model": str(target),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": work.dtype,
        "max_model_len": work.context,
        "max_num_seqs": work.max_requests,
        "gpu_memory_utilization": work.memory,
        "kv_cache_memory_bytes": cache_bytes(work, drafts=drafts),
        "enable_prefix_caching": False,
    }
    if drafts:
        options["disable_log_stats"] = False  # they say what was accepted
        options["speculative_config"] = {
            "method": "eagle",
            "model": str(draft),
            "num_speculative_tokens": work.draft_tokens,
            "rejection_sample_method": "synthetic",
            **_acceptance(work),
        }
    yield VLLM(vllm, vllm.LLM(**options), drafts=drafts, quantized=work.quantized)


def _acceptance(work: Work) -> dict[str, object]:
    """The chance of each drafted place, which newer versions take."""
    known = getattr(import_module("vllm.config").SpeculativeConfig, "__dataclass_fields__", {})
    if "synthetic_acceptance_rates" in known:
        return {"synthetic_acceptance_rates": list(work.rates)}
    raise ChildFailed("this vLLM has no synthetic acceptance by place: with random weights it would accept nothing")


if __name__ == "__main__":
    serve(opened)
