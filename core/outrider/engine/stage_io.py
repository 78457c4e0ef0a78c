"""What each stage of a decode iteration reads and what it writes: a record in, a record out.

| stage | stream | reads | writes |
|---|---|---|---|
| gather | forward | :class:`GatherInput`, the rows' shared state | :class:`DecodeInputs` |
| draft | forward | :class:`DraftStageInput` | :class:`Draft` |
| place | plan | :class:`PlaceInput` | :class:`VerifyInputs`, all but what is drafted |
| fill | plan | :class:`FillInput` | :class:`VerifyInputs`, the rest |
| verify attention | plan | :class:`AttentionInput` | metadata with its plan |
| verify | forward | :class:`VerifyStageInput` | :class:`VerifyOutputs`; publishes lengths, writes the results |
| extend plan | plan | :class:`ExtendPlanInput` | :class:`ExtendPlan` |
| extend attention | plan | :class:`ExtendAttentionInput` | metadata with its plan |
| extend | forward | :class:`ExtendStageInput` | the draft's cache; stashes the relay |
| iteration | forward | :class:`IterationInput` | all of it (fused mode) |

The tensors are static buffers (:mod:`outrider.engine.state.buffers`), so that a stage can be captured unchanged. The
records hold the rows of the batch's own requests. Attention metadata alone is as long as the bucket.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from outrider.device import AttentionMetadata, Stream
from outrider.engine.requests.features import Features
from outrider.engine.state.buffers import DecodeInputs, ExtendPlan, VerifyInputs, VerifyOutputs
from outrider.speculative.proposer import Draft
from outrider.speculative.seq_lens import HostSeqLens


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """What the host says of the batch of one decode iteration; every stage is told.

    ``count``: its requests; ``bucket``: those of the graphs that hold it, ``count`` without graphs. ``drafted``: tokens that
    are drafted for each request, all nodes of a tree. ``features``: abilities that cover what its requests ask for.
    ``max_kv``: host bound of cached tokens after the iteration. ``captured``: stages are replayed, and read the copies that
    are made for that. ``seq_lens_host``: exact lengths, ``bucket`` of them, only where attention takes host integers.
    """

    count: int
    bucket: int
    drafted: int
    features: Features
    max_kv: int
    captured: bool = False
    seq_lens_host: HostSeqLens | None = None


@dataclass(frozen=True, slots=True)
class GatherInput:
    """``rows`` int64 [B] of the batch. ``seq_lens`` int64 [B], resolved on schedule; None: those published last are read."""

    batch: DecodeBatch
    rows: Tensor
    seq_lens: Tensor | None


@dataclass(frozen=True, slots=True)
class DraftStageInput:
    """What the draft works on, gathered."""

    batch: DecodeBatch
    inputs: DecodeInputs


@dataclass(frozen=True, slots=True)
class PlaceInput:
    """What the plan's first part works on: lengths and tables, gathered."""

    batch: DecodeBatch
    inputs: DecodeInputs


@dataclass(frozen=True, slots=True)
class AttentionInput:
    """``seq_lens_host``: exact lengths of the bucket where planning reads them; else it isn't looked at."""

    batch: DecodeBatch
    seq_lens_host: HostSeqLens | None


@dataclass(frozen=True, slots=True)
class FillInput:
    """What the plan's second part works on: what was gathered, and the draft. ``verify``: what the first part wrote."""

    batch: DecodeBatch
    inputs: DecodeInputs
    draft: Draft
    verify: VerifyInputs


@dataclass(frozen=True, slots=True)
class VerifyStageInput:
    """``plan``: tokens, positions and slots that verify runs over; ``attention``: over which tokens, with its plan.
    ``masks`` int32 [B, N, W]: what may come behind each token; None where no request is guided.
    """

    batch: DecodeBatch
    inputs: DecodeInputs
    draft: Draft
    plan: VerifyInputs
    attention: AttentionMetadata
    masks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ExtendPlanInput:
    """``verify``: what verify ran over; ``outputs``: what it accepted."""

    batch: DecodeBatch
    inputs: DecodeInputs
    verify: VerifyInputs
    outputs: VerifyOutputs


@dataclass(frozen=True, slots=True)
class ExtendAttentionInput:
    """``verify``: the metadata, planned, that verify had. ``seq_lens_host``: see :class:`AttentionInput`."""

    batch: DecodeBatch
    verify: AttentionMetadata
    seq_lens_host: HostSeqLens | None


@dataclass(frozen=True, slots=True)
class ExtendStageInput:
    """What was accepted, where it lies, and the states that the target had there."""

    batch: DecodeBatch
    inputs: DecodeInputs
    verify: VerifyInputs
    outputs: VerifyOutputs
    plan: ExtendPlan
    attention: AttentionMetadata


@dataclass(frozen=True, slots=True)
class IterationInput:
    """All of an iteration in one: its rows are those that were staged."""

    batch: DecodeBatch


class StageInput(Protocol):
    """Every stage is told of the batch."""

    @property
    def batch(self) -> DecodeBatch:
        """What the host says of it."""


In = TypeVar("In", bound=StageInput)
Out = TypeVar("Out")


class Stage(ABC, Generic[In, Out]):
    """Device work that runs as one. It reads what its input names and returns what it wrote.

    It decides nothing by a device value, and waits for nothing: who runs it orders it. It enqueues in the scope of
    ``stream``, which the caller opens. ``fills``: the group of buffers that it begins for a new batch, whose padding is
    written behind it.
    """

    name: str
    fills: str | None = None

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    @abstractmethod
    def run(self, given: In) -> Out:
        """Enqueue it."""


class Capturable(Stage[In, Out]):
    """A stage that may be captured. It works on static buffers, so it computes the same when it's called, when it's replayed
    from a graph of its own, and as a part of one graph.

    ``reads`` and ``writes``: groups of buffers that a graph of it reads and writes.
    """

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    def host_params(self, drafted: int) -> Mapping[str, int]:
        """Host parameters of its attention in an iteration that drafts so many tokens, by name, and how many tokens each is
        ahead of the requests' lengths. None.
        """
        del drafted
        return {}

    def least_lengths(self, drafted: int) -> Mapping[str, int]:
        """Of ``host_params``, the least that a length can be where that isn't 0."""
        del drafted
        return {}

    @abstractmethod
    def written(self, batch: DecodeBatch) -> Out:
        """Where it writes for ``batch``: what :meth:`run` returns, and what is there after a replay."""
