"""An EAGLE-3 head in plain torch with its loss, and the parameter names and the config of published heads.

Letters: B sequences, S positions, H hidden size, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import MEASURED_LENGTH, Compare, EagleHead, RMSNorm, Shape, Target, Texts

_DEPTH_DECAY = 0.9
"""Factor of the weight of each further depth in the loss: later positions are reached less often."""


class Eagle3Head(EagleHead):
    """Joins the outputs of the target's three layers ``taps`` with ``fc``. The head's own layer reads the normed embedding
    and state side by side. It drafts the most frequent tokens, ``ids``, and is trained for ``depth`` draft tokens.

    Pair i joins the embedding of token i+1 with the states at i. Its output, after ``norm``, predicts token i+2 through those
    rows of the target's output head that belong to the draft vocabulary. The output before ``norm`` is the state of the next
    draft step.
    """

    def __init__(self, shape: Shape, taps: tuple[int, ...], ids: Tensor, depth: int) -> None:
        super().__init__(shape)
        size, attention = shape.hidden_size, self.layer.self_attn
        self.taps, self.depth = taps, depth
        self.lengths = (MEASURED_LENGTH, 7)
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

    def start_from(self, target: Target) -> None:
        """Set the weights such that the head begins with the last of the three states, which the target's output head can
        read.
        """
        with torch.no_grad():
            self.norm.weight.copy_(target.norm.weight)
            self.fc.weight.zero_()[:, -target.shape.hidden_size :].fill_diagonal_(1.0)

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

    def loss(self, target: Target, texts: Texts, compare: Compare) -> Tensor:
        """Return the loss, then for each draft position the share of greedy drafts that are right."""
        embedded = target.embed_tokens(texts.tokens[:, 1:-1])
        outputs = self.unroll(embedded, self.condition(texts.states[:, :-2]), self.depth)
        logits = target.logits(texts.final[:, 1:-1])
        log_p, best = logits[..., self.ids].float().log_softmax(-1), logits.argmax(-1)
        index = torch.arange(logits.shape[1], device=logits.device)
        answered = (index + 2 >= texts.starts.unsqueeze(1)) & (index + 2 < texts.stops.unsqueeze(1))
        total, facts = torch.zeros((), device=logits.device), []
        for depth, out in enumerate(outputs):
            valid = (answered & (index >= depth)).float()
            draft = self.logits(target, out)
            divergence, rejected = compare(draft, log_p)
            total = total + ((divergence + rejected) * valid).sum() / valid.sum().clamp_min(1) * _DEPTH_DECAY**depth
            right = self.ids[draft.argmax(-1)] == best
            facts.append((right * valid).sum() / valid.sum().clamp_min(1))
        return torch.stack([total, *(fact.detach() for fact in facts)])

    def hits(self, target: Target, texts: Texts, count: int) -> Tensor:
        """Return whether each of ``count`` draft tokens after each position of one row is right, [at most S, count].

        A position is that of the last known token, whose states the head doesn't see.
        """
        embedded = target.embed_tokens(texts.tokens[:, 1:-1])
        outputs = self.unroll(embedded, self.condition(texts.states[:, :-2]), count)
        right = [self.ids[self.logits(target, out).argmax(-1)][0] == texts.tokens[0, 2:] for out in outputs]
        # Pair i joins token i + 1 and the states before it. Draft d after token i + 1 is output d at pair i + d.
        found = torch.zeros(texts.tokens.shape[1], count, dtype=torch.bool, device=texts.tokens.device)
        for depth, each in enumerate(right):
            found[1 : 1 + len(each) - depth, depth] = each[depth:]
        return found

    def published_config(self) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(self.ids),
            "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in self.taps],
            "num_hidden_layers": 1,
        }

    def published_tensors(self) -> dict[str, Tensor]:
        """Return the tensors, weights rounded, without ``lm_head``: its rows are the target's that ``d2t`` names."""
        tensors = {
            _published_name(name): round_to_blocks(tensor) if tensor.dim() == 2 else tensor
            for name, tensor in self.state_dict().items()
            if name != "ids"
        }
        return tensors | {"d2t": self.ids - torch.arange(len(self.ids), device=self.ids.device)}


def round_to_blocks(weight: Tensor) -> Tensor:
    """Round ``weight`` [N, K] to 8-bit integers times a power of two per 32 columns, which bfloat16 holds exactly and `cpu`
    multiplies without converting the weight.
    """
    grouped = weight.float().unflatten(1, (-1, 32))
    largest = grouped.abs().amax(dim=2, keepdim=True).clamp(min=1e-30)
    step = (largest / 127).log2().ceil().exp2()
    return ((grouped / step).round() * step).flatten(1).to(weight.dtype)


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
