"""What ``outrider bench peers`` says of several engines: medians, and the ratios between them."""

from dataclasses import replace

import pytest

from bench.test_bench_peers import WORKED
from outrider_bench.peers.comparing import EngineRuns, compare_engines, expected_tokens, plot_points


def runs(decode, prefill, mixed):
    found = {("decode", 4): [{"iteration_ms": ms, "tokens_per_s": 4e3 / ms, "acceptance_length": 1.0} for ms in decode]}
    found["context", 24] = [{"iteration_ms": 2.0, "tokens_per_s": 500.0, "acceptance_length": 1.0}]
    found["prefill", 32] = [{"first_token_ms": ms} for ms in prefill]
    found["batch-prefill", (2, 16)] = [{"seconds": ms, "prompt_tokens_per_s": 32 / ms} for ms in prefill]
    found["mixed", "seconds"] = [{"seconds": s, "tokens_per_s": 10 / s, "acceptance_length": 1.0} for s in mixed]
    return found


def test_ratios_are_of_medians_and_above_one_where_this_engine_is_faster():
    ours = EngineRuns(engine="outrider", speculate="none", status="measured", runs=runs((4, 2, 90), (5, 5, 5), (1, 2, 3)))
    theirs = EngineRuns(engine="vllm", speculate="none", status="measured", runs=runs((8, 8, 8), (10, 1, 20), (4, 5, 6)))
    found = compare_engines([ours, theirs], WORKED)
    ratios = {each["phase"]: pytest.approx(each["ratio"]) for each in found["ratios"]}
    assert ratios == {
        "decode": pytest.approx(2.0),
        "context": pytest.approx(1.0),
        "prefill": pytest.approx(2.0),
        "batch-prefill": pytest.approx(2.0),
        "mixed": pytest.approx(2.5),
    }
    case = next(key for key in theirs.runs if key[0] == "decode")
    theirs.failures[case] = "it gave up once"
    again = compare_engines([ours, theirs], WORKED)
    assert again["ratios"] == found["ratios"]  # what ran counts, and what failed is said
    assert again["engines"][1]["status"] == "measured in part: it gave up once"
    del theirs.runs[case]
    assert {each["phase"] for each in compare_engines([ours, theirs], WORKED)["ratios"]} == {
        *("prefill", "batch-prefill", "mixed", "context")
    }
    assert plot_points([ours], "context") == {"outrider, non-speculative": [(24, 2.0)]}


def test_at_equal_acceptance_a_shorter_draft_yields_less():
    """An iteration that drafts one token takes less time than one that drafts two, and has fewer tokens."""
    assert [expected_tokens(drafted, (0.8, 0.5)) for drafted in (0, 1, 1.5, 2)] == pytest.approx([1.0, 1.8, 2.05, 2.3])

    def found(engine, ms, drafted, accepted):
        row = {"iteration_ms": ms, "tokens_per_s": accepted / ms, "acceptance_length": accepted, "drafted": drafted}
        return EngineRuns(engine=engine, speculate="eagle", status="measured", runs={("decode", 4): [row]})

    work = replace(WORKED, rates=(0.8, 0.5))
    (short,) = compare_engines([found("outrider", 10.0, 1.0, 1.9), found("vllm", 20.0, 2.0, 2.3)], work)["ratios"]
    assert short["ratio"] == pytest.approx(1.9 / 2.3 * 2)
    assert short["at_equal_acceptance"] == pytest.approx(1.8 / 2.3 * 2)
