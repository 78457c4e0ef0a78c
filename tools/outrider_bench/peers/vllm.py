"""The peer vLLM with dummy weights, an EAGLE or MTP draft and its own synthetic rejection sampling."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from outrider_bench.child import BenchFailed
from outrider_bench.load import StreamedAnswer
from outrider_bench.peers.measuring import DraftCounts, Peer, serve_runs
from outrider_bench.peers.work import PeerWork, cache_bytes, checkpoint_configs

_COUNTERS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")


class VllmPeer(Peer):
    """vLLM's offline engine as one of the compared engines."""

    def __init__(
        self, vllm: Any, engine: Any, *, drafts: bool, quantized: str | None = None, asked: Mapping[str, object] | None = None
    ) -> None:
        how = "synthetic rejection sampling by position" if drafts else "no speculation"
        self.version = version("vllm")
        weights = "" if quantized is None else f", compressed-tensors {quantized}"
        own = "".join(f", {name}={value!r}" for name, value in (asked or {}).items())
        variables = "".join(f", {name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith("VLLM_"))
        self.settings = f"LLM.generate, defaults{own}{variables}, {how}{weights}"
        self._vllm, self._engine, self._drafts = vllm, engine, drafts
        self._number = 0

    def generate(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[int]:
        """Generate tokens with vLLM's ``LLM.generate``, and return the number of new tokens of each prompt."""
        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        made = self._engine.generate(given, [self._params(count) for count in counts], use_tqdm=False)
        return [len(each.outputs[0].token_ids) for each in made]

    def _params(self, count: int, **more: object) -> Any:
        return self._vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False, **more)

    def draft_counts(self) -> DraftCounts | None:
        """Return the totals of draft tokens; None without drafts. Raises :class:`BenchFailed` if this vLLM has no such
        counters.
        """
        if not self._drafts:
            return None
        values = {metric.name: getattr(metric, "value", None) for metric in self._engine.get_metrics()}
        found = [values.get(name) for name in _COUNTERS]
        if any(value is None for value in found):
            raise BenchFailed(f"this vLLM doesn't say how much it accepted ({', '.join(_COUNTERS)} are missing)")
        verified, drafted, passed = (float(value or 0) for value in found)
        return DraftCounts(verified, drafted, passed)

    def stream(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[StreamedAnswer]:
        """Run the loop of ``LLM.generate`` for all prompts, and return the answers."""
        kinds = import_module("vllm.sampling_params").RequestOutputKind
        engine = self._engine.llm_engine
        answers: dict[str, StreamedAnswer] = {}
        for prompt, count in zip(prompts, counts, strict=True):
            self._number += 1
            params = self._params(count, output_kind=kinds.DELTA)
            answers[f"stream-{self._number}"] = StreamedAnswer()
            engine.add_request(f"stream-{self._number}", {"prompt_token_ids": list(prompt)}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = len(output.outputs[0].token_ids)
                if tokens:
                    answers[output.request_id].add_output(tokens)
        return list(answers.values())


def open_peer(work: PeerWork, speculate: str, directory: Path, asked: Mapping[str, object] | None = None) -> VllmPeer:
    """Open vLLM with its defaults and the arguments ``asked`` of ``vllm.LLM``.

    The KV cache has the size of the work, since several engines share a device. An MTP head is part of the target.
    """
    vllm = import_module("vllm")
    drafts = speculate != "none"
    target, draft = checkpoint_configs(work, directory)
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
            "method": speculate,
            "model": str(target if speculate == "mtp" else draft),
            "num_speculative_tokens": work.model.draft_tokens,
            "rejection_sample_method": "synthetic",
            **_acceptance(work),
        }
    engine = vllm.LLM(**options | dict(asked or {}))
    return VllmPeer(vllm, engine, drafts=drafts, quantized=work.model.quantized, asked=asked)


def _acceptance(work: PeerWork) -> dict[str, object]:
    """Return the setting of vLLM's synthetic acceptance: the chance of each draft token, in the form of the installed
    version.
    """
    known = getattr(import_module("vllm.config").SpeculativeConfig, "__dataclass_fields__", {})
    if "synthetic_acceptance_rates" in known:
        return {"synthetic_acceptance_rates": list(work.rates)}
    raise BenchFailed("this vLLM has no synthetic acceptance by position: with random weights it would accept nothing")


def serve(given: Mapping[str, Any]) -> Iterator[Mapping[str, object]]:
    """Serve runs of vLLM; see :func:`~outrider_bench.peers.measuring.serve_runs`."""
    asked = given["options"]["vllm_arguments"]
    return serve_runs(given, lambda work, directory: open_peer(work, given["speculate"], directory, asked))
