"""Every proposer, chain and tree: plain greedy tokens, real acceptance, lossless sampling."""

import functools
import math

import pytest
import torch
from hypothesis import given

from drawing import some_and_many
from model.harness import Driver
from outrider import Engine, SamplingParams
from outrider.device import ConfigError, Graph, KernelSet
from outrider.engine.requests.draft_length import LengthSchedule
from outrider.engine.stages import PlanPositions
from outrider.model import DFlashHead, DraftVocabulary, EagleHead, MtpHead, with_output_head
from outrider.registry import get_backend
from outrider.speculative.draft_model import DraftModelProposer, DraftModelTreeProposer
from outrider.speculative.eagle import EagleProposer, EagleTreeProposer
from outrider.speculative.lookup import CombinedProposer, NgramProposer, SuffixProposer
from outrider.speculative.mtp import MtpProposer
from outrider.speculative.parallel import BlockProposer, PEagleProposer
from outrider.speculative.tree import DynamicTree
from outrider_proof import proposers, tiny
from outrider_proof.tiny import plain_config
from speculative.programs import PROGRAMS, check


def drawing_from_some():
    """The tiny target, of whose tokens every fourth is never drafted."""
    ids = torch.arange(tiny.VOCABULARY)
    kept = ids[ids % 4 != 1]
    return with_output_head(tiny.target(), backend=tiny.BACKEND, vocabulary=DraftVocabulary(ids=kept, origin="most tokens"))


def eagle_from_some():
    head = tiny.eagle_head()
    return EagleHead(head.config, head.weights, drawing_from_some())


def dflash_from_some():
    head, target = tiny.dflash_head(), drawing_from_some()
    told = {name: getattr(head, name) for name in ("block_size", "mask_token", "aux_hidden_state_layers")}
    return DFlashHead(head.config, head.weights, target, **told)


def mtp_from_some():
    target = drawing_from_some()
    return [MtpHead(head.config, head.weights, target, ahead=head.ahead) for head in tiny.mtp_heads()]


PROPOSERS = {
    "eagle": lambda: EagleProposer(tiny.eagle_head(), draft_tokens=3),
    "eagle-tree": lambda: EagleTreeProposer(tiny.eagle_head(), DynamicTree(topk=3, depth=3)),
    "eagle, some tokens": lambda: EagleProposer(eagle_from_some(), draft_tokens=3),
    "eagle-tree, some tokens": lambda: EagleTreeProposer(eagle_from_some(), DynamicTree(topk=3, depth=3)),
    "mtp, some tokens": lambda: MtpProposer(mtp_from_some()),
    "mtp-tree, some tokens": lambda: MtpProposer(mtp_from_some(), branches=3),
    "dflash, some tokens": lambda: BlockProposer(dflash_from_some()),
    "eagle3": lambda: EagleProposer(tiny.eagle3_head(), draft_tokens=3),
    "eagle3-tree": lambda: EagleTreeProposer(tiny.eagle3_head(), DynamicTree(topk=3, depth=3)),
    "mtp": lambda: MtpProposer(tiny.mtp_heads()),
    "mtp-one": lambda: MtpProposer(tiny.mtp_heads(), draft_tokens=1),
    "mtp-tree": lambda: MtpProposer(tiny.mtp_heads(), branches=3),
    "peagle": lambda: PEagleProposer(tiny.peagle_head(), draft_tokens=3),
    "dflash": lambda: BlockProposer(tiny.dflash_head()),
    "draft-model": lambda: DraftModelProposer(tiny.draft_model(), target=tiny.target(), draft_tokens=3),
    "draft-model-tree": lambda: DraftModelTreeProposer(
        tiny.draft_model(), target=tiny.target(), shape=DynamicTree(topk=3, depth=3)
    ),
    "ngram": lambda: NgramProposer(vocab_size=tiny.VOCABULARY, draft_tokens=4),
    "ngram-tree": lambda: NgramProposer(vocab_size=tiny.VOCABULARY, draft_tokens=3, branches=3),
    "suffix+eagle": lambda: CombinedProposer(
        SuffixProposer.for_target(tiny.target(), 3), EagleProposer(tiny.eagle_head(), draft_tokens=3), least=2
    ),
    "suffix": lambda: SuffixProposer(vocab_size=tiny.VOCABULARY, draft_tokens=4),
}


def any_program(name, program, overlap):
    check(PROPOSERS[name](), program, overlap)


test_any_program_gives_plain_greedy_tokens, test_many_programs_give_plain_greedy_tokens = some_and_many(
    any_program,
    given(**PROGRAMS),
    pytest.mark.parametrize("name", PROPOSERS),
    pytest.mark.sample(5),
    some=2,
    many=8,
)


