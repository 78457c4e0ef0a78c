"""``outrider bench decode``: the figures hang together."""

import re

import pytest
import torch

from bench.test_bench_peers import HYBRID
from outrider import Engine
from outrider.cli.options.models import Speculation, load
from outrider.device.kernels.weight_formats import weight_format
from outrider.registry import get_backend
from outrider_bench.commands.decode import DecodeIterations, run_batch
from outrider_bench.device_profile import profile_device
from outrider_bench.limits import iteration_bytes, iteration_cost, prefill_cost
from outrider_bench.random_weights import random_decoder
from outrider_bench.rates import Cost, DeviceRates, measure_bandwidth, measure_rates
from outrider_proof import tiny
from outrider_proof.tiny import plain_config


def test_figures(outrider):
    result = outrider("bench", "decode", "--backend", "cpu", "--batch", "1,3", "--new-tokens", "16", "--json").json
    assert (result["backend"], result["model"], result["draft"], result["speculate"]) == (
        "cpu",
        "bundled",
        "bundled",
        "eagle",
    )
    assert [row["batch"] for row in result["results"]] == [1, 3]
    for row in result["results"]:
        assert row["ratio_to_limit"] == pytest.approx(row["iteration_ms"] / row["limit_ms"])
        assert row["bytes_ms"] == pytest.approx(row["bytes_per_iteration"] / result["bandwidth_gb_per_s"] / 1e6, rel=1e-4)
        assert row["operations_ms"] == pytest.approx(
            row["operations_per_iteration"] / result["matrix_tflops"] / 1e9, rel=1e-4
        )
        assert row["limit_ms"] == pytest.approx(max(row["bytes_ms"], row["operations_ms"]))
        assert row["iteration_ms_min"] <= row["iteration_ms"] <= row["iteration_ms_max"]
        assert 1 <= row["acceptance_length"] <= 5
        assert row["tokens_per_s"] > 0
        assert 0 < row["host_ms"] <= row["iteration_ms_max"]
        assert 0 < row["device_idle_fraction"] < 1
        assert 64 <= row["mean_context"] <= 80


PRODUCTS = ("aten::mm", "mkldnn::_linear_pointwise", "quantized::linear_dynamic_fp16")
"""Operators that multiply by a weight; the others by a packed weight, on processors for which oneDNN or FBGEMM packs."""


@pytest.mark.parametrize(
    ("arguments", "clock"),
    [(("--backend", "cpu"), "host"), (("--backend", "sim", "--mode", "fused", "--overlap"), "virtual")],
)
def test_by_kernel(outrider, arguments, clock):
    """Busy, between kernels and idle make an iteration, and there are as many matrix products as the model has."""
    command = ("bench", "decode", "--draft-tokens", "2", "--new-tokens", "16", "--by-kernel", "--json")
    result = outrider(*command, *arguments).json
    (row,) = result["results"]
    assert row["profile_clock"] == clock
    assert row["profiled_iterations"] >= 2
    *kernels, between, idle = row["by_kernel"]
    assert idle["share"] == pytest.approx(row["device_idle_fraction"])
    assert idle["us"] == pytest.approx(1e3 * row["profiled_iteration_ms"] * idle["share"])
    assert (
        sum(kernel["us"] for kernel in kernels)
        >= 1e3 * row["profiled_iteration_ms"] * (1 - idle["share"] - between["share"]) * 0.99
    )
    assert [kernel["us"] for kernel in kernels] == sorted((kernel["us"] for kernel in kernels), reverse=True)
    products = [kernel["calls"] for kernel in kernels if kernel["kernel"] in PRODUCTS]
    # 4 in each of the target's layers and its head; 4, the fusion and the head in each of two passes of the draft.
    layers = get_config().num_layers
    assert sum(products) == 4 * layers + 1 + 2 * 6
    if "fused" in arguments:
        assert result["graphs_captured"]["graphs"] > 0
        assert result["graphs_captured"]["seconds"] > 0
    else:
        assert result["graphs_captured"] is None


