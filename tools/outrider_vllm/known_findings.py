"""Findings in unmodified vLLM that have been analysed. A page of `docs/findings` says for each whether it can do harm."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_sanitizer.report.findings import Finding, FindingKind, Report


@dataclass(frozen=True, kw_only=True)
class KnownFinding:
    """The features of an analysed finding: its kind, and parts of the locations of its accesses and of its memory.

    Line numbers are those of the supported version of vLLM. The same access in another line is another finding.
    """

    page: str
    """Name of the page in `docs/findings`."""
    kind: FindingKind
    second: str
    """Part of the location of the second access."""
    memory: str
    """Part of the location where the memory was allocated."""
    first: str = ""
    """Part of the location of the first access; empty for any location."""

    def fits(self, finding: Finding) -> bool:
        """Return whether `finding` has the features of this one."""
        first = finding.first.location if finding.first is not None else ""
        has_locations = self.first in first and self.second in finding.second.location and self.memory in finding.memory
        return has_locations and finding.kind == self.kind


KNOWN_FINDINGS = (
    KnownFinding(
        page="vllm-unwritten-tail-of-sampled",
        kind=FindingKind.UNDEFINED,
        second="worker/gpu/async_utils.py",
        memory="rejection_sampler_utils.py",
    ),
    KnownFinding(
        page="vllm-counts-freed-early",
        kind=FindingKind.REUSE,
        second="spec_decode/llm_base_proposer.py",
        memory="spec_decode/llm_base_proposer.py",
    ),
    KnownFinding(
        page="vllm-computed-tokens-corrected",
        kind=FindingKind.WRITE_AFTER_READ,
        second="worker/gpu_model_runner.py:1537",
        memory="worker/gpu_input_batch.py",
    ),
    KnownFinding(
        page="vllm-backup-tokens-one-buffer",
        kind=FindingKind.WRITE_AFTER_READ,
        second="spec_decode/llm_base_proposer.py:1064",
        memory="v1/utils.py",
    ),
    KnownFinding(
        page="vllm-accepted-counts-written-twice",
        kind=FindingKind.WRITE_AFTER_READ,
        second="worker/gpu_model_runner.py:4073",
        memory="v1/utils.py",
    ),
    KnownFinding(
        page="vllm-temperatures-rewritten",
        kind=FindingKind.WRITE_AFTER_READ,
        first="worker/gpu/spec_decode/speculator.py:541",
        second="worker/gpu/buffer_utils.py:99",
        memory="worker/gpu/buffer_utils.py",
    ),
    KnownFinding(
        page="vllm-temperatures-rewritten",
        kind=FindingKind.WRITE_AFTER_READ,
        first="worker/gpu/spec_decode/speculator.py:542",
        second="worker/gpu/buffer_utils.py:99",
        memory="worker/gpu/buffer_utils.py",
    ),
)


def split_known_findings(report: Report) -> tuple[list[str], dict[str, int]]:
    """Return the findings that have no page, as text, and the number of occurrences of the other findings by page."""
    unknown: list[str] = []
    counts: dict[str, int] = {}
    for finding in report:
        page = next((known.page for known in KNOWN_FINDINGS if known.fits(finding)), None)
        if page is None:
            unknown.append(str(finding))
        else:
            counts[page] = counts.get(page, 0) + finding.count
    return unknown, counts
