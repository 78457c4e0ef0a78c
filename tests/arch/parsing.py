"""Parsed modules: several rules look through the same files."""

from __future__ import annotations

import ast
import functools


@functools.cache
def parsed(source: str) -> ast.Module:
    """Return the tree of a module, which no rule changes."""
    return ast.parse(source)


@functools.cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Return every node of a module, as `ast.walk` does: a dozen rules look through them."""
    return tuple(ast.walk(parsed(source)))
