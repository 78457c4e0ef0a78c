"""L4: the overlapped speculative engine gives the tokens of non-speculative decoding on the reference.

It does so in every declared mode and dtype, and the device's own kernels answer its calls.
"""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from outrider.device import Backend, CapabilityError
from outrider_conformance import engines
from outrider_conformance.engines import USES, modes_of
from outrider_conformance.kernel_calls import KERNELS, KernelCalls
from outrider_conformance.lab import Lab, expect
from outrider_conformance.promises import promise
from outrider_conformance.reporting.verdict import not_applicable

_SCHEDULES = 3
_JITTERS = 2
_LONG_DRAFT = 8
"""Number of draft tokens, so that the later passes of a draft attend to the KV of several earlier ones."""
_OPERATIONS = 200  # of two short requests, far fewer than there are


@promise("SpeculativeSync.step_modes")
@pytest.mark.parametrize("overlap", [False, True], ids=["one at a time", "overlapped"])
@pytest.mark.parametrize("speculate", ["none", "eagle"])
def test_tokens_equal_plain_decoding_on_the_reference(lab: Lab, speculate: str, overlap: bool) -> None:
    """Greedy tokens and the acceptance length equal the reference's. Wrong draft data changes only the acceptance length."""
    plain, same = engines.reference(speculate="none"), engines.reference(speculate=speculate)
    found = engines.run(engines.engine_on(lab.backend, speculate=speculate, overlap=overlap))
    expect(found.tokens, plain.tokens, "greedy tokens")
    if not overlap:
        expect(round(found.acceptance, 6), round(same.acceptance, 6), "the acceptance length")
    else:
        expect(abs(found.acceptance - same.acceptance) < 0.35, True, f"acceptance {found.acceptance}, {same.acceptance}")


@promise("SpeculativeSync.step_modes")
@pytest.mark.parametrize("mode", ["graphs", "fused"])
def test_graphs_accept_as_many_tokens_as_eager_stages(lab: Lab, mode: str) -> None:
    """The acceptance length with captured stages equals that of eager stages.

    Tokens would not show a graph that omits a write of a draft pass to the KV cache: verification replaces wrong drafts.
    """
    if mode not in modes_of(lab.backend):
        not_applicable(f"{mode} isn't declared")
    eager = engines.reference(speculate="eagle", draft_tokens=_LONG_DRAFT)
    found = engines.run(engines.engine_on(lab.backend, speculate="eagle", mode=mode, draft_tokens=_LONG_DRAFT))
    expect(found.tokens, engines.reference(speculate="none").tokens, "greedy tokens")
    expect(round(found.acceptance, 6), round(eager.acceptance, 6), f"the acceptance length in mode {mode}")


@promise("SpeculativeSync.draft_lengths")
@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_drafts_of_each_length_are_verified_or_refused(lab: Lab, length: int) -> None:
    """A declared draft length gives the tokens of non-speculative decoding. Another is refused, and the error names those
    that work.
    """
    works = lab.backend.speculative_sync.draft_lengths
    if works is not None and length not in works:
        with pytest.raises(CapabilityError) as caught:
            engines.engine_on(lab.backend, speculate="eagle", draft_tokens=length)
        assert all(str(each) in str(caught.value) for each in works), f"it doesn't say which lengths work: {caught.value}"
        return
    prompts, tokens = engines.PROMPTS[:2], 10
    try:
        found = engines.run(engines.engine_on(lab.backend, speculate="eagle", draft_tokens=length), prompts, tokens)
    except Exception as error:
        raise AssertionError(f"drafts of {length} tokens raise, and draft_lengths doesn't leave them out: {error}") from None
    wanted = tuple(line[:tokens] for line in engines.reference(speculate="none").tokens[:2])
    expect(found.tokens, wanted, f"greedy tokens with drafts of {length}")


