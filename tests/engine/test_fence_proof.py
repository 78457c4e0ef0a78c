"""Each fence of the table is live: left out, one watched run finds it, and the finding implies it. Put back: silence."""

import pytest

from outrider.engine.fences import FENCES
from outrider.registry import get_backend
from outrider_proof.explorations import PARAMETER_FENCES, DecodeExplorer
from outrider_proof.fence_log import FenceEdge, FenceLog
from outrider_sanitizer import RaceError

USED = [fence.name for fence in FENCES]
OF_MOVES = {"handed_over", "pages_read", "pages_free", "pages_written"}
"""Plain decoding shows these too, which is quick; *pages ready* covers the draft's state."""
PROGRAMS = 4


@pytest.fixture(scope="module")
def backend():
    return get_backend("sim")


def like_npu():
    return get_backend("sim:like=npu")


def first_race(explorer, backend):
    backend.control.reset()
    try:
        explorer.run_program(explorer.exercising_program, backend)
    except RaceError:
        return explorer.implied()
    return None


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("fence", "half"),
    [
        *((fence, "wait") for fence in USED),
        # The first record of a slot is carried out, and no slot is used again before its pages are read.
        *(pytest.param(fence, "record", marks=pytest.mark.slow) for fence in USED if fence != "pages_read"),
    ],
)
def test_a_fence_left_out_is_found_and_named(backend, fence, half):
    graphs = fence in PARAMETER_FENCES
    backend = like_npu() if graphs else backend
    speculate = "none" if fence in OF_MOVES else "eagle"
    explorer = DecodeExplorer(backend, speculate=speculate, graphs=graphs, drop=fence, half=half)
    implied = first_race(explorer, backend)
    assert implied is not None, f"nobody missed the {half} of {fence}"
    assert implied == (fence,)


@pytest.mark.slow
@pytest.mark.parametrize(("speculate", "topk"), [("eagle", 1), ("eagle", 3), ("ngram", 1), ("ngram", 3), ("none", 1)])
def test_many_programs_each_under_its_own_schedule(backend, speculate, topk):
    explorer = DecodeExplorer(backend, speculate=speculate, draft_topk=topk)
    for seed in range(40):
        program = explorer.program(seed)
        backend.control.reset()
        result = backend.control.explore(
            lambda device, program=program: explorer.run_program(program, device), strategy="mixed", iterations=1, seed=seed
        )
        assert result.failure is None, (seed, program, str(result.failure.error))


def test_a_finding_implies_the_fence_that_would_have_ordered_it():
    log = FenceLog(lambda stream: 0)
    log.edges = [
        FenceEdge("kept", "a", 5, "b", 5, True),
        FenceEdge("dropped", "b", 7, "c", 3, False),
        FenceEdge("elsewhere", "a", 2, "c", 9, False),
    ]
    assert log.implied(("a", 4), ("c", 3)) == ("dropped",)
    assert log.implied(("a", 5), ("c", 3)) == ()
    assert log.implied(("a", 1), ("c", 9)) == ("dropped", "elsewhere")
    assert log.implied(("a", 4), ("c", 2)) == ()
    assert log.implied(("a", 4), ("b", 5)) == ()  # ordered as it is: nothing to imply
    log.edges.append(FenceEdge("read back", "c", 4, "host", 8, False))
    assert log.implied(("c", 3), ("host", 8)) == ("read back",)
    assert log.implied(("c", 3), ("host", 7)) == ()  # the host read before that wait
