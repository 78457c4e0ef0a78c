"""Elementwise kernels in OpenCL C, generated from an operator and its dtypes.

Outside of captures torch computes these operators in native kernels, which no command buffer can hold. In a capture they
become kernels of this module. The results are those of torch: arithmetic in float32 or wider, rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

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


class Elementwise(NamedTuple):
    """One launch: the kernel's source, the number of elements and the arguments."""

    source: str
    size: int
    arguments: tuple[Any, ...]


def elementwise_launch(name: str, result: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Elementwise | None:
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
    return Elementwise(source, result.numel(), (result, *operands, *shape[1:], *strides))


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
