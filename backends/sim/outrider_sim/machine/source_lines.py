"""The source line that tools show: the innermost Python frame outside torch and this project."""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import cache
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

import numpy
import torch
import typing_extensions

_TORCH = os.path.dirname(torch.__file__) + os.sep
_NODES = 1 << 16
_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_NUMPY = os.path.dirname(numpy.__file__) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = sysconfig.get_path("purelib") + os.sep
_PARTS = tuple(os.sep.join(("", *parts, "")) for parts in (("outrider", "device"), ("triton", "runtime"), ("outrider_vllm",)))
_CONSTRUCTORS = os.path.join("outrider_sanitizer", "observation", "host_arrays.py")
_MODES = ("__torch_function__", "__torch_dispatch__")
"""What torch calls on the way to an operator, in whoever's file: the line that matters is further out."""


@cache
def _inside(code: CodeType) -> bool:
    name = code.co_filename
    if name.startswith(_STANDARD) and not name.startswith(_PACKAGES):
        return "site-packages" not in name
    return (
        name.startswith((_TORCH, _HERE, _NUMPY, typing_extensions.__file__, "<"))
        or code.co_name in _MODES
        or name.endswith(_CONSTRUCTORS)
        or any(part in name for part in _PARTS)
    )


@cache
def _line(code: CodeType, number: int) -> str:
    return f"{code.co_filename}:{number}"


def python_line() -> str:
    """Return `file:line` of the running code, or an empty string if every frame is inside torch or this project."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _inside(frame.f_code):
            return _line(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return ""


class SourceLines:
    """Source lines of operations. A backward operation has the line of the forward operation that created its autograd node.

    Torch numbers autograd nodes in creation order and creates an operator's node right before it runs the operator.
    """

    def __init__(self) -> None:
        self._of_nodes: dict[int, tuple[int, str]] = {}

    def now(self) -> str:
        """Return `file:line` of the operator call that torch is running."""
        if torch._C._current_graph_task_id() != -1:
            node: Any = torch._C._current_autograd_node()
            known = self._of_nodes.get(node._sequence_nr()) if node is not None else None
            if known is not None:
                return known[1]
            return python_line()
        line = python_line()
        if line and torch.is_grad_enabled():
            number = torch._C._autograd._get_sequence_nr() - 1
            thread = get_ident()
            known = self._of_nodes.get(number)
            if known is None or known[0] != thread:
                if len(self._of_nodes) > _NODES:
                    for old in list(self._of_nodes)[: _NODES // 2]:
                        del self._of_nodes[old]
                self._of_nodes[number] = (thread, line)
        return line
