"""A subclass of TritonKernels: blocks that use a primitive of its own are composed."""

import pytest
import torch

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from kernels.devices import DEVICES
from outrider.device import KernelSet
from outrider.device.kernels.kernelset import composed_kernels
from outrider_conformance.random_kernels.kernels import KERNELS, problem
from outrider_triton.kernelset import TritonKernels

PAIRS = [(name, part) for name, parts in composed_kernels().items() for part in sorted(parts)]


@pytest.mark.parametrize(("name", "part"), PAIRS)
def test_a_subclass_gets_the_composed_default_of_what_uses_its_primitive(name, part):
    kind = type("Asked", (TritonKernels,), {part: getattr(KernelSet, part)})
    assert getattr(kind, name) is getattr(KernelSet, name)
    assert getattr(type("Below", (kind,), {}), name) is getattr(KernelSet, name)
    assert not kind(DEVICES["H100"]).is_native(name)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ["attention_block", "mlp_block", "attention_block, fp8", "mlp_block, fp8"])
def test_a_composed_block_calls_the_primitives_of_a_subclass(name, unlaunched):
    asked = []

    class Asked(TritonKernels):
        def add_rms_norm(self, *operands):
            asked.append("add_rms_norm")
            return KernelSet.add_rms_norm(self, *operands)

    drawn = KERNELS[name]
    made = problem(drawn, drawn.corners[0], torch.bfloat16, 0)
    made.call(Asked(DEVICES["H100"]), {each: operand.tensor for each, operand in made.operands.items()})
    assert asked == ["add_rms_norm"] * (3 if "attention" in name else 2)


def test_a_block_that_a_subclass_overrides_too_stays():
    class Own(TritonKernels):
        def linear(self, x, weight, bias=None):
            return super().linear(x, weight, bias)

        mlp_block = TritonKernels.mlp_block

    assert Own.mlp_block is TritonKernels.mlp_block is not KernelSet.mlp_block
    assert Own.attention_block is KernelSet.attention_block
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
