"""The script for a GPU tells findings that have a page from new ones."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from foreign.vllm_on_device import JUDGED, Judged, judge
from outrider_sanitizer.report import AccessSite, Finding, FindingKind


def finding(kind: str, first: str, second: str, count: int = 1) -> dict[str, Any]:
    sites = [
        AccessSite(operation="aten::copy_", actor="default", host=False, index=1, location=f"/somewhere/vllm/{place}7")
        for place in (first, second)
    ]
    return Finding(kind=FindingKind[kind.upper()], first=sites[0], second=sites[1], missing="a wait", count=count).as_dict()


@pytest.mark.parametrize("known", [pytest.param(known, id=f"{known.page}-{known.first}") for known in JUDGED])
def test_a_finding_is_known_again_and_another_is_new(known: Judged) -> None:
    features = {name: value for name, value in asdict(known).items() if name in ("kind", "first", "second")}
    assert judge([finding(**features)]) == ([], {known.page: 1})
    changes = [{"kind": "read_after_write"}, {"first": "v1/worker/other.py:1"}, {"second": "v1/worker/block_table.py:1"}]
    for other in [finding(**(features | change)) for change in changes]:
        assert judge([other]) == ([other], {})
    if known.most is not None:  # what a warm-up does once is new if served steps do it each time
        often = finding(**features, count=known.most + 1)
        assert judge([often]) == ([often], {})
    assert (Path(__file__).parents[2] / "docs" / "findings" / f"{known.page}.md").exists()
