"""What the kit draws for kernels: all of them, with the interface's noise, and judged by tests that refuse what is wrong."""

import itertools
from dataclasses import MISSING, fields, is_dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from tests.kernels.devices import SMALL as SMALL_DEVICE

from conformance.mutants import unseen_operands
from conformance.mutants.generated import kernels
from conformance.small_problems import SMALL, small
from outrider.device import (
    AttentionBlock,
    AttentionTokens,
    ExpertsBlock,
    KernelSet,
    LayerRows,
    MlpBlock,
    RecurrentBlock,
    RecurrentTokens,
    ResidualStream,
)
from outrider.device.kernels.kernelset import kernel_names
from outrider.device.kernels.reference.model import uniforms
from outrider.device.kernels.weights import linear
from outrider.registry import get_backend
from outrider_conformance.engines import observe
from outrider_conformance.kit import Kit
from outrider_conformance.lab import Lab, StreamDelay
from outrider_conformance.random_kernels import bounds, token_choices
from outrider_conformance.random_kernels.far_rows import FAR_CALLS, check_far_rows
from outrider_conformance.random_kernels.kernels import KERNELS, check_kernels, check_problem, check_row_bits, problem
from outrider_conformance.random_kernels.paged_batch import paged_batch
from outrider_conformance.random_kernels.problem import RandomValues, among, between, paired_shapes, shrink_shape
from outrider_conformance.run import conform
from outrider_cpu import backend as cpu_backend


@pytest.mark.parametrize(
    ("half_s", "single_s", "sets"),
    [
        (0.0001, 0.0002, 6),
        (0.02, 0.0001, 6),  # slower, and still quick
        (0.5, 0.4, 6),  # the device is slow in every dtype
        (0.04, 0.001, 3),
        (0.5, 0.001, 1),
    ],
)
def test_a_slow_dtype_gets_fewer_operand_sets(half_s, single_s, sets):
    pace = StreamDelay(product_s={torch.float16: half_s, torch.float32: single_s})
    lab = Lab(get_backend("cpu"), pace, draws=6)
    assert (lab.draws_in(torch.float16), lab.draws_in(torch.float32)) == (sets, 6)


