"""Frame and stage: the static buffers of one iteration, and the units of device work that share them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from outrider.device import AttentionMetadata, Stream
from outrider.engine.requests.batch import Features
from outrider.engine.state.buffers import DecodeInputs, ExtendPlan, StaticBuffers, VerifyInputs, VerifyOutputs
from outrider.engine.state.parts import EngineParts
from outrider.speculative.host_seq_lens import HostSeqLens
from outrider.speculative.proposer import Draft


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """The host's description of the batch of one decode iteration; every stage receives it."""

    count: int
    """Number of requests."""
    bucket: int
    """Number of rows of the captured graphs; ``count`` without graphs."""
    drafted: int
    """Tokens drafted per request; for a tree, its nodes."""
    features: Features
    """Features that cover those of the requests."""
    max_kv: int
    """Upper bound of cached tokens per request after the iteration."""
    captured: bool = False
    """Stages are replayed and read the static copies made for graphs."""
    fused: bool = False
    """One graph holds all stages: gather reads published lengths, and extend reads hidden states where verify wrote them."""
    seq_lens_host: HostSeqLens | None = None
    """Exact lengths of ``bucket`` rows, if attention takes host integers."""


@dataclass(slots=True)
class Frame:
    """The static buffers of one iteration, with the rows of the batch's own requests.

    Addresses never change, so a stage that was captured over one frame serves every frame of its bucket. The last four fields
    are host values that one stage leaves for later stages.
    """

    inputs: DecodeInputs
    draft: Draft
    verify: VerifyInputs
    extend: ExtendPlan
    outputs: VerifyOutputs
    verify_attention: AttentionMetadata
    """Metadata of verify's attention for the whole bucket, with a plan after the stage *verify attention*."""
    path_attention: AttentionMetadata | None
    """Metadata of the accepted path of a tree, with a plan after *extend attention*; None for chains."""
    seq_lens_host: HostSeqLens | None = None
    """Exact lengths of the bucket, if kernels plan attention on the host or attention takes host integers."""
    masks: Tensor | None = None
    """Token masks of guided requests, int32 [B, N, W]; None without one."""


def build_frame(buffers: StaticBuffers, batch: DecodeBatch) -> Frame:
    """Return the frame of ``batch``, with attention metadata that has no plan."""
    views, padded = buffers.views(batch.count, batch.drafted), buffers.views(batch.bucket, batch.drafted)
    tables, path = padded.inputs.tables, padded.extend.path
    return Frame(
        views.inputs,
        views.draft,
        views.verify,
        views.extend,
        views.outputs,
        padded.verify.attention(tables, max_kv=batch.max_kv),
        None if path is None else path.attention(tables, max_kv=batch.max_kv),
    )


class Stage(ABC):
    """Device work that is launched as one unit, by a call or from a graph.

    A stage neither branches on a device value nor waits: the step orders it. It enqueues in the scope of its stream, which
    the caller opens. It works on static memory, so a call, a replay of its own graph and a part of a larger graph compute the
    same.

    ``reads`` and ``writes`` name all memory that the stage accesses and that outlives it: a buffer, a group of buffers
    (:mod:`outrider.engine.state.buffers`), or state of requests. A stage may read what it wrote itself. The proof of the
    engine compares them with the accesses on the simulated device.
    """

    name: str
    on: str
    """The name of its stream in :class:`~outrider.engine.fences.Streams`."""
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    fills: str | None = None
    """The group of buffers that the stage starts for a new batch; its runner then writes the padding of this group."""
    needs_sampling_only = False
    """True if no feature but sampling changes the stage's work, so that graphs of other features are shared."""

    def __init__(self, parts: EngineParts) -> None:
        self.stream: Stream = getattr(parts.streams, self.on)

    @abstractmethod
    def run(self, batch: DecodeBatch, frame: Frame) -> None:
        """Enqueue the stage's work for ``batch``, which reads and writes the buffers of ``frame``."""

    def has_work(self, drafted: int) -> bool:
        """Return True if the stage has work in an iteration that drafts ``drafted`` tokens."""
        del drafted
        return True

    def host_params(self, drafted: int) -> Mapping[str, int]:
        """Return the host parameters of the stage's attention, by name, and by how many tokens each exceeds the requests'
        lengths. The default has none.
        """
        del drafted
        return {}

    def least_lengths(self, drafted: int) -> Mapping[str, int]:
        """Return the minimum of each length in ``host_params`` whose minimum is not 0."""
        del drafted
        return {}
