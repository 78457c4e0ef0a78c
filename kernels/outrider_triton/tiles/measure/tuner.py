"""Tuning of kernels for a layer shape.

The estimate ranks candidates. Products inside a layer are timed in a chain of layers, others against the library, and the
fastest candidate is stored. A product that is fast alone may delay its neighbours, so a choice is the candidate with the
fastest layer while all other choices stay. The two products that end a block have two forms: parts that a norm adds up, or an
addition to the residual in the product. Both are tried. Token counts come in the order of :data:`MEASURED_BATCHES`, and the
choices for one are stored before the next begins.

A choice applies to layers of the tuned shape. All choices of such a layer are stored, also unchanged ones and losses. Tuning
another shape with the same product later therefore changes nothing here. Choices outside layers apply to every layer.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.device import CapabilityError, ConfigError, DecoderShape, KernelSet, TuningProgress, TuningResult
from outrider_triton.tiles.configs import LARGE_M, AttentionConfig, MatmulConfig
from outrider_triton.tiles.derive.products import rank_configs
from outrider_triton.tiles.measure.chain import Chain, microseconds, normal
from outrider_triton.tiles.measure.compiling import AttentionJob, Job, KernelCompilers, ProductJob
from outrider_triton.tiles.store.choices import ChoiceRow, TunedStore, merge_choices
from outrider_triton.tiles.store.table import ANY_LAYER, AttentionEntry, Key, ProductEntry, Table, by_layer, layer_of

if TYPE_CHECKING:
    from outrider_triton.kernelset import TritonKernels

MEASURED_BATCHES = {8: (1, 4), 32: (8, 4), 128: (32, 4), 16: (4, 4), 64: (16, 4)}
"""Measured sequences and new tokens per sequence, by the maximum tokens that a choice is for; the most important first."""
_MAX_CANDIDATES = 4
_STEPS_PER_FORM = 4
_MAX_SIMILAR = 2  # candidates that differ only in the bytes in flight
_MAX_RELATIVE_ERROR = 5e-2  # of a chain of half-precision layers against torch's
_WIN_FACTOR = 0.995  # a stored choice must reduce a layer's time below this fraction
_NOISE_FACTOR = 0.999  # a smaller reduction counts as noise
_ROTATE_BYTES = 256 << 20
_FUSED_PRODUCTS = ("linear_silu_mul", "linear_parts", "linear_rope")
"""Operators of products that are fused with the kernel that follows."""
_ATTENTION = ((64, 4, 3), (128, 8, 1), (128, 8, 2), (32, 4, 2), (64, 8, 2))
_STREAMED_ATTENTION = ((64, 4, 3), (64, 4, 2), (128, 4, 2))
"""Candidates of streamed attention: cached tokens per block, warps, stages."""


def with_choice(table: Table, product: Key, m: int, config: MatmulConfig | None, *, layer: str) -> Table:
    """Return ``table`` with another configuration for ``m`` tokens in ``layer``; None: the library's kernel."""
    old = [(name, entry) for name, found in table.entries.get(product, {}).items() for entry in found]
    entry = ProductEntry(m=m, config=config, us=0.0, torch_us=0.0)
    return replace(table, entries={**table.entries, product: by_layer([*old, (layer, entry)])})


class _DeadlinePassed(Exception):
    """The tuning deadline has passed."""


