"""Triton's interpreter, in a third of its time."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any


def spare_repeated_work() -> None:
    """Spare Triton's interpreter work whose result it has or does not use.

    Triton patches its language for each call of a function inside a kernel, which the launch has already patched. For each
    operation, Triton makes the types of its result anew, broadcasts operands of one shape to this shape, and computes a sum
    of 32-bit integers in 64 bits, too, for an assertion that only the option ``debug`` turns on.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        return
    language, patch, find_dtype = interpreter.tl, interpreter._patch_lang, interpreter._get_np_dtype
    dtypes: dict[str, Any] = {}

    @functools.cache
    def used_by(fn: Callable[..., Any]) -> list[Any]:
        return [module for module in (language, language.core) if any(each is module for each in fn.__globals__.values())]

    def patch_once(fn: Callable[..., Any]) -> object:
        is_patched = used_by(fn) and not any(language.core.is_builtin(module.load) for module in used_by(fn))
        return interpreter._LangPatchScope() if is_patched else patch(fn)

    def dtype_of(found: Any) -> Any:
        if found.name not in dtypes:
            dtypes[found.name] = find_dtype(found)
        return dtypes[found.name]

    tensor, block_type, semantic = language.core.tensor, language.core.block_type, interpreter.interpreter_semantic
    init_tensor, init_type, broadcast = tensor.__init__, block_type.__init__, semantic.broadcast_impl_value
    types: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def init_tensor_once(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type = handle, type
        if "of_tensors" not in vars(type):
            init_tensor(self, handle, type)
            type.of_tensors = self.shape, self.numel, self.dtype
        self.shape, self.numel, self.dtype = type.of_tensors

    def init_type_once(self: Any, element: Any, shape: Any) -> None:
        key = (id(element), *shape)
        if key not in types:
            init_type(self, element, shape)
            types[key] = element, self.shape, self.numel, self.name
        self.element_ty, self.shape, self.numel, self.name = types[key]

    def broadcast_once(left: Any, right: Any) -> tuple[Any, Any]:
        is_same = left.type.is_block() and right.type.is_block() and left.type.shape == right.type.shape
        return (left, right) if is_same else broadcast(left, right)

    tensor.__init__, block_type.__init__, semantic.broadcast_impl_value = init_tensor_once, init_type_once, broadcast_once
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, dtype_of