def test_what_says_nothing_is_absent(outrider, monkeypatch):
    monkeypatch.setattr("outrider_bench.device_profile.profiled", lambda *of, **more: None)
    result = outrider("bench", "decode", "--backend", "cpu", "--new-tokens", "16", "--json").json
    assert result["results"][0]["device_idle_fraction"] is None
    assert "n/a" in outrider("bench", "decode", "--backend", "cpu", "--new-tokens", "16").out
    refused = outrider("bench", "decode", "--backend", "cpu", "--new-tokens", "16", "--by-kernel")
    assert refused.code == 1
    assert "doesn't say what it ran" in refused.err


def test_idle_time_counted_by_hand():
    """Three launches on two streams, one of them a graph of two kernels: between its kernels nothing is idle."""
    event = Ran("matmul", 0, 10, 1), Ran("norm", 14, 20, 1), Ran("copy", 18, 25, 2), Ran("matmul", 45, 50, 3)
    note = Ran("a note", 0, 100, 0, is_user_annotation=True)
    profile = profile_device([*event, note])
    assert (profile.window_us, profile.idle_us, profile.gap_us) == (50, 20, 4)
    assert [(k.name, k.calls, k.us) for k in profile.kernels] == [("matmul", 2, 15), ("copy", 1, 7), ("norm", 1, 6)]
    first = profile.by_kernel(2)[0]
    assert first == {"kernel": "matmul", "calls": 1.0, "us": 7.5, "share": 0.3}
    assert profile_device([note]) is None
    # Without its first launch, which ends at 20 while the second is under way.
    later = profile_device([*event, note], lead=1 / 3)
    assert (later.window_us, later.idle_us, later.share) == (30, 20, 10 / 28)
    assert [(k.name, k.calls, k.us) for k in later.kernels] == [("copy", 1, 5), ("matmul", 1, 5)]
    # A wait between what is left out and what counts is idle time.
    assert profile_device([Ran("a", 0, 10, 1), Ran("b", 30, 40, 2)], lead=0.5).idle_us == 20
    # A copy beside the last graph that is left out: the rest of that graph isn't idle time, nor is the copy.
    ran = [Ran("graph", 0, 50, 1), Ran("copy", 10, 12, 2), Ran("copy", 48, 55, 3), Ran("graph", 60, 100, 4)]
    beside = profile_device(ran, lead=0.25)
    assert (beside.window_us, beside.idle_us) == (50, 5)
    assert [(each.name, each.us) for each in beside.kernels] == [("graph", 40), ("copy", 5)]


class Ran:
    """A device event as torch's profiler tells it."""

    def __init__(self, name, start, end, launch, is_user_annotation=False):
        self.name, self.id, self.is_user_annotation = name, launch, is_user_annotation
        self.device_type = torch.autograd.DeviceType.PrivateUse1
        self.time_range = torch.autograd.profiler_util.Interval(start, end)


def get_config():
    speculation = Speculation.with_defaults("none", model=None, draft=None, draft_tokens=1)
    return load("cpu", speculation, max_requests=1, dtype="float32").model.config


def test_plain(outrider):
    result = outrider("bench", "decode", "--speculate", "none", "--new-tokens", "8", "--json").json
    assert result["draft_tokens"] == 0
    assert result["results"][0]["acceptance_length"] == 1
    assert result["results"][0]["iterations"] == 6  # one of the 8 is prefill's, and the last iteration ends the request


def test_a_limit_that_isnt_known_is_absent(outrider, tmp_path):
    plot = tmp_path / "plot.svg"
    given = ("--backend", "cpu", "--speculate", "ngram", "--prompt-tokens", "8", "--new-tokens", "8", "--plot", str(plot))
    (row,) = outrider("bench", "decode", *given, "--json").json["results"]
    assert row["iteration_ms"] > 0
    assert row["limit_ms"] is row["ratio_to_limit"] is row["bytes_per_iteration"] is None
    assert "<circle" in plot.read_text()
    assert "limit 0" not in plot.read_text()


