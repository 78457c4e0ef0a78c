"""Operators and their operands: how the dispatcher runs each overload, and what a call reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from outrider.device import Access
from outrider_sim.machine.device_state import PinnedTensor, pin
from outrider_sim.torch_device.replacements import EMULATED, PRODUCTS
from outrider_sim.torch_device.tensor import SimTensor

# Composite operators that never return an alias of an operand: run whole, as one operation, when they arrive whole
# (under inference_mode). Any other composite is decomposed, for one that may alias would tear a view off its base.
WHOLE = frozenset(
    {
        "aten::linear",
        "aten::matmul",
        "aten::scaled_dot_product_attention",
        "aten::rms_norm",
        "aten::layer_norm",
        "aten::group_norm",
        "aten::softmax.int",
        "aten::log_softmax.int",
        "aten::conv1d",
        "aten::conv2d",
        "aten::conv3d",
    }
)
# Views that their schema calls something else.
HIDDEN_VIEWS = frozenset({"aten::_unsafe_view", "aten::lift"})
# Tagged as data dependent, but only for boolean indices.
INDEXING = frozenset({"aten::index.Tensor", "aten::index.Tensor_out", "aten::_unsafe_index.Tensor"})

PLAN_LIMIT = 4096
"""Maximum number of cached plans of an operator overload. Further plans are made again at each call."""


class OperatorKind(Enum):
    """The way in which the dispatcher runs an operator."""

    COMPUTE = "queued"
    VIEW = "done at once, on the same memory"
    METADATA = "done at once, changes what a tensor looks like"
    READ = "queued, and the host waits"
    DECOMPOSE = "taken apart"


class OpInfo:
    """One operator overload.

    `fresh` says that its single result is new memory. `returns` has, for each result, the name of the operand that it is, or
    None for a new tensor. `plans` maps the operands' shapes and dtypes to those of the results.
    """

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.func = func
        self.emulated = EMULATED.get(schema.name)
        self.run: Callable[..., Any] = self.emulated or func._op
        self.name: str = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        self.native = schema.name.startswith("aten::")
        self.plans: dict[Any, Any] = {}
        self.probed: dict[Any, bool] = {}  # kinds of operands that were tried → whether `out` writes in place
        self.resolvers: Any = {}  # operands that are indexed by data: how to find their rows
        self.names = tuple(argument.name for argument in schema.arguments)
        self.by_host = False  # torch's meta kernel gives other shapes than the host's
        self.outs = frozenset(a.name for a in schema.arguments if a.is_out)
        self.writes = frozenset(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
        self.returns = tuple(_operand_of(schema, r) for r in schema.returns)
        self.fresh = self.returns == (None,) and str(schema.returns[0].type) == "Tensor"
        self.takes_generator = "generator" in self.names
        tags = func.tags
        self.random = torch.Tag.nondeterministic_seeded in tags
        self.random_if = "dropout_p" if "dropout_p" in self.names else ""
        self.indexing = self.name in INDEXING
        # CPU index tensors are moved to the device, as torch does.
        self.takes_host_indices = [str(a.type) for a in schema.arguments[1:2]] == ["List[Optional[Tensor]]"]
        self.matrix = self.name in PRODUCTS
        self.kind = self._classify(schema, tags)
        simple = self.kind is OperatorKind.COMPUTE and not self.writes
        self.out: Any = None
        self.out_names: tuple[str, ...] = ()
        # Losses reduce in the tensor that they are given: they resize it, with a warning, and back.
        if simple and self.emulated is None and "reduction" not in self.names:
            self.out, self.out_names = self._find_out_overload(schema)

    def _classify(self, schema: Any, tags: Any) -> OperatorKind:
        if torch.Tag.inplace_view in tags or self.name.startswith(("aten::resize_", "aten::set_")):
            return OperatorKind.METADATA
        if self.name in HIDDEN_VIEWS:
            return OperatorKind.VIEW
        key = torch._C.DispatchKey.CompositeImplicitAutograd
        if self.native and self.name not in WHOLE and torch._C._dispatch_has_kernel_for_dispatch_key(self.func.name(), key):
            return OperatorKind.DECOMPOSE
        if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
            return OperatorKind.VIEW
        dynamic = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
        if dynamic and not self.indexing:
            return OperatorKind.READ
        return OperatorKind.COMPUTE

    def _find_out_overload(self, schema: Any) -> tuple[Any, tuple[str, ...]]:
        """Return the `out=` overload of the operator with its argument names, or (None, ()). The overload lets a host kernel
        write its results directly to the memory that was allocated for them.
        """
        if not self.native or self.random or any(str(r.type) != "Tensor" for r in schema.returns):
            return None, ()
        packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"))
        mine = [(a.name, str(a.type)) for a in schema.arguments if a.name not in ("dtype", "layout", "device", "pin_memory")]
        if len(mine) != len(schema.arguments):
            return None, ()
        for overload in packet.overloads():
            other = getattr(packet, overload)
            arguments = other._schema.arguments
            outs = [a for a in arguments if a.is_out]
            if len(outs) == len(schema.returns) and [(a.name, str(a.type)) for a in arguments if not a.is_out] == mine:
                return other._op, tuple(a.name for a in outs)
        return None, ()


def _operand_of(schema: Any, result: Any) -> str | None:
    """Return the name of the operand that the operator returns as this result, or None for a new tensor."""
    if result.alias_info is None or not result.alias_info.is_write:
        return None
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.before_set == result.alias_info.before_set:
            return str(argument.name)
    return None


@dataclass(frozen=True, eq=False, slots=True)
class ResultPlan:
    """The planned results of one operator call."""

    outs: tuple[Any, ...]
    """Metas of new tensors in order, with None for a None result."""
    structure: Any
    cost: float
    out: bool = False
    """True if the overload that writes to given tensors is used."""
    resized: tuple[Any, ...] = ()
    """Operands that must get memory first: name and meta."""


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

    __slots__ = ("_info", "seed")

    def __init__(self, info: OpInfo, seed: int, generator: torch.Generator | None) -> None:
        self._info = info
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
