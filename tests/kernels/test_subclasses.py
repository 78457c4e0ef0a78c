"""A subclass of TritonKernels is asked for what it overrides, also by what is one kernel there."""

import pytest
import torch

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from kernels.devices import DEVICES
from outrider.device import KernelSet
from outrider.device.kernels.kernelset import kernel_names, parts_of
from outrider_conformance.random_kernels.kernels import KERNELS, problem
from outrider_triton.kernelset import TritonKernels

DRAWN = {label.partition(",")[0]: drawn for label, drawn in reversed(KERNELS.items())}
PAIRS = [(name, part) for name in kernel_names() for part in sorted(parts_of(name))]

NOT_DRAWN = {
    ("verify_checked", "sample"),
    ("linear_quantized_add", "silu_mul"),
    ("linear_quantized_add_rms_norm", "silu_mul"),
}
"""Parts that a kernel has for other operands than those that are drawn first."""


@pytest.mark.parametrize(("name", "part"), PAIRS)
def test_a_subclass_is_asked_for_its_part_of_what_is_one_kernel(name, part, unlaunched):
    asked = []

    def own(self, *operands, **options):
        asked.append(part)
        return getattr(KernelSet, part)(self, *operands, **options)

    kind = type("Asked", (TritonKernels,), {part: own})
    assert getattr(kind, name) is getattr(KernelSet, name)
    if (name, part) in NOT_DRAWN:
        return
    drawn = DRAWN[name]
    made = problem(drawn, drawn.corners[0], torch.bfloat16, 0)
    operands = {each: operand.tensor for each, operand in made.operands.items()}
    for kernels in (kind(DEVICES["H100"]), type("Below", (kind,), {})(DEVICES["H100"])):
        asked.clear()
        made.call(kernels, operands)
        assert part in asked


def test_what_a_subclass_overrides_as_a_whole_stays():
    class Own(TritonKernels):
        def linear(self, x, weight, bias=None):
            return super().linear(x, weight, bias)

        def linear_silu_mul(self, x, weight, bias=None):
            return super().linear_silu_mul(x, weight, bias)

    assert Own.linear_silu_mul is vars(Own)["linear_silu_mul"] is not KernelSet.linear_silu_mul
    assert Own.linear_add is KernelSet.linear_add
    assert Own.norm_linear_silu_mul is KernelSet.norm_linear_silu_mul  # its other part is one product with the norm
    assert Own.verify_checked is TritonKernels.verify_checked
    assert Own.all_reduce_rms_norm is TritonKernels.all_reduce_rms_norm


def test_a_subclass_declares_its_name_and_the_caches_that_its_kernels_take():
    class Attends(TritonKernels):
        name = "attends"

        def paged_attention(self, *operands, **options):
            return super().paged_attention(*operands, **options)

    class Declares(Attends):
        cache_formats = frozenset({"fp8"})

    class Norms(TritonKernels):
        def add_rms_norm(self, *operands):
            return super().add_rms_norm(*operands)

    facts = DEVICES["H100"]
    assert (Attends(facts).name, Attends(facts).cache_formats) == ("attends", frozenset())
    assert Declares(facts).cache_formats == TritonKernels(facts).cache_formats == Norms(facts).cache_formats == {"fp8"}
    assert Norms(facts).name == TritonKernels(facts).name
    assert Norms.all_reduce_rms_norm is KernelSet.all_reduce_rms_norm
