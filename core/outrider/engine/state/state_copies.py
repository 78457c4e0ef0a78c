"""StateCopies: copies of recurrent states between requests' rows and the checkpoints of the prefix cache."""

from __future__ import annotations

from outrider.device import Backend, KernelSet, Stream
from outrider.engine.state.staging import Packer, Staging
from outrider.model import KVCache


class StateCopies:
    """The copies of recurrent states for a batch, on the forward stream.

    States are restored before the prefill that continues them and saved after the prefill that wrote them.
    """

    def __init__(self, backend: Backend, forward: Stream, kernels: KernelSet, cache: KVCache, staging: Staging) -> None:
        self._backend = backend
        self._forward = forward
        self._kernels = kernels
        self._cache = cache
        self._staging = staging

    def copy(self, packer: Packer, which: str) -> None:
        """Copy the states of all recurrent layers from the first to the second row of each pair in the segment ``which``.
        A batch without copies lacks the segment.
        """
        if which not in packer.segments:
            return
        with self._backend.on(self._forward):
            pairs = self._staging.view(packer.segments[which]).view(-1, 2)
            sources, targets = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
            for layer in self._cache.states:
                for state in layer:
                    self._kernels.scatter_rows(state, targets, self._kernels.gather_rows(state, sources))
