"""N-gram lookup: what followed the last tokens earlier in the same text is drafted again (Saxena 2023, prompt lookup).

No model and no host: a paged history of tokens is searched on the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device import Backend, ConfigError
from outrider.speculative.proposer import Draft, DraftInputs, ExtendInputs, Proposer, RelaySpec
from outrider.speculative.tree import Tree


class NgramProposer(Proposer):
    """T continuations of K tokens each, from where the longest suffix of the text stood before, latest first.

    The history is paged like the target's cache, the slot of position i holding token i+1; so shared prefixes, chunks and
    preemption need nothing of their own, and nothing is relayed. The token at position 0 isn't in it. Continuations differ
    in their first token. One that reaches the end of the text goes on periodically. Where nothing is found, a chain
    repeats the last token, and a tree leaves its nodes unused.

    ``longest``: tokens of a suffix that are compared at most; ``shortest``: that must agree at least.
    """

    name = "ngram"
    takes_padding = True

    def __init__(self, *, vocab_size: int, draft_tokens: int, branches: int = 1, longest: int = 4, shortest: int = 1) -> None:
        if draft_tokens < 1 or branches < 1:
            raise ConfigError(f"n-gram lookup of {branches} continuations of {draft_tokens} tokens: expected at least 1 each")
        if not 1 <= shortest <= longest:
            raise ConfigError(f"n-gram lookup of {shortest} to {longest} tokens: expected 1 <= shortest <= longest")
        self._vocab_size = vocab_size
        self._draft_tokens = draft_tokens
        self._branches = branches
        self._longest = longest
        self._shortest = shortest
        self._page_size = 0
        self._history = torch.empty(0, dtype=torch.int64)
        self._parents = torch.empty(0, dtype=torch.int64)

    @property
    def depth(self) -> int:
        """Tokens of one continuation."""
        return self._draft_tokens

    @property
    def nodes(self) -> int:
        """Tokens of all continuations."""
        return self._draft_tokens * self._branches

    @property
    def is_tree(self) -> bool:
        """With several continuations."""
        return self._branches > 1

    @property
    def relay(self) -> tuple[RelaySpec, ...]:
        """Nothing."""
        return ()

    @property
    def extends(self) -> bool:
        """It takes the accepted tokens in."""
        return True

    @property
    def reads_hidden(self) -> bool:
        """Tokens alone."""
        return False

    @property
    def host_lengths(self) -> Mapping[str, int]:
        """It has no attention."""
        return {}

    @property
    def caches(self) -> tuple[Tensor, ...]:
        """The history, a page a row."""
        return (self._history.view(-1, self._page_size),)

    @property
    def token_bytes(self) -> int:
        """The token's id."""
        return torch.int64.itemsize

    def prompt_passes(self, tokens: int, sequences: int, longest: int) -> tuple[int, ...]:
        """There are no layers."""
        del tokens, sequences, longest
        return ()

    def allocate(self, *, backend: Backend, pages: int, page_size: int) -> None:
        """One token a slot."""
        self._page_size = page_size
        self._history = torch.zeros(pages * page_size, dtype=torch.int64, device=backend.device)
        node = torch.arange(1, self.nodes + 1, device=backend.device)
        self._parents = torch.where((node - 1) % self._draft_tokens == 0, 0, node - 1)

    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """Write the tokens down. Padding behind the last valid one is overwritten before it's read."""
        self._history[inputs.slots] = inputs.tokens
        return {}

    def draft(self, inputs: DraftInputs) -> Draft:
        """Search and copy."""
        text = self._text(inputs)
        agreement = self._agreement(text, inputs.seq_lens)
        seq_lens = inputs.seq_lens.unsqueeze(1)
        index = torch.arange(text.shape[1], device=text.device)
        following = text.gather(1, (index + 1).clamp(max=text.shape[1] - 1).expand_as(text))
        ahead = torch.arange(
            1, (inputs.count if inputs.count and not self.is_tree else self._draft_tokens) + 1, device=text.device
        )
        tokens, found = [], []
        # The longest agreement first, then the latest place.
        score = torch.where(agreement >= self._shortest, agreement * text.shape[1] + index, -1)
        for _ in range(self._branches):
            best = score.max(dim=1, keepdim=True)
            # Found nowhere, the last token is repeated: what lies behind it is some other request's.
            place = torch.where(best.values >= 0, best.indices, seq_lens - 2)
            period = (seq_lens - 1 - place).clamp(min=1)
            tokens.append(text.gather(1, (place + 1).clamp(min=0) + (ahead - 1) % period))
            found.append(best.values >= 0)
            first = tokens[-1][:, :1]
            score = torch.where(following == first, -1, score)
        drafted = torch.cat(tokens, dim=1)
        if not self.is_tree:
            # The draft is certain of its token: a distribution of one point.
            probs = F.one_hot(drafted, self._vocab_size).to(torch.float32) if inputs.sampling else None
            return Draft(drafted, probs)
        usable = torch.cat(found, dim=1).repeat_interleave(self._draft_tokens, dim=1)
        parents = torch.where(usable, self._parents, -1)
        root = parents.new_full((parents.shape[0], 1), -1)
        return Draft(drafted, None, Tree.from_parents(torch.cat((root, parents), dim=1), depth=self._draft_tokens))

    def _text(self, inputs: DraftInputs) -> Tensor:
        """Tokens 1.. of each request [B, S], as far as any may reach; what lies behind a request's last is meaningless."""
        pages = max(1, min(-(-inputs.max_kv // self._page_size), inputs.tables.shape[1]))
        first = inputs.tables[:, :pages].to(torch.int64) * self._page_size
        slots = first.unsqueeze(2) + torch.arange(self._page_size, device=first.device)
        return self._history[slots.flatten(1)]

    def _agreement(self, text: Tensor, seq_lens: Tensor) -> Tensor:
        """How many tokens up to each place equal those up to the last one, int64 [B, S]; 0 from the last one on."""
        seq_lens = seq_lens.unsqueeze(1)
        index = torch.arange(text.shape[1], device=text.device)
        agrees = (index < seq_lens - 1).expand_as(text)
        length = torch.zeros_like(text)
        for back in range(self._longest):
            inside = (index >= back) & (seq_lens - 1 >= back)
            there = text.gather(1, (index - back).clamp(min=0).expand_as(text))
            here = text.gather(1, (seq_lens - 1 - back).clamp(min=0))
            agrees = agrees & inside & (there == here)
            length = length + agrees.to(torch.int64)
        return length
