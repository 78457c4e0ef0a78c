"""Static device buffers of an iteration. Each buffer has a name, a shape and a padding value.

The engine allocates all buffers once, before it captures graphs. Stages use views of the first rows. One stream writes each
buffer. An iteration with a shorter draft uses the same memory in the layout of the shorter draft.

Letters in shapes:

- B: requests; P: pages of a request; H: hidden size; V: vocabulary size; M: bias entries;
- K: draft tokens; D: length of the longest path; N: draft nodes including the root (the width of verify);
- E: tokens of a request in draft-extend (D + 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, Backend, InterfaceError
from outrider.engine.requests.sampling import MAX_LOGIT_BIAS
from outrider.model import LanguageModel, SideBySide, speculative_positions
from outrider.speculative.proposer import Draft, Proposer
from outrider.speculative.tree import Tree


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """The declaration of one buffer: ``per`` rows of ``shape`` for each request.

    Row 0 of every table and page 0 of every cache are reserved, so that zero is always a valid index.
    """

    name: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.int64
    per: int = 1
    leading: tuple[int, ...] = ()
    """Dimensions of the tensor before the dimension of rows."""
    padding: int | float | bool = 0
    """The value in rows of a bucket without a request."""
    step: int = 0
    """Increment of the padding value from one request to the next."""


GROUPS = INPUTS, DRAFT, VERIFY, EXTEND, OUTPUTS = "inputs", "draft", "verify", "extend", "outputs"
"""Groups of buffers, the first part of their names. The classes below document the writing stream of each group."""
_Record = TypeVar("_Record")
_RELAY = "inputs.relay."
_OPTIONAL = ("inputs.mrope_position_deltas", "draft.probs", "verify.mask", "outputs.path")
"""Buffers that are None for some models and proposers."""


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """The iteration's private copies of shared row state. The forward stream gathers them before the draft."""

    rows: Tensor
    """Request rows, int64 [B]."""
    seq_lens: Tensor
    """Tokens in the target's KV cache, int64 [B]."""
    last_tokens: Tensor
    """The last token of each request, int64 [B]."""
    draft_lengths: Tensor
    """Number of draft tokens that verify processes of each request, int64 [B]. Written if requests have different ones."""
    seeds: Tensor
    """Random seeds, int64 [B]."""
    temperature: Tensor
    """Sampling temperatures, float32 [B]."""
    tables: Tensor
    """Block tables, int32 [B, P]."""
    mrope_position_deltas: Tensor | None
    """Rope position minus sequence index, int64 [B]; None if the model's positions have one axis."""
    relay: Mapping[str, Tensor]
    """The tensors that the proposer relays between iterations, by name, [B, ...]."""
    numbers: Tensor
    """Top-k and number of bias entries, int64 [B, 2]."""
    shares: Tensor
    """Top-p, min-p and the three penalties, float32 [B, 5]."""
    biases: tuple[Tensor, Tensor, Tensor]
    """Bias tokens int64, values float32 and end positions int64, [B, M] each."""


