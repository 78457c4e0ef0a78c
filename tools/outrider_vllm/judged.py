"""Findings in unmodified vLLM that were looked into: `docs/findings` has a page for each, with whether it can do harm."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_sanitizer.findings import Finding, Kind, Report


@dataclass(frozen=True, kw_only=True)
class Judged:
    """How to know one again: its kind, and parts of the places of its two accesses and of its memory.

    Lines are those of the one version of vLLM that this package is for: a line beside them is another finding.
    """

    page: str
    kind: Kind
    second: str
    memory: str
    first: str = ""

    def fits(self, finding: Finding) -> bool:
        """Whether `finding` is this one."""
        first = finding.first.location if finding.first is not None else ""
        near = self.first in first and self.second in finding.second.location and self.memory in finding.memory
        return near and finding.kind == self.kind


JUDGED = (
    Judged(page="vllm-unwritten-tail-of-sampled", kind=Kind.UNDEFINED, second="worker/gpu/async_utils.py",
           memory="rejection_sampler_utils.py"),
    Judged(page="vllm-counts-freed-early", kind=Kind.REUSE, second="spec_decode/llm_base_proposer.py",
           memory="spec_decode/llm_base_proposer.py"),
    Judged(page="vllm-computed-tokens-corrected", kind=Kind.WRITE_AFTER_READ, second="worker/gpu_model_runner.py:1537",
           memory="worker/gpu_input_batch.py"),
    Judged(page="vllm-backup-tokens-one-buffer", kind=Kind.WRITE_AFTER_READ, second="spec_decode/llm_base_proposer.py:1064",
           memory="v1/utils.py"),
    Judged(page="vllm-accepted-counts-written-twice", kind=Kind.WRITE_AFTER_READ, second="worker/gpu_model_runner.py:4073",
           memory="v1/utils.py"),
    Judged(page="vllm-temperatures-rewritten", kind=Kind.WRITE_AFTER_READ, first="worker/gpu/spec_decode/speculator.py:541",
           second="worker/gpu/buffer_utils.py:99", memory="worker/gpu/buffer_utils.py"),
    Judged(page="vllm-temperatures-rewritten", kind=Kind.WRITE_AFTER_READ, first="worker/gpu/spec_decode/speculator.py:542",
           second="worker/gpu/buffer_utils.py:99", memory="worker/gpu/buffer_utils.py"),
)  # fmt: skip


def judge(report: Report) -> tuple[list[str], dict[str, int]]:
    """The findings that have no page, as text; and by page how often the others were met."""
    left: list[str] = []
    judged: dict[str, int] = {}
    for finding in report:
        page = next((known.page for known in JUDGED if known.fits(finding)), None)
        if page is None:
            left.append(str(finding))
        else:
            judged[page] = judged.get(page, 0) + finding.count
    return left, judged
