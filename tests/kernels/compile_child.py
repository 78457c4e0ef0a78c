"""Compile every kernel for a device that isn't here: ``compile_child.py BACKEND ARCHITECTURE WARP PDL [some]``.

Prints their names. ``some``: only one kernel of each kind (`SOME`); the names of the others are in parentheses.
"""

import sys
from functools import partial

import triton
from compiled_order import (
    check_order,
    check_order_beside_a_weight,
    check_order_beside_pages,
    check_order_of_both,
    check_order_of_groups,
    check_order_of_tiles,
    one_by_one,
)
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from outrider_triton.attention.jit import exact as exact_attention
from outrider_triton.attention.jit import latent
from outrider_triton.attention.jit import paged as attention
from outrider_triton.attention.jit import paged_streamed as attention_streamed
from outrider_triton.attention.jit import prefill as prefill_attention
from outrider_triton.experts.jit import large_m as expert_tiles
from outrider_triton.experts.jit import products as experts
from outrider_triton.experts.jit import router
from outrider_triton.jit import bookkeeping, peers, recurrent_chunks, recurrent_steps_shared, rows
from outrider_triton.jit import recurrent_steps as recurrent
from outrider_triton.jit import selection as token_choice
from outrider_triton.products.jit import fused, large_m_gates, matmul, prefill_gates, streamed
from outrider_triton.quantized.jit import activations, nibble_planes, nibble_planes_streamed, scaled_blocks
from outrider_triton.quantized.jit import products as quantized

HALF, WIDE, LONG, INT = "*bf16", "*fp32", "*i64", "*i32"


def without(name, constants):
    """The constants of a kernel that gets the operand ``name``."""
    return {key: value for key, value in constants.items() if key != name}