@dataclass(frozen=True, slots=True)
class VerifyInputs:
    """The inputs of verify, which the plan stream writes."""

    tokens: Tensor
    """The last token and the draft tokens, int64 [B*N]. Without a draft this is ``last_tokens``, written on forward."""
    positions: Tensor
    """Sequence indices, int64 [B*N]."""
    rope_positions: Tensor
    """Positions for the model's rope, int64 [3, B*N]; ``positions`` itself if the model's positions have one axis."""
    static_rope_positions: Tensor
    """The rope positions that a captured verify reads. With three axes this is a copy of ``rope_positions``.

    Some devices compute ``rope_positions`` again after the join of the plan stream.
    """
    slots: Tensor
    """Cache slots, int64 [B*N]."""
    seq_lens: Tensor
    """KV lengths including the N tokens, int32 [B]."""
    mask: Tensor | None
    """The tree mask, bool [B*N, N]; None for chains."""
    query_start: Tensor
    """The constant first token of each request, int32 [B+1]."""

    @property
    def width(self) -> int:
        """The number of tokens of each request, N."""
        return self.positions.shape[0] // self.seq_lens.shape[0]

    def write_rope_positions(self, mrope_position_deltas: Tensor | None) -> None:
        """Write the rope positions on three axes. Does nothing without ``mrope_position_deltas``: the positions have one
        axis.
        """
        if mrope_position_deltas is not None:
            speculative_positions(self.positions, mrope_position_deltas, out=self.rope_positions)

    def copy_rope_positions_for_graph(self) -> None:
        """Copy the rope positions to the buffer that a captured verify reads, if they have three axes."""
        if self.static_rope_positions is not self.rope_positions:
            self.static_rope_positions.copy_(self.rope_positions)

    def attention(self, tables: Tensor, *, max_kv: int) -> AttentionMetadata:
        """Return the attention metadata of N new tokens for each request."""
        return _uniform_attention(self, tables, self.mask, max_kv=max_kv)


@dataclass(frozen=True, slots=True)
class PathInputs:
    """The inputs of draft-extend over the accepted path of a tree, which the extend plan writes."""

    gather: Tensor
    """Rows of verify along the path, int64 [B*E]."""
    positions: Tensor
    """Sequence indices, int64 [B*E]."""
    rope_positions: Tensor
    """Positions for the target's rope, int64 [3, B*E]; ``positions`` itself if its positions have one axis."""
    slots: Tensor
    """Cache slots, int64 [B*E]."""
    seq_lens: Tensor
    """KV lengths including the E tokens, int32 [B]."""
    sources: Tensor
    """Cache slots of the accepted nodes before the move, int64 [B*D]."""
    destinations: Tensor
    """Cache slots of the accepted nodes after the move, int64 [B*D]."""
    query_start: Tensor
    """The constant first token of each request, int32 [B+1]."""

    def attention(self, tables: Tensor, *, max_kv: int) -> AttentionMetadata:
        """Return the attention metadata of E tokens for each request. The accepted path is a chain, without a mask."""
        return _uniform_attention(self, tables, None, max_kv=max_kv)


def _uniform_attention(
    inputs: VerifyInputs | PathInputs, tables: Tensor, tree_mask: Tensor | None, *, max_kv: int
) -> AttentionMetadata:
    return AttentionMetadata(
        query_start=inputs.query_start,
        seq_lens=inputs.seq_lens,
        block_table=tables,
        max_query=inputs.positions.shape[0] // inputs.seq_lens.shape[0],
        max_kv=max_kv,
        tree_mask=tree_mask,
        uniform=True,
    )


@dataclass(frozen=True, slots=True)
class ExtendPlan:
    """The inputs of draft-extend, which the extend plan writes."""

    tokens: Tensor
    """The token after each position, int64 [B*E]."""
    last: Tensor
    """The row of each request's last token in ``tokens``, int64 [B]."""
    next_positions: Tensor
    """The position after the new tokens, int64 [B]."""
    continues: Tensor
    """Constant True, bool [B]: every request has earlier tokens in the draft cache."""
    starts: Tensor
    """The constant row numbers 0 to B, int32 [B+1], for one token of each request."""
    path: PathInputs | None
    """The accepted path; None for chains."""


@dataclass(frozen=True, slots=True)
class VerifyOutputs:
    """The outputs of verify, which the forward stream writes."""

    hidden: Tensor
    """The target's final hidden states of all verified tokens, [B*N, H]."""
    aux_hidden_states: tuple[Tensor, ...]
    """Hidden states of the inner layers that the proposer reads, [B*N, H] each."""
    tokens: Tensor
    """The accepted tokens, the token that the target decides, then -1: int64 [B, E]."""
    path: Tensor | None
    """The accepted nodes of a tree, int64 [B, E]; None for chains."""
    accepted: Tensor
    """Numbers of accepted draft tokens, int64 [B]."""


