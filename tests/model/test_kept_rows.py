"""Where only some rows of a batch are read behind a stack, its last layer works on these alone: the same states as among
all rows, every key and value written, and fewer rows multiplied.
"""

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drawing import some_and_many
from model.cached_checkpoints import write_cached
from model.harness import Driver
from model.quantized_checkpoints import write_compressed
from outrider.device import KernelSet
from outrider.device.kernels.invariant import InvariantKernels
from outrider.model import (
    Decoder,
    Eagle3Head,
    EagleHead,
    KeptRows,
    MtpHead,
    load_decoder,
    load_through_transformers,
)
from outrider_proof import proposers, tiny
from tiny_checkpoints import write_checkpoint


class Counting(KernelSet):
    """The references, and the rows that each weight was multiplied with, call by call, by the weight's address."""

    def __init__(self):
        self.rows = defaultdict(list)
        self.attended = []

    def linear(self, x, weight, bias=None):
        self.rows[weight.data_ptr()].append(x.shape[0])
        return super().linear(x, weight, bias)

    def paged_attention(self, q, k_cache, v_cache, metadata, **more):
        self.attended.append((q.shape[0], metadata.settled))
        return super().paged_attention(q, k_cache, v_cache, metadata, **more)

    def of(self, weights):
        """Rows of queries, keys and values, of attention's output, and of both products of the MLP."""
        return [self.rows[each.data_ptr()] for each in (weights.qkv, weights.output, weights.gate_up, weights.down)]


def quantized(path, backend):
    write_checkpoint(path / "plain", "llama", hidden_size=128, intermediate_size=256, num_hidden_layers=2)
    write_compressed(path / "plain", path / "made", "int4-g32-asymmetric")
    return load_decoder(path / "made", backend=backend, dtype=torch.float64)


def cached(path, backend):
    write_cached(path, "qwen3", strategy="attn_head")
    return load_decoder(path, backend=backend, dtype=torch.float64)


def foreign(path, backend):
    write_checkpoint(path, "llama")
    return load_through_transformers(path, backend=backend, dtype=torch.float64)


def family(name):
    def load(path, backend):
        write_checkpoint(path, name)
        return load_decoder(path, backend=backend, dtype=torch.float64)

    return load


MODELS = {
    **{name: family(name) for name in ("llama", "llama-biases", "mistral-window", "qwen3", "mixtral")},
    "one layer": lambda *_: tiny.draft_model(),
    "mixture": lambda *_: tiny.mixture(),
    "int4": quantized,
    "fp8 cache, heads normed": cached,
    "transformers": foreign,
}


@pytest.fixture(scope="module")
def model(request, tmp_path_factory, backend):
    return MODELS[request.param](tmp_path_factory.mktemp("model"), backend)


def batches():
    """Some passes, each a list of new tokens for each of some sequences; none of a sequence that isn't in the pass."""
    tokens = st.lists(st.integers(0, tiny.VOCABULARY - 1), max_size=9)
    ragged = st.integers(1, 4).flatmap(lambda count: st.lists(st.lists(tokens, min_size=count, max_size=count), max_size=3))
    return ragged.map(lambda found: [each for each in found if any(each)]).filter(bool)


def ends(inputs, last=None):
    """The input with the end of each sequence kept."""
    found = inputs.attention.query_start[1:].to(torch.int64) - 1 if last is None else last
    return replace(inputs, kept=KeptRows.last_of_each(inputs.attention, found)), found


def same_rows(model, passes, padding):
    agree(model, passes, padding, 1e-11)


def same_bits(invariant, passes, padding):
    agree(invariant, passes, padding, 0.0)


def agree(model, passes, padding, close):
    """Drives two caches through the same passes, one with the ends alone behind the last layer."""
    whole, pruned = Driver(model), Driver(model)
    sequences = [(whole.sequence(), pruned.sequence()) for _ in passes[0]]
    layers = tuple(range(model.config.num_layers))
    for new in passes:
        both = [(pair, tokens) for pair, tokens in zip(sequences, new, strict=True) if tokens]
        inputs, others = (
            driver.inputs([(pair[side], tokens) for pair, tokens in both], padding=padding)
            for side, driver in enumerate((whole, pruned))
        )
        others, last = ends(others)
        with torch.no_grad():
            wanted, entering = model.forward_with_aux_hidden_states(inputs, whole.cache, layers)
            found, also = model.forward_with_aux_hidden_states(others, pruned.cache, layers)
        assert found.shape == (len(both), wanted.shape[1])
        assert (found - wanted[last]).abs().max() <= close
        assert all(torch.equal(one, other) for one, other in zip(entering, also, strict=True))
        for one, other in zip(whole.cache.layers, pruned.cache.layers, strict=True):
            assert all(torch.equal(a.float()[1:], b.float()[1:]) for a, b in zip(one, other, strict=True))


test_the_ends_alone_are_what_they_are_among_all, test_many_ends_alone_are_what_they_are_among_all = some_and_many(
    same_rows,
    given(passes=batches(), padding=st.integers(0, 3)),
    pytest.mark.parametrize("model", MODELS, indirect=True),
    some=3,
    many=40,
)


