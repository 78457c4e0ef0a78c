"""The part of a KernelSet for a model's pass: products, norms, rotation, cache writes and attention over the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device.errors import ConfigError
from outrider.device.kernels.bookkeeping_kernels import BookkeepingKernels
from outrider.device.kernels.metadata import (
    AttentionMetadata,
    CorrectedRouting,
    ExpertActivation,
    ExpertBiases,
    HeadNorms,
    RotaryArgs,
    composes,
)
from outrider.device.kernels.reference import ops as _ops  # noqa: F401  (registers the operators)
from outrider.device.kernels.weights import QuantizedWeight, Weight, linear

if TYPE_CHECKING:
    from outrider.device.collectives import Group
    from outrider.device.stream import Stream


def activation_operands(
    biases: ExpertBiases | None, activation: ExpertActivation
) -> tuple[Tensor | None, Tensor | None, float, float, str]:
    """Return the last operands of the operators of experts: both biases, the numbers of their activation, and the name of the
    activation without biases.
    """
    if biases is None:
        return None, None, 0.0, 0.0, activation
    return biases.gate_up, biases.down, *biases.activation, activation


class ModelKernels(BookkeepingKernels):
    """Kernels of a pass through a decoder. Rules and letters: :class:`~outrider.device.KernelSet`."""

    plans_on_host = False
    """True if :meth:`plan_attention` reads exact lengths on the host. The engine then copies lengths to the host before it
    plans a batch (fence *lengths on host*), and plans each replay of a graph anew. Fused mode, in which no length leaves the
    device, is rejected."""

    loads_in_capture = False
    """True if calls with new sizes can be captured without having run before: a capture loads what it needs onto the device,
    and no call creates memory for later calls. The engine then runs a stage before its first capture alone, and not before
    the capture of each batch size."""

    # -- matrix products -----------------------------------------------------------------------------------------------

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x [..., in] @ weight[out, in].T + bias`` → [..., out]."""
        # Some libraries read a strided row of 16 bits past its end, where a NaN counts although it's multiplied by zero.
        return F.linear(x.contiguous(), weight, bias)

    def linear_quantized(self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
        """Return ``x [..., in] @ W.T + bias`` → [..., out] in x's dtype, for the weight W that ``weight`` encodes.

        The formats of a backend's own kernels are its ``Capabilities.quantized_formats``. For other formats there is only
        this reference, which dequantizes W in each call. It runs only if the user requests it.

        *Weight.* W is (q - z) * s, in float32 or wider; it may be rounded to x's dtype before the product, or never.

        *Activations* are quantised first if ``weight.activations`` names a format. x is divided by its scale, rounded to the
        nearest value (ties to even), clamped to the format's range, and multiplied by the scale before or after the product.
        ``fp8`` is e4m3: the range is -448 to 448, and the default scale is the largest magnitude over 448. ``int8`` has the
        range -128 to 127, and the default scale is the largest magnitude over 127.5 + 2**-13. With a divisor of 127.5, the
        largest number would lie between two steps, and its last bit would decide the result; with this divisor it becomes
        -128 or 127. A group of zeros stays zeros. No scale depends on another row, so a request's tokens don't depend on
        other requests.

        *Numerics.* The rule of every kernel holds; in addition, x near the border of two steps may be rounded to either.
        """
        return torch.ops.outrider.linear_quantized(  # type: ignore[no-any-return]  # torch.ops has no types
            x,
            weight.data,
            weight.scales,
            weight.zero_points,
            weight.input_scale,
            bias,
            weight.format,
            list(weight.block),
            list(weight.shape),
            weight.activations or "",
            weight.activation_group,
        )

    # -- norms, activation -----------------------------------------------------------------------------------------

    @composes("gather_rows", "linear", "linear_quantized")
    def fuse_embedding(
        self, tokens: Tensor, table: Tensor, hidden: Tensor, weight: Weight, bias: Tensor | None = None
    ) -> Tensor:
        """Return the product of each token's embedding and ``hidden`` state, side by side, with ``weight`` [out, H + H'] and
        ``bias`` → [T, out]: the input of an EAGLE head (Li et al. 2024).
        """
        return linear(self, torch.cat((self.gather_rows(table, tokens), hidden), dim=-1), weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the root-mean-square norm of ``x`` [..., H] with ``weight`` [H], in x's dtype.

        ``weight`` has x's dtype, or a wider one: then the norm is multiplied before it is rounded. The same holds for the
        weights of all other kernels with a norm.
        """
        return torch.ops.outrider.rms_norm(x, weight, eps)  # type: ignore[no-any-return]  # torch.ops has no types

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute ``residual += x`` in place (both [T, H]), and return the norm of ``residual``."""
        return torch.ops.outrider.add_rms_norm(x, residual, weight, eps)  # type: ignore[no-any-return]  # torch.ops has no types

    @composes("add_rms_norm")
    def all_reduce_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, group: Group, stream: Stream
    ) -> Tensor:
        """Sum ``x`` [T, H] over the ranks of ``group``, then return :meth:`add_rms_norm` of the sum → [T, H].

        ``x`` is contiguous; its contents are undefined afterwards. The sum is added in place to ``residual`` [T, H], which
        is equal on all ranks. Each rank gets the same bits. ``stream`` is the stream of the scope that the caller opened.

        Each rank makes the same calls in the same order, as for all calls of a :class:`~outrider.device.Group`. Faster
        kernels count and report the call as ``Group.all_reduce`` does (``Group.announce``).
        """
        group.all_reduce(x, stream=stream)
        return self.add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return ``silu(gate) * up`` for ``gate_up`` [T, 2*I] → [T, I]."""
        return torch.ops.outrider.silu_mul(gate_up)  # type: ignore[no-any-return]  # torch.ops has no types

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return ``x`` [T, N] times the sigmoid of ``gate`` [T, N]."""
        return torch.ops.outrider.sigmoid_mul(x, gate)  # type: ignore[no-any-return]  # torch.ops has no types

    # -- mixtures of experts: E experts, k of them for a token, inner size I -------------------------------------------

    def route(
        self,
        logits: Tensor,
        count: int,
        *,
        renormalize: bool,
        held: tuple[int, int] | None = None,
        routing: CorrectedRouting | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Select ``count`` experts per token by the router's ``logits`` [T, E] → weights [T, k], experts int64 [T, k].

        The experts are the likeliest of a softmax over all experts, in float32 or wider, in descending order, the lower one
        first among equals. Weights are their probabilities, divided by their sum if ``renormalize``. They are float32, or
        float64 for float64 logits.

        ``held``: the first and last (exclusive) expert of this rank, if ranks divide the experts. The selection is over all E
        experts. A returned expert is counted from the first held one; of an expert that isn't held, expert and weight are -1
        and 0.

        ``routing`` corrects the scores for the selection, see :class:`CorrectedRouting`. Only kernels whose
        ``optional_operands`` list ``corrected_routing`` get it.
        """
        first, last = held or (0, logits.shape[1])
        return torch.ops.outrider.route(logits, count, renormalize, first, last, *(routing or ()))  # type: ignore[no-any-return]  # torch.ops has no types

    def experts(
        self,
        x: Tensor,
        weights: Tensor,
        chosen: Tensor,
        gate_up: Tensor,
        down: Tensor,
        *,
        biases: ExpertBiases | None = None,
        activation: ExpertActivation = "silu",
    ) -> Tensor:
        """Return the sum over a token's experts of ``weights`` [T, k] times :meth:`silu_mul` of ``x`` [T, H] with the
        expert's ``gate_up`` [E, 2*I, H], then with its ``down`` [E, H, I] → [T, H].

        ``chosen`` int64 [T, k] are the experts that :meth:`route` returned, each at most once per token. Only the device
        knows their values. -1 is no expert and adds nothing; its weight is 0.

        ``biases`` are added to the two products of each expert, and replace :meth:`silu_mul` by their activation. The model
        passes them only if it has them, and only to kernels whose ``optional_operands`` list ``expert_biases``.

        ``activation``: ``gelu_tanh`` replaces the SiLU of :meth:`silu_mul` by GELU, approximated by a hyperbolic tangent
        (Hendrycks and Gimpel 2016). Experts with ``biases`` don't have it. The model passes it only to kernels whose
        ``optional_operands`` list ``expert_gelu``.
        """
        operands = x, weights, chosen, gate_up, down, *activation_operands(biases, activation)
        return torch.ops.outrider.experts(*operands)  # type: ignore[no-any-return]  # torch.ops has no types

    def experts_quantized(
        self,
        x: Tensor,
        weights: Tensor,
        chosen: Tensor,
        gate_up: QuantizedWeight,
        down: QuantizedWeight,
        *,
        biases: ExpertBiases | None = None,
        activation: ExpertActivation = "silu",
    ) -> Tensor:
        """Compute :meth:`experts` with quantised weights, ``gate_up`` [E * 2 I, H] and ``down`` [E * H, I].

        Each weight concatenates the experts' rows. Both have the same format and activation format, and no block has rows of
        two experts. A backend's kernels support the formats that it declares for :meth:`linear_quantized`, whose rules hold.
        The output of an expert's activation is quantised too. Raises :class:`ConfigError` for weights of other shapes, or of
        two formats.
        """
        hidden, inner = x.shape[1], down.shape[1]
        expected = gate_up.shape[0] * hidden == down.shape[0] * 2 * inner and gate_up.shape[1] == hidden
        formats = {(each.format, each.activations, each.activation_group) for each in (gate_up, down)}
        if not expected or len(formats) > 1 or 2 * inner % gate_up.block[0] or hidden % down.block[0]:
            raise ConfigError(
                f"quantised experts are {list(gate_up.shape)} {gate_up.label} and {list(down.shape)} {down.label}; expected "
                f"[E * 2 I, {hidden}] and [E * {hidden}, I], stored in one way, in blocks that end with an expert's rows"
            )
        operands = [
            part
            for each in (gate_up, down)
            for part in (each.data, each.scales, each.zero_points, each.input_scale, list(each.block))
        ]
        return torch.ops.outrider.experts_quantized(  # type: ignore[no-any-return]  # torch.ops has no types
            x,
            weights,
            chosen,
            *operands,
            down.shape[0] // hidden,
            gate_up.format,
            gate_up.activations or "",
            gate_up.activation_group,
            inner,
            *activation_operands(biases, activation),
        )

    # -- cache and attention --------------------------------------------------------------------------

    def rope_write_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
    ) -> None:
        """Rotate q [T, Hq, D] and k [T, Hkv, D] in place by cos and sin [T, Dr]; write k, v into the cache.

        Only the first Dr of D dimensions of a head are rotated; most models have Dr = D.

        Caches are [pages, page size, Hkv, D]; ``slots`` int64 [T] is page * page size + offset. Padding tokens write to
        the reserved page 0; other slots are distinct.
        """
        torch.ops.outrider.rope_write_cache(q, k, v, cos, sin, k_cache, v_cache, slots)

    @composes("rms_norm", "rope_write_cache")
    def head_norm_rope_write_cache(self, qkv: Tensor, norms: HeadNorms | None, rotary: RotaryArgs) -> Tensor:
        """Normalise the heads of the queries and keys in ``qkv``, then call :meth:`rope_write_cache` → queries [T, Hq, D].

        The rows of ``qkv`` [T, (Hq + 2 Hkv) D] are contiguous; it has queries, keys and values side by side. Without
        ``norms``, it may be changed. Hq may be 0: then ``qkv`` has only keys and values. Only kernels whose
        ``optional_operands`` list ``joint_head_norms`` get ``norms`` that are joint.
        """
        q, k, v = rotary.split(qkv)
        if norms is not None:
            k = norms.normalize(self.rms_norm, k, norms.keys)
            q = norms.normalize(self.rms_norm, q, norms.queries) if q.shape[1] else q
        # Without queries, a copy of the keys takes their place and is dropped: rope_write_cache needs queries.
        self.rope_write_cache(q if q.shape[1] else k.clone(), k, v, *rotary)
        return q

    def plan_attention(self, metadata: AttentionMetadata, *, stream: Stream) -> AttentionMetadata:
        """Let a library that plans on the host prepare for this batch; return the metadata with the plan.

        The engine calls the method in the plan stream's scope, and for prompt chunks in the scope of the stream that runs
        them. The call precedes every use of the tensors of ``metadata`` on another stream, and is never captured. A plan
        covers the ``shapes`` of the metadata; without shapes, nothing is planned. Kernels that declare ``plans_on_host`` get
        ``seq_lens_host``, and ``host_query_start`` if the batch isn't uniform. The reference plans nothing.

        *In place.* If ``metadata.plan`` is None, the method creates a plan with room for lengths up to the whole block table.
        Otherwise ``metadata.plan`` is an earlier plan for the same number of requests and ``max_query`` (for prompt chunks:
        for any). The method then updates the plan in place, so that a graph captured with the plan computes this batch.

        *Lifetime.* The caller keeps a plan alive as long as work may use it, and has ordered ``stream`` after the last
        attention that used the plan. Attentions planned on one ``stream`` run on one stream, one at a time, so their plans
        may share scratch memory. The kernels keep host memory alive until the device has read it.
        """
        del stream
        return metadata

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of q [T, Hq, D] over the pages of each sequence → [T, Hq, D].

        The new tokens' keys and values are in the cache already. Slots after a sequence's length, and page 0, may hold any
        values of other requests, NaN included; they don't affect the result. ``window`` > 0: a token sees that many
        positions, its own included; the batch is then causal, without a tree mask.

        ``sinks`` [Hq], in float32 or wider: the logit of one more column in the softmax of each head, a column without a
        value (Xiao et al. 2024). The model passes sinks only if it has them, and only to kernels whose ``optional_operands``
        list ``attention_sinks``.
        """
        return torch.ops.outrider.paged_attention(  # type: ignore[no-any-return]  # torch.ops has no types
            q,
            k_cache,
            v_cache,
            metadata.query_start,
            metadata.seq_lens,
            metadata.block_table,
            metadata.tree_mask,
            metadata.max_query,
            metadata.max_kv,
            scale,
            window,
            sinks,
        )
