"""Tuning for a shape: candidates by the estimate, each timed in a chain of layers or beside the library, the best one kept.

A product that is fast by itself may hold up its neighbours, so what is in every layer is timed there: a choice is what makes
the layer fastest while the others stay. A layer's ends come in two forms, a product in parts that a norm adds up, or one that
adds to the residual itself; both are tried. Numbers of tokens come in the order of :data:`SIZES`, and what is chosen for one
is written before the next begins.

A choice is for layers of that shape. All that such a layer asks for is written, also what stays as it was, and where nothing
won: so a shape that has the same product, and is tuned later, changes nothing here. What stands alone is written for every
layer.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.device import CapabilityError, ConfigError, DecoderShape, KernelSet, TuningProgress, TuningResult
from outrider_triton.chain import Chain, with_choice
from outrider_triton.compiling import AttentionJob, Compilers, Job, ProductJob
from outrider_triton.derive import choose, rank
from outrider_triton.kernelset import TritonKernels
from outrider_triton.table import ANY, TALL, AttentionConfig, AttentionEntry, Key, MatmulConfig, Table, layer_of
from outrider_triton.tuned_store import Row, TunedStore, merged
from outrider_tune.chain import normal
from outrider_tune.timing import microseconds

SIZES = {8: (1, 4), 32: (8, 4), 128: (32, 4), 16: (4, 4), 64: (16, 4)}
"""Tokens that a choice is for, at most; sequences and new tokens of each that it's measured with. What matters most first."""
_CANDIDATES = 4
_STEPS = 4  # of a form
_ALIKE = 2  # candidates that differ in how much is on its way alone
_ERROR = 5e-2  # relative, of a chain of layers in half precision against torch's
_WON = 0.995  # and a layer must gain this much
_BETTER = 0.999  # a smaller gain than this is taken for noise
_ROTATE_BYTES = 256 << 20
_WITH_MORE = ("linear_silu_mul", "linear_parts", "linear_rope")
"""Operators that are a product and what comes behind it."""
_ATTENTION = ((64, 4, 3), (128, 8, 1), (128, 8, 2), (32, 4, 2), (64, 8, 2))
_ATTENTION_RINGS = ((64, 4, 3), (64, 4, 2), (128, 4, 2))
"""Cached tokens of a block, warps, stages."""


class _Late(Exception):
    """The deadline has come."""


@dataclass(frozen=True, slots=True)
class _Keys:
    """The choices of a layer, and of what stands alone."""

    qkv: Key
    gates: Key
    output: Key
    down: Key
    scaled: Key
    added: Key
    ending: Key | None
    alone: tuple[Key, ...]

    @classmethod
    def of(cls, shape: DecoderShape) -> _Keys:
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
        """Those that a chain measures."""
        return self.gates, self.scaled, self.down, self.qkv, self.output, self.added

    def asked(self, choice: Callable[[Key], MatmulConfig | None]) -> dict[Key, MatmulConfig | None]:
        """All that a layer asks for, and what ``choice`` has for it."""
        found = {key: choice(key) for key in (self.scaled, self.added, self.down, self.qkv)}
        if self.ending is not None:
            found[self.ending] = choice(self.ending)
        if found[self.scaled] is None or found[self.added] is None:
            found |= {key: choice(key) for key in (self.output, self.gates)}
        # Without such a kernel its product alone is asked for.
        alone: list[Key] = [("linear", *key[1:]) for key, config in found.items() if config is None and key[0] in _WITH_MORE]
        return found | {key: choice(key) for key in alone}


