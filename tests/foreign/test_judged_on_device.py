"""The script for a GPU tells findings that have a page from new ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foreign.vllm_on_device import JUDGED, judge
from outrider_sanitizer.findings import Finding, Kind, Site

PLACES = "/somewhere/vllm/"
FOUND = {
    "vllm-counts-freed-early": (Kind.REUSE, "v1/worker/gpu_model_runner.py:4905", "v1/spec_decode/llm_base_proposer.py:1079"),
    "vllm-computed-tokens-corrected": (
        Kind.WRITE_AFTER_READ, "v1/worker/gpu_model_runner.py:2140", "v1/worker/gpu_model_runner.py:1534",
    ),
    "vllm-backup-tokens-one-buffer": (Kind.WRITE_AFTER_READ, "v1/utils.py:142", "v1/spec_decode/llm_base_proposer.py:1067"),
    "vllm-outputs-dropped-in-warmup": (Kind.REUSE, "v1/outputs.py:76", "v1/worker/gpu/buffer_utils.py:37"),
}  # fmt: skip


def finding(kind: Kind, first: str, second: str) -> dict[str, Any]:
    sites = [
        Site(operation="aten::copy_", actor="default", host=False, index=1, location=PLACES + place)
        for place in (first, second)
    ]
    return Finding(kind=kind, first=sites[0], second=sites[1], missing="a wait").as_dict()


@pytest.mark.parametrize("page", FOUND)
def test_a_finding_is_known_again_and_another_is_new(page: str) -> None:
    kind, first, second = FOUND[page]
    assert judge([finding(kind, first, second)]) == ([], {page: 1})
    for other in (
        finding(Kind.READ_AFTER_WRITE, first, second),
        finding(kind, "v1/worker/gpu_model_runner.py:1", second),
        finding(kind, first, "v1/worker/block_table.py:1"),
    ):
        assert judge([other]) == ([other], {})


def test_each_has_its_page() -> None:
    pages = Path(__file__).parents[2] / "docs" / "findings"
    assert {known.page for known in JUDGED} == set(FOUND)
    assert all((pages / f"{known.page}.md").exists() for known in JUDGED)
