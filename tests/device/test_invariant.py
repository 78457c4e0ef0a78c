"""Batch-invariant kernels: a row's bits don't depend on the other rows."""

from inspect import getmembers, isfunction

import pytest
import torch

from outrider.device import AttentionMetadata, CapabilityError, KernelSet, RecurrentBatch
from outrider.device.kernels.invariant import InvariantKernels
from outrider.device.kernels.kernelset import composed_kernels, kernel_names
from outrider_conformance.lab import Lab
from outrider_conformance.random_kernels.recurrent import check_equal_bits
from outrider_cpu.backend import CpuBackend

EXACT = {
    "apply_token_bitmask",
    "bias_logits",
    "penalize_logits",
    "count_tokens",
    "move_cache",
    "gather_rows",
    "copy_rows",
    "scatter_rows",
    "find_nan",
    "gather_requests",
    "gather_checked",
    "place_tokens",
    "publish_accepted",
    "place_accepted",
}
"""Single additions, products, quotients, copies and comparisons: rounded once at most, whatever the shape of the call."""
COMPOSED = composed_kernels().keys() - {"all_reduce_rms_norm", "latent_norm_rope_write_cache"}
"""By default these call other methods, which are wrapped."""

PLAIN, KERNELS = KernelSet(), KernelSet().batch_invariant()
DTYPES = [torch.float32, torch.bfloat16]
ROWS = 37


def test_every_kernel_is_wrapped_or_exact():
    plain = {name for name in kernel_names() if getattr(InvariantKernels, name) is getattr(KernelSet, name)}
    assert plain == EXACT | COMPOSED
    assert KERNELS.row_invariant
    assert not PLAIN.row_invariant


def test_what_is_no_kernel_is_passed_on_or_declared_absent(tmp_path):
    others = {name for name, _ in getmembers(KernelSet, isfunction) if not name.startswith("_")} - set(kernel_names())
    assert others - vars(InvariantKernels).keys() == {
        *("for_shape", "tune", "use_tuned", "unused_overrides", "implementation", "is_native", "resolve_block"),
        "compile_ahead",  # each variant is compiled at its first call in the warm-up
    }

    class Tuned(KernelSet):
        name, tunes = "tuned", True

        def chosen(self):
            return {"linear": "this"}

        def use_tuned(self, directory):
            raise AssertionError(f"what {directory} has was measured for other shapes")

    kernels = InvariantKernels(Tuned())
    assert kernels.chosen() == {"linear": "this"}
    assert (kernels.tunes, kernels.use_tuned(tmp_path)) == (False, 0)
    with pytest.raises(CapabilityError, match="'tuned, batch-invariant' don't tune"):
        kernels.tune((), deadline_s=1.0, directory=tmp_path)


def bits(tensor):
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def same_in_any_company(function, *rows):
    """Row i alone, in a batch of all, and in a batch of others where it has another place."""
    whole = function(*rows)
    for i in (0, 1, 5, 17, 36):
        alone = function(*(tensor[i : i + 1] for tensor in rows))[0]
        others = torch.cat((torch.arange(i + 1, ROWS), torch.arange(i + 1)))[-(i + 3) :]
        elsewhere = function(*(tensor[others] for tensor in rows))[-1]
        if not (torch.equal(bits(alone), bits(whole[i])) and torch.equal(bits(alone), bits(elsewhere))):
            return False
    return True


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [1, 16])
@pytest.mark.parametrize("shape", [(32, 96), (100, 77), (257, 64), (1024, 512), (64, 2048)])
def test_linear(dtype, tile, shape):
    wide, narrow = shape
    x, weight, bias = torch.randn(ROWS, wide).to(dtype), torch.randn(narrow, wide).to(dtype), torch.randn(narrow).to(dtype)
    kernels = InvariantKernels(PLAIN, tile=tile)
    assert same_in_any_company(lambda rows: kernels.linear(rows, weight, bias), x)
    torch.testing.assert_close(kernels.linear(x, weight, bias), PLAIN.linear(x, weight, bias), atol=2e-2, rtol=2e-2)
    levels = x[:36].view(9, 4, wide)
    assert torch.equal(kernels.linear(levels, weight, bias).flatten(0, 1), kernels.linear(x, weight, bias)[:36])


