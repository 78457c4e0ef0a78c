"""Triton's interpreter, in two thirds of its time."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any


def spare_repeated_work() -> None:
    """Patch Triton's language once for each launch, and make the table of numpy's types once.

    Triton does the first again for each call of a function inside of a kernel, which finds the language as the launch has
    patched it, and the second for each operation.
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

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, dtype_of
