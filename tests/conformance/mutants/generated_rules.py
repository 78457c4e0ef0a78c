"""What a kernel's docstring says beyond shapes, sentence by sentence, each broken; and the rules of the engine's policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from conformance.mutants.generated import Generated, kernels, reach
from conformance.mutants.generated_kernels import BASE, CACHE, CHOICES, DENSE, LOGITS

BOOKS = "kernels: state"


def mutants() -> Iterator[Generated]:
    for kind, name, fault, make in (
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
        (CHOICES, "sample", "ignores positions beyond 16 bits", _masked("positions", 0xFFFF)),
        (CHOICES, "sample", "ignores a seed's upper half", _masked("seeds", 0xFFFFFFFF)),
        (CHOICES, "sample", "ignores the sign of a seed", lambda f: lambda **k: (reach(), f(**{**k, "seeds": k["seeds"].abs()}))[1]),
        (CHOICES, "sample", "draws with the place in the batch instead of the seed", _by_row),
        (CHOICES, "sample", "takes the last of equals when greedy", _last_of_equals),
        (CHOICES, "sample", "multiplies by the temperature", _inverse_temperature),
        (CHOICES, "sample", "takes a temperature below a half for zero", _cold),
        (CHOICES, "sample", "gives the draft the target's noise", _ignores_draft),
        *((CHOICES, "verify_chain", fault, _chain(flag)) for flag, fault in _CHAIN.items()),
        *((CHOICES, "verify_tree", fault, _tree(flag)) for flag, fault in _TREE.items()),
        (LOGITS, "bias_logits", "adds one entry too many", _entries(1)),
        (LOGITS, "bias_logits", "adds one entry too few", _entries(-1)),
        (LOGITS, "bias_logits", "adds at the position where a bias ends", _until),
        (LOGITS, "bias_logits", "takes the first node's position for all", _first_position),
        (LOGITS, "penalize_logits", "ignores drafted tokens", _no_drafts),
        (LOGITS, "penalize_logits", "counts the first node as drafted", _root_counts),
        (LOGITS, "penalize_logits", "ignores the tree", lambda f: lambda **k: (k["tree_mask"] is not None and reach(), f(**{**k, "tree_mask": None}))[1]),
        (LOGITS, "penalize_logits", "penalises the presence of a prompt's tokens", _prompt_present),
        (LOGITS, "penalize_logits", "divides negative logits too", _divides),
        *((LOGITS, "penalize_logits", f"ignores {what}", _penalty(i, v)) for i, (what, v) in enumerate(_PENALTIES.items())),
        (LOGITS, "count_tokens", "counts a token once however often it comes", _once_a_call),
        (LOGITS, "count_tokens", "counts in ones", _by_one),
        (LOGITS, "count_tokens", "counts what isn't there as token 0", _absent_counted),
        *((LOGITS, "truncate_logits", f"ignores {what}", _neutral(what, v)) for what, v in _NEUTRAL.items()),
        (LOGITS, "truncate_logits", "keeps one token too many for top-k", _more_k),
        (LOGITS, "truncate_logits", "drops the token that completes the nucleus", _less_p),
        (LOGITS, "truncate_logits", "truncates greedy rows too", _hot_rows),
        (LOGITS, "truncate_logits", "takes min-p before top-p", _order),
        (LOGITS, "truncate_logits", "ignores the temperature", _no_heat),
        (LOGITS, "logprobs", "gives natural probabilities", _exponentials),
        (LOGITS, "logprobs", "gives ids in the order of the vocabulary", _sorted_ids),
        (BOOKS, "scatter_rows", "writes row 0 too", _scatters_all),
        (BOOKS, "gather_rows", "clamps rows to the batch", _clamped_rows),
        (BOOKS, "gather_requests", "keeps seeds in 32 bits", _short_seeds),
        (BOOKS, "gather_requests", "ignores lens_by_row", lambda f: lambda **k: (k["lens_by_row"] and reach(), f(**{**k, "lens_by_row": False, "lens": k["lens"][: len(k["rows"])]}))[1]),
        (BOOKS, "gather_requests", "leaves what was found before", _found_kept),
        (BOOKS, "gather_checked", "lets the upper bound pass", _bounds(0, 1)),
        (BOOKS, "gather_checked", "lets one below the lower bound pass", _bounds(-1, 0)),
        (BOOKS, "gather_checked", "lets bad rows pass as they are", _not_cleaned),
        (BOOKS, "find_nan", "takes infinity for NaN", _infinite),
        (BOOKS, "find_nan", "finds the last one", _last_nan),
        (BOOKS, "place_tokens", "writes behind the table into its last page", _page_clamped),
        (BOOKS, "place_tokens", "lets positions pass the last one", lambda f: lambda **k: (reach(), f(**{**k, "last": 1 << 40}))[1]),
        (BOOKS, "place_tokens", "counts one token less as cached", _one_less),
        (BOOKS, "publish_accepted", "lets padding write row 0", _row_zero),
        (BOOKS, "publish_accepted", "counts accepted tokens without the decided one", _undecided),
        (BOOKS, "publish_accepted", "takes the token before the decided one as the last", _token_before),
        (BOOKS, "place_accepted", "leaves -1 where there is no token", _minus_one),
        (BOOKS, "place_accepted", "puts the next position one too near", _near),
        (BOOKS, "place_accepted", "counts the last one within its request", _within),
    ):  # fmt: skip
        yield Generated(kind, f"KernelSet.{name}", fault, BASE, 4, kernels({name: make}))


# -- products, norms, rotation --------------------------------------------------------------------------------------------


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


# -- attention ------------------------------------------------------------------------------------------------------------


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
    return lambda kernel: lambda **k: (k["window"] + by > 0 < k["window"] and reach(), kernel(**{**k, "window": max(k["window"] + by, 1) if k["window"] else 0}))[1]  # fmt: skip


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


# -- choices --------------------------------------------------------------------------------------------------------------


def _masked(name, bits):
    return lambda kernel: lambda **k: (reach(), kernel(**{**k, name: k[name] & bits}))[1]


def _by_row(kernel):
    def by_row(**k):
        import torch

        reach()
        return kernel(**{**k, "seeds": torch.arange(len(k["seeds"]), device=k["seeds"].device)})

    return by_row


def _last_of_equals(kernel):
    def last(**k):
        import torch

        reach()
        made = kernel(**k)
        flipped = k["logits"].shape[-1] - 1 - k["logits"].flip(-1).argmax(-1)
        return torch.where(k["temperature"] > 0, made, flipped)

    return last


def _inverse_temperature(kernel):
    def inverse(**k):
        reach()
        heat = k["temperature"]
        return kernel(**{**k, "temperature": (1 / heat).where(heat > 0, heat)})

    return inverse


def _cold(kernel):
    return lambda **k: (reach(), kernel(**{**k, "temperature": k["temperature"] * (k["temperature"] >= 0.5)}))[1]


def _ignores_draft(kernel):
    return lambda **k: (k["draft"] and reach(), kernel(**{**k, "draft": False}))[1]


_CHAIN = {
    "residual": "draws from the target after a rejection",
    "unclamped": "draws from the distance of both laws after a rejection",
    "draft residual": "draws from the draft's residual after a rejection",
    "coin": "accepts with the target's probability alone",
    "always": "accepts half of what it should reject",
    "cold": "judges sampled rows at temperature 1",
    "same noise": "takes the target's own noise for the residual",
    "position": "takes the first position's coin for every draft",
    "residual position": "takes the first position's noise for every residual",
    "greedy": "judges sampled rows greedily",
    "never last": "never accepts the last draft",
    "bonus": "takes the bonus token greedily",
    "minus": "leaves drafts behind the decided token",
    "skips": "goes on after a rejection",
    "first row": "takes the first row's temperature for all",
    "rows": "takes the draft's probabilities of the row before",
}


def _chain(fault):
    """The rule written out, with one thing wrong."""

    def make(kernel):
        def chain(**k):
            import torch

            from outrider.device.kernels.philox import uniforms

            if k["draft_probs"] is None or not bool((k["temperature"] > 0).any()):
                if fault in ("minus", "skips", "never last"):
                    pass
                else:
                    return kernel(**k)
            reach()
            logits, drafts, heat = k["target_logits"], k["draft_tokens"], k["temperature"]
            batch, count = drafts.shape
            vocabulary = logits.shape[-1]
            if fault == "first row":
                heat = heat[:1].expand_as(heat)
            hot = (heat > 0).unsqueeze(-1)
            if fault == "greedy":
                hot = torch.zeros_like(hot)
            choice = logits.argmax(-1)
            accept, following = choice[:, :count] == drafts, choice
            if k["draft_probs"] is not None:
                q = k["draft_probs"] if fault != "rows" else k["draft_probs"].roll(1, 0)
                steps = torch.arange(count + 1)
                where = k["positions"].unsqueeze(-1) + steps
                seed = k["seeds"].unsqueeze(-1).expand(batch, count + 1)
                scale = torch.where(heat > 0, heat, 1.0).view(batch, 1, 1)
                if fault == "cold":
                    scale = torch.ones_like(scale)
                p = torch.softmax(logits.float() / scale, dim=-1)
                p_of, q_of = (x[:, :count].gather(2, drafts.unsqueeze(-1)).squeeze(-1) for x in (p, q))
                at = where if fault != "position" else where[:, :1].expand_as(where)
                coin = uniforms(seed[:, :count], at[:, :count].contiguous(), 1, 1).squeeze(-1)
                own = coin < p_of if fault == "coin" else coin * q_of < p_of
                if fault == "always":
                    own = own | (uniforms(seed[:, :count], where[:, :count], 7, 1).squeeze(-1) < 0.5)
                accept = torch.where(hot, own, accept)
                wide = torch.cat((q, q.new_zeros(batch, 1, vocabulary)), dim=1)
                left = (p - wide).clamp(min=0)
                if fault == "residual":
                    left = p
                elif fault == "unclamped":
                    left = (p - wide).abs()
                elif fault == "draft residual":
                    left = torch.where(wide.sum(-1, keepdim=True) > 0, (wide - p).clamp(min=0), p)
                left = torch.where(left.sum(-1, keepdim=True) > 0, left, p)
                lane = 0 if fault == "same noise" else 3
                at = where if fault != "residual position" else where[:, :1].expand_as(where)
                noise = -torch.log(-torch.log(uniforms(seed, at.contiguous(), lane, vocabulary)))
                drawn = (left.log() + noise).argmax(-1)
                if fault == "bonus":
                    drawn[:, -1] = choice[:, -1]
                following = torch.where(hot, drawn, choice)
            if fault == "never last":
                accept = accept.clone()
                accept[:, -1] = False
            accepted = accept.sum(1) if fault == "skips" else accept.to(torch.int64).cumprod(1).sum(1)
            lane = torch.arange(count + 1)
            padded = torch.cat((drafts, drafts.new_full((batch, 1), -1)), dim=1)
            rest = padded if fault == "minus" else torch.full_like(padded, -1)
            last = following.gather(1, accepted.unsqueeze(1))
            a = accepted.unsqueeze(1)
            return torch.where(lane < a, padded, torch.where(lane == a, last, rest)), accepted

        return chain

    return make


_TREE = {
    "sibling": "takes the last child that holds the token",
    "position": "draws every level at the first position",
    "depth": "goes one level too far",
    "parent": "takes a node for a child whatever its parent is",
    "unused": "takes a node that isn't used for a child of the root",
    "path": "names the accepted node instead of the one before",
    "argmax": "walks greedily below the root",
    "root": "counts the root as accepted",
}


def _tree(fault):
    def make(kernel):
        def tree(**k):
            import torch

            tokens, parents, depth = k["tokens"], k["parents"], k["depth"]
            batch = tokens.shape[0]
            row = torch.arange(batch)
            here, alive, accepted = row * 0, torch.ones(batch, dtype=torch.bool), row * 0
            if fault == "unused":
                parents = torch.where((parents < 0) & (torch.arange(tokens.shape[1]) > 0), 0, parents)
            reach()
            out, path = [], []
            for level in range(depth + 1):
                logits = k["target_logits"][row, here]
                at = k["positions"] + (0 if fault == "position" else level)
                sampling = k["sampling"] and not (fault == "argmax" and level)
                choice = logits.argmax(-1)
                if sampling:
                    choice = torch.ops.outrider.sample(logits, k["temperature"], k["seeds"], at, 0)
                out.append(torch.where(alive, choice, -1))
                path.append(torch.where(alive, here, 0))
                match = tokens == choice.unsqueeze(1)
                if fault != "parent":
                    match = match & (parents == here.unsqueeze(1))
                else:
                    match = match & (torch.arange(tokens.shape[1]) > here.unsqueeze(1))
                alive = alive & match.any(dim=1)
                if level < depth or fault == "depth":
                    accepted = accepted + alive.to(torch.int64)
                    child = match.to(torch.int8).argmax(1)
                    if fault == "sibling":
                        child = tokens.shape[1] - 1 - match.flip(1).to(torch.int8).argmax(1)
                    here = torch.where(alive, child, here)
                    if fault == "path":
                        path[-1] = torch.where(alive, here, path[-1])
            if fault == "root":
                accepted = accepted + 1
            return torch.stack(out, 1), torch.stack(path, 1), accepted

        return tree

    return make


# -- logits ---------------------------------------------------------------------------------------------------------------

_PENALTIES = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0}
_NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def _entries(by):
    def make(kernel):
        def entries(**k):
            reach()
            return kernel(**{**k, "entries": (k["entries"] + by).clamp(0, k["tokens"].shape[1])})

        return entries

    return make


def _until(kernel):
    return lambda **k: (reach(), kernel(**{**k, "until": k["until"] + 1}))[1]


def _first_position(kernel):
    return lambda **k: (reach(), kernel(**{**k, "positions": k["positions"][:, :1].expand_as(k["positions"])}))[1]


def _no_drafts(kernel):
    def none(**k):
        import torch

        reach()
        nodes = k["tokens"].shape[1]
        return kernel(**{**k, "tree_mask": torch.zeros(k["tokens"].numel(), nodes, dtype=torch.bool)})

    return none


def _root_counts(kernel):
    def counted(**k):
        import torch

        reach()
        counts = k["counts"].clone()
        counts.index_put_((k["rows"], k["tokens"][:, 0]), torch.tensor(2, dtype=counts.dtype), accumulate=True)
        return kernel(**{**k, "counts": counts})

    return counted


def _prompt_present(kernel):
    return lambda **k: (reach(), kernel(**{**k, "counts": k["counts"] + k["counts"] % 2}))[1]


def _divides(kernel):
    def divides(**k):
        reach()
        logits = k["logits"]
        shifted = kernel(**{**k, "logits": logits.abs()})
        return shifted.where(logits > 0, -shifted)

    return divides


def _penalty(column, value):
    def make(kernel):
        def ignores(**k):
            reach()
            penalties = k["penalties"].clone()
            penalties[:, column] = value
            return kernel(**{**k, "penalties": penalties})

        return ignores

    return make


def _once_a_call(kernel):
    def once(**k):
        tokens = k["tokens"].clone()
        for line in tokens:
            seen = set()
            for i, token in enumerate(line.tolist()):
                if token in seen and token >= 0:
                    reach()
                    line[i] = -1
                seen.add(token)
        kernel(**{**k, "tokens": tokens})

    return once


def _by_one(kernel):
    def one(**k):
        reach()
        before = k["counts"].clone()
        kernel(**k)
        k["counts"].copy_(before + (k["counts"] - before) // 2)

    return one


def _absent_counted(kernel):
    return lambda **k: (reach(), kernel(**{**k, "tokens": k["tokens"].clamp(min=0)}))[1]


def _neutral(name, value):
    return lambda kernel: lambda **k: (reach(), kernel(**{**k, name: k[name] * 0 + value}))[1]


def _more_k(kernel):
    return lambda **k: (reach(), kernel(**{**k, "top_k": k["top_k"] + (k["top_k"] > 0)}))[1]


def _less_p(kernel):
    def less(**k):
        import torch

        made = kernel(**k)
        strict = (k["top_p"] < 1) & (k["temperature"] > 0)
        count = made.isfinite().sum(-1)
        smallest = made.masked_fill(~made.isfinite(), torch.inf).argmin(-1, keepdim=True)
        drop = (
            torch.zeros_like(made, dtype=torch.bool).scatter(-1, smallest, True)
            & strict.view(-1, 1, 1)
            & (count > 1).unsqueeze(-1)
        )
        if bool(drop.any()):
            reach()
        return made.masked_fill(drop, -torch.inf)

    return less


def _hot_rows(kernel):
    return lambda **k: (reach(), kernel(**{**k, "temperature": k["temperature"].where(k["temperature"] > 0, k["temperature"] + 1)}))[1]  # fmt: skip


def _order(kernel):
    def order(**k):
        reach()
        first = kernel(**{**k, "top_p": k["top_p"] * 0 + 1})
        return kernel(**{**k, "logits": first, "top_k": k["top_k"] * 0, "min_p": k["min_p"] * 0})

    return order


def _no_heat(kernel):
    return lambda **k: (reach(), kernel(**{**k, "temperature": (k["temperature"] > 0).to(k["temperature"].dtype)}))[1]


def _exponentials(kernel):
    return lambda **k: (reach(), (lambda made: (made[0].exp(), made[1]))(kernel(**k)))[1]


def _sorted_ids(kernel):
    def ids(**k):
        reach()
        values, ids = kernel(**k)
        return values, ids.sort(-1).values

    return ids


# -- bookkeeping ----------------------------------------------------------------------------------------------------------


def _scatters_all(kernel):
    def scattered(**k):
        kernel(**k)
        zero = k["rows"] == 0
        if bool(zero.any()):
            reach()
            k["state"][0] = k["values"][zero][-1]

    return scattered


def _clamped_rows(kernel):
    return lambda **k: (reach(), kernel(**{**k, "rows": k["rows"].clamp(max=len(k["rows"]) - 1)}))[1]


def _short_seeds(kernel):
    def short(**k):
        reach()
        kernel(**k)
        k["own"].seeds.copy_(k["own"].seeds & 0xFFFFFFFF)

    return short


def _found_kept(kernel):
    def kept(**k):
        reach()
        kernel(**{**k, "found": k["found"].clone()})

    return kept


def _bounds(low, high):
    def make(kernel):
        def bounds(**k):
            if k["bounds"] is not None:
                reach()
                k = {**k, "bounds": (k["bounds"][0] + low, k["bounds"][1] + high)}
            kernel(**k)

        return bounds

    return make


def _not_cleaned(kernel):
    def passed(**k):
        kernel(**k)
        source = k["source"] if k["rows"] is None else k["source"][k["rows"]]
        if k["bounds"] is not None:
            reach()
            k["out"].copy_(source)

    return passed


def _infinite(kernel):
    return lambda **k: (reach(), kernel(**{**k, "x": k["x"].masked_fill(k["x"].isinf(), float("nan"))}))[1]


def _last_nan(kernel):
    def last(**k):
        kernel(**{**k, "x": k["x"].flip(1)})
        index = k["found"][:, 0]
        reach()
        k["found"][:, 0] = (k["x"].shape[1] - 1 - index).where(index >= 0, index)

    return last


def _page_clamped(kernel):
    def clamped(**k):
        kernel(**k)
        places = k["lens"].unsqueeze(1) + k["positions"].new_tensor(range(k["positions"].shape[1]))
        index = (places // k["page_size"]).clamp(max=k["tables"].shape[1] - 1)
        reach()
        k["slots"].copy_(k["tables"].gather(1, index).long() * k["page_size"] + places % k["page_size"])

    return clamped


def _one_less(kernel):
    return lambda **k: (kernel(**k), reach(), k["seq_lens"].sub_(1))[1]


def _row_zero(kernel):
    def zero(**k):
        kernel(**k)
        padding = k["rows"] == 0
        if bool(padding.any()):
            reach()
            k["lengths"][0] = (k["lens"] + k["decided"][1] + 1)[padding][-1]

    return zero


def _undecided(kernel):
    def undecided(**k):
        reach()
        kernel(**k)
        rows = k["rows"][k["rows"] > 0]
        k["lengths"][rows] -= 1

    return undecided


def _token_before(kernel):
    def before(**k):
        reach()
        kernel(**k)
        tokens, accepted = k["decided"]
        earlier = tokens.gather(1, (accepted - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
        real = k["rows"] > 0
        k["last_tokens"][k["rows"][real]] = earlier[real]

    return before


def _minus_one(kernel):
    return lambda **k: (kernel(**k), reach(), k["following"].copy_(k["tokens"]))[1]


def _near(kernel):
    return lambda **k: (kernel(**k), reach(), k["positions"].sub_(1))[1]


def _within(kernel):
    return lambda **k: (kernel(**k), reach(), k["last"].copy_(k["accepted"]))[1]
