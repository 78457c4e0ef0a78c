"""vLLM's load generator: what it's asked, and how its figures are read. A run of it: where vLLM is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from outrider_bench import http_load
from outrider_bench.child import BenchFailed
from outrider_bench.http_load import HttpLoad, read_vllm_figures, run_vllm_bench, vllm_arguments

LOAD = HttpLoad(url="http://127.0.0.1:1", model="measured", clients=4, rounds=3, prompt_tokens=16, new_tokens=8)
# What vLLM 0.26 saves, as far as it's read.
SAVED = {
    "completed": 2,
    "failed": 0,
    "duration": 2.0,
    "total_output_tokens": 16,
    "output_throughput": 8.0,
    "itls": [[0.1, 0.1, 0.2], [0.1, 0.1]],
    "errors": ["", ""],
    **{
        f"p{share}_{name}_ms": value + share
        for name, value in (("ttft", 100.0), ("tpot", 200.0), ("itl", 300.0))
        for share in (50, 95, 99)
    },
}


def test_the_same_load_is_asked_for():
    words = vllm_arguments(LOAD, Path("/tokenizer"), Path("/kept/result.json"))
    given = dict(zip(words[2::2], words[3::2], strict=False))
    assert words[:2] == ["bench", "serve"]
    assert (given["--num-prompts"], given["--max-concurrency"], given["--num-warmups"]) == ("12", "4", "4")
    assert given["--seed"] == str(LOAD.seed)
    assert (given["--random-input-len"], given["--random-output-len"]) == ("16", "8")
    assert (given["--result-dir"], given["--result-filename"]) == ("/kept", "result.json")
    assert "--ignore-eos" in words


def test_figures_have_the_names_of_our_own():
    found = read_vllm_figures(SAVED)
    assert found["first_token_ms"] == {"p50": 150.0, "p95": 195.0, "p99": 199.0}
    assert found["between_outputs_ms"]["p99"] == 399.0
    assert found["a_token_ms"]["p50"] == 250.0
    assert (found["requests"], found["tokens"], found["tokens_per_s"], found["seconds"]) == (2, 16, 8.0, 2.0)
    assert found["tokens_an_output"] == 16 / 7


@pytest.mark.parametrize(("failed", "completed"), [(1, 1), (2, 0), (0, 0)])
def test_a_failed_request_fails_the_run(failed, completed):
    with pytest.raises(BenchFailed, match=f"{failed} of {failed + completed} requests failed: gone"):
        read_vllm_figures({**SAVED, "failed": failed, "completed": completed, "errors": ["", "gone"]})


@pytest.mark.skipif(find_spec("vllm") is not None, reason="not run: vLLM is installed here")
def test_without_vllm_it_says_so():
    with pytest.raises(BenchFailed, match="--generator own"):
        run_vllm_bench(LOAD, Path(), limit_s=1)


def test_a_generator_that_fails(monkeypatch):
    monkeypatch.setattr(http_load, "find_spec", lambda name: object())
    monkeypatch.setattr(http_load.sys, "executable", "/bin/false")
    with pytest.raises(BenchFailed, match="exit code 1: it said nothing"):
        run_vllm_bench(LOAD, Path(), limit_s=30)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(find_spec("vllm") is None, reason="not run: vLLM isn't installed, whose load generator it runs")
def test_vllm_itself_takes_the_arguments():
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    taken = parser.parse_args(vllm_arguments(LOAD, Path("/tokenizer"), Path("/kept/result.json"))[2:])
    assert (taken.num_prompts, taken.max_concurrency, taken.percentile_metrics) == (12, 4, "ttft,tpot,itl")
