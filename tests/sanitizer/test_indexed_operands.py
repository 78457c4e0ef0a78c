"""Elements that operators access at indices, as the simulated device derives them, against each element's effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.device.kernels.operators import index_arguments, operands_by_index, reads_no_elements
from outrider_sim.torch_device.row_accesses import Elements, resolvers_of

X = torch.arange(1.0, 13.0).view(4, 3)
ROWS, CELLS = torch.tensor([2, 0]), torch.tensor([[2, 0, 2], [0, 0, 2]])
ONES, MASK = torch.full((2, 3), -1.0), X > 9
BAG: dict[str, Any] = {"weight": X, "indices": ROWS, "offsets": torch.tensor([0])}
ROWS_WRITTEN: dict[str, Any] = {"self": X, "dim": 0, "index": ROWS}
CELLS_WRITTEN: dict[str, Any] = {"self": X, "dim": 0, "index": CELLS}
PUT: dict[str, Any] = {"self": X, "indices": [ROWS], "values": ONES}
CALLS: dict[str, dict[str, Any]] = {
    "_embedding_bag": BAG,
    "_embedding_bag.out": BAG,
    "_embedding_bag_forward_only": BAG,
    "_embedding_bag_forward_only.out": BAG,
    "_index_put_impl_": PUT,
    "_unsafe_index.Tensor": {"self": X, "indices": [ROWS]},
    "embedding": {"weight": X, "indices": ROWS},
    "embedding.out": {"weight": X, "indices": ROWS},
    "gather": {"self": X, "dim": 1, "index": CELLS},
    "gather.out": {"self": X, "dim": 1, "index": CELLS},
    "index.Tensor": {"self": X, "indices": [None, ROWS]},
    "index.Tensor_out": {"self": X, "indices": [None, ROWS]},
    "index_add_": ROWS_WRITTEN | {"source": ONES},
    "index_copy_": ROWS_WRITTEN | {"source": ONES},
    "index_fill_.int_Scalar": ROWS_WRITTEN | {"value": 0},
    "index_fill_.int_Tensor": ROWS_WRITTEN | {"value": torch.tensor(0.0)},
    "index_put_": PUT,
    "index_reduce_": ROWS_WRITTEN | {"source": ONES, "reduce": "amin"},
    "index_select": {"self": X, "dim": 1, "index": ROWS},
    "index_select.out": {"self": X, "dim": 1, "index": ROWS},
    "masked_fill_.Scalar": {"self": X, "mask": MASK, "value": 0},
    "masked_fill_.Tensor": {"self": X, "mask": MASK, "value": torch.tensor(0.0)},
    "masked_scatter_": {"self": X, "mask": MASK, "source": -X},
    "masked_select": {"self": X, "mask": MASK},
    "masked_select.out": {"self": X, "mask": MASK},
    "put_": {"self": X, "index": CELLS, "source": ONES},
    "scatter_.reduce": CELLS_WRITTEN | {"src": ONES, "reduce": "add"},
    "scatter_.src": CELLS_WRITTEN | {"src": ONES},
    "scatter_.value": CELLS_WRITTEN | {"value": 0},
    "scatter_.value_reduce": CELLS_WRITTEN | {"value": -1, "reduce": "multiply"},
    "scatter_add_": CELLS_WRITTEN | {"src": ONES},
    "scatter_reduce_.two": CELLS_WRITTEN | {"src": ONES, "reduce": "amin"},
    "take": {"self": X, "index": CELLS},
    "take.out": {"self": X, "index": CELLS},
    "take_along_dim": {"self": X, "indices": ROWS},
    "take_along_dim.out": {"self": X, "indices": ROWS},
}
WHOLE = (
    *("_masked_scale", "_masked_softmax", "_native_multi_head_attention", "_transformer_encoder_layer_fwd"),
    *("_triton_multi_head_attention", "max_unpool2d", "max_unpool3d", "segment_reduce", "_rowwise_prune"),
    *("_unsafe_index_put", "_unsafe_masked_index", "_unsafe_masked_index_put_accumulate", "embedding_renorm_"),
)
"""Operators with indices whose elements aren't told apart: the comparison of their results finds that they read all."""
UNSUPPORTED = ("sparse", "nested", "embedding_bag", "hacked_twin")
"""Operators of sparse and nested tensors, which the device doesn't have, and overloads that it takes apart."""