HALVES = (
    "x",
    "weight",
    "out",
    "residual",
    "gate_up",
    "q",
    "k",
    "v",
    "cos",
    "sin",
    "k_cache",
    "v_cache",
    "keys",
    "state",
    "values",
    "logits",
    "value",
    "part",
)
LONGS = ("slots", "sources", "destinations", "rows", "seeds", "positions", "parents", "drafts", "tokens", "path", "accepted")
LONGS += ("lens", "last_tokens", "lengths", "results", "found", "own_rows", "own_lens", "own_last_tokens", "own_seeds")
LONGS += ("own_tokens", "own_accepted", "following", "last")
WIDES = (
    "squares",
    "parts",
    "stats",
    "temperature",
    "best",
    "sums",
    "picked",
    "residual_mass",
    "draft_probs",
    "own_temperature",
    "sinks",
)
INTS = ("query_start", "kv_start", "seq_lens", "block_table", "index", "picked_at", "tables", "own_tables", "firsts")
TYPES = {
    **dict.fromkeys(HALVES, HALF),
    **dict.fromkeys(LONGS, LONG),
    **dict.fromkeys(WIDES, WIDE),
    **dict.fromkeys(INTS, INT),
    "eps": "fp32",
    "scale": "fp32",
    **dict.fromkeys(("mixed", "gates", "gate", "inputs", "w", "u", "chunk_state"), HALF),
    **dict.fromkeys(("a_log", "dt_bias", "totals"), WIDE),
    "commit": LONG,
    "tree_mask": "*u8",
}
PRODUCT = {"bias": None, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "EVEN": True}
NO_SINKS = {"sinks": None}
ATTENTION = {
    **NO_SINKS,
    "PAGE": 16,
    "GROUP": 4,
    "WINDOW": 0,
    "SPLITS": 4,
    "BLOCK_ROWS": 16,
    "BLOCK_KV": 64,
    "BLOCK_SIZE": 128,
}
EXACT = {**NO_SINKS, "PAGE": 16, "GROUP": 4, "WINDOW": 0, "CHUNK": 256, "BLOCK_ROWS": 64, "BLOCK_KV": 64, "BLOCK_SIZE": 128}
EXACT_TYPES = {"tokens": "i32", "counts": "*i32"}
LATENT = {"HEADS": 20, "PAGE": 16, "BLOCK_ROWS": 32, "BLOCK_KV": 64, "BLOCK_SIZE": 512, "BLOCK_ROTATED": 64}
LATENT_TYPES = {**EXACT_TYPES, **dict.fromkeys(("latent", "norm", "q_rotated"), HALF)}
PROMPT = {
    **NO_SINKS,
    "PAGE": 16,
    "GROUP": 4,
    "WINDOW": 0,
    "BLOCK_ROWS": 128,
    "BLOCK_KV": 64,
    "BLOCK_SIZE": 128,
    "EVEN": True,
    "BATCH": 16,
}
COPY = {"PAGE": 16, "PADDED": 128, "BATCH": 16, "BLOCK_ROWS": 4, "BLOCK_COLUMNS": 1024}
SHARED = {"SHARES": 16}
VOCABULARY = {"SHARES": 16, "BLOCK": 1024}
UNCHECKED = {"firsts": None}
PEERS = {"RANK": 1, "SIZE": 2, "BLOCK": 1024, "SHOTS": 1}
TWO_SHOTS = {"SIZE": 4, "SHOTS": 2}
PEER_WORDS = {**dict.fromkeys(("words", "out", "epochs", "x", "residual", "weight"), INT), "peers": LONG}
E4M3 = "*fp8e4nv"
FP8, FP4, INT8, INT4 = ({"PACKED": packed, "FLOAT": is_float} for is_float in (True, False) for packed in (False, True))
QUANTIZED = {
    **PRODUCT,
    "zeros": None,
    "x_scales": None,
    "ROWS": 1,
    "COLUMNS": 128,
    "GROUP": 0,
    **INT4,
    "NATIVE": False,
    "MODE": "block",
    "FP8": False,
    "ASM": False,
    "SUB": 128,
    "SPLIT": 1,
}
PLAINLY = {"COLUMNS": 128, "BLOCK_N": 16, "BLOCK_K": 256}
UNNORMED = {"q_norm": None, "k_norm": None}
SCALES = {"k": "i32", "scales": HALF, "x_scales": WIDE, "zeros": "*i8"}
CHOSEN = {"k": "i32", "prefetched": "i32", "chosen": LONG, "order": LONG, "expert_of": LONG, "shares": WIDE}
OF_PAIRS = dict.fromkeys(("chosen", "places", "expert_of", "blocks_used"), LONG)
FEW = {"bias": None, "order": None, "expert_of": None, "SORTED": False, "PAIRS": 32, "COUNT": 8}
FEW |= {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "EVEN": True}
SWIGLU = {"LIMIT": 0.0, "ALPHA": 0.0, "GELU": False}
GELU, CLAMPED = {**SWIGLU, "GELU": True}, {"LIMIT": 7.0, "ALPHA": 1.702, "GELU": False}
MANY = {"bias": None, "SORTED": True, "PAIRS": 0, "COUNT": 8, "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "EVEN": False}


OF_EXPERTS = {"zeros": None, "BY_PAIR": True, "MODE": "block", "ROWS": 128, "COLUMNS": 128, "GROUP": 0}
OF_EXPERTS |= {"SUB": 128}


def quantized_kernels(capability):
    """Formats as a device of this compute capability multiplies them (0: none of NVIDIA's)."""
    fp8, whole = capability >= 89, capability >= 80
    own = {**QUANTIZED, "FP8": fp8, "ASM": whole}
    active = {name: value for name, value in own.items() if name != "x_scales"} | {"COLUMNS": 4096}
    zeros = {name: value for name, value in own.items() if name != "zeros"}
    held = {"x": E4M3 if fp8 else "*fp16", "weight": E4M3 if fp8 else "*i8"}
    return [
        (activations.quantize_rows, {"k": "i32", "out": E4M3 if fp8 else "*fp16", "scales": WIDE},
         {"given": None, "E4M3": True, "PLAIN": False, "BLOCK": 4096}),
        (activations.quantize_rows, {"k": "i32", "out": "*i8", "scales": WIDE, "given": WIDE},
         {"E4M3": False, "PLAIN": False, "BLOCK": 4096}),
        (activations.quantize_by_maxima, {"maxima": WIDE, "out": E4M3 if fp8 else "*fp16", "scales": WIDE},
         {"E4M3": True, "SHARES": 128, "BLOCK": 1024}),
        (activations.add_rms_norm_quantize,
         {"x": WIDE, "bias": HALF, "out": E4M3 if fp8 else "*fp16", "scales": WIDE, "unquantized": HALF},
         {"E4M3": True, "GROUP": 128, "PARTS": 2, "BLOCK": 4096}),
        (activations.silu_mul_quantize, {"out": "*i8", "scales": WIDE}, {"E4M3": False, "GROUP": 0, "BLOCK": 16384}),
        (activations.gate_quantize, {"out": "*i8", "scales": WIDE}, {"E4M3": False, "GROUP": 0, "E": 128, "HEADS": 64}),
        (activations.gate_quantize, {"out": E4M3 if fp8 else "*fp16", "scales": WIDE},
         {"E4M3": True, "GROUP": 128, "E": 256, "HEADS": 4, "weight": None}),
        (activations.embed_beside_quantize, {"hidden": HALF, "out": E4M3 if fp8 else "*fp16", "scales": WIDE},
         {"E4M3": True, "GROUP": 0, "BLOCK": 8192}),
        (quantized.dequantize, {**SCALES, "weight": "*i8"},
         {**PLAINLY, "zeros": None, "ROWS": 128, "WIDTH": 128, **FP8, "FP8": fp8}),
        (quantized.dequantize, {**SCALES, "weight": "*u8"},
         {**PLAINLY, "ROWS": 1, "WIDTH": 128, **INT4, "FP8": fp8}),
        (quantized.dequantize, {**SCALES, "weight": "*u8"},
         {**PLAINLY, "zeros": None, "ROWS": 1, "WIDTH": 0, "COLUMNS": 96, **INT4, "FP8": fp8}),
        (quantized.dequantize, {**SCALES, "weight": "*u8", "scales": "*u8"},
         {**PLAINLY, "zeros": None, "ROWS": 1, "WIDTH": 32, "COLUMNS": 32, **FP4, "FP8": fp8}),
        (quantized.scale_products, {"sums": INT, "x_scales": WIDE, "scales": WIDE, "bias": HALF},
         {"ROWS": 1, "BLOCK": 1024}),
        (quantized.linear_quantized, {**SCALES, **held}, {**active, **FP8, "NATIVE": fp8, "MODE": "row"}),
        (quantized.linear_quantized, {**SCALES, **held},
         {**active, **FP8, "NATIVE": fp8, "MODE": "block", "COLUMNS": 128, "ROWS": 128, "GROUP": 128}),
        (quantized.linear_quantized, {**SCALES, "weight": "*i8"}, {**own, **FP8, "MODE": "row", "COLUMNS": 4096}),
        (quantized.linear_quantized, {**SCALES, "x": "*i8" if whole else "*fp16", "weight": "*i8"},
         {**active, **INT8, "NATIVE": whole, "MODE": "row"}),
        (quantized.linear_quantized, {**SCALES, "weight": "*i8"}, {**zeros, **INT8}),
        (quantized.linear_quantized, {**SCALES, "weight": "*u8"}, own),
        (quantized.linear_quantized, {**SCALES, "weight": "*u8"}, {**zeros, "EVEN": False}),
        (quantized.linear_quantized, {**SCALES, "weight": "*u8"}, {**zeros, "MODE": "fine", "COLUMNS": 32}),
        (quantized.linear_quantized, {**SCALES, "weight": "*u8", "scales": "*u8"},
         {**own, **FP4, "MODE": "fine", "COLUMNS": 32, "EVEN": False}),
        (quantized.linear_quantized, {**SCALES, "weight": "*u8", "x": "*fp16"}, {**active, "COLUMNS": 128}),
        (quantized.linear_quantized, {**SCALES, "weight": "*u8", "out": WIDE}, {**own, "SPLIT": 4}),
        (experts.expert_quantized, {**CHOSEN, **SCALES, **held},
         {**FEW, **OF_EXPERTS, **FP8, "NATIVE": fp8, "GROUP": 128, "FP8": fp8, "ASM": whole}),
        (experts.expert_quantized, {**CHOSEN, **SCALES, "weight": "*u8"},
         {**MANY, **OF_EXPERTS, **INT4, "NATIVE": False, "x_scales": None, "FP8": fp8, "ASM": whole, "SUB": 64}),
        (experts.expert_quantized, {**CHOSEN, **SCALES, "weight": "*u8", "scales": "*u8", "bias": HALF},
         {**without("bias", FEW), **OF_EXPERTS, **FP4, "NATIVE": False, "MODE": "fine", "COLUMNS": 32, "x_scales": None,
          "FP8": fp8, "ASM": whole}),
        (experts.activate_pairs, {"chosen": LONG}, {**CLAMPED, "BLOCK": 1024}),
        (experts.activate_pairs, {"chosen": LONG}, {**GELU, "BLOCK": 1024}),
        (nibble_planes.lay_in_planes, {"k": "i32"}, {"grains": None, "BLOCK": 1024}),
        (nibble_planes.lay_in_planes, {"k": "i32", "grains": WIDE}, {"BLOCK": 1024}),
        (nibble_planes.linear_planes, {**SCALES, "weight": "*i16"},
         {name: value for name, value in zeros.items() if name in nibble_planes.linear_planes.arg_names} | {"EVEN": False}),
        (nibble_planes.linear_planes, {**SCALES, "weight": "*i16"},
         {name: value for name, value in own.items() if name in nibble_planes.linear_planes.arg_names}),
        (quantized.add_parts, {"parts": WIDE}, {"bias": None, "PARTS": 4, "BLOCK": 512}),
    ]  # fmt: skip


OF_RULE = {"D": 128, "E": 128, "BLOCK_D": 128, "BLOCK_E": 128}
OF_WINDOW, NO_WINDOW = {"pending": LONG}, {"pending": None, "TOKENS": 0}
NORM = {"bias": None, "PARTS": 2, "BLOCK": 4096}
ROUTED = {"weights": WIDE, "chosen": LONG, "first": "i32", "last": "i32"}
ROUTED |= dict.fromkeys(("factor", "epsilon", "minimum"), "fp32")
# What a name means depends on the kernel for a few of them.
KERNELS = [
    (rows.rms_norm, {}, {"BLOCK": 4096}),
    (rows.add_gated, {}, {"BLOCK": 2048}),
    (rows.add_rms_norm, {"x": WIDE, "grains": WIDE}, {**NORM, "PLANES": True}),
    (rows.add_rms_norm, {"x": WIDE}, {**NORM, "grains": None, "PLANES": True}),
    (rows.silu_mul, {"grains": WIDE}, {"PLANES": True, "BLOCK": 1024}),
    (rows.silu_mul, {}, {"grains": None, "PLANES": False, "BLOCK": 1024}),
    (rows.rope_write_cache, {}, {"PARTLY": False, "BLOCK_Q": 32, "BLOCK_KV": 8, "BLOCK_HALF": 64}),
    (rows.rope_write_cache, {}, {"PARTLY": True, "BLOCK_Q": 32, "BLOCK_KV": 8, "BLOCK_HALF": 64}),
    (
        rows.add_parts_rope_write_cache,
        {"parts": WIDE, "bias": HALF},
        {**UNNORMED, "PARTS": 4, "HEADS": 8, "BLOCK_HALF": 64},
    ),
    (
        rows.add_parts_rope_write_cache,
        {"parts": HALF, "q_norm": HALF, "k_norm": HALF},
        {"bias": None, "PARTS": 1, "HEADS": 8, "BLOCK_HALF": 64},
    ),
    (rows.move_cache, {}, {"MOVES": 4, "BLOCK": 64}),
    (rows.gather_rows, {}, {"BLOCK": 1024}),
    (rows.copy_rows, {"source": HALF}, {"BLOCK": 1024}),
    (rows.scatter_rows, {}, {"BLOCK": 1024}),
    (matmul.linear, {"k": "i32"}, {**PRODUCT, "descriptor": None, "SPLIT": 1}),
    (
        matmul.linear,
        {"k": "i32", "out": WIDE},
        {**PRODUCT, "descriptor": None, "SPLIT": 2, "EVEN": False},
    ),
    (matmul.linear_silu_mul, {"k": "i32"}, {**PRODUCT, "squares": None, "SHARES": 1}),
    (fused.linear_add, {"k": "i32", "norm": HALF, "scaled": HALF}, PRODUCT),
    (fused.linear_add, {"k": "i32", "scaled": HALF}, {**PRODUCT, "norm": None}),
    (matmul.linear_silu_mul, {"k": "i32", "eps": "fp32"}, {**PRODUCT, "SHARES": 128}),
    (fused.linear_rope_write_cache, {"k": "i32"}, {**PRODUCT, "SHARES": 128, "HALF": 64}),
    (
        fused.linear_rope_write_cache,
        {"k": "i32"},
        {**PRODUCT, "squares": None, "SHARES": 1, "HALF": 64},
    ),
    (attention.paged_attention, {"tokens": "i32"}, {**ATTENTION, "TREE": False, "SETTLED": False}),
    (attention.paged_attention, {"tokens": "i32"}, {**ATTENTION, "TREE": False, "SETTLED": True}),
    (attention.paged_attention, {"tokens": "i32"}, {**ATTENTION, "TREE": True, "SETTLED": True}),
    (attention.paged_attention, {"tokens": "i32"}, {**without("sinks", ATTENTION), "TREE": False, "SETTLED": True}),
    (attention.paged_attention, {"tokens": "i32"}, {**without("sinks", ATTENTION), "TREE": True, "SETTLED": False}),
    (attention.join_splits, {"like": HALF}, {"grains": None, "SPLITS": 4, "BLOCK_SIZE": 128, "PLANES": False}),
    (attention.join_splits, {"like": HALF}, {"grains": None, "SPLITS": 8, "BLOCK_SIZE": 128, "PLANES": True}),
    (attention.join_splits, {"like": HALF, "out": "*i8", "grains": WIDE}, {"SPLITS": 8, "BLOCK_SIZE": 128, "PLANES": True}),
    (exact_attention.exact_attention, EXACT_TYPES, {**EXACT, "TREE": False, "SHARED": False}),
    (exact_attention.exact_attention, EXACT_TYPES, {**EXACT, "TREE": True, "SHARED": True}),
    (exact_attention.exact_attention, EXACT_TYPES, {**without("sinks", EXACT), "TREE": False, "SHARED": False}),
    (exact_attention.merge_chunks, {"counts": "*i32"}, {**NO_SINKS, "BLOCK_SIZE": 128}),
    (exact_attention.merge_chunks, {"counts": "*i32"}, {"BLOCK_SIZE": 128}),
    (router.router_logits, {"weight": WIDE, "out": WIDE}, {"bias": None, "EXPERTS": 2, "BLOCK": 2048}),
    (latent.head_linear, {"tokens": "i32"}, {"BLOCK_TOKENS": 16, "BLOCK_OUTER": 64, "BLOCK_INNER": 64}),
    (latent.norm_rope_write_cache, LATENT_TYPES, {"BLOCK_HEADS": 32, "BLOCK_SIZE": 512, "BLOCK_HALF": 32}),
    (latent.latent_attention, LATENT_TYPES, {**LATENT, "TREE": False, "SHARED": False, "CHUNK": 0}),
    (latent.latent_attention, LATENT_TYPES, {**LATENT, "TREE": True, "SHARED": True, "CHUNK": 0}),
    (latent.latent_attention, LATENT_TYPES, {**LATENT, "TREE": False, "SHARED": True, "CHUNK": 256}),
    (prefill_attention.copy_context, {}, COPY),
    (
        prefill_attention.merge_context,
        {**dict.fromkeys(("own", "context"), HALF), **dict.fromkeys(("own_lse", "context_lse"), WIDE)},
        {"BLOCK_HEADS": 32, "BLOCK_SIZE": 128},
    ),
    (prefill_attention.prompt_attention, {"tokens": "i32"}, {**PROMPT, "DESCRIPTOR": False}),
    (prefill_attention.prompt_attention, {"tokens": "i32"}, {**PROMPT, "DESCRIPTOR": False, "WINDOW": 100, "EVEN": False}),
    (prefill_attention.prompt_attention, {"tokens": "i32"}, {**without("sinks", PROMPT), "DESCRIPTOR": False, "WINDOW": 128}),
    (token_choice.partial_argmax, {}, {**VOCABULARY, "SAMPLING": True, "LANE": 0, "DEPTH": 3, **UNCHECKED}),
    (token_choice.partial_argmax, {}, {**VOCABULARY, "SAMPLING": False, "LANE": 0, "DEPTH": 0, **UNCHECKED}),
    (token_choice.partial_argmax, {}, {**VOCABULARY, "BLOCK": 2048, "SAMPLING": False, "LANE": 0, "DEPTH": 0}),
    (token_choice.reduce_argmax, {}, SHARED),
    (token_choice.accept_greedy, {}, {**SHARED, "NUM_DRAFT_TOKENS": 3, "found": None, **UNCHECKED}),
    (token_choice.accept_greedy, {}, {**SHARED, "NUM_DRAFT_TOKENS": 0}),
    (token_choice.walk_tree, {}, {**SHARED, "NODES": 4, "DEPTH": 3}),
    (token_choice.partial_softmax, {}, VOCABULARY),
    (token_choice.partial_residual, {}, {**VOCABULARY, "LANE": 3}),
    (token_choice.apply_token_bitmask, {"bitmask": INT}, {"BLOCK": 1024}),
    (bookkeeping.gather_requests, {}, {"LENS_BY_ROW": True, "BLOCK": 64, "FOUND": 16}),
    (bookkeeping.gather_checked, {"source": HALF}, {"NUMBERS": True, "BLOCK": 4096}),
    (bookkeeping.gather_checked, {"source": LONG, "out": LONG}, {"NUMBERS": False, "BLOCK": 4, "rows": None}),
    (bookkeeping.partial_nan, {}, {"SHARES": 64, "BLOCK": 4096}),
    (bookkeeping.reduce_nan, {}, {"SHARES": 64}),
    (bookkeeping.place_tokens, {"last": "i64"}, {"BLOCK": 4}),
    (bookkeeping.publish_accepted, {"path": "i32", "pending": LONG}, {"BLOCK": 4}),
    (bookkeeping.publish_accepted, {"path": "i32"}, {"BLOCK": 4, "pending": None}),
    (bookkeeping.place_accepted, {"path": "i32"}, {"BLOCK": 4}),
    (bookkeeping.embed_beside, {"hidden": HALF}, {"BLOCK": 1024}),
    *(
        (peers.exchange, PEER_WORDS, {**PEERS, "MODE": mode, "KIND": kind})
        for mode, kind in ((0, 0), (1, 0), (1, 1), (1, 2), (2, 0))
    ),
    (peers.exchange, PEER_WORDS, {**PEERS, **TWO_SHOTS, "MODE": 1, "KIND": 1}),
    *((peers.all_reduce_rms_norm, PEER_WORDS, {**PEERS, "BLOCK": 2048, "KIND": kind}) for kind in range(3)),
    (peers.all_reduce_rms_norm, PEER_WORDS, {**PEERS, **TWO_SHOTS, "BLOCK": 2048, "KIND": 1}),
    (token_choice.accept_sampling, {"rows": "i32"}, {**SHARED, "LANE": 1, "NUM_DRAFT_TOKENS": 3}),
    (
        experts.route,
        ROUTED,
        {"correction": None, "SOFTMAX": True, "GROUPS": 1, "CHOSEN_GROUPS": 1, "RENORMALIZE": True, "COUNT": 8, "BLOCK": 128},
    ),
    *(
        (
            experts.route,
            {**ROUTED, "logits": WIDE, "correction": WIDE},
            {"SOFTMAX": groups == 1, "GROUPS": groups, "CHOSEN_GROUPS": chosen}
            | {"RENORMALIZE": True, "COUNT": 8, "BLOCK": 256},
        )
        for groups, chosen in ((8, 4), (1, 1))
    ),
    (
        experts.lay_out_pairs,
        {"chosen": LONG, "order": LONG, "expert_of": LONG},
        {"BINS": 256, "BLOCK": 1024},
    ),
    (experts.count_pairs, {"chosen": LONG, "counts": INT}, {"BINS": 256, "BLOCK": 1024}),
    (experts.place_pairs, {**OF_PAIRS, "counts": INT}, {"BINS": 256, "BLOCK": 512, "PIECE": 32}),
    (experts.gather_pairs, OF_PAIRS, {"BLOCK": 2048}),
    (experts.expert_gates, CHOSEN, {**FEW, **SWIGLU}),
    (experts.expert_gates, CHOSEN, {**MANY, **SWIGLU}),
    (experts.expert_gates, CHOSEN, {**FEW, **GELU}),
    (experts.expert_gates, CHOSEN, {**MANY, **GELU}),
    (experts.expert_gates, {**CHOSEN, "bias": HALF}, {**without("bias", FEW), **CLAMPED}),
    (experts.expert_gates, {**CHOSEN, "bias": HALF}, {**without("bias", MANY), **CLAMPED}),
    (experts.expert_outputs, CHOSEN, {**FEW, "PAIRS": 0}),
    (experts.expert_outputs, CHOSEN, {**MANY}),
    (experts.expert_outputs, {**CHOSEN, "bias": HALF}, {**without("bias", FEW), "PAIRS": 0}),
    (experts.expert_outputs, {**CHOSEN, "bias": HALF}, without("bias", MANY)),
    (experts.add_experts, {"parts": HALF, "chosen": LONG}, {"weights": None, "places": None, "BLOCK": 1024}),
    (experts.add_experts, {**OF_PAIRS, "parts": HALF, "weights": WIDE}, {"BLOCK": 1024}),
    (recurrent.short_convolution, {"window": HALF, **OF_WINDOW}, {"KERNEL": 4, "TOKENS": 4, "BLOCK_T": 4, "BLOCK_C": 128}),
    (recurrent.short_convolution, {}, {"KERNEL": 4, "BLOCK_T": 16, "BLOCK_C": 256, **NO_WINDOW, "window": None}),
    (recurrent.delta_rule, {"state": WIDE, "updates": WIDE, **OF_WINDOW}, {**OF_RULE, "BLOCK_E": 16, "TOKENS": 4}),
    (recurrent.delta_rule, {"state": WIDE}, {**OF_RULE, "BLOCK_E": 16, **NO_WINDOW, "updates": None}),
    (recurrent.gated_rms_norm, {}, {"E": 128, "ROWS": 16, "BLOCK_E": 128}),
    (recurrent.sigmoid_mul, {}, {"BLOCK": 1024}),
    (recurrent_chunks.corrections, {"tokens": "i32"}, OF_RULE),
    (recurrent_chunks.chunk_states, {"state": WIDE, "tokens": "i32"}, {**OF_RULE, "BLOCK_E": 32}),
    (recurrent_chunks.chunk_results, {"tokens": "i32"}, OF_RULE),
]
NARROW = dict.fromkeys(("k_cache", "v_cache"), E4M3)
IN_E4M3 = [
    (rows.rope_write_cache, NARROW, {"PARTLY": False, "BLOCK_Q": 32, "BLOCK_KV": 8, "BLOCK_HALF": 64}),
    (
        rows.add_parts_rope_write_cache,
        {**NARROW, "parts": WIDE, "bias": HALF},
        {**UNNORMED, "PARTS": 4, "HEADS": 8, "BLOCK_HALF": 64},
    ),
    (rows.move_cache, NARROW, {"MOVES": 4, "BLOCK": 64}),
    (
        fused.linear_rope_write_cache,
        {**NARROW, "k": "i32"},
        {**PRODUCT, "squares": None, "SHARES": 1, "HALF": 64},
    ),
    (attention.paged_attention, {**NARROW, "tokens": "i32"}, {**ATTENTION, "TREE": False, "SETTLED": True}),
    (attention.paged_attention, {**NARROW, "tokens": "i32"}, {**ATTENTION, "TREE": True, "SETTLED": False}),
    (prefill_attention.copy_context, NARROW, COPY),
    (
        prefill_attention.prompt_attention,
        {"tokens": "i32", "keys": E4M3, "values": E4M3},
        {**PROMPT, "DESCRIPTOR": False},
    ),
]
"""Over caches in e4m3, for devices that have it."""
RING = {"bias": None, "STEPS": 8, "BLOCK_M": 8, "BLOCK_K": 128, "STAGES": 4}
SCALED = {**RING, "SHARES": 128}
PLAIN = {**RING, "squares": None, "SHARES": 1}
UNQUANTIZED = {"x_scales": None, "scales": None, "ROWS": 0}
STREAMED_PRODUCT = {**RING, "FOLD": True, "ADD": False, "BLOCKS": False}
STREAMED = [
    (streamed.streamed_linear, {}, {**STREAMED_PRODUCT, **UNQUANTIZED}),
    (streamed.streamed_linear, {"out": WIDE}, {**STREAMED_PRODUCT, **UNQUANTIZED, "FOLD": False}),
    (streamed.streamed_linear_add, {"norm": HALF, "scaled": HALF}, RING),
    (streamed.streamed_linear_add, {"scaled": HALF}, {**RING, "norm": None}),
    (streamed.streamed_silu_mul, {"k": "i32"}, {**SCALED, **UNQUANTIZED, "maxima": None}),
    (streamed.streamed_silu_mul, {"k": "i32"}, {**PLAIN, **UNQUANTIZED, "maxima": None}),
    (streamed.streamed_rope_write_cache, {"k": "i32"}, {**SCALED, **UNQUANTIZED, "HALF": 64}),
    (streamed.streamed_rope_write_cache, {"k": "i32"}, {**PLAIN, **UNQUANTIZED, "HALF": 64}),
    (streamed.streamed_rope_write_cache, {"k": "i32", **NARROW}, {**PLAIN, **UNQUANTIZED, "HALF": 64}),
]
"""For devices with a copy engine alone."""
GATES = {"bias": None, "STEPS": 8, "BLOCK_K": 64}
PLACED = {"STEPS": 8, "BLOCK_K": 64, "STAGES": 4, "TOKEN_STAGES": 5}
TALL = [
    (large_m_gates.tall_silu_mul, {}, {**GATES, "GROUPS": 2, "BLOCK_M": 128, "STAGES": 4, "TOKEN_STAGES": 5}),
    (large_m_gates.tall_silu_mul, {}, {**GATES, "GROUPS": 1, "BLOCK_M": 64, "STAGES": 8, "TOKEN_STAGES": 10}),
]
OF_PLACES = {"expert_of": LONG, "used": LONG}
TALL_EXPERTS = [(expert_tiles.tall_experts, OF_PLACES, {**PLACED, "GATED": gated, "BLOCK_M": 128}) for gated in (True, False)]
BY_ROW = {"x_scales": WIDE, "scales": WIDE}
STREAMED_E4M3 = [
    (streamed.streamed_linear, BY_ROW, {**STREAMED_PRODUCT, "ROWS": 1}),
    (streamed.streamed_linear, BY_ROW, {**STREAMED_PRODUCT, "ADD": True, "ROWS": 1, "STEPS": 7, "BLOCK_K": 256}),
    (streamed.streamed_linear, BY_ROW, {**STREAMED_PRODUCT, "BLOCKS": True, "ROWS": 128, "STEPS": 7, "BLOCK_K": 256}),
    (streamed.streamed_linear, BY_ROW, {**STREAMED_PRODUCT, "BLOCKS": True, "ADD": True, "ROWS": 128}),
    (streamed.streamed_linear, BY_ROW, {**STREAMED_PRODUCT, "FOLD": False, "ADD": True, "ROWS": 1, "STEPS": 7}),
    (streamed.streamed_linear, BY_ROW, {**STREAMED_PRODUCT, "FOLD": False, "BLOCKS": True, "ADD": True, "ROWS": 128}),
    (streamed.streamed_silu_mul, {"k": "i32", "maxima": WIDE, **BY_ROW}, {**PLAIN, "STEPS": 7, "ROWS": 1}),
    (streamed.streamed_rope_write_cache, {"k": "i32", **BY_ROW}, {**PLAIN, "STEPS": 7, "HALF": 64, "ROWS": 1}),
]
FOUR_BITS = {"bias": None, "GATED": False, "STEPS": 8, "BLOCK_M": 8, "STAGES": 4, "MAX_REGISTERS": 112}
STRAIGHT = {**FOUR_BITS, **dict.fromkeys(("cos", "sin", "k_cache", "v_cache", "slots")), "HALF": 0}
ACTIVATED = {**STRAIGHT, "grains": None, "GATED": True, "BLOCK_M": 4}
IN_PLANES = [
    (nibble_planes_streamed.streamed_planes, {"grains": WIDE, "out": WIDE}, {**STRAIGHT, "GROUPS": 1, "TILES": 3}),
    (nibble_planes_streamed.streamed_planes, {"grains": WIDE}, {**STRAIGHT, "GROUPS": 2, "TILES": 2}),
    (nibble_planes_streamed.streamed_planes, {"out": WIDE}, {**ACTIVATED, "GROUPS": 2, "TILES": 2, "STEPS": 14}),
    (nibble_planes_streamed.streamed_planes, {}, {**ACTIVATED, "GROUPS": 1, "TILES": 1}),
    (nibble_planes_streamed.streamed_planes, {"grains": WIDE}, {**FOUR_BITS, "GROUPS": 1, "TILES": 2, "HALF": 64}),
    (nibble_planes_streamed.streamed_planes, {"grains": WIDE, **NARROW}, {**FOUR_BITS, "GROUPS": 2, "TILES": 1, "HALF": 32}),
]
PAGES = {**NO_SINKS, "PAGE": 16, "GROUP": 4, "WINDOW": 0, "BLOCK_ROWS": 16, "BLOCK_KV": 64, "STAGES": 3}
WHOLE = dict.fromkeys(("tokens", "batch", "heads"), "i32")
PAGED = [
    (attention_streamed.paged_attention_ring, WHOLE, {**PAGES, "TREE": False, "SETTLED": False, "SPLITS": 1}),
    (attention_streamed.paged_attention_ring, WHOLE, {**PAGES, "TREE": False, "SETTLED": True, "SPLITS": 4, "WINDOW": 100}),
    (attention_streamed.paged_attention_ring, WHOLE, {**PAGES, "TREE": True, "SETTLED": True, "SPLITS": 1, "BLOCK_ROWS": 32}),
    (
        attention_streamed.paged_attention_ring,
        WHOLE,
        {**without("sinks", PAGES), "TREE": False, "SETTLED": True, "SPLITS": 4, "WINDOW": 128},
    ),
]
"""For devices with a copy engine, too."""
SOME = {"rms_norm", "linear_quantized", "streamed_linear_add"}
"""One kernel of each kind: Triton, Triton with a quantised product, and Gluon with a ring of copies."""


def main() -> None:
    backend, architecture, warp, pdl, *some = sys.argv[1:]
    target = GPUTarget(backend, int(architecture) if architecture.isdigit() else architecture, int(warp))
    capability = target.arch if backend == "cuda" else 0
    every = [*(IN_E4M3 if capability >= 89 else ()), *KERNELS, *quantized_kernels(capability)]
    last = {kernel: (types, constants) for kernel, types, constants in every}
    for kernel, types, constants in every:
        if some and (kernel.__name__ not in SOME or last[kernel] != (types, constants)):
            print(f"({kernel.__name__})")
            continue
        made = compiled(ASTSource, kernel, types, {**constants, "PDL": pdl == "True"}, target)
        if pdl == "True":
            check_order(kernel.__name__, made.asm["ptx"], settled=constants.get("SETTLED", False))
            check_sizes_of_one(ASTSource, kernel, types, {**constants, "PDL": True}, target)
        print(kernel.__name__, flush=True)
    if (backend, architecture) == ("cuda", "90"):
        compile_for_hopper(target, some)


def compile_for_hopper(target, some):
    """Kernels that the copy engine brings operands, with the order of their accesses."""
    if not some:
        ends = dict.fromkeys(("keys", "values"), "tensordesc<bf16[64,128]>")
        constants = {**PROMPT, "DESCRIPTOR": True, "PDL": True}
        made = compiled(ASTSource, prefill_attention.prompt_attention, {"tokens": "i32", **ends}, constants, target)
        assert "cp.async.bulk.tensor" in made.asm["ptx"]
        assert "cp.async.cg" not in made.asm["ptx"]
        constants = {"STEPS": 20, "BLOCK_M": 128, "TOKENS": 16, "PDL": True}
        made = compiled(ASTSource, scaled_blocks.add_shared_tiles, {}, constants, target)
        check_order("add_shared_tiles", made.asm["ptx"], settled=False)
        check_sizes_of_one(ASTSource, scaled_blocks.add_shared_tiles, {}, constants, target)
    print("(add_shared_tiles)" if some else "add_shared_tiles")
    for (kernel, types, constants), check, independent, options in streamed_kernels():
        if some and (kernel.__name__ not in SOME or "norm" in constants):
            print(f"({kernel.__name__})")
            continue
        constants = {**constants, "PDL": True}
        made = compiled(GluonASTSource, kernel, types, constants, target, **options)
        check(kernel.__name__, made.asm["ptx"])
        assert not independent or one_by_one(made) is False, kernel.__name__
        assert ".e4m3.e4m3" in made.asm["ptx"] or "fp8e4nv" not in types.get("w", "")
        check_sizes_of_one(GluonASTSource, kernel, types, constants, target)
        print(kernel.__name__, flush=True)


def streamed_kernels():
    """Each with its descriptors, the check of its order, whether its products are independent, and options."""
    for types, constants in (({"updates": WIDE, **OF_WINDOW}, {"TOKENS": 4}), ({}, {**NO_WINDOW, "updates": None})):
        made = recurrent_steps_shared.delta_rule_shared, {"state": WIDE, **types}, {**OF_RULE, "BLOCK_E": 64, **constants}
        yield made, partial(check_order, settled=False), False, {"maxnreg": 128}
    for kernel, types, constants in STREAMED:
        ends = {"x": descriptor(8, 128), "w": descriptor(16, 128)}
        yield (kernel, {**types, **ends}, constants), check_order_of_both, False, {}
    for kernel, types, constants in TALL:
        ends = {"x": descriptor(constants["BLOCK_M"], 64), "w": descriptor(16, 64)}
        check = partial(check_order_of_groups, groups=constants["GROUPS"])
        yield (kernel, {**types, **ends}, constants), check, True, {}
    check_two = partial(check_order_of_tiles, groups=2)
    for kernel, types, constants in TALL_EXPERTS:
        ends = {"x": descriptor(constants["BLOCK_M"], 64), "w": descriptor(128, 64)}
        yield (kernel, {**types, **ends}, constants), check_two, True, {}
    for kernel, types, constants in STREAMED_E4M3:
        ends = {"x": descriptor(8, 128, "fp8e4nv"), "w": descriptor(16, 128, "fp8e4nv")}
        yield (kernel, {**types, **ends}, constants), partial(check_order_of_both, late=True), True, {}
    types = {"x": descriptor(64, 64), "w": descriptor(128, 64), "out": descriptor(64, 128)}
    yield (prefill_gates.prefill_silu_mul, types, {"STAGES": 4, "GROUP_M": 16}), check_two, True, {"maxnreg": 168}
    for tokens, stages in ((64, 4), (128, 3)):  # products in shares of units
        types = {**BY_ROW, "scales": HALF, "x": descriptor(tokens, 128, "fp8e4nv"), "w": descriptor(128, 128, "fp8e4nv")}
        types["out"] = descriptor(64, tokens)
        made = scaled_blocks.multiply_scaled_blocks, types, {"STEPS": 20, "STAGES": stages}
        yield made, check_two, True, {"aligned": ("parts",), "maxnreg": 128}
    for kernel, types, constants in IN_PLANES:
        box, gated = 8 if constants["HALF"] else 16, constants["GATED"]
        ends = {"w": descriptor(box, 256 if gated else 128, "i8"), "scales": WIDE}
        ends |= {} if gated else {"x": descriptor(16, 256, "i8")}
        check = partial(check_order_beside_a_weight, groups=constants["GROUPS"] * gated)
        yield (kernel, {**types, **ends}, constants), check, False, {}
    for kernel, types, constants in PAGED:
        ends = {"k_cache": descriptor(16, 128), "v_cache": descriptor(16, 128)}
        check = partial(check_order_beside_pages, settled=constants["SETTLED"])
        yield (kernel, {**types, **ends}, constants), check, False, {}


def compiled(source, kernel, types, given, target, *, warps=4, stages=3, aligned=(), **options):
    signature = {n: "constexpr" if n in given else {**TYPES, **types}.get(n, "i32") for n in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in given.items()}
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned if name not in given}
    arguments = (kernel, signature, places, attributes) if attributes else (kernel, signature, places)
    options |= {"num_warps": warps, "num_stages": stages}
    return triton.compile(source(*arguments), target=target, options=options)


