"""Kernels that are right for the operands of most models: they misread a dtype, a layout, a size or a combination of these.

Each passed the kit before its operands had these properties.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from conformance.mutants.generated import reach

Kernel = Callable[..., Any]


def faults() -> Iterator[tuple[str, str, Callable[[Kernel], Kernel]]]:
    """Yield each fault with its kernel and the function that breaks the kernel."""
    yield "a float32 norm weight is read as half", "rms_norm", _given(lambda k: _wide(k, "weight"), weight=_misread)
    yield (
        "a float32 gate norm weight is read as half",
        "gated_rms_norm",
        _given(lambda k: _wide(k, "weight"), weight=_misread),
    )
    yield "a norm of an odd size drops the last element", "rms_norm", _given(lambda k: _odd(k["x"]), x=_without_last)
    for kernel, x in (("rms_norm", "x"), ("add_rms_norm", "residual"), ("gated_rms_norm", "x")):
        yield f"squares of {kernel} overflow in float16", kernel, _squares(x)
    yield "a sequence without new tokens isn't settled", "short_convolution", _unsettled
    yield "gates above 20 are clamped", "silu_mul", _given(lambda k: k["gate_up"].max() > 20, gate_up=_clamped)
    yield "a row of NaN spoils the others", "linear", _spoils_rows("x")
    yield "a query of NaN spoils the others", "paged_attention", _spoils_rows("q")
    yield "rows are gathered by a product with zeros", "gather_rows", _one_hot
    yield "rows are scattered by a product with zeros", "scatter_rows", _blended("state")
    yield "moved rows are blended by a product with zeros", "move_cache", _blended("k_cache", "v_cache")
    for kernel, outputs in _OUTPUTS.items():
        yield f"outputs of {kernel} are added up", kernel, _adds(*outputs)
    for kernel in ("short_convolution", "gated_delta_rule", "chunk_gated_delta_rule"):
        yield f"{kernel} multiplies an earlier state by zero", kernel, _times_zero
    for kernel in ("short_convolution", "gated_delta_rule"):
        yield f"{kernel} leaves out a pending token", kernel, _given(_has_pending, batch=_with_one_less)
    yield "the first half has every pending token", "gated_delta_rule", _given(_in_second_half, batch=_in_first_half)
    yield "keys of zeros have no direction", "gated_delta_rule", _no_direction
    yield "the root of a key's norm holds 2e-10", "gated_delta_rule", _small_addend
    yield "scales of 16 bits are read as float32", "linear_quantized", _given(_half_scales, weight=_misread_scales)
    yield "a bias needs two dimensions", "linear_quantized", _given(lambda k: k["x"].dim() == 3, bias=lambda _: None)
    yield "activations outside a given scale aren't clamped", "linear_quantized", _given(_beyond, x=lambda x: x * 1.5)
    yield "an expert takes 128 tokens", "experts", _given(_crowded, weights=_first_tokens)
    yield "the second product has the scale of the first", "experts_quantized", _shares_scale
    yield "a partial rotation rotates the whole head", "rope_write_cache", _rotates_all
    yield "slots of 16 bits", "rope_write_cache", _given(lambda k: k["slots"].max() > 0xFFFF, slots=lambda s: s & 0xFFFF)
    yield "a window holds for few new tokens", "paged_attention", _given(_prefills_window, window=lambda _: 0)
    yield "65,536 cached tokens at most", "paged_attention", _given(_long, metadata=lambda m: replace(m, max_kv=1 << 16))
    yield "scores overflow", "paged_attention", _overflows
    yield "integers are gathered as float32", "gather_rows", _given(lambda k: _whole(k["state"]), state=_rounded)
    yield "integers are scattered as float32", "scatter_rows", _given(lambda k: _whole(k["values"]), values=_rounded)
    yield "one gathered row is a view", "gather_rows", _view_of_one
    yield "infinities of both signs are NaN", "find_nan", _sums
    yield "row 0 keeps its last token", "publish_accepted", _keeps_row_0
    yield "a mask of one token by its sign bit is empty", "apply_token_bitmask", _given(_sign_only, bitmask=_unsigned)
    yield "counts of 8 bits", "penalize_logits", _given(lambda k: k["counts"].max() > 255, counts=lambda c: c & 0xFF)
    yield "a top-k above 1024 is 1024", "truncate_logits", _given(_large_k, top_k=lambda k: k.clamp(max=1024))
    yield "temperatures below 0.05 are 0", "sample", _given(lambda k: (k["temperature"] < 0.05).any(), temperature=_cold)
    yield "a vocabulary of 65,536 tokens at most", "sample", _given(_vast, logits=lambda x: x[:, : 1 << 16])
    yield (
        "temperatures are read without sampling",
        "verify_tree",
        _given(lambda k: not k["sampling"], sampling=lambda _: True),
    )
    yield "trees have 32 nodes at most", "verify_tree", _given(lambda k: k["parents"].shape[1] > 32, parents=_first_nodes)
    yield "results of padding aren't zeros", "chunk_gated_delta_rule", _fills_padding
    yield "the gates of decays end at 8", "gated_delta_rule", _given(lambda k: k["gates"].max() > 8, gates=_clamped)
    yield "a longer window rounds otherwise", "gated_delta_rule", _other_bits
    yield "a gate of strided rows", "gated_rms_norm", _given(lambda k: not k["gate"].is_contiguous(), gate=_packed)


def _given(condition, **changes):
    """Return the function that breaks a kernel: it changes arguments of the calls for which ``condition`` holds."""

    def make(kernel):
        def broken(**k):
            if condition(k):
                reach()
                k |= {name: change(k[name]) for name, change in changes.items()}
            return kernel(**k)

        return broken

    return make


def _wide(k, name):
    return k[name].element_size() > k["x"].element_size()


def _misread(weight):
    return weight.view(torch.bfloat16)[: weight.shape[0]]


def _odd(x):
    return x.shape[-1] % 2


def _without_last(x):
    x = x.clone()
    x[..., -1] = 0
    return x


def _clamped(x):
    return x.clamp(max=8)


def _spoils_rows(name):
    def make(kernel):
        def product(**k):
            reach()
            return kernel(**k) + 0 * k[name].sum()

        return product

    return make


_OUTPUTS = {
    "copy_rows": ("out",),
    "gather_requests": ("found",),
    "find_nan": ("found",),
    "gather_checked": ("found",),
    "place_tokens": ("positions", "slots", "seq_lens"),
    "publish_accepted": ("results",),
    "place_accepted": ("following", "last", "positions"),
    "verify_checked": ("found",),
}


def _adds(*names):
    def make(kernel):
        def add(**k):
            before = [k[name].clone() for name in names]
            made = kernel(**k)
            reach()
            for name, old in zip(names, before, strict=True):
                k[name].add_(old)
            return made

        return add

    return make


def _one_hot(kernel):
    def gather(**k):
        state = k["state"]
        if not state.is_floating_point() or len(state) > 1 << 12:
            return kernel(**k)
        reach()
        chosen = (k["rows"].unsqueeze(1) == torch.arange(len(state))).to(state.dtype)
        return (chosen @ state.flatten(1)).view(-1, *state.shape[1:])

    return gather


def _blended(*names):
    def make(kernel):
        def write(**k):
            before = [k[name].clone() for name in names]
            kernel(**k)
            for name, old in zip(names, before, strict=True):
                if old.is_floating_point() and old.element_size() > 1:
                    reach()
                    k[name].add_(torch.where(k[name] == old, 0, old * 0))

        return write

    return make


def _times_zero(kernel):
    def recurrent(**k):
        batch = k["batch"]
        counts = batch.query_start.diff()
        left = torch.where(batch.seq_lens == counts, k["state"][batch.rows].flatten(1).sum(1) * 0, 0)
        made = kernel(**k)
        reach()
        left = left.repeat_interleave(counts)
        made[: len(left)] += left.view(-1, *[1] * (made.dim() - 1))
        return made

    return recurrent


def _squares(x):
    def make(kernel):
        def norm(**k):
            made = kernel(**k)
            if made.dtype is torch.float16:
                reach()
                made = made.masked_fill(k[x].square().isinf().any(-1, keepdim=True), 0.0)
            return made

        return norm

    return make


def _unsettled(kernel):
    def convolution(**k):
        batch = k["batch"]
        rows = batch.rows[batch.query_start.diff() == 0]
        before = k["state"][rows].clone()
        made = kernel(**k)
        if k["window"] is not None and len(rows):
            reach()
            k["state"][rows] = before
        return made

    return convolution


def _has_pending(k):
    pending = k["batch"].pending
    return pending is not None and pending.any()


def _with_one_less(batch):
    return batch._replace(pending=batch.pending - batch.pending.sign())


def _in_second_half(k):
    pending = k["batch"].pending
    return pending is not None and (pending < 0).any()


def _in_first_half(batch):
    return batch._replace(pending=batch.pending.abs())


def _no_direction(kernel):
    def rule(**k):
        zero = (k["mixed"] == 0).all(-1)
        made = kernel(**k)
        if zero.any():
            reach()
            made[zero] = torch.nan
        return made

    return rule


def _small_addend(kernel):
    def rule(**k):
        reach()
        heads, _, size = k["state"].shape[1:]
        mixed = k["mixed"].clone()
        mixed[:, : mixed.shape[1] - heads * size] *= 64
        return kernel(**{**k, "mixed": mixed})

    return rule


def _half_scales(k):
    return k["weight"].scales.element_size() == 2


def _misread_scales(weight):
    return replace(weight, scales=weight.scales.view(torch.int16).float())


def _beyond(k):
    scale, most = k["weight"].input_scale, {"fp8": 448, "int8": 127}
    return scale is not None and k["x"].abs().max() > scale * 1.2 * most[k["weight"].activations]


def _crowded(k):
    return (k["chosen"] == k["chosen"][0, 0]).sum() > 128


def _first_tokens(weights):
    weights = weights.clone()
    weights[128:] = 0
    return weights


def _shares_scale(kernel):
    def experts(**k):
        if k["down"].input_scale is not None:
            reach()
            k["down"] = replace(k["down"], input_scale=k["gate_up"].input_scale)
        return kernel(**k)

    return experts


def _rotates_all(kernel):
    def rope(**k):
        size, turned = k["q"].shape[-1], k["cos"].shape[-1]
        if turned < size:
            reach()
            k["cos"], k["sin"] = (k[name].repeat(1, size // turned) for name in ("cos", "sin"))
        return kernel(**k)

    return rope


def _prefills_window(k):
    return k["window"] and k["metadata"].max_query > 8


def _long(k):
    return k["metadata"].max_kv > 1 << 16


def _overflows(kernel):
    def attention(**k):
        made = kernel(**k)
        if (k["q"].float() * k["scale"]).norm(dim=-1).max() > 20:
            reach()
            made = made + float("nan")
        return made

    return attention


def _whole(x):
    return not x.is_floating_point()


def _rounded(x):
    return x.float().to(x.dtype)


def _view_of_one(kernel):
    def gather(**k):
        if k["rows"].shape[0] > 1:
            return kernel(**k)
        reach()
        row = int(k["rows"])
        return k["state"][row : row + 1]

    return gather


def _sums(kernel):
    def find(**k):
        kernel(**k)
        is_nan = k["x"].sum(1).isnan() & (k["found"][:, 0] < 0)
        if is_nan.any():
            reach()
            k["found"][:, 0].masked_fill_(is_nan, 0)

    return find


def _keeps_row_0(kernel):
    def publish(**k):
        before = k["last_tokens"][0].clone()
        kernel(**k)
        reach()
        k["last_tokens"][0] = before

    return publish


def _sign_only(k):
    return (k["bitmask"] == -(2**31)).any()


def _unsigned(mask):
    return mask.masked_fill(mask == -(2**31), 0)


def _large_k(k):
    return (k["top_k"] > 1024).any()


def _cold(temperature):
    return temperature.masked_fill(temperature < 0.05, 0.0)


def _vast(k):
    return k["logits"].shape[1] > 1 << 16


def _first_nodes(parents):
    parents = parents.clone()
    parents[:, 32:] = -1
    return parents


def _fills_padding(kernel):
    def rule(**k):
        made, tokens = kernel(**k), int(k["batch"].query_start[-1])
        if tokens < made.shape[0]:
            reach()
            made[tokens:] = 1
        return made

    return rule


def _other_bits(kernel):
    def rule(**k):
        made = kernel(**k)
        if k["batch"].max_query > 4:
            reach()
            made = made * (1 + 2**-22)
        return made

    return rule


def _packed(x):
    return x.as_strided(x.shape, x.contiguous().stride(), x.storage_offset())
