"""PredictedMemory: the memory that an engine will take, from the headers of its checkpoint and before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.device import Backend
from outrider.engine.config import DecidedConfig, EngineConfig, state_rows
from outrider.engine.setup.resolve import GIB, resolve, situation_of
from outrider.model import DecoderPlan, header_bytes
from outrider.speculative.proposer import NonSpeculativeProposer


@dataclass(frozen=True, slots=True)
class PredictedMemory:
    """Bytes of weights, KV pages and recurrent states, and the settings that they follow from."""

    weights: int
    """Bytes of the weights of target and draft."""
    page_bytes: int
    """Bytes of one page in the target's cache."""
    state_bytes: int
    """Bytes of the recurrent states of one request; 0 for a model without recurrent layers."""
    free: int | None
    """Bytes that are free before loading; None if the device and the host report none."""
    config: DecidedConfig
    """The config that the engine would choose."""

    @property
    def pages(self) -> int:
        """Bytes of all pages of the target's cache."""
        return self.config.num_pages * self.page_bytes

    @property
    def states(self) -> int:
        """Bytes of the recurrent states of all requests and of the prefix cache."""
        return self.state_bytes * state_rows(self.config.max_requests, self.config.state_checkpoints)

    def lines(self) -> list[str]:
        """Return one line of text for each part of the memory, with its size in GiB."""
        config = self.config
        tokens = (config.num_pages - 1) * config.page_size
        found = [
            f"weights: {self.weights / GIB:.2f} GiB",
            f"KV cache: {self.pages / GIB:.2f} GiB, {config.num_pages} pages of {self.page_bytes} bytes, {tokens} tokens",
        ]
        if self.state_bytes:
            rows = f"{config.max_requests} requests, {config.state_checkpoints} checkpoints and padding"
            found.append(f"recurrent states: {self.states / GIB:.2f} GiB, {self.state_bytes} bytes each for {rows}")
        if self.free is not None:
            found.append(f"free before loading: {self.free / GIB:.2f} GiB")
        return found


def predict_memory(
    plan: DecoderPlan, backend: Backend, config: EngineConfig, draft_dir: Path | None = None
) -> PredictedMemory:
    """Predict the memory of an engine for the planned decoder and the draft in ``draft_dir``.

    The caches of a draft aren't counted. Raises :class:`OutOfDeviceMemory` if the memory holds no request even so, with the
    part to reduce.
    """
    weights = plan.weight_bytes + (0 if draft_dir is None else header_bytes(plan, draft_dir))
    facts = situation_of(backend, plan, NonSpeculativeProposer(), unloaded_bytes=weights)
    decided = resolve(config, facts)
    free = None if facts.memory is None else facts.memory.free + weights
    return PredictedMemory(weights, decided.page_size * facts.token_bytes, facts.state_bytes, free, decided)
