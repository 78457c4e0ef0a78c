"""Trees: what they're made of, and that verifying them changes no token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drawing import some_and_many
from model.harness import Driver
from outrider import Engine, SamplingParams
from outrider.device import ConfigError, KernelSet
from outrider.speculative.eagle import EagleProposer, EagleTreeProposer
from outrider.speculative.proposer import Draft, Proposer
from outrider.speculative.tree import DynamicTree, Tree
from outrider_cpu.backend import CpuBackend
from outrider_proof import tiny
from outrider_proof.tiny import plain_config
from speculative.programs import PROGRAMS, check

# -- shapes ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 20), min_size=8, max_size=8), min_size=1, max_size=3))
@settings(max_examples=50, deadline=None)
def test_mask_and_depths_follow_the_parents(raw):
    parents = [[-1] + [value % (i + 1) - 1 if value else -1 for i, value in enumerate(row)] for row in raw]
    tree = Tree.from_parents(torch.tensor(parents), depth=9)
    for b, row in enumerate(parents):
        for node in range(len(row)):
            ancestors, here = {node}, node
            while row[here] >= 0:
                here = row[here]
                ancestors.add(here)
            assert tree.mask[b, node].nonzero().flatten().tolist() == sorted(ancestors)
            assert tree.depths[b, node] == len(ancestors) - 1


def random_model(vocabulary, seed):
    """Logits of the next token given a path, by a table of random rows; a stand-in for a head."""
    table = torch.randn(4096, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2

    def logits(path):
        return table[hash(tuple(path)) % 4096]

    return logits


def grow(shape, model):
    first = torch.log_softmax(model(()), -1).topk(shape.branches)
    calls = []

    def expand(level):
        calls.append(level)
        out = []
        for node in range(level.tokens.shape[1] - level.fresh, level.tokens.shape[1]):
            path, here = [], node
            while here >= 0:
                path.append(int(level.tokens[0, here]))
                here = int(level.parents[0, here])
            assert int(level.depths[0, node]) == len(path)
            out.append(model(path[::-1]))
        return torch.stack(out).unsqueeze(0)

    tokens, tree = shape.grow(first.indices.unsqueeze(0), first.values.unsqueeze(0), expand)
    paths = []
    for node in range(1, shape.nodes + 1):
        path, here = [], node
        while here > 0:
            path.append(int(tokens[0, here - 1]))
            here = int(tree.parents[0, here])
        paths.append(tuple(path[::-1]))
    return paths, calls


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 100), st.data())
@settings(max_examples=60, deadline=None)
def test_a_dynamic_tree_has_the_likeliest_nodes(topk, depth, seed, data):
    candidates = topk + (depth - 1) * topk * topk
    nodes = data.draw(st.integers(depth, candidates))
    model = random_model(7, seed)
    paths, calls = grow(DynamicTree(topk=topk, depth=depth, nodes=nodes), model)
    # The same search, with paths in a dictionary.
    scores = {}
    level = [()]
    for step in range(depth):
        children = {}
        for path in level:
            likely = torch.log_softmax(model(path), -1).topk(topk)
            children |= {
                (*path, int(t)): scores.get(path, 0.0) + float(v) for t, v in zip(likely.indices, likely.values, strict=True)
            }
        scores |= children
        level = sorted(children, key=children.get, reverse=True)[:topk]
        assert step == 0 or len(calls) >= step
    best = sorted(scores, key=scores.get, reverse=True)[:nodes]
    assert sorted(paths) == sorted(best)
    assert len(calls) == depth - 1


def test_certain_tokens_still_make_a_tree():
    """A draft that is sure gives parent and child the same score; the parent must be kept first."""

    def sure(path):
        logits = torch.full((7,), -1e9)
        logits[len(path) % 7] = 0.0
        return logits

    paths, _ = grow(DynamicTree(topk=2, depth=4, nodes=5), sure)
    assert {(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)} <= set(paths)
    for path in paths:
        assert len(path) == 1 or path[:-1] in paths


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: DynamicTree(topk=0, depth=2), "topk 0"),
        (lambda: DynamicTree(topk=2, depth=3, nodes=2), "3 to 10 nodes, 2 were asked for"),
        (lambda: DynamicTree(topk=2, depth=3, nodes=11), "3 to 10 nodes, 11 were asked for"),
    ],
)
def test_impossible_shapes_are_refused(make, match):
    with pytest.raises(ConfigError, match=match):
        make()


# -- the step --------------------------------------------------------------------------------------------------------


class Scripted(Proposer):
    """Drafts random trees, among them unused nodes and duplicates, into which the right path may be woven."""

    name = "scripted"

    def __init__(self, nodes, depth, *, help_out=0.7, seed=0):
        self._nodes, self._depth, self._help = nodes, depth, help_out
        self._generator = torch.Generator().manual_seed(seed)

    depth = property(lambda self: self._depth)
    nodes = property(lambda self: self._nodes)
    is_tree = property(lambda self: True)
    relay = property(lambda self: ())

    def allocate(self, *, backend, pages, page_size):
        pass

    def draft(self, inputs):
        batch, width = inputs.seq_lens.shape[0], self._nodes + 1
        parents = torch.full((batch, width), -1)
        depths = torch.zeros(batch, width, dtype=torch.int64)
        tokens = torch.zeros(batch, width, dtype=torch.int64)
        tokens[:, 0] = inputs.last_tokens
        for b in range(batch):
            for node in range(1, width):
                usable = [p for p in range(node) if depths[b, p] < self._depth and (p == 0 or parents[b, p] >= 0)]
                pick = int(torch.randint(0, len(usable) + 1, (1,), generator=self._generator))
                if pick == len(usable):
                    continue  # unused
                parents[b, node] = usable[pick]
                depths[b, node] = depths[b, usable[pick]] + 1
                right = torch.rand(1, generator=self._generator) < self._help
                drawn = int(torch.randint(0, tiny.VOCABULARY, (1,), generator=self._generator))
                tokens[b, node] = tiny.successors()[tokens[b, usable[pick]]] if right else drawn
        return Draft(tokens[:, 1:], None, Tree.from_parents(parents, depth=self._depth))

    def extend(self, inputs):  # noqa: ARG002
        raise AssertionError("this proposer relays nothing")


def any_tree(depth, extra, seed, program, overlap):
    check(Scripted(depth + extra, depth, seed=seed), program, overlap)


test_random_trees_give_plain_greedy_tokens, test_many_random_trees_give_plain_greedy_tokens = some_and_many(
    any_tree,
    given(
        depth=st.integers(1, 4),
        extra=st.integers(0, 6),
        seed=st.integers(0, 99),
        **PROGRAMS,
    ),
    some=10,
    many=25,
)


def acceptance(proposer, **config):
    engine = tiny.engine(proposer, max_requests=8, **config)
    engine.generate([(i, i + 1) for i in range(20)], SamplingParams(max_tokens=30, ignore_eos=True))
    return engine.stats.acceptance_length


@pytest.mark.slow
def test_trees_accept_more_than_chains():
    chain = acceptance(EagleProposer(tiny.eagle_head(), draft_tokens=3))
    alike = acceptance(EagleTreeProposer(tiny.eagle_head(), DynamicTree(topk=1, depth=3)))
    tree = acceptance(EagleTreeProposer(tiny.eagle_head(), DynamicTree(topk=4, depth=3)))
    assert chain == alike, "a tree with one branch is a chain"
    assert chain >= 2
    assert tree > chain


@pytest.mark.sample(1)
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(
    "make",
    [
        lambda: EagleProposer(tiny.eagle_head(), draft_tokens=5),
        lambda: EagleTreeProposer(tiny.eagle_head(), DynamicTree(topk=4, depth=4, nodes=24)),
    ],
)
def test_a_request_may_fill_the_context_to_its_end(make, page_size):
    """Drafts reach past the last slot that a request needs; neither masks nor pages may suffer from it."""
    prompt = (3, 1, 4)
    for total in range(24, 25 + min(page_size, 8)):  # every place in a page; of the largest, half
        engine = tiny.engine(make(), max_context=total, page_size=page_size, max_requests=2)
        params = SamplingParams(max_tokens=total - len(prompt), ignore_eos=True)
        results = engine.generate([prompt, (7,)], [params, SamplingParams(max_tokens=total - 1, ignore_eos=True)])
        alone = tiny.engine(None, max_context=64, max_requests=1)
        assert results[0].token_ids == alone.generate([prompt], params)[0].token_ids
        assert len(results[1].token_ids) == total - 1


def cached(engine, request):
    """Keys and values of a running request's tokens, [layers, 2, tokens, heads, size], and these tokens."""
    step = engine._parts
    record = engine._requests[request]
    length = int(step.future.seq_lens[record.row])
    pages, size = record.pages, engine.config.page_size
    slots = torch.tensor([pages[i // size] * size + i % size for i in range(length)])
    flat = [[t.flatten(0, 1)[slots] for t in pair] for pair in step.cache.layers]
    tokens = (*record.prompt, *record.output)[:length]
    return torch.stack([torch.stack(pair) for pair in flat]), tokens


def prefilled(tokens):
    """The same, from one prefill into a fresh cache."""
    driver = Driver(tiny.target(), page_size=len(tokens))
    sequence = driver.sequence()
    driver.hidden([(sequence, tokens)])
    (page,) = sequence.pages
    return torch.stack([torch.stack([t[page] for t in pair]) for pair in driver.cache.layers])


def compaction_error(backend, page_size):
    """The largest difference between the cache of requests that run with trees and a fresh prefill of their tokens."""
    made = plain_config(dtype="float64", max_context=64, page_size=page_size)
    engine = Engine(tiny.decoder(kernels=backend.kernels_in_use), backend, proposer=Scripted(9, 4, help_out=0.9), config=made)
    requests = [engine.add_request((i, 2, 3), SamplingParams(max_tokens=40, ignore_eos=True)) for i in range(3)]
    lengths, worst = set(), 0.0
    for _ in range(16):
        engine.step()
        for request in requests:
            if request not in engine._requests:
                continue
            found, tokens = cached(engine, request)
            worst = max(worst, float((found - prefilled(tokens)).abs().max()))
            lengths.add(len(tokens))
    assert len(lengths) > 5
    return worst


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_compaction_leaves_what_a_prefill_would(page_size):
    assert compaction_error(tiny.BACKEND, page_size) < 1e-9


class NoMoves(KernelSet):
    """Compaction forgotten."""

    def move_cache(self, k_cache, v_cache, sources, destinations):
        pass


class MovesInOrder(KernelSet):
    """Compaction that writes before it has read everything."""

    def move_cache(self, k_cache, v_cache, sources, destinations):
        for source, destination in zip(sources.tolist()[::-1], destinations.tolist()[::-1], strict=True):
            for cache in (k_cache, v_cache):
                cache.flatten(0, 1)[destination] = cache.flatten(0, 1)[source]


@pytest.mark.parametrize("kernels", [NoMoves, MovesInOrder])
def test_a_wrong_compaction_shows(kernels):
    backend = CpuBackend()
    backend.use_kernels(kernels())
    assert compaction_error(backend, 3) > 1e-3


def test_trees_over_a_sliding_window_are_refused():
    target = tiny.decoder(windows=(0, 8, 0))
    proposer = EagleTreeProposer(tiny.eagle_head(), DynamicTree(topk=2, depth=2))
    with pytest.raises(ConfigError, match="sliding window"):
        Engine(target, tiny.BACKEND, proposer=proposer, config=plain_config(dtype="float64"))
