"""What a model needs of the other ranks that hold parts of it.

A layer's attention and its MLP end in a product of which each rank has a part of the sum: what a rank has is *partial*
until it's reduced. Letters: T new tokens, N rows of logits, H hidden size, V vocabulary, D data-parallel groups.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.device import ConfigError, Group, KernelSet, Stream
from outrider.model.shards import Shards


class ModelRanks:
    """One rank's side of a model that several ranks hold: its parts, and the collectives of a forward.

    ``tensor``: the ranks that share attention heads and vocabulary, and work on the same tokens; None: this one alone.
    ``data``: the ranks that hold different tokens and share MLPs; None: there are no others.

    Every method enqueues on the stream of :meth:`place`, whose scope the caller has opened. All ranks of a group call the
    same methods in the same order.
    """

    def __init__(self, shards: Shards, *, tensor: Group | None = None, data: Group | None = None) -> None:
        self.shards = shards
        self.tensor = tensor
        self.data = data
        self._stream: Stream | None = None
        self._expected: deque[int] = deque()
        self._width = 0

    def place(self, stream: Stream) -> None:
        """From now on collectives go to ``stream``: an engine says so of its own before it launches or captures."""
        self._stream = stream

    @property
    def stream(self) -> Stream:
        """Where collectives go."""
        if self._stream is None:
            raise ConfigError("nobody said on which stream the collectives of a model of several ranks go; an engine does")
        return self._stream

    # -- attention and MLP -----------------------------------------------------------------------------------------

    def reduce(self, partial: Tensor) -> Tensor:
        """Sum ``partial`` over the tensor-parallel ranks, in place; returns it."""
        if self.tensor is not None:
            self.tensor.all_reduce(partial, stream=self.stream)
        return partial

    def add(self, partial: Tensor, residual: Tensor) -> Tensor:
        """Add the sum of ``partial`` [T, H] to ``residual`` [T, H] in place; returns it."""
        return residual.add_(self.reduce(partial))

    def add_rms_norm(self, kernels: KernelSet, partial: Tensor, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Add the sum of ``partial`` [T, H] to ``residual`` in place; returns its norm [T, H]."""
        if self.tensor is None:
            return kernels.add_rms_norm(partial, residual, norm, eps)
        return kernels.all_reduce_rms_norm(partial, residual, norm, eps, group=self.tensor, stream=self.stream)

    def expect(self, widths: Sequence[int]) -> None:
        """Of each of the next passes, the most tokens that a data-parallel group has in it; the same on all of them.

        Without it, each group has as many in a pass as this one.
        """
        self._expected = deque(widths)

    def begin_pass(self, tokens: int) -> None:
        """A pass through layers begins, of ``tokens`` tokens here."""
        self._width = self._expected.popleft() if self._expected else tokens
        if tokens > self._width:
            raise ConfigError(f"a pass has {tokens} tokens here, and the ranks agreed on {self._width} at most")

    def gather_tokens(self, normed: Tensor) -> Tensor:
        """Tokens of all data-parallel groups [D * W, H], from those of this one [T, H]; W of each, zeros behind its own."""
        if self.data is None:
            return normed
        own = normed.contiguous()
        if own.shape[0] < self._width:
            own = torch.nn.functional.pad(own, (0, 0, 0, self._width - own.shape[0]))
        gathered = own.new_empty((self.data.size, *own.shape))
        self.data.all_gather(gathered, own, stream=self.stream)
        return gathered.flatten(0, 1)

    def scatter_tokens(self, partial: Tensor, tokens: int) -> Tensor:
        """Sum ``partial`` [D * W, H] over the data-parallel ranks → this group's ``tokens`` rows [T, H]."""
        if self.data is None:
            return partial
        parts = partial.view(self.data.size, self._width, -1)
        own = torch.empty_like(parts[0])
        self.data.reduce_scatter(own, parts, stream=self.stream)
        return own[:tokens]

    # -- vocabulary ------------------------------------------------------------------------------------------------

    def embed(self, kernels: KernelSet, tokens: Tensor, weight: Tensor) -> Tensor:
        """Embeddings [T, H] of int64 ``tokens`` [T], of which this rank's rows are ``weight``."""
        if self.tensor is None:
            return kernels.embedding(tokens, weight)
        width, rank = weight.shape[0], self.shards.vocabulary.rank
        own = tokens - rank * width
        here = (own >= 0) & (own < width)
        embedded = kernels.embedding(torch.where(here, own, 0), weight)
        return self.reduce(embedded * here.unsqueeze(-1))

    def logits(self, own: Tensor, vocabulary: int) -> Tensor:
        """Logits [N, V] over the whole ``vocabulary``, from those of this rank's part [N, width of it]; the same bits on all
        ranks.
        """
        if self.tensor is None:
            return own
        gathered = own.new_empty((self.tensor.size, *own.shape))
        self.tensor.all_gather(gathered, own.contiguous(), stream=self.stream)
        return gathered.movedim(0, -2).flatten(-2)[..., :vocabulary].contiguous()

    @property
    def decides(self) -> bool:
        """Whether the other tensor-parallel ranks take what this one comes to, see :meth:`agree`."""
        return self.tensor is None or self.tensor.rank == 0

    # -- decisions -------------------------------------------------------------------------------------------------

    def agree(self, values: Tensor) -> None:
        """Make ``values`` on every tensor-parallel rank those of the first one."""
        if self.tensor is not None:
            self.tensor.broadcast(values, root=0, stream=self.stream)
