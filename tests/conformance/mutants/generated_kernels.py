"""Each kernel with each fault that fits its operands: rows, columns, reductions, layouts, scratch, what it may not write."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from conformance.mutants.catalogue import Mutant
from conformance.mutants.generated import kernels, reach

BASE = "cpu"


@dataclass(frozen=True)
class Operands:
    """`rows`: operands that have one row a token or request; `written`: in place; `read`: a tensor that's only read;
    `strided`: one that may lie strided; `reduced`: one whose last dimension is added up; `numbers`: what is computed with;
    `returns`: whether something is returned, with rows first."""

    kind: str
    rows: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    strided: tuple[str, ...] = ()
    reduced: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    returns: bool = True
    many: int = 256  # a kernel that handles this many rows and no more


DENSE, CACHE, CHOICES, LOGITS, BOOKS = (
    "kernels: dense",
    "kernels: cache",
    "kernels: choices",
    "kernels: logits",
    "kernels: state",
)
DRAW = ("temperature", "seeds", "positions")
SPECS = {
    "linear": Operands(DENSE, ("x",), (), ("x", "weight", "bias"), ("x",), ("x",), ("x", "weight"), many=64),
    "rms_norm": Operands(DENSE, ("x",), (), ("x", "weight"), ("x",), ("x",), ("x", "weight"), many=64),
    "add_rms_norm": Operands(DENSE, ("x", "residual"), ("residual",), ("x",), ("x",), (), ("x",), many=64),
    "silu_mul": Operands(DENSE, ("gate_up",), (), ("gate_up",), ("gate_up",), (), ("gate_up",), many=64),
    "rope_write_cache": Operands(
        CACHE,
        ("q", "k", "v", "cos", "sin", "slots"),
        ("k_cache", "v_cache"),
        ("v", "cos", "slots"),
        ("q", "k", "v"),
        (),
        ("cos", "sin"),
        False,
        64,
    ),
    "paged_attention": Operands(
        CACHE, (), (), ("q", "k_cache", "metadata.block_table", "metadata.seq_lens"), ("q",), (), ("q", "k_cache", "v_cache")
    ),
    "move_cache": Operands(
        CACHE, ("sources", "destinations"), ("k_cache", "v_cache"), ("sources",), returns=False, numbers=("k_cache",)
    ),
    "sample": Operands(CHOICES, ("logits", *DRAW), (), ("logits", "temperature"), ("logits",), ("logits",), ("logits",)),
    "verify_chain": Operands(
        CHOICES,
        ("target_logits", "draft_tokens", "draft_probs", *DRAW),
        (),
        ("target_logits", "draft_probs", "seeds"),
        ("target_logits", "draft_tokens"),
        ("target_logits",),
        ("target_logits", "draft_probs"),
    ),
    "verify_tree": Operands(
        CHOICES,
        ("target_logits", "tokens", "parents", *DRAW),
        (),
        ("target_logits", "parents", "positions"),
        ("target_logits",),
        ("target_logits",),
        ("target_logits",),
    ),
    "apply_token_bitmask": Operands(LOGITS, ("logits", "bitmask"), (), ("logits", "bitmask"), ("logits",)),
    "bias_logits": Operands(
        LOGITS,
        ("logits", "positions", "entries", "tokens", "values", "until"),
        (),
        ("logits", "until"),
        ("logits",),
        (),
        ("logits", "values"),
    ),
    "penalize_logits": Operands(
        LOGITS, ("logits", "tokens", "rows", "penalties"), (), ("logits", "counts"), ("logits",), (), ("logits", "penalties")
    ),
    "count_tokens": Operands(LOGITS, ("rows", "tokens"), ("counts",), ("tokens",), returns=False),
    "truncate_logits": Operands(
        LOGITS,
        ("logits", "temperature", "top_k", "top_p", "min_p"),
        (),
        ("logits", "top_p"),
        ("logits",),
        ("logits",),
        ("logits",),
    ),
    "logprobs": Operands(LOGITS, ("logits", "tokens"), (), ("logits", "tokens"), ("logits",), ("logits",), ("logits",)),
    "gather_rows": Operands(BOOKS, ("rows",), (), ("state",), numbers=("state",)),
    "copy_rows": Operands(
        BOOKS, ("source", "out"), ("out",), ("source",), ("source", "out"), numbers=("source",), returns=False
    ),
    "scatter_rows": Operands(
        BOOKS, ("rows", "values"), ("state",), ("values",), ("values",), numbers=("values",), returns=False
    ),
    "gather_requests": Operands(
        BOOKS, (), ("found", "own.tables", "own.seeds"), ("state.tables", "rows"), ("found",), returns=False
    ),
    "gather_checked": Operands(BOOKS, ("rows", "out", "found"), ("out", "found"), ("source",), ("found",), returns=False),
    "find_nan": Operands(BOOKS, ("x", "found"), ("found",), ("x",), ("x", "found"), ("x",), returns=False),
    "place_tokens": Operands(
        BOOKS,
        ("lens", "tables", "positions", "slots", "seq_lens"),
        ("positions", "slots", "seq_lens"),
        ("lens", "tables"),
        ("positions", "slots"),
        returns=False,
    ),
    "publish_accepted": Operands(
        BOOKS,
        ("rows", "lens", "decided.0", "decided.1", "results", "own.0", "own.1"),
        ("lengths", "last_tokens", "results", "own.0"),
        ("lens", "decided.0"),
        ("results",),
        returns=False,
    ),
    "place_accepted": Operands(
        BOOKS,
        ("lens", "tokens", "accepted", "following", "last", "positions"),
        ("following", "last", "positions"),
        ("tokens",),
        returns=False,
    ),
}


def mutants() -> Iterator[Mutant]:
    for name, spec in SPECS.items():
        for fault, make in _faults(spec):
            yield Mutant(f"KernelSet.{name}", fault, BASE, 4, kernels({name: make}), spec.kind)


def _faults(spec):
    if spec.rows:
        yield f"takes {spec.many} rows and no more", _first_rows(spec.rows, spec.many)
    if spec.returns:
        yield "puts its last two rows the wrong way round", _swapped
        yield "returns memory that the next call overwrites", _scratch
        yield "gives its last row what the first one has", _repeated
    for operand in spec.written:
        yield f"writes one element behind {operand}", _beside(operand)
    for operand in spec.read[:2]:
        yield f"uses {operand} as scratch", _clobbers(operand)
    for operand in spec.strided:
        yield f"reads or writes {operand} as if it were contiguous", _packed(operand)
    for operand in spec.reduced:
        yield f"leaves out what of {operand} is behind a multiple of 32", _tail(operand, 32)
        yield f"leaves out what of {operand} is behind 512", _beyond(operand, 512)
    for operand in spec.numbers[:1]:
        yield f"takes {operand} in too narrow a dtype", _narrow(operand)


# -- operands, also those inside of tuples --------------------------------------------------------------------------------


def get(k, path):
    owner, _, inner = path.partition(".")
    value = k[owner]
    if not inner:
        return value
    return value[int(inner)] if inner.isdigit() else getattr(value, inner)


def put(k, path, value):
    owner, _, inner = path.partition(".")
    if not inner:
        return {**k, owner: value}
    old = k[owner]
    if inner.isdigit():
        return {**k, owner: tuple(value if i == int(inner) else part for i, part in enumerate(old))}
    return {**k, owner: old._replace(**{inner: value}) if hasattr(old, "_replace") else replace(old, **{inner: value})}


def each(made, change):
    if isinstance(made, tuple):
        return tuple(change(part) for part in made)
    return None if made is None else change(made)


# -- faults ---------------------------------------------------------------------------------------------------------------


def _first_rows(names, most):
    """What lies behind isn't computed: results are zero there, memory stays as it is."""

    def make(kernel):
        def first(**k):
            count = next(get(k, name).shape[0] for name in names if get(k, name) is not None)
            if count <= most:
                return kernel(**k)
            reach()
            for name in names:
                if get(k, name) is not None and get(k, name).shape[0] == count:
                    k = put(k, name, get(k, name)[:most])
            return each(kernel(**k), lambda part: part if part.shape[0] != most else _grown(part, count))

        return first

    return make


