"""Imports of a start in addition to torch, also of a watched one: no compiler of torch, and no algebra of shapes.

That is some 500 modules, a second or more of each process's start, which come along with one call of torch.
"""

import subprocess
import sys
import textwrap

import pytest

NEEDLESS = ("sympy", "torch.fx.experimental.symbolic_shapes", "torch._dynamo", "torch._inductor", "transformers", "PIL")

START = """
    from outrider.bundled import bundled
    from outrider.cli.options.models import chosen
    from outrider.engine.config import EngineConfig
    from outrider.engine.engine import Engine
    from outrider.engine.setup.loading import LoadingArguments, load_checkpoint
    from outrider.engine.requests.sampling import SamplingParams
    from outrider.registry import Registry
    from outrider_sanitizer import watch

    device = Registry().create("cpu")
    asked = EngineConfig(max_requests=2, max_context=128, draft_tokens=2)
    loading = LoadingArguments(config=asked, draft_dir=bundled("eagle"), speculate="eagle")
    loaded = load_checkpoint(bundled("target"), device, loading)
    engine = Engine(loaded.model, device, proposer=loaded.proposer, config=loaded.config, tokenizer=loaded.tokenizer)
    assert chosen(engine)
    params = [SamplingParams(max_tokens=5), SamplingParams(max_tokens=5, temperature=1.0)]
    with watch(device) as report:
        assert len(engine.generate([[1, 2, 3], [4]], params)) == 2
    report.raise_if_any()
"""

REFUSED = """
    import torch
    from outrider_triton import kernelset

    triton, half = torch.ops.outrider, torch.bfloat16
    x, weight = torch.zeros(4, 1024, dtype=half), torch.zeros(64, 1024, dtype=half)
    refused = 0
    for call in (
        lambda: triton.rms_norm.triton(x, weight[:, 0], 1e-6, False),
        lambda: triton.linear.triton(x, weight[:, :512].contiguous(), None, [16, 32, 64, 1, 4, 2, 0, 0, 1], False),
        lambda: triton.rms_norm(x.to("meta"), weight[:, 0].to("meta"), 1e-6),
    ):
        try:
            call()
        except RuntimeError as error:
            assert "with a weight of" in str(error), error
            refused += 1
    assert refused == 3, refused
"""

FOUND = """
    import sys
    found = [name for name in {needless!r} if name in sys.modules]
    assert not found, f"imported: {{found}}"
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    script = textwrap.dedent(code) + textwrap.dedent(FOUND).format(needless=NEEDLESS)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False)


def test_a_start_of_an_engine_needs_none_of_it():
    result = run(START)
    assert result.returncode == 0, result.stderr


def test_nor_do_kernels_and_what_they_refuse():
    pytest.importorskip("triton", reason="not run: triton isn't installed")
    result = run(REFUSED)
    assert result.returncode == 0, result.stderr


def test_what_comes_along_is_found():
    assert "imported: ['PIL']" in run("import PIL").stderr


@pytest.mark.slow
def test_torch_still_brings_all_of_it():
    """torch's own function for conditions: if it no longer imports so much, ours can go."""
    result = run("import torch; torch._check(True)")
    assert "imported: ['sympy', 'torch.fx.experimental.symbolic_shapes']" in result.stderr
