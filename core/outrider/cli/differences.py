"""Where the tokens of two runs part, and how close the model's decision was there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.device import KernelSet, WrappedKernels
from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.requests.sampling import SamplingParams
from outrider.model import Decoder


@dataclass(frozen=True, slots=True)
class Difference:
    """Where the tokens of one prompt part, and what the model says there about the text that both have so far.

    ``gap``: how far the lower of both tokens' logits is below the largest of all, computed once more by a prefill.
    ``gap_roundings``: the same in units of the last place of the engine's dtype at that size.
    """

    prompt: int
    position: int
    speculative: int
    plain: int
    top_logit: float
    gap: float
    gap_roundings: float


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The index of the first token that isn't the same; None where one merely goes on longer, or both are equal."""
    return next((index for index, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)


class Closer:
    """Takes a second look at places where tokens part, by a prefill of what both have so far.

    ``plain``: an engine of a native model, whose dtype and cache pages the look takes over. Its kernels decide.
    """

    def __init__(self, plain: Engine) -> None:
        model, config = plain.model, plain.config
        assert isinstance(model, Decoder)
        kernels, self._notes = _with_witness(model.kernels)
        self._dtype = config.torch_dtype
        looking = EngineConfig(
            max_requests=1,
            page_size=config.page_size,
            max_context=plain.max_context,
            dtype=config.dtype,
            mode="staged",
            graphs=False,
            overlap=False,
            prefix_cache=False,
        )
        self._engine = Engine(Decoder(model.config, model.weights, kernels), plain.backend, config=looking)

    def look(
        self, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int], *, number: int = 0
    ) -> Difference | None:
        """The first difference of two continuations of ``prompt``; None where one merely goes on longer."""
        at = first_difference(ours, theirs)
        if at is None:
            return None
        self._engine.generate([[*prompt, *ours[:at]]], SamplingParams(max_tokens=1, logprobs=0, ignore_eos=True))
        logits = self._notes.last()
        top = max(logits)
        gap = top - min(logits[ours[at]], logits[theirs[at]])
        unit = torch.finfo(self._dtype).eps * 2.0 ** math.floor(math.log2(max(abs(top), 2.0**-20)))
        return Difference(
            prompt=number,
            position=at,
            speculative=ours[at],
            plain=theirs[at],
            top_logit=top,
            gap=gap,
            gap_roundings=gap / unit,
        )


@dataclass(slots=True)
class _Notes:
    """The recorded logits, call by call; read them when decoding is over."""

    seen: list[Tensor] = field(default_factory=list)

    def last(self) -> list[float]:
        """The logits [V] of the first row of the last call, as the kernels got them."""
        row: list[float] = self.seen[-1].tolist()
        return row


class _Witness(WrappedKernels):
    def __init__(self, inner: KernelSet) -> None:
        super().__init__(inner)
        self.notes = _Notes()

    def logprobs(self, logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Record the logits, then report as usual."""
        self.notes.seen.append(logits.flatten(0, -2)[0].double())
        return super().logprobs(logits, tokens, count)


def _with_witness(kernels: KernelSet) -> tuple[KernelSet, _Notes]:
    """``kernels`` that also record the logits behind reported log-probabilities. They don't work in graphs."""
    witness = _Witness(kernels)
    return witness, witness.notes
