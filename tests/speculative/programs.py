"""Host programs (who arrives when, who is aborted) and what must come out of them."""

from dataclasses import dataclass

from hypothesis import strategies as st

from outrider import SamplingParams
from outrider.engine.requests.request import FinishReason

LONGEST = 20


@dataclass(frozen=True)
class Arrival:
    """A request: its prompt, when it comes, how long it may get, and when, if ever, it's aborted."""

    prompt: tuple[int, ...]
    max_tokens: int
    step: int
    abort_after: int | None


def prompts(vocabulary):
    return st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=40).map(tuple)


def programs(prompt):
    arrival = st.builds(
        Arrival,
        prompt=prompt,
        max_tokens=st.integers(1, LONGEST),
        step=st.integers(0, 5),
        abort_after=st.one_of(st.none(), st.integers(0, 5)),
    )
    return st.lists(arrival, min_size=1, max_size=6)


ENGINES = {
    "max_requests": st.integers(1, 4),
    "page_size": st.sampled_from([1, 3, 16]),
    "prefill_chunk": st.sampled_from([1, 7, 64]),
    "overlap": st.booleans(),
}


def run(engine, program, temperature=0.0):
    """Run the program step by step; (arrival, tokens, finish reason) of each request."""
    waiting = sorted(enumerate(program), key=lambda item: item[1].step)
    live, seen, step = {}, {}, 0
    while waiting or engine.has_unfinished:
        while waiting and waiting[0][1].step <= step:
            index, arrival = waiting.pop(0)
            params = SamplingParams(max_tokens=arrival.max_tokens, temperature=temperature, seed=index)
            request = engine.add_request(arrival.prompt, params)
            live[request] = (arrival, step)
            seen[request] = [arrival, [], None]
        for request, (arrival, since) in list(live.items()):
            if arrival.abort_after is not None and step - since >= arrival.abort_after:
                engine.abort(request)
                del live[request]
        for output in engine.step():
            seen[output.request_id][1].extend(output.tokens)
            if output.finish_reason is not None:
                assert seen[output.request_id][2] is None, "a request ended twice"
                seen[output.request_id][2] = output.finish_reason
                live.pop(output.request_id, None)
        step += 1
    engine.drain()
    return list(seen.values())


def check(engine, program, plain):
    """Every request got plain greedy tokens and ended where it should; every page and row came back.

    ``plain(prompt, max_tokens)``: the tokens of plain decoding.
    """
    pages, rows = engine.free_pages, engine.free_rows
    for arrival, tokens, reason in run(engine, program):
        expected = plain(arrival.prompt, LONGEST)[: arrival.max_tokens]
        if reason is FinishReason.ABORT:
            assert tuple(tokens) == expected[: len(tokens)]
        else:
            assert tuple(tokens) == expected
            stopped = len(expected) < arrival.max_tokens or expected[-1] in engine.model.config.eos_token_ids
            assert reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    assert (engine.free_pages, engine.free_rows) == (pages, rows)
