"""Registration of torch operators whose schemas follow from the type hints of their implementations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


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


def _return_nothing(*operands: Any) -> None:
    del operands
