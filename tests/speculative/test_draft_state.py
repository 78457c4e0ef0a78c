"""What a proposer keeps between iterations is what one look at the whole text would give, whatever was drafted meanwhile.

A wrong draft never changes a token, so this is what shows a draft cache that decays.
"""

import pytest
import torch

from outrider import SamplingParams
from outrider.speculative.lookup import CombinedProposer, NgramProposer
from outrider.speculative.mtp import MtpProposer
from outrider_proof import tiny
from speculative.test_proposers import PROPOSERS


def state(engine, request):
    """The proposer's entries for a running request's text, [layers, positions, numbers], and the text."""
    parts, record = engine._parts, engine._requests[request]
    length = int(parts.future.seq_lens[record.row])
    text = (*record.prompt, *record.output)
    assert len(text) == length + 1
    known = length - engine.proposer.lookahead + 1
    pages, size = record.pages, engine.config.page_size
    slots = torch.tensor([pages[i // size] * size + i % size for i in range(max(known, 0))], dtype=torch.int64)
    if isinstance(engine.proposer, NgramProposer):
        return engine.proposer._history[slots].double().unsqueeze(0), text
    if isinstance(engine.proposer, CombinedProposer):
        history, *other = engine.proposer.caches
        pairs = [torch.cat([t.flatten(0, 1)[slots].flatten(1) for t in other], 1)]
        return torch.stack([torch.cat((history.flatten()[slots].double().unsqueeze(1), pairs[0]), 1)]), text
    layers = [torch.cat([t.flatten(0, 1)[slots].flatten(1) for t in pair], 1) for pair in engine.proposer.cache.layers]
    return torch.stack(layers), text


def worst_decay(proposer, fresh, *, steps=10, prompts=None, **config):
    """The largest difference, over requests and iterations, from a fresh engine that prefills the text at once."""
    engine = tiny.engine(proposer, **config)
    prompts = prompts or [(3,), (1, 2, 3, 4, 5, 6, 7, 8, 9), (7, 7)]
    ids = [  # a high temperature makes rejections
        engine.add_request(prompt, SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.5 * (i % 2), seed=i))
        for i, prompt in enumerate(prompts)
    ]
    worst, compared = 0.0, 0
    for step in range(steps):
        engine.step()
        for request in ids if step % 2 else ():  # what decays stays so, and shows in the next look
            record = engine._requests.get(request)
            if record is None or record.needs_prefill or not record.output:
                continue
            found, text = state(engine, request)
            other = tiny.engine(fresh(), max_requests=1, prefix_cache=False)
            # One token more, which the comparison leaves out, keeps the new request running.
            again = other.add_request(text, SamplingParams(max_tokens=2, ignore_eos=True))
            other.step()
            expected, _ = state(other, again)
            compared += found.shape[1]
            assert found.shape[1] <= expected.shape[1]
            if found.numel():
                worst = max(worst, float((found - expected[:, : found.shape[1]]).abs().max()))
    assert compared > 50
    return worst


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize(("page_size", "prefill_chunk"), [(3, 64), (16, 4)])
def test_the_draft_cache_does_not_decay(name, page_size, prefill_chunk):
    assert worst_decay(PROPOSERS[name](), PROPOSERS[name], page_size=page_size, prefill_chunk=prefill_chunk) < 1e-9


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["eagle", "mtp", "mtp-tree", "peagle", "draft-model-tree", "ngram"])
def test_nor_behind_a_shared_prefix(name):
    """Entries at the end of a page depend on the tokens behind it; a hit must agree on these."""
    start = (1, 2, 3, 4, 5, 6, 7, 8)
    prompts = [start, (*start, 9, 10), (*start, 9, 11), (*start[:7], 20, 21), start[:5]]
    for wait in (1, 3):
        engine = tiny.engine(PROPOSERS[name](), page_size=2, prefill_chunk=wait * 4)
        for prompt in prompts[:2]:
            engine.generate([prompt], SamplingParams(max_tokens=4))
        assert engine._scheduler.pages.cached > 0
    assert worst_decay(PROPOSERS[name](), PROPOSERS[name], page_size=2, prefill_chunk=4, prompts=prompts) < 1e-9


class ForgetfulMtp(MtpProposer):
    """Never runs the entries again that rested on rejected drafts."""

    def extend(self, inputs):
        inputs.relay["num_recomputed"].zero_()
        return super().extend(inputs)


def test_a_draft_cache_that_decays_shows():
    def make():
        return ForgetfulMtp(tiny.mtp_heads())

    assert worst_decay(make(), PROPOSERS["mtp"]) > 1e-3
