"""Sampling options that change logits, on the device: a row of parameters and a row of token counts for each request.

Letters: R request rows, V vocabulary, M bias entries, B requests of a batch, N nodes of each (see ``KernelSet``).

Two owners, as for the other rows: parameters are written on schedule when a request is admitted, counts on forward. An
iteration without such a request launches nothing here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.device import KernelSet
from outrider.engine.requests.features import Features
from outrider.engine.requests.request import Request
from outrider.engine.requests.sampling import MAX_LOGIT_BIAS
from outrider.engine.state.buffers import DecodeInputs
from outrider.engine.state.staging import Packer, float_bits

_NO_END = 2**62
View = Callable[[tuple[int, int]], Tensor]


@dataclass(frozen=True, slots=True)
class _Biases:
    entries: Tensor
    tokens: Tensor
    values: Tensor
    until: Tensor


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """The options of a batch, private to the stream that gathered them. None: no request of the batch uses them.

    ``rows`` int64 [B]; ``penalties`` float32 [B, 3]; ``truncation``: top-k int64, top-p and min-p float32, [B] each.
    """

    rows: Tensor
    biases: _Biases | None
    penalties: Tensor | None
    counts: Tensor | None
    truncation: tuple[Tensor, Tensor, Tensor] | None

    def process(
        self,
        kernels: KernelSet,
        logits: Tensor,
        *,
        temperature: Tensor,
        tokens: Tensor,
        tree_mask: Tensor | None,
        positions: Tensor,
    ) -> Tensor:
        """The logits that tokens are drawn from: biases, then penalties, then truncation. ``logits`` [B, N, V].

        ``tokens`` int64 [B, N]: the last committed token and the drafted ones behind it; ``tree_mask`` bool [B*N, N] or
        None for a chain; ``positions`` int64 [B, N]: of the token that each node decides; ``temperature`` float32 [B].
        """
        if self.biases is not None:
            listed = self.biases
            logits = kernels.bias_logits(logits, positions, listed.entries, listed.tokens, listed.values, listed.until)
        if self.penalties is not None and self.counts is not None:
            logits = kernels.penalize_logits(logits, tokens, tree_mask, self.rows, self.counts, self.penalties)
        if self.truncation is not None:
            logits = kernels.truncate_logits(logits, temperature, *self.truncation)
        return logits

    def commit(self, kernels: KernelSet, tokens: Tensor) -> None:
        """Count output ``tokens`` int64 [B, N], -1 where there is none; on forward."""
        if self.counts is not None:
            kernels.count_tokens(self.counts, self.rows, tokens)


class OptionTable:
    """``numbers`` int64 [R, 2]: top-k, bias entries. ``shares`` float32 [R, 5]: top-p, min-p, the three penalties.
    Biases: tokens int64, values float32, ends int64, [R, M] each. ``counts`` int32 [R, V] (see
    :meth:`KernelSet.penalize_logits`).

    Counts are allocated with the engine, not when a request first uses penalties: nothing may be allocated once graphs are
    captured, and a graph holds their address. They take 4 R V bytes.
    """

    def __init__(self, *, rows: int, vocabulary: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._numbers = torch.zeros((rows, 2), dtype=torch.int64, device=device)
        self._shares = torch.zeros((rows, 5), dtype=torch.float32, device=device)
        self._bias_tokens = torch.zeros((rows, MAX_LOGIT_BIAS), dtype=torch.int64, device=device)
        self._bias_values = torch.zeros((rows, MAX_LOGIT_BIAS), dtype=torch.float32, device=device)
        self._bias_until = torch.zeros((rows, MAX_LOGIT_BIAS), dtype=torch.int64, device=device)
        self._counts = torch.zeros((rows, vocabulary), dtype=torch.int32, device=device)

    @staticmethod
    def capacity(*, requests: int, vocabulary: int, max_context: int) -> int:
        """The most values that :meth:`pack` adds for one batch."""
        history = 1 + 2 * min(vocabulary, max_context)
        return requests * (7 + 4 * MAX_LOGIT_BIAS + history)

    # -- host ------------------------------------------------------------------------------------------------------

    def pack(self, admitted: Sequence[Request], packer: Packer) -> None:
        """What the device must know of new requests. A request that comes back after a preemption brings its output."""
        numbers, shares = [], []
        entries: list[int] = []
        listed: list[tuple[int, float, int]] = []
        for request in admitted:
            params = request.params
            biases = _bias_list(request) if params.biased else []
            entries.extend(range(request.row * MAX_LOGIT_BIAS, request.row * MAX_LOGIT_BIAS + len(biases)))
            listed.extend(biases)
            numbers += [min(params.top_k, self._vocabulary), len(biases)]
            penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            shares += [params.top_p, params.min_p, *penalties]
        packer.add("option_numbers", numbers)
        packer.add("option_shares", [float_bits(value) for value in shares])
        packer.add("bias_entries", entries)
        packer.add("bias_tokens", [token for token, _, _ in listed])
        packer.add("bias_values", [float_bits(value) for _, value, _ in listed])
        packer.add("bias_until", [until for _, _, until in listed])
        penalized = [request for request in admitted if request.params.penalized]
        cells: list[int] = []
        values: list[int] = []
        for request in penalized:
            start = request.row * self._vocabulary
            for token, value in _history(request).items():
                cells.append(start + token)
                values.append(value)
        packer.add("history_rows", [request.row for request in penalized])
        packer.add("history_cells", cells)
        packer.add("history_values", values)

    # -- schedule --------------------------------------------------------------------------------------------------

    def admit(self, view: View, segments: Mapping[str, tuple[int, int]]) -> None:
        """Write the rows of the admitted requests; in the scope of schedule."""
        rows = view(segments["admitted"])
        self._numbers[rows] = view(segments["option_numbers"]).view(-1, 2)
        self._shares[rows] = _floats(view(segments["option_shares"])).view(-1, 5)
        if segments["bias_entries"][0] < segments["bias_entries"][1]:
            entries = view(segments["bias_entries"])
            self._bias_tokens.view(-1)[entries] = view(segments["bias_tokens"])
            self._bias_values.view(-1)[entries] = _floats(view(segments["bias_values"]))
            self._bias_until.view(-1)[entries] = view(segments["bias_until"])

    # -- forward ---------------------------------------------------------------------------------------------------

    def begin(self, view: View, segments: Mapping[str, tuple[int, int]]) -> None:
        """Write the history of new requests that penalise; in the scope of forward, before anything counts."""
        if segments["history_rows"][0] == segments["history_rows"][1]:
            return
        self._counts.index_fill_(0, view(segments["history_rows"]), 0)
        # The host counted, so cells are distinct and nothing is accumulated in an order that could vary.
        self._counts.view(-1)[view(segments["history_cells"])] = view(segments["history_values"]).to(torch.int32)

    def gather(self, features: Features, rows: Tensor) -> BatchOptions | None:
        """Private copies of what a batch in ``rows`` int64 [B] uses; None when it uses nothing."""
        if not features.options:
            return None
        lists = (self._bias_tokens, self._bias_values, self._bias_until)
        return self._options(
            features,
            rows.clone(),
            self._numbers.index_select(0, rows),
            self._shares.index_select(0, rows),
            tuple(table.index_select(0, rows) for table in lists) if features.biased else None,
        )

    def gather_into(self, features: Features, rows: Tensor, inputs: DecodeInputs) -> None:
        """The same, into static buffers; :meth:`over` makes options of them."""
        if not features.options:
            return
        inputs.numbers.copy_(self._numbers.index_select(0, rows))
        inputs.shares.copy_(self._shares.index_select(0, rows))
        if features.biased:
            lists = (self._bias_tokens, self._bias_values, self._bias_until)
            for private, table in zip(inputs.biases, lists, strict=True):
                private.copy_(table.index_select(0, rows))

    def over(self, features: Features, inputs: DecodeInputs) -> BatchOptions | None:
        """The options of a batch whose parameters were gathered into ``inputs``."""
        if not features.options:
            return None
        return self._options(features, inputs.rows, inputs.numbers, inputs.shares, inputs.biases)

    def _options(
        self, features: Features, rows: Tensor, numbers: Tensor, shares: Tensor, biases: tuple[Tensor, ...] | None
    ) -> BatchOptions:
        return BatchOptions(
            rows=rows,
            biases=_Biases(numbers[:, 1], *biases) if features.biased and biases is not None else None,
            penalties=shares[:, 2:] if features.penalized else None,
            counts=self._counts if features.penalized else None,
            truncation=(numbers[:, 0], shares[:, 0], shares[:, 1]) if features.truncated else None,
        )


def _floats(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def _bias_list(request: Request) -> list[tuple[int, float, int]]:
    """(token, value, position from which on it no longer applies)."""
    params = request.params
    listed = [(token, value, _NO_END) for token, value in params.biases]
    if params.min_tokens and request.guidance is None:  # a guide's masks hold them back
        until = len(request.prompt) + params.min_tokens
        listed += [(token, float("-inf"), until) for token in sorted(request.stop_tokens)]
    return listed


def _history(request: Request) -> dict[int, int]:
    """Token → 1 if it's in the prompt, plus 2 for each time that it's in the output so far."""
    packed = dict.fromkeys(request.prompt, 1)
    for token, count in Counter(request.output).items():
        packed[token] = packed.get(token, 0) + 2 * count
    return packed
