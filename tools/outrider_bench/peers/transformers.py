"""transformers: plain decoding with its static cache. It has no synthetic acceptance, so it doesn't speculate here."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from outrider_bench.child import ChildFailed
from outrider_bench.peers.measuring import Peer
from outrider_bench.peers.session import serve
from outrider_bench.peers.work import Work, checkpoints


class Transformers(Peer):
    """See :class:`~outrider_bench.peers.measuring.Peer`."""

    def __init__(self, model: Any, *, version: str, device: str) -> None:
        self.version = version
        self.settings = (
            "generate(), static cache, compiled by itself where it does so on this device; no synthetic acceptance"
        )
        self._model, self._device = model, device

    def generate(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[int]:
        """See :class:`~outrider_bench.peers.measuring.Peer`; prompts and counts are of one length."""
        import torch

        if len({len(prompt) for prompt in prompts}) > 1 or len(set(counts)) > 1:
            raise ChildFailed("a load of different lengths isn't measured with transformers, which pads")
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


@contextmanager
def opened(work: Work, speculate: str, place: Path) -> Generator[Transformers]:
    """``generate`` as it comes: it compiles the model's forward pass itself where it does that on such a device."""
    import torch

    from outrider.engine.config import DTYPES

    del speculate
    transformers = import_module("transformers")
    target, _ = checkpoints(work, place)
    config = transformers.AutoConfig.from_pretrained(str(target), trust_remote_code=False)
    with torch.device(work.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[work.dtype]).eval()
    yield Transformers(model, version=transformers.__version__, device=work.device)


if __name__ == "__main__":
    serve(opened)
