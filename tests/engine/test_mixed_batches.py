"""Prompts beside decoding requests: how many of their tokens an iteration takes, and which of them wait for others."""

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import Engine, EngineConfig, SamplingParams
from outrider.engine.requests.draft_length import LengthSchedule
from outrider.engine.requests.groups import groups_by_load
from outrider.engine.requests.pages import FreeList, PagePool
from outrider.engine.requests.request import Request
from outrider.engine.requests.scheduler import MAX_PREFILL_SEQUENCES, Scheduler, SchedulerLimits
from outrider_cpu.backend import CpuBackend
from outrider_proof import tiny
from outrider_proof.proposers import MAKERS


def scheduler(*, rows=40, drafted=3, prefill_chunk=64, **limits):
    return Scheduler(
        rows=FreeList("request row", rows + 1),
        pages=PagePool(count=4000, page_size=4, ahead=0, share=False),
        limits=SchedulerLimits(growth=drafted + 1, slots=drafted + 1, spare=0, prefill_chunk=prefill_chunk, **limits),
        draft_length=LengthSchedule((drafted,)),
    )


def add(made, count, tokens, first=0, max_tokens=1000):
    for number in range(first, first + count):
        made.add(Request(number, (1,) * tokens, SamplingParams(max_tokens=max_tokens), frozenset()))


def prompts(batch):
    return [chunk.end - chunk.start for chunk in batch.prefill]


def test_decoding_requests_come_first_and_prompts_fill_the_rest():
    made = scheduler(token_budget=48)
    add(made, 5, 8)
    assert prompts(made.next_batch()) == [8] * 5  # nothing decodes: a whole chunk
    add(made, 1, 200, first=5)
    batch = made.next_batch()
    assert (len(batch.decode), batch.drafted, prompts(batch)) == (5, 3, [48 - 5 * 4])
    add(made, 5, 8, first=6)
    for wanted in ([28], [28], [28], [28], [28], [28], [4, 8, 8, 8]):
        assert prompts(made.next_batch()) == wanted


def test_an_iteration_prefills_at_most_as_many_prompts_as_kernels_are_compiled_for():
    made = scheduler(rows=300, prefill_chunk=4096)
    add(made, 300, 4)
    assert [len(prompts(made.next_batch())) for _ in range(2)] == [MAX_PREFILL_SEQUENCES, 300 - MAX_PREFILL_SEQUENCES]


def test_groups_with_fewer_requests_come_first():
    held = [SimpleNamespace(group=group) for group in (1, 0, 1)]
    assert groups_by_load(3, held) == [2, 0, 1]
    assert groups_by_load(2, held[:2]) == [0, 1]
    assert groups_by_load(1, held[:0]) == [0]


def test_prompts_get_a_quarter_of_the_budget_at_least():
    made = scheduler(token_budget=48)
    add(made, 12, 4)
    made.next_batch()
    add(made, 1, 200, first=12)
    assert prompts(made.next_batch()) == [12]


def test_a_budget_that_is_not_given_has_room_for_all_drafts_and_a_chunk():
    made = tiny.engine(MAKERS["eagle"](tiny.target(), tiny.BACKEND), max_requests=5, prefill_chunk=16)
    limits = made._scheduler._limits
    assert (limits.token_budget, limits.gather_tokens) == (5 * (3 + 1) + 16, 16)


