"""What the prefix cache tells: a router that believes it knows what can be hit."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import SamplingParams
from outrider.device import ConfigError
from outrider.engine.requests.pages import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvents, PagePool
from outrider.speculative.eagle import EagleProposer
from outrider_proof import tiny


@dataclass
class Router:
    """Believes the events: which chains of tokens are cached. Two stores of one page, or a removal of none, are errors."""

    tokens: dict = field(default_factory=dict)
    parents: dict = field(default_factory=dict)

    def hear(self, event):
        if isinstance(event, AllBlocksCleared):
            self.tokens.clear()
            self.parents.clear()
        elif isinstance(event, BlockRemoved):
            for own in event.hashes:
                del self.tokens[own], self.parents[own]
        else:
            size, parent = len(event.tokens) // len(event.hashes), event.parent
            assert len(event.extras) == len(event.hashes)
            for index, own in enumerate(event.hashes):
                assert own not in self.tokens
                self.tokens[own], self.parents[own] = event.tokens[index * size : (index + 1) * size], parent
                parent = own

    def hits(self, tokens, size):
        """Leading pages of ``tokens`` that are cached."""
        found, parent = 0, None
        while True:
            page = tuple(tokens[found * size : (found + 1) * size])
            next_ = [own for own, held in self.tokens.items() if held == page and self.parents[own] == parent]
            if len(page) < size or not next_:
                return found
            (parent,) = next_
            found += 1


sequences = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)


@given(st.lists(st.tuples(sequences, st.integers(0, 8)), min_size=1, max_size=25), st.integers(1, 3), st.integers(4, 14))
@settings(max_examples=150, deadline=None)
def test_a_router_hits_what_the_pool_hits(history, page_size, count):
    """Without a draft that looks ahead, the events say exactly which pages a prompt hits, as long as chains are whole."""
    pool, router = PagePool(count=count, page_size=page_size, ahead=0, share=True), Router()
    pool.watch(CacheEvents(router.hear))
    holders = []
    for tokens, drop in history:
        hit, key = pool.match(tokens)
        # The last token is always computed, so the pool leaves the page that ends with it. A page whose parent was forgotten
        # and stored again can't be hit any more, which a router doesn't see.
        believed = min(router.hits(tokens, page_size), (len(tokens) - 1) // page_size)
        assert len(hit) <= believed
        if drop == 8:
            pool.give_back(hit)
            pool.unregister_all()
            assert not router.tokens
            continue
        needed = -(-len(tokens) // page_size)
        if needed - len(hit) > pool.available:
            pool.give_back(hit)
        else:
            pages = [*hit, *(pool.allocate() for _ in range(needed - len(hit)))]
            pool.register(pages, tokens, len(tokens), key, len(hit))
            holders.append(pages)
            assert router.hits(tokens, page_size) == len(tokens) // page_size
        if drop < len(holders):
            pool.give_back(holders.pop(drop))
        assert sorted(router.tokens.values()) == sorted({_chain(key): key.tokens for key in pool._page_of}.values())


def _chain(key):
    chain = ()
    while key is not None:
        key, chain = key.parent, (key.tokens, *chain)
    return chain


def test_who_comes_late_hears_what_is_known():
    pool, early, late = PagePool(count=9, page_size=2, ahead=1, share=True), Router(), Router()
    pool.watch(CacheEvents(early.hear))
    pages = [pool.allocate() for _ in range(3)]
    pool.register(pages, (1, 2, 3, 4, 5), 5, None, 0)
    pool.watch(CacheEvents(late.hear))
    assert early == late
    assert late.hits((1, 2, 3, 4), 2) == 2


def test_pages_that_differ_in_the_token_ahead_are_one_to_a_router():
    heard = []
    pool = PagePool(count=9, page_size=2, ahead=1, share=True)
    pool.watch(CacheEvents(heard.append))
    for ahead in (7, 8):
        pages = [pool.allocate(), pool.allocate()]
        pool.register(pages, (1, 2, ahead), 3, None, 0)
        pool.give_back(pages)
    (stored,) = heard
    assert stored == BlockStored(hashes=stored.hashes, parent=None, tokens=(1, 2), extras=(None,))
    held = [pool.allocate() for _ in range(7)]  # one of the two pages goes to another request
    assert len(heard) == 1
    held.append(pool.allocate())
    assert heard[1:] == [BlockRemoved(stored.hashes)]


def test_an_engine_tells_of_its_prefixes_and_of_a_spoilt_cache():
    engine = tiny.engine(EagleProposer(tiny.eagle_head(), draft_tokens=2), max_requests=2, page_size=4)
    router = Router()
    engine.watch_prefix_cache(router.hear)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    (completion,) = engine.generate([prompt], SamplingParams(max_tokens=6))
    assert router.hits([*prompt, *completion.token_ids], 4) == 3  # of 16 tokens, the last isn't in the cache
    hashes = set(router.tokens)
    engine.watch_prefix_cache(None)
    engine.generate([[1] * 9], SamplingParams(max_tokens=1))
    assert set(router.tokens) == hashes, "nobody was to be told"
    engine._scheduler.pages.unregister_all()
    other = tiny.engine(EagleProposer(tiny.eagle_head(), draft_tokens=2), max_requests=2, page_size=4)
    router = Router()
    other.watch_prefix_cache(router.hear)
    other.generate([prompt], SamplingParams(max_tokens=6))
    assert set(router.tokens) == hashes, "hashes are alike in every engine"


def test_without_a_prefix_cache_there_is_nothing_to_watch():
    engine = tiny.engine(EagleProposer(tiny.eagle_head(), draft_tokens=2), prefix_cache=False)
    with pytest.raises(ConfigError, match="prefix_cache=True"):
        engine.watch_prefix_cache(print)


def test_outputs_say_which_tokens_were_drafted():
    engine = tiny.engine(EagleProposer(tiny.eagle_head(), draft_tokens=2), max_requests=1)
    engine.add_request([0, 1, 4, 1, 6], SamplingParams(max_tokens=12))  # some drafts are accepted, some aren't
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    first, *others = [output for output in outputs if output.tokens]
    assert (first.drafted, first.proposed) == (0, 0)
    assert all(output.proposed == 2 and output.drafted in (len(output.tokens) - 1, len(output.tokens)) for output in others)
    assert all(output.drafted == len(output.tokens) - 1 for output in others[:-1])
    assert {output.drafted for output in others[:-1]} == {0, 2}
    assert sum(len(output.tokens) - output.drafted for output in others) <= engine.stats.request_iterations
