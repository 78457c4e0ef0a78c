"""A separate, smaller decoder drafts (Leviathan et al. 2023, Chen et al. 2023), as a chain or as a tree.

Its cache holds keys and values of every token up to the last one, so what it relays are its guesses of the next token
alone. Draft-extend runs the accepted tokens and yields these guesses: a draft of depth D costs D passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, ConfigError
from outrider.model import ForwardInput, KVCache, LanguageModel
from outrider.speculative.cached import CachedProposer, TreeProposer, chain_lengths
from outrider.speculative.places import given_places, text_places
from outrider.speculative.proposer import Draft, DraftInputs, ExtendInputs, RelaySpec, draw
from outrider.speculative.slots import slots_of
from outrider.speculative.tree import Level, TreeShape, likeliest


def _check_vocabulary(model: LanguageModel, target: LanguageModel) -> None:
    if model.config.vocab_size != target.config.vocab_size:
        raise ConfigError(
            f"the draft model has a vocabulary of {model.config.vocab_size} tokens, the target one of "
            f"{target.config.vocab_size}: drafts must be tokens of the target"
        )


def _take_in(model: LanguageModel, cache: KVCache, page_size: int, inputs: ExtendInputs) -> Tensor:
    """Run the accepted tokens, each at its own position; hidden states [B, H] of the last ones."""
    attention = inputs.attention
    batch = inputs.last.shape[0]
    if inputs.prompt is not None:
        # The prompt's tokens, then the one after them, which wasn't fed yet.
        # A draft model that knows images is taken to know the features of the target's tower, if they fit.
        sees = (
            model.config.vision is not None
            and inputs.embeddings is not None
            and inputs.embeddings.shape[1] == model.config.hidden_size
        )
        flat = ForwardInput(
            inputs.prompt,
            given_places(model.config.rope, inputs),
            inputs.slots,
            attention,
            inputs.embeddings if sees else None,
            inputs.embedded if sees else None,
            inputs.prompt_lens,
            inputs.kept,
        )
        model.forward(flat, cache)  # for its keys and values
        tokens, positions = inputs.tokens[inputs.last], inputs.positions[inputs.last] + 1
        query_start = torch.arange(batch + 1, dtype=torch.int32, device=tokens.device)
        attention = replace(attention, query_start=query_start, max_query=1)
        last = torch.arange(batch, device=tokens.device)
    else:
        tokens, positions, last = inputs.tokens, inputs.positions + 1, inputs.last
    slots = slots_of(positions.view(batch, -1), attention.block_table, page_size).flatten()
    attention = replace(
        attention,
        seq_lens=attention.seq_lens + 1,
        tree_mask=None,
        max_kv=attention.max_kv + 1,
        uniform=True,
        seq_lens_host=inputs.seq_lens_host.param("extend", 1) if inputs.seq_lens_host is not None else None,
        plan=None,  # what was planned has a token less
        host_query_start=None,
        shapes=(),
    )
    places = text_places(model.config.rope, positions, inputs.mrope_position_deltas)
    return model.forward(ForwardInput(tokens, places, slots, attention), cache)[last]


class _ModelDrafts(CachedProposer):
    """Base of the chain and the tree of one draft model."""

    _model: LanguageModel

    @property
    def max_context(self) -> int:
        """The draft model's."""
        return self._model.config.max_context

    @property
    def lookahead(self) -> int:
        """0: the cache entry of a position depends on no later token."""
        return 0

    @property
    def reads_hidden(self) -> bool:
        """Tokens alone."""
        return False

    def prompt_passes(self, tokens: int, sequences: int, longest: int) -> tuple[int, ...]:
        """One over the prompts, one over the token behind each."""
        del longest
        return tokens, sequences