@given(
    budget=st.integers(8, 200),
    chunk=st.integers(2, 100),
    drafted=st.integers(0, 4),
    early=st.integers(1, 30),
    late=st.lists(st.integers(1, 40), max_size=6),
)
@settings(max_examples=60, deadline=None)
def test_an_iteration_stays_within_its_budget(budget, chunk, drafted, early, late):
    """The bound on the time between two tokens of a running request: so many tokens in each iteration, and in every one of
    them every running request decodes.
    """
    made = scheduler(token_budget=budget, prefill_chunk=chunk, drafted=drafted)
    add(made, early, 1)
    for number, tokens in enumerate(late, start=early):
        add(made, 1, tokens, first=number)
    decodes = set()
    for _ in range(200):
        batch = made.next_batch()
        now = {request.id for request in batch.decode}
        assert decodes <= now
        decodes = now | {part.request.id for part in batch.prefill if part.is_final}
        if batch.decode:
            assert sum(prompts(batch)) <= max(budget - len(now) * (drafted + 1), budget // 4, 1)
        assert sum(prompts(batch)) <= chunk
        if len(decodes) == early + len(late):
            return
    raise AssertionError("a prompt was never finished")


def gathering(**limits):
    made = scheduler(crowd=8, gather_tokens=20, gather_iterations=3, **limits)
    add(made, 8, 4)
    made.next_batch()
    return made


def test_late_prompts_share_a_launch():
    made, seen = gathering(), []
    for number in range(8, 14):
        add(made, 1, 8, first=number)
        seen.append(prompts(made.next_batch()))
    assert seen == [[], [], [8, 8, 8], [], [], [8, 8, 8]]


def test_a_prompt_waits_for_a_bounded_time():
    made = gathering()
    add(made, 1, 8, first=8)
    assert [prompts(made.next_batch()) for _ in range(5)] == [[], [], [], [8], []]


def test_iterations_without_a_new_prompt_do_not_count_as_waiting():
    made = gathering()
    for _ in range(2):
        assert prompts(made.next_batch()) == []
    add(made, 1, 8, first=8)
    assert [prompts(made.next_batch()) for _ in range(4)] == [[], [], [], [8]]


def test_few_running_requests_and_long_prompts_do_not_wait():
    made = scheduler(crowd=8, gather_tokens=20, gather_iterations=3)
    add(made, 7, 4)
    made.next_batch()
    add(made, 1, 8, first=7)
    assert prompts(made.next_batch()) == [8]
    long = gathering(token_budget=48)
    add(long, 1, 30, first=8)
    assert [prompts(long.next_batch()) for _ in range(2)] == [[16], [14]]  # the rest of one that has begun doesn't wait


def test_gathered_prompts_give_the_same_tokens():
    """An engine of 16 rows gathers from 8 on; requests come and go, the length of drafts changes."""
    cpu = CpuBackend()
    target = tiny.target()
    config = EngineConfig(
        dtype="float64", max_requests=16, max_context=48, page_size=4, prefill_chunk=16, token_budget=56, overlap=True
    )
    made = Engine(
        target, cpu, proposer=MAKERS["eagle"](target, cpu), config=config, draft_length=LengthSchedule((3, 1, 0, 2))
    )
    gathered = 0
    inner = made._scheduler._gathers

    def watched(*given, **named):
        nonlocal gathered
        waits = inner(*given, **named)
        gathered += waits
        return waits

    made._scheduler._gathers = watched
    text = [tuple(1 + (7 * i + j) % 11 for j in range(1 + i % 9)) for i in range(24)]
    lengths = [4 + i % 13 for i in range(24)]
    wanted = [SamplingParams(max_tokens=count) for count in lengths]
    for prompt, length, result in zip(text, lengths, made.generate(text, wanted), strict=True):
        assert result.token_ids == tiny.plain(prompt, length)
    assert gathered


def test_a_thousand_tokens_in_one_verify():
    """Nothing in the engine bounds what verify takes in at once."""
    cpu = CpuBackend()
    target = tiny.target()
    config = EngineConfig(dtype="float64", max_requests=256, max_context=16, page_size=4, prefill_chunk=512, overlap=True)
    made = Engine(target, cpu, proposer=MAKERS["eagle"](target, cpu), config=config)
    text = [(1 + i % 4, 2 + i % 3) for i in range(256)]
    widest = 0
    inner = made._step._stages.verify.run

    def run(batch, frame):
        nonlocal widest
        widest = max(widest, frame.verify.tokens.shape[0])
        inner(batch, frame)

    made._step._stages.verify.run = run
    for prompt, result in zip(text, made.generate(text, SamplingParams(max_tokens=5)), strict=True):
        assert result.token_ids == tiny.plain(prompt, 5)
    assert widest == 1024
