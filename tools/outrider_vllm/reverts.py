"""Orderings of vLLM that can be taken out of the running program, one at a time, without a change to its files.

A call that makes an order is skipped where it's made from one function of one file of vLLM. So a merged fix can be undone,
and the sanitizer asked whether it misses it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outrider_sim.tensor import SimTensor
from outrider_sim.torch_module import Event, Stream


@dataclass(frozen=True, kw_only=True)
class Revert:
    """One ordering: the call, and where it's made."""

    name: str
    fix: str
    """vLLM's pull request that added it, or why it is here."""
    owner: type
    call: str
    file: str
    function: str
    last: bool = False
    """Only the last such call of the function."""


REVERTS = (
    Revert(name="offload-store-waits", fix="vLLM #46278", owner=Stream, call="wait_event",
           file="simple_kv_offload/copy_backend.py", function="_copy_loop"),
    Revert(name="output-copy-waits", fix="planted", owner=Stream, call="wait_stream",
           file="worker/gpu/async_utils.py", function="__init__"),
    Revert(name="output-is-awaited", fix="planted, the kind of #36013", owner=Event, call="synchronize",
           file="worker/gpu/async_utils.py", function="get_output"),
    Revert(name="bitmask-is-read-first", fix="vLLM #33059", owner=Stream, call="wait_stream",
           file="worker/gpu/structured_outputs.py", function="apply_grammar_bitmask", last=True),
    Revert(name="bitmask-is-copied", fix="planted", owner=Stream, call="wait_stream",
           file="worker/gpu/structured_outputs.py", function="apply_grammar_bitmask"),
    Revert(name="drafts-are-kept", fix="planted", owner=SimTensor, call="record_stream",
           file="worker/gpu/spec_decode/utils.py", function="set_draft_tokens"),
)  # fmt: skip


def apply(revert: Revert) -> Callable[[], int]:
    """Take an ordering out of this process; the result says how many calls were skipped, so that none isn't a proof."""
    before: Any = getattr(revert.owner, revert.call)
    skipped = 0

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal skipped
        frame = sys._getframe(1)
        here = frame.f_code.co_filename.endswith(revert.file) and frame.f_code.co_name == revert.function
        if here and (not revert.last or frame.f_lineno >= _last_line(frame.f_code, revert.call)):
            skipped += 1
            return None
        return before(self, *args, **kwargs)

    setattr(revert.owner, revert.call, call)
    return lambda: skipped


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
