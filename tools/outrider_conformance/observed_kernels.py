"""Observe which kernels answer the calls of the engine: the device's own, or the references."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from outrider.device import Backend, StepMode
from outrider.engine.prefill import Prefill
from outrider.engine.stages import DraftStage, Extend, Verify
from outrider_conformance import engines
from outrider_conformance.kernel_calls import IN_A_GRAPH, KernelCalls, counting
from outrider_conformance.random_kernels.kernels import KERNELS as DRAWN
from outrider_conformance.random_kernels.kernels import corners

if TYPE_CHECKING:
    from outrider_conformance.kit import Kit

USES = ("prefill", "draft", "decode", "verify", "extend")
"""Purposes of the engine's attention calls. decode is a verification without draft tokens."""
ALONE = "alone"
"""The use of a call that the kit makes itself, outside the engine."""


def modes_of(backend: Backend) -> tuple[str, ...]:
    """Return the engine modes that the backend's policy allows. ``graphs``: staged mode, replayed from graphs."""
    sync, has = backend.speculative_sync, backend.capabilities
    captures_all = has.captures_graphs and not has.captures_in_part
    rebinds = not sync.exact_host_lengths or (sync.rebind_params and has.updates_graph_params)
    runs = {
        "staged": StepMode.STAGED in sync.step_modes,
        "graphs": StepMode.STAGED in sync.step_modes and captures_all and rebinds,
        "fused": StepMode.FUSED in sync.step_modes and not has.captures_in_part and not backend.kernels_in_use.plans_on_host,
    }
    return tuple(mode for mode in engines.MODES if runs[mode])


def observe(kit: Kit) -> KernelCalls:
    """Run engines in every declared mode, with and without a draft, and count their kernel calls (preferred page size and
    dtype). Overrides that computed nothing there are called with random operands too, in each preferred dtype.

    Other tests check the results. The kit keeps the counts for later tests of the session.
    """
    if kit.observed is None:
        backend = kit.open()
        with counting(backend.kernels_in_use) as calls:
            _engines(backend, calls)
            _call_with_random_operands(backend, calls)
        backend.synchronize()
        kit.observed = calls
    return kit.observed


def _engines(backend: Backend, calls: KernelCalls) -> None:
    dtype, page_size = engines.preferred(backend), backend.capabilities.page_size
    with _named(backend, calls):
        for mode in modes_of(backend):
            for speculate in ("none", "eagle"):
                engine = engines.engine_on(
                    backend,
                    speculate=speculate,
                    overlap=True,
                    dtype=dtype,
                    page_size=page_size,
                    mode=mode,
                    buckets=(engines.MAX_REQUESTS,),
                )
                engines.run(engine, engines.PROMPTS[:2], 8)


def _call_with_random_operands(backend: Backend, calls: KernelCalls) -> None:
    """Call with random operands each kernel whose override computed nothing for an engine, and count these calls.

    Examples are kernels that the engines did not call, such as those of quantized layers and of experts, and overrides that
    only accept operands of another size.
    """
    stream = backend.create_stream("drawn")
    computed = {call.kernel for call in calls.counts if call.own}
    left_out = {name for names in calls.overridden.values() for name in names} - computed
    formats, caches = backend.capabilities.quantized_formats, backend.kernels_in_use.cache_formats
    for drawn in DRAWN.values():
        able = (drawn.format is None or drawn.format in formats) and (drawn.cache is None or drawn.cache in caches)
        if drawn.kernel.partition(",")[0] not in left_out or not able:
            continue
        for dtype in _dtypes(backend):
            for _, made in corners(drawn, dtype, 0):
                with backend.on(stream), calls.during(ALONE):
                    operands = {name: one.tensor.to(backend.device, copy=True) for name, one in made.operands.items()}
                    made.call(backend.kernels_in_use, operands)
                stream.synchronize()


def _dtypes(backend: Backend) -> list[torch.dtype]:
    known = set(engines.DTYPES.values())
    preferred = [dtype for dtype in backend.capabilities.preferred_dtypes if dtype in known]
    return preferred or [engines.DTYPES[engines.preferred(backend)]]


@contextmanager
def _named(backend: Backend, calls: KernelCalls) -> Generator[None]:
    """Count the kernel calls of each engine stage under the stage's name: prefill, draft, verify, decode or extend."""

    def naming(kind: type, method: str, use: Callable[..., str]) -> Any:
        own = getattr(kind, method)

        def run(stage: Any, *args: Any) -> Any:
            capture = backend.active_capture
            graph = IN_A_GRAPH if capture is not None and not capture.rehearsal else ""
            with calls.during(use(*args) + graph):
                return own(stage, *args)

        return patch.object(kind, method, run)

    with ExitStack() as stack:
        stack.enter_context(naming(Prefill, "launch", lambda *_: "prefill"))
        stack.enter_context(naming(DraftStage, "run", lambda *_: "draft"))
        stack.enter_context(naming(Verify, "run", lambda batch, _: "verify" if batch.drafted else "decode"))
        stack.enter_context(naming(Extend, "run", lambda *_: "extend"))
        yield
