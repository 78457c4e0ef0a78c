"""``outrider bench kernels`` and random weights: their figures, and the options that they refuse."""

import json
from dataclasses import replace

import pytest
import torch

from outrider import Engine
from outrider.device import DecoderShape, KernelSet
from outrider.device.kernels.kernelset import kernel_names
from outrider.device.kernels.weight_formats import WEIGHT_FORMATS
from outrider.model.config.shapes import SHAPES
from outrider.registry import get_backend
from outrider.speculative.parallel import BlockProposer
from outrider_bench.kernel_cases import kernel_cases, product_cases
from outrider_bench.limits import iteration_bytes
from outrider_bench.random_checkpoint import checkpoint_config
from outrider_bench.random_weights import layers_read, random_decoder, random_dflash
from outrider_bench.synthetic import with_synthetic_acceptance
from outrider_proof import tiny
from outrider_proof.tiny import plain_config

SHAPE = DecoderShape(hidden=32, heads=4, kv_heads=2, head_size=8, inner=48, vocabulary=64, fused=64)
HOST = torch.device("cpu")


def test_every_kernel_is_measured_and_every_case_runs():
    cases = [
        *kernel_cases(SHAPE, dtype=torch.float32, device=HOST),
        *product_cases(SHAPE, tokens=4, rotate_bytes=1, dtype=torch.float32, device=HOST),
    ]
    for case in cases:
        case.call(KernelSet(), 0)
        case.call(KernelSet(), 1)
        assert case.bytes > 0
    assert {case.kernel for case in cases if case.planned is not None} == {"paged_attention"}
    # What shapes logits runs where a request asks for it.
    untimed = {"bias_logits", "penalize_logits", "count_tokens", "truncate_logits", "logprobs", "plan_attention"}
    # The shapes that are timed have no experts; products with quantised weights are timed by themselves (--quantized).
    untimed |= {"apply_token_bitmask", "route", "experts", "linear_quantized", "experts_quantized", "experts_block"}
    untimed |= {"short_convolution", "gated_delta_rule", "chunk_gated_delta_rule", "gated_rms_norm"}  # no recurrent layers
    untimed |= {"sigmoid_mul", "recurrent_block"}
    untimed |= {"head_linear", "latent_norm_rope_write_cache", "latent_attention"}  # no latent attention
    assert set(kernel_names()) - {case.kernel for case in cases} == untimed


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_products_with_quantised_weights_are_measured(name):
    cases = list(product_cases(SHAPE, tokens=3, rotate_bytes=1, dtype=torch.float32, device=HOST, format=name))
    assert [case.name for case in cases] == [
        f"{name} {product}, 3 tokens" for product in ("qkv", "output", "gate and up", "down", "head")
    ]
    for case in cases:
        made = [case.call(KernelSet(), number) for number in (0, 1)]
        assert 0.3 < float(made[0].std()) < 3
        assert not torch.equal(*made)


def test_bytes_of_products_counted_by_hand():
    sizes = {"tokens": 4, "rotate_bytes": 1, "dtype": torch.float32, "device": HOST}
    (quantized, *_) = product_cases(SHAPE, **sizes, format="int4-zeros")
    assert quantized.bytes == 64 * 16 + 64 * 5 + 4 * 4 * (
        32 + 64
    )  # half bytes, a scale and a zero point a row, x, the result
    (qkv, output, *_) = product_cases(SHAPE, **sizes)
    assert qkv.bytes == 4 * (64 * 32 + 4 * 32 + 4 * 64)
    assert output.bytes == 4 * (32 * 32 + 2 * 4 * 32)


def test_a_backend_without_graphs_is_refused(outrider):
    result = outrider("bench", "kernels", "--backend", "cpu")
    assert (result.code, result.out) == (1, "")
    assert "needs captures_graphs and event_timing" in result.err


