"""Faults of sampling, of verification, and of logits before a draw."""

from __future__ import annotations

from conformance.mutants.generated import reach

# -- choices -----------------------------------------------------------------------------------------------------------


def masked(name, bits):
    return lambda kernel: lambda **k: (reach(), kernel(**{**k, name: k[name] & bits}))[1]


def by_row(kernel):
    def by_row(**k):
        import torch

        reach()
        return kernel(**{**k, "seeds": torch.arange(len(k["seeds"]), device=k["seeds"].device)})

    return by_row


def last_of_equals(kernel):
    def last(**k):
        import torch

        reach()
        made = kernel(**k)
        flipped = k["logits"].shape[-1] - 1 - k["logits"].flip(-1).argmax(-1)
        return torch.where(k["temperature"] > 0, made, flipped)

    return last


def inverse_temperature(kernel):
    def inverse(**k):
        reach()
        heat = k["temperature"]
        return kernel(**{**k, "temperature": (1 / heat).where(heat > 0, heat)})

    return inverse


def cold(kernel):
    return lambda **k: (reach(), kernel(**{**k, "temperature": k["temperature"] * (k["temperature"] >= 0.5)}))[1]


def ignores_draft(kernel):
    return lambda **k: (k["draft"] and reach(), kernel(**{**k, "draft": False}))[1]


CHAIN = {
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


def chain(fault):
    """The rule written out, with one thing wrong."""

    def make(kernel):
        def chain(**k):
            import torch

            from outrider.device.kernels.reference.model import uniforms

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


TREE = {
    "sibling": "takes the last child that holds the token",
    "position": "draws every level at the first position",
    "depth": "goes one level too far",
    "parent": "takes a node for a child whatever its parent is",
    "unused": "takes a node that isn't used for a child of the root",
    "path": "names the accepted node instead of the one before",
    "argmax": "walks greedily below the root",
    "root": "counts the root as accepted",
}


def tree(fault):
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


# -- logits ------------------------------------------------------------------------------------------------------------

PENALTIES = {"repetition": (0, 1.0), "presence": (1, 0.0), "frequency": (2, 0.0)}
NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def first_mask(kernel):
    return lambda **k: (reach(), kernel(**{**k, "bitmask": k["bitmask"][:, :1].expand_as(k["bitmask"]).contiguous()}))[1]


def highest_first(kernel):
    def swapped(**k):
        import torch

        reach()
        bits = (k["bitmask"].unsqueeze(-1) >> torch.arange(32)) & 1
        turned = (bits.flip(-1).long() << torch.arange(32)).sum(-1).int()
        return kernel(**{**k, "bitmask": turned})

    return swapped


def last_word(kernel):
    def passed(**k):
        reach()
        bitmask = k["bitmask"].clone()
        bitmask[..., -1] = -1
        return kernel(**{**k, "bitmask": bitmask})

    return passed


def entries(by):
    def make(kernel):
        def entries(**k):
            reach()
            return kernel(**{**k, "entries": (k["entries"] + by).clamp(0, k["tokens"].shape[1])})

        return entries

    return make


def until(kernel):
    return lambda **k: (reach(), kernel(**{**k, "until": k["until"] + 1}))[1]


def first_position(kernel):
    return lambda **k: (reach(), kernel(**{**k, "positions": k["positions"][:, :1].expand_as(k["positions"])}))[1]


def no_drafts(kernel):
    def none(**k):
        import torch

        reach()
        nodes = k["tokens"].shape[1]
        return kernel(**{**k, "tree_mask": torch.zeros(k["tokens"].numel(), nodes, dtype=torch.bool)})

    return none


def root_counts(kernel):
    def counted(**k):
        import torch

        reach()
        counts = k["counts"].clone()
        counts.index_put_((k["rows"], k["tokens"][:, 0]), torch.tensor(2, dtype=counts.dtype), accumulate=True)
        return kernel(**{**k, "counts": counts})

    return counted


def prompt_present(kernel):
    return lambda **k: (reach(), kernel(**{**k, "counts": k["counts"] + k["counts"] % 2}))[1]


def divides(kernel):
    def divides(**k):
        reach()
        logits = k["logits"]
        shifted = kernel(**{**k, "logits": logits.abs()})
        return shifted.where(logits > 0, -shifted)

    return divides


def penalty(column, value):
    def make(kernel):
        def ignores(**k):
            reach()
            penalties = k["penalties"].clone()
            penalties[:, column] = value
            return kernel(**{**k, "penalties": penalties})

        return ignores

    return make


def once_a_call(kernel):
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


def by_one(kernel):
    def one(**k):
        reach()
        before = k["counts"].clone()
        kernel(**k)
        k["counts"].copy_(before + (k["counts"] - before) // 2)

    return one


def absent_counted(kernel):
    return lambda **k: (reach(), kernel(**{**k, "tokens": k["tokens"].clamp(min=0)}))[1]


def neutral(name, value):
    return lambda kernel: lambda **k: (reach(), kernel(**{**k, name: k[name] * 0 + value}))[1]


def more_k(kernel):
    return lambda **k: (reach(), kernel(**{**k, "top_k": k["top_k"] + (k["top_k"] > 0)}))[1]


def less_p(kernel):
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


def hot_rows(kernel):
    def hot(**k):
        reach()
        heat = k["temperature"]
        return kernel(**{**k, "temperature": heat.where(heat > 0, 1.0)})

    return hot


def order(kernel):
    def order(**k):
        reach()
        first = kernel(**{**k, "top_p": k["top_p"] * 0 + 1})
        return kernel(**{**k, "logits": first, "top_k": k["top_k"] * 0, "min_p": k["min_p"] * 0})

    return order


def no_heat(kernel):
    return lambda **k: (reach(), kernel(**{**k, "temperature": (k["temperature"] > 0).to(k["temperature"].dtype)}))[1]


def exponentials(kernel):
    return lambda **k: (reach(), (lambda made: (made[0].exp(), made[1]))(kernel(**k)))[1]


def sorted_ids(kernel):
    def ids(**k):
        reach()
        values, ids = kernel(**k)
        return values, ids.sort(-1).values

    return ids


def no_tree(kernel):
    def none(**k):
        if k["tree_mask"] is not None:
            reach()
        return kernel(**{**k, "tree_mask": None})

    return none


def unsigned(kernel):
    return lambda **k: (reach(), kernel(**{**k, "seeds": k["seeds"].abs()}))[1]
