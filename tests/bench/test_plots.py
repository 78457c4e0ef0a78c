"""Plots of ``outrider bench decode``, the gap of two logits, and the time that the host waits for the device."""

import time
from xml.etree import ElementTree

import pytest
import torch

from outrider import SamplingParams
from outrider.cli.commands.generate import difference_of_logits
from outrider.cli.options.models import Speculation, load
from outrider_bench.plot import limits_svg


def test_the_gap_is_that_of_the_logits():
    speculation = Speculation.with_defaults("none", model=None, draft=None, draft_tokens=1)
    engine = load("cpu", speculation, max_requests=1, dtype="float32")
    prompt = engine.tokenizer.encode("def read(self):\n    return ")
    (done,) = engine.generate([prompt], SamplingParams(max_tokens=6, logprobs=2, ignore_eos=True))
    at = 3
    top = done.logprobs[at]
    (first, second), (one, two) = zip(*((value, token) for token, value in top.top), strict=True)
    ours = (*done.token_ids[:at], two, 0, 0)
    found = difference_of_logits(engine, prompt, ours, done.token_ids)
    assert (found["position"], found["speculative"], found["plain"]) == (at, two, one)
    assert found["gap"] == pytest.approx(first - second, abs=1e-4)
    both_lower = difference_of_logits(engine, prompt, ours, (*done.token_ids[:at], two + 1, 0, 0))
    assert both_lower["gap"] >= found["gap"] > 0  # it's the distance to the likeliest, not between the two
    unit = 2.0 ** torch.tensor(found["top_logit"]).abs().log2().floor().item() * torch.finfo(torch.float32).eps
    assert found["gap_roundings"] == pytest.approx(found["gap"] / unit)


@pytest.mark.slow
def test_a_plot_of_iterations_against_the_limit(outrider, tmp_path):
    file = tmp_path / "limits.svg"
    arguments = ("--batch", "1,2", "--prompt-tokens", "8,16", "--new-tokens", "12", "--plot", str(file), "--json")
    result = outrider("bench", "decode", "--backend", "cpu", *arguments).json
    assert [(row["batch"], row["prompt_tokens"]) for row in result["results"]] == [(1, 8), (2, 8), (1, 16), (2, 16)]
    svg = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(file.read_text())
    assert len(root.findall(f"{svg}polyline")) == 4  # measured and limit, for each prompt length
    assert len(root.findall(f"{svg}circle")) == 4
    refused = outrider("bench", "decode", "--backend", "cpu", "--plot", "limits.png")
    assert refused.code == 2
    assert "ends in .svg" in refused.err


def test_what_is_slower_lies_higher_in_the_plot():
    row = {"batch": 1, "prompt_tokens": 8, "iteration_ms": 5.0, "limit_ms": 4.0, "ratio_to_limit": 1.25}
    root = ElementTree.fromstring(limits_svg([row], title="a < b"))
    measured, limit = (
        float(line.get("points").split(",")[1]) for line in root.findall("{http://www.w3.org/2000/svg}polyline")
    )
    assert measured < limit  # the axis runs down


def test_the_host_knows_how_long_it_waited(monkeypatch):
    speculation = Speculation.with_defaults("none", model=None, draft=None, draft_tokens=1)
    engine = load("cpu", speculation, max_requests=1, dtype="float32")
    engine.generate([[5]], SamplingParams(max_tokens=2, ignore_eos=True))
    before = engine.stats.blocked_s
    fence = type(engine._parts.fences.results_copied[0]._inner)
    late = fence.wait_host_within
    monkeypatch.setattr(fence, "wait_host_within", lambda self, seconds: (time.sleep(0.05), late(self, seconds))[1])
    began = time.monotonic()
    engine.generate([[5]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert 0.15 <= engine.stats.blocked_s - before <= time.monotonic() - began
