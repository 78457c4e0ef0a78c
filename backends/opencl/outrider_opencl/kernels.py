"""OpenCLKernels: bookkeeping and elementwise operators in OpenCL C; the other kernels are the torch references.

Each reference kernel is one native kernel. Outside of captures torch also computes elementwise operators in native kernels,
which no command buffer can hold. In a capture they become kernels whose OpenCL C is generated from the operator and its
dtypes. The results are those of torch: arithmetic in float32 or wider, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from outrider.device import InterfaceError, KernelSet, RequestInputs, RequestRows
from outrider_opencl.queueing import OVERLOAD

if TYPE_CHECKING:
    from outrider_opencl.backend import OpenCLBackend


class Launch(NamedTuple):
    """The range and the arguments of one launch: tensors are passed as pointers, integers as ``long``."""

    size: int
    arguments: tuple[Any, ...]
    source: str = ""
    """The generated source of an elementwise kernel; other kernels are in ``bookkeeping.cl``."""


_MAX_DIMS = 4
_FLOATS: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float64: "double", torch.float32: "float", torch.float16: "half", torch.bfloat16: "ushort"}
)
_INTEGERS: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.int64: "long",
        torch.int32: "int",
        torch.int16: "short",
        torch.int8: "char",
        torch.uint8: "uchar",
        torch.bool: "uchar",
    }
)
_RAW: Mapping[int, str] = MappingProxyType({1: "uchar", 2: "ushort", 4: "uint", 8: "ulong"})
"""Unsigned OpenCL type by size in bytes, for copies that preserve every bit."""
_LOADS: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float16: "vload_half({at}, {name})", torch.bfloat16: "as_float((uint){name}[{at}] << 16)"}
)
_STORES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float16: "vstore_half_rte({value}, {at}, out)",
        torch.bfloat16: "out[{at}] = to_bfloat16({value})",
        torch.bool: "out[{at}] = ({value}) != 0",
    }
)
_EXPRESSIONS: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("copy_", "clone", "_to_copy", "fill_", "full", "full_like", "zero_", "zeros", "zeros_like"), "a")
    | {"add": "a + b", "add_": "a + b", "mul": "a * b", "mul_": "a * b", "sub": "a - b", "sub_": "a - b"}
)
_CONSTANTS: Mapping[str, float] = MappingProxyType({"zero_": 0, "zeros": 0, "zeros_like": 0})
_SECOND_IS_VALUE = frozenset({"copy_", "fill_", "full", "full_like"})
"""Operators whose value is their second argument; the first is the target tensor or a shape."""

_SOURCE = """
static ushort to_bfloat16(float x) {{
    uint bits = as_uint(x);
    return isnan(x) ? (ushort)0x7fc0 : (ushort)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}}
kernel void elementwise(global {out_type} *out, {a_declaration}, {b_declaration}, long n1, long n2, long n3,
                        {strides}) {{
    long i = get_global_id(0), i3 = i % n3, i2 = i / n3 % n2, i1 = i / (n3 * n2) % n1, i0 = i / (n3 * n2 * n1);
    {compute} a = {a_value}, b = {b_value};
    {store};
}}
"""


def elementwise_launch(name: str, result: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Launch | None:
    """Return the launch that computes the operator ``name`` into ``result``, or None if no kernel computes the operator."""
    expression = _EXPRESSIONS.get(name)
    operands = _operands(name, args, kwargs)
    if expression is None or operands is None or result.dim() > _MAX_DIMS or not _fits(result, operands):
        return None
    tensors = [each for each in operands if isinstance(each, Tensor)]
    dtypes = [result.dtype, *(each.dtype for each in tensors)]
    is_copy = expression == "a" and bool(tensors) and tensors[0].dtype == result.dtype
    if not is_copy and any(dtype not in _FLOATS and dtype not in _INTEGERS for dtype in dtypes):
        return None
    raw = _RAW.get(result.dtype.itemsize)
    if is_copy and raw is None:
        return None
    compute = (raw or "") if is_copy else _compute_type(dtypes, operands)
    declared = [_declaration(letter, each, raw if is_copy else None) for letter, each in zip("ab", operands, strict=True)]
    store = "out[{at}] = ({type})({value})" if is_copy else _STORES.get(result.dtype, "out[{at}] = ({type})({value})")
    out_type = (raw or "") if is_copy else _type_of(result.dtype)
    source = _SOURCE.format(
        out_type=out_type,
        a_declaration=declared[0],
        b_declaration=declared[1],
        strides=", ".join(f"long {name}{axis}" for name in "oab" for axis in range(_MAX_DIMS)),
        compute=compute,
        a_value=_value("a", operands[0], raw=is_copy),
        b_value=_value("b", operands[1], raw=is_copy),
        store=store.format(at=_index("o"), type=out_type, value=expression),
    )
    shape = [1] * (_MAX_DIMS - result.dim()) + list(result.shape)
    views = [result, *(each.expand(result.shape) if isinstance(each, Tensor) else None for each in operands)]
    strides = [stride for view in views for stride in _padded_strides(view)]
    return Launch(result.numel(), (result, *operands, *shape[1:], *strides), source)


def _operands(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Return the two operands, of which the second is 0 if the operator has one; None if they can't be computed."""
    if kwargs.get("alpha", 1) != 1 or len(args) > 2:
        return None
    if name in _CONSTANTS:
        return _CONSTANTS[name], 0
    if name in _SECOND_IS_VALUE:
        return args[1], 0
    return args[0], args[1] if len(args) > 1 else 0