def _grown(part, count):
    import torch

    return torch.cat((part, part.new_zeros(count - part.shape[0], *part.shape[1:])))


def _swapped(kernel):
    def swapped(**k):
        def swap(part):
            if part.shape[0] < 2:
                return part
            reach()
            return part[[*range(part.shape[0] - 2), -1, -2]]

        return each(kernel(**k), swap)

    return swapped


def _scratch(kernel):
    kept = {}

    def scratch(**k):
        def into(number, part):
            reach()
            key = (number, tuple(part.shape), part.dtype, part.device)
            if key not in kept:
                kept[key] = part.clone()
            return kept[key].copy_(part)

        made = kernel(**k)
        return tuple(into(i, p) for i, p in enumerate(made)) if isinstance(made, tuple) else into(0, made)

    return scratch


def _repeated(kernel):
    def repeated(**k):
        def repeat(part):
            if part.shape[0] < 2:
                return part
            reach()
            part = part.clone()
            part[-1] = part[0]
            return part

        return each(kernel(**k), repeat)

    return repeated


def _beside(name):
    """One element behind the last, where there is memory."""

    def make(kernel):
        def beside(**k):
            operand = get(k, name)
            made = kernel(**k)
            end = (
                operand.storage_offset() + sum((n - 1) * s for n, s in zip(operand.shape, operand.stride(), strict=True)) + 1
            )
            if end < operand.untyped_storage().nbytes() // operand.element_size():
                reach()
                operand.as_strided((1,), (1,), end).fill_(1)
            return made

        return beside

    return make


