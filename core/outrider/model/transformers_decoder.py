"""The door for other decoders: transformers runs the model, and its attention goes through our paged kernels.

Slower than a native decoder (transformers' own layers, unfused) and not for capture; :attr:`LanguageModel.native` says
so. What is let in is checked at load: the model's logits through the paged cache against its logits without it.

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
from outrider.model.cache import KVCache
from outrider.model.config import ModelConfig
from outrider.model.inputs import ForwardInput
from outrider.model.language_model import LanguageModel

ATTENTION = "outrider_paged"


@dataclass(slots=True)
class PagedPass:
    """What the attention of one forward needs; travels through transformers' keyword arguments."""

    inputs: ForwardInput
    cache: KVCache
    kernels: KernelSet
    windows: list[int] = field(default_factory=list)


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
    """Attention of one layer, in the shape that transformers' attention interface prescribes.

    ``query`` [1, Hq, T, D], ``key`` and ``value`` [1, Hkv, T, D], rotated already. Returns [1, T, Hq, D].
    """
    del attention_mask  # the interface makes none for an attention that it doesn't know: the pages say who sees what
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
    still = (q.new_ones(q.shape[0], q.shape[2]), q.new_zeros(q.shape[0], q.shape[2]))  # it's rotated already
    inputs, window = outrider.inputs, sliding_window or 0
    outrider.windows.append(window)
    outrider.kernels.rope_write_cache(q, k, v, *still, k_cache, v_cache, inputs.slots)
    scale = module.head_dim**-0.5 if scaling is None else scaling
    out = outrider.kernels.paged_attention(q, k_cache, v_cache, inputs.attention, scale=scale, window=window)
    return out.unsqueeze(0), None


class TransformersDecoder(LanguageModel):
    """Any causal language model of transformers whose attention can be replaced."""

    native = False

    def __init__(self, config: ModelConfig, model: Any, kernels: KernelSet) -> None:
        super().__init__(config, kernels)
        self._model = model
        self._head = _head_alone(model)

    @property
    def embedding(self) -> Tensor:
        """The table of embeddings [V, H]."""
        table: Tensor = self._model.get_input_embeddings().weight
        return table

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [T, H] of int64 ``tokens`` [T], scaled as the model scales them in the table's module."""
        with torch.no_grad():
            embedded: Tensor = self._model.get_input_embeddings()(tokens)
        return embedded

    def forward_with_aux_hidden_states(
        self, inputs: ForwardInput, cache: KVCache, layers: tuple[int, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See :meth:`LanguageModel.forward_with_aux_hidden_states`."""
        return self.run(PagedPass(inputs, cache, self.kernels), layers)

    def run(self, paged: PagedPass, layers: tuple[int, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """:meth:`forward_with_aux_hidden_states` with a pass that the caller keeps, to see what the attention did."""
        beyond = [layer for layer in layers if not 0 <= layer < self.config.num_layers]
        if beyond:
            raise ConfigError(f"there are no layers {beyond} to capture, the decoder has {self.config.num_layers}")
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
        final = paged.inputs.keep(out.last_hidden_state.squeeze(0), self.kernels)
        return final, tuple(out.hidden_states[layer].squeeze(0) for layer in layers)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of ``hidden`` [N, H], with the model's own scaling or capping of them."""
        with torch.no_grad():
            logits: Tensor = self._head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits
        return logits.squeeze(0)


def _head_alone(model: Any) -> Any:
    """The causal model with its body replaced by the identity: what it does with hidden states is its own business.

    It shares the output head with ``model``.
    """
    from transformers.modeling_outputs import MoeModelOutputWithPast

    class Identity(torch.nn.Module):
        def forward(self, *tokens: Any, inputs_embeds: Tensor, **options: Any) -> Any:
            del tokens, options
            out = MoeModelOutputWithPast(last_hidden_state=inputs_embeds)
            out.cross_attentions = None  # GPT-2's output head passes it on
            return out

    head = copy.copy(model)
    head._modules = dict(model._modules)
    head._modules[model.base_model_prefix] = Identity()
    return head