def _fits(result: Tensor, operands: tuple[Any, Any]) -> bool:
    """Return True if numbers are real and tensors can be expanded to the result."""
    for each in operands:
        if isinstance(each, Tensor):
            if torch.broadcast_shapes(each.shape, result.shape) != result.shape:
                return False
        elif not isinstance(each, bool | int | float):
            return False
    return True


def _compute_type(dtypes: list[torch.dtype], operands: tuple[Any, Any]) -> str:
    if torch.float64 in dtypes:
        return "double"
    has_float = any(dtype in _FLOATS for dtype in dtypes) or any(isinstance(each, float) for each in operands)
    return "float" if has_float else "long"


def _type_of(dtype: torch.dtype) -> str:
    return _FLOATS.get(dtype) or _INTEGERS[dtype]


def _declaration(letter: str, operand: Any, raw: str | None) -> str:
    if isinstance(operand, Tensor):
        return f"global const {raw or _type_of(operand.dtype)} *{letter}p"
    return f"{'double' if isinstance(operand, float) else 'long'} {letter}p"


def _index(letter: str) -> str:
    return " + ".join(f"i{axis} * {letter}{axis}" for axis in range(_MAX_DIMS))


def _value(letter: str, operand: Any, *, raw: bool) -> str:
    if not isinstance(operand, Tensor):
        return f"{letter}p"
    load = "{name}[{at}]" if raw else _LOADS.get(operand.dtype, "{name}[{at}]")
    return load.format(name=f"{letter}p", at=_index(letter))


def _padded_strides(view: Tensor | None) -> list[int]:
    if view is None:
        return [0] * _MAX_DIMS
    return [0] * (_MAX_DIMS - view.dim()) + list(view.stride())


def _row_bytes(tensor: Tensor) -> int:
    return tensor[0].numel() * tensor.itemsize if tensor.shape[0] else 0


def _gather_rows(state: Tensor, rows: Tensor, gathered: Tensor) -> Launch:
    return Launch(rows.shape[0], (state, rows, gathered, _row_bytes(state)))


def _scatter_rows(state: Tensor, rows: Tensor, values: Tensor) -> Launch:
    return Launch(rows.shape[0], (state, rows, values, _row_bytes(state)))


def _copy_rows(source: Tensor, out: Tensor) -> Launch:
    size = source.itemsize
    return Launch(source.shape[0], (source, out, source.shape[1] * size, source.stride(0) * size, out.stride(0) * size))


def _gather_requests(*operands: Any) -> Launch:
    rows, tables, found = operands[0], operands[6], operands[-1]
    return Launch(rows.shape[0], (*operands, tables.shape[1], found.shape[1], found.stride(0)))


def _place_tokens(*operands: Any) -> Launch:
    lens, tables, *_, positions, slots, seq_lens = operands
    strides = [stride for each in (positions, slots, seq_lens) for stride in each.stride()]
    return Launch(lens.shape[0], (*operands, tables.shape[1], positions.shape[1], seq_lens.shape[1], *strides))


def _publish_accepted(rows: Tensor, *operands: Any) -> Launch:
    *others, pending = operands  # of a pointer that isn't read, `rows` takes the place
    held = rows if pending is None else pending
    return Launch(rows.shape[0], (rows, *others, held, int(pending is not None), others[1].shape[1], others[5].stride(0)))


def _place_accepted(*operands: Any) -> Launch:
    return Launch(operands[0].shape[0], (*operands, operands[1].shape[1]))


def _verify_chain(logits: Tensor, drafts: Tensor, *operands: Any) -> Launch:
    results = operands[-2:]  # after the probabilities, temperatures, seeds and positions, which only sampling needs
    return Launch(drafts.shape[0], (logits, drafts, *results, drafts.shape[1], logits.shape[-1]))


LAUNCHES: Mapping[str, Callable[..., Launch]] = MappingProxyType(
    {
        "gather_rows": _gather_rows,
        "scatter_rows": _scatter_rows,
        "copy_rows": _copy_rows,
        "gather_requests": _gather_requests,
        "place_tokens": _place_tokens,
        "publish_accepted": _publish_accepted,
        "place_accepted": _place_accepted,
        "verify_chain": _verify_chain,
    }
)
"""Kernels of ``bookkeeping.cl`` by name, each with the function that derives the launch from operands and results."""

# torch unregisters an operator when its Library is collected, so this module must own it.
_LIBRARY = torch.library.Library("outrider", "FRAGMENT")