def test_for_people(outrider):
    result = outrider("bench", "decode", "--new-tokens", "8")
    assert result.code == 0
    assert re.search(r"measured in this run: [\d.]+ GB/s, [\d.e-]+ TFLOP/s", result.out)
    assert result.out.splitlines()[-1].split()[0] == "1"


def test_bytes_of_an_iteration_counted_by_hand():
    speculation = Speculation.with_defaults("eagle", model=None, draft=None, draft_tokens=3)
    engine = load("cpu", speculation, max_requests=1, dtype="float32")
    target, head = engine.model, engine.proposer.head
    layers = sum(t.nbytes for layer in target.weights.layers for t in slots(layer))
    output, embedding = target.weights.head.nbytes, head.weights.embedding
    one_pass = head.weights.fusion.nbytes + sum(t.nbytes for layer in head.weights.layers for t in slots(layer)) + output
    if head.weights.fusion_bias is not None:
        one_pass += head.weights.fusion_bias.nbytes
    weights = layers + target.weights.norm.nbytes + output + 3 * one_pass
    assert embedding.nbytes > 0
    assert iteration_bytes(engine, batch=1, context=0) == weights
    config = target.config
    token = 2 * 4 * config.num_kv_heads * config.head_size
    drafted = 2 * 4 * head.config.num_kv_heads * head.config.head_size
    grown = iteration_bytes(engine, batch=2, context=10) - weights
    assert grown == 20 * (token * config.num_layers + 3 * drafted)


def slots(layer):
    return [value for name in layer.__slots__ if isinstance(value := getattr(layer, name), torch.Tensor)]


def test_a_batch_that_is_never_whole_is_not_timed():
    """The first requests end while the last prompts are still read: what decodes then is a smaller batch."""
    speculation = Speculation.with_defaults("none", model=None, draft=None, draft_tokens=1)
    engine = load("cpu", speculation, max_requests=8, dtype="float32")
    found = run_batch(engine, batch=4, prompt_tokens=700, new_tokens=6)
    assert (found.seconds, found.tokens) == ([], 0)
    assert len(run_batch(engine, batch=2, prompt_tokens=20, new_tokens=6).seconds) > 2


@pytest.mark.slow
def test_what_was_not_timed_is_listed_and_the_rest_measured(outrider, monkeypatch):
    def timed(engine, batch, prompt_tokens, new_tokens):
        return DecodeIterations([], [], 0, 0.0) if batch == 2 else run_batch(engine, batch, prompt_tokens, new_tokens)

    monkeypatch.setattr("outrider_bench.commands.decode.run_batch", timed)
    few = "bench", "decode", "--backend", "cpu", "--prompt-tokens", "20", "--new-tokens", "16"
    made = outrider(*few, "--batch", "1,2", "--json").json
    assert [row["batch"] for row in made["results"]] == [1]
    assert made["not_measured"] == [{"batch": 2, "prompt_tokens": 20}]
    shown = " ".join(outrider(*few, "--batch", "1,2").out.split())
    assert "too few for batch 2 with prompts of 20: no iteration had the whole batch decoding: not measured" in shown
    assert outrider(*few, "--batch", "2").code == 1
    twice = outrider(*few, "--batch", "1,2,1", "--json").json
    assert [row["batch"] for row in twice["results"]] == [1, 1]


def test_bandwidth_is_of_this_world():
    assert 1e8 < measure_bandwidth(get_backend("cpu")) < 1e13


