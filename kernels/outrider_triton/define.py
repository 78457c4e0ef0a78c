"""Registration of operators in the namespace ``outrider``, and the library that owns them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# torch unregisters an operator when its Library is collected, so this module must own it.
_LIBRARY = torch.library.Library("outrider", "FRAGMENT")


def define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register an operator by its schema, its implementation and a fake that returns empty results."""
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"outrider::{name}", fake, lib=_LIBRARY)
