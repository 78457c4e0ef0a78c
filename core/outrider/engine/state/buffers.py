"""Static device buffers of an iteration, in a registry: each with a name, a shape and what fills its padding.

They are allocated once, from declared shapes, before anything is captured, and used through views of the first rows.
Each has one writing stream. An engine may draft fewer tokens in an iteration than it can: the buffers of such an
iteration are the same memory in the layout of the shorter draft. Letters: B requests, N nodes of a draft with its root
(the width of verify), E tokens of a request that draft-extend takes in (one more than the longest path), K drafted
tokens, D the longest path, P pages a request, H hidden size, V vocabulary, M bias entries.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, Backend
from outrider.engine.requests.sampling import MAX_LOGIT_BIAS
from outrider.model import LanguageModel, SideBySide
from outrider.speculative.proposer import Draft, Proposer
from outrider.speculative.tree import Tree


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One buffer: ``per`` rows of ``shape`` for each request, behind the dimensions ``leading``.

    ``padding`` fills the rows of a bucket that no request has; where ``step`` isn't 0, request i's row gets ``i * step``
    more. Row 0 of every table and page 0 of every cache are reserved, so that zero is a valid index everywhere.
    """

    name: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.int64
    per: int = 1
    leading: tuple[int, ...] = ()
    padding: int | float | bool = 0
    step: int = 0


