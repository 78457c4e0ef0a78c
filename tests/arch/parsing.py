"""Parsed modules: several rules look through the same files."""

from __future__ import annotations

import ast
import functools


@functools.cache
def parsed(source: str) -> ast.Module:
    """Return the tree of a module, which no rule changes."""
    return ast.parse(source)
