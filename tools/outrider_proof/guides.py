"""A grammar over token ids, for programs that prove guided requests without a library that compiles grammars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engine.engine import Engine
    from outrider.engine.guides.grammars import Guidance
    from outrider.engine.requests.sampling import SamplingParams

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


def check_residues(tokens: Sequence[int]) -> None:
    """Raise :class:`AssertionError` for a token that :class:`Residues` doesn't allow. Shares no code with the engine."""
    for index, token in enumerate(tokens):
        wanted = (sum(tokens[:index]) + index) % _MODULUS
        assert token % _MODULUS == wanted, f"token {index} is {token}, expected a token of residue {wanted} modulo {_MODULUS}"


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