@dataclass(frozen=True, slots=True)
class BufferViews:
    """Views of every buffer for the first ``count`` requests."""

    count: int
    inputs: DecodeInputs
    draft: Draft
    """The outputs of the draft stage, which the forward stream writes."""
    verify: VerifyInputs
    extend: ExtendPlan
    outputs: VerifyOutputs


_BIASES = ("inputs.bias_tokens", "inputs.bias_values", "inputs.bias_until")
_RECORDS: Mapping[str, tuple[Any, ...]] = {
    INPUTS: (DecodeInputs,),
    DRAFT: (Draft, Tree),
    VERIFY: (VerifyInputs,),
    EXTEND: (ExtendPlan, PathInputs),
    OUTPUTS: (VerifyOutputs,),
}
_FIELDS = {f"{group}.{each.name}" for group, kinds in _RECORDS.items() for kind in kinds for each in fields(kind)}
"""Names of the buffers that :class:`BufferViews` has as fields, in addition to biases and relayed tensors."""


class StaticBuffers:
    """The memory of the buffers that the stages of an iteration share. It has a layout for each number of draft tokens.

    Calls of :meth:`views` with the same arguments return the same object.
    """

    def __init__(self, backend: Backend, layouts: Mapping[int, Iterable[BufferSpec]], *, max_requests: int) -> None:
        """Allocate the buffers. ``layouts`` has the declarations by number of draft tokens; the layout of the longest draft
        needs the most memory. Raises :class:`InterfaceError` for a buffer that no view has.
        """
        self._backend = backend
        self._layouts = {drafted: {spec.name: spec for spec in specs} for drafted, specs in layouts.items()}
        for name in {name for layout in self._layouts.values() for name in layout} - _FIELDS - {*_BIASES}:
            if not name.startswith(_RELAY):
                raise InterfaceError(f"buffer {name!r} has no field in a record of the iteration; expected one of its name")
        longest = max(self._layouts)
        self._memory = {
            spec.name: torch.full(
                (*spec.leading, max_requests * spec.per, *spec.shape), spec.padding, dtype=spec.dtype, device=backend.device
            )
            for spec in self._layouts[longest].values()
        }
        self._buffers = {
            (drafted, name): self._laid_out(spec, max_requests)
            for drafted, layout in self._layouts.items()
            for name, spec in layout.items()
        }
        request_numbers = torch.arange(max_requests, device=backend.device)
        # Ascending padding is precomputed, so that padding a batch allocates no memory.
        self._step_padding = {
            (drafted, spec.name): spec.padding + spec.step * request_numbers
            for drafted, layout in self._layouts.items()
            for spec in layout.values()
            if spec.step
        }
        for name, spec in self._layouts[longest].items():
            if spec.step:
                self._memory[name].copy_(self._step_padding[longest, name])
        self._query_starts: dict[int, Tensor] = {}
        self._continues = torch.ones(max_requests, dtype=torch.bool, device=backend.device)
        self._views: dict[tuple[int, int], BufferViews] = {}
        for layout in self._layouts.values():
            for per in {1, layout["verify.positions"].per, layout["extend.tokens"].per} - self._query_starts.keys():
                starts = torch.arange(0, (max_requests + 1) * per, per, dtype=torch.int32, device=backend.device)
                self._query_starts[per] = starts
        self.lane = torch.arange(max(self._query_starts), device=backend.device)
        """The numbers 0, 1, … as a device tensor, as many as a request can have tokens in an iteration, int64."""

    def _laid_out(self, spec: BufferSpec, max_requests: int) -> Tensor:
        """Return the first elements of a buffer's memory in the layout of ``spec``."""
        shape = (*spec.leading, max_requests * spec.per, *spec.shape)
        memory = self._memory[spec.name]
        return memory if memory.shape == shape else memory.view(-1)[: math.prod(shape)].view(shape)

    def rows(self, name: str, start: int, end: int, *, drafted: int) -> Tensor:
        """Return the rows of requests ``start`` to ``end`` of one buffer."""
        spec = self._layouts[drafted][name]
        return self._buffers[drafted, name].narrow(len(spec.leading), start * spec.per, (end - start) * spec.per)

    def group(self, *prefixes: str, count: int, drafted: int) -> dict[str, Tensor]:
        """Return the buffers and groups of buffers ``prefixes`` for ``count`` requests, by name. Other names are ignored."""
        return {
            name: self.rows(name, 0, count, drafted=drafted)
            for name in self._layouts[drafted]
            if any(f"{name}.".startswith(f"{prefix}.") for prefix in prefixes)
        }

    def pad(self, prefix: str, *, count: int, bucket: int, drafted: int) -> None:
        """Write padding to the rows of requests ``count`` to ``bucket`` of a group, on the current stream."""
        if count == bucket:
            return
        for name, spec in self._layouts[drafted].items():
            if name.split(".")[0] == prefix:
                rows = self.rows(name, count, bucket, drafted=drafted)
                if spec.step:
                    rows.copy_(self._step_padding[drafted, name][count:bucket])
                else:
                    rows.fill_(spec.padding)

    def mark_stale(self, prefix: str, *, bucket: int, drafted: int) -> None:
        """Report to an observing tool that the rows of a group are stale until the new batch writes them."""
        if self._backend.observer is None:
            return
        for name, rows in self.group(prefix, count=bucket, drafted=drafted).items():
            self._backend.mark_stale(rows, f"{name} of the batch before")

    def views(self, count: int, drafted: int) -> BufferViews:
        """Return the views of all buffers for ``count`` requests."""
        key = drafted, count
        if key not in self._views:
            self._views[key] = self._view(count, drafted)
        return self._views[key]

    def _view(self, count: int, drafted: int) -> BufferViews:
        specs = self._layouts[drafted]
        found: dict[str, Any] = dict.fromkeys(_OPTIONAL)
        found |= {name: self.rows(name, 0, count, drafted=drafted) for name in specs}

        def record(kind: Callable[..., _Record], group: str, **others: object) -> _Record:
            """Return the record of ``group``: each field is the buffer of its name, unless ``others`` has it."""
            names = {each.name for each in fields(cast("Any", kind))} - others.keys()
            return kind(**others, **{name: found[f"{group}.{name}"] for name in names})

        def rope_positions(group: str) -> Tensor:
            """Return the rope positions of ``group``, which are its positions if the model's positions have one axis."""
            positions: Tensor = found.get(f"{group}.rope_positions", found[f"{group}.positions"])
            return positions

        def query_start(name: str) -> Tensor:
            return self._query_starts[specs[name].per][: count + 1]

        relay = {name.removeprefix(_RELAY): each for name, each in found.items() if name.startswith(_RELAY)}
        biases = tuple(found[name] for name in _BIASES)
        tree, path = None, None
        if "draft.mask" in specs:
            tree = record(Tree, DRAFT)
            starts = query_start("extend.tokens")
            path = record(PathInputs, EXTEND, rope_positions=rope_positions(EXTEND), query_start=starts)
        states = found.get("outputs.aux_hidden_states")
        return BufferViews(
            count=count,
            inputs=record(DecodeInputs, INPUTS, relay=relay, biases=biases),
            draft=record(Draft, DRAFT, tree=tree),
            verify=record(
                VerifyInputs,
                VERIFY,
                tokens=found.get("verify.tokens", found["inputs.last_tokens"]),
                rope_positions=rope_positions(VERIFY),
                static_rope_positions=found.get("verify.static_rope_positions", found["verify.positions"]),
                query_start=query_start("verify.positions"),
            ),
            extend=record(
                ExtendPlan, EXTEND, continues=self._continues[:count], starts=self._query_starts[1][: count + 1], path=path
            ),
            outputs=record(
                VerifyOutputs,
                OUTPUTS,
                aux_hidden_states=() if states is None else SideBySide(states, found["outputs.hidden"].shape[-1]),
            ),
        )