def test_the_best_rate_of_all_reductions_and_products_counts(monkeypatch):
    """A clock of its own: a reduction of the kernel set and a quantised product are faster than all of torch's."""
    taken = {"find_nan": 0.5, "linear_quantized": 0.25}

    def seconds(backend, stream, work):
        return taken.get(getattr(work, "func", work).__name__, 2.0)

    monkeypatch.setattr("outrider_bench.rates._seconds_of", seconds)
    backend = get_backend("cpu")
    weight = weight_format("fp8").random_weight(64, 128, device=backend.device, scales_dtype=torch.float32)
    assert measure_bandwidth(backend) == (1 << 20) / 0.5  # bytes of the buffer
    plain = measure_rates(backend, torch.float32)
    assert plain.operations == 2 * 64**3 / 2.0
    quantized = measure_rates(backend, torch.float32, weights=[weight])
    assert quantized.operations == 2 * 64 * 64 * 128 / 0.25


def test_a_limit_is_the_larger_of_bytes_and_operations():
    rates = DeviceRates(bandwidth=100.0, operations=1000.0)
    assert rates.limits_ms(Cost(10.0, 10.0)) == {"limit_ms": 100.0, "bytes_ms": 100.0, "operations_ms": 10.0}
    assert rates.limits_ms(Cost(10.0, 500.0)) == {"limit_ms": 500.0, "bytes_ms": 100.0, "operations_ms": 500.0}


def test_operations_counted_by_hand():
    engine = load(
        "cpu", Speculation.with_defaults("none", model=None, draft=None, draft_tokens=1), max_requests=2, dtype="float32"
    )
    config, length, weights = engine.model.config, 24, engine.model.weights
    output, token = 2 * weights.head.numel(), operations(weights.layers)
    scores = 4 * config.num_layers * config.num_heads * config.head_size
    found, shorter = prefill_cost(engine, length), prefill_cost(engine, length - 1)
    assert found.operations == length * token + output + scores * length * length / 2
    assert found.bytes > sum(each.nbytes for layer in weights.layers for each in slots(layer)) + weights.head.nbytes
    assert found.bytes - shorter.bytes == 2 * 4 * config.num_layers * config.num_kv_heads * config.head_size
    found = iteration_cost(engine, batch=2, context=10)
    assert found == Cost(iteration_bytes(engine, batch=2, context=10), 2 * (token + output + 10 * scores))
    drafting = load(
        "cpu", Speculation.with_defaults("eagle", model=None, draft=None, draft_tokens=3), max_requests=2, dtype="float32"
    )
    head = drafting.proposer.head
    drafted = operations(head.weights.layers) + 2 * head.weights.fusion.numel() + output
    drafted += 10 * 4 * head.config.num_heads * head.config.head_size
    expected = 4 * found.operations + 2 * 3 * drafted
    assert iteration_cost(drafting, batch=2, context=10).operations == expected


def test_operations_of_experts_and_recurrent_layers():
    """A token takes two of eight experts, and reads and updates each state."""
    engine = Engine(tiny.mixture(), tiny.BACKEND, config=plain_config(max_context=32, dtype="float64"))
    weights = engine.model.weights
    stacks = sum(layer.gate_up.numel() + layer.down.numel() for layer in weights.layers if layer.router is not None)
    token = operations(weights.layers) - 2 * stacks * 6 / 8 + 2 * weights.head.numel()
    assert iteration_cost(engine, batch=3, context=0).operations == pytest.approx(3 * token)
    hybrid = random_decoder(HYBRID, backend=tiny.BACKEND, dtype=torch.float32)
    engine = Engine(hybrid, tiny.BACKEND, config=plain_config(max_context=32, dtype="float32"))
    own = operations(layer.recurrent for layer in hybrid.weights.layers if layer.recurrent is not None)
    token = operations(hybrid.weights.layers) + own + 2 * hybrid.weights.head.numel()
    states = 3 * 6 * 4 * 16 * 16
    assert iteration_cost(engine, batch=1, context=0).operations == token + states


def operations(layers):
    return sum(2 * each.numel() for layer in layers for each in slots(layer) if each.dim() > 1)
