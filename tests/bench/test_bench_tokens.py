"""``outrider bench tokens``, plots, and what a host waits for."""

import json
import time
from xml.etree import ElementTree

import pytest
import torch

from outrider import SamplingParams
from outrider.cli.differences import PrefillComparison
from outrider.cli.models import Speculation, load
from outrider_bench.commands import tokens as bench_tokens
from outrider_bench.plot import limits_svg


def test_tokens_are_compared_and_timed(outrider):
    arguments = ("--prompts", "3", "--new-tokens", "12", "--timed", "1", "--batch", "3", "--json")
    result = outrider("bench", "tokens", "--backend", "cpu", *arguments).json
    assert (result["prompts"], result["differ"], result["differences"]) == (3, 0, [])
    speeds = {(row["engine"].split()[0], row["decoding"]): row for row in result["speed"]}
    assert set(speeds) == {("outrider", "speculation"), ("outrider", "plain"), ("transformers", "plain")}
    assert speeds["outrider", "speculation"]["acceptance_length"] > 1
    assert speeds["outrider", "plain"]["acceptance_length"] == 1
    assert all(row["tokens_per_s"] > 0 for row in speeds.values())


def test_a_difference_is_shown_with_its_gap(outrider, monkeypatch, tmp_path):
    """Speculation that puts out another token: where, and how far below the likeliest one it is."""
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps({"prompts": [{"text": "import os\n\n\ndef "}, {"text": "class Reader:\n"}]}))
    decode, calls = bench_tokens._decode, []

    def wrong(engine, prompts, new_tokens):
        found = decode(engine, prompts, new_tokens)
        calls.append(engine)
        if len(calls) == 1:
            ids = list(found[1].token_ids)
            ids[4] = (ids[4] + 1) % 2048
            object.__setattr__(found[1], "token_ids", tuple(ids))
        return found

    monkeypatch.setattr("outrider_bench.commands.tokens._decode", wrong)
    arguments = ("--prompt-file", str(file), "--new-tokens", "8", "--timed", "0")
    shown = outrider("bench", "tokens", "--backend", "cpu", *arguments)
    assert "1 of 2 prompts differ from plain greedy decoding (50.0 %)" in shown.out
    (line,) = (line for line in shown.out.splitlines() if line.startswith("1  "))
    assert line.split()[:2] == ["1", "4"]
    assert float(line.split()[-1]) > 1000  # what was put in is nobody's rounding


def test_the_gap_is_that_of_the_logits():
    speculation = Speculation.choose("none", model=None, draft=None, draft_tokens=1)
    engine = load("cpu", speculation, max_requests=1, dtype="float32")
    prompt = engine.tokenizer.encode("def read(self):\n    return ")
    (done,) = engine.generate([prompt], SamplingParams(max_tokens=6, logprobs=2, ignore_eos=True))
    at = 3
    top = done.logprobs[at]
    (first, second), (one, two) = zip(*((value, token) for token, value in top.top), strict=True)
    ours = (*done.token_ids[:at], two, 0, 0)
    found = PrefillComparison(engine).compare(prompt, ours, done.token_ids, number=7)
    assert (found.prompt, found.position, found.speculative, found.plain) == (7, at, two, one)
    assert found.gap == pytest.approx(first - second, abs=1e-4)
    both_lower = PrefillComparison(engine).compare(prompt, ours, (*done.token_ids[:at], two + 1, 0, 0), number=7)
    assert both_lower.gap >= found.gap > 0  # it's the distance to the likeliest, not between the two
    unit = 2.0 ** torch.tensor(found.top_logit).abs().log2().floor().item() * torch.finfo(torch.float32).eps
    assert found.gap_roundings == pytest.approx(found.gap / unit)


def test_a_prompt_file_that_is_none(outrider, tmp_path):
    file = tmp_path / "x.json"
    file.write_text("[]")
    result = outrider("bench", "tokens", "--backend", "cpu", "--prompt-file", str(file))
    assert result.code == 1
    assert "expected {" in result.err
    file.write_text('{"prompts": []}')
    assert "x.json: no prompts in it; expected {" in outrider("bench", "tokens", "--prompt-file", str(file)).err


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
    assert refused.code == 1
    assert "ends in .svg" in refused.err


def test_what_is_slower_lies_higher_in_the_plot():
    row = {"batch": 1, "prompt_tokens": 8, "iteration_ms": 5.0, "limit_ms": 4.0, "ratio_to_limit": 1.25}
    root = ElementTree.fromstring(limits_svg([row], title="a < b"))
    measured, limit = (
        float(line.get("points").split(",")[1]) for line in root.findall("{http://www.w3.org/2000/svg}polyline")
    )
    assert measured < limit  # the axis runs down


def test_the_host_knows_how_long_it_waited(monkeypatch):
    speculation = Speculation.choose("none", model=None, draft=None, draft_tokens=1)
    engine = load("cpu", speculation, max_requests=1, dtype="float32")
    engine.generate([[5]], SamplingParams(max_tokens=2, ignore_eos=True))
    before = engine.stats.blocked_s
    fence = type(engine._parts.fences.results_copied[0]._inner)
    late = fence.wait_host_within
    monkeypatch.setattr(fence, "wait_host_within", lambda self, seconds: (time.sleep(0.05), late(self, seconds))[1])
    began = time.monotonic()
    engine.generate([[5]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert 0.15 <= engine.stats.blocked_s - before <= time.monotonic() - began