@dataclass(frozen=True, slots=True)
class _Keys:
    """The table keys of a layer's products, and of the products outside layers."""

    qkv: Key
    gates: Key
    output: Key
    down: Key
    scaled: Key
    added: Key
    ending: Key | None
    alone: tuple[Key, ...]

    @classmethod
    def for_shape(cls, shape: DecoderShape) -> _Keys:
        dtype, attention = str(shape.dtype)[6:], shape.heads * shape.head_size
        rows = attention + 2 * shape.kv_heads * shape.head_size
        alone = [("linear", dtype, shape.vocabulary, shape.hidden)]
        if shape.fused:
            alone += [("linear", dtype, shape.hidden, shape.fused), ("linear_add", dtype, shape.hidden, shape.inner)]
        return cls(
            qkv=("linear" if shape.qk_norm else "linear_rope", dtype, rows, shape.hidden),
            gates=("linear_silu_mul", dtype, 2 * shape.inner, shape.hidden),
            output=("linear_parts", dtype, shape.hidden, attention),
            down=("linear_parts", dtype, shape.hidden, shape.inner),
            scaled=("scaled_silu_mul", dtype, 2 * shape.inner, shape.hidden),
            added=("linear_add_scaled", dtype, shape.hidden, attention),
            ending=None if shape.qk_norm else ("linear_add_scaled", dtype, shape.hidden, shape.inner),
            alone=tuple(alone),
        )

    @property
    def layer(self) -> tuple[Key, ...]:
        """Return the keys that a chain of layers measures."""
        return self.gates, self.scaled, self.down, self.qkv, self.output, self.added

    def looked_up(self, choice: Callable[[Key], MatmulConfig | None]) -> dict[Key, MatmulConfig | None]:
        """Return every key that a layer looks up, with its configuration from ``choice``."""
        found = {key: choice(key) for key in (self.scaled, self.added, self.down, self.qkv)}
        if self.ending is not None:
            found[self.ending] = choice(self.ending)
        if found[self.scaled] is None or found[self.added] is None:
            found |= {key: choice(key) for key in (self.output, self.gates)}
        # Without the fused kernel, the layer looks up the product alone.
        alone: list[Key] = [
            ("linear", *key[1:]) for key, config in found.items() if config is None and key[0] in _FUSED_PRODUCTS
        ]
        return found | {key: choice(key) for key in alone}