class DraftModelProposer(_ModelDrafts):
    """A chain of K tokens. Relays the first one and, when the request samples, the distribution that it was drawn from."""

    name = "draft-model"

    def __init__(self, model: LanguageModel, *, target: LanguageModel, draft_tokens: int) -> None:
        if draft_tokens < 1:
            raise ConfigError(f"draft_tokens is {draft_tokens}; a chain has at least 1 token")
        _check_vocabulary(model, target)
        super().__init__(model.config, model.cache_dtype)
        self._model = model
        self._draft_tokens = draft_tokens

    @property
    def depth(self) -> int:
        """K."""
        return self._draft_tokens

    @property
    def slots(self) -> int:
        """Draft-extend takes in the token behind verify's last one."""
        return self._draft_tokens + 2

    @property
    def relay(self) -> tuple[RelaySpec, ...]:
        """First draft token, distribution that it was drawn from."""
        return (
            RelaySpec("token", (), torch.int64),
            RelaySpec("probs", (self._model.config.vocab_size,), torch.float32),
        )

    @property
    def host_lengths(self) -> Mapping[str, int]:
        """A token more with each pass, and the last one's own in draft-extend."""
        return chain_lengths(self._draft_tokens, 1)

    def host_lengths_of(self, count: int) -> Mapping[str, int]:
        """Draft-extend's, and those of a pass less than tokens."""
        return chain_lengths(min(count, self._draft_tokens), 1)

    def draft(self, inputs: DraftInputs) -> Draft:
        """A pass less than tokens: the first token comes with the relay."""
        model, token = self._model, inputs.relay["token"]
        tokens, probs = [token], [inputs.relay["probs"]]
        count = inputs.count or self._draft_tokens
        places = self.places(model.kernels, inputs, count=count + 1)
        for step in range(1, count):
            rope_positions = text_places(model.config.rope, places.positions[step], inputs.mrope_position_deltas)
            flat = ForwardInput(token, rope_positions, places.slots[step], places.attention(step, f"draft.{step}"))
            logits = model.logits(model.forward(flat, self.cache))
            token, drawn_from = draw(model.kernels, logits, inputs, places.positions[step + 1])
            tokens.append(token)
            probs.append(drawn_from)
        return Draft(torch.stack(tokens, dim=1), torch.stack(probs, dim=1) if inputs.sampling else None)

    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """One pass over the accepted tokens (two over a prompt)."""
        hidden = _take_in(self._model, self.cache, self._page_size, inputs)
        token, probs = draw(self._model.kernels, self._model.logits(hidden), inputs, inputs.next_positions)
        return {"token": token, "probs": probs} if inputs.sampling else {"token": token}


class DraftModelTreeProposer(_ModelDrafts, TreeProposer):
    """A tree of K nodes. Relays the T likeliest first tokens and their log-probabilities."""

    name = "draft-model"

    def __init__(self, model: LanguageModel, *, target: LanguageModel, shape: TreeShape) -> None:
        _check_vocabulary(model, target)
        if any(model.config.windows):
            raise ConfigError("a draft model with a sliding window can't draft trees; draft a chain (draft_topk=1)")
        TreeProposer.__init__(self, model.config, model.cache_dtype, shape)
        self._model = model

    @property
    def slots(self) -> int:
        """Those of verify, of draft-extend, or of the last token and the expanded nodes, whichever are most."""
        shape = self._shape
        return max(shape.nodes + 1, shape.depth + 2, shape.expanded + 1)

    @property
    def relay(self) -> tuple[RelaySpec, ...]:
        """First draft tokens, their log-probabilities."""
        branches = self._shape.branches
        return (RelaySpec("tokens", (branches,), torch.int64), RelaySpec("scores", (branches,), torch.float32))

    @property
    def host_lengths(self) -> Mapping[str, int]:
        """The nodes of each level and the last token."""
        return {"extend": 1, **{f"draft.{nodes}": nodes + 1 for nodes in self._shape.levels}}

    def draft(self, inputs: DraftInputs) -> Draft:
        """D - 1 passes, each over all nodes expanded so far."""
        model = self._model

        def expand(level: Level) -> Tensor:
            batch, nodes = level.tokens.shape
            device = level.tokens.device
            places = inputs.seq_lens.unsqueeze(1) + 1 + torch.arange(nodes, device=device)
            attention = AttentionMetadata(
                query_start=torch.arange(0, batch * nodes + 1, nodes, dtype=torch.int32, device=device),
                seq_lens=(inputs.seq_lens + 1 + nodes).to(torch.int32),
                block_table=inputs.tables,
                max_query=nodes,
                max_kv=inputs.max_kv,
                tree_mask=level.mask.flatten(0, 1),
                uniform=True,
                seq_lens_host=inputs.seq_lens_host.param(f"draft.{nodes}", nodes + 1)
                if inputs.seq_lens_host is not None
                else None,
            )
            flat = ForwardInput(
                level.tokens.flatten(),
                text_places(
                    model.config.rope, (inputs.seq_lens.unsqueeze(1) + level.depths).flatten(), inputs.mrope_position_deltas
                ),
                slots_of(places, inputs.tables, self._page_size).flatten(),
                attention,
            )
            hidden = model.forward(flat, self.cache).view(batch, nodes, -1)
            return model.logits(hidden[:, -level.fresh :])

        tokens, tree = self._shape.grow(inputs.relay["tokens"], inputs.relay["scores"], expand)
        return Draft(tokens, None, tree)

    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """One pass over the accepted tokens (two over a prompt)."""
        hidden = _take_in(self._model, self.cache, self._page_size, inputs)
        first, scores = likeliest(self._model.logits(hidden), self._shape.branches)
        return {"tokens": first, "scores": scores}
