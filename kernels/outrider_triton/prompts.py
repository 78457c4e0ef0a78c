"""Attention over prompts: which kernel does it, of this package or of a library, by measurement where an engine warms up.

A library is used where it's installed and was measured to be faster. What it reads has no pages: the cached tokens of a batch
are copied first, which takes a fraction of the attention of a long prompt.
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
from torch.nn.attention import SDPBackend, sdpa_kernel

from outrider.device import AttentionMetadata
from outrider_triton import prompt_ops
from outrider_triton.facts import DeviceFacts
from outrider_triton.launch import power_of_two
from outrider_triton.prompt_store import PromptStore

_TRITON = torch.ops.outrider
LEAST = 64
"""New tokens of a sequence from which on it counts as a prompt."""
_CLASSES = (128, 512, 2048, 8192)
_LONG = 1024
_MOST_COPIED = 1 << 29
_COPIED = ((64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2))
"""Two programs of such a size share a multiprocessor: one multiplies while the other takes its exponents."""
_CONFIGS = ((128, 128, 8, 2), (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (16, 16, 4, 1))


@dataclass(frozen=True, slots=True)
class Prompts:
    """The operands of one attention, over prompts or not."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    metadata: AttentionMetadata
    scale: float
    window: int

    def copied(self, width: int, pdl: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values without pages, with heads of ``width``, and where each sequence begins."""
        metadata = self.metadata
        batch = metadata.seq_lens.shape[0]
        rows = prompt_ops.copied_rows(batch * metadata.max_kv, batch)
        most, dtype = metadata.max_kv, self.q.dtype
        return _TRITON.copy_context.triton(  # type: ignore[no-any-return]
            self.k_cache, self.v_cache, metadata.seq_lens, metadata.block_table, rows, most, width, dtype, pdl
        )

    def first(self, count: int, sequences: int = 1) -> Prompts:
        """The first ``count`` new tokens of the first sequence, as a prompt of their own; other ``sequences`` are empty."""
        metadata, empty = self.metadata, sequences - 1
        device = self.q.device
        few = replace(
            metadata,
            query_start=torch.tensor([0, *[count] * sequences], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([count, *[0] * empty], dtype=torch.int32, device=device),
            block_table=metadata.block_table[:1].repeat(sequences, 1),
            max_query=count,
            max_kv=count,
            host_query_start=(0, *[count] * sequences),
        )
        return replace(self, q=self.q[:count], metadata=few)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to attend. ``copies``: over a copy, so only where the host knows how much there is to copy. ``alone``: of one
    prompt alone, so that another one is needed beside it.
    """

    name: str
    attend: Callable[[Prompts], Tensor]
    copies: bool = True
    alone: bool = False


def config(size: int, shared: int, *, copied: bool = False) -> list[int]:
    """Rows and cached tokens of a block, warps and stages: the largest that fit into shared memory, in 16 bits.

    ``copied``: of a copy, which the copy engine brings; two programs should fit beside each other then.
    """
    width = max(power_of_two(size), 16)
    room = shared // 2 if copied else shared
    sizes = _COPIED if copied else _CONFIGS
    return list(next((each for each in sizes if 2 * width * (each[0] + 2 * each[1] * each[3]) <= room), sizes[-1]))


class PromptAttention:
    """Attends by the candidate that was measured to be fastest; before any was measured, by a sound one."""

    def __init__(self, facts: DeviceFacts) -> None:
        self._facts = facts
        self._ranked: dict[tuple[object, ...], Mapping[int, tuple[str, ...]]] = {}
        self._said: dict[str, str] = {}
        self._store: PromptStore | None = None

    def keep_in(self, store: PromptStore) -> None:
        """Take over what was measured in an earlier process from ``store``, and keep there what is measured from now on."""
        self._store = store

    @property
    def said(self) -> Mapping[str, str]:
        """What was chosen, and what couldn't be used, in words, by what it's for."""
        return dict(self._said)

    def serves(self, q: Tensor, metadata: AttentionMetadata) -> bool:
        """Whether this is for prompts: causal, many new tokens, and enough of them to keep the device busy."""
        if metadata.tree_mask is not None or metadata.max_query < LEAST or q.dtype not in (torch.bfloat16, torch.float16):
            return False
        rows = config(q.shape[-1], self._facts.shared_bytes)[0]
        programs = self._blocks(q, metadata, rows) * q.shape[1]
        return 2 * programs >= self._facts.processors or metadata.max_kv <= 8 * metadata.max_query

    def longest_elsewhere(self, q: Tensor) -> int:
        """New tokens of a sequence for which :meth:`serves` may be False, at most."""
        if q.dtype not in (torch.bfloat16, torch.float16):
            return 1 << 62
        rows = config(q.shape[-1], self._facts.shared_bytes)[0]
        return max(LEAST, -(-self._facts.processors // (2 * q.shape[1])) * rows)

    def attend(self, prompts: Prompts) -> Tensor:
        """Attention of the new tokens; padding gives zeros."""
        return self._choice(prompts).attend(prompts)

    def measure(self, prompts: Prompts) -> None:
        """Time every candidate for prompts of several lengths, up to that of ``prompts``, whose operands serve; where that is
        known from an earlier process, run the fastest alone, which must be right. The host waits; not in a capture.
        """
        module = torch.get_device_module(prompts.q.device)
        key = _key(prompts)
        if key in self._ranked or not hasattr(module, "Event") or prompts.metadata.host_query_start is None:
            return
        many = prompts.first(LEAST, prompt_ops.SEQUENCES[0] + 1)  # other variants of the kernels here
        for each in self._candidates(many):
            if each.name in ("pages", "copy"):
                each.attend(many)
        counts = tuple(dict.fromkeys(min(each, prompts.metadata.max_query) for each in _CLASSES))
        kept = {} if self._store is None else self._store.read(key, counts)
        ranked: dict[int, tuple[str, ...]] = {}
        for count in counts:
            few = prompts.first(count)
            wanted = self._by_pages(few)
            if kept and self._confirmed(few, wanted, kept[count]):
                ranked[count] = kept[count]
                self._said[f"attention over {count} new tokens"] = f"{kept[count][0]} (measured before)"
                continue
            tried = {each.name: self._tried(each, few, wanted, module) for each in self._candidates(few)}
            times = {name: milliseconds for name, milliseconds in tried.items() if milliseconds is not None}
            ranked[count] = tuple(sorted(times, key=times.__getitem__))
            listed = ", ".join(f"{name} {times[name] * 1e3:.0f}" for name in ranked[count])
            self._said[f"attention over {count} new tokens"] = f"{ranked[count][0]} (us: {listed})"
        self._ranked[key] = ranked
        if self._store is not None and ranked != kept:
            try:
                self._store.write(key, ranked)
            except OSError as error:
                self._said["attention over prompts, for the next start"] = f"not kept: {error}"

    # -- inside ----------------------------------------------------------------------------------------------------

    def _tried(self, each: Candidate, few: Prompts, wanted: Tensor, module: Any | None) -> float | None:
        """Milliseconds of a candidate, 0 without a ``module`` to time by; None: it fails or is wrong, and that is said."""
        try:
            made = each.attend(few)
            wrong = float((made.float() - wanted.float()).abs().max())
            if not wrong <= 0.05 * float(wanted.float().abs().max()) + 1e-3:
                self._said[f"attention by {each.name}"] = f"not used: off by {wrong:.3g} over {few.q.shape[0]} tokens"
                return None
            return 0.0 if module is None else _milliseconds(module, lambda: each.attend(few))
        except Exception as error:  # whatever a library says: it isn't a candidate then
            reason = str(error).split("\n", 1)[0][:200]
            self._said[f"attention by {each.name}"] = f"not used: {type(error).__name__}: {reason}"
            return None

    def _confirmed(self, few: Prompts, wanted: Tensor, names: Sequence[str]) -> bool:
        """Whether the first of ``names`` still run and are right, as many as may be asked for."""
        able = {each.name: each for each in self._candidates(few)}
        for name in names:
            if name not in able or self._tried(able[name], few, wanted, None) is None:
                return False
            if not able[name].alone:
                break
        return True

    def _choice(self, prompts: Prompts) -> Candidate:
        able = {each.name: each for each in self._candidates(prompts)}
        measured = self._ranked.get(_key(prompts))
        longest = prompts.metadata.max_query
        if measured:
            nearest = min(measured, key=lambda count: abs(log2(count) - log2(longest)))
            return able[next((name for name in measured[nearest] if name in able), "pages")]
        return able["copy"] if longest >= _LONG and "copy" in able else able["pages"]

    def _candidates(self, prompts: Prompts) -> tuple[Candidate, ...]:
        facts, q, metadata = self._facts, prompts.q, prompts.metadata
        found = [Candidate("pages", self._by_pages, copies=False)]
        kv_heads, size = prompts.k_cache.shape[2:]
        width = max(power_of_two(size), 16)
        copied = 4 * prompt_ops.copied_rows(metadata.seq_lens.shape[0] * metadata.max_kv, metadata.seq_lens.shape[0])
        if metadata.host_query_start is None or copied * kv_heads * width > _MOST_COPIED:
            return tuple(found)
        generation = facts.capability // 10
        if facts.descriptors:
            found.append(Candidate("copy", self._by_copy))
        if generation >= 8 and prompts.window == 0 and size % 8 == 0:
            # It has no kernels for later devices, and ends the process there.
            able = generation in (8, 9) and q.dtype is torch.bfloat16 and size in (64, 96, 128, 192, 256)
            if able and find_spec("fa3_fwd") is not None:
                found.append(Candidate("fa3-fwd", self._by_flash3))
            found.append(Candidate("torch's FlashAttention 2", self._by_flash2))
            if metadata.host_query_start == (0, q.shape[0]) and metadata.max_kv == q.shape[0]:
                found.append(Candidate("torch's cuDNN", self._by_cudnn, alone=True))
        return tuple(found)

    def _blocks(self, q: Tensor, metadata: AttentionMetadata, rows: int) -> int:
        """Blocks of queries at most, through all sequences."""
        starts = metadata.host_query_start
        if starts is None:
            return -(-q.shape[0] // rows) + metadata.seq_lens.shape[0]
        return sum(-(-(end - start) // rows) for start, end in pairwise(starts))

    def _attend(self, prompts: Prompts, ends: tuple[Tensor, Tensor, Tensor | None], shape: list[int]) -> Tensor:
        metadata = prompts.metadata
        return _TRITON.prompt_attention.triton(  # type: ignore[no-any-return]
            prompts.q,
            ends[0],
            ends[1],
            metadata.query_start,
            metadata.seq_lens,
            metadata.block_table,
            ends[2],
            self._blocks(prompts.q, metadata, shape[0]),
            prompts.scale,
            prompts.window,
            shape,
            self._facts.pdl,
        )

    def _by_pages(self, prompts: Prompts) -> Tensor:
        shape = config(prompts.q.shape[-1], self._facts.shared_bytes)
        return self._attend(prompts, (prompts.k_cache, prompts.v_cache, None), shape)

    def _by_copy(self, prompts: Prompts) -> Tensor:
        size = prompts.q.shape[-1]
        shape = config(size, self._facts.shared_bytes, copied=True)
        return self._attend(prompts, prompts.copied(max(power_of_two(size), 16), self._facts.pdl), shape)

    def _by_flash3(self, prompts: Prompts) -> Tensor:
        metadata = prompts.metadata
        keys, values, start = prompts.copied(prompts.q.shape[-1], self._facts.pdl)
        out = _flash3()(
            prompts.q,
            keys,
            values,
            cu_seqlens_q=metadata.query_start,
            cu_seqlens_k=start,
            seqused_k=metadata.seq_lens,
            max_seqlen_q=metadata.max_query,
            max_seqlen_k=metadata.max_kv,
            softmax_scale=prompts.scale,
            is_causal=True,
            num_splits=1,
        )[0]
        return _zeros_behind(out, metadata)

    def _by_flash2(self, prompts: Prompts) -> Tensor:
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
        return _zeros_behind(out, metadata)

    def _by_cudnn(self, prompts: Prompts) -> Tensor:
        """Of one prompt without a context."""
        tokens = prompts.q.shape[0]
        keys, values, _ = prompts.copied(prompts.q.shape[-1], self._facts.pdl)
        q, k, v = (x[:tokens].unsqueeze(0).transpose(1, 2) for x in (prompts.q, keys, values))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=prompts.scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out.transpose(1, 2).reshape(prompts.q.shape)


def _key(prompts: Prompts) -> tuple[object, ...]:
    q = prompts.q
    return q.dtype, prompts.k_cache.dtype, *q.shape[1:], *prompts.k_cache.shape[1:], prompts.window


def _zeros_behind(out: Tensor, metadata: AttentionMetadata) -> Tensor:
    """``out`` with zeros for padding, which a library leaves as it is."""
    starts = metadata.host_query_start
    if starts is not None and starts[-1] < out.shape[0]:
        out[starts[-1] :] = 0
    return out


@cache
def _flash3() -> Any:
    """FlashAttention 3's forward, as the package ``fa3-fwd`` registers it."""
    import_module("fa3_fwd._C")
    return torch.ops.fa3_fwd.fwd


def _milliseconds(module: Any, call: Callable[[], object], *, repeats: int = 5) -> float:
    """Device time of one call, the median of a few behind one that isn't counted; in the caller's scope."""
    call()
    times: list[float] = []
    for _ in range(repeats):
        start, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)