def check_sizes_of_one(source, kernel, types, given, target):
    """A whole number that is 1 comes to a kernel as Python's, which has no dtype: the kernel can be read with all at 1."""
    backend, context = make_backend(target), ir.context()
    options = backend.parse_options({"num_warps": 4, "num_stages": 3})
    ir.load_dialects(context)
    backend.load_dialects(context)
    whole = {**TYPES, **types}
    able = [p.name for p in kernel.params if not (p.is_constexpr or p.do_not_specialize or p.name in given)]
    ones = {name: 1 for name in able if whole.get(name, "i32") == "i32"}
    assert ones or kernel.__name__ not in ("linear", "linear_silu_mul"), kernel.__name__
    given = {**given, **ones}
    signature = {n: "constexpr" if n in given else whole.get(n, "i32") for n in kernel.arg_names}
    made = source(kernel, signature, {(kernel.arg_names.index(name),): value for name, value in given.items()})
    made.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)


def descriptor(rows, columns, dtype="bf16"):
    kind = {"fp8e4nv": gl.float8e4nv, "i8": gl.int8}.get(dtype, gl.bfloat16)
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], kind)
    return f"tensordesc<{dtype}[{rows},{columns}],{getattr(layout, 'value', layout)!r}>"


if __name__ == "__main__":
    main()