INPUTS, DRAFT, VERIFY, EXTEND, OUTPUTS = "inputs", "draft", "verify", "extend", "outputs"
"""Groups of buffers, the first part of their names: who writes them is said at the classes below."""


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Private copies of what the iteration reads of shared state, gathered on forward before the draft.

    ``rows``, ``seq_lens``, ``last_tokens``, ``seeds`` int64 [B]; ``temperature`` float32 [B]; ``tables`` int32 [B, P];
    ``mrope_position_deltas`` int64 [B], None where the model's positions have no axes; ``relay`` by name, [B, ...].
    Sampling options: ``numbers`` int64 [B, 2], ``shares`` float32 [B, 5], ``biases``: tokens int64, values float32, ends
    int64, [B, M] each.
    """

    rows: Tensor
    seq_lens: Tensor
    last_tokens: Tensor
    seeds: Tensor
    temperature: Tensor
    tables: Tensor
    mrope_position_deltas: Tensor | None
    relay: Mapping[str, Tensor]
    numbers: Tensor
    shares: Tensor
    biases: tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class VerifyInputs:
    """Written on plan: ``tokens``, ``positions`` (indices in the sequence), ``slots`` int64 [B*N]; ``rope_positions``, the
    same as the model's rope takes them: [3, B*N], or ``positions`` itself where it has no axes; ``seq_lens`` int32 [B];
    ``mask`` bool [B*N, N] of trees. ``query_start`` int32 [B+1] is constant. Where nothing is drafted ``tokens`` are the
    inputs' ``last_tokens``, and written with these on forward alone.

    ``static_rope_positions``: what a captured verify reads; a copy where positions have axes, since some devices compute
    these once more after the plan has joined.
    """

    tokens: Tensor
    positions: Tensor
    rope_positions: Tensor
    static_rope_positions: Tensor
    slots: Tensor
    seq_lens: Tensor
    mask: Tensor | None
    query_start: Tensor

    @property
    def width(self) -> int:
        """N."""
        return self.tokens.shape[0] // self.seq_lens.shape[0]

    def attention(self, tables: Tensor, *, max_query: int, max_kv: int) -> AttentionMetadata:
        """Metadata of N new tokens for each request."""
        return AttentionMetadata(
            query_start=self.query_start,
            seq_lens=self.seq_lens,
            block_table=tables,
            max_query=max_query,
            max_kv=max_kv,
            tree_mask=self.mask,
            uniform=True,
        )


@dataclass(frozen=True, slots=True)
class PathInputs:
    """Of trees, written in the extend plan, since only a path is taken in: ``gather`` int64 [B*E], rows of verify along
    the path; ``positions``, ``slots`` int64 [B*E], ``rope_positions`` as the target's rope takes them; ``seq_lens`` int32
    [B]; ``sources``, ``destinations`` int64 [B*D], cache slots that accepted nodes move between. ``query_start`` int32
    [B+1] is constant.
    """

    gather: Tensor
    positions: Tensor
    rope_positions: Tensor
    slots: Tensor
    seq_lens: Tensor
    sources: Tensor
    destinations: Tensor
    query_start: Tensor

    def attention(self, tables: Tensor, *, max_query: int, max_kv: int) -> AttentionMetadata:
        """Metadata of E tokens for each request, an accepted path that has become a chain."""
        return AttentionMetadata(
            query_start=self.query_start,
            seq_lens=self.seq_lens,
            block_table=tables,
            max_query=max_query,
            max_kv=max_kv,
            uniform=True,
        )


@dataclass(frozen=True, slots=True)
class ExtendPlan:
    """Written in the extend plan: ``tokens`` int64 [B*E], ``last`` and ``next_positions`` int64 [B]; ``path`` None for
    chains. ``continues`` bool [B] and ``starts`` int32 [B+1] are constant: all do, and one token of each.
    """

    tokens: Tensor
    last: Tensor
    next_positions: Tensor
    continues: Tensor
    starts: Tensor
    path: PathInputs | None


@dataclass(frozen=True, slots=True)
class VerifyOutputs:
    """Written by verify, on forward: ``hidden`` [B*N, H], ``aux_hidden_states`` of inner layers, [B*N, H] each, ``tokens``
    int64 [B, E] (accepted, decided, then -1), ``path`` int64 [B, E] of trees, ``accepted`` int64 [B].
    """

    hidden: Tensor
    aux_hidden_states: tuple[Tensor, ...]
    tokens: Tensor
    path: Tensor | None
    accepted: Tensor


@dataclass(frozen=True, slots=True)
class Views:
    """Every buffer, for the first ``count`` requests. ``draft`` is written by the draft, on forward."""

    count: int
    inputs: DecodeInputs
    draft: Draft
    verify: VerifyInputs
    extend: ExtendPlan
    outputs: VerifyOutputs


class StaticBuffers:
    """Owner of the buffers of ``specs``. ``views`` of the same count are the same objects each time.

    ``shorter``: by the number of tokens that an iteration drafts, the same buffers as such an iteration lays them out. In all
    methods ``drafted`` None is the layout of ``specs``.
    """

    def __init__(
        self,
        backend: Backend,
        specs: Iterable[BufferSpec],
        *,
        max_requests: int,
        shorter: Mapping[int, Iterable[BufferSpec]] | None = None,
    ) -> None:
        self._backend = backend
        self.specs = {spec.name: spec for spec in specs}
        self._drafted = self.specs["verify.positions"].per - 1
        self._layouts: dict[int | None, Mapping[str, BufferSpec]] = {None: self.specs}
        for drafted, given in (shorter or {}).items():
            self._layouts[drafted] = {spec.name: spec for spec in given}
        self._full = {
            spec.name: torch.full(
                (*spec.leading, max_requests * spec.per, *spec.shape), spec.padding, dtype=spec.dtype, device=backend.device
            )
            for spec in self.specs.values()
        }
        self._whole = {
            (drafted, name): self._laid_out(spec, max_requests)
            for drafted, layout in self._layouts.items()
            for name, spec in layout.items()
        }
        number = torch.arange(max_requests, device=backend.device)
        # Padding that counts up, made once: nothing is allocated while a batch is padded.
        self._counted = {
            (drafted, spec.name): spec.padding + spec.step * number
            for drafted, layout in self._layouts.items()
            for spec in layout.values()
            if spec.step
        }
        for name, spec in self.specs.items():
            if spec.step:
                self._full[name].copy_(self._counted[None, name])
        self._constants: dict[int, Tensor] = {}
        self._continuing = torch.ones(max_requests, dtype=torch.bool, device=backend.device)
        self._max_requests = max_requests
        self._views: dict[tuple[int | None, int], Views] = {}
        for specs_of in self._layouts.values():
            for per in {1, specs_of["verify.positions"].per, specs_of["extend.tokens"].per} - self._constants.keys():
                ends = torch.arange(0, (max_requests + 1) * per, per, dtype=torch.int32, device=backend.device)
                self._constants[per] = ends
        self.lane = torch.arange(max(self._constants), device=backend.device)
        """0, 1, … for as many tokens as a request may have in an iteration."""

    def _laid_out(self, spec: BufferSpec, max_requests: int) -> Tensor:
        """The memory of a buffer from its beginning on, in the layout of ``spec``."""
        shape = (*spec.leading, max_requests * spec.per, *spec.shape)
        full = self._full[spec.name]
        return full if full.shape == shape else full.view(-1)[: math.prod(shape)].view(shape)

    def rows(self, name: str, start: int, end: int, drafted: int | None = None) -> Tensor:
        """The rows of requests ``start`` to ``end`` of one buffer."""
        layout = self._layout(drafted)
        spec = self._layouts[layout][name]
        return self._whole[layout, name].narrow(len(spec.leading), start * spec.per, (end - start) * spec.per)

    def _layout(self, drafted: int | None) -> int | None:
        return None if drafted == self._drafted else drafted

    def group(self, *prefixes: str, count: int, drafted: int | None = None) -> dict[str, Tensor]:
        """Buffers whose names begin with one of ``prefixes``, for ``count`` requests."""
        layout = self._layouts[self._layout(drafted)]
        return {name: self.rows(name, 0, count, drafted) for name in layout if name.split(".")[0] in prefixes}

    def pad(self, prefix: str, *, count: int, bucket: int, drafted: int | None = None) -> None:
        """Fill what lies between ``count`` and ``bucket`` requests, in the caller's scope; nothing when they are equal."""
        if count == bucket:
            return
        layout = self._layout(drafted)
        for name, spec in self._layouts[layout].items():
            if name.split(".")[0] == prefix:
                rows = self.rows(name, count, bucket, drafted)
                if spec.step:
                    rows.copy_(self._counted[layout, name][count:bucket])
                else:
                    rows.fill_(spec.padding)

    def mark_stale(self, prefix: str, *, bucket: int, drafted: int | None = None) -> None:
        """Tell a tool that a group is about to be written for a new batch: what isn't written again is stale."""
        if self._backend.observer is None:
            return
        for name, rows in self.group(prefix, count=bucket, drafted=drafted).items():
            self._backend.mark_stale(rows, f"{name} of the batch before")

    def views(self, count: int, drafted: int | None = None) -> Views:
        """Views for ``count`` requests."""
        key = self._layout(drafted), count
        if key not in self._views:
            self._views[key] = self._view(count, key[0])
        return self._views[key]

    def _view(self, count: int, drafted: int | None) -> Views:
        specs = self._layouts[drafted]

        def get(name: str) -> Tensor:
            return self.rows(name, 0, count, drafted)

        def maybe(name: str) -> Tensor | None:
            return get(name) if name in specs else None

        def several(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): get(name) for name in specs if name.startswith(prefix)}

        mask = maybe("draft.mask")
        path = None
        if mask is not None:
            positions = get("extend.positions")
            path = PathInputs(
                gather=get("extend.gather"),
                positions=positions,
                rope_positions=get("extend.rope_positions") if "extend.rope_positions" in specs else positions,
                slots=get("extend.slots"),
                seq_lens=get("extend.seq_lens"),
                sources=get("extend.sources"),
                destinations=get("extend.destinations"),
                query_start=self._constants[specs["extend.tokens"].per][: count + 1],
            )
        positions = get("verify.positions")
        axes = "verify.rope_positions" in specs
        hidden, states = get("outputs.hidden"), maybe("outputs.aux_hidden_states")
        return Views(
            count=count,
            inputs=DecodeInputs(
                rows=get("inputs.rows"),
                seq_lens=get("inputs.seq_lens"),
                last_tokens=get("inputs.last_tokens"),
                seeds=get("inputs.seeds"),
                temperature=get("inputs.temperature"),
                tables=get("inputs.tables"),
                mrope_position_deltas=maybe("inputs.mrope_position_deltas"),
                relay=several("inputs.relay."),
                numbers=get("inputs.numbers"),
                shares=get("inputs.shares"),
                biases=(get("inputs.bias_tokens"), get("inputs.bias_values"), get("inputs.bias_until")),
            ),
            draft=Draft(
                tokens=get("draft.tokens"),
                probs=maybe("draft.probs"),
                tree=None if mask is None else Tree(get("draft.parents"), get("draft.depths"), mask),
            ),
            verify=VerifyInputs(
                tokens=get("verify.tokens" if "verify.tokens" in specs else "inputs.last_tokens"),
                positions=positions,
                rope_positions=get("verify.rope_positions") if axes else positions,
                static_rope_positions=get("verify.static_rope_positions") if axes else positions,
                slots=get("verify.slots"),
                seq_lens=get("verify.seq_lens"),
                mask=maybe("verify.mask"),
                query_start=self._constants[specs["verify.positions"].per][: count + 1],
            ),
            extend=ExtendPlan(
                tokens=get("extend.tokens"),
                last=get("extend.last"),
                next_positions=get("extend.next_positions"),
                continues=self._continuing[:count],
                starts=self._constants[1][: count + 1],
                path=path,
            ),
            outputs=VerifyOutputs(
                hidden=hidden,
                aux_hidden_states=() if states is None else SideBySide(states, hidden.shape[-1]),
                tokens=get("outputs.tokens"),
                path=maybe("outputs.path"),
                accepted=get("outputs.accepted"),
            ),
        )