def _define_overload(name: str) -> None:
    """Register the overload of the operator ``name`` that stands for the OpenCL kernel, with the operator's schema."""
    default = getattr(torch.ops.outrider, name).default
    overload = f"{name}.{OVERLOAD}"

    def outside_of_scopes(*operands: Any) -> Any:
        del operands
        raise InterfaceError(
            f"kernel {name!r} of backend 'opencl' was called outside of every scope; open Backend.on(stream)"
        )

    _LIBRARY.define(str(default._schema).replace(f"outrider::{name}", overload, 1))
    _LIBRARY.impl(overload, outside_of_scopes, "CompositeExplicitAutograd")
    torch.library.register_fake(f"outrider::{overload}", lambda *operands: default(*operands), lib=_LIBRARY)


for _name in LAUNCHES:
    _define_overload(_name)


class OpenCLKernels(KernelSet):
    """Bookkeeping kernels in OpenCL C. They compute contiguous operands in shared memory and leave others to torch."""

    name = "opencl"

    def __init__(self, backend: OpenCLBackend) -> None:
        self._owns = backend.memory.owns

    def _has_kernel(self, *operands: Tensor, strided: tuple[Tensor, ...] = ()) -> bool:
        return all(each.is_contiguous() and self._owns(each) for each in operands) and all(map(self._owns, strided))

    def gather_rows(self, state: Tensor, rows: Tensor) -> Tensor:
        """Copy rows, one work item per row."""
        if not self._has_kernel(state, rows):
            return super().gather_rows(state, rows)
        return torch.ops.outrider.gather_rows.opencl(state, rows)  # type: ignore[no-any-return]

    def scatter_rows(self, state: Tensor, rows: Tensor, values: Tensor) -> None:
        """Write rows, one work item per row."""
        if not self._has_kernel(state, rows, values):
            super().scatter_rows(state, rows, values)
            return
        torch.ops.outrider.scatter_rows.opencl(state, rows, values)

    def copy_rows(self, source: Tensor, out: Tensor) -> None:
        """Copy rows between pitches, one work item per row."""
        strided = (source, out)
        if source.dim() != 2 or any(each.stride(1) != 1 for each in strided) or not self._has_kernel(strided=strided):
            super().copy_rows(source, out)
            return
        torch.ops.outrider.copy_rows.opencl(source, out)

    def gather_requests(
        self, rows: Tensor, lens: Tensor, state: RequestRows, own: RequestInputs, found: Tensor, *, lens_by_row: bool
    ) -> None:
        """Copy the requests' rows of ``state`` to ``own``, one work item per request; without a kernel by the reference."""
        if not self._has_kernel(rows, lens, *state, *own, strided=(found,)) or found.stride(1) != 1:
            super().gather_requests(rows, lens, state, own, found, lens_by_row=lens_by_row)
            return
        torch.ops.outrider.gather_requests.opencl(rows, lens, lens_by_row, *state, *own, found)

    def place_tokens(
        self, lens: Tensor, tables: Tensor, page_size: int, last: int, positions: Tensor, slots: Tensor, seq_lens: Tensor
    ) -> None:
        """Compute positions, slots and lengths, one work item per request."""
        if not self._has_kernel(lens, tables, strided=(positions, slots, seq_lens)):
            super().place_tokens(lens, tables, page_size, last, positions, slots, seq_lens)
            return
        torch.ops.outrider.place_tokens.opencl(lens, tables, page_size, last, positions, slots, seq_lens)

    def publish_accepted(
        self,
        rows: Tensor,
        lens: Tensor,
        decided: tuple[Tensor, Tensor],
        lengths: Tensor,
        last_tokens: Tensor,
        results: Tensor,
        own: tuple[Tensor, Tensor],
        pending: Tensor | None = None,
    ) -> None:
        """Publish tokens and lengths, one work item per request."""
        dense = (rows, lens, *decided, lengths, last_tokens, *own, *(() if pending is None else (pending,)))
        if not self._has_kernel(*dense, strided=(results,)) or results.stride(1) != 1:
            super().publish_accepted(rows, lens, decided, lengths, last_tokens, results, own, pending)
            return
        torch.ops.outrider.publish_accepted.opencl(rows, lens, *decided, lengths, last_tokens, results, *own, pending)

    def place_accepted(
        self, lens: Tensor, tokens: Tensor, accepted: Tensor, following: Tensor, last: Tensor, positions: Tensor
    ) -> None:
        """Compute the inputs of draft-extend, one work item per request."""
        operands = (lens, tokens, accepted, following, last, positions)
        if not self._has_kernel(*operands):
            super().place_accepted(*operands)
            return
        torch.ops.outrider.place_accepted.opencl(*operands)

    def verify_chain(
        self,
        target_logits: Tensor,
        draft_tokens: Tensor,
        draft_probs: Tensor | None,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Accept greedily, one work item per request. Batches in which a request samples are left to torch."""
        operands = (target_logits, draft_tokens, draft_probs, temperature, seeds, positions)
        is_greedy = draft_probs is None and target_logits.dtype == torch.float32
        if not is_greedy or not self._has_kernel(target_logits, draft_tokens):
            return super().verify_chain(*operands)
        return torch.ops.outrider.verify_chain.opencl(*operands)  # type: ignore[no-any-return]
