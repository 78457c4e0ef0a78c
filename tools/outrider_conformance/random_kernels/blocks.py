"""Random chains of blocks. A block may defer work to the next block or to the last norm, so each problem runs the whole
chain.

The composed blocks of the references in float64 give the expected results. A problem passes the residual stream through two
blocks of a kind, so that a contribution that the first defers is fused with the second. Weights don't quantise activations,
since the quantisation of a norm depends on its last bit.

The problems set every field of the records that a block receives: a field that a kernel ignores changes the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from outrider.device import (
    CACHE_FORMATS,
    QUANTIZED_FORMATS,
    AttentionBlock,
    AttentionMetadata,
    AttentionTokens,
    BlockKernels,
    CorrectedRouting,
    DeltaRuleWeights,
    ExpertBiases,
    ExpertsBlock,
    HeadNorms,
    KernelSet,
    LayerRows,
    MlpBlock,
    RankBoundary,
    RecurrentBatch,
    RecurrentBlock,
    RecurrentTokens,
    RecurrentWindow,
    ResidualStream,
    RotaryArgs,
    SplitWeight,
    Weight,
)
from outrider_conformance.random_kernels import bounds
from outrider_conformance.random_kernels.dense import EPS
from outrider_conformance.random_kernels.experts import CLAMPED
from outrider_conformance.random_kernels.problem import (
    KernelProblems,
    Operand,
    Problem,
    RandomValues,
    Shape,
    among,
    between,
    in_formats,
)
from outrider_conformance.random_kernels.quantized import random_matrix

Mapped = Mapping[str, Tensor]
_TOLERANCE = MappingProxyType({torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2})
"""Allowed error of a chain of blocks by dtype, relative to the value and to the root mean square of all values."""
_CACHE_TOLERANCE = 0.13
"""Allowed relative error of a number in a quantised cache: its rounding may differ by a step."""
_HEADS, _KV_HEADS = 4, 2
_HEAD_SIZES = 64, 128
_EXPERTS = 3


class _TwinRanks(RankBoundary):
    """The boundary of a rank whose peers have the same operands: a tensor-parallel peer, and another data-parallel group."""

    reduces = True

    def add(self, partial: Tensor, rows: Tensor) -> Tensor:
        return rows.add_(partial * 2)

    def add_rms_norm(self, kernels: BlockKernels, partial: Tensor, rows: Tensor, norm: Tensor, eps: float) -> Tensor:
        return kernels.add_rms_norm(partial * 2, rows, norm, eps)

    def gather_tokens(self, normed: Tensor) -> Tensor:
        return torch.cat((normed, normed))

    def scatter_tokens(self, partial: Tensor, tokens: int) -> Tensor:
        return partial[:tokens] + partial[tokens:]


_TWIN_RANKS = _TwinRanks()


def resolved(kernels: KernelSet, name: str, x: ResidualStream, block: object, *tokens: object, **more: Any) -> ResidualStream:
    """Compute the block ``name`` by the method that a model takes for these weights."""
    made: ResidualStream = kernels.resolve_block(name, block)(x, block, *tokens, **more)
    return made


class _ProblemOperands:
    """The operands of a problem of blocks under construction, by name."""

    def __init__(self, shape: Shape, dtype: torch.dtype, dice: RandomValues, format: str | None = None) -> None:
        self.shape, self.dtype, self.dice, self.format = shape, dtype, dice, format
        self.made: dict[str, Operand] = {}

    def matrix(self, name: str, rows: int, columns: int) -> Callable[[Mapped], Weight]:
        """Add a weight [rows, columns]; return the function that finds it among the operands of a call."""
        made = random_matrix(name, rows, columns, self.shape, self.dtype, self.dice, self.format)
        self.made |= made.operands
        return made.weight

    def rows_of_two_formats(self, name: str, rows: int, columns: int) -> Callable[[Mapped], Weight]:
        """Add a weight as :meth:`matrix` does; if ``split``, its second half of rows is unquantised, and stored apart."""
        if not self.shape["split"]:
            return self.matrix(name, rows, columns)
        first = self.matrix(f"{name} first", rows // 2, columns)
        rest = random_matrix(f"{name} rest", rows - rows // 2, columns, self.shape, self.dtype, self.dice, None)
        self.made |= rest.operands
        return lambda o: SplitWeight((first(o), rest.weight(o)))  # type: ignore[arg-type]  # neither is split itself

    @property
    def ranks(self) -> RankBoundary:
        """The boundary of the rank that computes the blocks."""
        return _TWIN_RANKS if self.shape["ranks"] else RankBoundary()

    def vector(self, name: str, size: int) -> None:
        """Add a vector, such as a norm or a bias."""
        self.made[name] = Operand(self.dice.normal(size, dtype=self.dtype))

    def residual(self, tokens: int, hidden: int) -> None:
        """Add the residual stream and the last norm."""
        self.made["residual"] = Operand(self.dice.normal(tokens, hidden, dtype=self.dtype))
        self.vector("last norm", hidden)

    def problem(
        self, call: Callable[[KernelSet, Mapped], Mapped], written: tuple[str, ...], cache: str | None = None
    ) -> Problem:
        """Return the problem of ``call``, whose expected results are those of the references in float64.

        A result may differ from the expected one by a share of its size, plus three times the difference of the references in
        the problem's own dtype: a chain of blocks amplifies rounding, and a rounded router may choose other experts.
        ``written`` names the operands that the call writes.
        """

        def results_of(operands: dict[str, Tensor]) -> Mapped:
            return dict(call(KernelSet(), operands)) | {name: operands[name] for name in written}

        exact = results_of({name: _wide(one.tensor) for name, one in self.made.items()})
        rounded = results_of({name: one.tensor.clone() for name, one in self.made.items()})
        near = partial(_number_near, dtype=self.dtype, narrow=cache is not None)
        return Problem(self.made, call, {name: near(made, rounded[name]) for name, made in exact.items()})


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.float64 if x.is_floating_point() and x.dtype.itemsize > 1 else x.dtype, copy=True)


def _number_near(made: Tensor, rounded: Tensor, dtype: torch.dtype, *, narrow: bool) -> bounds.Number:
    value, tolerance = made.double(), _TOLERANCE[dtype]
    own = (rounded.double() - value).nan_to_num().abs().amax()
    if narrow:
        tolerance = max(tolerance, _CACHE_TOLERANCE)
    size = value[value.isfinite()].square().mean().sqrt()
    return bounds.Number(value, tolerance * (value.nan_to_num().abs() + size) + 3 * own)


def _mlp(operands: _ProblemOperands, name: str, hidden: int) -> Callable[[Mapped], MlpBlock]:
    inner, bias = operands.shape["inner"], operands.shape["bias"]
    gate_up = operands.rows_of_two_formats(f"{name} gate_up", 2 * inner, hidden)
    down = operands.matrix(f"{name} down", hidden, inner)
    operands.vector(f"{name} norm", hidden)
    if bias:
        operands.vector(f"{name} gate_up bias", 2 * inner)
        operands.vector(f"{name} down bias", hidden)
    return lambda o: MlpBlock(
        norm=o[f"{name} norm"],
        eps=EPS,
        gate_up=gate_up(o),
        gate_up_bias=o.get(f"{name} gate_up bias"),
        down=down(o),
        down_bias=o.get(f"{name} down bias"),
        ranks=operands.ranks,
    )


def _mlp_block(shape: Shape, dtype: torch.dtype, dice: RandomValues, format: str | None = None) -> Problem:
    operands = _ProblemOperands(shape, dtype, dice, format)
    operands.residual(shape["tokens"], shape["hidden"])
    first, second = (_mlp(operands, name, shape["hidden"]) for name in ("first", "second"))

    def call(kernels: KernelSet, o: Mapped) -> Mapped:
        x = resolved(kernels, "mlp_block", ResidualStream(kernels, o["residual"]), first(o))
        return {"out": resolved(kernels, "mlp_block", x, second(o)).norm(o["last norm"], EPS)}

    return operands.problem(call, ("residual",))


def _experts_block(
    shape: Shape,
    dtype: torch.dtype,
    dice: RandomValues,
    format: str | None = None,
    *,
    has_biases: bool = False,
    is_corrected: bool = False,
    has_gelu: bool = False,
) -> Problem:
    """Return a problem that routes each token to all experts, so that no rounding decides the route. ``held``: another rank
    holds half of them. ``has_biases``: the experts have biases, and none is shared. ``is_corrected``: the router has, and the
    shared expert has no gate. ``has_gelu``: the routed experts have.
    """
    operands, hidden, inner = _ProblemOperands(shape, dtype, dice, format), shape["hidden"], shape["inner"]
    operands.residual(shape["tokens"], hidden)
    gate_up = operands.matrix("gate_up", _EXPERTS * 2 * inner, hidden)
    down = operands.matrix("down", _EXPERTS * hidden, inner)
    operands.vector("norm", hidden)
    count = _EXPERTS * (1 + shape["held"])
    router_dtype = torch.promote_types(dtype, torch.float32) if is_corrected else dtype
    operands.made["router"] = Operand(dice.factors(count, hidden, dtype=router_dtype, scale=hidden**-0.5))
    if shape["bias"] and not is_corrected:
        operands.vector("router bias", count)
    if has_biases:
        for name, size in (("gate_up bias", 2 * inner), ("down bias", hidden)):
            operands.made[name] = Operand(dice.normal(_EXPERTS, size, dtype=dtype))
    if is_corrected:
        operands.made["correction"] = Operand(dice.normal(count, dtype=torch.float32))
    operands.made["shared_gate"] = Operand(dice.factors(1, hidden, dtype=dtype, scale=hidden**-0.5))
    shared, following = _mlp(operands, "shared", hidden), _mlp(operands, "following", hidden)

    def experts(o: Mapped) -> ExpertsBlock:
        gates, outputs = gate_up(o), down(o)
        if isinstance(gates, Tensor) and isinstance(outputs, Tensor):
            gates, outputs = gates.view(_EXPERTS, -1, hidden), outputs.view(_EXPERTS, hidden, -1)
        return ExpertsBlock(
            norm=o["norm"],
            eps=EPS,
            router=o["router"],
            router_bias=o.get("router bias"),
            per_token=count,
            renormalize=bool(shape["bias"]),
            routing=CorrectedRouting(o["correction"], factor=2.5) if is_corrected else None,
            held=(1, 1 + _EXPERTS) if shape["held"] else None,
            gate_up=gates,
            down=outputs,
            biases=ExpertBiases(o["gate_up bias"], o["down bias"], CLAMPED) if has_biases else None,
            activation="gelu_tanh" if has_gelu else "silu",
            shared=None if has_biases else shared(o),
            shared_gate=None if has_biases or is_corrected else o["shared_gate"],
            ranks=operands.ranks,
        )

    def call(kernels: KernelSet, o: Mapped) -> Mapped:
        x = resolved(kernels, "mlp_block", ResidualStream(kernels, o["residual"]), following(o))
        return {"out": resolved(kernels, "experts_block", x, experts(o)).norm(o["last norm"], EPS)}

    return operands.problem(call, ("residual",))


def _sequences(operands: _ProblemOperands, page: int, size: int, cache: str | None) -> None:
    """Add cos, sin, slots, tables and lengths of a batch, and two caches with NaN in slots that no sequence uses."""
    shape, dice = operands.shape, operands.dice
    batch, new, context = shape["batch"], shape["new"], shape["context"]
    pages = -(-(new + context) // page)
    table = (dice.permutation(batch * pages) + 1).view(batch, pages)
    positions = torch.arange(context, context + new)
    slots = (table[:, positions // page] * page + positions % page).flatten()
    used = torch.zeros(1 + batch * pages, page, dtype=torch.bool)
    used[table] = (torch.arange(pages * page) < context + new).view(pages, page)
    made = operands.made
    angle = dice.uniform(batch * new, size // (4 if shape["partial"] else 2)) * 6.28
    for name, each in (("cos", angle.cos()), ("sin", angle.sin())):
        made[name] = Operand(each.repeat(1, 2).to(operands.dtype))
    for name in ("k_cache 0", "v_cache 0", "k_cache 1", "v_cache 1"):
        pages_of = dice.normal(*used.shape, _KV_HEADS, size, dtype=operands.dtype)
        pages_of[~used] = torch.nan
        made[name] = Operand(pages_of if cache is None else pages_of.to(CACHE_FORMATS[cache]))
    made |= {
        "slots": Operand(slots),
        "query_start": Operand(torch.arange(0, batch * new + 1, new, dtype=torch.int32)),
        "seq_lens": Operand(torch.full((batch,), context + new, dtype=torch.int32)),
        "block_table": Operand(table.to(torch.int32)),
        "last": Operand(torch.arange(new - 1, batch * new, new)),
        "starts": Operand(torch.arange(batch + 1, dtype=torch.int32)),
    }
    if shape["tree"] and not shape["window"]:
        lane = torch.arange(new)
        branches = ((lane[:, None] - lane) % 2 == 0) & (lane[:, None] >= lane) | (lane == 0)
        made["tree_mask"] = Operand(branches.repeat(batch, 1))


def _doubled_attention(kernels: KernelSet, *operands: Any, **named: Any) -> Tensor:
    """Compute attention as a wrapper of kernels that passes its own attention to their block."""
    return kernels.paged_attention(*operands, **named) * 2


def _attention(
    operands: _ProblemOperands, name: str, hidden: int, size: int, *, has_sinks: bool, has_joint_norms: bool
) -> Callable[[Mapped], AttentionBlock]:
    shape, attention = operands.shape, _HEADS * size
    rows = (1 + shape["gated"]) * attention + 2 * _KV_HEADS * size
    qkv = operands.rows_of_two_formats(f"{name} qkv", rows, hidden)
    output = operands.matrix(f"{name} output", hidden, attention)
    operands.vector(f"{name} norm", hidden)
    if shape["bias"]:
        operands.vector(f"{name} qkv bias", rows)
        operands.vector(f"{name} output bias", hidden)
    has_norms = bool(shape["head_norms"]) or has_joint_norms
    if has_norms:
        operands.vector(f"{name} q_norm", size * (_HEADS if has_joint_norms else 1))
        operands.vector(f"{name} k_norm", size * (_KV_HEADS if has_joint_norms else 1))
    if has_sinks:
        wide = torch.promote_types(operands.dtype, torch.float32)
        operands.made[f"{name} sinks"] = Operand(operands.dice.normal(_HEADS, dtype=wide, scale=3.0))
    if shape["head_scales"]:
        for side, count in (("input", _HEADS + 2 * _KV_HEADS), ("output", _HEADS)):
            scales = operands.dice.positive(count, 1, dtype=operands.dtype, scale=2.0)
            operands.made[f"{name} factors of {side}"] = Operand(scales)
    return lambda o: AttentionBlock(
        norm=o[f"{name} norm"],
        eps=EPS,
        qkv=qkv(o),
        qkv_bias=o.get(f"{name} qkv bias"),
        output=output(o),
        output_bias=o.get(f"{name} output bias"),
        scale=0.7 * size**-0.5,
        window=shape["window"],
        sinks=o.get(f"{name} sinks"),
        head_norms=HeadNorms(o[f"{name} q_norm"], o[f"{name} k_norm"], EPS, has_joint_norms) if has_norms else None,
        gated=bool(shape["gated"]),
        input_scales=o.get(f"{name} factors of input"),
        output_scales=o.get(f"{name} factors of output"),
        ranks=operands.ranks,
    )


def _attention_block(
    shape: Shape,
    dtype: torch.dtype,
    dice: RandomValues,
    format: str | None = None,
    cache: str | None = None,
    *,
    has_sinks: bool = False,
    has_joint_norms: bool = False,
) -> Problem:
    """Return a problem of attention, MLP, and attention of each sequence's last token. ``has_sinks``: attention has;
    ``has_joint_norms``: all heads of a token are normalised as one row.
    """
    operands, hidden, size = _ProblemOperands(shape, dtype, dice, format), shape["hidden"], _HEAD_SIZES[shape["size"]]
    batch, new, page = shape["batch"], shape["new"], 16
    operands.residual(batch * new, hidden)
    _sequences(operands, page, size, cache)
    if shape["head_scales"]:
        operands.made["query scales"] = Operand(dice.positive(batch * new, 1, 1, dtype=dtype, scale=2.0))
    attentions = [
        _attention(operands, name, hidden, size, has_sinks=has_sinks, has_joint_norms=has_joint_norms)
        for name in ("first", "second")
    ]
    mlp = _mlp(operands, "mlp", hidden)

    def call(kernels: KernelSet, o: Mapped) -> Mapped:
        tree = o.get("tree_mask")
        span = o["block_table"].shape[1] * page
        metadata = AttentionMetadata(
            o["query_start"], o["seq_lens"], o["block_table"], new, span, tree_mask=tree, uniform=True
        )
        last = AttentionMetadata(o["starts"], o["seq_lens"], o["block_table"], 1, span, uniform=True)
        state = torch.zeros_like(o["residual"])
        x = ResidualStream(kernels, o["residual"])
        turns = [RotaryArgs(o["cos"], o["sin"], o[f"k_cache {i}"], o[f"v_cache {i}"], o["slots"]) for i in range(2)]
        scales = o.get("query scales")
        first = attentions[0](o) if not shape["no_norm"] else replace(attentions[0](o), norm=None)
        x = resolved(kernels, "attention_block", x, first, AttentionTokens(metadata, turns[0], LayerRows(), scales))
        x = resolved(kernels, "mlp_block", x, mlp(o))
        rows = LayerRows(o["last"], (state,))
        more = {"attend": partial(_doubled_attention, kernels)} if shape["attend"] else {}
        tokens = AttentionTokens(last, turns[1], rows, scales)
        x = resolved(kernels, "attention_block", x, attentions[1](o), tokens, **more)
        return {"out": x.norm(o["last norm"], EPS), "state": state}

    written = "residual", *(f"{each}_cache {i}" for each in "kv" for i in range(2))
    return operands.problem(call, written, cache)


def _recurrent_block(shape: Shape, dtype: torch.dtype, dice: RandomValues) -> Problem:
    """Return a problem of a recurrent block: with a window, it is called twice, and some tokens of the first call are
    pending in the second.
    """
    operands, hidden, heads, size = _ProblemOperands(shape, dtype, dice), shape["hidden"], 2, 8
    batch, new, channels = shape["batch"], shape["new"], 4 * size + heads * size
    wide = torch.promote_types(dtype, torch.float32)
    operands.residual(batch * new, hidden)
    widths = (channels + heads * size, 2 * heads) if shape["split"] else (channels + heads * size + 2 * heads,)
    projections = [operands.matrix(f"projection {n}", width, hidden) for n, width in enumerate(widths)]
    output = operands.matrix("output", hidden, heads * size)
    if shape["bias"]:
        operands.vector("output bias", hidden)
    operands.matrix("convolution", channels, 4)
    for name, length in (("norm", hidden), ("head_norm", size)):
        operands.vector(name, length)
    operands.made |= {name: Operand(dice.normal(heads, dtype=wide)) for name in ("a_log", "dt_bias")}
    operands.made |= {
        "inputs": Operand(dice.normal(batch + 1, 3, channels, dtype=dtype)),
        "states": Operand(dice.normal(batch + 1, heads, size, size, dtype=wide, scale=0.3)),
        "rows": Operand(dice.permutation(batch) + 1),
        "last": Operand(torch.arange(new - 1, batch * new, new)),
        "query_start": Operand(torch.arange(0, batch * new + 1, new, dtype=torch.int32)),
        "seq_lens": Operand(torch.full((batch,), new + 5, dtype=torch.int32)),
        "pending": Operand(torch.cat((torch.zeros(1, dtype=torch.int64), dice.integers(1, new + 1, batch)))),
        "window": Operand(dice.normal(batch + 1, new, channels, dtype=dtype)),
        "updates": Operand(dice.normal(batch + 1, 2, new, 2 * size + heads * size + heads, dtype=wide)),
    }

    def call(kernels: KernelSet, o: Mapped) -> Mapped:
        block = RecurrentBlock(
            norm=o["norm"],
            eps=EPS,
            projections=tuple(each(o) for each in projections),
            channels=channels,
            rule=DeltaRuleWeights(convolution=o["convolution"], a_log=o["a_log"], dt_bias=o["dt_bias"], norm=o["head_norm"]),
            output=output(o),
            output_bias=o.get("output bias"),
            ranks=operands.ranks,
        )
        x, windowed = ResidualStream(kernels, o["residual"]), bool(shape["windowed"])
        state = torch.zeros_like(o["residual"])
        for number in range(1 + windowed):
            batch = RecurrentBatch(o["rows"], o["query_start"], o["seq_lens"], new, pending=o["pending"] * number)
            window = RecurrentWindow(o["window"], o["updates"]) if windowed else None
            rows = LayerRows(o["last"], (state,)) if number == windowed else LayerRows()
            decodes = windowed or not shape["prompt"]
            tokens = RecurrentTokens(batch, o["inputs"], o["states"], rows, decodes=decodes, window=window)
            x = resolved(kernels, "recurrent_block", x, block, tokens)
        return {"out": x.norm(o["last norm"], EPS), "state": state}

    return operands.problem(call, ("residual", "inputs", "states", "window", "updates"))


_TOKENS = between(1, 20, 65)
_SIZES = among(40, 128, 256)
_FLAG = between(0, 1)
_MLP = {"tokens": _TOKENS, "hidden": _SIZES, "inner": _SIZES, "blocks": between(0, 3)}
_MLP |= dict.fromkeys(("bias", "zeros", "split", "ranks"), _FLAG)
_ONE_RANK = {"split": 0, "ranks": 0}
_MLPS = (
    {"tokens": 3, "hidden": 40, "inner": 128, "bias": 1, "blocks": 1, "zeros": 1, "split": 1, "ranks": 1},
    {"tokens": 65, "hidden": 128, "inner": 256, "bias": 0, "blocks": 3, "zeros": 0, **_ONE_RANK},
    {"tokens": 1, "hidden": 256, "inner": 128, "bias": 0, "blocks": 3, "zeros": 0, **_ONE_RANK},
)
_EXPERT = {name: each for name, each in _MLP.items() if name != "blocks"} | {"blocks": between(0, 1), "held": _FLAG}
_EXPERT_CORNERS = tuple({**each, "blocks": each["blocks"] % 2, "held": number % 2} for number, each in enumerate(_MLPS))
_ATTENTION = {
    **_MLP,
    "batch": between(1, 4),
    "size": between(0, 1),
    "new": between(1, 5, 33),
    "context": between(0, 60, 511),
    "window": among(0, 0, 9),
    **dict.fromkeys(("tree", "head_norms", "gated", "head_scales", "partial", "no_norm", "attend"), _FLAG),
}
del _ATTENTION["tokens"]
_BATCH = {"batch": 3, "size": 0, "new": 4, "context": 40, "window": 0, "tree": 0, "head_norms": 0}
_BATCH |= dict.fromkeys(("gated", "head_scales", "partial", "no_norm", "attend"), 0)
_ATTENTIONS = (
    # Few long sequences with heads of a whole group: kernels split them, and may write the layout of the next product.
    {**_MLPS[1], **_BATCH, "batch": 2, "size": 1, "new": 1, "context": 600},
    {**_MLPS[0], **_BATCH, "tree": 1, "gated": 1, "head_scales": 1},
    {**_MLPS[2], **_BATCH, "batch": 1, "window": 9, "head_norms": 1, "bias": 1, "partial": 1, "no_norm": 1, "attend": 1},
)
_RECURRENT = {"batch": between(1, 4), "new": between(1, 5), "hidden": among(24, 40)}
_RECURRENT |= dict.fromkeys(("windowed", "prompt", "bias", "split", "ranks"), _FLAG)
_RECURRENTS = (
    {"batch": 3, "new": 4, "hidden": 40, "windowed": 1, "prompt": 0, "bias": 1, "split": 1, "ranks": 1},
    {"batch": 2, "new": 3, "hidden": 24, "windowed": 0, "prompt": 1, "bias": 0, **_ONE_RANK},
    {"batch": 1, "new": 1, "hidden": 24, "windowed": 0, "prompt": 0, "bias": 0, **_ONE_RANK},
)


def _without_key(name: str, corners: tuple[Shape, ...]) -> tuple[Shape, ...]:
    return tuple({key: each for key, each in corner.items() if key != name} for corner in corners)


_FORMATS = (None, *QUANTIZED_FORMATS)
_ATTENTION_BLOCKS = in_formats(
    "attention_block",
    _attention_block,
    _ATTENTION,
    _without_key("tokens", _ATTENTIONS),
    weights=_FORMATS,
    caches=(None, *CACHE_FORMATS),
)
_EXPERTS_BLOCKS = in_formats("experts_block", _experts_block, _EXPERT, _EXPERT_CORNERS, weights=_FORMATS)
BLOCKS = (
    *_ATTENTION_BLOCKS,
    _ATTENTION_BLOCKS[0].with_operand("attention_sinks", partial(_attention_block, has_sinks=True)),
    _ATTENTION_BLOCKS[0].with_operand("joint_head_norms", partial(_attention_block, has_joint_norms=True)),
    *in_formats("mlp_block", _mlp_block, _MLP, _MLPS, weights=_FORMATS),
    *_EXPERTS_BLOCKS,
    _EXPERTS_BLOCKS[0].with_operand("expert_biases", partial(_experts_block, has_biases=True)),
    _EXPERTS_BLOCKS[0].with_operand("corrected_routing", partial(_experts_block, is_corrected=True)),
    _EXPERTS_BLOCKS[0].with_operand("expert_gelu", partial(_experts_block, has_gelu=True)),
    KernelProblems("recurrent_block", _recurrent_block, _RECURRENT, _RECURRENTS),
)
"""The problems of blocks, for each format of weights and caches."""
