"""Compile derived configurations for devices that aren't here: ``derived_child.py few|all [--part N/M] ARCHITECTURE...``.

Prints a JSON line for each: what it is, the bytes of shared memory that the compiler takes, what was expected at most, and
what the device has; for one that doesn't compile, why; and of a ring whose products wait for each other, that. ``few``: the
largest of each kind of kernel for three shapes. ``all``: every one. ``--part``: every M-th of them alone, from the N-th. Exit
code 1, and which, unless each compiles and takes no more than was expected, and that is no more than what is there; a count
for each architecture on standard error.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from compile_child import BY_ROW, HALF, PLAIN, PRODUCT, SCALED, UNQUANTIZED, WIDE, compiled, descriptor
from compiled_order import one_by_one
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from kernels.devices import DEVICES
from kernels.test_derive import products, shards
from outrider.device.kernels.formats import QUANTIZED_FORMATS
from outrider.device.kernels.weight_formats import WeightFormat
from outrider.model.config.shapes import SHAPES
from outrider_triton.attention.jit import paged as attention
from outrider_triton.attention.jit import paged_streamed as attention_streamed
from outrider_triton.jit.tma_pipeline import PIECE_COLUMNS
from outrider_triton.launch import power_of_two
from outrider_triton.products.jit import fused, large_m_gates, matmul, prefill_gates, streamed
from outrider_triton.products.streamed import registers
from outrider_triton.quantized.jit import nibble_planes, nibble_planes_streamed
from outrider_triton.quantized.jit import products as quantized
from outrider_triton.quantized.nibble_planes import computes_swiglu
from outrider_triton.quantized.plan import TRITON_FORMATS, plan
from outrider_triton.tiles.configs import BUCKETS, LARGE_M, PREFILL_GATES, STREAMED
from outrider_triton.tiles.derive.attention import (
    AttentionHeads,
    attention_bytes,
    derive_attention_launch,
    streamed_attention_bytes,
)
from outrider_triton.tiles.derive.fits import MAX_FOLDED_TOKENS, shared_bytes
from outrider_triton.tiles.derive.products import choose_config

OF = {"sm_80": "A100", "sm_86": "RTX 3090", "sm_89": "L4", "sm_90": "H100", "sm_100": "B200", "sm_120": "RTX 5090"}
OF["gfx942"] = "MI300X"
ALIGNED = ("x", "weight", "out", "k", "n", "x_stride", "residual", "norm", "scaled", "squares", "q", "k_cache", "v_cache")
ALIGNED += ("size", "q_token", "q_head", "cache_slot", "cache_head", "cos", "sin", "angles_token", "parts", "stats")
FLOATS = dict.fromkeys(("q", "k_cache", "v_cache", "out"), "*fp32")


def target_of(facts):
    if facts.capability:
        return GPUTarget("cuda", facts.capability, 32)
    return GPUTarget("hip", facts.architecture, facts.warp)


def chosen(facts, shapes):
    """Each configuration of a product once, with a shape that has it, and each of attention."""
    found = {}
    for shape in shapes:
        half = shape.head_size // 2
        for (operator, n, k), m in itertools.product(products(shape), BUCKETS):
            config = choose_config(facts, operator, m=m, n=n, k=k, half=half)
            if config is not None:
                even = k % (config.split * config.block_k) == 0
                found.setdefault((operator, config, even), (k, half))
        prefill = choose_config(facts, "linear_silu_mul", m=4096, n=2 * shape.inner, k=shape.hidden)
        if prefill is not None:
            found["linear_silu_mul", prefill, True] = shape.hidden, half
        group, kv_heads = shape.heads // shape.kv_heads, shape.kv_heads
        for (batch, width), cached, item in itertools.product(((1, 1), (1, 4), (8, 8), (64, 4)), (512, 16384), (2, 4)):
            for page in (0, 16):
                heads = AttentionHeads(group=group, kv_heads=kv_heads, size=shape.head_size, bytes=item, page=page)
                made = derive_attention_launch(facts, heads, batch=batch, max_query=width, max_kv=cached, tuned=None)
                block = made._replace(split=min(made.split, 16))
                found.setdefault(("attention", block, item), heads)
    return found


def product(facts, operator, config, even, k, half, target):
    pdl = facts.pdl
    if config.descriptor == PREFILL_GATES:
        tokens, columns, pairs = config.block_m // 2, config.block_k, config.block_n
        ends = {"x": descriptor(tokens, columns), "w": descriptor(pairs, columns), "out": descriptor(tokens, pairs)}
        own = {"STAGES": config.stages, "GROUP_M": config.prefetch_columns, "PDL": pdl}
        return compiled(GluonASTSource, prefill_gates.prefill_silu_mul, ends, own, target, maxnreg=168)
    if config.descriptor == LARGE_M:
        ends = {"x": descriptor(config.block_m, config.block_k), "w": descriptor(config.block_n, config.block_k)}
        own = {"STEPS": k // config.block_k, "BLOCK_M": config.block_m, "BLOCK_K": config.block_k, "STAGES": config.stages}
        own |= {"TOKEN_STAGES": config.prefetch_columns, "GROUPS": config.warps // 4, "bias": None, "PDL": pdl}
        return compiled(GluonASTSource, large_m_gates.tall_silu_mul, ends, own, target, aligned=("n", "out"))
    if config.descriptor == STREAMED:
        fold = operator in ("linear", "linear_add", "linear_add_scaled") or (operator == "linear_parts" and config.split == 1)
        span = config.split * config.block_k * (2 if fold else 1)
        own = {"STEPS": k // span, "BLOCK_M": config.block_m, "BLOCK_K": config.block_k, "STAGES": config.stages, "PDL": pdl}
        ends = {"x": descriptor(config.block_m, config.block_k), "w": descriptor(config.block_n, config.block_k)}
        kernel, given, types = {
            "linear": (streamed.streamed_linear, {**PLAIN, **UNQUANTIZED, "FOLD": True, "ADD": False}, {}),
            "linear_parts": (
                streamed.streamed_linear,
                {**PLAIN, **UNQUANTIZED, "FOLD": fold, "ADD": False},
                {} if fold else {"out": WIDE},
            ),
            "linear_silu_mul": (streamed.streamed_silu_mul, {**PLAIN, **UNQUANTIZED, "maxima": None}, {"k": "i32"}),
            "scaled_silu_mul": (streamed.streamed_silu_mul, {**SCALED, **UNQUANTIZED, "maxima": None}, {"k": "i32"}),
            "linear_add": (streamed.streamed_linear_add, {**PLAIN, "norm": None}, {"scaled": HALF}),
            "linear_add_scaled": (streamed.streamed_linear_add, SCALED, {"norm": HALF, "scaled": HALF}),
            "linear_rope": (streamed.streamed_rope_write_cache, {**SCALED, **UNQUANTIZED, "HALF": half}, {"k": "i32"}),
        }[operator]
        given = {name: value for name, value in {**given, **own}.items() if name in kernel.arg_names}
        return compiled(GluonASTSource, kernel, {**types, **ends}, given, target, warps=config.warps)
    own = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "EVEN": even, "PDL": pdl}
    plain = {"descriptor": None}
    kernel, given, types = {
        "linear": (matmul.linear, {**plain, "SPLIT": 1}, {}),
        "linear_parts": (matmul.linear, {**plain, "SPLIT": config.split}, {"out": WIDE} if config.split > 1 else {}),
        "linear_silu_mul": (matmul.linear_silu_mul, {"squares": None, "SHARES": 1}, {}),
        "scaled_silu_mul": (matmul.linear_silu_mul, {"SHARES": 128}, {"eps": "fp32"}),
        "linear_add": (fused.linear_add, {"norm": None}, {"scaled": HALF}),
        "linear_add_scaled": (fused.linear_add, {}, {"norm": HALF, "scaled": HALF}),
        "linear_rope": (fused.linear_rope_write_cache, {"SHARES": 128, "HALF": half}, {}),
    }[operator]
    aligned = [name for name in ALIGNED if name in kernel.arg_names]
    made = {**PRODUCT, **given, **own}
    return compiled(
        ASTSource, kernel, {"k": "i32", **types}, made, target, warps=config.warps, stages=config.stages, aligned=aligned
    )


def looked_back(facts, block, item, heads, target, *, settled):
    rows, kv, split, warps, stages, ring = block
    kernel = attention.paged_attention
    given = {"PAGE": 16, "GROUP": heads.group, "WINDOW": 0, "SPLITS": split, "BLOCK_ROWS": rows, "BLOCK_KV": kv}
    given |= {"TREE": False, "SETTLED": settled, "PDL": facts.pdl}
    if ring:
        ends = dict.fromkeys(("k_cache", "v_cache"), descriptor(min(heads.page, kv), heads.size))
        whole = dict.fromkeys(("tokens", "batch", "heads"), "i32")
        given["STAGES"] = stages
        return compiled(GluonASTSource, attention_streamed.paged_attention_ring, {**whole, **ends}, given, target)
    given["BLOCK_SIZE"] = max(power_of_two(heads.size), 16)
    types = {"tokens": "i32", **(FLOATS if item == 4 else {})}
    aligned = [name for name in ALIGNED if name in kernel.arg_names]
    return compiled(ASTSource, kernel, types, given, target, warps=warps, stages=stages, aligned=aligned)


QUANTIZED_AS = {"fp8": ("fp8", "row", 0), "fp8 blocks": ("fp8", "block", 128), "int4": ("int4", "block", 0)}
QUANTIZED_AS |= {"int4 groups of 32": ("int4", "fine", 0), "int8": ("int8", "row", 0)}


def way_of(facts, name):
    """How a device multiplies weights of that name, from a weight of it."""
    format, mode, group = QUANTIZED_AS[name]
    columns = {"row": 4096, "block": 128, "fine": 32}[mode]
    elements = QUANTIZED_FORMATS[format]
    active = None if elements.activation_divisor is None else elements
    way = WeightFormat(elements=elements, columns=columns, activations=active, activation_group=group)
    return plan(facts, way.random_weight(16, 4096, device=torch.device("cpu")))


def chosen_quantized(facts, shapes):
    found = {}
    for name, shape in itertools.product(QUANTIZED_AS, shapes):
        way = way_of(facts, name)
        stored = way.stored(QUANTIZED_AS[name][0])
        for (_, n, k), m, operator in itertools.product(products(shape), BUCKETS, ("linear_parts", "linear")):
            config = choose_config(facts, operator, m=m, n=n, k=k, stored=stored)
            if config is not None:
                even = k % (config.split * config.block_k) == 0
                found.setdefault(("quantized", config, even, name, "linear_parts"), (way, stored, 0))
        half = shape.head_size // 2
        for (operator, n, k), m in itertools.product(products(shape), BUCKETS):
            if (way.native and operator == "linear_silu_mul") or (way.can_stream and operator == "linear_rope"):
                config = choose_config(facts, operator, m=m, n=n, k=k, half=half, stored=stored)
                if config is not None:
                    found.setdefault(("quantized", config, True, name, operator), (way, stored, half))
    return found


def quantized_product(facts, config, even, name, operator, way, half, target):
    format, _, group = QUANTIZED_AS[name]
    capability = facts.capability
    active, block = format != "int4", config.block_k
    held = {"fp8": "*fp8e4nv" if way.native else "*i8", "int8": "*i8", "int4": "*u8"}[format]
    given = {
        **TRITON_FORMATS[format].launch_constants,
        "NATIVE": way.native,
        "MODE": way.mode,
        "ROWS": 1,
        "COLUMNS": way.columns,
        "GROUP": group,
    }
    given |= {"FP8": facts.fp8, "ASM": capability >= 80, "zeros": None}
    given |= {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": block, "SPLIT": config.split, "EVEN": even}
    given |= {"SUB": min(way.at_once, block) if way.at_once else block, "PDL": facts.pdl, "bias": None}
    given |= {} if active else {"x_scales": None}
    if way.planes:
        held = "*i16"
    types = {"k": "i32", "x": held if way.native else "*fp16" if active else HALF, "weight": held, "scales": WIDE}
    types |= {"x_scales": WIDE, "out": WIDE if config.split > 1 else HALF}
    aligned = ("x", "weight", "scales", "out", "n", "k", "x_stride", "scale_columns")
    if config.descriptor == STREAMED:
        return (
            in_a_ring(facts, config, half, target)
            if way.planes
            else e4m3_in_a_ring(facts, config, operator, way.mode == "block", half, target)
        )
    kernel = nibble_planes.linear_planes if way.planes else quantized.linear_quantized
    given = {name: value for name, value in given.items() if name in kernel.arg_names}
    return compiled(ASTSource, kernel, types, given, target, warps=config.warps, stages=config.stages, aligned=aligned)


def in_a_ring(facts, config, half, target):
    """A product of four bits that come through a ring; of ``half`` a head: one that turns its rows."""
    wide = config.prefetch_columns
    ends = {
        "x": descriptor(2 * config.block_m, wide, "i8"),
        "w": descriptor(config.block_n, wide // 2, "i8"),
        "scales": WIDE,
        "grains": WIDE,
    }
    given = {"GROUPS": config.warps // 4, "STEPS": config.block_k // wide, "PDL": facts.pdl}
    given |= {"TILES": -(-config.rows_per_program // (32 if half else 64)), "HALF": half}
    given |= {} if half else dict.fromkeys(("cos", "sin", "k_cache", "v_cache", "slots"))
    given |= {"BLOCK_M": config.block_m, "STAGES": config.stages, "bias": None, "MAX_REGISTERS": 112}
    given["GATED"] = False
    types = {**ends, "out": WIDE if config.split > 1 else HALF}
    if not half and computes_swiglu(config, 1):
        itself = {**types, "x": HALF}, {**given, "GATED": True, "grains": None, "MAX_REGISTERS": 128}
        compiled(GluonASTSource, nibble_planes_streamed.streamed_planes, *itself, target)
    return compiled(GluonASTSource, nibble_planes_streamed.streamed_planes, types, given, target)


def e4m3_in_a_ring(facts, config, operator, blocks, half, target):
    """A product of operands in e4m3 that come through a ring; ``blocks``: with scales of blocks."""
    columns = min(config.block_k, PIECE_COLUMNS.value)
    ends = {"x": descriptor(config.block_m, columns, "fp8e4nv"), "w": descriptor(config.block_n, columns, "fp8e4nv")}
    kernels = {"linear_silu_mul": streamed.streamed_silu_mul, "linear_rope": streamed.streamed_rope_write_cache}
    folded = 1 if operator in kernels or config.block_m > MAX_FOLDED_TOKENS else 2
    given = {**PLAIN, "FOLD": folded == 2, "ADD": False, "HALF": half, "STEPS": 16, "PDL": facts.pdl}
    given |= {"ROWS": 128 if blocks else 1, "BLOCKS": blocks}
    given |= {"BLOCK_M": config.block_m, "BLOCK_K": config.block_k, "STAGES": config.stages}
    kernel = kernels.get(operator, streamed.streamed_linear)
    given = {name: value for name, value in given.items() if name in kernel.arg_names}
    types = {**ends, **BY_ROW, "maxima": WIDE, "k": "i32"}
    held = registers(config, folded, config.block_k // columns, blocks=blocks)
    return compiled(GluonASTSource, kernel, types, given, target, warps=config.warps, maxnreg=held)


def few(facts, found):
    """The largest of each kind."""
    kinds = {}
    for key, beside in found.items():
        if key[0] == "quantized":
            ring = key[1].descriptor == STREAMED
            kind = f"quantized {QUANTIZED_AS[key[3]][0]}" + (f" ring {key[4]}" if ring else "")
            size = shared_bytes(facts, key[4], key[1], beside[1])
        elif key[0] == "attention":
            ring = " ring" if key[1][5] else ""
            kind, size = f"attention {key[2]}{ring}", bytes_of_attention(facts, beside, key[1])
        else:
            kind = {STREAMED: "ring", LARGE_M: "tall", PREFILL_GATES: "prefill"}.get(key[1].descriptor, "product")
            size = shared_bytes(facts, key[0], key[1])
        if kind != "attention 4" and (kind not in kinds or size > kinds[kind][0]):
            kinds[kind] = size, key
    return [key for _, key in kinds.values()]


def measured(facts, key, beside, target):
    """Bytes of shared memory that the compiler takes for one, and that were expected."""
    if key[0] == "quantized":
        way, stored, half = beside
        return quantized_product(facts, *key[1:], way, half, target), shared_bytes(facts, key[4], key[1], stored)
    if key[0] == "attention":
        settled = facts.pdl and key[1].can_read_before_wait
        made = looked_back(facts, key[1], key[2], beside, target, settled=settled)
        return made, bytes_of_attention(facts, beside, key[1])
    operator, config, even = key
    return product(facts, operator, config, even, *beside, target), shared_bytes(facts, operator, config)


def bytes_of_attention(facts, heads, block):
    rows, kv, _, _, stages, ring = block
    return streamed_attention_bytes(heads, rows, kv, stages) if ring else attention_bytes(facts, heads, rows, kv)


def part_of(given):
    """``2/4`` as a slice: the second of four, fourth by fourth."""
    number, parts = (int(each) for each in given.split("/"))
    if not 1 <= number <= parts:
        raise argparse.ArgumentTypeError(f"{given!r}: expected N/M with N from 1 to M")
    return slice(number - 1, None, parts)


def compile_part(architecture, which, part, shapes):
    """Print a line for each configuration of the part; returns how many there were, and how many are wrong."""
    facts = DEVICES[OF[architecture]]
    target, found = target_of(facts), chosen(facts, shapes) | chosen_quantized(facts, shapes)
    keys = (few(facts, found) if which == "few" else list(found))[part]
    wrong = 0
    for key in keys:
        said = {"architecture": architecture, "what": [str(each) for each in key], "there": facts.shared_bytes}
        try:
            made, expected = measured(facts, key, found[key], target)
        except Exception as error:  # whatever a compiler raises: the others are compiled all the same
            wrong += 1
            print(json.dumps({**said, "failed": f"{type(error).__name__}: {error}"[:500]}), flush=True)
            continue
        slow = key[0] != "attention" and key[1].descriptor in (STREAMED, LARGE_M, PREFILL_GATES) and one_by_one(made)
        wrong += slow or not made.metadata.shared <= expected <= facts.shared_bytes
        said |= {"one by one": True} if slow else {}
        print(json.dumps({**said, "taken": made.metadata.shared, "expected": expected}), flush=True)
    print(f"{architecture}: {len(keys)} of {len(found)} configurations, {wrong} wrong", file=sys.stderr, flush=True)
    return len(keys), wrong


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("which", choices=("few", "all"))
    parser.add_argument("architectures", nargs="+", choices=sorted(OF))
    parser.add_argument("--part", type=part_of, default=slice(None))
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.which == "few":
        shapes = [next(shards(name)) for name in ("llama-3.1-8b", "phi-3-mini", "qwen2.5-0.5b")]
    else:
        shapes = [shape for name in sorted(set(SHAPES) - {"tiny"}) for shape in shards(name)]
    counts = [compile_part(architecture, given.which, given.part, shapes) for architecture in given.architectures]
    return int(any(wrong or not tried for tried, wrong in counts))


if __name__ == "__main__":
    sys.exit(main())
