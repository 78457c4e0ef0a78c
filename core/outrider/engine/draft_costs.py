"""The choice of the draft-length policy, and the measurement of iteration times that the policy by load needs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from outrider.device import Backend, CapabilityError, ConfigError
from outrider.engine.config import DecidedConfig
from outrider.engine.graphs import MIN_REQUESTS_SHORTER_DRAFT, powers_up_to, sizes_of_shorter
from outrider.engine.loop import IterationLauncher
from outrider.engine.requests.batch import Batch
from outrider.engine.requests.draft_length import (
    DraftCosts,
    DraftLengthPolicy,
    LengthSchedule,
    LoadDraftLength,
    LookupDraftLength,
    RequestDraftLength,
    default_draft_lengths,
    default_widths,
)
from outrider.engine.requests.request import Request
from outrider.engine.requests.sampling import SamplingParams
from outrider.engine.state.parts import EngineParts
from outrider.engine.state.results import PendingResult
from outrider.model import LanguageModel
from outrider.speculative.proposer import Proposer

_RUNS = 3  # iterations of each kind: the first warms up, the fastest of the others counts
_FEW_CACHED_TOKENS, _MANY_CACHED_TOKENS = 16, 1024  # cached tokens of a request


def usable_draft_lengths(
    config: DecidedConfig, backend: Backend, proposer: Proposer, given: DraftLengthPolicy | None
) -> tuple[int, ...]:
    """Return the draft lengths that an iteration may use. Raises :class:`ConfigError` for lengths that the proposer cannot
    draft, and :class:`CapabilityError` for lengths that the device cannot verify.

    A policy of Outrider chooses among the lengths that the device verifies. The longest one must be among them.
    """
    lengths = _lengths_of(config, backend, proposer, given)
    works = backend.speculative_sync.draft_lengths
    if works is None:
        return lengths
    refused = [length for length in lengths if length and length not in works]
    if refused and (given is not None or refused[-1] == lengths[-1]):
        raise CapabilityError(
            f"{backend.label} doesn't verify drafts of {', '.join(map(str, refused))} tokens; the draft lengths that work "
            f"are {', '.join(map(str, sorted(works)))}: set draft_tokens to one of them"
        )
    return tuple(length for length in lengths if length not in refused)


def captured_widths(
    config: DecidedConfig, backend: Backend, model: LanguageModel, proposer: Proposer, given: DraftLengthPolicy | None
) -> tuple[int, ...]:
    """Return the widths for which an engine captures graphs: those of its policy, empty if requests have one length.

    Raises :class:`ConfigError` if the engine can't verify a length for each request.
    """
    asked = config.draft_length == "request" if given is None else bool(given.widths)
    if not asked:
        return ()
    refused = {
        "the proposer drafts trees, which have one shape": proposer.is_tree,
        "drafts have fewer than 2 tokens": proposer.nodes < 2,
        "data-parallel groups share the width of a pass": model.ranks.data is not None,
        "attention takes lengths from the host": backend.speculative_sync.exact_host_lengths or model.kernels.plans_on_host,
    }
    for reason, applies in refused.items():
        if applies:
            raise ConfigError(f'each request would get a draft length of its own, and {reason}; set draft_length to "fixed"')
    return default_widths(proposer.nodes) if given is None else given.widths


def _lengths_of(
    config: DecidedConfig, backend: Backend, proposer: Proposer, given: DraftLengthPolicy | None
) -> tuple[int, ...]:
    if given is not None:
        if proposer.is_tree and given.lengths != (proposer.nodes,):
            raise ConfigError(f"the proposer {proposer.name!r} drafts trees, which have one shape; leave the policy out")
        if not 0 <= given.lengths[0] <= given.lengths[-1] <= proposer.nodes:
            raise ConfigError(
                f"the policy of draft lengths may choose {', '.join(map(str, given.lengths))}; the proposer "
                f"{proposer.name!r} drafts 0 to {proposer.nodes} tokens"
            )
        return given.lengths
    if _follows_load(config, backend, proposer):
        return default_draft_lengths(proposer.nodes)
    return LengthSchedule((proposer.nodes,), context=_context_of_draft(config, proposer)).lengths


def _context_of_draft(config: DecidedConfig, proposer: Proposer) -> int | None:
    """Return the context of a proposer of chains if the engine's requests may exceed it, else None."""
    context = proposer.max_context
    return None if context is None or context >= config.max_context or proposer.is_tree else context


