"""Findings in unmodified vLLM that were looked into: `docs/findings` has a page for each, with whether it can do harm."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_sanitizer.findings import Finding, Kind, Report


@dataclass(frozen=True, kw_only=True)
class Judged:
    """How to know one again: its kind, and parts of the places of its second access and of its memory.

    Lines are those of the one version of vLLM that this package is for: a line beside them is another finding.
    """

    page: str
    kind: Kind
    second: str
    memory: str

    def fits(self, finding: Finding) -> bool:
        """Whether `finding` is this one."""
        return finding.kind == self.kind and self.second in finding.second.location and self.memory in finding.memory


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
