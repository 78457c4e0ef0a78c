"""Checks of a configuration when the engine is created, and a prediction of the memory that the engine will take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from outrider.device import Backend, CapabilityError, ConfigError, KernelSet, OutOfDeviceMemory, StepMode
from outrider.engine.config import DecidedConfig, EngineConfig, state_rows
from outrider.engine.setup.facts import collect_facts, find_cache_memory
from outrider.engine.setup.resolve import GIB, resolve
from outrider.errors import shown
from outrider.model import DecoderPlan, KVCache, LanguageModel, header_bytes
from outrider.speculative.proposer import NonSpeculativeProposer, Proposer

MAX_SLOTS = 2**31 - 1


def check_type(name: str, value: object, *kinds: type) -> None:
    """Raise :class:`ConfigError` if an argument of the Python API has none of the types ``kinds``."""
    if not isinstance(value, kinds):
        expected = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ConfigError(f"{name} is {shown(value)} (a {type(value).__name__}); expected {expected}")


def check_policy(backend: Backend, config: DecidedConfig, proposer: Proposer, kernels: KernelSet) -> None:
    """Raise :class:`CapabilityError` unless the backend's policy, the kernels and the proposer's lengths suit this
    configuration.
    """
    sync = backend.speculative_sync
    if config.step_mode not in sync.step_modes:
        raise CapabilityError(
            f"{backend.label} doesn't run in {config.mode} mode; its modes are {', '.join(sorted(sync.step_modes))}"
        )
    if kernels.plans_on_host and config.step_mode is StepMode.FUSED:
        raise CapabilityError(
            f"the kernels {kernels.name!r} plan each batch on the host, from exact lengths, and in fused mode these never "
            "leave the device: an iteration would be replayed with the plan of its capture; use mode staged, or other kernels"
        )
    if sync.exact_host_lengths and proposer.host_lengths is None:
        raise CapabilityError(
            f"{backend.label} has an attention that takes lengths as host integers, and the proposer {proposer.name!r} "
            "decides its lengths on the device; choose another proposer"
        )
    if config.graphs and sync.exact_host_lengths and not (sync.rebind_params and backend.capabilities.updates_graph_params):
        raise CapabilityError(
            f"{backend.label} has an attention that takes lengths as host integers, and can't rebind these in a captured "
            "graph; leave graphs off"
        )


def check_invariance(config: DecidedConfig, model: LanguageModel) -> None:
    """Raise :class:`ConfigError` if ``batch_invariant`` is set and the model's kernels are not batch-invariant, or more than
    2 data-parallel ranks share its MLPs.
    """
    if config.batch_invariant and not (model.native and model.kernels.row_invariant):
        raise ConfigError(
            "batch_invariant is set, but the model doesn't run on kernels that are; use Engine.from_checkpoint with a "
            "model of a supported family, or make the Decoder with backend.kernels_in_use.batch_invariant()"
        )
    data = model.ranks.data
    if config.batch_invariant and data is not None and data.size > 2:
        raise ConfigError(
            f"batch_invariant is set, and {data.size} data-parallel ranks each compute a part of the MLPs: the order in "
            "which a collective adds the parts depends on the batch; expected at most 2 ranks, whose sum has one order"
        )


def check_tree(model: LanguageModel, proposer: Proposer) -> None:
    """Raise :class:`ConfigError` if the proposer drafts trees and the model has recurrent or sliding-window layers, which
    can't verify trees.
    """
    if proposer.nodes < proposer.depth:
        raise ConfigError(
            f"the proposer {proposer.name!r} declares {proposer.nodes} nodes and paths of {proposer.depth}: a path has no "
            "more nodes than its tree"
        )
    if proposer.is_tree and model.config.recurrent is not None:
        raise ConfigError(
            f"the proposer {proposer.name!r} drafts trees, and the model has recurrent layers: each branch of a tree would "
            "need a state of its own, and the kernels of these layers keep one for each request; draft a chain (draft_topk=1)"
        )
    if proposer.is_tree and any(model.config.windows):
        raise ConfigError(
            f"the proposer {proposer.name!r} drafts trees, and the model has layers with a sliding window, which count slots"
            " and not positions on a path; draft a chain (draft_topk=1)"
        )


def check_cache(backend: Backend, config: DecidedConfig, model: LanguageModel, *, pages: int) -> None:
    """Raise :class:`ConfigError` unless 32 bits can count the slots of the target's KV cache, and :class:`OutOfDeviceMemory`
    unless ``pages`` pages and the recurrent states fit into memory.

    The memory is that of the device, or of the host if the device keeps tensors there.
    """
    slots = pages * config.page_size
    if slots > MAX_SLOTS:
        raise ConfigError(
            f"the KV cache would have {pages} pages of {config.page_size} tokens: {slots} slots; expected at most "
            f"{MAX_SLOTS}: lower num_pages, max_requests or max_context"
        )
    shape = model.config
    page = KVCache.page_bytes(shape, page_size=config.page_size, dtype=model.cache_dtype)
    memory = find_cache_memory(backend)
    if memory is None:
        return
    total, whose = memory.total, "this machine" if memory.shared else backend.label
    rows = state_rows(config.max_requests, config.state_checkpoints)
    states = 0 if shape.recurrent is None else rows * shape.recurrent.state_bytes(model.dtype)
    if pages * page + states > total:
        more = f", its recurrent states {rows} rows of {states // rows} bytes" if states else ""
        raise OutOfDeviceMemory(
            f"the KV cache would have {pages} pages of {page} bytes{more}: {(pages * page + states) / 2**30:.1f} GiB, and "
            f"{whose} has {total / 2**30:.1f} GiB in all; lower num_pages, max_requests or max_context"
            f"{' or state_checkpoints' if states else ''}"
        )


@dataclass(frozen=True, slots=True)
class PredictedMemory:
    """Bytes of weights, KV pages and recurrent states, and the settings that they follow from."""

    weights: int
    """Bytes of the weights of target and draft."""
    page_bytes: int
    """Bytes of one page in the target's cache."""
    state_bytes: int
    """Bytes of the recurrent states of one request; 0 for a model without recurrent layers."""
    free: int | None
    """Bytes that are free before loading; None if the device and the host report none."""
    config: DecidedConfig
    """The config that the engine would choose."""

    @property
    def pages(self) -> int:
        """Bytes of all pages of the target's cache."""
        return self.config.num_pages * self.page_bytes

    @property
    def states(self) -> int:
        """Bytes of the recurrent states of all requests and of the prefix cache."""
        return self.state_bytes * state_rows(self.config.max_requests, self.config.state_checkpoints)

    def lines(self) -> list[str]:
        """Return one line of text for each part of the memory, with its size in GiB."""
        config = self.config
        tokens = (config.num_pages - 1) * config.page_size
        found = [
            f"weights: {self.weights / GIB:.2f} GiB",
            f"KV cache: {self.pages / GIB:.2f} GiB, {config.num_pages} pages of {self.page_bytes} bytes, {tokens} tokens",
        ]
        if self.state_bytes:
            rows = f"{config.max_requests} requests, {config.state_checkpoints} checkpoints and padding"
            found.append(f"recurrent states: {self.states / GIB:.2f} GiB, {self.state_bytes} bytes each for {rows}")
        if self.free is not None:
            found.append(f"free before loading: {self.free / GIB:.2f} GiB")
        return found


def predict_memory(
    plan: DecoderPlan, backend: Backend, config: EngineConfig, draft_dir: Path | None = None
) -> PredictedMemory:
    """Predict the memory of an engine for the planned decoder and the draft in ``draft_dir``.

    The caches of a draft aren't counted. Raises :class:`OutOfDeviceMemory` if the memory holds no request even so, with the
    part to reduce.
    """
    weights = plan.weight_bytes + (0 if draft_dir is None else header_bytes(plan, draft_dir))
    facts = collect_facts(backend, plan, NonSpeculativeProposer(), unloaded_bytes=weights)
    if not facts.state_bytes:
        config = replace(config, state_checkpoints=None)  # the draft may have states
    decided = resolve(config, facts)
    free = None if facts.memory is None else facts.memory.free + weights
    return PredictedMemory(weights, decided.page_size * facts.token_bytes, facts.state_bytes, free, decided)