def _follows_load(config: DecidedConfig, backend: Backend, proposer: Proposer) -> bool:
    """Return True if the engine shall measure iterations and choose draft lengths by them. Raises :class:`ConfigError` if the
    config requests it and the backend or the proposer can't vary the draft length.
    """
    chain, asked = proposer.nodes > 0 and not proposer.is_tree, config.draft_length
    if asked in ("load", "request"):
        if not chain:
            what = "drafts trees, which have one shape" if proposer.is_tree else "drafts nothing"
            raise ConfigError(f'draft_length is "{asked}", and the proposer {proposer.name!r} {what}; leave draft_length out')
        if config.batch_invariant:
            raise ConfigError(
                f'draft_length is "{asked}" and batch_invariant is set: what a request draws would depend on how many '
                "others run; leave one of them out"
            )
        return True
    # On other devices the host determines the time of an iteration, and sampled outputs would depend on a noisy measurement.
    replayed = config.graphs or config.mode == "fused"
    concurrent = backend.capabilities.asynchronous and backend.control is None
    many_requests = config.max_requests >= MIN_REQUESTS_SHORTER_DRAFT
    return config.draft_length is None and chain and replayed and concurrent and many_requests and not config.batch_invariant


@dataclass(frozen=True, slots=True)
class DraftLengthReport:
    """The draft-length policy of an engine, and its measurement.

    Its fields: the name of the policy, the ``lengths`` that it chooses among, the measured ``costs`` in milliseconds by
    length and number of requests (with few cached tokens), and the ``seconds`` that the measurement took. ``packed``: the
    costs by width and number of requests, if each request has a length of its own.
    """

    policy: str
    lengths: tuple[int, ...]
    costs: tuple[tuple[int, int, float], ...] = ()
    per_token_ns: tuple[tuple[int, float], ...] = ()
    seconds: float = 0.0
    packed: tuple[tuple[int, int, float], ...] = ()

    def __str__(self) -> str:
        if not self.costs:
            return f"{self.lengths[-1]} tokens drafted in every iteration"
        which, how = ", ".join(map(str, self.lengths)), "by request and load" if self.packed else "by load"
        return f"{which} tokens drafted {how}; what iterations take was measured in {self.seconds:.1f} s"


def select_draft_length_policy(
    parts: EngineParts, step: IterationLauncher, given: DraftLengthPolicy | None, *, sizes: Sequence[int] | None
) -> tuple[DraftLengthPolicy, DraftLengthReport]:
    """Return the draft-length policy that the caller passed, or the one that the config selects.

    ``sizes`` are the captured batch sizes; None without graphs.
    """
    if given is not None:
        return given, DraftLengthReport(type(given).__name__, given.lengths)
    context = _context_of_draft(parts.config, parts.proposer)
    if not _follows_load(parts.config, parts.backend, parts.proposer):
        return LengthSchedule((parts.proposer.nodes,), context=context), DraftLengthReport("fixed", parts.lengths)
    began = time.perf_counter()
    longest = sizes or powers_up_to(parts.config.max_requests)
    costs, packed = _Measurement(parts, step).costs(longest, sizes_of_shorter(sizes) if sizes else longest)
    policy: DraftLengthPolicy
    if parts.widths:
        name, policy = "request", RequestDraftLength(costs, packed)
    elif parts.proposer.looks_up and parts.model.ranks.is_single:
        name, policy = "lookup", LookupDraftLength(costs)
    else:
        name, policy = "load", LoadDraftLength(costs)
    policy.context = context
    report = DraftLengthReport(
        name,
        parts.lengths,
        costs.in_ms(),
        tuple((length, 1e9 * seconds) for length, seconds in sorted(costs.per_token.items())),
        time.perf_counter() - began,
        packed.in_ms(),
    )
    return policy, report