def _clobbers(name):
    def make(kernel):
        def clobbers(**k):
            made = kernel(**k)
            operand = get(k, name)
            if operand is not None:
                reach()
                operand[(-1,) * operand.dim()] = 1
            return made

        return clobbers

    return make


def _packed(name):
    """Strides are ignored: rows are taken to lie one behind the other."""

    def make(kernel):
        def packed(**k):
            operand = get(k, name)
            if operand is None or operand.is_contiguous():
                return kernel(**k)
            strides, step = [], 1
            for size in reversed(operand.shape):
                strides.insert(0, step)
                step *= size
            if operand.storage_offset() + step > operand.untyped_storage().nbytes() // operand.element_size():
                return kernel(**k)
            reach()
            return kernel(**put(k, name, operand.as_strided(operand.shape, strides, operand.storage_offset())))

        return packed

    return make


def _cut(name, size_of):
    def make(kernel):
        def cut(**k):
            operand = get(k, name)
            size = operand.shape[-1]
            kept = size_of(size)
            if kept >= size or kept == 0:
                return kernel(**k)
            reach()
            operand = operand.clone()
            operand[..., kept:] = -float("inf") if "logits" in name else 0
            return kernel(**put(k, name, operand))

        return cut

    return make


def _tail(name, step):
    return _cut(name, lambda size: size - size % step)


def _beyond(name, most):
    return _cut(name, lambda size: min(size, most))


def _narrow(name):
    """The operand is rounded to bfloat16 on its way in."""

    def make(kernel):
        def narrow(**k):
            import torch

            operand = get(k, name)
            if operand is None or operand.dtype is torch.bfloat16:
                return kernel(**k)
            reach()
            rounded = operand.to(torch.bfloat16).to(operand.dtype)
            if name in ("k_cache", "v_cache"):
                operand.copy_(rounded)
                return kernel(**k)
            return kernel(**put(k, name, rounded))

        return narrow

    return make
