"""Metadata of kernels: the parts of composed ones, shapes and operands of attention, rows of requests, sizes of a decoder,
results of tuning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from outrider.device.graph import HostParam

Method = TypeVar("Method", bound=Callable[..., object])


def composes(*parts: str) -> Callable[[Method], Method]:
    """Mark a default as a composition of the primitives ``parts``.

    A subclass that overrides one of them gets the default back, so that its primitive is called, unless the subclass also
    overrides the composed method.
    """

    def mark(method: Method) -> Method:
        method.parts = frozenset(parts)  # type: ignore[attr-defined]
        return method

    return mark


def parts_of(method: Callable[..., object]) -> frozenset[str]:
    """Return the primitives that the default ``method`` composes; none for a primitive."""
    parts: frozenset[str] = getattr(method, "parts", frozenset())
    return parts


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """The properties of one ``KernelSet.paged_attention`` of a model that are equal for all batches."""

    heads: int
    """Number of query heads."""
    kv_heads: int
    """Number of key heads in the cache."""
    head_size: int
    page_size: int
    """Number of tokens in a page of the cache."""
    dtype: torch.dtype
    """The dtype of queries and cache."""
    scale: float
    """Factor of the dot products, as in ``paged_attention``."""
    window: int = 0
    """How many of the latest tokens a token sees, as in ``paged_attention``; 0: all."""

    @classmethod
    def from_operands(cls, q: Tensor, k_cache: Tensor, *, scale: float, window: int) -> AttentionShape:
        """Return the shape of a call of ``KernelSet.paged_attention`` with these operands."""
        return cls(
            heads=q.shape[1],
            kv_heads=k_cache.shape[2],
            head_size=q.shape[2],
            page_size=k_cache.shape[1],
            dtype=q.dtype,
            scale=scale,
            window=window,
        )


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """A ragged batch of B sequences with T new tokens in all, over a paged cache.

    ``query_start`` int32 [B+1]: offsets of each sequence's new tokens in the flat token dimension; tokens past the last
    offset are padding. ``seq_lens`` int32 [B]: cached tokens of each sequence, its new ones included. ``block_table``
    int32 [B, pages]: pages in order of position; unused entries are 0, the reserved page. ``max_query`` and ``max_kv``:
    host upper bounds of new tokens and cached tokens per sequence (``max_kv`` a bound, not the maximum: the host runs
    ahead of the device).

    ``tree_mask`` bool [T, max_query], or None for a causal batch: whether new token t sees new token j of its own
    sequence. Every new token sees all cached tokens before the new ones.

    ``uniform``: every sequence has exactly ``max_query`` new tokens and there is no padding, so T = B * max_query; False
    if that isn't known.

    ``seq_lens_host``: the exact lengths as a host parameter, only where the backend's policy declares
    ``exact_host_lengths``, and in ``KernelSet.plan_attention`` of kernels that declare ``plans_on_host``.
    ``host_query_start``: ``query_start`` on the host, where a batch isn't uniform and the host made it. ``host_context``:
    the number of cached tokens of each sequence before its new ones, B integers, or None if the host doesn't know.

    ``settled``: a whole decoder layer was enqueued after the last write to these tensors, and after the last write to the
    cache except each sequence's own new tokens in the present layer. No sequence's context includes another sequence's new
    tokens. With programmatic dependent launch, a kernel may start before the previous kernel has ended; if ``settled``, such
    a kernel may read the metadata at once. A kernel set that relies on this ensures that one kernel of each layer waits for
    all earlier kernels.

    ``parts``: the batch divided into consecutive groups of sequences over consecutive tokens, as the number of tokens of each
    group and the metadata of the group alone; empty if it isn't divided. All other fields describe the whole batch, so a
    kernel set may ignore the parts, or compute each part by the kernel that suits it.

    ``shapes``: the attentions for which this batch is planned. ``plan``: the plan of ``KernelSet.plan_attention`` for this
    batch, if the library plans. Code that changes lengths or queries of a planned batch must remove both, since the plan
    is no longer valid.
    """

    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    max_query: int
    max_kv: int
    tree_mask: Tensor | None = None
    uniform: bool = False
    seq_lens_host: HostParam | None = None
    plan: object | None = None
    host_query_start: tuple[int, ...] | None = None
    host_context: tuple[int, ...] | None = None
    shapes: tuple[AttentionShape, ...] = ()
    settled: bool = False
    parts: tuple[tuple[int, AttentionMetadata], ...] = ()

    @classmethod
    def concatenated(cls, *parts: tuple[int, AttentionMetadata]) -> AttentionMetadata:
        """Return the metadata of a batch with ``parts``, enqueued on the current stream: the number of tokens of each part
        with its metadata, causal and without plans. Only the last part may have padding tokens.
        """
        metadata = [each for _, each in parts]
        assert all((each.tree_mask, each.seq_lens_host, each.plan) == (None, None, None) for each in metadata)
        first_tokens = accumulate((tokens for tokens, _ in parts[:-1]), initial=0)
        starts = [each.query_start + first for each, first in zip(metadata, first_tokens, strict=True)]
        return cls(
            query_start=torch.cat([*(each[:-1] for each in starts[:-1]), starts[-1]]),
            seq_lens=torch.cat([each.seq_lens for each in metadata]),
            block_table=torch.cat([each.block_table for each in metadata]),
            max_query=max(each.max_query for each in metadata),
            max_kv=max(each.max_kv for each in metadata),
            parts=parts,
        )

    def after_layer(self) -> AttentionMetadata:
        """Return the metadata as ``settled``, with all parts."""
        return replace(self, settled=True, parts=tuple((tokens, each.after_layer()) for tokens, each in self.parts))


class RotaryArgs(NamedTuple):
    """The rotation of new keys and queries, and the cache slots of keys and values: see :meth:`KernelSet.rope_write_cache`.

    ``cos`` and ``sin`` [T, Dr]; caches [pages, page size, Hkv, D], written; ``slots`` int64 [T].
    """

    cos: Tensor
    sin: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slots: Tensor

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [T, Hq, D], keys and values [T, Hkv, D] as views of ``qkv`` [T, (Hq + 2 Hkv) D]."""
        kv_heads, size = self.k_cache.shape[2:]
        heads = qkv.shape[-1] // size - 2 * kv_heads
        q, k, v = qkv.view(-1, heads + 2 * kv_heads, size).split((heads, kv_heads, kv_heads), dim=1)
        return q, k, v


