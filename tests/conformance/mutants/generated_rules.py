"""What a kernel's docstring says beyond shapes, sentence by sentence, each broken; and the rules of the engine's policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from conformance.mutants import generated_choices as choices
from conformance.mutants import generated_state as state
from conformance.mutants.catalogue import Mutant
from conformance.mutants.generated import kernels, reach
from conformance.mutants.generated_kernels import BASE, CACHE, CHOICES, DENSE, LOGITS

BOOKS = "kernels: state"


def mutants() -> Iterator[Mutant]:
    for kind, name, fault, make in (*_dense_cache_and_choice_faults(), *_logit_and_bookkeeping_faults()):
        yield Mutant(f"KernelSet.{name}", fault, BASE, 4, kernels({name: make}), kind)


def _dense_cache_and_choice_faults() -> tuple[Any, ...]:
    return (
        (DENSE, "linear", "leaves the bias out from the second row on", _bias_once),
        (DENSE, "linear", "adds up in the dtype of its operands", _adds_narrowly),
        (DENSE, "rms_norm", "takes its mean in the dtype of its operands", _narrow_mean),
        (DENSE, "rms_norm", "takes one mean for the whole batch", _one_mean),
        (DENSE, "rms_norm", "adds no eps", lambda f: lambda **k: (reach(), f(**{**k, "eps": 0.0}))[1]),
        (DENSE, "silu_mul", "takes the halves the other way round", _halves),
        (DENSE, "add_rms_norm", "norms the residual as it was", _stale_residual),
        (CACHE, "rope_write_cache", "turns neighbours instead of halves", _interleaved),
        (CACHE, "rope_write_cache", "writes the keys unturned", _unturned_cache),
        (CACHE, "rope_write_cache", "doesn't turn the queries back into their place", _queries_kept),
        (CACHE, "rope_write_cache", "keeps a slot in 8 bits", _slot_bits),
        (CACHE, "move_cache", "leaves values where they are from the second move on", _keys_alone),
        (CACHE, "paged_attention", "shares key heads in turn", _heads_in_turn),
        (CACHE, "paged_attention", "sees no more than 2048 positions", _context(2048)),
        (CACHE, "paged_attention", "sees no more than 1024 positions", _context(1024)),
        (CACHE, "paged_attention", "ignores the tree mask of sequences behind the first", _tree_of_first),
        (CACHE, "paged_attention", "takes every sequence's tree mask from the first row on", _tree_from_top),
        (CACHE, "paged_attention", "has a window one position too wide", _window(1)),
        (CACHE, "paged_attention", "has a window one position too narrow", _window(-1)),
        (CACHE, "paged_attention", "ignores a window narrower than a page", _narrow_window),
        (CACHE, "paged_attention", "misses the last page of a table", _last_page),
        (CACHE, "paged_attention", "reads one token behind a sequence that doesn't end with a page", _reads_on),
        (CACHE, "paged_attention", "is off in heads of 256", _head_size(256)),
        (CACHE, "paged_attention", "is off in heads of 96", _head_size(96)),
        (CACHE, "paged_attention", "takes a batch beyond 256 sequences for shorter ones", _many_sequences),
        (CACHE, "paged_attention", "rounds weights to bfloat16 whatever the dtype is", _weights_rounded),
        (CHOICES, "sample", "ignores positions beyond 16 bits", choices.masked("positions", 0xFFFF)),
        (CHOICES, "sample", "ignores a seed's upper half", choices.masked("seeds", 0xFFFFFFFF)),
        (CHOICES, "sample", "ignores the sign of a seed", choices.unsigned),
        (CHOICES, "sample", "draws with the place in the batch instead of the seed", choices.by_row),
        (CHOICES, "sample", "takes the last of equals when greedy", choices.last_of_equals),
        (CHOICES, "sample", "multiplies by the temperature", choices.inverse_temperature),
        (CHOICES, "sample", "takes a temperature below a half for zero", choices.cold),
        (CHOICES, "sample", "gives the draft the target's noise", choices.ignores_draft),
        *((CHOICES, "verify_chain", fault, choices.chain(flag)) for flag, fault in choices.CHAIN.items()),
        *((CHOICES, "verify_tree", fault, choices.tree(flag)) for flag, fault in choices.TREE.items()),
    )


def _logit_and_bookkeeping_faults() -> tuple[Any, ...]:
    return (
        (LOGITS, "apply_token_bitmask", "takes the first node's mask for all", choices.first_mask),
        (LOGITS, "apply_token_bitmask", "takes bits from the highest on", choices.highest_first),
        (LOGITS, "apply_token_bitmask", "lets the last word pass", choices.last_word),
        (LOGITS, "bias_logits", "adds one entry too many", choices.entries(1)),
        (LOGITS, "bias_logits", "adds one entry too few", choices.entries(-1)),
        (LOGITS, "bias_logits", "adds at the position where a bias ends", choices.until),
        (LOGITS, "bias_logits", "takes the first node's position for all", choices.first_position),
        (LOGITS, "penalize_logits", "ignores drafted tokens", choices.no_drafts),
        (LOGITS, "penalize_logits", "counts the first node as drafted", choices.root_counts),
        (LOGITS, "penalize_logits", "ignores the tree", choices.no_tree),
        (LOGITS, "penalize_logits", "penalises the presence of a prompt's tokens", choices.prompt_present),
        (LOGITS, "penalize_logits", "divides negative logits too", choices.divides),
        *((LOGITS, "penalize_logits", f"ignores {what}", choices.penalty(*at)) for what, at in choices.PENALTIES.items()),
        (LOGITS, "count_tokens", "counts a token once however often it comes", choices.once_a_call),
        (LOGITS, "count_tokens", "counts in ones", choices.by_one),
        (LOGITS, "count_tokens", "counts what isn't there as token 0", choices.absent_counted),
        *((LOGITS, "truncate_logits", f"ignores {what}", choices.neutral(what, v)) for what, v in choices.NEUTRAL.items()),
        (LOGITS, "truncate_logits", "keeps one token too many for top-k", choices.more_k),
        (LOGITS, "truncate_logits", "drops the token that completes the nucleus", choices.less_p),
        (LOGITS, "truncate_logits", "truncates greedy rows too", choices.hot_rows),
        (LOGITS, "truncate_logits", "takes min-p before top-p", choices.order),
        (LOGITS, "truncate_logits", "ignores the temperature", choices.no_heat),
        (LOGITS, "logprobs", "gives natural probabilities", choices.exponentials),
        (LOGITS, "logprobs", "gives ids in the order of the vocabulary", choices.sorted_ids),
        (BOOKS, "scatter_rows", "writes row 0 too", state.scatters_all),
        (BOOKS, "gather_rows", "clamps rows to the batch", state.clamped_rows),
        (BOOKS, "gather_requests", "keeps seeds in 32 bits", state.short_seeds),
        (BOOKS, "gather_requests", "ignores lens_by_row", state.never_by_row),
        (BOOKS, "gather_requests", "leaves what was found before", state.found_kept),
        (BOOKS, "gather_checked", "lets the upper bound pass", state.bounds(0, 1)),
        (BOOKS, "gather_checked", "lets one below the lower bound pass", state.bounds(-1, 0)),
        (BOOKS, "gather_checked", "lets bad rows pass as they are", state.not_cleaned),
        (BOOKS, "find_nan", "takes infinity for NaN", state.infinite),
        (BOOKS, "find_nan", "finds the last one", state.last_nan),
        (BOOKS, "place_tokens", "writes behind the table into its last page", state.page_clamped),
        (BOOKS, "place_tokens", "lets positions pass the last one", state.no_last),
        (BOOKS, "place_tokens", "counts one token less as cached", state.one_less),
        (BOOKS, "publish_accepted", "lets padding write row 0", state.row_zero),
        (BOOKS, "publish_accepted", "counts accepted tokens without the decided one", state.undecided),
        (BOOKS, "publish_accepted", "takes the token before the decided one as the last", state.token_before),
        (BOOKS, "place_accepted", "leaves -1 where there is no token", state.minus_one),
        (BOOKS, "place_accepted", "puts the next position one too near", state.near),
        (BOOKS, "place_accepted", "counts the last one within its request", state.within),
    )


# -- products, norms, rotation -----------------------------------------------------------------------------------------


def _bias_once(kernel):
    def once(**k):
        made = kernel(**k)
        if k["bias"] is not None and made.dim() == 2 and made.shape[0] > 1:
            reach()
            made = made.clone()
            made[1:] -= k["bias"]
        return made

    return once


def _adds_narrowly(kernel):
    def adds(**k):
        import torch

        x, weight = k["x"], k["weight"]
        if x.dtype not in (torch.float16, torch.bfloat16):
            return kernel(**k)
        reach()
        total = x.new_zeros(*x.shape[:-1], weight.shape[0])
        for i in range(x.shape[-1]):
            total = total + x[..., i : i + 1] * weight[:, i]
        return total if k["bias"] is None else total + k["bias"]

    return adds


def _narrow_mean(kernel):
    def mean(**k):
        import torch

        x = k["x"]
        if x.dtype not in (torch.float16, torch.bfloat16):
            return kernel(**k)
        reach()
        total = x.new_zeros(x.shape[:-1])
        for i in range(x.shape[-1]):
            total = total + x[..., i] * x[..., i]
        return x * torch.rsqrt(total / x.shape[-1] + k["eps"]).unsqueeze(-1) * k["weight"]

    return mean


def _one_mean(kernel):
    def mean(**k):
        import torch

        reach()
        x = k["x"]
        return (x * torch.rsqrt(x.double().square().mean() + k["eps"]) * k["weight"]).to(x.dtype)

    return mean


def _halves(kernel):
    return lambda **k: (reach(), kernel(**{**k, "gate_up": k["gate_up"].roll(k["gate_up"].shape[-1] // 2, -1)}))[1]


def _stale_residual(kernel):
    def stale(**k):
        reach()
        before = k["residual"].clone()
        kernel(**k)
        return kernel(**{**k, "residual": before, "x": k["x"] * 0})

    return stale


def _interleaved(kernel):
    def turned(**k):
        reach()
        order = [i // 2 + (i % 2) * (k["q"].shape[-1] // 2) for i in range(k["q"].shape[-1])]
        back = sorted(range(len(order)), key=order.__getitem__)
        q, key = k["q"][..., back].contiguous(), k["k"][..., back].contiguous()
        kernel(**{**k, "q": q, "k": key})
        k["q"].copy_(q[..., order])
        k["k"].copy_(key[..., order])

    return turned


def _unturned_cache(kernel):
    def unturned(**k):
        reach()
        before = k["k"].clone()
        kernel(**k)
        page = k["k_cache"].shape[1]
        k["k_cache"][k["slots"] // page, k["slots"] % page] = before

    return unturned


def _queries_kept(kernel):
    return lambda **k: (reach(), kernel(**{**k, "q": k["q"].clone()}))[1]


def _slot_bits(kernel):
    return lambda **k: (reach() if (k["slots"] > 255).any() else None, kernel(**{**k, "slots": k["slots"] & 255}))[1]


def _keys_alone(kernel):
    def moved(**k):
        if len(k["sources"]) > 1:
            reach()
            values = k["v_cache"].clone()
            kernel(**{**k, "v_cache": values})
            kernel(
                **{**k, "k_cache": k["k_cache"].clone(), "sources": k["sources"][:1], "destinations": k["destinations"][:1]}
            )
            return
        kernel(**k)

    return moved


# -- attention ---------------------------------------------------------------------------------------------------------


def _meta(k, **changes):
    return {**k, "metadata": replace(k["metadata"], **changes)}


def _heads_in_turn(kernel):
    def turned(**k):
        heads, shared = k["q"].shape[1], k["k_cache"].shape[2]
        if shared in (1, heads):
            return kernel(**k)
        reach()
        order = [i // (heads // shared) + (i % (heads // shared)) * shared for i in range(heads)]
        made = kernel(**{**k, "q": k["q"][:, order]})
        return made[:, sorted(range(heads), key=order.__getitem__)]

    return turned


def _context(most):
    def make(kernel):
        def short(**k):
            m = k["metadata"]
            if not bool((m.seq_lens > most).any()):
                return kernel(**k)
            reach()
            page = k["k_cache"].shape[1]
            over = ((m.seq_lens - most).clamp(min=0) // page * page).to(m.seq_lens.dtype)
            table = m.block_table.clone()
            for row, skip in enumerate((over // page).tolist()):
                table[row] = table[row].roll(-skip)
            return kernel(**_meta(k, seq_lens=m.seq_lens - over, block_table=table))

        return short

    return make


def _tree_of_first(kernel):
    def first(**k):
        import torch

        m = k["metadata"]
        if m.tree_mask is None or len(m.seq_lens) < 2:
            return kernel(**k)
        reach()
        mask = m.tree_mask.clone()
        for row in range(1, len(m.seq_lens)):
            start, end = int(m.query_start[row]), int(m.query_start[row + 1])
            mask[start:end] = torch.ones_like(mask[start:end]).tril()
        return kernel(**_meta(k, tree_mask=mask))

    return first


def _tree_from_top(kernel):
    def top(**k):
        m = k["metadata"]
        if m.tree_mask is None or len(m.seq_lens) < 2:
            return kernel(**k)
        reach()
        mask = m.tree_mask.clone()
        for row in range(1, len(m.seq_lens)):
            start, end = int(m.query_start[row]), int(m.query_start[row + 1])
            mask[start:end] = m.tree_mask[: end - start]
        return kernel(**_meta(k, tree_mask=mask))

    return top


def _window(by):
    def make(kernel):
        def window(**k):
            if k["window"] and k["window"] + by > 0:
                reach()
                k = {**k, "window": k["window"] + by}
            return kernel(**k)

        return window

    return make


def _narrow_window(kernel):
    def narrow(**k):
        if 0 < k["window"] < k["k_cache"].shape[1]:
            reach()
            k = {**k, "window": 0}
        return kernel(**k)

    return narrow


def _last_page(kernel):
    def last(**k):
        m, page = k["metadata"], k["k_cache"].shape[1]
        query = m.query_start[1:] - m.query_start[:-1]
        some = (m.seq_lens - query > page) & (query == 1)
        if not bool(some.any()):
            return kernel(**k)
        reach()
        return kernel(**_meta(k, seq_lens=m.seq_lens - some.to(m.seq_lens.dtype) * ((m.seq_lens - 1) % page + 1)))

    return last


def _reads_on(kernel):
    def on(**k):
        m, page = k["metadata"], k["k_cache"].shape[1]
        some = (m.seq_lens % page != 0) & ((m.query_start[1:] - m.query_start[:-1]) == 1)
        reach()
        return kernel(**_meta(k, seq_lens=m.seq_lens + some.to(m.seq_lens.dtype), max_kv=m.max_kv + 1))

    return on


def _head_size(size):
    def make(kernel):
        def off(**k):
            if k["q"].shape[-1] != size:
                return kernel(**k)
            reach()
            return kernel(
                **{**k, "q": k["q"] * (k["q"].new_ones(size).index_fill_(0, k["q"].new_tensor([size - 1]).long(), 0))}
            )

        return off

    return make


def _many_sequences(kernel):
    def many(**k):
        m = k["metadata"]
        if len(m.seq_lens) <= 256:
            return kernel(**k)
        reach()
        lens = m.seq_lens.clone()
        lens[256:] = (lens[256:] - 1).clamp(min=1)
        return kernel(**_meta(k, seq_lens=lens))

    return many


def _weights_rounded(kernel):
    def rounded(**k):
        import torch

        if k["v_cache"].dtype is torch.bfloat16:
            return kernel(**k)
        reach()
        return kernel(**{**k, "v_cache": k["v_cache"].to(torch.bfloat16).to(k["v_cache"].dtype)})

    return rounded
