"""Inputs and outputs of each stage of a decode iteration, as records.

| stage | stream | reads | writes |
|---|---|---|---|
| gather | forward | :class:`GatherInput`, the rows' shared state | :class:`DecodeInputs`. |
| draft | forward | :class:`DraftStageInput` | :class:`Draft`. |
| plan positions | plan | :class:`PlanPositionsInput` | :class:`VerifyInputs` without drafted tokens. |
| plan tokens | plan | :class:`PlanTokensInput` | :class:`VerifyInputs`, tokens and tree mask. |
| verify attention | plan | :class:`AttentionInput` | metadata with its plan. |
| verify | forward | :class:`VerifyStageInput` | :class:`VerifyOutputs`; publishes lengths, writes the results. |
| extend plan | plan | :class:`ExtendPlanInput` | :class:`ExtendPlan`. |
| extend attention | plan | :class:`ExtendAttentionInput` | metadata with its plan. |
| extend | forward | :class:`ExtendStageInput` | the draft's cache; stashes the relay. |
| iteration | forward | :class:`IterationInput` | all outputs above (fused mode). |

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
    seq_lens_host: HostSeqLens | None = None
    """Exact lengths of ``bucket`` rows, if attention takes host integers."""


@dataclass(frozen=True, slots=True)
class GatherInput:
    """The input of gather: the row numbers of the batch, ``rows`` int64 [B].

    ``seq_lens`` int64 [B] are resolved on schedule; None reads the published lengths.
    """

    batch: DecodeBatch
    rows: Tensor
    seq_lens: Tensor | None


@dataclass(frozen=True, slots=True)
class DraftStageInput:
    """The input of draft: the gathered row state."""

    batch: DecodeBatch
    inputs: DecodeInputs


@dataclass(frozen=True, slots=True)
class PlanPositionsInput:
    """The input of plan positions: the gathered lengths and block tables."""

    batch: DecodeBatch
    inputs: DecodeInputs


@dataclass(frozen=True, slots=True)
class AttentionInput:
    """The input of verify attention: the batch and, only if attention is planned on the host, the exact ``seq_lens_host``."""

    batch: DecodeBatch
    seq_lens_host: HostSeqLens | None


@dataclass(frozen=True, slots=True)
class PlanTokensInput:
    """The input of plan tokens: the gathered state, the draft, and ``verify``, the output of plan positions."""

    batch: DecodeBatch
    inputs: DecodeInputs
    draft: Draft
    verify: VerifyInputs


@dataclass(frozen=True, slots=True)
class VerifyStageInput:
    """The input of verify.

    ``plan`` has the tokens, positions and slots of verify, ``attention`` its planned metadata. ``masks`` int32 [B, N, W] are
    the token masks of guided requests; None without one.
    """

    batch: DecodeBatch
    inputs: DecodeInputs
    draft: Draft
    plan: VerifyInputs
    attention: AttentionMetadata
    masks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ExtendPlanInput:
    """The input of the extend plan: ``verify``, the inputs of verify, and ``outputs``, the accepted tokens."""

    batch: DecodeBatch
    inputs: DecodeInputs
    verify: VerifyInputs
    outputs: VerifyOutputs


@dataclass(frozen=True, slots=True)
class ExtendAttentionInput:
    """The input of extend attention: ``verify``, the planned metadata of verify. ``seq_lens_host`` as in
    :class:`AttentionInput`.
    """

    batch: DecodeBatch
    verify: AttentionMetadata
    seq_lens_host: HostSeqLens | None


@dataclass(frozen=True, slots=True)
class ExtendStageInput:
    """The input of extend: the accepted tokens, their positions and slots, and the target's hidden states there."""

    batch: DecodeBatch
    inputs: DecodeInputs
    verify: VerifyInputs
    outputs: VerifyOutputs
    plan: ExtendPlan
    attention: AttentionMetadata


@dataclass(frozen=True, slots=True)
class IterationInput:
    """The input of a whole iteration as one stage: the batch. The stage reads the staged rows."""

    batch: DecodeBatch


class StageInput(Protocol):
    """The common part of all stage inputs: the batch."""

    @property
    def batch(self) -> DecodeBatch:
        """The host's description of the batch."""


In = TypeVar("In", bound=StageInput)
Out = TypeVar("Out")


class Stage(ABC, Generic[In, Out]):
    """Device work that is launched as one unit. It reads the buffers of its input and returns the buffers that it wrote.

    A stage neither branches on a device value nor waits: its runner orders it. It enqueues in the scope of ``stream``, which
    the caller opens. ``fills`` names the group of buffers that the stage starts for a new batch; the runner then writes the
    padding of this group.
    """

    name: str
    fills: str | None = None

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    @abstractmethod
    def run(self, given: In) -> Out:
        """Enqueue the stage's work and return the buffers that it writes."""


class Capturable(Stage[In, Out]):
    """A stage that may be captured. It works on static buffers, so a call, a replay of its own graph and a part of a larger
    graph compute the same.

    ``reads`` and ``writes`` name the groups of buffers that its graph reads and writes.
    """

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

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

    @abstractmethod
    def written(self, batch: DecodeBatch) -> Out:
        """Return the static buffers that :meth:`run` returns for ``batch``, valid after a replay."""
