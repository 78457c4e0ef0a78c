"""Operands and results of one operator call: memory accesses, seeds, and copies of results to their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.device import Access
from outrider_sim.machine.pinned import PinnedTensor, pin
from outrider_sim.torch_device.opinfo import OpInfo, ResultPlan
from outrider_sim.torch_device.tensor import SimTensor

CPU = torch.device("cpu")
META = torch.device("meta")


def extent(tensor: SimTensor, write: bool, argument: str) -> Access:
    """Return the access of an operator to the bytes of a device tensor: a write if ``write``, else a read. The result is
    cached in the tensor.
    """
    seen = tensor._seen
    if seen is None:
        seen = tensor._seen = {}
    found = seen.get((write, argument))
    if found is None:
        meta = tensor._meta
        low = int(tensor._inner.storage_offset()) * meta.itemsize
        shape, stride = (None, None) if meta.dense else (meta.shape, meta.byte_stride)
        found = Access(tensor._alloc.id, low, low + meta.extent, write, shape, stride, argument, False, tensor._born)
        seen[write, argument] = found
    return found


class Seeded:
    """A random operator with the seed that was chosen when the operator was enqueued."""

    __slots__ = ("_generator", "_info", "seed")

    def __init__(self, info: OpInfo, seed: int, generator: torch.Generator | None) -> None:
        self._info = info
        self._generator = generator
        if generator is not None:
            seed = int(torch.randint(0, 1 << 62, (), generator=generator))
        self.seed = seed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator on host tensors with a new generator that has this seed."""
        if self._info.takes_generator:
            return self._info.run(*args, generator=torch.Generator().manual_seed(self.seed), **kwargs)
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(self.seed)
        try:
            return self._info.run(*args, **kwargs)
        finally:
            torch.default_generator.set_state(before)

    def again(self, seed: int) -> Seeded:
        """Return the same operator with another seed; each replay of a graph uses a new seed."""
        return Seeded(self._info, seed, None)


def copy_result(made: Tensor, value: Tensor) -> None:
    """Copy a host kernel's result to the memory allocated for it. Raises `RuntimeError` if the shapes differ."""
    if value.shape != made.shape:
        raise RuntimeError(f"the result has shape {tuple(value.shape)}, memory was taken for {tuple(made.shape)}")
    made.copy_(value)


def copy_results(outs: Sequence[Tensor | None], returns: tuple[str | None, ...], result: Any) -> None:
    """Copy a host kernel's results to the memory allocated for them; results that are operands need no copy."""
    values: list[Any] = []
    results = result if isinstance(result, tuple) else (result,)
    if len(returns) == 1 and isinstance(result, list | tuple):
        results = (result,)
    for operand, value in zip(returns, results, strict=True):
        if operand is None:
            values.extend(value if isinstance(value, list | tuple) else (value,))
    for made, value in zip(outs, values, strict=True):
        if made is not None:
            copy_result(made, value)


def results_of(
    info: OpInfo, plan: ResultPlan, args: Sequence[Any], kwargs: Mapping[str, Any], outs: Sequence[SimTensor | None]
) -> Any:
    """Assemble a call's return value from its operands and its new tensors."""
    results: list[Any] = []
    remaining = iter(outs)
    for entry in plan.structure:
        if entry is None:
            results.append(next(remaining))
        elif isinstance(entry, int):
            results.append([next(remaining) for _ in range(entry)])
        else:
            position = info.names.index(entry)
            results.append(args[position] if position < len(args) else kwargs[entry])
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)


def note_access(accesses: list[Access], name: str, value: Any, info: OpInfo) -> None:
    """Append to `accesses` the bytes of operand `value` that the operator reads or writes."""
    if isinstance(value, SimTensor):
        accesses.append(extent(value, name in info.writes, name))
    elif type(value) is list or type(value) is tuple:
        for item in value:
            note_access(accesses, name, item, info)


def has_boolean_index(args: Sequence[Any]) -> bool:
    """Return whether an index is a mask, which makes the result's shape depend on data."""
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])


def probability(info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Return the dropout probability of a call; a call with probability 0 uses no random numbers."""
    position = info.names.index(info.random_if)
    return float(args[position] if position < len(args) else kwargs.get(info.random_if, 0.0))


def without_generator(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments without generators, for a call on meta tensors that only determines shapes."""
    return {name: None if isinstance(value, torch.Generator) else value for name, value in named.items()}


def repin(result: Any, owner: PinnedTensor) -> Any:
    """Return the views in `result` as pinned tensors of the memory of `owner`."""
    if isinstance(result, Tensor):
        return pin(result, owner._alloc)
    if isinstance(result, list | tuple):
        return type(result)(repin(item, owner) for item in result)
    return result


def is_strided(tensor: Tensor) -> bool:
    """Return whether a tensor is strided, as the simulated device requires: not sparse, quantized or nested."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def creates_on_device(kwargs: Mapping[str, Any], device: torch.device) -> bool:
    """Return whether a call on host tensors creates a tensor on the device."""
    target = kwargs.get("device")
    return target is not None and target.type == device.type