def test_attention_is_measured_with_its_plan(outrider, monkeypatch):
    """As an engine would have it planned: the kernels beside it, and torch's, plan nothing."""
    from outrider_sim.kernels import HostPlan

    planned = []
    fill = HostPlan.fill
    monkeypatch.setattr(HostPlan, "fill", lambda plan, batch, *a: (planned.append(batch.max_query), fill(plan, batch, *a))[1])
    monkeypatch.setattr("outrider_bench.commands.kernels._CALLS", 1)
    monkeypatch.setattr("outrider_bench.commands.kernels._REPLAYS", 1)
    monkeypatch.setattr("outrider_bench.commands.kernels._ROTATE_BYTES", 1 << 16)
    result = outrider(
        *("bench", "kernels", "--backend", "sim:kernels=host-plans", "--shape", "tiny", "--dtype", "float32"),
        *("--tokens", "1", "--only", "paged_attention", "--json"),
    ).json
    assert {row["kernel"] for row in result["results"]} == {"paged_attention"}
    assert planned == [1, 4, 4, 4, 4, 4, 4, 512]
    assert all(row["us"] > 0 and row["own_us"] > 0 for row in result["results"])


@pytest.mark.slow
def test_random_weights(outrider):
    result = outrider(
        *("bench", "decode", "--backend", "cpu", "--shape", "tiny", "--dtype", "float32"),
        *("--new-tokens", "800", "--draft-tokens", "3", "--accept-length", "3", "--json"),
    ).json
    assert result["model"] == "random weights of tiny"
    assert result["acceptance"] == "synthetic, mean 3"
    assert "synthetic acceptance of 3" in result["kernels"]
    assert result["results"][0]["acceptance_length"] == pytest.approx(3.0, abs=0.05)


@pytest.mark.slow
def test_random_block_drafter(outrider, tmp_path):
    config = replace(SHAPES["tiny"], num_layers=6, windows=(0,) * 6)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(checkpoint_config(config, dtype="float32")))
    result = outrider(
        *("bench", "decode", "--backend", "sim", "--shape", str(file), "--dtype", "float32", "--mode", "fused", "--overlap"),
        *("--speculate", "dflash", "--draft-tokens", "7", "--accept-length", "4.5", "--new-tokens", "480", "--json"),
    ).json
    assert (result["draft"], result["draft_tokens"]) == ("random weights, 5 layers", 7)
    assert (result["mode"], result["overlap"]) == ("fused", True)
    assert result["results"][0]["acceptance_length"] == pytest.approx(4.5, abs=0.3)


def test_bytes_of_a_block_drafter_counted_by_hand():
    target = random_decoder(SHAPES["tiny"], backend=tiny.BACKEND, dtype=torch.float64)
    head = random_dflash(target, layers=1, block_size=4, backend=tiny.BACKEND)
    config = plain_config(max_context=32, dtype="float64")
    drafting = Engine(target, tiny.BACKEND, proposer=BlockProposer(head), config=config)
    plain = Engine(target, tiny.BACKEND, config=config)
    hidden, inner, keys, queries = 64, 128, 32, 64
    layer = (queries + 2 * keys) * hidden + queries * hidden + 3 * inner * hidden + 2 * hidden + 2 * 16
    numbers = hidden * hidden + 2 * hidden + layer + 2 * keys * hidden + 512 * hidden
    for context in (0, 3):
        more = iteration_bytes(drafting, batch=1, context=context) - iteration_bytes(plain, batch=1, context=context)
        assert more == 8 * (numbers + context * 2 * keys)


@pytest.mark.parametrize(
    ("depth", "count", "layers"),
    [(36, 5, (2, 10, 18, 26, 34)), (32, 5, (2, 9, 16, 23, 30)), (6, 5, (1, 2, 3, 4, 5)), (2, 1, (1,)), (6, 1, (3,))],
)
def test_layers_that_a_block_drafter_reads(depth, count, layers):
    assert layers_read(depth, count) == layers


def test_synthetic_acceptance_says_so_to_people(outrider):
    result = outrider(
        *("bench", "decode", "--backend", "cpu", "--shape", "tiny", "--dtype", "float32"),
        *("--new-tokens", "16", "--accept-length", "2"),
    )
    assert "ACCEPTANCE IS SYNTHETIC" in result.out


