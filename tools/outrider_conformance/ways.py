"""Find out if an override that leaves every call to the overridden method has a path of its own.

An override that only passes calls on has no path of its own: the reference runs, and that is what a report says. One that
has a path of its own which never ran is a device of which nothing was shown. The two are told apart by the source of the
functions that left the calls, and by the lines of it that ran.
"""

from __future__ import annotations

import ast
import linecache
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

_NO_WAY = (ast.Raise, ast.Assert, ast.ExceptHandler, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Pass)
"""What refuses a call, or only defines."""


class Ways:
    """Filled by every thread: the functions that left calls of a kernel, by any key, and the lines of them that ran."""

    def __init__(self) -> None:
        self._leaving: dict[tuple[str, str], set[CodeType]] = {}
        self._unread: set[tuple[str, str]] = set()
        self._ran: dict[CodeType, set[int]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def traced(self, package: str) -> Generator[None]:
        """Note the lines of ``package`` that the calling thread runs inside. Other tracing continues afterwards."""
        with _tracing(self._tracer(package)):
            yield

    @contextmanager
    def paused(self) -> Generator[None]:
        """Ignore the lines that run inside the scope."""
        with _tracing(None):
            yield

    def left(self, key: tuple[str, str], frame: FrameType | None, package: str, end: CodeType) -> None:
        """The functions of ``package`` between ``frame`` and that of ``end`` left a call."""
        found = set()
        while frame is not None and frame.f_code is not end:
            if _package_of(frame) == package:
                found.add(frame.f_code)
            frame = frame.f_back
        with self._lock:
            self._leaving.setdefault(key, set()).update(found)
            if not found:
                self._unread.add(key)

    def other(self, key: tuple[str, str]) -> str:
        """The first line that could have done otherwise, as ``file.py:12``; empty where there is none."""
        with self._lock:
            if key in self._unread:
                return "a function that isn't of Python"
            for code in sorted(self._leaving.get(key, ()), key=lambda code: (code.co_filename, code.co_firstlineno)):
                line = _unrun(code, self._ran.get(code, set()))
                if line is not None:
                    return f"{code.co_filename}:{line}"
        return ""

    def _tracer(self, package: str) -> Any:
        def called(frame: FrameType, event: str, value: Any) -> Any:
            del event, value
            return on_line if _package_of(frame) == package else None

        def on_line(frame: FrameType, event: str, value: Any) -> Any:
            del event, value
            with self._lock:
                self._ran.setdefault(frame.f_code, set()).add(frame.f_lineno)
            return on_line

        return called


@contextmanager
def _tracing(tracer: Any) -> Generator[None]:
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        yield
    finally:
        sys.settrace(before)


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _unrun(code: CodeType, ran: set[int]) -> int | None:
    """The first statement of a function that never ran, or that chooses within a line; None: there is none."""
    function = _source(code)
    if function is None:
        return code.co_firstlineno
    for node in _inside(function):
        if isinstance(node, ast.IfExp | ast.BoolOp) and _asks_super(node):
            return node.lineno
        if not isinstance(node, ast.stmt) or hasattr(node, "body") or hasattr(node, "cases") or _is_text(node):
            continue
        if not ran & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)):
            return node.lineno
    return None


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _NO_WAY):
            yield child
            yield from _inside(child)


def _asks_super(node: ast.AST) -> bool:
    return any(
        isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == "super" for each in ast.walk(node)
    )


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _source(code: CodeType) -> ast.FunctionDef | None:
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    return None