def candidates(kernels: TritonKernels, shape: DecoderShape, key: Key, m: int) -> list[MatmulConfig]:
    """The first of the ranking, with no more than two that are cut up alike; and the first with tall tiles."""
    found: list[MatmulConfig] = []
    alike: dict[tuple[int, ...], int] = {}
    ranked = rank(kernels.facts, key[0], m=m, n=key[2], k=key[3], half=shape.head_size // 2)
    for config in ranked:
        cut = config.descriptor, config.block_n, config.split, config.each
        alike[cut] = alike.get(cut, 0) + 1
        if alike[cut] <= _ALIKE:
            found.append(config)
        if len(found) == _CANDIDATES:
            break
    tall = next((config for config in ranked if config.descriptor == TALL), None)
    return found if tall is None or tall in found else [*found, tall]


def tune(
    kernels: TritonKernels,
    shapes: Sequence[DecoderShape],
    *,
    deadline_s: float,
    directory: Path,
    progress: TuningProgress | None = None,
    workers: int | None = None,
) -> tuple[TuningResult, ...]:
    """See ``KernelSet.tune``."""
    device = kernels.device
    if device is None or device.type == "cpu":
        raise CapabilityError("kernels in Triton can be tuned on a device alone, and these were made without one")
    for shape in shapes:
        if shape.dtype is not torch.bfloat16:
            raise ConfigError(f"kernels are tuned for bfloat16, not {shape.dtype}: choose that dtype, or leave tuning out")
    end = time.monotonic() + deadline_s
    store, results = TunedStore(directory, kernels.facts), []
    with Compilers(device, pdl=kernels.pdl, workers=workers) as compilers:
        for number, shape in enumerate(shapes):
            # What is left is shared out among the shapes that are left.
            share = (end - time.monotonic()) / (len(shapes) - number)
            results.append(_Tuner(kernels, shape, device, store, compilers, time.monotonic() + share, progress).run())
            torch.get_device_module(device).empty_cache()
    return tuple(results)


class _Tuner:
    """One shape."""

    def __init__(
        self,
        kernels: TritonKernels,
        shape: DecoderShape,
        device: torch.device,
        store: TunedStore,
        compilers: Compilers,
        end: float,
        progress: TuningProgress | None,
    ) -> None:
        self._kernels, self._shape, self._device = kernels.for_shape(shape), shape, device
        self._name = layer_of(shape)
        self._store, self._compilers, self._end = store, compilers, end
        self._progress = progress or (lambda done, total, text: None)
        self._keys = _Keys.of(shape)
        self._module = torch.get_device_module(device)
        self._measured = self._kept = self._done = 0
        self._before = self._after = 0.0
        self._total = len(SIZES) * (2 * _STEPS + len(self._keys.alone))

    def run(self) -> TuningResult:
        began, complete = time.monotonic(), True
        try:
            if self._end > began:
                for m in SIZES:
                    self._compilers.ask(self._jobs(m))
                chain = Chain(
                    self._shape, self._kernels, self._device, most_bytes=self._module.mem_get_info(self._device)[0] // 2
                )
                for m in SIZES:
                    self._layer(chain, m)
                for key, m in itertools.product(self._keys.alone, SIZES):
                    self._alone(key, m)
            else:
                complete = False
        except _Late:
            complete = False
        return TuningResult(
            measured=self._measured,
            kept=self._kept,
            complete=complete,
            seconds=time.monotonic() - began,
            before_us=self._before,
            after_us=self._after,
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

    def _layer(self, chain: Chain, m: int) -> None:
        """Choose for ``m`` tokens what a chain measures, and write it, also where the deadline comes in the middle."""
        batch, width = SIZES[m]
        chain.prepare(batch, width, 640)
        start = self._kernels.table or _empty(self._kernels.facts.name)
        before = best = self._attempt(chain, start)
        table, late = start, None
        self._reached = start, before
        try:
            for name, form in (("scaled", True), ("parts", False)):
                trial, us = self._form(chain, start, m, scaled=form)
                if us < best * _BETTER:
                    table, best = trial, us
                said = f"{m} tokens, ends of a block {name}: {us:.1f} us a layer, was {before:.1f}"
                self._progress(self._done, self._total, said)
        except _Late as error:
            late, (trial, us) = error, self._reached
            if us < best * _BETTER:
                table, best = trial, us
        rows = [] if table is start else self._rows(chain, table, m, best, before)
        kept = bool(rows) and self._wins(chain, start, rows)
        if kept and not self._right(chain, merged(start, self._kernels.facts, rows) or start):
            self._progress(self._done, self._total, f"{m} tokens: what was fastest is wrong, and left out")
            kept = False
        self._before += before
        self._after += best if kept else before
        self._kernels.table = start
        if kept:
            self._keep(rows)
        elif late is None:
            self._keep(self._rows(chain, start, m, before, before))
        if late is not None:
            raise late

    def _rows(self, chain: Chain, table: Table, m: int, us: float, before: float) -> list[Row]:
        """All that a layer asks for with ``m`` tokens, derived choices among it: what is read later is what was timed."""
        layer = self._name
        rows = [
            _row(key, m, None if config is None else config.as_list(), us, before, layer=layer)
            for key, config in self._keys.asked(lambda key: self._choice(table, key, m)).items()
        ]
        heads = self._shape.head_size, self._shape.heads // self._shape.kv_heads
        attention = table.attention_config(chain.groups, *heads, layer=layer)
        return [*rows, _attention_row(chain.groups, chain.context, *heads, attention, layer=layer)]

    def _choice(self, table: Table, key: Key, m: int) -> MatmulConfig | None:
        entry = table.entry(*key[:2], n=key[2], k=key[3], m=m, layer=self._name)
        if entry is not None:
            return entry.config
        return choose(self._kernels.facts, key[0], m=m, n=key[2], k=key[3], half=self._shape.head_size // 2)

    def _wins(self, chain: Chain, start: Table, rows: list[Row]) -> bool:
        """Whether layers with ``rows`` are faster than without, side by side, also after the deadline: what came first may
        only have been cooler.
        """
        table = merged(start, self._kernels.facts, rows) or start
        pairs = [(chain.attempt(start), chain.attempt(table)) for _ in range(3)]
        return min(after for _, after in pairs) < min(before for before, _ in pairs) * _WON

    def _form(self, chain: Chain, start: Table, m: int, *, scaled: bool) -> tuple[Table, float]:
        """The best table with the ends of a block in one form."""
        keys = self._keys
        # The gates' own key says which form it is: another model may have the other product in its other form.
        off: tuple[Key, ...] = () if scaled else (keys.scaled,)
        on = (keys.added, keys.scaled) if scaled else (keys.output, keys.gates)
        table = start
        for key in off:
            table = with_choice(table, key, m, None, layer=self._name)
        for key in on:
            first = next(iter(candidates(self._kernels, self._shape, key, m)), None)
            table = with_choice(table, key, m, first, layer=self._name)
        us = self._attempt(chain, table)
        self._reached = table, us
        for key in (on[1], keys.down, keys.qkv, on[0]):
            for config in self._tried(key, m):
                trial = with_choice(table, key, m, config, layer=self._name)
                taken = self._attempt(chain, trial)
                if taken < us * _BETTER:
                    table, us = trial, taken
                    self._reached = table, us
            self._step(f"{m} tokens, {key[0]} {key[2]}x{key[3]}: {us:.1f} us a layer")
        for entry in self._attention_entries(chain, m):
            own = entry.groups, entry.head_size, entry.group, entry.layer
            others = tuple(e for e in table.attention if (e.groups, e.head_size, e.group, e.layer) != own)
            trial = replace(table, attention=(*others, entry))
            taken = self._attempt(chain, trial)
            if taken < us * _BETTER:
                table, us = trial, taken
                self._reached = table, us
        return table, us

    def _tried(self, key: Key, m: int) -> Iterator[MatmulConfig | None]:
        """Candidates that can be compiled, each as soon as it is; the library's product where there are many tokens."""
        for config in candidates(self._kernels, self._shape, key, m):
            if self._compiled(ProductJob(key, config, self._shape)):
                yield config
        if m > 32:
            yield None

    def _attempt(self, chain: Chain, table: Table) -> float:
        if time.monotonic() > self._end:
            raise _Late
        self._measured += 1
        return chain.attempt(table)

    def _right(self, chain: Chain, table: Table) -> bool:
        """Whether layers with ``table`` make what torch's own make."""
        self._kernels.table = table
        made = chain.run(0).double()
        chain.kernels, ours = KernelSet(), chain.kernels  # type: ignore[assignment]
        try:
            right = chain.run(0).double()
        finally:
            chain.kernels = ours
        return bool((made - right).norm() < _ERROR * right.norm())

    # -- attention -------------------------------------------------------------------------------------------------

    def _attention_candidates(self, m: int) -> Iterator[AttentionConfig]:
        """Blocks; among how many programs cached tokens are shared out is derived, and 1, 4, 8 beside it."""
        batch, _ = SIZES[m]
        few = batch * self._shape.kv_heads < self._kernels.processors
        ways = [(*way, False) for way in _ATTENTION]
        if self._kernels.cut_up(*self._attended(), batch, 1, 640, None).ring:
            ways += [(*way, True) for way in _ATTENTION_RINGS]
        for (block, warps, stages, ring), split in itertools.product(ways, (8, 4) if few else (1, 4)):
            yield AttentionConfig(block, split, warps, stages, ring)

    def _attention_entries(self, chain: Chain, m: int) -> Iterator[AttentionEntry]:
        for config in self._attention_candidates(m):
            if self._compiled(self._attention_job(m, config)):
                yield AttentionEntry(
                    groups=chain.groups,
                    max_kv=chain.context,
                    config=config,
                    head_size=self._shape.head_size,
                    group=self._shape.heads // self._shape.kv_heads,
                    layer=self._name,
                )

    def _attention_job(self, m: int, config: AttentionConfig) -> AttentionJob:
        batch, width = SIZES[m]
        cut = self._kernels.cut_up(*self._attended(), batch, width, 640, config)
        return AttentionJob(self._shape, tuple(cut.as_list()), width)

    def _attended(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys of no tokens, for their shapes."""
        shape = self._shape
        q = torch.empty(0, shape.heads, shape.head_size, dtype=shape.dtype)
        return q, torch.empty(0, 16, shape.kv_heads, shape.head_size, dtype=shape.dtype)

    # -- what stands alone -----------------------------------------------------------------------------------------

    def _alone(self, key: Key, m: int) -> None:
        """Choose for a product outside of the layers, over weights that rotate, beside the library's."""
        operator, _, n, k = key
        copies = max(2, -(-_ROTATE_BYTES // (n * k * 2)))
        weights = [normal(self._device, n, k) for _ in range(copies)]
        tokens = SIZES[m][0] * SIZES[m][1]
        x, residual = normal(self._device, tokens, k), normal(self._device, tokens, n)
        calls = max(8, copies)

        def timed(product: Callable[[Tensor], object]) -> float:
            if time.monotonic() > self._end:
                raise _Late
            self._measured += 1
            return microseconds(self._module, lambda number: product(weights[number % copies]), calls=calls)

        plain = KernelSet()
        library = (
            timed(lambda weight: plain.linear(x, weight))
            if operator == "linear"
            else timed(lambda weight: plain.linear_add(x, weight, None, residual))
        )
        best: tuple[float, MatmulConfig | None] = (library, None)
        for config in candidates(self._kernels, self._shape, key, m):
            if self._compiled(ProductJob(key, config, self._shape)):
                us = timed(partial(_enqueue, operator, x, residual, config, self._kernels.pdl))
                if us < best[0]:
                    best = us, config
        chosen = None if best[1] is None else best[1].as_list()
        self._keep([_row(key, m, chosen, best[0], library, layer=ANY)])
        self._step(f"{m} tokens, {operator} {n}x{k}: {best[0]:.1f} us, the library {library:.1f}")

    # -- both ------------------------------------------------------------------------------------------------------

    def _compiled(self, job: Job) -> bool:
        """Whether it can be compiled, once it is."""
        try:
            return self._compilers.wait(job, self._end - time.monotonic())
        except TimeoutError:
            raise _Late from None

    def _keep(self, rows: list[Row]) -> None:
        self._store.write(rows)
        self._kept += len(rows)
        self._kernels.take(rows)


def _enqueue(operator: str, x: Tensor, residual: Tensor, config: MatmulConfig, pdl: bool, weight: Tensor) -> None:
    ops = torch.ops.outrider
    if operator == "linear":
        ops.linear.triton(x, weight, None, config.as_list(), pdl)
    else:
        ops.linear_add.triton(x, weight, None, residual, config.as_list(), pdl)


def _empty(device: str) -> Table:
    return Table(device=device, software={}, entries={}, kernels={})


def _row(key: Key, m: int, config: list[int] | None, us: float, torch_us: float, *, layer: str) -> Row:
    operator, dtype, n, k = key
    times: dict[str, Any] = {"us": round(us, 2), "torch_us": round(torch_us, 2)}
    where = {"layer": layer} if layer else {}
    return {"operator": operator, "dtype": dtype, "n": n, "k": k, "m": m, **where, "config": config, **times}


def _attention_row(
    groups: int, max_kv: int, head_size: int, group: int, config: AttentionConfig | None, *, layer: str
) -> Row:
    cut = None if config is None else list(astuple(config))
    return {"groups": groups, "max_kv": max_kv, "head_size": head_size, "group": group, "layer": layer, "config": cut}
