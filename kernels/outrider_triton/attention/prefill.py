"""Prefill attention: kernels of this package and of libraries, chosen by measurement during warm-up.

A library is used if it is installed and measured to be faster. Libraries read contiguous keys and values, so the cached
tokens of a batch are copied first, which takes a fraction of the attention time of a long prompt.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from math import log2
from typing import Any

import torch
from torch import Tensor

from outrider.device import AttentionMetadata
from outrider_triton.attention import operators
from outrider_triton.launch import only_compiles, power_of_two
from outrider_triton.tiles.facts import DeviceFacts
from outrider_triton.tiles.store.choices import PromptStore

_TRITON = torch.ops.outrider
MIN_PREFILL_QUERY = 64
"""Minimum number of new tokens of a sequence that counts as prefill."""
_MEASURED_LENGTHS = (128, 512, 2048, 4096, 8192)
_MAX_BUSY_CALLS = 16
_MIN_COPIED_QUERY = 1024
_MAX_COPY_BYTES = 1 << 29
_MIN_CALL_QUERY = 2048
"""Minimum number of new tokens of each sequence for which a library is called once per sequence, and again for context."""
_COPY_CONFIGS = ((64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2))
"""Tile configurations over a contiguous copy: query rows, cached tokens, warps, stages. Two programs share a multiprocessor:
one multiplies while the other computes exponentials.
"""
_PARTIAL_CANDIDATES = frozenset({"torch's cuDNN"})
"""Candidates that serve only some batches, so that others need a second candidate."""
Attend = Callable[["PrefillOperands"], Tensor]
"""One implementation of prefill attention among those that are measured."""
_CONFIGS = ((128, 128, 8, 2), (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (16, 16, 4, 1))


@dataclass(frozen=True, slots=True)
class PrefillOperands:
    """The operands of one call of attention: queries [T, Hq, D], caches, metadata, scale, window, and sinks [Hq] or None."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    metadata: AttentionMetadata
    scale: float
    window: int
    sinks: Tensor | None = None

    def copied(self, width: int, pdl: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Copy the keys and values of the context to contiguous memory with heads of ``width`` elements. Return keys, values,
        and the first row of each sequence.
        """
        metadata, rows, dtype = self.metadata, self.copied_rows, self.q.dtype
        return _TRITON.copy_context.triton(  # type: ignore[no-any-return]
            self.k_cache, self.v_cache, metadata.seq_lens, metadata.block_table, rows, metadata.max_kv, width, dtype, pdl
        )

    @property
    def has_no_context(self) -> bool:
        """True if the host knows that the batch's new tokens are all of its tokens."""
        context = self.metadata.host_context
        return context is not None and not any(context)

    @property
    def copied_rows(self) -> int:
        """Maximum number of rows of :meth:`copied`."""
        metadata, batch = self.metadata, self.metadata.seq_lens.shape[0]
        cached = batch * metadata.max_kv
        return operators.copied_rows(min(cached, self.q.shape[0]) if self.has_no_context else cached, batch)

    def second_half(self) -> PrefillOperands:
        """Return a prefill of the second half of a single sequence's new tokens; the first half is cached context."""
        count, metadata = self.q.shape[0], self.metadata
        own = count - count // 2
        starts = torch.tensor([0, own], dtype=torch.int32, device=self.q.device)
        context = count - own
        half = replace(metadata, query_start=starts, max_query=own, host_query_start=(0, own), host_context=(context,))
        return replace(self, q=self.q[context:], metadata=half)

    def first(self, count: int, sequences: int = 1) -> PrefillOperands:
        """Return a prefill of the first ``count`` new tokens of the first sequence; other ``sequences`` are empty."""
        metadata, empty = self.metadata, sequences - 1
        device = self.q.device
        metadata_of_first = replace(
            metadata,
            query_start=torch.tensor([0, *[count] * sequences], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([count, *[0] * empty], dtype=torch.int32, device=device),
            block_table=metadata.block_table[:1].repeat(sequences, 1),
            max_query=count,
            max_kv=count,
            host_query_start=(0, *[count] * sequences),
            host_context=(0,) * sequences,
        )
        return replace(self, q=self.q[:count], metadata=metadata_of_first)


def prefill_config(size: int, shared: int, *, copied: bool = False) -> list[int]:
    """Return block rows, cached tokens per block, warps and stages: the largest that fit into shared memory, in 16 bits.

    ``copied``: over a contiguous copy that the copy engine loads; two programs should fit on a multiprocessor.
    """
    width = max(power_of_two(size), 16)
    budget = shared // 2 if copied else shared
    sizes = _COPY_CONFIGS if copied else _CONFIGS
    return list(next((each for each in sizes if 2 * width * (each[0] + 2 * each[1] * each[3]) <= budget), sizes[-1]))


class PromptAttention:
    """Prefill attention by the fastest measured candidate, and before the measurement by a default candidate."""

    def __init__(self, facts: DeviceFacts) -> None:
        self._facts = facts
        self._ranked: dict[tuple[object, ...], Mapping[int, tuple[str, ...]]] = {}
        self._compiled: set[tuple[object, ...]] = set()
        self._reports: dict[str, str] = {}
        self._store: PromptStore | None = None
        self._merged: set[tuple[object, ...]] = set()  # keys for which cuDNN's results with context were right

    def use_store(self, store: PromptStore) -> None:
        """Load earlier measurements from ``store``, and store later ones there."""
        self._store = store

    @property
    def reports(self) -> Mapping[str, str]:
        """Return, by purpose, the names of the chosen candidates and of the unusable ones with reasons."""
        return dict(self._reports)

    def serves(self, q: Tensor, metadata: AttentionMetadata) -> bool:
        """Return True for causal attention of a batch with many new tokens per sequence, and enough of them in total to
        occupy the device.
        """
        if (
            metadata.tree_mask is not None
            or metadata.max_query < MIN_PREFILL_QUERY
            or q.dtype not in (torch.bfloat16, torch.float16)
        ):
            return False
        rows = prefill_config(q.shape[-1], self._facts.shared_bytes)[0]
        programs = self._blocks(q, metadata, rows) * q.shape[1]
        return 2 * programs >= self._facts.processors or metadata.max_kv <= 8 * metadata.max_query

    def longest_elsewhere(self, q: Tensor) -> int:
        """Return the maximum number of new tokens per sequence for which :meth:`serves` may return False."""
        if q.dtype not in (torch.bfloat16, torch.float16):
            return 1 << 62
        rows = prefill_config(q.shape[-1], self._facts.shared_bytes)[0]
        return max(MIN_PREFILL_QUERY, -(-self._facts.processors // (2 * q.shape[1])) * rows)

    def attend(self, prompts: PrefillOperands) -> Tensor:
        """Compute attention [T, Hq, D] of the new tokens with the fastest candidate that serves this batch; padding tokens
        get zeros.
        """
        return self._candidates(prompts)[self._choice(prompts)](prompts)

    def measure(self, prompts: PrefillOperands) -> None:
        """Time every candidate at several prompt lengths up to that of ``prompts``, whose operands it uses.

        If an earlier process stored the ranking, run only the fastest candidate, which must be correct. The host waits for
        the device, so this must not run inside a capture. Where launches only compile, compile this package's candidates
        instead.
        """
        key = _key(prompts)
        if only_compiles():
            if key not in self._compiled:  # of one layer
                self._compiled.add(key)
                self._call_own_candidates(prompts)
            return
        module = torch.get_device_module(prompts.q.device)
        if key in self._ranked or not hasattr(module, "Event") or prompts.metadata.host_query_start is None:
            return
        self._call_own_candidates(prompts)
        counts = tuple(dict.fromkeys(min(candidate, prompts.metadata.max_query) for candidate in _MEASURED_LENGTHS))
        kept = {} if self._store is None else self._store.load(key, counts)
        ranked: dict[int, tuple[str, ...]] = {}
        busy_calls = max(1, min(_MAX_BUSY_CALLS, _MEASURED_LENGTHS[-1] // prompts.metadata.max_query))

        def busy() -> None:
            for _ in range(busy_calls):
                self._by_pages(prompts)

        for count in counts:
            prefix = prompts.first(count)
            reference = self._by_pages(prefix)
            if kept and self._confirmed(prefix, reference, kept[count]):
                ranked[count] = kept[count]
                self._reports[f"attention over {count} new tokens"] = f"{kept[count][0]} (measured before)"
                continue
            trials = {
                name: self._try_candidate(name, attend, prefix, reference, module, busy)
                for name, attend in self._candidates(prefix).items()
            }
            times = {name: milliseconds for name, milliseconds in trials.items() if milliseconds is not None}
            ranked[count] = tuple(sorted(times, key=times.__getitem__))
            listed = ", ".join(f"{name} {times[name] * 1e3:.0f}" for name in ranked[count])
            self._reports[f"attention over {count} new tokens"] = f"{ranked[count][0]} (us: {listed})"
        self._ranked[key] = ranked
        if any("torch's cuDNN" in names for names in ranked.values()):
            half = prompts.first(counts[-1]).second_half()
            merging = "torch's cuDNN over context", self._by_cudnn
            is_right = self._try_candidate(*merging, half, self._by_pages(half), None) is not None
            self._merged.update({key} if is_right else ())
        if self._store is not None and ranked != kept:
            try:
                self._store.write(key, ranked)
            except OSError as error:
                self._reports["attention over prompts, for the next start"] = f"not kept: {error}"

    def _call_own_candidates(self, prompts: PrefillOperands) -> None:
        """Call this package's candidates for one sequence, and for many, which select other kernel variants."""
        for sequences in (1, operators.SEQUENCE_BOUNDS[0] + 1):
            prefix = prompts.first(MIN_PREFILL_QUERY, sequences)
            for name, attend in self._candidates(prefix).items():
                if name in ("pages", "copy"):
                    attend(prefix)

    # -- measurement and candidates ---------------------------------------------------------------------------------

    def _try_candidate(
        self,
        name: str,
        attend: Attend,
        prefix: PrefillOperands,
        reference: Tensor,
        module: Any | None,
        busy: Callable[[], object] = lambda: None,
    ) -> float | None:
        """Return a candidate's milliseconds, 0 without a ``module`` to time with, or None if it fails or is wrong.

        The reason of a failure is recorded. ``busy``: see :func:`_milliseconds`.
        """
        try:
            result = attend(prefix)
            error_size = float((result.float() - reference.float()).abs().max())
            if not error_size <= 0.05 * float(reference.float().abs().max()) + 1e-3:
                self._reports[f"attention by {name}"] = f"not used: off by {error_size:.3g} over {prefix.q.shape[0]} tokens"
                return None
            return 0.0 if module is None else _milliseconds(module, lambda: attend(prefix), busy)
        except Exception as failure:  # any failure of a library disqualifies the candidate
            reason = str(failure).split("\n", 1)[0][:200]
            self._reports[f"attention by {name}"] = f"not used: {type(failure).__name__}: {reason}"
            return None

    def _confirmed(self, prefix: PrefillOperands, reference: Tensor, names: Sequence[str]) -> bool:
        """Return True if the first of the ranked ``names`` still compute correct results, up to the first one that serves
        every batch.
        """
        available = self._candidates(prefix)
        for name in names:
            if name not in available or self._try_candidate(name, available[name], prefix, reference, None) is None:
                return False
            if name not in _PARTIAL_CANDIDATES:
                break
        return True

    def _choice(self, prompts: PrefillOperands) -> str:
        """Return the name of the candidate for this batch."""
        available = self._candidates(prompts)
        measured = self._ranked.get(_key(prompts))
        longest = prompts.metadata.max_query
        if measured:
            nearest = min(measured, key=lambda count: abs(log2(count) - log2(longest)))
            return next((name for name in measured[nearest] if name in available), "pages")
        return "copy" if longest >= _MIN_COPIED_QUERY and "copy" in available else "pages"

    def _candidates(self, prompts: PrefillOperands) -> dict[str, Attend]:
        """Return the implementations that can compute this batch, by name."""
        facts, q, metadata = self._facts, prompts.q, prompts.metadata
        found: dict[str, Attend] = {"pages": self._by_pages}
        kv_heads, size = prompts.k_cache.shape[2:]
        width = max(power_of_two(size), 16)
        in_graph = metadata.host_query_start is None
        if (in_graph and not prompts.has_no_context) or 4 * prompts.copied_rows * kv_heads * width > _MAX_COPY_BYTES:
            return found
        generation = facts.capability // 10
        if facts.descriptors:
            found["copy"] = self._by_copy
        if prompts.sinks is None and generation >= 8 and prompts.window == 0 and size % 8 == 0:
            # FlashAttention 3 has no kernels for later devices, and terminates the process there.
            flash3_supported = generation in (8, 9) and q.dtype is torch.bfloat16 and size in (64, 96, 128, 192, 256)
            if flash3_supported and _has_flash3():
                found["fa3-fwd"] = self._by_flash3
            if not in_graph:
                found["torch's FlashAttention 2"] = self._by_flash2
            if _are_long_prompts(metadata, has_context=_key(prompts) in self._merged):
                found["torch's cuDNN"] = self._by_cudnn
        return found

    def _blocks(self, q: Tensor, metadata: AttentionMetadata, rows: int) -> int:
        """Return the maximum number of query blocks over all sequences."""
        starts = metadata.host_query_start
        if starts is None:
            return -(-q.shape[0] // rows) + metadata.seq_lens.shape[0]
        return sum(-(-(end - start) // rows) for start, end in pairwise(starts))

    def _attend(self, prompts: PrefillOperands, sources: tuple[Tensor, Tensor, Tensor | None], shape: list[int]) -> Tensor:
        metadata = prompts.metadata
        return _TRITON.prompt_attention.triton(  # type: ignore[no-any-return]
            prompts.q,
            sources[0],
            sources[1],
            metadata.query_start,
            metadata.seq_lens,
            metadata.block_table,
            sources[2],
            self._blocks(prompts.q, metadata, shape[0]),
            prompts.scale,
            prompts.window,
            shape,
            self._facts.pdl,
            prompts.sinks,
        )

    def _by_pages(self, prompts: PrefillOperands) -> Tensor:
        shape = prefill_config(prompts.q.shape[-1], self._facts.shared_bytes)
        return self._attend(prompts, (prompts.k_cache, prompts.v_cache, None), shape)

    def _by_copy(self, prompts: PrefillOperands) -> Tensor:
        size = prompts.q.shape[-1]
        shape = prefill_config(size, self._facts.shared_bytes, copied=True)
        return self._attend(prompts, prompts.copied(max(power_of_two(size), 16), self._facts.pdl), shape)

    def _by_flash3(self, prompts: PrefillOperands) -> Tensor:
        metadata = prompts.metadata
        keys, values, start = prompts.copied(prompts.q.shape[-1], self._facts.pdl)
        out = _flash3()(
            prompts.q,
            keys,
            values,
            out=torch.zeros_like(prompts.q) if metadata.host_query_start is None else None,
            cu_seqlens_q=metadata.query_start,
            cu_seqlens_k=start,
            seqused_k=metadata.seq_lens,
            max_seqlen_q=metadata.max_query,
            max_seqlen_k=metadata.max_kv,
            softmax_scale=prompts.scale,
            is_causal=True,
            num_splits=1,
        )[0]
        return _zero_padding(out, metadata)

    def _by_flash2(self, prompts: PrefillOperands) -> Tensor:
        metadata = prompts.metadata
        keys, values, start = prompts.copied(prompts.q.shape[-1], self._facts.pdl)
        out = torch.ops.aten._flash_attention_forward(
            prompts.q,
            keys,
            values,
            metadata.query_start,
            start,
            metadata.max_query,
            metadata.max_kv,
            0.0,
            True,
            False,
            scale=prompts.scale,
            seqused_k=metadata.seq_lens,
        )[0]
        return _zero_padding(out, metadata)

    def _by_cudnn(self, prompts: PrefillOperands) -> Tensor:
        """Compute attention with cuDNN, one call per prompt, and a second one for cached context, which cuDNN's causal mask
        doesn't allow.
        """
        metadata, pdl = prompts.metadata, self._facts.pdl
        starts, contexts = metadata.host_query_start or (), metadata.host_context or ()
        keys, values, _ = prompts.copied(prompts.q.shape[-1], pdl)
        if contexts == (0,) and starts[-1] == prompts.q.shape[0]:
            own = slice(0, starts[-1])
            return _cudnn_attention(prompts.q, keys[own], values[own], prompts.scale)[0].contiguous()
        out = torch.empty_like(prompts.q, memory_format=torch.contiguous_format)
        first = 0
        for (start, end), context in zip(pairwise(starts), contexts, strict=True):
            middle, last = first + context, first + context + end - start
            q, attended, sums = prompts.q[start:end], out[start:end], context > 0
            pair = _cudnn_attention(q, keys[middle:last], values[middle:last], prompts.scale, sums=sums)
            if context:
                cached = keys[first:middle], values[first:middle]
                pair += _cudnn_attention(q, *cached, prompts.scale, causal=False, sums=True)
                _TRITON.merge_context.triton(*pair, attended, pdl)
            else:
                attended.copy_(pair[0])
            first += operators.rows_of_copy(last - first)
        return _zero_padding(out, metadata)


def _cudnn_attention(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool = True, sums: bool = False
) -> tuple[Tensor, ...]:
    """Return cuDNN's attention [T, Hq, D] of the queries ``q`` [T, Hq, D] to ``keys`` and ``values`` [S, Hkv, D].

    ``sums``: also return the natural logarithm of each row's sum of exponentials, float32 [T, Hq].
    """
    operands = (x.unsqueeze(0).transpose(1, 2) for x in (q, keys, values))
    attended, logarithms, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *operands, None, sums, dropout_p=0.0, is_causal=causal, return_debug_mask=False, scale=scale
    )
    rows = attended[0].transpose(0, 1)
    return (rows, logarithms.reshape(q.shape[1], q.shape[0]).T) if sums else (rows,)


def _are_long_prompts(metadata: AttentionMetadata, *, has_context: bool) -> bool:
    """Return True if the new tokens of each sequence are worth a library call, or are a single prompt without context.
    ``has_context``: sequences may have cached context.
    """
    starts, context = metadata.host_query_start, metadata.host_context
    if starts is None or context is None or (any(context) and not has_context):
        return False
    return context == (0,) or min(end - start for start, end in pairwise(starts)) >= _MIN_CALL_QUERY


def _key(prompts: PrefillOperands) -> tuple[object, ...]:
    q, sinks = prompts.q, () if prompts.sinks is None else ("sinks",)
    return q.dtype, prompts.k_cache.dtype, *q.shape[1:], *prompts.k_cache.shape[2:], prompts.window, *sinks


def _zero_padding(out: Tensor, metadata: AttentionMetadata) -> Tensor:
    """Return ``out`` with zeros for padding tokens, which libraries leave unwritten."""
    starts = metadata.host_query_start
    if starts is not None and starts[-1] < out.shape[0]:
        out[starts[-1] :] = 0
    return out


@cache
def _has_flash3() -> bool:
    return find_spec("fa3_fwd") is not None


@cache
def _flash3() -> Any:
    """Return the forward operator of FlashAttention 3 that the package ``fa3-fwd`` registers."""
    import_module("fa3_fwd._C")
    return torch.ops.fa3_fwd.fwd


def _milliseconds(module: Any, call: Callable[[], object], busy: Callable[[], object], *, repeats: int = 5) -> float:
    """Return the median device time of ``call`` in milliseconds, after one warm-up call, on the current stream.

    ``busy`` enqueues work for about as long as the host needs to launch ``call``, whose host time is then not measured.
    """
    call()
    times: list[float] = []
    for _ in range(repeats):
        start, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
        busy()
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)
