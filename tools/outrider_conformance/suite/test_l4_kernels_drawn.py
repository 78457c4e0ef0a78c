"""L4: each kernel on drawn operands, against float64 with the bound of its operation, and nothing else touched."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from outrider_conformance.drawn.judging import judge
from outrider_conformance.drawn.kernels import KERNELS, corners, problem
from outrider_conformance.drawn.problem import Drawn, Shape
from outrider_conformance.lab import Lab
from outrider_conformance.promises import promise
from outrider_conformance.verdict import not_applicable

_COMPILED_DRAWS = 1
_DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def _applies(lab: Lab, drawn: Drawn, dtype: torch.dtype) -> None:
    if drawn.choices and dtype is not torch.float32:
        not_applicable("it works on whole numbers, or on float32 whatever the model's dtype is")
    if drawn.format is not None and drawn.format not in lab.backend.capabilities.quantized_formats:
        not_applicable(f"quantised weights of the format {drawn.format} aren't declared")
    if drawn.cache is not None and drawn.cache not in lab.backend.kernels_in_use.cache_formats:
        not_applicable(f"a KV cache of the format {drawn.cache} isn't declared")
    if not drawn.choices and dtype not in lab.backend.capabilities.dtypes:
        not_applicable(f"{dtype} isn't declared")


@promise("KernelSet", "*Numerics.* A result may differ from the reference by rounding alone.")
@pytest.mark.parametrize("dtype", _DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("drawn", KERNELS.values(), ids=lambda drawn: drawn.kernel)
def test_a_kernel_is_right_at_its_corners(lab: Lab, drawn: Drawn, dtype: torch.dtype) -> None:
    """Long contexts, many rows, wide vocabularies, strided operands; a second call leaves the first's results alone."""
    _applies(lab, drawn, dtype)
    (stream,) = lab.streams("s")
    for number, (shape, made) in enumerate(corners(drawn, dtype, lab.seed)):
        try:
            judge(lab, stream, made, again=True, slow=not number)
        except AssertionError as error:
            raise AssertionError(f"{drawn.kernel} in {dtype} of {dict(shape)}: {error}") from error


@promise("KernelSet", "*Numerics.* A result may differ from the reference by rounding alone.")
@pytest.mark.parametrize("dtype", _DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("drawn", KERNELS.values(), ids=lambda drawn: drawn.kernel)
def test_a_kernel_is_right_on_drawn_operands(lab: Lab, drawn: Drawn, dtype: torch.dtype) -> None:
    """Shapes that hypothesis draws from what the kernel takes; a failing one is shrunk."""
    _applies(lab, drawn, dtype)
    (stream,) = lab.streams("s")

    # Each new shape may be a variant to compile; its corners have compiled enough of them.
    draws = lab.draws if lab.backend.kernels_in_use.every_variant() is None else min(lab.draws, _COMPILED_DRAWS)

    @hypothesis.seed(lab.seed)
    @hypothesis.settings(
        max_examples=draws,
        database=None,
        deadline=None,
        print_blob=False,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.fixed_dictionaries(dict(drawn.dimensions)), st.integers(0, 1 << 30))
    def check(shape: Shape, seed: int) -> None:
        try:
            judge(lab, stream, problem(drawn, shape, dtype, seed))
        except AssertionError as error:
            raise AssertionError(f"{drawn.kernel} in {dtype} of {dict(shape)}, seed {seed}: {error}") from error

    check()
