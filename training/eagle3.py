"""An EAGLE-3 head in plain torch, with the parameter names and the config of published heads.

Letters: B sequences, S positions, H hidden size, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import EagleHead, RMSNorm, Shape, Target


class Eagle3Head(EagleHead):
    """Joins the inputs of three of the target's ``layers`` with ``fc``. They are the outputs of the layers ``taps``. The
    head's own layer reads the normed embedding and state side by side.

    Pair i joins the embedding of token i+1 with the states at i. Its output, after ``norm``, predicts token i+2 through those
    rows of the target's output head that belong to the draft vocabulary. The output before ``norm`` is the state of the next
    draft step.
    """

    def __init__(self, shape: Shape, layers: tuple[int, int, int], ids: Tensor) -> None:
        super().__init__(shape)
        size, attention = shape.hidden_size, self.layer.self_attn
        self.read_layers = layers
        self.taps = tuple(layer - 1 for layer in layers)
        self.fc = nn.Linear(3 * size, size, bias=False)
        for name in ("q_proj", "k_proj", "v_proj"):
            old: nn.Linear = getattr(attention, name)
            setattr(attention, name, nn.Linear(2 * size, old.out_features, bias=False))
        self.embedding_norm, self.hidden_norm = RMSNorm(size, shape.rms_norm_eps), RMSNorm(size, shape.rms_norm_eps)
        self.norm = RMSNorm(size, shape.rms_norm_eps)
        for part in (self.fc, attention.q_proj, attention.k_proj, attention.v_proj):
            nn.init.normal_(part.weight, std=0.5 * part.in_features**-0.5)
        self.register_buffer("ids", ids)
        self.ids: Tensor

    def join(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of attention [B, S, 2 H], the normed embedding and features side by side, and the residual stream
        [B, S, H].
        """
        return torch.cat((self.embedding_norm(embedded), self.hidden_norm(features)), dim=-1), features.float()

    def condition(self, states: Tensor) -> Tensor:
        """Return the features [B, S, H] of the target's three states [B, S, 3 H]."""
        return self.fc(states)

    def logits(self, target: Target, hidden: Tensor) -> Tensor:
        """Return the draft logits [..., Vd] of the head's states ``hidden`` [..., H]."""
        return F.linear(self.norm(hidden), target.embed_tokens.weight[self.ids])

    def published_config(self) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(self.ids),
            "eagle_aux_hidden_state_layer_ids": list(self.read_layers),
            "num_hidden_layers": 1,
        }

    def published_tensors(self) -> dict[str, Tensor]:
        """Return the tensors without ``lm_head``: its rows are the target's, those that ``d2t`` names."""
        tensors = {_published_name(name): tensor for name, tensor in self.state_dict().items() if name != "ids"}
        return tensors | {"d2t": self.ids - torch.arange(len(self.ids), device=self.ids.device)}


_NAMES = {
    "layers.0.self_attn": "midlayer.self_attn",
    "layers.0.mlp": "midlayer.mlp",
    "layers.0.post_attention_layernorm": "midlayer.post_attention_layernorm",
    "embedding_norm": "midlayer.input_layernorm",
    "hidden_norm": "midlayer.hidden_norm",
}


def _published_name(name: str) -> str:
    prefix = next((prefix for prefix in _NAMES if name.startswith(prefix)), None)
    return name if prefix is None else _NAMES[prefix] + name.removeprefix(prefix)
