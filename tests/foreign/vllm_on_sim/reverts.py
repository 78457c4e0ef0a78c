"""Reverts of vLLM's stream orderings. Each revert removes one ordering from a running engine, without changing vLLM's files.

Most reverts skip a call that one function of one file makes. The others restore the code before a fix. A run with a revert
shows whether the sanitizer reports the missing ordering.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from outrider_sim.torch_device.tensor import SimTensor
from outrider_sim.torch_device.torch_module import SimTorchEvent, SimTorchStream


@dataclass(frozen=True, kw_only=True)
class Revert:
    """A revert: the removal of one ordering from an engine."""

    name: str
    fix: str
    """vLLM's pull request that added the ordering, or `planted` for an ordering that vLLM always had."""
    apply: Callable[[Any], Callable[[], int]]
    """The function that removes the ordering from an engine that hasn't run. The function that it returns counts how often
    the ordering was left out: a run with the count 0 proves nothing.
    """


def _skip_call(
    owner: type, method: str, file: str, function: str, *, last: bool = False
) -> Callable[[Any], Callable[[], int]]:
    """Return a revert that skips `owner.method` if `function` of `file` calls it. `last`: only the function's last call."""

    def apply(engine: Any) -> Callable[[], int]:
        del engine
        original: Any = getattr(owner, method)
        num_skipped = 0

        def skip_or_call(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal num_skipped
            frame = sys._getframe(1)
            is_caller = frame.f_code.co_filename.endswith(file) and frame.f_code.co_name == function
            if is_caller and (not last or frame.f_lineno >= _last_line(frame.f_code, method)):
                num_skipped += 1
                return None
            return original(self, *args, **kwargs)

        setattr(owner, method, skip_or_call)
        return lambda: num_skipped

    return apply


def _free_blocks_at_once(engine: Any) -> Callable[[], int]:
    """Make the scheduler free a finished request's blocks at once, while a step in flight may still use them."""
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    original = scheduler._free_request_blocks if hasattr(scheduler, "_free_request_blocks") else scheduler._free_blocks
    count = 0

    def free_and_count(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return original(*args, **kwargs)

    setattr(scheduler, original.__name__, free_and_count)
    scheduler.defer_block_free = False
    return lambda: count


def _share_block_id_buffer(engine: Any) -> Callable[[], int]:
    """Copy the ids of blocks to zero through one pinned buffer. The host rewrites it while a copy may still read it."""
    del engine
    import vllm.v1.worker.utils as utils

    buffers: dict[str, torch.Tensor] = {}
    count = 0

    def copy_through_buffer(data: Any, *, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        nonlocal count
        if not buffers:
            buffers["host"] = torch.empty(64, dtype=dtype, pin_memory=True)
            buffers["device"] = torch.empty(64, dtype=dtype, device=device)
        size = len(data)
        buffers["host"][:size] = torch.tensor(data, dtype=dtype)
        count += 1
        return buffers["device"][:size].copy_(buffers["host"][:size], non_blocking=True)

    module: Any = utils
    module.async_tensor_h2d = copy_through_buffer
    return lambda: count


REVERTS = (
    Revert(name="offload-store-waits", fix="vLLM #46278",
           apply=_skip_call(SimTorchStream, "wait_event", "simple_kv_offload/copy_backend.py", "_copy_loop")),
    Revert(name="blocks-are-freed-late", fix="vLLM #45357", apply=_free_blocks_at_once),
    Revert(name="ids-have-own-buffers", fix="vLLM #48085, as #48399 has it", apply=_share_block_id_buffer),
    Revert(name="counts-are-awaited", fix="vLLM #36013",
           apply=_skip_call(SimTorchEvent, "synchronize", "worker/gpu_model_runner.py", "_prepare_inputs")),
    Revert(name="inputs-are-awaited", fix="vLLM #25279, of the kind of #31841",
           apply=_skip_call(SimTorchEvent, "synchronize", "worker/gpu_model_runner.py", "synchronize_input_prep")),
    Revert(name="output-copy-waits", fix="planted",
           apply=_skip_call(SimTorchStream, "wait_stream", "worker/gpu/async_utils.py", "__init__")),
    Revert(name="output-is-awaited", fix="planted, the kind of #36013",
           apply=_skip_call(SimTorchEvent, "synchronize", "worker/gpu/async_utils.py", "get_output")),
    Revert(name="bitmask-is-read-first", fix="vLLM #33059",
           apply=_skip_call(SimTorchStream, "wait_stream", "worker/gpu/structured_outputs.py", "apply_grammar_bitmask",
                            last=True)),
    Revert(name="bitmask-is-copied", fix="planted",
           apply=_skip_call(SimTorchStream, "wait_stream", "worker/gpu/structured_outputs.py", "apply_grammar_bitmask")),
    Revert(name="drafts-are-kept", fix="planted",
           apply=_skip_call(SimTensor, "record_stream", "worker/gpu/spec_decode/utils.py", "set_draft_tokens")),
)  # fmt: skip


def _last_line(code: Any, name: str) -> int:
    """Return the line of the last use of `name` in a function's code."""
    import dis

    lines = [0]
    line = 0
    for instruction in dis.get_instructions(code):
        line = instruction.starts_line or line
        if instruction.argval == name:
            lines.append(line)
    return max(lines)
