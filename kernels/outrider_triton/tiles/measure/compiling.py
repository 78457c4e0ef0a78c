"""Compile tuning candidates in worker processes. Triton caches the result on disk, and this process loads it."""

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
from outrider_triton import rows as _row_operators  # noqa: F401  (registers the operators)
from outrider_triton.attention import operators as _attention_ops  # noqa: F401
from outrider_triton.launch import power_of_two
from outrider_triton.products import operators as _product_operators  # noqa: F401  (registers the operators)
from outrider_triton.tiles.configs import STREAMED, MatmulConfig
from outrider_triton.tiles.derive.attention import AttentionLaunch
from outrider_triton.tiles.measure.chain import normal
from outrider_triton.tiles.store.table import Key

_WEIGHT_ROWS = 512  # rows of the weight that a compile job allocates
_WORKER_BYTES = 1 << 30  # device memory that one worker process needs


@dataclass(frozen=True, slots=True)
class ProductJob:
    """A product to compile: a weight with the table key ``key``, as layers of ``shape`` use it."""

    key: Key
    config: MatmulConfig
    shape: DecoderShape


@dataclass(frozen=True, slots=True)
class AttentionJob:
    """An attention kernel to compile: for layers of ``shape``, with the tile configuration ``config`` and ``width`` new
    tokens.
    """

    shape: DecoderShape
    config: AttentionLaunch
    width: int


Job = ProductJob | AttentionJob


def compile_job(job: Job, device: torch.device, pdl: bool) -> None:
    """Compile a job with small operands that the compiler specialises like the real ones. Raises TritonError if it can't."""
    if isinstance(job, AttentionJob):
        _compile_attention(job, device, pdl)
    else:
        _compile_product(job, device, pdl)


def _compile_product(job: ProductJob, device: torch.device, pdl: bool) -> None:
    ops, config, shape = torch.ops.outrider, job.config, job.shape
    (operator, _, n, k), m, block = job.key, config.block_m, config.as_list()
    rows = _WEIGHT_ROWS + n % 16
    x, residual, norm = normal(device, m, k), normal(device, m, rows), normal(device, rows)
    if operator == "linear":
        biased = shape.bias and n == (shape.heads + 2 * shape.kv_heads) * shape.head_size
        ops.linear.triton(x, normal(device, rows, k), normal(device, rows) if biased else None, block, pdl)
    elif operator == "linear_parts":
        ops.linear_parts.triton(x, normal(device, rows, k), block, pdl)
    elif operator == "linear_add":
        ops.linear_add.triton(x, normal(device, rows, k), None, residual, block, pdl)
    elif operator == "linear_add_scaled":
        ops.linear_add_scaled.triton(x, normal(device, rows, k), None, residual, norm, block, pdl)
    elif operator == "linear_silu_mul":
        ops.linear_silu_mul.triton(x, normal(device, 2 * rows, k), None, block, pdl)
    elif operator == "scaled_silu_mul":
        for squares in _squares(shape, config, m, device):
            ops.linear_silu_mul.triton(x, normal(device, 2 * rows, k), None, block, pdl, squares, 1e-5)
    elif operator == "linear_rope":
        cache = torch.zeros(m, 16, shape.kv_heads, shape.head_size, dtype=x.dtype, device=device)
        angle = normal(device, m, shape.head_size)
        rotary = angle, angle, cache, cache, torch.arange(m, device=device)
        bias = normal(device, n) if shape.bias else None
        ops.rope_write_cache.triton_linear(x, None, normal(device, n, k), bias, 1e-5, *rotary, block, pdl)


def _squares(shape: DecoderShape, config: MatmulConfig, m: int, device: torch.device) -> list[torch.Tensor]:
    """Return tensors with every number of partial sums of squares that the preceding product may write."""
    rows = (16, 32) if config.descriptor == STREAMED else (32, 64)
    counts = {power_of_two(-(-shape.hidden // each)) for each in rows}
    return [torch.ones((count, m), dtype=torch.float32, device=device) for count in sorted(counts)]


def _compile_attention(job: AttentionJob, device: torch.device, pdl: bool) -> None:
    shape, config = job.shape, job.config
    heads, size = shape.heads, shape.head_size
    q = normal(device, job.width, heads, size)
    cache = normal(device, 3, 16, shape.kv_heads, size)
    starts = torch.tensor([0, job.width], dtype=torch.int32, device=device)
    lens, table = starts[1:] + 8, torch.zeros(1, 48, dtype=torch.int32, device=device)
    settled = pdl and config.can_read_before_wait  # as in every layer but the first
    for early in {settled, False}:
        torch.ops.outrider.paged_attention.triton(
            q, cache, cache, starts, lens, table, None, job.width, 32, 0.1, 0, early, config, pdl
        )


# -- worker processes ----------------------------------------------------------------------------------------------

_device: list[Any] = []  # device and pdl of this worker process, set by its initialiser


def _init_worker(device: str, pdl: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    worker_device = torch.device(device)
    torch.get_device_module(worker_device).set_device(worker_device)
    _device[:] = [worker_device, pdl]


def _compile_in_worker(job: Job) -> str | None:
    """Compile a job in a worker; return None, or the reason why it can't be compiled."""
    try:
        compile_job(job, *_device)
    except TritonError as error:
        return f"{type(error).__name__}: {error}"
    return None


class KernelCompilers:
    """A pool of worker processes that compile jobs in submission order; a context manager that shuts the pool down.

    With one core there is no pool: this process compiles each kernel at its first use.
    """

    def __init__(self, device: torch.device, *, pdl: bool) -> None:
        module = torch.get_device_module(device)
        available = min((os.cpu_count() or 1) - 1, 14, int(module.mem_get_info(device)[0] // (4 * _WORKER_BYTES)))
        count = max(0, available)
        self._futures: dict[Job, Future[str | None]] = {}
        self._pool = (
            ProcessPoolExecutor(
                count, mp_context=multiprocessing.get_context("spawn"), initializer=_init_worker, initargs=(str(device), pdl)
            )
            if count
            else None
        )

    def ask(self, jobs: Iterable[Job]) -> None:
        """Submit to the workers those of ``jobs`` that were not submitted before."""
        if self._pool is not None:
            for job in jobs:
                if job not in self._futures:
                    self._futures[job] = self._pool.submit(_compile_in_worker, job)

    def wait(self, job: Job, timeout: float) -> bool:
        """Wait until ``job`` is compiled and return True unless it failed. Raises TimeoutError."""
        future = self._futures.get(job)
        try:
            return future is None or future.result(timeout=max(timeout, 0.0)) is None
        except BrokenExecutor:  # a worker was killed: this process compiles at first use
            return True

    def __enter__(self) -> KernelCompilers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        del kind, error, trace
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
