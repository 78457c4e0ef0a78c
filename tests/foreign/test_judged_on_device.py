"""The script for a GPU tells findings that have a page from new ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foreign.vllm_on_device import JUDGED, judge
from outrider_sanitizer.report import AccessSite, Finding, FindingKind

PLACES = "/somewhere/vllm/"
RUNNER, PROPOSER = "v1/worker/gpu_model_runner.py", "v1/spec_decode/llm_base_proposer.py"
SECOND = "v1/worker/gpu/"
FOUND = [
    ("vllm-counts-freed-early", FindingKind.REUSE, f"{RUNNER}:4905", f"{PROPOSER}:1079"),
    ("vllm-counts-freed-early", FindingKind.REUSE, f"{RUNNER}:4905", "v1/spec_decode/ngram_proposer_gpu.py:432"),
    ("vllm-computed-tokens-corrected", FindingKind.WRITE_AFTER_READ, f"{RUNNER}:2140", f"{RUNNER}:1534"),
    ("vllm-backup-tokens-one-buffer", FindingKind.WRITE_AFTER_READ, "v1/utils.py:142", f"{PROPOSER}:1067"),
    ("vllm-outputs-dropped-in-warmup", FindingKind.REUSE, "v1/outputs.py:76", f"{SECOND}buffer_utils.py:37"),
    ("vllm-outputs-dropped-in-warmup", FindingKind.REUSE, f"{SECOND}async_utils.py:110", f"{SECOND}buffer_utils.py:37"),
    (
        "vllm-temperatures-rewritten",
        FindingKind.WRITE_AFTER_READ,
        f"{SECOND}spec_decode/speculator.py:313",
        f"{SECOND}buffer_utils.py:78",
    ),
    (
        "vllm-temperatures-rewritten",
        FindingKind.WRITE_AFTER_READ,
        f"{SECOND}spec_decode/speculator.py:314",
        f"{SECOND}buffer_utils.py:78",
    ),
]


def finding(kind: FindingKind, first: str, second: str, count: int = 1) -> dict[str, Any]:
    sites = [
        AccessSite(operation="aten::copy_", actor="default", host=False, index=1, location=PLACES + place)
        for place in (first, second)
    ]
    return Finding(kind=kind, first=sites[0], second=sites[1], missing="a wait", count=count).as_dict()


@pytest.mark.parametrize(("page", "kind", "first", "second"), FOUND)
def test_a_finding_is_known_again_and_another_is_new(page: str, kind: FindingKind, first: str, second: str) -> None:
    assert judge([finding(kind, first, second)]) == ([], {page: 1})
    for other in (
        finding(FindingKind.READ_AFTER_WRITE, first, second),
        finding(kind, "v1/worker/gpu_model_runner.py:1", second),
        finding(kind, first, "v1/worker/block_table.py:1"),
    ):
        assert judge([other]) == ([other], {})


def test_what_only_the_warm_up_does_is_new_when_served_steps_do_it() -> None:
    _, kind, first, second = next(found for found in FOUND if "async_utils" in found[2])
    known, served = finding(kind, first, second, count=2), finding(kind, first, second, count=96)
    assert judge([known, served]) == ([served], {"vllm-outputs-dropped-in-warmup": 2})


def test_each_has_its_page() -> None:
    pages = Path(__file__).parents[2] / "docs" / "findings"
    assert {known.page for known in JUDGED} == {page for page, *_ in FOUND}
    assert all((pages / f"{known.page}.md").exists() for known in JUDGED)
