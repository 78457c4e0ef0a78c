"""Rows, pages, shared prefixes and preemption: who owns what, on drawn histories."""

from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from outrider import SamplingParams
from outrider.device import InterfaceError
from outrider.engine.requests.draft_length import LengthSchedule
from outrider.engine.requests.pages import FreeList, PageKey, PagePool
from outrider.engine.requests.request import FinishReason, Request
from outrider.engine.requests.scheduler import OutOfPages, Scheduler, SchedulerLimits


def test_a_row_is_never_free_twice():
    rows = FreeList("request row", 3)
    row = rows.allocate()
    rows.give_back(row)
    for number in (row, 0):
        with pytest.raises(InterfaceError, match="isn't taken"):
            rows.give_back(number)
    rows.allocate()
    rows.allocate()
    with pytest.raises(InterfaceError, match="no request row left"):
        rows.allocate()


class Holder:
    """One request's view of the pool."""

    def __init__(self, tokens):
        self.tokens = tokens
        self.pages, self.key, self.done = [], None, 0


sequences = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)


@given(
    st.lists(st.tuples(sequences, st.integers(0, 12)), min_size=1, max_size=25),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([0, 1]),
    st.integers(4, 14),
)
@settings(max_examples=100, deadline=None)
def test_a_hit_always_has_the_contents_that_its_tokens_say(history, page_size, ahead, count):
    """Contents are modelled by what was written: a page's tokens, all before them, and those ahead."""
    pool = PagePool(count=count, page_size=page_size, ahead=ahead, share=True)
    written, holders = {}, []
    for tokens, drop in history:
        holder = Holder(tokens)
        hit, holder.key = pool.match(tokens)
        assert len(hit) * page_size < len(tokens)
        for index, page in enumerate(hit):
            end = (index + 1) * page_size
            assert written[page] == (tokens[:end], tokens[end : end + ahead])
        holder.pages, holder.done = list(hit), len(hit)
        needed = -(-len(tokens) // page_size)
        if needed - len(hit) > pool.available:
            pool.give_back(hit)
        else:
            while len(holder.pages) < needed:
                page = pool.allocate()
                assert all(page not in other.pages for other in holders), "a page that somebody holds was handed out"
                end = (len(holder.pages) + 1) * page_size
                written[page] = (tokens[:end], tokens[end : end + ahead])
                holder.pages.append(page)
            holder.key, holder.done = pool.register(holder.pages, tokens, len(tokens), holder.key, holder.done)
            holders.append(holder)
        if holders and drop < len(holders):
            pool.give_back(holders.pop(drop).pages)
        held = {page for holder in holders for page in holder.pages}
        assert pool.available == count - 1 - len(held)
    for holder in holders:
        pool.give_back(holder.pages)
    assert pool.available == count - 1


@given(
    st.lists(st.tuples(sequences, st.integers(0, 3)), min_size=2, max_size=12),
    st.sampled_from([1, 2, 3]),
    st.integers(1, 7),
)
@settings(max_examples=70, deadline=None)
def test_no_context_is_written_by_the_batch_that_reads_it(arrivals, page_size, prefill_chunk):
    """``AttentionMetadata.settled`` stands on it: what a sequence looks back at, no other one of its batch is writing."""
    scheduler = Scheduler(
        rows=FreeList("request row", 8),
        pages=PagePool(count=60, page_size=page_size, ahead=0, share=True),
        limits=SchedulerLimits(growth=1, slots=1, spare=0, prefill_chunk=prefill_chunk),
        draft_length=LengthSchedule((0,)),
    )
    hits = 0
    for number, (tokens, batches) in enumerate(arrivals):
        # Twice, so that the second finds the first one's pages as soon as they may be taken over.
        for twin in range(2):
            scheduler.add(Request(2 * number + twin, tokens, SamplingParams(max_tokens=2), frozenset()))
        for _ in range(batches if number < len(arrivals) - 1 else 99):
            batch = scheduler.next_batch()
            if batch is None:
                break
            written = {
                chunk.request.id: set(chunk.request.pages[chunk.start // page_size : -(-chunk.end // page_size)])
                for chunk in batch.prefill
            }
            for chunk in batch.prefill:
                context = set(chunk.request.pages[: -(-chunk.start // page_size)])
                hits += chunk.request.prefill_start > 0
                assert not any(context & pages for other, pages in written.items() if other != chunk.request.id)
            for request in batch.requests:
                request.in_flight -= 1
            for request in batch.decode:
                request.decodes_in_flight -= 1
                request.finish_reason = FinishReason.LENGTH
            scheduler.retire()
    event("a prefix was shared" if hits else "nothing was shared")


def test_a_draft_needs_one_token_more_than_the_page():
    """Same page, another token after it: the target's cache would do, an EAGLE head's wouldn't."""
    for ahead, expected in ((0, 1), (1, 0)):
        pool = PagePool(count=9, page_size=2, ahead=ahead, share=True)
        first = [pool.allocate(), pool.allocate()]
        pool.register(first, (1, 2, 3, 4), 4, None, 0)
        assert len(pool.match((1, 2, 9, 9))[0]) == expected


def test_a_page_is_known_by_all_that_its_contents_depend_on():
    """The index compares keys only where their hashes are the same, which no drawn history gets to."""
    parent = PageKey(None, (1, 2), (3,))
    key = PageKey(parent, (3, 4), (5,), "image")
    assert key == PageKey(parent, (3, 4), (5,), "image")
    others = {"parent": PageKey(None, (1, 2), (3,)), "tokens": (3, 5), "following_tokens": (6,), "extra": None}
    assert not [name for name, other in others.items() if key == replace(key, **{name: other})]


def hand_made(*, pages, spare=0, growth=1, prefill_chunk=64, rows=4):
    return Scheduler(
        rows=FreeList("request row", rows),
        pages=PagePool(count=pages + 1, page_size=4, ahead=0, share=False),
        limits=SchedulerLimits(growth=growth, slots=1, spare=spare, prefill_chunk=prefill_chunk),
        draft_length=LengthSchedule((growth - 1,)),
    )


def test_who_has_pages_already_does_not_wait_behind_who_has_none():
    """Its pages are what the others wait for."""
    made = hand_made(pages=5)
    large, has_pages = (Request(i, (1,) * n, SamplingParams(max_tokens=2), frozenset()) for i, n in enumerate((15, 6)))
    assert made.reserve(has_pages, needs_row=False)
    made.add(large)
    made.add(has_pages)
    assert made.next_batch().admitted == (has_pages,)


def test_a_request_at_its_longest_holds_its_scattered_slots_as_well():
    assert [hand_made(pages=9, spare=spare).max_pages(8) for spare in (0, 1, 4, 5)] == [2, 3, 3, 4]


def test_a_request_that_is_over_takes_no_more_pages():
    made = hand_made(pages=9, growth=4)
    request = Request(0, (1,) * 15, SamplingParams(max_tokens=20), frozenset())
    made.add(request)
    for _ in range(2):
        made.next_batch()
    held = len(request.pages)
    request.finish_reason = FinishReason.LENGTH  # an iteration is in flight
    made.next_batch()
    assert len(request.pages) == held


def test_a_row_that_changes_its_owner_between_two_batches_has_no_updates_of_the_first():
    """One operation writes all updates in no order, so the first owner's page could replace the second's."""
    made = hand_made(pages=7, growth=4, rows=3)
    first, second, third = (Request(i, (1,) * 4, SamplingParams(max_tokens=20), frozenset()) for i in range(3))
    made.add(first)
    made.add(second)
    batches = [made.next_batch()]
    assert batches[0].admitted == (first, second)
    with pytest.raises(OutOfPages):  # the first one gets a page, the second one none
        batches.extend(iter(made.next_batch, None))
    assert len(first.pages) > len(second.pages)
    for batch in batches:
        made.handle_landed(batch, [])
    first.finish_reason = FinishReason.LENGTH
    row = first.row
    made.retire()
    made.add(third)
    batch = made.next_batch()
    assert (batch.admitted, third.row) == ((third,), row)
    entries = [update[:2] for update in batch.table_updates]
    assert len(set(entries)) == len(entries)
    assert sum(update[0] == row for update in batch.table_updates) == len(third.pages)


def test_giving_back_what_nobody_holds_raises():
    pool = PagePool(count=4, page_size=2, ahead=0, share=True)
    page = pool.allocate()
    pool.give_back([page])
    with pytest.raises(InterfaceError, match="given back but no request holds it"):
        pool.give_back([page])


def test_a_shared_prefix_is_computed_once(bundle64, prompt_tokens):
    engine = bundle64.engine(max_requests=2, page_size=4, max_context=96, prefill_chunk=64)
    prefix = prompt_tokens[0][:32]
    prompts = [[*prefix, *prompt_tokens[i][:6]] for i in (1, 2, 3)]
    results = engine.generate(prompts[:1], SamplingParams(max_tokens=8))
    taken = []
    forward = bundle64.target.forward_with_aux_hidden_states

    def counted(inputs, cache, layers):
        taken.append(inputs.tokens.shape[0])
        return forward(inputs, cache, layers)

    try:
        bundle64.target.forward_with_aux_hidden_states = counted
        results += engine.generate(prompts[1:], SamplingParams(max_tokens=8))
    finally:
        del bundle64.target.forward_with_aux_hidden_states
    # 32 tokens are known; the last page of them isn't hit, since the draft depends on the token after it.
    assert taken[0] == 2 * (4 + 6)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == bundle64.plain(prompt, 20).token_ids[:8]
    assert engine.stats.acceptance_length > 1.5


def test_the_more_urgent_request_goes_first(bundle64, prompt_tokens):
    engine = bundle64.engine(max_requests=1, max_context=48)
    order = {engine.add_request(prompt_tokens[i][:6], SamplingParams(max_tokens=2), priority=i): i for i in range(3)}
    ended = []
    while engine.has_unfinished:
        ended += [order[output.request_id] for output in engine.step() if output.finish_reason]
    assert ended == [2, 1, 0]
