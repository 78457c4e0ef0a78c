"""The peer transformers with its static cache, without speculation, since it has no synthetic acceptance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from outrider_bench.child import BenchFailed
from outrider_bench.peers.measuring import Peer, serve_runs
from outrider_bench.peers.work import PeerWork, checkpoint_configs


class TransformersPeer(Peer):
    """transformers' ``generate`` as one of the compared engines."""

    def __init__(self, model: Any, *, version: str, device: str) -> None:
        self.version = version
        self.settings = (
            "generate(), static cache, compiled by itself where it does so on this device; no synthetic acceptance"
        )
        self._model, self._device = model, device

    def generate(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[int]:
        """Generate tokens for prompts of one length, and return their numbers. Raises :class:`BenchFailed` for
        other loads.
        """
        import torch

        if len({len(prompt) for prompt in prompts}) > 1 or len(set(counts)) > 1:
            raise BenchFailed("a load of different lengths isn't measured with transformers, which pads")
        given = torch.tensor([list(prompt) for prompt in prompts], device=self._device)
        made = self._model.generate(
            given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            max_new_tokens=counts[0],
            min_new_tokens=counts[0],
            pad_token_id=0,
            cache_implementation="static",
        )
        return [len(each) - given.shape[1] for each in made.tolist()]


def open_peer(work: PeerWork, directory: Path) -> TransformersPeer:
    """Open the model with the defaults of ``generate``, which compiles the forward pass on devices that it supports."""
    import torch

    from outrider.engine.config import DTYPES

    transformers = import_module("transformers")
    target, _ = checkpoint_configs(work, directory)
    config = transformers.AutoConfig.from_pretrained(str(target), trust_remote_code=False)
    with torch.device(work.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[work.dtype]).eval()
    return TransformersPeer(model, version=transformers.__version__, device=work.device)


def serve(given: Mapping[str, Any]) -> Iterator[Mapping[str, object]]:
    """Serve runs of transformers; see :func:`~outrider_bench.peers.measuring.serve_runs`."""
    return serve_runs(given, open_peer)