def test_the_same_check_fails_plain_kernels():
    x, weight = torch.randn(ROWS, 1024), torch.randn(512, 1024)
    assert not same_in_any_company(lambda rows: PLAIN.linear(rows, weight), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_activation(dtype):
    x, weight = torch.randn(ROWS, 77).to(dtype), torch.randn(77).to(dtype)
    assert same_in_any_company(lambda rows: KERNELS.rms_norm(rows, weight, 1e-6), x)
    assert same_in_any_company(lambda a, b: KERNELS.add_rms_norm(a, b.clone(), weight, 1e-6), x, x.flip(0))
    assert same_in_any_company(KERNELS.silu_mul, x[:, :66])
    residual = x.clone()
    KERNELS.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, x + x)


def paged(kernels, q, k_cache, v_cache, table, lens, queries, bound):
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        block_table=table,
        max_query=max(queries),
        max_kv=bound,
    )
    return kernels.paged_attention(q, k_cache, v_cache, metadata, scale=0.3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_in_other_company_chunks_and_bounds(dtype):
    k_cache, v_cache = torch.randn(31, 4, 2, 16).to(dtype), torch.randn(31, 4, 2, 16).to(dtype)
    q, table = torch.randn(9, 4, 16).to(dtype), torch.arange(1, 31, dtype=torch.int32).view(3, 10)
    together = paged(KERNELS, q, k_cache, v_cache, table, [21, 3, 40], [5, 1, 3], 40)
    alone = paged(KERNELS, q[:5], k_cache, v_cache, table[:1], [21], [5], 21)
    first, rest = (
        paged(KERNELS, q[:2], k_cache, v_cache, table[:1], [18], [2], 18),
        paged(KERNELS, q[2:5], k_cache, v_cache, table[:1], [21], [3], 30),
    )
    assert torch.equal(bits(together[:5]), bits(alone))
    assert torch.equal(bits(torch.cat((first, rest))), bits(alone))
    plain = paged(PLAIN, q, k_cache, v_cache, table, [21, 3, 40], [5, 1, 3], 40)
    torch.testing.assert_close(together, plain, atol=2e-2, rtol=2e-2)


def test_rope_and_cache_write():
    k_cache = torch.zeros(20, 2, 2, 8)
    q, k, cos, sin = torch.randn(ROWS, 4, 8), torch.randn(ROWS, 2, 8), torch.randn(ROWS, 8), torch.randn(ROWS, 8)
    results = []
    for kernels in (PLAIN, KERNELS):
        mine, caches = (q.clone(), k.clone()), (k_cache.clone(), k_cache.clone())
        kernels.rope_write_cache(*mine, k, cos, sin, *caches, torch.arange(2, ROWS + 2))
        results.append((*mine, *caches))
    for plain, invariant in zip(*results, strict=True):
        torch.testing.assert_close(invariant, plain)


def test_draws_and_reports():
    logits, hot = torch.randn(ROWS, 2, 300) * 3, torch.rand(ROWS) + 0.5
    seeds, positions = torch.arange(ROWS), torch.arange(ROWS) * 3
    top_k, share = torch.full((ROWS,), 50), torch.full((ROWS,), 0.9)
    assert same_in_any_company(
        lambda *rows: KERNELS.truncate_logits(*rows, share[: len(rows[0])] * 0), logits, hot, top_k, share
    )
    assert same_in_any_company(
        lambda rows: KERNELS.logprobs(rows, torch.zeros(len(rows), 2, dtype=torch.int64), 3)[0], logits
    )
    drawn = KERNELS.sample(logits[:, 0], hot, seeds, positions, draft=True)
    assert torch.equal(drawn, PLAIN.sample(logits[:, 0], hot, seeds, positions, draft=True))
    probs = torch.softmax(torch.randn(ROWS, 1, 300), -1)
    arguments = (logits, drawn.unsqueeze(1), probs, hot, seeds, positions)
    for mine, plain in zip(KERNELS.verify_chain(*arguments), PLAIN.verify_chain(*arguments), strict=True):
        assert torch.equal(mine, plain)


def recurrent_operands(dtype, tokens):
    """Sequences of ``tokens`` tokens each in rows 1 to n, the second without an earlier token."""
    count = len(tokens)
    starts = torch.tensor([0, *tokens]).cumsum(0).to(torch.int32)
    lens = torch.tensor([number + (0 if index == 1 else 3) for index, number in enumerate(tokens)], dtype=torch.int32)
    batch = RecurrentBatch(torch.arange(1, count + 1), starts, lens, max(tokens))
    state = torch.randn(count + 1, 4, 6, 5)
    mixed, gates = torch.randn(sum(tokens), 2 * 2 * 6 + 4 * 5).to(dtype), torch.randn(sum(tokens), 8).to(dtype)
    return (mixed, gates, torch.randn(4), torch.randn(4)), state, batch


@pytest.mark.parametrize("dtype", DTYPES)
def test_recurrent_kernels(dtype):
    """A sequence's bits don't depend on other sequences, on later tokens, nor on the chunks of its prompt."""
    operands, state, batch = recurrent_operands(dtype, [5, 4, 7])
    inputs, weight, last = operands[0], torch.randn(operands[0].shape[1], 4).to(dtype), torch.randn(4, 3, 44).to(dtype)
    whole, whole_last = state.clone(), last.clone()
    made = KERNELS.chunk_gated_delta_rule(*operands, whole, batch)
    convolved = KERNELS.short_convolution(inputs, weight, whole_last, batch)
    for number, (start, end) in enumerate(((0, 5), (5, 9), (9, 16))):
        own, own_last, chunks, short = state.clone(), last.clone(), [], []
        before = int(batch.seq_lens[number]) - (end - start)
        for begin, stop in ((start, start + 2), (start + 2, end)):
            starts, lens = torch.tensor([0, stop - begin]), torch.tensor([before + stop - start])
            alone = RecurrentBatch(
                batch.rows[number : number + 1], starts.to(torch.int32), lens.to(torch.int32), stop - begin
            )
            part = (operands[0][begin:stop], operands[1][begin:stop], *operands[2:])
            chunks.append(KERNELS.chunk_gated_delta_rule(*part, own, alone))
            short.append(KERNELS.short_convolution(inputs[begin:stop], weight, own_last, alone))
        assert torch.equal(torch.cat(chunks), made[start:end])
        assert torch.equal(torch.cat(short), convolved[start:end])
        assert torch.equal(own[number + 1], whole[number + 1])
        assert torch.equal(own_last[number + 1], whole_last[number + 1])


@pytest.mark.parametrize("kernels", [PLAIN, KERNELS], ids=["reference", "invariant"])
@pytest.mark.parametrize("kernel", ["short_convolution", "gated_delta_rule"])
def test_a_window_settles_to_the_bits_of_its_tokens(kernels, kernel, monkeypatch):
    """Drafts are verified without a write to the state. The accepted prefix then leaves the bits of a pass over it alone."""
    lab = Lab(CpuBackend(), seed=1)
    monkeypatch.setattr(CpuBackend, "kernels_in_use", property(lambda backend: kernels))
    (stream,) = lab.streams("s")
    check_equal_bits(lab, stream, kernel, 1)


@pytest.mark.parametrize("seed", range(6))
def test_a_prompt_that_is_cut_between_chunks_keeps_the_bits_of_recurrent_layers(seed):
    """Also in the ordinary mode: states of a prefix continue to the same bits, whatever the values are."""
    lab = Lab(CpuBackend(), seed=seed)
    (stream,) = lab.streams("s")
    check_equal_bits(lab, stream, "chunk_gated_delta_rule", seed)
