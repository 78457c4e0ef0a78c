"""TransformersDecoder: the fallback for other model families. Transformers runs the model, and its attention uses paged
kernels.

The fallback is slower than a native decoder (transformers' own unfused layers) and doesn't support capture; see
:attr:`LanguageModel.native`. Loading checks a model: its logits through the paged cache must equal its logits without a
cache.

Letters: T new tokens, N rows of logits, Hq and Hkv heads, D head size, H hidden size.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outrider.device import ConfigError, KernelSet
from outrider.errors import CheckpointError
from outrider.model.config.model_config import ModelConfig
from outrider.model.layers.cache import KVCache
from outrider.model.layers.inputs import ForwardInput
from outrider.model.layers.language_model import LanguageModel

ATTENTION = "outrider_paged"


@dataclass(slots=True)
class PagedPass:
    """Inputs of the attention in one forward pass, passed through transformers' keyword arguments."""

    inputs: ForwardInput
    cache: KVCache
    kernels: KernelSet
    windows: list[int] = field(default_factory=list)
    """Attention windows, in tokens, with which the layers called attention, in order; 0 for full attention."""


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    outrider: PagedPass,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer, with the signature of transformers' attention interface.

    ``query`` [1, Hq, T, D], ``key`` and ``value`` [1, Hkv, T, D] are already rotated. Returns [1, T, Hq, D]. Raises
    :class:`CheckpointError` for options of attention, or shapes, that the paged cache doesn't support.
    """
    del attention_mask  # transformers builds none for a custom attention; the metadata determines the visible tokens
    for option in ("softcap", "s_aux"):
        if options.get(option) is not None:
            raise CheckpointError(f"the model's attention uses {option}, which the paged attention doesn't do")
    layers = outrider.cache.layers
    if module.layer_idx >= len(layers) or value.shape[-1] != query.shape[-1]:
        raise CheckpointError("the model's layers don't have keys and values of one shape, which the paged cache needs")
    q, k, v = (tensor.squeeze(0).transpose(0, 1).contiguous() for tensor in (query, key, value))
    k_cache, v_cache = layers[module.layer_idx]
    if k.shape[1:] != k_cache.shape[2:]:
        raise CheckpointError(
            f"layer {module.layer_idx} has keys of {list(k.shape[1:])}, expected {list(k_cache.shape[2:])} as in the config"
        )
    # Cosines of 1 and sines of 0, because q and k are already rotated.
    no_rotation = (q.new_ones(q.shape[0], q.shape[2]), q.new_zeros(q.shape[0], q.shape[2]))
    inputs, window = outrider.inputs, sliding_window or 0
    outrider.windows.append(window)
    outrider.kernels.rope_write_cache(q, k, v, *no_rotation, k_cache, v_cache, inputs.slots)
    scale = module.head_dim**-0.5 if scaling is None else scaling
    out = outrider.kernels.paged_attention(q, k_cache, v_cache, inputs.attention, scale=scale, window=window)
    return out.unsqueeze(0), None


class TransformersDecoder(LanguageModel):
    """A causal language model of transformers with its attention replaced by Outrider's paged attention."""

    native = False

    def __init__(self, config: ModelConfig, model: Any, kernels: KernelSet) -> None:
        super().__init__(config, kernels)
        self._model = model
        self._head = _without_body(model)

    @property
    def embedding(self) -> Tensor:
        """The embedding table [V, H]."""
        table: Tensor = self._model.get_input_embeddings().weight
        return table

    def embed(self, tokens: Tensor) -> Tensor:
        """Return embeddings [T, H] of int64 ``tokens`` [T], with the scaling of the model's embedding module."""
        with torch.no_grad():
            embedded: Tensor = self._model.get_input_embeddings()(tokens)
        return embedded

    def forward_with_aux_hidden_states(
        self, inputs: ForwardInput, cache: KVCache, layers: tuple[int, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run the model on ``inputs``. See the base class for arguments and results."""
        return self.forward_pass(PagedPass(inputs, cache, self.kernels), layers)

    def forward_pass(self, paged: PagedPass, layers: tuple[int, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run :meth:`forward_with_aux_hidden_states` with a caller-owned ``paged``, in which the attention records its
        windows.

        Raises :class:`ConfigError` for embeddings of images, and for layers that the model lacks.
        """
        missing = [layer for layer in layers if not 0 <= layer < self.config.num_layers]
        if missing:
            raise ConfigError(f"there are no layers {missing} to capture, the decoder has {self.config.num_layers}")
        if paged.inputs.embeddings is not None:
            raise ConfigError("a model that runs through transformers takes tokens alone, no embeddings of images")
        with torch.no_grad():
            out = self._model.base_model(
                input_ids=paged.inputs.tokens.unsqueeze(0),
                position_ids=paged.inputs.positions.unsqueeze(0),
                use_cache=False,
                output_hidden_states=bool(layers),
                outrider=paged,
            )
        final = paged.inputs.select_rows(out.last_hidden_state.squeeze(0), self.kernels)
        return final, tuple(out.hidden_states[layer].squeeze(0) for layer in layers)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [N, V] of ``hidden`` [N, H], computed by the transformers model with its own scaling or capping."""
        with torch.no_grad():
            logits: Tensor = self._head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits
        return logits.squeeze(0)


def _without_body(model: Any) -> Any:
    """Return a copy of the causal model whose layers return their input, so that it computes logits from hidden states. The
    copy shares the output head.
    """
    from transformers.modeling_outputs import MoeModelOutputWithPast

    class Identity(torch.nn.Module):
        def forward(self, *tokens: Any, inputs_embeds: Tensor, **options: Any) -> Any:
            del tokens, options
            out = MoeModelOutputWithPast(last_hidden_state=inputs_embeds)
            out.cross_attentions = None  # GPT-2's output head reads this attribute
            return out

    head = copy.copy(model)
    head._modules = dict(model._modules)
    head._modules[model.base_model_prefix] = Identity()
    return head
