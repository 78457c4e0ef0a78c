"""Sampling options of requests that change logits.

Parameters and token counts of each request row. The schedule stream writes the parameters of an admitted request. The forward
stream writes token counts. An iteration without requests that use options launches no kernel for them.

Letters in shapes: R: request rows; V: vocabulary size; M: bias entries; B: requests of a batch; N: nodes of each request,
including the root.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.device import KernelSet
from outrider.engine.requests.batch import BatchFeatures
from outrider.engine.requests.request import Request
from outrider.engine.requests.sampling import MAX_LOGIT_BIAS
from outrider.engine.state.buffers import DecodeInputs
from outrider.engine.state.staging import Packer, Staged, float_bits, floats_of_bits

_NO_END = 2**62


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """The options of a batch, for the stream that gathered them. A field is None if no request of the batch uses it."""

    rows: Tensor
    """Request rows, int64 [B]."""
    biases: tuple[Tensor, ...] | None
    """Number of entries int64 [B], then tokens int64, values float32 and end positions int64, [B, M] each."""
    penalties: Tensor | None
    """Repetition, presence and frequency penalties, float32 [B, 3]."""
    counts: Tensor | None
    """Token counts of all request rows, int32 [R, V]."""
    truncation: tuple[Tensor, Tensor, Tensor] | None
    """Top-k int64, top-p float32 and min-p float32, [B] each."""

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
        """Apply biases, then penalties, then truncation to ``logits`` [B, N, V], and return the result.

        ``tokens``: the last committed token and the draft tokens, int64 [B, N]. ``tree_mask``: bool [B*N, N], or None for a
        chain. ``positions``: the position of the token that each node decides, int64 [B, N]. ``temperature``: float32 [B].
        """
        if self.biases is not None:
            logits = kernels.bias_logits(logits, positions, *self.biases)
        if self.penalties is not None and self.counts is not None:
            logits = kernels.penalize_logits(logits, tokens, tree_mask, self.rows, self.counts, self.penalties)
        if self.truncation is not None:
            logits = kernels.truncate_logits(logits, temperature, *self.truncation)
        return logits

    def commit(self, kernels: KernelSet, tokens: Tensor) -> None:
        """Add the output ``tokens`` int64 [B, N] to the token counts of the requests' rows, on the forward stream. -1 stands
        for no token.
        """
        if self.counts is not None:
            kernels.count_tokens(self.counts, self.rows, tokens)


class OptionTable:
    """The options of all request rows on the device.

    The token counts take 4 R V bytes (see :meth:`KernelSet.penalize_logits`). The engine allocates them at its start, because
    captured graphs contain their address.
    """

    def __init__(self, *, rows: int, vocabulary: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._numbers = torch.zeros((rows, 2), dtype=torch.int64, device=device)
        """Top-k and number of bias entries of each request row, int64 [R, 2]."""
        self._shares = torch.zeros((rows, 5), dtype=torch.float32, device=device)
        """Top-p, min-p and the three penalties of each request row, float32 [R, 5]."""
        self._bias_tokens = torch.zeros((rows, MAX_LOGIT_BIAS), dtype=torch.int64, device=device)
        self._bias_values = torch.zeros((rows, MAX_LOGIT_BIAS), dtype=torch.float32, device=device)
        self._bias_until = torch.zeros((rows, MAX_LOGIT_BIAS), dtype=torch.int64, device=device)
        self._counts = torch.zeros((rows, vocabulary), dtype=torch.int32, device=device)

    @staticmethod
    def capacity(*, requests: int, vocabulary: int, max_context: int) -> int:
        """Return the maximum number of values that :meth:`pack` adds for one batch."""
        history = 1 + 2 * min(vocabulary, max_context)
        return requests * (7 + 4 * MAX_LOGIT_BIAS + history)

    def pack(self, admitted: Sequence[Request], packer: Packer) -> None:
        """Add the options of admitted requests to ``packer``, with the token counts of prompt and output so far."""
        numbers, shares = [], []
        entries: list[int] = []
        biases: list[tuple[int, float, int]] = []
        for request in admitted:
            params = request.params
            request_biases = _bias_list(request) if params.biased else []
            first_entry = request.row * MAX_LOGIT_BIAS
            entries.extend(range(first_entry, first_entry + len(request_biases)))
            biases.extend(request_biases)
            numbers += [min(params.top_k, self._vocabulary), len(request_biases)]
            penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            shares += [params.top_p, params.min_p, *penalties]
        packer.add("option_numbers", numbers)
        packer.add("option_shares", [float_bits(value) for value in shares])
        packer.add("bias_entries", entries)
        packer.add("bias_tokens", [token for token, _, _ in biases])
        packer.add("bias_values", [float_bits(value) for _, value, _ in biases])
        packer.add("bias_until", [until for _, _, until in biases])
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

    def admit(self, staged: Staged) -> None:
        """Write the parameters of admitted requests to their rows, on the schedule stream."""
        rows, entries = staged("admitted"), staged("bias_entries")
        self._numbers[rows] = staged("option_numbers").view(-1, 2)
        self._shares[rows] = floats_of_bits(staged("option_shares")).view(-1, 5)
        if entries.numel():
            self._bias_tokens.view(-1)[entries] = staged("bias_tokens")
            self._bias_values.view(-1)[entries] = floats_of_bits(staged("bias_values"))
            self._bias_until.view(-1)[entries] = staged("bias_until")

    def write_token_counts(self, staged: Staged) -> None:
        """Write the token counts of admitted requests with penalties, on the forward stream, before the first count."""
        rows = staged("history_rows")
        if not rows.numel():
            return
        self._counts.index_fill_(0, rows, 0)
        # The host has added up the counts: each cell is written once, so the result doesn't depend on an order.
        self._counts.view(-1)[staged("history_cells")] = staged("history_values").to(torch.int32)

    def gather(self, features: BatchFeatures, rows: Tensor) -> BatchOptions | None:
        """Return copies of the options of ``rows`` int64 [B]; None if ``features`` has no options."""
        if not features.options:
            return None
        bias_tables = (self._bias_tokens, self._bias_values, self._bias_until)
        return self._options(
            features,
            rows.clone(),
            self._numbers.index_select(0, rows),
            self._shares.index_select(0, rows),
            tuple(table.index_select(0, rows) for table in bias_tables) if features.biased else None,
        )

    def gather_into(self, features: BatchFeatures, rows: Tensor, inputs: DecodeInputs) -> None:
        """Copy the options of ``rows`` int64 [B] to the static buffers ``inputs``, for :meth:`options_from_inputs`."""
        if not features.options:
            return
        inputs.numbers.copy_(self._numbers.index_select(0, rows))
        inputs.shares.copy_(self._shares.index_select(0, rows))
        if features.biased:
            bias_tables = (self._bias_tokens, self._bias_values, self._bias_until)
            for static, table in zip(inputs.biases, bias_tables, strict=True):
                static.copy_(table.index_select(0, rows))

    def options_from_inputs(self, features: BatchFeatures, inputs: DecodeInputs) -> BatchOptions | None:
        """Return the options of a batch that :meth:`gather_into` has copied to ``inputs``; None if ``features`` has no
        options.
        """
        if not features.options:
            return None
        return self._options(features, inputs.rows, inputs.numbers, inputs.shares, inputs.biases)

    def _options(
        self, features: BatchFeatures, rows: Tensor, numbers: Tensor, shares: Tensor, biases: tuple[Tensor, ...] | None
    ) -> BatchOptions:
        return BatchOptions(
            rows=rows,
            biases=(numbers[:, 1], *biases) if features.biased and biases is not None else None,
            penalties=shares[:, 2:] if features.penalized else None,
            counts=self._counts if features.penalized else None,
            truncation=(numbers[:, 0], shares[:, 0], shares[:, 1]) if features.truncated else None,
        )


def _bias_list(request: Request) -> list[tuple[int, float, int]]:
    """Return the request's biases as (token, added value, first position at which the bias ends)."""
    params = request.params
    biases = [(token, value, _NO_END) for token, value in params.biases]
    if params.min_tokens and request.guidance is None:  # a guide's masks already exclude the stop tokens
        until = len(request.prompt) + params.min_tokens
        biases += [(token, float("-inf"), until) for token in sorted(request.stop_tokens)]
    return biases


def _history(request: Request) -> dict[int, int]:
    """Return the packed count of each token: 1 if the prompt has it, plus 2 for each occurrence in the output."""
    packed = dict.fromkeys(request.prompt, 1)
    for token, count in Counter(request.output).items():
        packed[token] = packed.get(token, 0) + 2 * count
    return packed
