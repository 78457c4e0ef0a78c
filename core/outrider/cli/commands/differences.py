"""The first token that differs between two runs, and the gap of the logits at its position."""

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
    """The first difference between two continuations of one prompt, with logits of a prefill of their common part."""

    prompt: int
    """Index of the prompt."""
    position: int
    """Index of the first different token in the output."""
    speculative: int
    """Token of the speculative run at ``position``."""
    plain: int
    """Token of the non-speculative run at ``position``."""
    top_logit: float
    """Largest logit of the vocabulary."""
    gap: float
    """Distance between the largest logit and the lower one of both tokens' logits."""
    gap_roundings: float
    """``gap`` in units of the last place of the engine's dtype at ``top_logit``."""


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Return the index of the first different token, or None if one output is a prefix of the other."""
    return next((index for index, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)


class PrefillComparison:
    """A comparison of two outputs: it computes the logits at their first difference again, by a prefill of their common part.

    ``plain``: an engine of a native model. The comparison uses its model, kernels, dtype, page size and context length.
    """

    def __init__(self, plain: Engine) -> None:
        model, config = plain.model, plain.config
        assert isinstance(model, Decoder)
        kernels, self._recorded = _with_recording(model.kernels)
        self._dtype = config.torch_dtype
        config_of_prefill = EngineConfig(
            max_requests=1,
            page_size=config.page_size,
            max_context=plain.max_context,
            dtype=config.dtype,
            mode="staged",
            graphs=False,
            overlap=False,
            prefix_cache=False,
        )
        self._engine = Engine(Decoder(model.config, model.weights, kernels), plain.backend, config=config_of_prefill)

    def compare(
        self, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int], *, number: int = 0
    ) -> Difference | None:
        """Return the first difference of two continuations of ``prompt``, or None if one is a prefix of the other."""
        at = first_difference(ours, theirs)
        if at is None:
            return None
        self._engine.generate([[*prompt, *ours[:at]]], SamplingParams(max_tokens=1, logprobs=0, ignore_eos=True))
        logits = self._recorded.first_row_of_last_call()
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
class _RecordedLogits:
    """The logits that each call of the kernel ``logprobs`` got, in order. They can be read once the engine has no open
    request.
    """

    calls: list[Tensor] = field(default_factory=list)

    def first_row_of_last_call(self) -> list[float]:
        """Return the logits [V] of the first row of the last call, copied to the host."""
        row: list[float] = self.calls[-1].tolist()
        return row


class _RecordingKernels(WrappedKernels):
    def __init__(self, inner: KernelSet) -> None:
        super().__init__(inner)
        self.recorded = _RecordedLogits()

    def logprobs(self, logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Record the logits, and return the log-probabilities of the wrapped kernels."""
        self.recorded.calls.append(logits.flatten(0, -2)[0].double())
        return super().logprobs(logits, tokens, count)


def _with_recording(kernels: KernelSet) -> tuple[KernelSet, _RecordedLogits]:
    """Return ``kernels`` that record the logits of reported log-probabilities. They can't run in a captured graph."""
    recording = _RecordingKernels(kernels)
    return recording, recording.recorded
