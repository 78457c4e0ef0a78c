"""L4: the declared modes and dtypes run, and the device's own kernels answer the engine's calls."""

from __future__ import annotations

import pytest

from outrider_conformance import engines
from outrider_conformance.kernel_calls import KERNELS
from outrider_conformance.lab import Lab, expect
from outrider_conformance.observed_kernels import USES, ObservedKernels, modes_of
from outrider_conformance.promises import promise
from outrider_conformance.reporting.verdict import not_applicable

_TOKENS = 12
_BUCKETS = (1, engines.MAX_REQUESTS)  # two requests are padded, one isn't


@promise("SpeculativeSync.step_modes", "The modes that are right on this device.")
@pytest.mark.parametrize("dtype", engines.DTYPES)
@pytest.mark.parametrize("mode", engines.MODES)
def test_tokens_in_every_mode_and_dtype(lab: Lab, mode: str, dtype: str) -> None:
    """Overlapped speculative decoding gives the reference's tokens in that dtype, with the preferred page size."""
    if engines.DTYPES[dtype] not in lab.backend.capabilities.dtypes:
        not_applicable(f"{dtype} isn't declared")
    if mode not in modes_of(lab.backend):
        not_applicable(f"{mode} isn't declared")
    size = lab.backend.capabilities.page_size
    engine = engines.engine_on(
        lab.backend, speculate="eagle", overlap=True, dtype=dtype, page_size=size, mode=mode, buckets=_BUCKETS
    )
    found = engines.run(engine, engines.PROMPTS[:2], _TOKENS)
    wrong = engines.first_wrong_token(found, engines.reference(speculate="none", dtype=dtype, tokens=_TOKENS), dtype)
    assert not wrong, f"{mode} in {dtype}: {wrong}"


@promise("KernelSet.unused_overrides", "Every other override must compute calls itself when the kit calls it.")
@pytest.mark.parametrize("kernel", KERNELS)
def test_an_overridden_kernel_computes_something_itself(observed: ObservedKernels, kernel: str) -> None:
    """At least one call of each override is computed by the override itself.

    Calls come from engines in each declared mode and from the kit's random operands.
    """
    judged = observed.overriding_layer(kernel)
    if judged is None:
        not_applicable("the kernel set doesn't override it")
    name, unused = judged
    own, left = observed.count(kernel, own=True), observed.count(kernel, own=False)
    if unused:
        expect(own, 0, f"calls of {kernel} that {name!r} computed, though it says that it never does ({unused})")
        not_applicable(f"never used here: {unused}")
    assert own, (
        f"{kernel} of {name!r} never computed anything: {left} calls were left to what it overrides, with operands "
        f"{observed.shapes_left(kernel)}. Declare in Capabilities the page_size and preferred_dtypes that it takes, name it "
        "in unused_overrides, or remove an override that only passes calls on"
    )


@promise("KernelSet", "``outrider conform`` counts both kinds of calls.")
@pytest.mark.parametrize("use", USES)
def test_own_attention_serves_the_engine(observed: ObservedKernels, use: str) -> None:
    """Attention of the backend answers prefill, draft, decode, verification and draft-extend."""
    judged = observed.overriding_layer("paged_attention")
    if judged is None or judged[1]:
        not_applicable("attention is the reference's")
    own, left = (
        observed.calls.count("paged_attention", own=True, use=use),
        observed.count("paged_attention", own=False, use=use),
    )
    if use == "draft" and observed.plans_on_host and not own:
        not_applicable("these kernels plan on the host, and passes of a draft aren't planned")
    assert own, (
        f"attention for {use} was left to the reference each of {left} times, with the page_size and dtype that the backend "
        f"prefers: {observed.shapes_left('paged_attention')}"
    )