@pytest.mark.slow
def test_the_report_says_that_a_dtype_got_fewer_operand_sets(tmp_path, monkeypatch):
    (tmp_path / "slow_half.py").write_text(
        """
import torch
from outrider_conformance.lab import Lab
Lab._product_time = lambda self, dtype: 0.4 if dtype is torch.float16 else 0.01
"""
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    test = "test_l4_kernels::test_a_kernel_is_right_on_drawn_operands[silu_mul-float16]"
    report = conform("cpu", level="L4", tests=[test], extra=["-p", "slow_half"])
    what = "random operand sets per kernel in float16 (a product takes 40 times as long as in float32)"
    assert report["figures"] == [[what, 1.0, "of 6"]]


@pytest.mark.parametrize("bfloat16", [False, True])
def test_every_override_of_the_reference_backend_computes_something(monkeypatch, bfloat16):
    """The override of ``linear`` accepts only large operands. It computes whatever dtype the processor prefers."""
    monkeypatch.setattr(cpu_backend, "computes_bfloat16", lambda: bfloat16)
    observed = observe(Kit("cpu"))
    overrides = {name for names in observed.overridden.values() for name in names if not observed.overriding_layer(name)[1]}
    assert "linear" in overrides
    assert {name for name in overrides if not observed.count(name, own=True)} == set()


def test_every_kernel_is_drawn_for():
    assert {name.partition(",")[0] for name in KERNELS} == set(kernel_names()) - {"plan_attention"}  # it computes nothing


def test_a_problem_is_the_same_each_time():
    drawn = KERNELS["verify_chain"]
    one, other = (problem(drawn, drawn.corners[0], torch.float32, 3) for _ in range(2))
    assert all(torch.equal(one.operands[name].tensor, operand.tensor) for name, operand in other.operands.items())


def test_the_noise_is_the_noise_of_the_interface():
    seeds, positions = torch.tensor([0, 5, -1, 2**40 + 3, -(2**62)]), torch.tensor([0, 7, 2**33, 1, 99])
    for lane in range(4):
        assert torch.equal(token_choices.uniforms(seeds, positions, lane, 11).float(), uniforms(seeds, positions, lane, 11))


@pytest.mark.parametrize("kernel", ["linear", "paged_attention", "verify_chain", "truncate_logits", "place_tokens"])
def test_operands_that_are_only_read_are_watched(kernel):
    class Scribbles(KernelSet):
        pass

    def scribbling(self, *arguments, **options):
        first = next(a for a in arguments if isinstance(a, torch.Tensor))
        made = getattr(KernelSet, kernel)(self, *arguments, **options)
        first[(0,) * first.dim()] = 1
        return made

    setattr(Scribbles, kernel, scribbling)
    made = small(kernel)
    check_kernels(KernelSet(), made)
    with pytest.raises(AssertionError, match="which the kernel only reads"):
        check_kernels(Scribbles(), made)


class Careless(KernelSet):
    """Experts that are wrong in one way each."""

    def __init__(self, fault):
        self.fault = fault

    def route(self, logits, count, *, renormalize, held=None, routing=None):
        if routing is not None:
            return self.route_by_correction(logits, count, renormalize, routing)
        if self.fault == "held experts keep their numbers":
            weights, chosen = super().route(logits, count, renormalize=renormalize, held=held)
            return weights, chosen if held is None else torch.where(chosen < 0, -1, chosen + held[0])
        if self.fault == "shares as they are":
            renormalize = False
        weights, chosen = super().route(logits, count, renormalize=renormalize, held=held)
        if self.fault == "softmax of the chosen" and not renormalize:
            weights = logits.gather(1, chosen).softmax(-1).to(weights.dtype)
        return (weights, chosen.flip(1)) if self.fault == "ascending" else (weights, chosen)

    def route_by_correction(self, logits, count, renormalize, routing):
        ignored = {
            "no groups": {"groups": 1, "chosen_groups": 1},
            "one group more": {"chosen_groups": min(routing.groups, routing.chosen_groups + 1)},
            "no factor": {"factor": 1.0},
            "no correction": {"correction": routing.correction * 0},
            "no epsilon": {"epsilon": 0.0},
            "no minimum": {"minimum": 0.0},
            "sigmoids for a softmax": {"softmax": False},
        }
        given = routing._replace(**ignored.get(self.fault, {}))
        weights, chosen = super().route(logits, count, renormalize=renormalize, routing=given)
        if self.fault == "corrected weights":
            weights = weights + routing.factor * routing.correction[chosen]
        return (weights * routing.factor, chosen) if self.fault == "the factor twice" else (weights, chosen)

    def experts(self, x, weights, chosen, gate_up, down, *, biases=None, activation="silu"):
        if self.fault == "up first":
            gate_up = torch.cat(gate_up.chunk(2, dim=1)[::-1], dim=1)
        if self.fault == "one expert fewer":
            weights, chosen = weights[:, 1:], chosen[:, 1:]
        if self.fault == "the first for no expert":
            weights = torch.where(chosen < 0, 1, weights)
        if self.fault == "no weights":
            weights = torch.ones_like(weights)
        if self.fault == "first rows":
            chosen = torch.cat((chosen[:2], chosen[:1].expand(chosen.shape[0] - 2, -1)))
        if self.fault == "biases of the next expert":
            biases = biases._replace(down=biases.down.roll(1, 0))
        if self.fault == "an activation without a clamp":
            biases = biases._replace(activation=biases.activation._replace(limit=1e9))
        if self.fault == "up without one":
            ones = torch.zeros_like(biases.gate_up)
            ones[:, ones.shape[1] // 2 :] = 1
            biases = biases._replace(gate_up=biases.gate_up - ones)
        if self.fault == "SwiGLU alone":
            activation = "silu"
        return super().experts(x, weights, chosen, gate_up, down, biases=biases, activation=activation)


@pytest.mark.parametrize(
    ("kernel", "fault", "change"),
    [
        ("route", "shares as they are", {}),
        ("route", "softmax of the chosen", {"flag": 0}),
        ("route", "ascending", {}),
        ("route", "held experts keep their numbers", {"held": 2}),
        *(
            ("route, corrected_routing", fault, {"flag": 0, "experts": 8, "tokens": 12})
            for fault in (
                "no groups",
                "one group more",
                "no factor",
                "no correction",
                "corrected weights",
                "the factor twice",
            )
        ),
        ("route, corrected_routing", "no epsilon", {"flag": 1, "experts": 8, "scoring": 1}),
        *(
            ("route, corrected_routing", fault, {"flag": 1, "experts": 8, "scoring": 2})
            for fault in ("no epsilon", "no minimum", "no factor", "no correction", "sigmoids for a softmax")
        ),
        ("experts", "up first", {"flag": 0}),
        ("experts", "one expert fewer", {"flag": 0}),
        ("experts", "no weights", {"flag": 0}),
        ("experts", "first rows", {"flag": 0}),
        ("experts", "the first for no expert", {"held": 1, "flag": 0}),
        ("experts, expert_biases", "no weights", {"flag": 0}),
        ("experts, expert_biases", "biases of the next expert", {"flag": 0}),
        ("experts, expert_biases", "an activation without a clamp", {"flag": 0}),
        ("experts, expert_biases", "up without one", {"flag": 0}),
        ("experts, expert_gelu", "SwiGLU alone", {"flag": 0}),
        ("experts, expert_gelu", "up first", {"flag": 0}),
    ],
)
def test_wrong_experts_are_told(kernel, fault, change):
    made = problem(KERNELS[kernel], SMALL | change, torch.float32, 0)
    check_kernels(KernelSet(), made)
    with pytest.raises(AssertionError):
        check_kernels(Careless(fault), made)


def test_a_block_that_routes_to_experts_of_other_ranks_is_told():
    made = problem(KERNELS["experts_block"], SMALL | {"held": 1}, torch.float32, 0)
    check_kernels(KernelSet(), made)
    with pytest.raises(RuntimeError, match="out of bounds"):
        check_kernels(Careless("held experts keep their numbers"), made)


class WrongSinks(KernelSet):
    """Attention with sinks that are wrong in one way each. None: right."""

    def __init__(self, fault):
        self.fault = fault

    def paged_attention(self, q, k_cache, v_cache, metadata, *, scale, window=0, sinks=None):
        if self.fault == "no sinks":
            sinks = None
        if self.fault == "scaled sinks":
            sinks = sinks * scale
        if self.fault == "sinks of the next head":
            sinks = sinks.roll(1)
        return super().paged_attention(q, k_cache, v_cache, metadata, scale=scale, window=window, sinks=sinks)


@pytest.mark.parametrize("fault", ["no sinks", "scaled sinks", "sinks of the next head"])
@pytest.mark.parametrize("kernel", ["paged_attention", "attention_block"])
def test_wrong_sinks_are_told(kernel, fault):
    made = small(f"{kernel}, attention_sinks")
    for right in (KernelSet(), WrongSinks(None)):
        check_kernels(right, made)
    with pytest.raises(AssertionError):
        check_kernels(WrongSinks(fault), made)


E4M3 = torch.float8_e4m3fn


class Narrow(KernelSet):
    """Kernels over a cache in e4m3 that are wrong in one way each."""

    def __init__(self, fault):
        self.fault = fault

    def rope_write_cache(self, q, k, v, cos, sin, k_cache, v_cache, slots):
        wide = [cache.to(k.dtype) for cache in (k_cache, v_cache)]
        super().rope_write_cache(q, k, v, cos, sin, *wide, slots)
        for cache, full in zip((k_cache, v_cache), wide, strict=True):
            kept = full.nan_to_num(0.0) if self.fault == "zero for NaN" else full
            if self.fault == "towards zero":
                kept = (kept.view(torch.int32) & ~0xFFFFF).view(torch.float32)
            if self.fault == "NaN beyond the range":
                kept = kept.masked_fill(kept.abs() > 464, torch.nan)
            kept = kept.clamp(-448 if self.fault != "half the range" else -240, 448)
            at = slots // cache.shape[1], slots % cache.shape[1]
            cache.view(torch.uint8)[at] = kept.to(E4M3).view(torch.uint8)[at]

    def paged_attention(self, q, k_cache, v_cache, metadata, *, scale, window=0):
        if self.fault == "queries in e4m3":
            q = q.to(E4M3).to(q.dtype)
        if self.fault == "values as keys":
            v_cache = k_cache
        return super().paged_attention(q, k_cache, v_cache, metadata, scale=scale, window=window)

    def move_cache(self, k_cache, v_cache, sources, destinations):
        if self.fault == "moved twice":
            super().move_cache(k_cache, v_cache, sources, destinations)
        super().move_cache(k_cache, v_cache, sources, destinations)


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        ("rope_write_cache", "zero for NaN"),
        ("rope_write_cache", "towards zero"),
        ("rope_write_cache", "NaN beyond the range"),
        ("rope_write_cache", "half the range"),
        ("paged_attention", "queries in e4m3"),
        ("paged_attention", "values as keys"),
        ("move_cache", "moved twice"),
    ],
)
def test_wrong_kernels_over_a_narrow_cache_are_told(kernel, fault):
    drawn = KERNELS[f"{kernel}, cache fp8"]
    made = problem(drawn, {dimension: {**SMALL, "nan": 1}[dimension] for dimension in drawn.dimensions}, torch.float32, 0)
    check_kernels(Narrow(None), made)
    with pytest.raises(AssertionError):
        check_kernels(Narrow(fault), made)


