"""The torch references and the host's kernels against those of the conformance kit, which share no code with them."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from conformance.small_problems import small
from outrider.device import KernelSet
from outrider_conformance.random_kernels.kernels import KERNELS, check_kernels, problem
from outrider_conformance.random_kernels.problem import RandomValues, paired_shapes
from outrider_cpu.kernels import CpuKernels

SHAPES = 2
"""Random shapes of each kernel: every two dimensions have small and large values in all combinations."""


@pytest.mark.parametrize("name", KERNELS)
def test_values_are_those_of_the_kit(name):
    """Exact in float64 but for rounding; the memory around the operands, and operands that are only read, stay unchanged."""
    problems = [small(name, torch.float64)]
    for number, shape in enumerate(paired_shapes(KERNELS[name].dimensions, SHAPES, RandomValues(1))):
        problems.append(problem(KERNELS[name], shape, torch.float32, number))
    for kernels in (KernelSet(), CpuKernels(), KernelSet().batch_invariant()):
        for each in problems:
            check_kernels(kernels, each)


class Calls(TorchDispatchMode):
    """Keeps the first call of each of Outrider's operators with its operands."""

    def __init__(self):
        super().__init__()
        self.first = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "outrider":
            self.first.setdefault(func, tree_map_only(torch.Tensor, torch.clone, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_schemas_hold(dtype):
    """torch's own checker runs each operator and compares what it reads and writes with its schema."""
    with Calls() as calls:
        for name in (name for name, drawn in KERNELS.items() if drawn.format is drawn.cache is None):  # it adds to no float8
            made = small(name, dtype)
            made.call(KernelSet(), made.tensors)
    check = partial(torch.library.opcheck, test_utils=("test_schema", "test_faketensor"))
    for operator, operands in calls.first.items():
        check(operator, operands)
    assert len(calls.first) > 30
