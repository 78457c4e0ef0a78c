"""Compiling candidates beforehand, in other processes: Triton keeps what they compile on disk, and this process loads it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterable
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from triton.errors import TritonError

from outrider.device import DecoderShape
from outrider_triton import attention_ops as _attention_ops  # noqa: F401
from outrider_triton import fused_ops as _fused_ops  # noqa: F401  (these register the operators)
from outrider_triton import ops as _ops  # noqa: F401
from outrider_triton.derive_attention import reads_early
from outrider_triton.launch import power_of_two
from outrider_triton.table import STREAMED, Key, MatmulConfig
from outrider_tune.chain import normal

_FEW = 512  # rows of a weight that is only compiled for
_WORKER_BYTES = 1 << 30  # what a process takes of a device


@dataclass(frozen=True, slots=True)
class ProductJob:
    """A product with a weight of ``key``, as layers of ``shape`` have it."""

    key: Key
    config: MatmulConfig
    shape: DecoderShape


@dataclass(frozen=True, slots=True)
class AttentionJob:
    """Attention of ``shape``, cut up so."""

    shape: DecoderShape
    config: tuple[int, ...]
    width: int


Job = ProductJob | AttentionJob


def compile_job(job: Job, device: torch.device, pdl: bool) -> None:
    """Compile for operands that are like the job's in all that a compiler sees. Raises TritonError for what can't be."""
    if isinstance(job, AttentionJob):
        _attention(job, device, pdl)
    else:
        _product(job, device, pdl)


def _product(job: ProductJob, device: torch.device, pdl: bool) -> None:
    ops, config, shape = torch.ops.outrider, job.config, job.shape
    (operator, _, n, k), m, block = job.key, config.block_m, config.as_list()
    few = _FEW + n % 16
    x, residual, norm = normal(device, m, k), normal(device, m, few), normal(device, few)
    if operator == "linear":
        biased = shape.bias and n == (shape.heads + 2 * shape.kv_heads) * shape.head_size
        ops.linear.triton(x, normal(device, few, k), normal(device, few) if biased else None, block, pdl)
    elif operator == "linear_parts":
        ops.linear_parts.triton(x, normal(device, few, k), block, pdl)
    elif operator == "linear_add":
        ops.linear_add.triton(x, normal(device, few, k), None, residual, block, pdl)
    elif operator == "linear_add_scaled":
        ops.linear_add_scaled.triton(x, normal(device, few, k), None, residual, norm, block, pdl)
    elif operator == "linear_silu_mul":
        ops.linear_silu_mul.triton(x, normal(device, 2 * few, k), None, block, pdl)
    elif operator == "scaled_silu_mul":
        for squares in _squares(shape, config, m, device):
            ops.scaled_silu_mul.triton(x, squares, normal(device, 2 * few, k), None, 1e-5, block, pdl)
    elif operator == "linear_rope":
        cache = torch.zeros(m, 16, shape.kv_heads, shape.head_size, dtype=x.dtype, device=device)
        angle = normal(device, m, shape.head_size)
        rotary = angle, angle, cache, cache, torch.arange(m, device=device)
        bias = normal(device, n) if shape.bias else None
        ops.rope_write_cache.triton_linear(x, None, normal(device, n, k), bias, 1e-5, *rotary, block, pdl)


def _squares(shape: DecoderShape, config: MatmulConfig, m: int, device: torch.device) -> list[torch.Tensor]:
    """As many shares of a row's squares as the product ahead may leave."""
    rows = (16, 32) if config.descriptor == STREAMED else (32, 64)
    counts = {power_of_two(-(-shape.hidden // each)) for each in rows}
    return [torch.ones((count, m), dtype=torch.float32, device=device) for count in sorted(counts)]


def _attention(job: AttentionJob, device: torch.device, pdl: bool) -> None:
    shape, config = job.shape, list(job.config)
    heads, size = shape.heads, shape.head_size
    q = normal(device, job.width, heads, size)
    cache = normal(device, 3, 16, shape.kv_heads, size)
    starts = torch.tensor([0, job.width], dtype=torch.int32, device=device)
    lens, table = starts[1:] + 8, torch.zeros(1, 48, dtype=torch.int32, device=device)
    settled = pdl and reads_early(config)  # as in a layer behind the first
    for early in {settled, False}:
        torch.ops.outrider.paged_attention.triton(
            q, cache, cache, starts, lens, table, None, job.width, 32, 0.1, 0, early, config, pdl
        )


# -- processes -----------------------------------------------------------------------------------------------------

_device: list[Any] = []  # of a worker process: set once, when it starts


def _begin(device: str, pdl: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's to answer
    made = torch.device(device)
    torch.get_device_module(made).set_device(made)
    _device[:] = [made, pdl]


def _compiled(job: Job) -> str | None:
    """None, or why it can't be compiled."""
    try:
        compile_job(job, *_device)
    except TritonError as error:
        return f"{type(error).__name__}: {error}"
    return None


class Compilers:
    """Processes that compile, in the order in which they're asked; a context that ends them. One core: nothing is started,
    and this process compiles what it meets.
    """

    def __init__(self, device: torch.device, *, pdl: bool, workers: int | None = None) -> None:
        module = torch.get_device_module(device)
        most = min((os.cpu_count() or 1) - 1, 14, int(module.mem_get_info(device)[0] // (4 * _WORKER_BYTES)))
        count = max(0, most) if workers is None else workers
        self._asked: dict[Job, Future[str | None]] = {}
        self._pool = (
            ProcessPoolExecutor(
                count, mp_context=multiprocessing.get_context("spawn"), initializer=_begin, initargs=(str(device), pdl)
            )
            if count
            else None
        )

    def ask(self, jobs: Iterable[Job]) -> None:
        """Have these compiled; those that were asked for before are not again."""
        if self._pool is not None:
            for job in jobs:
                if job not in self._asked:
                    self._asked[job] = self._pool.submit(_compiled, job)

    def wait(self, job: Job, timeout: float) -> bool:
        """Until it's compiled: whether it can be. Raises TimeoutError."""
        future = self._asked.get(job)
        try:
            return future is None or future.result(timeout=max(timeout, 0.0)) is None
        except BrokenExecutor:  # a process was ended from outside: this one compiles what it meets
            return True

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        del kind, error, trace
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