def candidates(kernels: TritonKernels, shape: DecoderShape, key: Key, m: int) -> list[MatmulConfig]:
    """Return the best-ranked candidates, at most two with equal tiles, and the best one for large M."""
    found: list[MatmulConfig] = []
    similar: dict[tuple[int, ...], int] = {}
    ranked = rank_configs(kernels.facts, key[0], m=m, n=key[2], k=key[3], half=shape.head_size // 2)
    for config in ranked:
        tiles = config.descriptor, config.block_n, config.split, config.rows_per_program
        similar[tiles] = similar.get(tiles, 0) + 1
        if similar[tiles] <= _MAX_SIMILAR:
            found.append(config)
        if len(found) == _MAX_CANDIDATES:
            break
    large_m = next((config for config in ranked if config.descriptor == LARGE_M), None)
    return found if large_m is None or large_m in found else [*found, large_m]


def tune(
    kernels: TritonKernels,
    shapes: Sequence[DecoderShape],
    *,
    deadline_s: float,
    directory: Path,
    progress: TuningProgress | None = None,
) -> tuple[TuningResult, ...]:
    """Tune kernels for each shape and store the choices; see ``KernelSet.tune``.

    Raises :class:`CapabilityError` for kernels without a device, and :class:`ConfigError` for another dtype than bfloat16.
    """
    device = kernels.device
    if device is None or device.type == "cpu":
        raise CapabilityError("kernels in Triton can be tuned on a device alone, and these were made without one")
    for shape in shapes:
        if shape.dtype is not torch.bfloat16:
            raise ConfigError(f"kernels are tuned for bfloat16, not {shape.dtype}: choose that dtype, or leave tuning out")
    end = time.monotonic() + deadline_s
    store, results = TunedStore(directory, kernels.facts), []
    with KernelCompilers(device, pdl=kernels.pdl) as compilers:
        for number, shape in enumerate(shapes):
            # Share the remaining time evenly among the remaining shapes.
            share = (end - time.monotonic()) / (len(shapes) - number)
            results.append(_Tuner(kernels, shape, device, store, compilers, time.monotonic() + share, progress).tune())
            torch.get_device_module(device).empty_cache()
    return tuple(results)


class _Tuner:
    """The tuning of one layer shape: it measures candidates, and stores choices by number of tokens."""

    def __init__(
        self,
        kernels: TritonKernels,
        shape: DecoderShape,
        device: torch.device,
        store: TunedStore,
        compilers: KernelCompilers,
        end: float,
        progress: TuningProgress | None,
    ) -> None:
        self._kernels, self._shape, self._device = kernels.for_shape(shape), shape, device
        self._layer_name = layer_of(shape)
        self._store, self._compilers, self._end = store, compilers, end
        self._progress = progress or (lambda done, total, text: None)
        self._keys = _Keys.for_shape(shape)
        self._module = torch.get_device_module(device)
        self._measured = self._stored_count = self._done = 0
        self._before_us = self._after_us = 0.0
        self._total = len(MEASURED_BATCHES) * (2 * _STEPS_PER_FORM + len(self._keys.alone))

    def tune(self) -> TuningResult:
        began, complete = time.monotonic(), True
        try:
            if self._end > began:
                for m in MEASURED_BATCHES:
                    self._compilers.ask(self._jobs(m))
                chain = Chain(
                    self._shape, self._kernels, self._device, most_bytes=self._module.mem_get_info(self._device)[0] // 2
                )
                for m in MEASURED_BATCHES:
                    self._tune_layer(chain, m)
                for key, m in itertools.product(self._keys.alone, MEASURED_BATCHES):
                    self._tune_outside_layer(key, m)
            else:
                complete = False
        except _DeadlinePassed:
            complete = False
        return TuningResult(
            measured=self._measured,
            kept=self._stored_count,
            complete=complete,
            seconds=time.monotonic() - began,
            before_us=self._before_us,
            after_us=self._after_us,
        )

    def _jobs(self, m: int) -> Iterator[Job]:
        for key in (*self._keys.layer, *self._keys.alone):
            for config in candidates(self._kernels, self._shape, key, m):
                yield ProductJob(key, config, self._shape)
        yield from (self._attention_job(m, config) for config in self._attention_candidates(m))

    def _step(self, text: str) -> None:
        self._done += 1
        self._progress(self._done, self._total, text)

    # -- in a chain of layers --------------------------------------------------------------------------------------

    def _tune_layer(self, chain: Chain, m: int) -> None:
        """Choose configurations for ``m`` tokens in a chain of layers and store them, also after a missed deadline."""
        batch, width = MEASURED_BATCHES[m]
        chain.prepare(batch, width, 640)
        start = self._kernels.tiles.table or _empty_table(self._kernels.facts.name)
        before = best = self._attempt(chain, start)
        table, deadline = start, None
        self._best_so_far = start, before
        try:
            for name, scaled in (("scaled", True), ("parts", False)):
                trial, us = self._tune_form(chain, start, m, scaled=scaled)
                if us < best * _NOISE_FACTOR:
                    table, best = trial, us
                message = f"{m} tokens, ends of a block {name}: {us:.1f} us a layer, was {before:.1f}"
                self._progress(self._done, self._total, message)
        except _DeadlinePassed as error:
            deadline, (trial, us) = error, self._best_so_far
            if us < best * _NOISE_FACTOR:
                table, best = trial, us
        rows = [] if table is start else self._rows(chain, table, m, best, before)
        kept = bool(rows) and self._is_faster(chain, start, rows)
        if kept and not self._is_correct(chain, merge_choices(start, self._kernels.facts, rows) or start):
            self._progress(self._done, self._total, f"{m} tokens: what was fastest is wrong, and left out")
            kept = False
        self._before_us += before
        self._after_us += best if kept else before
        self._kernels.tiles.table = start
        if kept:
            self._store_rows(rows)
        elif deadline is None:
            self._store_rows(self._rows(chain, start, m, before, before))
        if deadline is not None:
            raise deadline

    def _rows(self, chain: Chain, table: Table, m: int, us: float, before: float) -> list[ChoiceRow]:
        """Return rows for everything that a layer looks up with ``m`` tokens, derived choices included.

        A later process then uses exactly the configurations that were timed.
        """
        layer = self._layer_name
        rows = [
            _row(key, m, None if config is None else config.as_list(), us, before, layer=layer)
            for key, config in self._keys.looked_up(lambda key: self._choice(table, key, m)).items()
        ]
        heads = self._shape.head_size, self._shape.heads // self._shape.kv_heads
        attention = table.attention_config(chain.groups, *heads, layer=layer)
        return [*rows, _attention_row(chain.groups, chain.context, *heads, attention, layer=layer)]

    def _choice(self, table: Table, key: Key, m: int) -> MatmulConfig | None:
        entry = table.entry(*key[:2], n=key[2], k=key[3], m=m, layer=self._layer_name)
        if entry is not None:
            return entry.config
        return self._kernels.tiles.derived(key[0], m=m, n=key[2], k=key[3], half=self._shape.head_size // 2)

    def _is_faster(self, chain: Chain, start: Table, rows: list[ChoiceRow]) -> bool:
        """Return True if layers with ``rows`` are faster than without, alternating both.

        The first measurement may have run on a cooler device. This check also runs after the deadline.
        """
        table = merge_choices(start, self._kernels.facts, rows) or start
        pairs = [(chain.attempt(start), chain.attempt(table)) for _ in range(3)]
        return min(after for _, after in pairs) < min(before for before, _ in pairs) * _WIN_FACTOR

    def _tune_form(self, chain: Chain, start: Table, m: int, *, scaled: bool) -> tuple[Table, float]:
        """Return the fastest table found for ``m`` tokens, and its microseconds per layer, with one form of the products that
        end a block.

        With ``scaled`` these products add to the residual; otherwise they return parts that the norm adds up.
        """
        keys = self._keys
        # The gates' key selects the form: another model may use the other product in its other form.
        off: tuple[Key, ...] = () if scaled else (keys.scaled,)
        on = (keys.added, keys.scaled) if scaled else (keys.output, keys.gates)
        table = start
        for key in off:
            table = with_choice(table, key, m, None, layer=self._layer_name)
        for key in on:
            first = next(iter(candidates(self._kernels, self._shape, key, m)), None)
            table = with_choice(table, key, m, first, layer=self._layer_name)
        us = self._attempt(chain, table)
        self._best_so_far = table, us
        for key in (on[1], keys.down, keys.qkv, on[0]):
            for config in self._compiled_candidates(key, m):
                trial = with_choice(table, key, m, config, layer=self._layer_name)
                trial_us = self._attempt(chain, trial)
                if trial_us < us * _NOISE_FACTOR:
                    table, us = trial, trial_us
                    self._best_so_far = table, us
            self._step(f"{m} tokens, {key[0]} {key[2]}x{key[3]}: {us:.1f} us a layer")
        for entry in self._attention_entries(chain, m):
            trial = table.with_attention([entry])
            trial_us = self._attempt(chain, trial)
            if trial_us < us * _NOISE_FACTOR:
                table, us = trial, trial_us
                self._best_so_far = table, us
        return table, us

    def _compiled_candidates(self, key: Key, m: int) -> Iterator[MatmulConfig | None]:
        """Yield each candidate once it has compiled; with many tokens also None, the library's product."""
        for config in candidates(self._kernels, self._shape, key, m):
            if self._wait_for(ProductJob(key, config, self._shape)):
                yield config
        if m > 32:
            yield None

    def _attempt(self, chain: Chain, table: Table) -> float:
        if time.monotonic() > self._end:
            raise _DeadlinePassed
        self._measured += 1
        return chain.attempt(table)

    def _is_correct(self, chain: Chain, table: Table) -> bool:
        """Return True if layers run with ``table`` give the same results as torch's kernels, within rounding."""
        self._kernels.tiles.table = table
        actual = chain.run_layers(0).double()
        chain.kernels, kernels = KernelSet(), chain.kernels  # type: ignore[assignment]
        try:
            expected = chain.run_layers(0).double()
        finally:
            chain.kernels = kernels
        return bool((actual - expected).norm() < _MAX_RELATIVE_ERROR * expected.norm())

    # -- attention -------------------------------------------------------------------------------------------------

    def _attention_candidates(self, m: int) -> Iterator[AttentionConfig]:
        """Yield block sizes with splits of 4 and 8, or 1 and 4; a launch uses at least the derived number of splits."""
        batch, _ = MEASURED_BATCHES[m]
        is_small = batch * self._shape.kv_heads < self._kernels.facts.processors
        launches = [(*launch, False) for launch in _ATTENTION]
        if self._kernels.attention.attention_launch(*self._sample_operands(), batch, 1, 640, None).streamed:
            launches += [(*launch, True) for launch in _STREAMED_ATTENTION]
        for (block, warps, stages, streamed), split in itertools.product(launches, (8, 4) if is_small else (1, 4)):
            yield AttentionConfig(block, split, warps, stages, streamed)

    def _attention_entries(self, chain: Chain, m: int) -> Iterator[AttentionEntry]:
        for config in self._attention_candidates(m):
            if self._wait_for(self._attention_job(m, config)):
                yield AttentionEntry(
                    groups=chain.groups,
                    max_kv=chain.context,
                    config=config,
                    head_size=self._shape.head_size,
                    group=self._shape.heads // self._shape.kv_heads,
                    layer=self._layer_name,
                )

    def _attention_job(self, m: int, config: AttentionConfig) -> AttentionJob:
        batch, width = MEASURED_BATCHES[m]
        launch = self._kernels.attention.attention_launch(*self._sample_operands(), batch, width, 640, config)
        return AttentionJob(self._shape, launch, width)

    def _sample_operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return uninitialized queries and keys, of which the callee uses only the shapes."""
        shape = self._shape
        q = torch.empty(0, shape.heads, shape.head_size, dtype=shape.dtype)
        return q, torch.empty(0, 16, shape.kv_heads, shape.head_size, dtype=shape.dtype)

    # -- products outside layers --------------------------------------------------------------------------------------

    def _tune_outside_layer(self, key: Key, m: int) -> None:
        """Choose the configuration of a product outside the layers: time candidates over rotating weights, and the library's
        product.
        """
        operator, _, n, k = key
        copies = max(2, -(-_ROTATE_BYTES // (n * k * 2)))
        weights = [normal(self._device, n, k) for _ in range(copies)]
        tokens = MEASURED_BATCHES[m][0] * MEASURED_BATCHES[m][1]
        x, residual = normal(self._device, tokens, k), normal(self._device, tokens, n)
        calls = max(8, copies)

        def timed(product: Callable[[Tensor], object]) -> float:
            if time.monotonic() > self._end:
                raise _DeadlinePassed
            self._measured += 1
            return microseconds(self._module, lambda number: product(weights[number % copies]), calls=calls)

        reference = KernelSet()
        library = (
            timed(lambda weight: reference.linear(x, weight))
            if operator == "linear"
            else timed(lambda weight: residual.add_(reference.linear(x, weight)))
        )
        best: tuple[float, MatmulConfig | None] = (library, None)
        for config in candidates(self._kernels, self._shape, key, m):
            if self._wait_for(ProductJob(key, config, self._shape)):
                us = timed(partial(_enqueue, operator, x, residual, config, self._kernels.pdl))
                if us < best[0]:
                    best = us, config
        chosen = None if best[1] is None else best[1].as_list()
        self._store_rows([_row(key, m, chosen, best[0], library, layer=ANY_LAYER)])
        self._step(f"{m} tokens, {operator} {n}x{k}: {best[0]:.1f} us, the library {library:.1f}")

    # -- candidates and results ---------------------------------------------------------------------------------------

    def _wait_for(self, job: Job) -> bool:
        """Wait until a worker has compiled ``job``; return True if the compilation succeeded."""
        try:
            return self._compilers.wait(job, self._end - time.monotonic())
        except TimeoutError:
            raise _DeadlinePassed from None

    def _store_rows(self, rows: list[ChoiceRow]) -> None:
        self._store.write(rows)
        self._stored_count += len(rows)
        self._kernels.use_choices(rows)


def _enqueue(operator: str, x: Tensor, residual: Tensor, config: MatmulConfig, pdl: bool, weight: Tensor) -> None:
    ops = torch.ops.outrider
    if operator == "linear":
        ops.linear.triton(x, weight, None, config.as_list(), pdl)
    else:
        ops.linear_add.triton(x, weight, None, residual, config.as_list(), pdl)


def _empty_table(device: str) -> Table:
    return Table(device=device, software={}, entries={})


def _row(key: Key, m: int, config: list[int] | None, us: float, torch_us: float, *, layer: str) -> ChoiceRow:
    operator, dtype, n, k = key
    times: dict[str, Any] = {"us": round(us, 2), "torch_us": round(torch_us, 2)}
    layer_field = {"layer": layer} if layer else {}
    return {"operator": operator, "dtype": dtype, "n": n, "k": k, "m": m, **layer_field, "config": config, **times}


def _attention_row(
    groups: int, max_kv: int, head_size: int, group: int, config: AttentionConfig | None, *, layer: str
) -> ChoiceRow:
    fields = None if config is None else list(astuple(config))
    return {"groups": groups, "max_kv": max_kv, "head_size": head_size, "group": group, "layer": layer, "config": fields}
