"""Faults of bookkeeping: rows of requests, places of tokens, accepted tokens, probes."""

from __future__ import annotations

from conformance.mutants.generated import reach

# -- bookkeeping -------------------------------------------------------------------------------------------------------


def scatters_all(kernel):
    def scattered(**k):
        kernel(**k)
        zero = k["rows"] == 0
        if bool(zero.any()):
            reach()
            k["state"][0] = k["values"][zero][-1]

    return scattered


def clamped_rows(kernel):
    return lambda **k: (reach(), kernel(**{**k, "rows": k["rows"].clamp(max=len(k["rows"]) - 1)}))[1]


def short_seeds(kernel):
    def short(**k):
        reach()
        kernel(**k)
        k["own"].seeds.copy_(k["own"].seeds & 0xFFFFFFFF)

    return short


def found_kept(kernel):
    def kept(**k):
        reach()
        kernel(**{**k, "found": k["found"].clone()})

    return kept


def bounds(low, high):
    def make(kernel):
        def bounds(**k):
            if k["bounds"] is not None:
                reach()
                k = {**k, "bounds": (k["bounds"][0] + low, k["bounds"][1] + high)}
            kernel(**k)

        return bounds

    return make


def not_cleaned(kernel):
    def passed(**k):
        kernel(**k)
        source = k["source"] if k["rows"] is None else k["source"][k["rows"]]
        if k["bounds"] is not None:
            reach()
            k["out"].copy_(source)

    return passed


def infinite(kernel):
    return lambda **k: (reach(), kernel(**{**k, "x": k["x"].masked_fill(k["x"].isinf(), float("nan"))}))[1]


def last_nan(kernel):
    def last(**k):
        kernel(**{**k, "x": k["x"].flip(1)})
        index = k["found"][:, 0]
        reach()
        k["found"][:, 0] = (k["x"].shape[1] - 1 - index).where(index >= 0, index)

    return last


def page_clamped(kernel):
    def clamped(**k):
        kernel(**k)
        places = k["lens"].unsqueeze(1) + k["positions"].new_tensor(range(k["positions"].shape[1]))
        index = (places // k["page_size"]).clamp(max=k["tables"].shape[1] - 1)
        reach()
        k["slots"].copy_(k["tables"].gather(1, index).long() * k["page_size"] + places % k["page_size"])

    return clamped


def one_less(kernel):
    return lambda **k: (kernel(**k), reach(), k["seq_lens"].sub_(1))[1]


def row_zero(kernel):
    def zero(**k):
        kernel(**k)
        padding = k["rows"] == 0
        if bool(padding.any()):
            reach()
            k["lengths"][0] = (k["lens"] + k["decided"][1] + 1)[padding][-1]

    return zero


def undecided(kernel):
    def undecided(**k):
        reach()
        kernel(**k)
        rows = k["rows"][k["rows"] > 0]
        k["lengths"][rows] -= 1

    return undecided


def token_before(kernel):
    def before(**k):
        reach()
        kernel(**k)
        tokens, accepted = k["decided"]
        earlier = tokens.gather(1, (accepted - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
        real = k["rows"] > 0
        k["last_tokens"][k["rows"][real]] = earlier[real]

    return before


def minus_one(kernel):
    return lambda **k: (kernel(**k), reach(), k["following"].copy_(k["tokens"]))[1]


def near(kernel):
    return lambda **k: (kernel(**k), reach(), k["positions"].sub_(1))[1]


def within(kernel):
    return lambda **k: (kernel(**k), reach(), k["last"].copy_(k["accepted"]))[1]


def never_by_row(kernel):
    def never(**k):
        if k["lens_by_row"]:
            reach()
            k = {**k, "lens_by_row": False, "lens": k["lens"][: len(k["rows"])]}
        kernel(**k)

    return never


def no_last(kernel):
    return lambda **k: (reach(), kernel(**{**k, "last": 1 << 40}))[1]