@promise("Fence", "a ``wait`` takes the generation that is visible when the wait is enqueued.")
def test_the_sanitizer_is_silent(lab: Lab) -> None:
    """The sanitizer finds no unordered access in an overlapped run."""
    from outrider_sanitizer import watch

    engine = engines.engine_on(lab.backend, speculate="eagle", overlap=True)
    with watch(lab.backend) as report:
        engines.run(engine, engines.PROMPTS[:2], 10)
    assert report.operations > _OPERATIONS, f"the sanitizer saw {report.operations} operations: it watched nothing"
    found = report.findings
    assert not found, f"{len(found)} findings, the first: {found[0]}"


@promise("Capabilities.concurrent_streams")
def test_tokens_are_the_same_in_every_order(lab: Lab) -> None:
    """Tokens are the same in several schedules, or with random delays around every fence."""
    has = lab.backend.capabilities
    prompts, tokens = engines.PROMPTS[:2], 8
    wanted = tuple(line[:tokens] for line in engines.reference(speculate="none").tokens[:2])

    def program(backend: Backend) -> None:
        engine = engines.engine_on(backend, speculate="eagle", overlap=True)
        expect(engines.run(engine, prompts, tokens).tokens, wanted, "greedy tokens")

    if lab.backend.control is not None:
        lab.check_in_every_order(program, schedules=_SCHEDULES)
    elif has.perturbs_timing and has.asynchronous:
        for seed in range(_JITTERS):
            try:
                with engines.jittered(lab.backend.speculative_sync, seed, lab.delay_length // 8):
                    program(lab.backend)
            except AssertionError as error:
                raise AssertionError(f"{error}\nwith delays around the fences, seed {seed}") from error
    else:
        not_applicable("neither the schedule nor the timing of this device can be changed")


@promise("SpeculativeSync.after_join", "Do what this device needs between the join and the replay. Idempotent")
def test_what_is_done_after_the_join_is_what_is_declared(lab: Lab) -> None:
    """Two calls of ``after_join`` make the same declared requests to the plan, and a call for an idle batch makes none."""
    sync = lab.backend.speculative_sync
    (stream,) = lab.streams("s")
    plan, idle = (Mock(spec_set=("idle", "recompute", "refresh"), idle=is_idle) for is_idle in (False, True))
    with lab.backend.on(stream):
        sync.after_join(plan)
        once = list(plan.method_calls)
        sync.after_join(plan)
        sync.after_join(idle)
    expect(plan.method_calls, once + once, "what after_join asks for when it's called twice")
    expect(idle.method_calls, [], "what after_join asks for when the batch is idle")
    declared: set[tuple[object, ...]] = {("recompute", what) for what in sync.recompute_after_join}
    declared |= {("refresh", buffer) for buffer in sync.refresh_before_replay}
    requests = {(name, *arguments, *named.values()) for name, arguments, named in once}
    expect(requests, declared, "what after_join does, against what the policy declares")


_TOKENS = 12
_BUCKETS = (1, engines.MAX_REQUESTS)  # two requests are padded, one isn't


@promise("SpeculativeSync.step_modes")
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
def test_an_overridden_kernel_computes_something_itself(observed: KernelCalls, kernel: str) -> None:
    """At least one call of each override is computed by the override itself.

    Calls come from engines in each declared mode and from the kit's random operands.
    """
    overriding = observed.overriding_layer(kernel)
    if overriding is None:
        not_applicable("the kernel set doesn't override it")
    name, unused = overriding
    own, left = (observed.count(kernel, own=own, kernels=name) for own in (True, False))
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
def test_own_attention_serves_the_engine(observed: KernelCalls, use: str) -> None:
    """Attention of the backend answers prefill, draft, decode, verification and draft-extend."""
    overriding = observed.overriding_layer("paged_attention")
    if overriding is None or overriding[1]:
        not_applicable("attention is the reference's")
    own = observed.count("paged_attention", own=True, use=use)
    left = observed.count("paged_attention", own=False, kernels=overriding[0], use=use)
    if use == "draft" and observed.kernels.plans_on_host and not own:
        not_applicable("these kernels plan on the host, and passes of a draft aren't planned")
    assert own, (
        f"attention for {use} was left to the reference each of {left} times, with the page_size and dtype that the backend "
        f"prefers: {observed.shapes_left('paged_attention')}"
    )
