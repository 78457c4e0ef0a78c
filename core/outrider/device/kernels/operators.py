"""Torch operators: registration by the type hints of implementations, checks of operands, and operands read at indices.

:func:`exclude_from_dynamo` excludes functions that torch calls for an operator from the traces of torch's compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_INDEX_NAMES = frozenset({"index", "indices", "mask"})
"""Names that torch gives to tensor arguments that pick elements."""


def register_operator(
    library: torch.library.Library,
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    *,
    key: str = "CompositeExplicitAutograd",
) -> None:
    """Register an operator in ``library`` by its schema, its implementation for dispatch key ``key``, and its fake.

    The fake returns empty results. An operator without results needs none. torch unregisters an operator when its library is
    collected, so the caller's module must own the library.
    """
    name = schema.split("(", 1)[0]
    library.define(schema)
    library.impl(name, implementation, key)
    if fake is None and schema.endswith("-> ()"):
        fake = _return_nothing
    if fake is not None:
        torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)


def define_operator(
    library: torch.library.Library,
    name: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    *,
    writes: Sequence[str] = (),
    key: str = "CompositeExplicitAutograd",
) -> None:
    """Register an operator like :func:`register_operator`, with the schema of the implementation's signature.

    ``writes`` are the names of the operands that the operator writes. Raises ValueError for a signature without a schema.
    """
    schema = torch.library.infer_schema(implementation, mutates_args=writes, op_name=name)
    register_operator(library, schema.replace("SymInt", "int"), implementation, fake, key=key)


def exclude_from_dynamo(function: Any) -> None:
    """Exclude ``function``, which torch calls to run an operator, and its callees from Dynamo's traces."""
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


def _return_nothing(*operands: Any) -> None:
    del operands


def index_arguments(func: Any) -> frozenset[str]:
    """Return the names of an overload's tensor arguments that pick elements of another operand."""
    return frozenset(
        argument.name
        for argument in func._schema.arguments
        if argument.name in _INDEX_NAMES and "Tensor" in str(argument.type) and argument.alias_info is None
    )


def operands_by_index(func: Any) -> tuple[str, ...]:
    """Return the names of an overload's operands that it accesses at indices: empty for an operator without indices.

    An in-place operator writes its written operand at the indices. An operator with an in-place twin copies that operand
    whole. A backward pass reads its gradient whole. Any other operator reads its first operand at the indices; ``out=`` is
    written whole.
    """
    schema = func._schema
    namespace, name = schema.name.split("::")
    indices = index_arguments(func)
    if namespace != "aten" or not indices or name.endswith("_backward"):
        return ()
    written = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write and not a.is_out)
    if written or hasattr(torch.ops.aten, f"{name}_"):
        return written
    operands = (a.name for a in schema.arguments if str(a.type) == "Tensor" and a.name not in indices and not a.is_out)
    return tuple(operands)[:1]


def reads_no_elements(func: Any) -> bool:
    """Return True for an operator that makes a tensor like another one: it looks at the other's shape and dtype alone."""
    names = [argument.name for argument in func._schema.arguments]
    return names[:1] == ["self"] and {"layout", "device"} <= {*names} and "non_blocking" not in names


def expect(condition: bool, message: Callable[[], str]) -> None:
    """Raise RuntimeError with ``message()`` unless ``condition``, as torch's own operators do.

    torch's own function isn't used: its first call imports torch's symbolic shapes and sympy, some 500 modules, at the
    start of every process.
    """
    if not condition:
        raise RuntimeError(message())


def check_copy(source: Tensor, out: Tensor) -> None:
    """Raise unless ``source`` and ``out`` are [T, H] of one dtype: a copy would otherwise repeat or convert values."""
    expect(
        source.dim() == 2 and source.shape == out.shape and source.dtype is out.dtype,
        lambda: (
            f"copy_rows: {tuple(source.shape)} in {source.dtype} to {tuple(out.shape)} in {out.dtype}; expected two [T, H] "
            "of one dtype"
        ),
    )
