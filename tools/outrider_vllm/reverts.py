"""Orderings of vLLM that can be taken out of the running engine, one at a time, without a change to its files.

Most are a call that is skipped where it's made from one function of one file of vLLM; the others put the code of before a fix
back. So a merged fix can be undone, and the sanitizer asked whether it misses it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from outrider_sim.tensor import SimTensor
from outrider_sim.torch_module import SimTorchEvent, SimTorchStream


@dataclass(frozen=True, kw_only=True)
class Revert:
    """One ordering."""

    name: str
    fix: str
    """vLLM's pull request that added it, or why it is here."""
    apply: Callable[[Any], Callable[[], int]]
    """Takes it out of an engine that is made and hasn't run; the result says how often it was left out: none is no proof."""


def _call(owner: type, call: str, file: str, function: str, *, last: bool = False) -> Callable[[Any], Callable[[], int]]:
    """Skip `owner.call` where `function` of `file` calls it; `last`: only the last such call of the function."""

    def apply(engine: Any) -> Callable[[], int]:
        del engine
        before: Any = getattr(owner, call)
        skipped = 0

        def instead(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal skipped
            frame = sys._getframe(1)
            here = frame.f_code.co_filename.endswith(file) and frame.f_code.co_name == function
            if here and (not last or frame.f_lineno >= _last_line(frame.f_code, call)):
                skipped += 1
                return None
            return before(self, *args, **kwargs)

        setattr(owner, call, instead)
        return lambda: skipped

    return apply


def _free_at_once(engine: Any) -> Callable[[], int]:
    """The scheduler gives a request's blocks back at once, while a step that was issued may still use them."""
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    before = scheduler._free_request_blocks if hasattr(scheduler, "_free_request_blocks") else scheduler._free_blocks
    count = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return before(*args, **kwargs)

    setattr(scheduler, before.__name__, counted)
    scheduler.defer_block_free = False
    return lambda: count


def _one_buffer_of_ids(engine: Any) -> Callable[[], int]:
    """The ids of blocks to be zeroed go through one pinned buffer, which is written again while a copy may still read it."""
    del engine
    import vllm.v1.worker.utils as utils

    buffers: dict[str, torch.Tensor] = {}
    count = 0

    def through_one_buffer(data: Any, *, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        nonlocal count
        if not buffers:
            buffers["host"] = torch.empty(64, dtype=dtype, pin_memory=True)
            buffers["device"] = torch.empty(64, dtype=dtype, device=device)
        size = len(data)
        buffers["host"][:size] = torch.tensor(data, dtype=dtype)
        count += 1
        return buffers["device"][:size].copy_(buffers["host"][:size], non_blocking=True)

    vendor: Any = utils
    vendor.async_tensor_h2d = through_one_buffer
    return lambda: count


REVERTS = (
    Revert(name="offload-store-waits", fix="vLLM #46278",
           apply=_call(SimTorchStream, "wait_event", "simple_kv_offload/copy_backend.py", "_copy_loop")),
    Revert(name="blocks-are-freed-late", fix="vLLM #45357", apply=_free_at_once),
    Revert(name="ids-have-own-buffers", fix="vLLM #48085, as #48399 has it", apply=_one_buffer_of_ids),
    Revert(name="counts-are-awaited", fix="vLLM #36013",
           apply=_call(SimTorchEvent, "synchronize", "worker/gpu_model_runner.py", "_prepare_inputs")),
    Revert(name="inputs-are-awaited", fix="vLLM #25279, of the kind of #31841",
           apply=_call(SimTorchEvent, "synchronize", "worker/gpu_model_runner.py", "synchronize_input_prep")),
    Revert(name="output-copy-waits", fix="planted",
           apply=_call(SimTorchStream, "wait_stream", "worker/gpu/async_utils.py", "__init__")),
    Revert(name="output-is-awaited", fix="planted, the kind of #36013",
           apply=_call(SimTorchEvent, "synchronize", "worker/gpu/async_utils.py", "get_output")),
    Revert(name="bitmask-is-read-first", fix="vLLM #33059",
           apply=_call(SimTorchStream, "wait_stream", "worker/gpu/structured_outputs.py", "apply_grammar_bitmask",
                       last=True)),
    Revert(name="bitmask-is-copied", fix="planted",
           apply=_call(SimTorchStream, "wait_stream", "worker/gpu/structured_outputs.py", "apply_grammar_bitmask")),
    Revert(name="drafts-are-kept", fix="planted",
           apply=_call(SimTensor, "record_stream", "worker/gpu/spec_decode/utils.py", "set_draft_tokens")),
)  # fmt: skip


def _last_line(code: Any, name: str) -> int:
    """The line of the last use of a name in a function."""
    import dis

    lines = [0]
    line = 0
    for instruction in dis.get_instructions(code):
        line = instruction.starts_line or line
        if instruction.argval == name:
            lines.append(line)
    return max(lines)
