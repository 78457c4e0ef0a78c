"""An EAGLE-3 head in plain torch, with the parameter names and the config of published heads.

Letters: B sequences, S positions, H hidden size, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
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


_NAMES = {
    "layers.0.self_attn": "midlayer.self_attn",
    "layers.0.mlp": "midlayer.mlp",
    "layers.0.post_attention_layernorm": "midlayer.post_attention_layernorm",
    "embedding_norm": "midlayer.input_layernorm",
    "hidden_norm": "midlayer.hidden_norm",
}


def save_eagle3(head: Eagle3Head, folder: Path, *, bos: int, eos: int) -> None:
    """Write the head to ``folder`` in the published format, without ``lm_head``: its rows are the target's, those that
    ``d2t`` names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "bos_token_id": bos,
        "draft_vocab_size": len(head.ids),
        "eagle_aux_hidden_state_layer_ids": list(head.read_layers),
        "eos_token_id": eos,
        "head_dim": head.shape.head_dim,
        "hidden_act": "silu",
        "model_type": "llama",
        **asdict(head.shape),
        "num_hidden_layers": 1,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(dict(sorted(config.items())), indent=2) + "\n")
    weights = {_stored(k): v.detach().bfloat16().contiguous().cpu() for k, v in head.state_dict().items() if k != "ids"}
    weights["d2t"] = (head.ids - torch.arange(len(head.ids), device=head.ids.device)).cpu()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _stored(name: str) -> str:
    prefix = next((prefix for prefix in _NAMES if name.startswith(prefix)), None)
    return name if prefix is None else _NAMES[prefix] + name.removeprefix(prefix)