def step_buffers(
    model: LanguageModel, proposer: Proposer, *, pages: int, drafted: int | None = None
) -> tuple[BufferSpec, ...]:
    """The buffers of an engine: the whole table, in the order in which an iteration writes them. ``pages``: P.

    ``drafted``: the layout of an iteration that drafts so many tokens of a chain, none of them more than the buffers of a
    whole draft hold. None: a whole draft.
    """
    axes = model.config.rope.axes > 1
    tokens = proposer.nodes if drafted is None else drafted
    nodes, path = tokens + 1, (proposer.depth if drafted is None else drafted) + 1
    hidden, vocabulary = model.config.hidden_size, model.config.vocab_size
    read = len(proposer.aux_hidden_state_layers)
    int32, float32, booleans = torch.int32, torch.float32, torch.bool
    specs = [
        BufferSpec("inputs.rows"),
        BufferSpec("inputs.seq_lens"),
        BufferSpec("inputs.last_tokens"),
        BufferSpec("inputs.seeds"),
        BufferSpec("inputs.temperature", dtype=float32),
        BufferSpec("inputs.tables", (pages,), int32),
        *([BufferSpec("inputs.mrope_position_deltas")] if axes else []),
        *(BufferSpec(f"inputs.relay.{spec.name}", spec.shape, spec.dtype) for spec in proposer.relay),
        BufferSpec("inputs.numbers", (2,)),
        BufferSpec("inputs.shares", (5,), float32),
        BufferSpec("inputs.bias_tokens", (MAX_LOGIT_BIAS,)),
        BufferSpec("inputs.bias_values", (MAX_LOGIT_BIAS,), float32),
        BufferSpec("inputs.bias_until", (MAX_LOGIT_BIAS,)),
        BufferSpec("draft.tokens", (tokens,)),
    ]
    if proposer.is_tree:
        specs += [
            BufferSpec("draft.parents", (nodes,)),
            BufferSpec("draft.depths", (nodes,)),
            BufferSpec("draft.mask", (nodes, nodes), booleans),
        ]
    elif tokens:
        specs.append(BufferSpec("draft.probs", (tokens, vocabulary), float32))
    specs += [
        # Where nothing is drafted these are the last tokens, which verify reads where they were gathered.
        *([BufferSpec("verify.tokens", per=nodes)] if tokens else []),
        BufferSpec("verify.positions", per=nodes),
        BufferSpec("verify.slots", per=nodes),
        # A padding request has as many tokens as the others, all in the reserved page.
        BufferSpec("verify.seq_lens", dtype=int32, padding=nodes),
    ]
    if axes:
        specs += [
            BufferSpec("verify.rope_positions", per=nodes, leading=(3,)),
            BufferSpec("verify.static_rope_positions", per=nodes, leading=(3,)),
        ]
    if proposer.is_tree:
        specs.append(BufferSpec("verify.mask", (nodes,), booleans, per=nodes, padding=True))
    specs += [
        BufferSpec("outputs.hidden", (hidden,), model.dtype, per=nodes),
        *([BufferSpec("outputs.aux_hidden_states", (read * hidden,), model.dtype, per=nodes)] if read else []),
        BufferSpec("outputs.tokens", (path,)),
        *([BufferSpec("outputs.path", (path,))] if proposer.is_tree else []),
        BufferSpec("outputs.accepted"),
        BufferSpec("extend.tokens", per=path),
        BufferSpec("extend.last", step=path),  # the first token of each: a row of its own
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
            *([BufferSpec("extend.rope_positions", per=path, leading=(3,))] if axes else []),
        ]
    return tuple(specs)
