"""Run the engine with the bundled model, on the backend under test and on the reference backend.

:func:`observe` finds which kernels answer the engine's calls: the device's own, or the references.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import torch

from outrider import Engine, EngineConfig, SamplingParams
from outrider.bundled import bundled
from outrider.device import Backend, Fence, SpeculativeSync, StepMode, Stream
from outrider.engine.config import DtypeName
from outrider.engine.prefill import Prefill
from outrider.engine.stages import DraftStage, Extend, Verify
from outrider.registry import get_backend
from outrider_conformance.kernel_calls import IN_A_GRAPH, KernelCalls, counting
from outrider_conformance.random_kernels.kernels import KERNELS as DRAWN
from outrider_conformance.random_kernels.kernels import corners

if TYPE_CHECKING:
    from outrider_conformance.kit import Kit


PROMPTS = (
    "def read(self, size=-1):\n",
    "import os\nimport sys\n\n\ndef main(",
    'class Error(Exception):\n    """Base class',
)
MAX_TOKENS = 24
MAX_REQUESTS = 3
DRAFT_TOKENS = 3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
MODES = ("staged", "graphs", "fused")
REFERENCE = "cpu"


_MAX_ROUNDING_GAP = {"float64": 1e-6, "float32": 1e-3, "float16": 3e-2, "bfloat16": 0.2}
"""The largest log-probability gap between the likeliest token and a token that rounding may put first, by dtype."""
_TOP_LOGPROBS = 4
_DELAYED_SHARE = 0.25
"""Fraction of the signals and waits of a jittered fence that delay the stream."""


@dataclass(frozen=True)
class EngineRun:
    """The results of one run of the engine."""

    tokens: tuple[tuple[int, ...], ...]
    """Generated tokens of each prompt."""
    acceptance: float
    """Mean number of tokens per verification."""
    likeliest: tuple[tuple[Mapping[int, float], ...], ...] = ()
    """For each token of each prompt, the likeliest tokens at that position with their log-probabilities."""


def engine_on(
    backend: Backend,
    *,
    speculate: str,
    overlap: bool = False,
    dtype: str = "float32",
    page_size: int = 8,
    mode: str = "staged",
    buckets: tuple[int, ...] | None = None,
    draft_tokens: int = DRAFT_TOKENS,
) -> Engine:
    """Return an engine with the bundled model on ``backend``.

    ``mode`` is staged, graphs (staged, with stages replayed from graphs) or fused. ``buckets`` are the batch sizes for which
    graphs are captured. ``speculate`` names the proposer. The other arguments are fields of :class:`EngineConfig`.
    """
    config = EngineConfig(
        max_requests=MAX_REQUESTS,
        page_size=page_size,
        max_context=max(96, 2 * page_size),
        prefill_chunk=256,
        draft_tokens=draft_tokens,
        draft_length="fixed",
        overlap=overlap,
        dtype=cast("DtypeName", dtype),
        mode="fused" if mode == "fused" else "staged",
        graphs=mode == "graphs",
        buckets=buckets,
    )
    return Engine.from_checkpoint(bundled("target"), backend, draft_dir=bundled("eagle"), speculate=speculate, config=config)


def preferred(backend: Backend) -> str:
    """Return the name of the dtype, as the engine's config spells it, in which the backend's own kernels run."""
    has = backend.capabilities
    best = (*has.preferred_dtypes, torch.bfloat16, *DTYPES.values())
    return next(str(dtype).removeprefix("torch.") for dtype in best if dtype in has.dtypes)


def run(
    engine: Engine, prompts: Sequence[str] = PROMPTS, max_tokens: int = MAX_TOKENS, logprobs: int | None = None
) -> EngineRun:
    """Generate greedily with ``engine`` for all prompts in one batch; ``logprobs`` is the number of likeliest tokens to
    return.
    """
    tokens = [engine.tokenizer.encode(text) for text in prompts]
    completions = engine.generate(tokens, SamplingParams(max_tokens=max_tokens, logprobs=logprobs))
    likeliest = tuple(tuple(dict(token.top) for token in c.logprobs) for c in completions)
    return EngineRun(tuple(tuple(c.token_ids) for c in completions), engine.stats.acceptance_length, likeliest)


