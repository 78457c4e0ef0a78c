"""Options in the config of an EAGLE-3 head besides the shape of its layers: the states that it reads, and the places of its
norms.

Published configs have three formats: flat keys (the paper's authors, vLLM), keys in ``eagle_config`` (SpecForge, SGLang), and
the envelope of the library speculators, whose ``transformer_layer_config`` is the layer's own config.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import CheckpointError, shown
from outrider.model.config.config_fields import MAX_LAYERS, is_whole
from outrider.model.heads.head_checkpoint import ENVELOPE

_FOUND_KIND = {
    False: "has the tensor 'mask_hidden': it drafts in parallel (P-EAGLE)",
    True: "has no tensor 'mask_hidden': it drafts one token after the other",
}
_MAX_LISTED_LAYERS = 16
_NESTED = "eagle_config"
# Containing object, key, and the offset from each number to the layer whose input is meant: hidden state k is the output of
# k layers. None: the first number decides (_nested_offset).
_LAYER_KEYS = (
    (None, "eagle_aux_hidden_state_layer_ids", 0),
    (None, "aux_hidden_state_layer_ids", 0),
    (None, "target_layer_ids", 1),
    (_NESTED, "eagle_aux_hidden_state_layer_ids", None),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Options:
    """Options of an EAGLE-3 head."""

    layers: tuple[int, ...]
    """The target's layers whose inputs the head reads; the number of layers stands for the output of the last one. Empty if
    the head reads the target's final state instead.
    """
    prefix: str
    """Prefix of the names of the first layer's tensors."""
    norm_before_fc: bool = False
    """True if the three joined states are normed (``input_norm``)."""
    fc_norm: bool = False
    """True if each of the three states is normed."""
    norm_before_residual: bool = False
    """True if the layer's residual is the normed state."""
    norm_output: bool = False
    """True if the input of the next draft step is the state after the final norm."""


def read_eagle3_options(
    file: Path, raw: dict[str, object], depth: int, present: Container[str], *, parallel: bool = False
) -> Eagle3Options:
    """Return the options of ``config.json`` (``raw``) for a target of ``depth`` layers.

    ``present`` holds the names of the head's tensors. ``parallel`` is true if a P-EAGLE head is expected, which drafts
    several tokens in one pass.

    Raises :class:`CheckpointError` for a head of the other kind, a parallel head that reads no intermediate states, values of
    a wrong type, and contradicting keys.
    """
    envelope = ENVELOPE in raw
    kind, wanted = raw.get("speculators_model_type"), "peagle" if parallel else "eagle3"
    if kind not in (None, wanted):
        raise CheckpointError(f"{file}: speculators_model_type is {shown(kind)}, expected {wanted!r}")
    nested = raw.get(_NESTED)
    if nested is not None and not isinstance(nested, dict):
        raise CheckpointError(f"{file}: {_NESTED} is {shown(nested)}, expected an object")
    if ("mask_hidden" in present) is not parallel:
        raise CheckpointError(
            f"{file}: the head {_FOUND_KIND[parallel]}; expected an EAGLE-3 head that drafts "
            f"{'in parallel' if parallel else 'one token after the other'}; for this one it's speculate "
            f"{'eagle3' if parallel else 'peagle'}"
        )
    reads_final = _flag(file, raw, "use_aux_hidden_state") is False
    if reads_final and parallel:
        raise CheckpointError(
            f"{file}: use_aux_hidden_state is false: the head reads the target's final state alone, which isn't supported "
            "for a head that drafts in parallel; expected a head that reads three inner states"
        )
    before_residual = _flag(file, raw, "norm_before_residual")
    if envelope and before_residual is None and not parallel:  # all readers default to false for parallel heads
        raise CheckpointError(
            f"{file}: norm_before_residual is missing, and readers of {ENVELOPE} take its absence both ways; add what the "
            "head was trained with, true or false"
        )
    before_fc, each = _flag(file, raw, "norm_before_fc"), _flag(file, raw, "fc_norm")
    return Eagle3Options(
        layers=() if reads_final else _layers(file, raw, depth),
        prefix="layers.0" if "layers.0.hidden_norm.weight" in present else "midlayer",
        # Configs older than these keys belong to heads without the tensors; a head with the tensors uses them.
        norm_before_fc="input_norm.weight" in present if before_fc is None else before_fc,
        fc_norm="fc_norm.0.weight" in present if each is None else each,
        norm_before_residual=bool(before_residual),
        norm_output=bool(_flag(file, raw, "norm_output")),
    )


def _flag(file: Path, raw: dict[str, object], key: str) -> bool | None:
    """Return the boolean ``key`` from the top level or from ``eagle_config``, or None if neither has the key. Raises
    :class:`CheckpointError` for another type.
    """
    nested = raw.get(_NESTED)
    values = [part[key] for part in (raw, nested) if isinstance(part, dict) and part.get(key) is not None]
    if not all(isinstance(each, bool) for each in values):
        raise CheckpointError(f"{file}: {key} is {shown(values[0])}, expected true or false")
    if len(set(map(bool, values))) > 1:
        raise CheckpointError(
            f"{file}: {key} is {shown(values[0])}, and {shown(values[1])} in {_NESTED}; expected one of them"
        )
    return bool(values[0]) if values else None


def _layers(file: Path, raw: dict[str, object], depth: int) -> tuple[int, ...]:
    """Return the target's layers whose inputs the head reads, by default the published choice. Raises
    :class:`CheckpointError` for layers that a target of ``depth`` layers lacks.
    """
    found: dict[str, tuple[int, ...]] = {}
    for container, key, offset in _LAYER_KEYS:
        part = raw if container is None else raw.get(container)
        named = part.get(key) if isinstance(part, dict) else None
        if named is None:
            continue
        name = key if container is None else f"{container}.{key}"
        is_short_list = isinstance(named, list) and len(named) <= _MAX_LISTED_LAYERS
        if not is_short_list or not all(is_whole(layer, -_MAX_LISTED_LAYERS, MAX_LAYERS) for layer in named):
            raise CheckpointError(f"{file}: {name} is {shown(named)}, expected three layers of a target of {depth} layers")
        shift = _nested_offset(named) if offset is None else offset
        found[name] = tuple(layer + shift for layer in named)
    if len(set(found.values())) > 1:
        listing = "; ".join(f"{name}: the inputs of layers {list(layers)}" for name, layers in found.items())
        raise CheckpointError(f"{file}: the head's layers are named in more than one way, and differently ({listing})")
    layers = next(iter(found.values()), tuple(sorted({2, depth // 2, depth - 3})))
    if len(layers) != 3 or not all(0 <= layer <= depth for layer in layers):
        name = next(iter(found), "eagle_config.eagle_aux_hidden_state_layer_ids")
        raise CheckpointError(
            f"{file}: the head would read the inputs of layers {list(layers)} of a target of {depth} layers, expected three "
            f"layers; name them in {name}"
        )
    return layers


def _nested_offset(named: list[int]) -> int:
    """Return the offset of layer numbers in ``eagle_config``, which two kinds of producers write.

    Numbers of layers whose output is meant begin with 1 (or -1, the embedding), numbers of layers whose input is meant with
    the published default of 2, or more: sgl-project/sglang#25454.
    """
    return 1 if named[:1] in ([1], [-1]) else 0