def step_buffers(model: LanguageModel, proposer: Proposer, *, pages: int, drafted: int) -> tuple[BufferSpec, ...]:
    """Return the declarations of all buffers of an engine, in the order in which an iteration writes them.

    ``pages``: maximum number of pages of a request. ``drafted``: number of draft tokens of a request; for trees all nodes.
    """
    has_axes = model.config.rope.axes > 1
    nodes, path = drafted + 1, (proposer.depth if proposer.is_tree else drafted) + 1
    hidden, vocabulary = model.config.hidden_size, model.config.vocab_size
    num_aux_layers = len(proposer.aux_hidden_state_layers)
    int32, float32, booleans = torch.int32, torch.float32, torch.bool
    specs = [
        BufferSpec("inputs.rows"),
        BufferSpec("inputs.seq_lens"),
        BufferSpec("inputs.last_tokens"),
        BufferSpec("inputs.draft_lengths"),
        BufferSpec("inputs.seeds"),
        BufferSpec("inputs.temperature", dtype=float32),
        BufferSpec("inputs.tables", (pages,), int32),
        *([BufferSpec("inputs.mrope_position_deltas")] if has_axes else []),
        *(BufferSpec(f"inputs.relay.{spec.name}", spec.shape, spec.dtype) for spec in proposer.relay),
        BufferSpec("inputs.numbers", (2,)),
        BufferSpec("inputs.shares", (5,), float32),
        BufferSpec("inputs.bias_tokens", (MAX_LOGIT_BIAS,)),
        BufferSpec("inputs.bias_values", (MAX_LOGIT_BIAS,), float32),
        BufferSpec("inputs.bias_until", (MAX_LOGIT_BIAS,)),
        BufferSpec("draft.tokens", (drafted,)),
    ]
    if proposer.is_tree:
        specs += [
            BufferSpec("draft.parents", (nodes,)),
            BufferSpec("draft.depths", (nodes,)),
            BufferSpec("draft.mask", (nodes, nodes), booleans),
        ]
    elif drafted:
        specs.append(BufferSpec("draft.probs", (drafted, vocabulary), float32))
    specs += [
        # Without a draft, verify reads inputs.last_tokens.
        *([BufferSpec("verify.tokens", per=nodes)] if drafted else []),
        BufferSpec("verify.positions", per=nodes),
        BufferSpec("verify.slots", per=nodes),
        # A padding request has N tokens like all others, in the reserved page 0.
        BufferSpec("verify.seq_lens", dtype=int32, padding=nodes),
    ]
    if has_axes:
        specs += [
            BufferSpec("verify.rope_positions", per=nodes, leading=(3,)),
            BufferSpec("verify.static_rope_positions", per=nodes, leading=(3,)),
        ]
    if proposer.is_tree:
        specs.append(BufferSpec("verify.mask", (nodes,), booleans, per=nodes, padding=True))
    specs += [
        BufferSpec("outputs.hidden", (hidden,), model.dtype, per=nodes),
        *(
            [BufferSpec("outputs.aux_hidden_states", (num_aux_layers * hidden,), model.dtype, per=nodes)]
            if num_aux_layers
            else []
        ),
        BufferSpec("outputs.tokens", (path,)),
        *([BufferSpec("outputs.path", (path,))] if proposer.is_tree else []),
        BufferSpec("outputs.accepted"),
        BufferSpec("extend.tokens", per=path),
        BufferSpec("extend.last", step=path),  # padding: the first row of each request, so that rows stay distinct
        BufferSpec("extend.next_positions"),
    ]
    if proposer.is_tree:
        specs += [
            BufferSpec("extend.gather", per=path),
            BufferSpec("extend.positions", per=path),
            BufferSpec("extend.slots", per=path),
            BufferSpec("extend.seq_lens", dtype=int32, padding=path),
            BufferSpec("extend.sources", per=proposer.depth),
            BufferSpec("extend.destinations", per=proposer.depth),
            *([BufferSpec("extend.rope_positions", per=path, leading=(3,))] if has_axes else []),
        ]
    return tuple(specs)