@lru_cache(maxsize=8)
def reference(
    *,
    speculate: str,
    dtype: str = "float32",
    tokens: int = MAX_TOKENS,
    draft_tokens: int = DRAFT_TOKENS,
) -> EngineRun:
    """Return the results of :func:`run` on the reference backend."""
    engine = engine_on(get_backend(REFERENCE), speculate=speculate, dtype=dtype, draft_tokens=draft_tokens)
    return run(engine, max_tokens=tokens, logprobs=_TOP_LOGPROBS)


def first_wrong_token(found: EngineRun, wanted: EngineRun, dtype: str) -> str:
    """Return the first token of ``found`` that rounding doesn't explain, as text, or an empty string.

    ``found`` may hold fewer prompts than ``wanted``. A token may differ if the reference has both tokens about equally
    likely. The tokens after such a token aren't compared, since the two runs continue different texts.
    """
    for prompt, (made, right) in enumerate(zip(found.tokens, wanted.tokens, strict=False)):
        if len(made) != len(right):
            return f"prompt {prompt}: {len(made)} tokens where the reference has {len(right)}"
        for index, (token, best) in enumerate(zip(made, right, strict=True)):
            if token == best:
                continue
            near = wanted.likeliest[prompt][index]
            gap = near[best] - near.get(token, float("-inf"))
            if gap <= _MAX_ROUNDING_GAP[dtype]:
                break
            return (
                f"prompt {prompt}, token {index}: {token} where the reference has {best}, which is likelier by {gap:.3g} "
                f"(in {dtype}, rounding explains {_MAX_ROUNDING_GAP[dtype]:g})"
            )
    return ""


@contextmanager
def jittered(sync: SpeculativeSync, seed: int, cycles: int) -> Generator[None]:
    """In this scope, new fences delay their streams at random, by fewer than ``cycles`` device clocks, before a signal and
    after a wait, so that a missing order shows.
    """
    create = sync.create_fence

    def create_jittered(name: str) -> Fence:
        fence, dice = create(name), random.Random(f"{seed} {name}")
        signal, wait = fence.signal, fence.wait

        def delay_sometimes(stream: Stream) -> None:
            if dice.random() < _DELAYED_SHARE:
                sync.backend.delay(stream, dice.randrange(1, max(cycles, 2)))

        def signal_late(stream: Stream) -> None:
            delay_sometimes(stream)
            signal(stream)

        def wait_longer(stream: Stream) -> None:
            wait(stream)
            delay_sometimes(stream)

        fence.signal, fence.wait = signal_late, wait_longer  # type: ignore[method-assign]
        return fence

    with patch.object(sync, "create_fence", create_jittered):
        yield


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
    return tuple(mode for mode in MODES if runs[mode])


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
    dtype, page_size = preferred(backend), backend.capabilities.page_size
    with _named(backend, calls):
        for mode in modes_of(backend):
            for speculate in ("none", "eagle"):
                engine = engine_on(
                    backend,
                    speculate=speculate,
                    overlap=True,
                    dtype=dtype,
                    page_size=page_size,
                    mode=mode,
                    buckets=(MAX_REQUESTS,),
                )
                run(engine, PROMPTS[:2], 8)


def _call_with_random_operands(backend: Backend, calls: KernelCalls) -> None:
    """Call with random operands each kernel whose override computed nothing for an engine, and count these calls.

    Examples are kernels that the engines did not call, such as those of quantized layers and of experts, and overrides that
    only accept operands of another size.
    """
    stream = backend.create_stream("drawn")
    computed = {call.kernel for call in calls.counts if call.own}
    left_out = {name for names in calls.overridden.values() for name in names} - computed
    formats, kernels = backend.capabilities.quantized_formats, backend.kernels_in_use
    for drawn in DRAWN.values():
        able = drawn.format is None or drawn.format in formats
        able = able and (drawn.cache is None or drawn.cache in kernels.cache_formats)
        able = able and (drawn.operand is None or drawn.operand in kernels.optional_operands)
        if drawn.kernel.partition(",")[0] not in left_out or not able:
            continue
        for dtype in _dtypes(backend):
            for _, made in corners(drawn, dtype, 0):
                with backend.on(stream), calls.during(ALONE):
                    operands = {name: one.tensor.to(backend.device, copy=True) for name, one in made.operands.items()}
                    made.call(backend.kernels_in_use, operands)
                stream.synchronize()


def _dtypes(backend: Backend) -> list[torch.dtype]:
    known = set(DTYPES.values())
    found = [dtype for dtype in backend.capabilities.preferred_dtypes if dtype in known]
    return found or [DTYPES[preferred(backend)]]


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