@pytest.mark.parametrize("name", PROPOSERS)
def test_a_uniform_pass_has_as_many_new_tokens_as_it_says(name, monkeypatch):
    """Kernels of some devices take the queries apart by that number; the host's find them by their offsets."""
    kind, passes, longest = type(tiny.BACKEND.kernels), [], []
    attention = kind.paged_attention

    def noted(kernels, q, k_cache, v_cache, metadata, **named):
        if metadata.uniform:
            passes.append((q.shape[0], metadata.seq_lens.shape[0] * metadata.max_query))
        longest.append((int(metadata.seq_lens.max()), metadata.max_kv))
        return attention(kernels, q, k_cache, v_cache, metadata, **named)

    monkeypatch.setattr(kind, "paged_attention", noted)
    engine = tiny.engine(PROPOSERS[name](), prefill_chunk=4)
    engine.generate([(3,), (1, 2, 3, 4, 5, 6)], SamplingParams(max_tokens=6, ignore_eos=True))
    assert passes
    assert all(tokens == told for tokens, told in passes)
    assert all(found <= bound for found, bound in longest)


CHAINS = ["eagle", "mtp", "peagle", "dflash", "draft-model", "suffix+eagle"]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "drafted"),
    [*((name, ()) for name in (*CHAINS, "eagle-tree", "draft-model-tree")), *((name, (1, 3, 0, 2)) for name in CHAINS)],
)
def test_lengths_that_are_declared_for_graphs_are_those_of_calls(name, drafted, monkeypatch):
    """What a device takes as host integers: of each pass by its name, iteration after iteration, whatever they draft. A graph
    has none of a pass that a shorter draft leaves out.
    """
    backend = get_backend("sim:like=npu")
    loading = backend.create_stream("load")
    with backend.on(loading):
        target = proposers.decoder(tiny.target(), backend)
        made = [proposers.MAKERS[name](target, backend) for _ in range(2)]
    loading.synchronize()
    rebound, called, kind = set(), set(), type(target.kernels)
    update, attention = Graph.update_params, kind.paged_attention

    def rebind(graph, params, *, stream):
        rebound.update((each, tuple(lengths)) for each, lengths in params.items())
        update(graph, params, stream=stream)

    def attend(kernels, q, k_cache, v_cache, metadata, **named):
        exact = metadata.seq_lens_host
        if exact is not None:
            called.add((exact.name, tuple(exact.value)))
        return attention(kernels, q, k_cache, v_cache, metadata, **named)

    for graphs, proposer in zip((True, False), made, strict=True):
        config = plain_config(dtype="float64", max_context=32, max_requests=1, graphs=graphs, prefix_cache=False)
        lengths = LengthSchedule([min(length, proposer.nodes) for length in drafted]) if drafted else None
        engine = Engine(target, backend, proposer=proposer, config=config, draft_length=lengths)
        engine.add_request([1, 2, 3, 4, 5], SamplingParams(max_tokens=12, ignore_eos=True))
        engine.step()  # the prompt is called in both
        monkeypatch.setattr(Graph, "update_params", rebind)
        if not graphs:
            monkeypatch.setattr(kind, "paged_attention", attend)
        while engine.has_unfinished:
            engine.step()
    assert len(rebound) > 4
    assert called == rebound


@pytest.mark.parametrize("name", ["eagle", "eagle3", "peagle"])
def test_passes_over_prompts_are_those_that_are_declared(name, monkeypatch):
    """Data-parallel groups run as many of them, of as many tokens, side by side."""
    proposer, passes, checked = PROPOSERS[name](), [], 0
    forward, extend = proposer.head.forward, proposer.extend

    def noted(inputs, hidden, cache):
        passes.append(inputs.tokens.shape[0])
        return forward(inputs, hidden, cache)

    def taken_in(inputs):
        nonlocal checked
        passes.clear()
        relayed = extend(inputs)
        if inputs.prompt is not None:
            chunks = inputs.attention.query_start.diff()
            assert tuple(passes) == proposer.prompt_passes(int(chunks.sum()), len(chunks), int(chunks.max()))
            checked += 1
        return relayed

    monkeypatch.setattr(proposer.head, "forward", noted)
    proposer.extend = taken_in
    tiny.engine(proposer, prefill_chunk=4).generate([(3,), (1, 2, 3, 4, 5, 6)], SamplingParams(max_tokens=3))
    assert checked > 1


def test_drafts_behind_the_context_have_its_last_position(monkeypatch):
    """No token of them is kept; where models have a table of positions, it ends there."""
    positions, planned = [], PlanPositions.run

    def noted(stage, batch, frame):
        planned(stage, batch, frame)
        positions.append(int(frame.verify.positions.max()))

    monkeypatch.setattr(PlanPositions, "run", noted)
    engine = tiny.engine(PROPOSERS["eagle"](), max_context=12)
    for length in (3, 5):
        engine.generate([range(1, length + 1)], SamplingParams(max_tokens=12 - length, ignore_eos=True))
    assert max(positions) == 11


def acceptance(proposer, **config):
    engine = tiny.engine(proposer, max_requests=8, **config)
    engine.generate([(i, (i * 5 + 1) % 24) for i in range(20)], SamplingParams(max_tokens=40, ignore_eos=True))
    return engine.stats.acceptance_length


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [name for name in PROPOSERS if not name.startswith("dflash")])  # its tiny head is random
def test_drafts_are_really_accepted(name):
    found = acceptance(PROPOSERS[name]())
    assert found >= {"mtp-one": 1.5, "peagle": 1.8}.get(name, 2)


