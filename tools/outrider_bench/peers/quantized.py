"""How a checkpoint whose products are quantised says so, for engines that fill weights in at random."""

from __future__ import annotations

_BITS = {"fp8": 8, "int8": 8, "int4": 4}


def compressed_tensors(name: str, *, head: bool) -> dict[str, object]:
    """``quantization_config`` of a checkpoint in a format of :data:`outrider_tune.quantized.RANDOM_FORMATS`, as
    compressed-tensors writes one. ``head``: the output head too. Routers are plain.

    vLLM takes an output head for quantised only where a target names it; its class isn't among those of linear layers.
    """
    from outrider.model.quantization.writing import compressed_config
    from outrider_tune.quantized import random_format

    way = random_format(name)
    number = {"num_bits": _BITS[way.format], "type": "float" if way.format == "fp8" else "int"}
    weights: dict[str, object] = {**number, "symmetric": not way.zeros, "dynamic": False}
    if way.rows > 1:
        weights |= {"strategy": "block", "block_structure": [way.rows, way.columns]}
    elif way.columns:
        weights |= {"strategy": "group", "group_size": way.columns}
    else:
        weights |= {"strategy": "channel" if way.rows else "tensor"}
    inputs: dict[str, object] | None = None
    if way.activations is not None:
        inputs = {**number, "symmetric": True, "dynamic": True, "strategy": "token"}
        if way.activation_group:
            inputs |= {"strategy": "group", "group_size": way.activation_group}
    return compressed_config(way.format, weights, inputs, [r"re:.*\.mlp\.gate$", *([] if head else ["lm_head"])])
