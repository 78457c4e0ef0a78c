"""Small workloads, each of which reaches a part of vLLM that orders streams, and the findings that are known in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from outrider_sanitizer.report import Finding, FindingKind, Report

Prompt = tuple[int, ...]


def prompt_without_repeats(first: int, length: int) -> Prompt:
    """Return a prompt without early repetitions, in which an n-gram look-up finds no proposal at first."""
    return tuple(3 + (first + position * position) % 60 for position in range(length))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A workload: rounds of requests. The tokens of the last round are compared with transformers."""

    name: str
    purpose: str
    rounds: tuple[tuple[Prompt, ...], ...]
    offload: bool = False
    """True to use the simple KV offload connector, and to empty the device's prefix cache after each round."""
    blocks: int = 64
    """Number of blocks of vLLM's KV cache."""
    longest: int = 256
    """Maximum number of tokens of a request."""
    stop_after: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    """Number of output tokens of a request of the last round, by index. The last one is a stop token, which the scheduler
    can't predict."""
    zeroing: bool = False
    """True to zero new blocks of the cache, as vLLM does for models with recurrent layers."""
    recurrent: bool = False
    """True to make the first runner assume recurrent layers whose states are aligned with blocks. The model has none."""


_SHORT = ((5, 6, 7, 8, 5, 6, 7), (9, 10, 11), (3, 4, 5, 3, 4, 5, 3, 4, 5, 3, 4))
_LONG = (prompt_without_repeats(1, 41), prompt_without_repeats(7, 19), prompt_without_repeats(20, 70))
_FIRST, _SECOND = prompt_without_repeats(1, 70), prompt_without_repeats(7, 41)

WORKLOADS = (
    Workload(name="plain", purpose="three short requests", rounds=(_SHORT,)),
    Workload(name="offload", purpose="blocks are stored while later steps are on their way, and loaded in the second round",
             rounds=(_LONG, _LONG), offload=True),
    Workload(name="scarce", purpose="so few blocks that a request which is loaded takes over those of one that was stopped "
             "while its next step is on its way", rounds=((_SECOND,), (_FIRST, _SECOND)), offload=True, blocks=8, longest=96,
             stop_after=MappingProxyType({0: 3})),
    Workload(name="zeroing", purpose="new blocks are zeroed", rounds=(_LONG,), zeroing=True),
    Workload(name="recurrent", purpose="counts of accepted tokens go to the host in each step", rounds=(_SHORT,),
             recurrent=True),
)  # fmt: skip


def find_workload(name: str) -> Workload:
    """Return the workload with this name. Raises `KeyError`."""
    return {w.name: w for w in WORKLOADS}[name]


@dataclass(frozen=True, kw_only=True)
class KnownFinding:
    """The features of an analysed finding: its kind, and parts of the locations of its accesses and of its memory.

    Line numbers are those of the supported version of vLLM. The same access in another line is another finding.
    """

    page: str
    """Name of the page in `docs/findings` that explains the finding."""
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