@pytest.mark.parametrize("mode", ["staged", "fused"])
def test_a_lookup_that_finds_nothing_drafts_nothing_of_other_requests(mode):
    """What lies behind a request's text is left from whoever had the pages before: no draft may come from there."""
    found = set()
    for left_behind in {0, *tiny.plain((3,), 6)}:  # a token that the target will choose would be accepted
        proposer = PROPOSERS["ngram"]()
        engine = tiny.engine(proposer, max_requests=1, mode=mode)
        proposer._history.fill_(left_behind)
        engine.generate([(3,)], SamplingParams(max_tokens=6))
        found.add(engine.stats.iterations)
    assert len(found) == 1


TREES = [name for name in PROPOSERS if PROPOSERS[name]().is_tree]
CHAINS = [name for name in PROPOSERS if name not in TREES]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", TREES)
def test_sampled_trees_give_the_very_tokens_of_plain_sampling(name):
    prompts = [(i, 2, 3) for i in range(6)]
    params = [SamplingParams(max_tokens=20, temperature=0.8 * (i % 3), seed=i) for i in range(6)]
    engine = tiny.engine(PROPOSERS[name](), max_requests=4, page_size=3, overlap=True)
    alone = tiny.engine(None, max_requests=1)
    for prompt, each, result in zip(prompts, params, engine.generate(prompts, params), strict=True):
        assert result.token_ids == alone.generate([prompt], each)[0].token_ids


# -- chains that sample ----------------------------------------------------------------------------------------------

PROMPT, TEMPERATURE, DRAWS = (3, 1, 4), 1.5, 2000


@functools.cache
def second_and_third():
    """The target's exact joint distribution of the second and the third token after the prompt, [V, V]."""

    def probs(contexts):
        count, length = contexts.shape
        driver = Driver(tiny.target(), pages=2 * count + 2, page_size=8)
        hidden = driver.hidden([(driver.sequence(), context) for context in contexts.tolist()])
        return torch.softmax(tiny.target().logits(hidden.view(count, length, -1)[:, -1]) / TEMPERATURE, -1)

    vocabulary = torch.arange(tiny.VOCABULARY)
    prompt = torch.tensor([PROMPT])
    first = probs(prompt)[0]
    pairs = torch.cat((prompt.expand(len(vocabulary), -1), vocabulary.unsqueeze(1)), 1)
    second = probs(pairs)
    triples = torch.cat((pairs.repeat_interleave(len(vocabulary), 0), vocabulary.repeat(len(vocabulary)).unsqueeze(1)), 1)
    third = probs(triples).view(len(vocabulary), len(vocabulary), -1)
    return torch.einsum("a,ab,abc->bc", first, second, third)


def excess(proposer, target=None):
    """Chi-square of many seeds' second and third tokens, over its upper 1e-4 quantile; rare cells are pooled."""
    target = target or tiny.target()
    made = plain_config(dtype="float64", max_context=16, max_requests=500, page_size=8, prefill_chunk=4096)
    engine = Engine(target, tiny.BACKEND, proposer=proposer, config=made)
    params = [SamplingParams(max_tokens=3, temperature=TEMPERATURE, seed=s, ignore_eos=True) for s in range(DRAWS)]
    counts = torch.zeros(tiny.VOCABULARY, tiny.VOCABULARY, dtype=torch.float64)
    for result in engine.generate([PROMPT] * DRAWS, params):
        counts[result.token_ids[1:]] += 1
    wanted, got = (second_and_third() * DRAWS).flatten(), counts.flatten()
    rare = wanted < 5
    wanted = torch.cat((wanted[~rare], wanted[rare].sum().view(1)))
    got = torch.cat((got[~rare], got[rare].sum().view(1)))
    freedom = wanted.numel() - 1
    critical = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    return float(((got - wanted) ** 2 / wanted).sum()) / critical, engine.stats.acceptance_length


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CHAINS)
def test_sampled_chains_follow_the_target(name):
    found, acceptance_length = excess(PROPOSERS[name]())
    assert acceptance_length > (1.05 if name in ("ngram", "suffix") else 1 if name.startswith("dflash") else 1.3)
    assert found < 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["eagle3", "draft-model"])
def test_a_wrong_rule_fails_the_same_draws(name):
    class Generous(KernelSet):
        def verify_chain(self, target_logits, draft_tokens, draft_probs, temperature, seeds, positions):
            return super().verify_chain(target_logits, draft_tokens, draft_probs * 0.6, temperature, seeds, positions)

    found, _ = excess(PROPOSERS[name](), tiny.decoder(kernels=Generous()))
    assert found > 1


def test_a_parallel_head_needs_its_mask():
    with pytest.raises(ConfigError, match="no mask token and state"):
        PEagleProposer(tiny.eagle3_head(), draft_tokens=3)