@pytest.fixture(scope="module")
def invariant():
    made = proposers.copy_to_device(tiny.decoder(windows=(0, 3, 4)).weights, torch.float32)
    return Decoder(tiny.config(windows=(0, 3, 4)), made, InvariantKernels(tiny.BACKEND.kernels))


test_not_a_bit_differs_where_batches_dont_count, test_not_a_bit_differs_in_many_where_batches_dont_count = some_and_many(
    same_bits, given(passes=batches(), padding=st.integers(0, 3)), some=5, many=40
)


def counted_heads(target):
    """A head of each kind, on the target's kernels, with its last layer."""
    eagle, eagle3, peagle, mtp = tiny.eagle_head(), tiny.eagle3_head(), tiny.peagle_head(), tiny.mtp_heads(1)[0]
    states = {"aux_hidden_state_layers": eagle3.aux_hidden_state_layers}
    return {
        "eagle": (EagleHead(eagle.config, eagle.weights, target), eagle.weights.layers[-1]),
        "eagle3": (Eagle3Head(eagle3.config, eagle3.weights, target, **states), eagle3.weights.layers[-1]),
        "eagle3, normed": (
            Eagle3Head(eagle3.config, eagle3.weights, target, norm_before_residual=True, norm_output=True, **states),
            eagle3.weights.layers[-1],
        ),
        "peagle": (
            Eagle3Head(peagle.config, peagle.weights, target, mask_token=tiny.MASK, **states),
            peagle.weights.layers[-1],
        ),
        "mtp": (MtpHead(mtp.config, mtp.weights, target, ahead=1), mtp.weights.layers[-1]),
    }


HEADS = ("eagle", "eagle3", "eagle3, normed", "peagle", "mtp")


def same_drafts(name, lengths, padding):
    target = tiny.decoder(kernels=Counting())
    head, last_layer = counted_heads(target)[name]
    hidden = torch.randn(sum(lengths) + padding, tiny.HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    made, caches, rows = [], [], []
    for pruned in (False, True):
        driver = Driver(target, config=head.config)
        tokens = torch.arange(sum(lengths)).remainder(tiny.VOCABULARY).split(lengths)
        inputs = driver.inputs([(driver.sequence(), each.tolist()) for each in tokens], padding=padding)
        kept, last = ends(inputs)
        target.kernels.rows.clear()
        with torch.no_grad():
            states = head.forward(kept if pruned else inputs, hidden, driver.cache)
        made.append(states if pruned else states[last])
        caches.append(driver.cache.layers)
        rows.append(target.kernels.of(last_layer))
    assert torch.allclose(made[1], made[0], rtol=0, atol=1e-11)
    assert all(torch.equal(a[1:], b[1:]) for one, other in zip(*caches, strict=True) for a, b in zip(one, other, strict=True))
    all_rows, few = [sum(lengths) + padding], [len(lengths)]
    assert rows == [[all_rows] * 4, [all_rows, few, few, few]]


test_heads_give_the_same_ends_for_fewer_products, test_many_heads_give_the_same_ends_for_fewer_products = some_and_many(
    same_drafts,
    given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), padding=st.integers(0, 3)),
    pytest.mark.parametrize("name", HEADS),
    some=4,
    many=30,
)


@pytest.mark.parametrize("layers", [1, 3])
def test_only_the_last_layer_has_fewer_rows(layers):
    """And it doesn't look at its context before it's written: what is settled for all rows isn't for these."""
    kernels = Counting()
    driver = Driver(tiny.decoder(layers=layers, kernels=kernels))
    for step in range(2):
        kernels.rows.clear()
        kernels.attended.clear()
        inputs, _ = ends(driver.inputs([(driver.sequence(), [1, 2, 3, 4, 5]), (driver.sequence(), [6, 7])], padding=1))
        driver.model.forward(inputs if step else inputs.whole, driver.cache)
        counts = [kernels.of(weights) for weights in driver.model.weights.layers]
        assert counts[:-1] == [[[8]] * 4] * (layers - 1)
        assert counts[-1] == [[8], *[[2 if step else 8]] * 3]
        assert kernels.attended[:-1] == [(8, index > 0) for index in range(layers - 1)]
        assert kernels.attended[-1] == ((2, False) if step else (8, layers > 1))


def test_a_sequence_without_tokens_disturbs_nobody():
    """A graph has room for more sequences than come: these keep somebody's row, and page 0 may be anything."""
    driver, whole = (Driver(tiny.target()) for _ in range(2))
    prompts = [[1, 2, 3, 4, 5], [6, 7]]
    wanted = whole.hidden([(whole.sequence(), prompt) for prompt in prompts])
    inputs = driver.inputs([*((driver.sequence(), prompt) for prompt in prompts), *((driver.sequence(), []),) * 3], padding=2)
    for tensor in (tensor for pair in driver.cache.layers for tensor in pair):
        tensor[0].fill_(float("nan"))
    inputs, _ = ends(inputs, torch.tensor([4, 6, 4, 4, 4]))
    assert inputs.kept.attention.seq_lens.tolist() == [5, 2, 1, 1, 1], "a sequence is no shorter than its new token"
    found = driver.model.forward(inputs, driver.cache)
    assert found.shape[0] == 5
    assert torch.allclose(found[:2], wanted[[4, 6]], rtol=0, atol=1e-11)
