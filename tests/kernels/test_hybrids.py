"""Triton's kernels with the norms and the rotation of hybrid models: weights in float32, and part of each head rotated.

In float16: the interpreter multiplies bfloat16 wrongly.
"""

import itertools

import pytest
import torch

from kernels.unfused import UnfusedProducts
from outrider.device import HeadNorms, RecurrentBatch, RotaryArgs
from outrider_triton.products.operands import Product

PLAIN = UnfusedProducts()


def random(*shape, seed, device, dtype=torch.float16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def close(made, wanted):
    torch.testing.assert_close(made.float(), wanted.float(), rtol=2e-2, atol=2e-2)


def test_a_gated_mlp_after_a_norm_in_float32(kernels, device):
    x, weight = random(5, 32, seed=4, device=device), random(48, 32, seed=5, device=device)
    gates, norm = (
        random(64, 48, seed=6, device=device) * 0.2,
        1 + random(48, seed=7, device=device, dtype=torch.float32) * 0.1,
    )
    grown = [random(5, 48, seed=8, device=device) for _ in range(2)]
    made, wanted = (
        each.dense.norm_linear_silu_mul(Product(x, weight, None), own, norm, 1e-6, gates, None)
        for each, own in zip((kernels, PLAIN), grown, strict=True)
    )
    close(made / wanted.abs().max(), wanted / wanted.abs().max())


@pytest.mark.parametrize("normed", [False, True])
def test_part_of_each_head_is_rotated(kernels, device, normed):
    angle = torch.rand(5, 4, generator=torch.Generator().manual_seed(9)) * 6
    cos, sin = angle.cos().repeat(1, 2).to(device, torch.float16), angle.sin().repeat(1, 2).to(device, torch.float16)
    qkv = random(5, 8 * 32, seed=10, device=device)
    slots, results = torch.tensor([7, 18, 4, 11, 5], device=device), []
    for each in (kernels, PLAIN):
        caches = [torch.zeros(5, 4, 2, 32, dtype=torch.float16, device=device) for _ in range(2)]
        rotary = RotaryArgs(cos, sin, *caches, slots)
        if normed:
            norms = HeadNorms(*(1 + random(32, seed=seed, device=device, dtype=torch.float32) for seed in (11, 12)), 1e-6)
            q = each.head_norm_rope_write_cache(qkv.clone(), norms, rotary)
        else:
            q, k, v = rotary.split(qkv.clone())
            each.rope_write_cache(q, k, v, *rotary)
        results.append((q, *caches))
    for made, wanted in zip(*results, strict=True):
        close(made, wanted)


def layer(device, *, tokens, heads=2, size=8):
    """Weights of a recurrent layer with one key head, its states, and inputs of the convolution and of the gates."""
    channels = 2 * size + heads * size
    weights = (
        random(channels, 4, seed=21, device=device),
        random(heads, seed=22, device=device, dtype=torch.float32),
        random(heads, seed=23, device=device, dtype=torch.float32),
    )
    states = (
        random(3, 3, channels, seed=25, device=device),
        random(3, heads, size, size, seed=26, device=device, dtype=torch.float32),
    )
    made = random(tokens, channels + 2 * heads, seed=27, device=device)
    return weights, states, made.split((channels, 2 * heads), dim=1)


def run(kernels, weights, states, inputs, batch, window=(None, None)):
    convolution, a_log, dt_bias = weights
    convolved = kernels.short_convolution(inputs[0], convolution, states[0], batch, window[0])
    return kernels.gated_delta_rule(convolved, inputs[1], a_log, dt_bias, states[1], batch, window[1])


def batch_of(rows, count, length, pending=None):
    starts = torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device) * count
    return RecurrentBatch(rows, starts, torch.full_like(starts[1:], length), max(count, 1), pending=pending)


@pytest.mark.parametrize("size", [8, 32, 128])
def test_decoding_verification_and_settling_have_the_same_bits(kernels, device, size):
    """A window of four tokens of two sequences leaves the states. The next window begins with the accepted ones of any
    number, and so does a call without tokens: both write what decoding one by one writes.
    """
    if size != 32 and device.type == "cpu":
        pytest.skip("not run: the interpreter has no lanes, whose number of keys depends on the size")
    weights, states, inputs = layer(device, tokens=16, size=size)
    rows = torch.tensor([2, 1], device=device)
    own = [[each[slice(token, None, 8)] for each in inputs] for token in range(8)]
    one_by_one, singles = [[state.clone() for state in states]], []
    for token in range(8):
        after = [state.clone() for state in one_by_one[-1]]
        singles.append(run(kernels, weights, after, own[token], batch_of(rows, 1, 6 + token)))
        one_by_one.append(after)

    def window_of(first):
        """Tokens of each sequence from its own first of eight on."""
        index = torch.cat([8 * number + begin + torch.arange(4) for number, begin in enumerate(first)]).to(device)
        return [each.index_select(0, index) for each in inputs]

    for sign, counts in itertools.product((1, -1), ((1, 4), (2, 1), (3, 4), (4, 1))):
        late = [state.clone() for state in states]
        kept = (
            torch.full((3, 4, inputs[0].shape[1]), torch.nan, device=device, dtype=torch.float16),
            torch.full((3, 2, 4, size + 2 * size + 2), torch.nan, device=device),
        )
        # Nothing is pending. An earlier window in the other half would not be read.
        made = run(
            kernels,
            weights,
            late,
            window_of((0, 0)),
            batch_of(rows, 4, 9, torch.zeros(3, dtype=torch.int64, device=device)),
            kept,
        )
        assert all(map(torch.equal, late, states))
        for number, token in itertools.product(range(2), range(4)):
            assert torch.equal(made[4 * number + token], singles[token][number])
        pending = torch.zeros(3, dtype=torch.int64, device=device)
        pending[rows] = sign * torch.tensor(counts, device=device)
        if sign < 0:
            kept[1].copy_(kept[1].flip(1).contiguous())
        settled = [state.clone() for state in late], [state.clone() for state in kept]
        run(kernels, weights, settled[0], [each[:1] for each in inputs], batch_of(rows, 0, 5, pending), settled[1])
        made = run(kernels, weights, late, window_of(counts), batch_of(rows, 4, 9, pending), kept)
        for number, (row, count) in enumerate(zip(rows.tolist(), counts, strict=True)):
            for index in range(2):
                wanted = one_by_one[count][index][row]
                assert torch.equal(late[index][row], wanted)
                assert torch.equal(settled[0][index][row], wanted)
            for token in range(4):
                assert torch.equal(made[4 * number + token], singles[count + token][number])
        assert all(torch.equal(late[index][0], states[index][0]) for index in range(2))


def test_a_prompt_cut_at_a_boundary_has_the_bits_of_the_whole(kernels, device):
    (_, a_log, dt_bias), (_, state), (mixed, gates) = layer(device, tokens=70)
    rows, results = torch.tensor([2], device=device), []
    for cuts in ((0, 70), (0, 64, 70)):
        own, made = state.clone(), []
        for start, stop in itertools.pairwise(cuts):
            operands = mixed[start:stop], gates[start:stop], a_log, dt_bias, own
            made.append(kernels.chunk_gated_delta_rule(*operands, batch_of(rows, stop - start, stop)))
        results.append((torch.cat(made), own))
    assert all(map(torch.equal, *results))
    token_by_token = PLAIN.gated_delta_rule(mixed, gates, a_log, dt_bias, state, batch_of(rows, 70, 70))
    close(results[0][0], token_by_token)
