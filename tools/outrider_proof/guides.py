"""A grammar over token ids, for programs that prove guided requests without a library that compiles grammars."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engine.engine import Engine
    from outrider.engine.guides.grammars import Guidance
    from outrider.engine.requests.sampling import SamplingParams
    from outrider.model import Decoder

_MODULUS = 3


class Residues:
    """A guide that allows each token whose id equals, modulo 3, the sum of all earlier ids plus their number.

    Each token thus decides which tokens may follow. The guide never ends.
    """

    def __init__(self, vocabulary: int) -> None:
        import torch

        from outrider.engine.guides.grammars import mask_of_tokens

        self._tokens: list[int] = []
        rows = [mask_of_tokens(range(residue, vocabulary, _MODULUS), vocabulary) for residue in range(_MODULUS)]
        self._words = torch.stack(rows)

    @property
    def is_complete(self) -> bool:
        """Return False: every output can continue."""
        return False

    @property
    def residue(self) -> int:
        """The residue, modulo the number of classes, that the next token's id must have."""
        return (sum(self._tokens) + len(self._tokens)) % _MODULUS

    def accept(self, token: int) -> bool:
        """Append a token if it is allowed, and return True; return False otherwise."""
        if token % _MODULUS != self.residue:
            return False
        self._tokens.append(token)
        return True

    def rollback(self, count: int) -> None:
        """Remove the last ``count`` tokens from the state."""
        del self._tokens[len(self._tokens) - count :]

    def fill(self, words: Tensor, index: int) -> None:
        """Write the bit mask of the tokens that may come next to row ``index`` of ``words`` int32 [N, W]."""
        words[index] = self._words[self.residue]

    @classmethod
    def greedy(cls, model: Decoder, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
        """Return the ``count`` most likely allowed tokens after a prompt, by one forward over the whole text per token."""
        import torch

        from outrider.device import AttentionMetadata
        from outrider.model import ForwardInput, KVCache

        shape, device = model.config, model.device
        total = len(prompt) + count
        written: list[int] = []
        for _ in range(count):
            tokens = torch.tensor([*prompt, *written], device=device)
            length = tokens.shape[0]
            cache = KVCache.allocate(shape, pages=2, page_size=total, dtype=model.dtype, device=device)
            places = torch.arange(length, device=device)
            attention = AttentionMetadata(
                query_start=torch.tensor([0, length], dtype=torch.int32, device=device),
                seq_lens=torch.tensor([length], dtype=torch.int32, device=device),
                block_table=torch.tensor([[1]], dtype=torch.int32, device=device),
                max_query=length,
                max_kv=length,
            )
            hidden = model.forward(ForwardInput(tokens, places, places + total, attention), cache)
            logits = model.logits(hidden[-1:])[0]
            wanted = (sum(written) + len(written)) % _MODULUS
            logits[torch.arange(logits.shape[0], device=device) % _MODULUS != wanted] = -torch.inf
            written.append(int(logits.argmax()))
            if written[-1] in shape.eos_token_ids:
                break
        return tuple(written)


class ResidueGrammars:
    """A guide compiler for an engine without a tokenizer: it compiles every guide to :class:`Residues`.

    The engine sends such a guide to all ranks and with a hand-over, like any other guide.
    """

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def guidance(self, params: SamplingParams, stops: frozenset[int]) -> Guidance:
        """Return the guidance state of a new request."""
        from outrider.engine.guides.grammars import Guidance

        del params, stops
        return Guidance(Residues(self._vocabulary), vocabulary=self._vocabulary)

    @classmethod
    def into(cls, engine: Engine) -> None:
        """Replace the guide compiler of ``engine`` by one of this class."""
        grammars: Any = cls(engine.model.config.vocab_size)
        engine._admission.grammars = grammars


def guide(engine: Engine, request: int) -> None:
    """Guide a request that has just arrived at an engine by :class:`Residues`, starting after its existing output.

    An engine of several ranks is rejected, because the other ranks do not receive the guide.
    """
    assert engine._decision_log.can_repeat, (
        "a guide is put into one engine's record of the request, which other ranks never hear of"
    )
    from outrider.engine.guides.grammars import Guidance

    record = engine._requests[request]
    vocabulary = engine.model.config.vocab_size
    record.guidance = Guidance(Residues(vocabulary), vocabulary=vocabulary)
    for token in record.output:
        refused = record.guidance.accept_token(token)
        assert refused is None, refused
