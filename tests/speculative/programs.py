"""Random host programs on one engine of the tiny target: its tokens are those of plain decoding."""

from functools import partial

from hypothesis import strategies as st

from outrider_proof import tiny
from outrider_proof.decode_program import Serving, check_tokens
from outrider_proof.engine_setups import prompt_and_media, random_host_program, reference_tokens

PROGRAMS = {"program": st.integers(0, 10**6).map(random_host_program), "overlap": st.booleans()}


def check(proposer, program, overlap):
    """Every request got plain greedy tokens and ended where it should; every page and row came back."""
    config = program.config(program.longest(proposer, images=False), dtype="float64", overlap=overlap)
    engine = program.engine(tiny.target(), tiny.BACKEND, proposer, config)
    free = engine.free_pages, engine.free_rows
    served = Serving([engine], program, partial(prompt_and_media, "none"))
    served.step_until_idle()
    check_tokens(served.tokens, served.ended, [reference_tokens("none", each) for each in program.arrivals])
    for index, reason in served.ended.items():
        tokens, stops = served.tokens[index], engine.model.config.eos_token_ids
        stopped = len(tokens) < program.arrivals[index].max_tokens or tokens[-1] in stops
        assert reason in ("abort", "stop" if stopped else "length")
    assert (engine.free_pages, engine.free_rows) == free
