"""RecurrentBlock: a gated delta rule with a short convolution, in place of a layer's attention (Yang et al. 2024).

Speculation can't truncate a recurrent state. A pass over drafts therefore leaves the states unchanged and keeps the inputs of
each recurrent layer; :meth:`RecurrentBlock.commit` runs the same kernels over the accepted tokens again and writes their
states. Both passes compute the same bits.

Letters: T new tokens, B sequences, H hidden size, C channels of the convolution, Hv value heads, E value size.
"""

from __future__ import annotations

from torch import Tensor

from outrider.device import ConfigError, DeltaRuleWeights, KernelSet, RecurrentBatch
from outrider.model.config.model_config import RecurrentConfig
from outrider.model.layers.cache import LayerState
from outrider.model.layers.inputs import ForwardInput, StateInput
from outrider.model.layers.products import SplitWeight, Weight, linear


class RecurrentBlock:
    """The recurrent part of one layer. ``projection`` [C + Hv E + 2 Hv, H] has the rows of q, k, v and the output gate, then
    those of b and a of each value head.
    """

    def __init__(
        self, config: RecurrentConfig, projection: Weight, weights: DeltaRuleWeights, kernels: KernelSet, *, eps: float
    ) -> None:
        self._config = config
        self._projections = _without_gates(projection, 2 * config.value_heads)
        self._weights = weights
        self._kernels = kernels
        self._eps = eps

    def forward(self, normed: Tensor, inputs: ForwardInput, state: LayerState) -> Tensor:
        """Return the gated results of the kept rows [S, Hv E] for normed input [T, H], before the output product."""
        states, config = inputs.states, self._config
        if states is None:
            raise ConfigError("a model with recurrent layers was called without the rows of its states (ForwardInput.states)")
        made = [linear(self._kernels, normed, each) for each in self._projections]
        sizes = config.channels, config.value_width, 2 * config.value_heads
        mixed, gate, *rest = made[0].split(sizes[: 4 - len(made)], dim=1)
        gates = rest[0] if rest else made[1]
        batch = _batch_of(inputs, states)
        if states.window is None:
            commit = batch.token_counts if states.counts is None else states.counts
            normed_heads = self._run(mixed, gates, state, batch, commit, decodes=states.decodes, gate=gate)
        else:
            states.window.append((mixed, gates))
            normed_heads = self._run(mixed, gates, state, batch, None, decodes=True, gate=gate)
        assert normed_heads is not None  # there is a gate
        return inputs.select_rows(normed_heads.flatten(1), self._kernels)

    def commit(self, kept: tuple[Tensor, Tensor], state: LayerState, batch: RecurrentBatch, counts: Tensor) -> None:
        """Write the states after ``counts`` int64 [B] of the tokens whose inputs :meth:`forward` ``kept``."""
        self._run(*kept, state, batch, counts, decodes=True)

    def _run(
        self,
        mixed: Tensor,
        gates: Tensor,
        state: LayerState,
        batch: RecurrentBatch,
        commit: Tensor | None,
        *,
        decodes: bool,
        gate: Tensor | None = None,
    ) -> Tensor | None:
        """Return the normed heads [T, Hv, E], or None without ``gate``: then only the states after ``commit`` are needed."""
        kernels, weights = self._kernels, self._weights
        convolved = kernels.short_convolution(mixed, weights.convolution, state.convolution, batch, commit)
        operands = convolved, gates, weights.a_log, weights.dt_bias, state.delta, batch
        made = kernels.gated_delta_rule(*operands, commit) if decodes else kernels.chunk_gated_delta_rule(*operands)
        if gate is None:
            return None
        return kernels.gated_rms_norm(made, gate.unflatten(1, made.shape[1:]), weights.norm, self._eps)


def _without_gates(projection: Weight, rows: int) -> tuple[Weight, ...]:
    """Return the weight as one product, or as two if only the last ``rows`` rows, those of b and a, are stored in another
    format.
    """
    if not isinstance(projection, SplitWeight) or projection.parts[-1].shape[0] != rows:
        return (projection,)
    *large, gates = projection.parts
    return large[0] if len(large) == 1 else SplitWeight(tuple(large)), gates


def _batch_of(inputs: ForwardInput, states: StateInput) -> RecurrentBatch:
    attention = inputs.attention
    operands = states.rows, attention.query_start, attention.seq_lens, attention.max_query
    return RecurrentBatch(*operands, settled=attention.settled, uniform=attention.uniform)


def commit_states(
    blocks: tuple[RecurrentBlock, ...], states: tuple[LayerState, ...], inputs: ForwardInput, accepted: Tensor
) -> None:
    """Write the states after the accepted drafts of a pass over ``inputs``, which kept its window.

    ``accepted`` int64 [B] is the number of drafts that were accepted after each sequence's first token.
    """
    assert inputs.states is not None  # the caller verified drafts
    assert inputs.states.window is not None
    # The layers of the pass ran after the last write to the states.
    batch, counts = _batch_of(inputs, inputs.states)._replace(settled=True), accepted + 1
    for block, kept, state in zip(blocks, inputs.states.window, states, strict=True):
        block.commit(kept, state, batch, counts)