class HeadNorms(NamedTuple):
    """The norms of queries and keys per head, before the rotation.

    ``queries`` and ``keys`` [D] are weights of :meth:`KernelSet.rms_norm`; ``eps`` is its epsilon. ``joint``: all heads of a
    token are normalised as one row, with weights [Hq D] and [Hkv D].
    """

    queries: Tensor
    keys: Tensor
    eps: float
    joint: bool = False

    def normalize(self, rms_norm: Callable[[Tensor, Tensor, float], Tensor], heads: Tensor, weight: Tensor) -> Tensor:
        """Return the queries or keys ``heads`` [T, Hq or Hkv, D], normalised by ``rms_norm`` with ``weight``."""
        rows = heads.flatten(1) if self.joint else heads
        return rms_norm(rows, weight, self.eps).view(heads.shape)


class ClampedActivation(NamedTuple):
    """The activation ``(up + 1) * gate * sigmoid(alpha * gate)``, with ``gate`` at most ``limit`` and ``up`` within
    ``limit`` of 0. A KernelSet computes it in place of ``silu_mul`` for experts with biases.
    """

    limit: float
    alpha: float


ExpertActivation = Literal["silu", "gelu_tanh"]
"""The activation of experts without biases: ``silu_mul``, or GELU, approximated by a hyperbolic tangent, in place of SiLU."""


class ExpertBiases(NamedTuple):
    """The biases of E experts' products, and the activation between the products.

    ``gate_up`` [E, 2 I] and ``down`` [E, H] have the dtype of the weights; ``gate_up`` has each expert's gate first.
    """

    gate_up: Tensor
    down: Tensor
    activation: ClampedActivation


class CorrectedRouting(NamedTuple):
    """The choice of experts by corrected scores: sigmoids of their logits, as in DeepSeek-V3, or their ``softmax``.

    ``correction`` float32 [E] is added to the scores for the choice alone. Experts are chosen from the ``chosen_groups`` of
    ``groups`` equal, consecutive groups whose two best experts have the largest sum; lower groups first among equals. The
    weights are the scores times ``factor``. Normalized weights are divided by their sum plus ``epsilon``, and at least by
    ``minimum``.
    """

    correction: Tensor
    groups: int = 1
    chosen_groups: int = 1
    factor: float = 1.0
    epsilon: float = 1e-20
    minimum: float = 0.0
    softmax: bool = False


class RequestRows(NamedTuple):
    """State of all requests of an engine, one row of R per request; row 0 is reserved for padding.

    ``last_tokens`` int64 [R], ``seeds`` int64 [R], ``temperature`` float32 [R], ``tables`` int32 [R, P]: the block table.
    """

    last_tokens: Tensor
    seeds: Tensor
    temperature: Tensor
    tables: Tensor


class RequestInputs(NamedTuple):
    """Private copies of the request state that an iteration reads, in the order of its B requests.

    ``rows`` int64 [B], ``lens`` int64 [B], ``last_tokens`` int64 [B], ``seeds`` int64 [B], ``temperature`` float32 [B],
    ``tables`` int32 [B, P].
    """

    rows: Tensor
    lens: Tensor
    last_tokens: Tensor
    seeds: Tensor
    temperature: Tensor
    tables: Tensor


# -- arguments and results of tuning: see ``KernelSet.tune`` -----------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderShape:
    """Sizes of a decoder on one device that determine the speed of kernels. With several ranks: of one rank's shard."""

    hidden: int
    """Hidden size, the width of the residual stream."""
    heads: int
    """Number of query heads."""
    kv_heads: int
    """Number of key heads."""
    head_size: int
    inner: int
    """Width of the gated MLP: half the rows of its first product."""
    vocabulary: int
    """Rows of the last product, which gives the logits."""
    fused: int = 0
    """Columns of the first product of an EAGLE head; 0 without a head."""
    bias: bool = False
    """True if the product that makes queries, keys and values has a bias."""
    qk_norm: bool = False
    """True if queries and keys are normed per head before they are rotated."""
    dtype: torch.dtype = torch.bfloat16
    """The dtype of the weights, which activations share."""


TuningProgress = Callable[[int, int, str], None]
"""A callback of tuning: number of finished steps, total number of steps, and the latest result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningResult:
    """The outcome of one ``KernelSet.tune``: counts of candidates and choices, and the speed before and after."""

    measured: int
    """Number of timed candidates."""
    kept: int
    """Number of choices that were written to the directory."""
    complete: bool
    """True if every step was finished before the deadline."""
    seconds: float
    """Duration of the tuning in seconds."""
    before_us: float
    """Microseconds of a layer before tuning, summed over the measured numbers of tokens."""
    after_us: float
    """Microseconds of a layer after tuning, summed over the measured numbers of tokens."""