@pytest.mark.parametrize(
    ("length", "whole", "drafted", "expected"),
    [
        (1.0, 3, 3, 1.0),
        (2.4, 3, 3, 2.4),
        (2.98, 3, 3, 2.98),
        (2.98, 3, 2, 2.456),
        (2.98, 3, 1, 1.806),
        (3.0, 2, 2, 3.0),
        (4.5, 7, 7, 4.5),
    ],
)
def test_mean_lengths_of_synthetic_acceptance(length, whole, drafted, expected):
    """A chain that is cut short yields less: else a policy of draft lengths would find its last tokens to be for nothing."""
    kernels = with_synthetic_acceptance(KernelSet(), length, whole, context=700)
    batch = 4000
    logits = torch.randn(batch, drafted + 1, 16)
    drafts = torch.randint(0, 16, (batch, drafted))
    positions, seeds = torch.arange(batch) % 700, torch.arange(batch) // 700
    tokens, accepted = kernels.verify_chain(logits, drafts, None, torch.zeros(batch), seeds, positions)
    assert float(accepted.double().mean()) + 1 == pytest.approx(expected, abs=0.03)
    for row in range(0, batch, 97):
        count = int(accepted[row])
        assert tokens[row, :count].tolist() == drafts[row, :count].tolist()
        assert 0 <= int(tokens[row, count]) < 16
        assert tokens[row, count + 1 :].eq(-1).all()


def test_requests_have_chances_in_turn_and_accept_no_more_than_was_verified():
    kernels = with_synthetic_acceptance(KernelSet(), "3.439,1.417", 3, context=700, by_request=True)
    batch = 4000
    logits, drafts = torch.randn(batch, 4, 16), torch.randint(0, 16, (batch, 3))
    positions, heat = torch.arange(batch) // 2 % 700, torch.zeros(batch)
    _, whole = kernels.verify_chain(logits, drafts, None, heat, positions, positions)
    assert [float(whole[kind::2].double().mean()) for kind in (0, 1)] == pytest.approx([2.439, 0.417], abs=0.08)
    lengths = torch.arange(batch) % 4
    drafts[torch.arange(3) >= lengths.unsqueeze(1)] = -1
    tokens, accepted = kernels.verify_chain(logits, drafts, None, heat, positions, positions)
    assert accepted.tolist() == torch.minimum(whole, lengths).tolist()
    for row in range(0, batch, 97):
        count = int(accepted[row])
        assert tokens[row, :count].tolist() == drafts[row, :count].tolist()
        assert 0 <= int(tokens[row, count]) < 16
        assert tokens[row, count + 1 :].eq(-1).all()


def test_synthetic_acceptance_is_two_operations():
    """They are of the benchmark alone, and of every iteration that it measures."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if not any(view in str(func) for view in ("slice", "select", "alias")):
                calls.append(str(func.overloadpacket))
            return func(*args, **(kwargs or {}))

    kernels = with_synthetic_acceptance(KernelSet(), 2.4, 3, context=70_000)
    logits, drafts, zeros = torch.randn(5, 4, 16), torch.ones(5, 3, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    checked = (logits, drafts, torch.zeros(5), zeros, zeros + 69_999, torch.zeros(5, 2, dtype=torch.int64))
    first = kernels.verify_checked(*checked)  # decides beforehand
    with Noted():
        again = kernels.verify_checked(*checked)
    assert calls[-2:] == ["aten.index", "aten.addcmul_"]
    assert calls[-3].startswith("outrider.verify_chain")
    for mine, other in zip(first, again, strict=True):
        assert torch.equal(mine, other)
    alone = [x[3:4] for x in checked]
    assert kernels.verify_chain(*alone[:2], None, *alone[2:5])[1].shape == (1,)
    assert len(kernels.tables) == 1  # sizes of batches share what was decided


def test_kernels_by_name():
    assert get_backend("cpu:kernels=torch").kernels_in_use.name == "torch"