class _Measurement:
    """The measurement of iteration times with made-up requests, whose KV no other request reads. No other iteration may be in
    flight.
    """

    def __init__(self, parts: EngineParts, step: IterationLauncher) -> None:
        self._parts, self._step = parts, step
        # As many iterations are in flight as when requests are served, unless a launch lasts as long as its work.
        self._ahead = 1 if parts.config.overlap and parts.backend.capabilities.asynchronous else 0
        self._in_flight: deque[PendingResult] = deque()

    def costs(self, sizes: Sequence[int], shorter_sizes: Sequence[int]) -> tuple[DraftCosts, DraftCosts]:
        """Measure the longest draft with each number of requests in ``sizes``, and shorter drafts with each in
        ``shorter_sizes``. Measure the time per cached token with the most requests. Return the times in seconds, by length
        and, for requests with lengths of their own, by width.
        """
        parts, most = self._parts, max(sizes)
        lengths = sorted(parts.lengths)
        room = (_RUNS + 1) * (max(lengths) + 1) + parts.proposer.slots
        page = parts.config.page_size
        many = min(_MANY_CACHED_TOKENS, parts.capacity - room, (parts.cache.pages - 1) // most * page - room)
        few = max(1, min(_FEW_CACHED_TOKENS, many))
        with parts.backend.guard("measuring what iterations take"):
            self._admit(most, max(many, few) + room)
            base = {
                (length, size): self._seconds(length, size, few)
                for length in lengths
                for size in (sizes if length == max(lengths) else shorter_sizes)
            }
            packed = {
                (width, size): self._seconds(max(lengths), size, few, width)
                for width in parts.widths
                for size in shorter_sizes
            }
            per_token = {}
            if many > few:
                for length in lengths:
                    more = self._seconds(length, most, many) - base[length, most]
                    per_token[length] = max(more, 0.0) / (most * (many - few))
        of_longest = per_token.get(max(lengths), 0.0)
        return DraftCosts(base, per_token), DraftCosts(packed, dict.fromkeys(parts.widths, of_longest))

    def _admit(self, requests: int, tokens: int) -> None:
        """Write block tables for rows 1 to ``requests``, with pages for ``tokens`` tokens each. Rows share pages if there are
        too few.
        """
        parts = self._parts
        each = min(-(-tokens // parts.config.page_size), parts.rows.tables.shape[1])
        usable = parts.cache.pages - 1
        updates = tuple(
            (row, index, 1 + ((row - 1) * each + index) % usable) for row in range(1, requests + 1) for index in range(each)
        )
        self._launch(Batch((), (), (), updates))
        self._wait_for_all_but(0)

    def _seconds(self, length: int, requests: int, tokens: int, width: int | None = None) -> float:
        """Return the seconds of the fastest of several iterations that draft ``length`` tokens for each of ``requests``
        requests with ``tokens`` cached tokens each. ``width``: number of tokens to verify of each; None: all.
        """
        parts = self._parts
        with parts.backend.on(parts.streams.forward):
            rows = torch.arange(1, requests + 1, device=parts.backend.device)
            parts.future.publish(rows, torch.full_like(rows, tokens))
        self._launch(Batch((), (), (), ()))  # tells the host of the lengths, where it must know them
        self._wait_for_all_but(0)
        decoding = tuple(_stand_in(row, tokens) for row in range(1, requests + 1))
        verified = () if width is None else (width - 1,) * requests
        ends = []
        for _ in range(_RUNS):
            self._launch(Batch((), decoding, (), (), drafted=length, draft_lengths=verified))
            ends += self._wait_for_all_but(self._ahead)
        ends += self._wait_for_all_but(0)
        return min(end - before for before, end in pairwise(ends))

    def _launch(self, batch: Batch) -> None:
        self._in_flight.append(self._step.launch(batch))

    def _wait_for_all_but(self, keep: int) -> list[float]:
        """Wait for all iterations in flight but ``keep``, and return the host time in seconds at which each ended."""
        ends = []
        while len(self._in_flight) > keep:
            pending = self._in_flight.popleft()
            self._parts.results.read_results(pending, self._parts.fences.results_copied[pending.entry])
            ends.append(time.perf_counter())
        return ends


def _stand_in(row: int, tokens: int) -> Request:
    """Return a request in ``row`` with ``tokens`` known tokens, which the measurement launches without a scheduler."""
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    return Request(-row, (0,) * tokens, params, frozenset(), row=row, prefilled=tokens, decodes_in_flight=_RUNS)