class WrongBlocks(KernelSet):
    """Blocks that are wrong in one way each. None: right."""

    def __init__(self, fault):
        self.fault = fault

    def mlp_block(self, x, block):
        if self.fault == "another eps":
            block = replace(block, eps=0.5)
        if self.fault == "no bias":
            block = replace(block, down_bias=None)
        if self.fault == "up is activated":
            both = linear(self, torch.eye(block.gate_up.shape[1], dtype=block.norm.dtype), block.gate_up).T
            block = replace(block, gate_up=both.roll(both.shape[0] // 2, 0).contiguous())
        if self.fault == "a residual that doesn't grow":
            x = x._replace(rows=x.rows.clone())
        if self.fault == "a norm of what was added":
            return super().mlp_block(ResidualStream(self, x.add()), block)._replace(rows=torch.zeros_like(x.rows))
        made = super().mlp_block(x, block)
        return made._replace(pending=None) if self.fault == "no contribution" else made

    def attention_block(self, x, block, tokens, *, attend=None):
        metadata = tokens.attention
        if self.fault == "no window":
            block = replace(block, window=0)
        if self.fault == "a scale of its own":
            block = replace(block, scale=1.5 * block.scale)
        if self.fault == "no tree":
            metadata = replace(metadata, tree_mask=None)
        if self.fault == "one token fewer":
            metadata = replace(metadata, seq_lens=metadata.seq_lens - 1)
        if self.fault == "no head norms":
            block = replace(block, head_norms=None)
        rows = tokens.rows
        if self.fault == "the first rows continue" and rows.kept is not None:
            rows = rows._replace(kept=torch.arange(len(rows.kept)))
        if self.fault == "nothing is captured":
            rows = rows._replace(captured=())
        return super().attention_block(x, block, tokens._replace(attention=metadata, rows=rows), attend=attend)


@pytest.mark.parametrize("format", [None, "int4"])
@pytest.mark.parametrize(
    ("block", "fault", "more"),
    [
        ("mlp_block", "another eps", {}),
        ("mlp_block", "no bias", {}),
        ("mlp_block", "up is activated", {}),
        ("mlp_block", "a residual that doesn't grow", {}),
        ("mlp_block", "a norm of what was added", {}),
        ("mlp_block", "no contribution", {}),
        ("attention_block", "no window", {"window": 3}),
        ("attention_block", "a scale of its own", {}),
        ("attention_block", "no tree", {"tree": 1, "new": 5}),
        ("attention_block", "one token fewer", {}),
        ("attention_block", "no head norms", {"head_norms": 1}),
        ("attention_block", "the first rows continue", {}),
        ("attention_block", "nothing is captured", {}),
    ],
)
def test_wrong_blocks_are_told(block, fault, more, format):
    drawn = KERNELS[block if format is None else f"{block}, {format}"]
    made = problem(drawn, {dimension: {**SMALL, **more}[dimension] for dimension in drawn.dimensions}, torch.float32, 0)
    for right in (KernelSet(), WrongBlocks(None)):
        check_kernels(right, made)
    with pytest.raises(AssertionError):
        check_kernels(WrongBlocks(fault), made)


OPTIONAL = {
    "sinks": "attention_block, attention_sinks",
    "biases": "experts_block, expert_biases",
    "activation": "experts_block, expert_gelu",
    "routing": "experts_block, corrected_routing",
}
"""Problems of fields that only kernels with an optional operand take."""
BLOCK_RECORDS = {AttentionBlock: "attention_block", MlpBlock: "mlp_block", ExpertsBlock: "experts_block"}
BLOCK_RECORDS |= {RecurrentBlock: "recurrent_block", RecurrentTokens: "recurrent_block"}
BLOCK_RECORDS |= {AttentionTokens: "attention_block", LayerRows: "attention_block"}


def optional_fields(record):
    """The fields of a record that have a default, with it."""
    if not is_dataclass(record):
        return record._field_defaults
    return {field.name: field.default for field in fields(record) if field.default is not MISSING}


class IgnoresField(KernelSet):
    """Blocks that compute as if a field of each record that they receive had its default."""

    def __init__(self, record, field):
        self.record, self.default = record, {field: optional_fields(record)[field]}

    def without(self, value):
        if isinstance(value, self.record):
            return replace(value, **self.default) if is_dataclass(value) else value._replace(**self.default)
        if isinstance(value, AttentionTokens | RecurrentTokens):
            return value._replace(rows=self.without(value.rows))
        return value

    def resolve_block(self, name, block):
        del block  # the method gets it too
        compute = getattr(KernelSet, name)
        return lambda x, *records, **more: compute(self, x, *map(self.without, records), **more)


def fails_at_corners(kernels, block):
    """Whether the kernels fail at one of the corners of a block's problems."""
    for number, shape in enumerate(KERNELS[block].corners):
        try:
            check_kernels(kernels, problem(KERNELS[block], shape, torch.float32, number))
        except (AssertionError, RuntimeError):
            return True
    return False


@pytest.mark.parametrize(
    ("record", "field"),
    [
        (record, field)
        for record in BLOCK_RECORDS
        for field in optional_fields(record)
        if field != "decodes"  # chooses between two kernels of one result
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_block_that_ignores_a_field_is_told(record, field):
    """A field that is added to a record needs operands here that set it."""
    assert fails_at_corners(IgnoresField(record, field), OPTIONAL.get(field, BLOCK_RECORDS[record]))


def test_a_block_that_ignores_the_attention_that_it_gets_is_told():
    class Ignores(KernelSet):
        def attention_block(self, x, block, tokens, *, attend=None):
            del attend
            return super().attention_block(x, block, tokens)

    assert fails_at_corners(Ignores(), "attention_block")
    assert not fails_at_corners(KernelSet(), "attention_block")


def test_a_method_that_a_set_resolves_for_some_weights_is_told():
    class Resolves(KernelSet):
        def resolve_block(self, name, block):
            method = super().resolve_block(name, block)
            if name != "mlp_block" or block.gate_up_bias is None:
                return method
            return lambda x, block: method(x, replace(block, gate_up_bias=None))

    assert fails_at_corners(Resolves(), "mlp_block")


class BatchRounds(KernelSet):
    """Kernels of which a batch of several rows rounds otherwise than one row, though they say that it doesn't."""

    row_invariant = True
    cache_formats = KernelSet.cache_formats

    def linear(self, x, weight, bias=None):
        made = super().linear(x, weight, bias)
        return made if x.shape[0] == 1 else made.nextafter(made.new_tensor(torch.inf))

    def paged_attention(self, q, k_cache, v_cache, metadata, *, scale, window=0):
        made = super().paged_attention(q, k_cache, v_cache, metadata, scale=scale, window=window)
        return made if len(metadata.seq_lens) == 1 else made * (1 + 2**-7)


def test_rows_that_a_batch_rounds_otherwise_are_told():
    backend = get_backend("cpu")
    lab, stream = Lab(backend), backend.create_stream("s")
    invariant, made = KernelSet().batch_invariant(), small("linear", tokens=33)
    check_row_bits(lab, stream, invariant, made, "linear", ("x",))
    paged_batch(lab, "a ragged prompt").check_bits(invariant)
    with pytest.raises(AssertionError, match="rows 0 to 0 of 'out' have other bits"):
        check_row_bits(lab, stream, BatchRounds(), made, "linear", ("x",))
    with pytest.raises(AssertionError, match="sequence 0 has other bits"):
        paged_batch(lab, "a ragged prompt").check_bits(BatchRounds())


@pytest.mark.parametrize("fault", ["no add", "no scale"])
def test_a_wrong_primitive_is_told_in_a_composed_block(fault):
    class Wrong(KernelSet):
        def add_rms_norm(self, x, residual, weight, eps):
            return super().add_rms_norm(x * (fault == "no scale"), residual, weight * (fault == "no add"), eps)

    drawn = KERNELS["mlp_block"]
    made = problem(drawn, {dimension: SMALL[dimension] for dimension in drawn.dimensions}, torch.float32, 0)
    with pytest.raises(AssertionError):
        check_kernels(Wrong(), made)


class NormedHeads(KernelSet):
    """Heads that are normed before they're rotated, wrong in one way each. None: right, rounded nowhere between."""

    def __init__(self, fault):
        self.fault = fault

    def head_norm_rope_write_cache(self, qkv, norms, rotary):
        made = qkv
        kv_heads, size = rotary.k_cache.shape[2:]
        heads, eps = made.shape[1] // size - 2 * kv_heads, 0.0 if self.fault == "no eps" else norms.eps
        q, k, v = made.double().view(-1, heads + 2 * kv_heads, size).split((heads, kv_heads, kv_heads), 1)
        norm_of = {"q": norms.queries, "k": norms.queries if self.fault == "one norm for both" else norms.keys}
        turned = {}
        for name, each in (("q", q), ("k", k)):
            if self.fault == "rotated first":
                each = bounds.rotate(bounds.exact(each), rotary.cos, rotary.sin, made.dtype).value
            squares = each.square()
            if self.fault == "all heads as one":
                mean = squares.mean((1, 2), keepdim=True)
            elif self.fault == "the lower half alone":
                mean = squares[..., : size // 2].mean(-1, keepdim=True)
            else:
                mean = squares.mean(-1, keepdim=True)
            each = each * (mean + eps).rsqrt() * norm_of[name].double()
            if self.fault != "rotated first":
                each = bounds.rotate(bounds.exact(each), rotary.cos, rotary.sin, made.dtype).value
            turned[name] = each
        if self.fault == "keys aren't normed":
            turned["k"] = bounds.rotate(bounds.exact(k), rotary.cos, rotary.sin, made.dtype).value
        if self.fault == "values are normed":
            v = self.rms_norm(v, norms.keys.double(), eps)
        at = rotary.slots // rotary.k_cache.shape[1], rotary.slots % rotary.k_cache.shape[1]
        rotary.k_cache[at], rotary.v_cache[at] = turned["k"].to(made.dtype), v.to(made.dtype)
        return turned["q"].to(made.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "fault",
    [
        "no eps",
        "one norm for both",
        "rotated first",
        "all heads as one",
        "the lower half alone",
        "keys aren't normed",
        "values are normed",
    ],
)
def test_wrong_norms_of_heads_are_told(fault, dtype):
    drawn = KERNELS["head_norm_rope_write_cache"]
    made = problem(drawn, {dimension: SMALL[dimension] for dimension in drawn.dimensions}, dtype, 0)
    for right in (KernelSet(), NormedHeads(None)):
        check_kernels(right, made)
    with pytest.raises(AssertionError):
        check_kernels(NormedHeads(fault), made)


class JointNorms(KernelSet):
    """Norms of all heads of a token as one row, wrong in one way each. None: right."""

    def __init__(self, fault):
        self.fault = fault

    def head_norm_rope_write_cache(self, qkv, norms, rotary):
        if self.fault == "keys by the weights of the next head":
            norms = norms._replace(keys=norms.keys.roll(rotary.k_cache.shape[3]))
        if self.fault == "queries by the mean of all keys and queries":
            q, k, _ = rotary.split(qkv)
            shares = (each.double().square().mean((1, 2)) + norms.eps for each in (torch.cat((q, k), 1), q))
            factor = next(shares).rsqrt() * next(shares).sqrt()
            return super().head_norm_rope_write_cache(qkv, norms, rotary) * factor.view(-1, 1, 1).to(qkv.dtype)
        if self.fault == "each head alone":
            qkv = qkv.clone()
            for heads, weight in zip(rotary.split(qkv)[:2], norms[:2], strict=True):
                if heads.shape[1]:
                    heads.copy_(
                        self.rms_norm(heads, torch.ones_like(weight[: heads.shape[2]]), norms.eps) * weight.view_as(heads[0])
                    )
            norms = None
        return super().head_norm_rope_write_cache(qkv, norms, rotary)


@pytest.mark.parametrize("kernel", ["head_norm_rope_write_cache", "attention_block"])
@pytest.mark.parametrize(
    "fault",
    ["keys by the weights of the next head", "queries by the mean of all keys and queries", "each head alone"],
)
def test_wrong_norms_of_all_heads_are_told(kernel, fault):
    made = small(f"{kernel}, joint_head_norms")
    for right in (KernelSet(), JointNorms(None)):
        check_kernels(right, made)
    with pytest.raises(AssertionError):
        check_kernels(JointNorms(fault), made)


class WrongEpsilon(KernelSet):
    """A kernel that is wrong for every layout."""

    def rms_norm(self, x, weight, eps):
        return super().rms_norm(x, weight, eps + 0.5)


@pytest.mark.parametrize(("layout", "end"), [(0, ""), (1, "; not contiguous: x"), (2, "; not contiguous: x")])
def test_an_error_names_operands_that_are_not_contiguous(layout, end):
    backend, drawn = cpu_backend.CpuBackend(), KERNELS["rms_norm"]
    backend.use_kernels(WrongEpsilon())
    shape = {dimension: SMALL[dimension] for dimension in drawn.dimensions} | {"layout": layout}
    with pytest.raises(AssertionError, match=rf"^.* further off than rounding allows; .* within [\d.e-]+{end}$"):
        check_problem(Lab(backend), backend.create_stream("s"), problem(drawn, shape, torch.float32, 0))


@pytest.mark.slow
@pytest.mark.parametrize(("corner", "cache"), [(0, ("cache fp8",)), (0, ())])
def test_rows_that_attention_lays_out_are_judged(corner, cache, monkeypatch):
    """Triton's by its interpreter: the kit's corners reach them, and tell what is off there."""
    from outrider_triton.kernelset import TritonKernels

    kernels = TritonKernels(SMALL_DEVICE)
    drawn = KERNELS[", ".join(("attention_block, int4", *cache))]
    made = problem(drawn, drawn.corners[corner], torch.float16, 0)
    joined, laid, scale = kernels.attention._joined, [], 1.0

    def watched(call, planes, *ways):
        rows = joined(replace(call, scale=call.scale * scale), planes, *ways)
        laid.append(rows.in_planes)
        return rows

    monkeypatch.setattr(kernels.attention, "_joined", watched)
    check_kernels(kernels, made)
    scale = 40.0
    with pytest.raises(AssertionError, match="further off than rounding allows"):
        check_kernels(kernels, made)
    assert laid == [True, True]


def test_a_weight_of_attention_may_underflow():
    """A float32 weight of 1.5e-45 is 0 in an exponential that flushes subnormal results."""
    drawn = KERNELS["paged_attention, cache fp8"]
    shape = {"batch": 3, "new": 8, "context": 15, "ragged": 1, "heads": 8, "size": 3, "page": 2, "sharp": 1}
    check_kernels(KernelSet(), problem(drawn, dict.fromkeys(drawn.dimensions, 0) | shape, torch.float32, 3))


def test_what_a_cache_stores_is_bounded_by_what_is_stored():
    value = torch.tensor([1.0, 1.0624, 1.0626, 447.0, 1e4, -465.0, 1e-4, 300.0], dtype=torch.float64)
    made = bounds.stored(bounds.exact(value), E4M3)
    assert made.value.tolist() == [1.0, 1.0, 1.125, 448.0, 448.0, -448.0, 0.0, 288.0]
    assert not made.error.any()
    near = bounds.stored(bounds.Number(value, torch.full_like(value, 0.001)), E4M3)
    assert (near.value - near.error)[1] == 1.0
    assert (near.value + near.error)[1] == 1.125


def test_bounds_tell_a_dtype_from_the_next():
    x, weight = torch.randn(9, 300), torch.randn(40, 300)
    wanted = bounds.product(bounds.exact(x), weight, None, torch.float32)
    bounds.compare(x @ weight.T, wanted, "float32")
    for narrow in (torch.float16, torch.bfloat16):
        with pytest.raises(AssertionError, match="further off than rounding allows"):
            bounds.compare((x.to(narrow).float() @ weight.T), wanted, "rounded")


@pytest.mark.slow
# numpy warns in the interpreter: a residual of 0 has no logarithm, and the sigmoid of a large negative gate is 1 / inf.
@pytest.mark.filterwarnings("ignore:divide by zero encountered in log", "ignore:overflow encountered in exp")
@pytest.mark.parametrize("name", KERNELS)
def test_batch_invariant_kernels_of_triton_pass(name):
    from outrider_triton.kernelset import TritonKernels

    check_kernels(TritonKernels(SMALL_DEVICE).batch_invariant(), small(name))


def test_a_few_shapes_have_all_pairs_of_small_and_large_values():
    dimensions = {f"d{number}": between(0, 9, 100) for number in range(9)} | {"one": among(3)}
    shapes = list(paired_shapes(dimensions, 12, RandomValues(0)))
    for one, other in itertools.combinations(list(dimensions)[:9], 2):
        assert len({(shape[one] > 4, shape[other] > 4) for shape in shapes}) == 4
    assert {shape["one"] for shape in shapes} == {3}
    assert any(shape["d0"] == 100 for shape in shapes)


def test_a_failing_shape_keeps_the_dimensions_that_it_needs():
    def fails(shape):
        return ValueError(str(shape)) if shape["a"] > 2 and shape["c"] else None

    shape = {"a": 7, "b": 8, "c": 1}
    found, error = shrink_shape(fails, shape, {"a": 1, "b": 2}, fails(shape))
    assert (found, str(error)) == ({"a": 7, "b": 2, "c": 1}, str({"a": 7, "b": 2, "c": 1}))


_RARE = ["a partial rotation rotates the whole head", "a window holds for few new tokens", "an expert takes 128 tokens"]
_RARE += [
    name for name, *_ in unseen_operands.faults() if name.endswith(("with zeros", "added up", "by zero", "pending token"))
]
_RARE += ["keys of zeros have no direction", "the root of a key's norm holds 2e-10"]
_RARE += [name for name, *_ in unseen_operands.faults() if name.endswith(("in float16", "isn't settled"))]


@pytest.mark.parametrize("fault", _RARE)
def test_faults_of_rare_operands_show(fault):
    """The slow run of ``mutants.unseen`` has all faults of rare operands."""
    kernel, make = {name: (kernel, make) for name, kernel, make in unseen_operands.faults()}[fault]
    shape = {
        "rope_write_cache": SMALL | {"partial": 1},
        "chunk_gated_delta_rule": SMALL | {"padding": 0},
        "paged_attention": SMALL | {"batch": 1, "new": 33, "context": 40, "window": 1},
        "experts": SMALL | {"tokens": 257, "experts": 2, "chosen": 1, "inner": 8, "outer": 8, "flag": 1, "held": 0},
    }.get(kernel, SMALL)
    if fault.endswith("in float16"):
        shape = shape | {"tokens": 33}
    if fault.endswith(("isn't settled", "2e-10")):
        shape = shape | {"batch": 9}
    if fault.endswith("by zero"):  # in windows, sequences of padding alone have no earlier tokens
        shape = shape | {"windowed": 0}
    base = SimpleNamespace(backend=type("Broken", (), {}))
    kernels({kernel: make})(base)
    made = problem(KERNELS[kernel], shape, torch.float16 if fault.endswith("in float16") else torch.float32, 0)
    check_kernels(KernelSet(), made)
    with pytest.raises(AssertionError, match=r"further off than rounding allows|differ;|NaN or infinity"):
        check_kernels(base.backend().kernels, made)


@pytest.mark.parametrize("kernel", FAR_CALLS)
def test_offsets_of_32_bits_are_told(kernel):
    """A row beyond 2**31 elements is taken for the row before by that number: an offset that overflowed."""

    def wrapped(rows):
        return torch.where(rows >= 2**31 // 1024, rows - 2**31 // 1024, rows)

    class Wraps(KernelSet):
        cache_formats = KernelSet.cache_formats

        def gather_rows(self, state, rows):
            return super().gather_rows(state, wrapped(rows))

        def scatter_rows(self, state, rows, values):
            super().scatter_rows(state, wrapped(rows), values)

        def rope_write_cache(self, q, k, v, cos, sin, k_cache, v_cache, slots):
            super().rope_write_cache(q, k, v, cos, sin, k_cache, v_cache, wrapped(slots))

        def move_cache(self, k_cache, v_cache, sources, destinations):
            super().move_cache(k_cache, v_cache, wrapped(sources), wrapped(destinations))

        def paged_attention(self, q, k_cache, v_cache, metadata, *, scale, window=0):
            metadata = replace(metadata, block_table=wrapped(metadata.block_table * 16) // 16)
            return super().paged_attention(q, k_cache, v_cache, metadata, scale=scale, window=window)

    check_far_rows(Lab(get_backend("cpu")), kernel)
    backend = get_backend("cpu")
    backend.use_kernels(Wraps())
    with pytest.raises(AssertionError, match="compute offsets in 64 bits"):
        check_far_rows(Lab(backend), kernel)
