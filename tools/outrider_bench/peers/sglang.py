"""SGLang: dummy weights, an EAGLE draft, and its simulated acceptance length."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from outrider_bench.child import ChildFailed
from outrider_bench.peers.measuring import Counted, Peer
from outrider_bench.peers.session import serve
from outrider_bench.peers.work import Work, checkpoints


def variables(accept_length: float, speculate: str) -> dict[str, str]:
    """The environment in which it simulates acceptance."""
    if speculate == "none":
        return {}
    return {"SGLANG_SIMULATE_ACC_LEN": f"{accept_length:g}", "SGLANG_SIMULATE_ACC_METHOD": "match-expected"}


class SGLang(Peer):
    """See :class:`~outrider_bench.peers.measuring.Peer`."""

    def __init__(self, engine: Any, *, drafts: int) -> None:
        """``drafts``: tokens of a draft; 0 for none."""
        how = "simulated acceptance length" if drafts else "no speculation"
        self.version = version("sglang")
        self.settings = f"Engine.generate, defaults, {how}"
        self._engine, self._drafts = engine, drafts
        self._verified, self._passed = 0.0, 0.0

    def generate(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[int]:
        """See :class:`~outrider_bench.peers.measuring.Peer`."""
        params = [
            {"temperature": 0.0, "max_new_tokens": count, "min_new_tokens": count, "ignore_eos": True} for count in counts
        ]
        made = self._engine.generate(input_ids=[list(prompt) for prompt in prompts], sampling_params=params)
        tokens = [each["meta_info"]["completion_tokens"] for each in made]
        for each, count in zip(made, tokens, strict=True):
            if self._drafts and count > 1:
                verified = each["meta_info"].get("spec_verify_ct")
                if not verified:
                    raise ChildFailed("this SGLang doesn't say how often it verified (spec_verify_ct is missing)")
                self._verified += verified
                self._passed += count - 1 - verified
        return tokens

    def counted(self) -> Counted | None:
        """See :class:`~outrider_bench.peers.measuring.Peer`."""
        return Counted(self._verified, self._verified * self._drafts, self._passed) if self._drafts else None


@contextmanager
def opened(work: Work, speculate: str, place: Path) -> Generator[SGLang]:
    """Its defaults, attention included."""
    sglang = import_module("sglang")
    drafts = speculate != "none"
    target, draft = checkpoints(work, place)
    options: dict[str, object] = {
        "model_path": str(target),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": work.dtype,
        "context_length": work.context,
        "max_running_requests": work.max_requests,
        "mem_fraction_static": work.memory,
        "disable_radix_cache": True,
    }
    if drafts:
        options |= {
            "speculative_algorithm": "EAGLE",
            "speculative_draft_model_path": str(draft),
            "speculative_num_steps": work.draft_tokens,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": work.draft_tokens + 1,
        }
    engine = sglang.Engine(**options)
    try:
        yield SGLang(engine, drafts=work.draft_tokens if drafts else 0)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    serve(opened)