def overloads() -> dict[str, Any]:
    """Every overload of torch's registry that accesses an operand at indices."""
    found = {}
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("aten::")
        packet = getattr(torch.ops.aten, name, None) if schema.name.startswith("aten::") else None
        overload = schema.overload_name or "default"
        if packet is not None and overload in packet.overloads() and operands_by_index(getattr(packet, overload)):
            found[name + (f".{schema.overload_name}" if schema.overload_name else "")] = getattr(packet, overload)
    return found


def effect(func: Any, call: dict[str, Any], name: str, *, write: bool) -> set[int]:
    """The offsets of the elements of an operand that a call reads or writes, by trying each."""

    def run(operand: torch.Tensor) -> torch.Tensor:
        result = (func if write else func.overloadpacket)(**{**call, name: operand})
        return operand if write else result if isinstance(result, torch.Tensor) else result[0]

    if write:
        return {n * 4 for n in (run(X.clone()) != X).flatten().nonzero().flatten().tolist()}
    found = set()
    for n in range(X.numel()):
        changed = X.clone()
        changed.view(-1)[n] = 100.0
        if not torch.equal(run(changed), run(X)):
            found.add(n * 4)
    return found


@pytest.mark.parametrize("name", CALLS)
def test_the_elements_are_those_with_an_effect(name: str) -> None:
    func = overloads_found[name]
    (operand,) = operands_by_index(func)
    call = {a.name: None for a in func._schema.arguments if "Tensor?" in str(a.type)} | CALLS[name]
    found = resolvers_of(func)[operand](call)
    if isinstance(found, torch.Tensor):  # rows
        places = {row * 12 + column * 4 for row in found.tolist() for column in range(3)}
    else:
        assert isinstance(found, Elements)
        places = set(found.offsets.tolist())
    assert places == effect(func, call, operand, write=operand == "self" and name.partition(".")[0].endswith("_"))
    assert places != {n * 4 for n in range(X.numel())}


def test_the_registry_has_no_other_operators_with_indices() -> None:
    names = {name for name in overloads_found if not any(part in name for part in UNSUPPORTED)}
    assert {name for name in names if name.partition(".")[0] not in WHOLE} == set(CALLS) - {
        name for name in CALLS if "embedding_bag" in name
    }


def test_tensors_made_like_others_read_no_elements() -> None:
    made = {
        schema.name.removeprefix("aten::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::") and schema.arguments and str(schema.arguments[0].type) == "Tensor"
        for overload in [schema.overload_name or "default"]
        if overload in getattr(torch.ops.aten, schema.name.removeprefix("aten::")).overloads()
        and reads_no_elements(getattr(getattr(torch.ops.aten, schema.name.removeprefix("aten::")), overload))
    }
    assert {name for name in made if "like" not in name and not name.startswith("new_") and "sparse" not in name} == set()
    assert {"empty_like", "full_like", "rand_like", "zeros_like", "new_full", "new_zeros"} <= made
    assert "_to_copy" not in made


def test_an_operator_that_reads_more_than_its_indices_say_counts_as_whole() -> None:
    func = torch.ops.aten.max_unpool2d.default
    assert index_arguments(func) == {"indices"}
    call = {"self": torch.rand(5, 2, 2), "indices": torch.tensor([[[0, 1], [2, 3]]] * 5), "output_size": [4, 4]}
    assert resolvers_of(func)["self"](call) is None


overloads_found = overloads()
