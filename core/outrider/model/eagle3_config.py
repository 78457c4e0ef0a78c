"""What the config of an EAGLE-3 head says beside the shape of its layers: which states it reads, and where it norms.

Published files say it in three ways: flat (the paper's authors, vLLM), with ``eagle_config`` inside (SpecForge, SGLang), and
as the envelope of the library speculators, whose ``transformer_layer_config`` is the layer's own config.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import CheckpointError, shown
from outrider.model.config_fields import MAX_LAYERS, is_whole

ENVELOPE = "transformer_layer_config"
"""Where speculators keeps the config of a head's layer."""

_OTHER = {
    False: "has the tensor 'mask_hidden': it drafts in parallel (P-EAGLE)",
    True: "has no tensor 'mask_hidden': it drafts one token after the other",
}
_SHOWN = 16  # layers that a config names, for an error to list them
_NESTED = "eagle_config"
# How far each key's numbers are from the layers whose input is meant: hidden state k is what k layers have made.
_LAYER_KEYS = (
    (None, "eagle_aux_hidden_state_layer_ids", 0),
    (None, "aux_hidden_state_layer_ids", 0),
    (None, "target_layer_ids", 1),
    (_NESTED, "eagle_aux_hidden_state_layer_ids", 1),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Options:
    """``layers``: the target's layers whose input is read. ``prefix``: of the first layer's tensors.

    ``norm_before_fc``: the three states side by side are normed (``input_norm``); ``fc_norm``: each of them is.
    ``norm_before_residual``: the residual of the layer is the normed state. ``norm_output``: what the head hands to its next
    step is behind the final norm.
    """

    layers: tuple[int, ...]
    prefix: str
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False


def read_eagle3_options(
    file: Path, raw: dict[str, object], depth: int, present: Container[str], *, parallel: bool = False
) -> Eagle3Options:
    """From ``config.json``, for a target of ``depth`` layers; ``present``: names of the head's tensors. ``parallel``: what is
    wanted is a head that drafts in parallel (P-EAGLE).

    Raises :class:`CheckpointError` for a head of the other kind and one without the inner states, for values of another
    type, and where the file says the same thing twice and differently.
    """
    envelope = ENVELOPE in raw
    kind, wanted = raw.get("speculators_model_type"), "peagle" if parallel else "eagle3"
    if kind not in (None, wanted):
        raise CheckpointError(f"{file}: speculators_model_type is {shown(kind)}, expected {wanted!r}")
    own = raw.get(_NESTED)
    if own is not None and not isinstance(own, dict):
        raise CheckpointError(f"{file}: {_NESTED} is {shown(own)}, expected an object")
    if ("mask_hidden" in present) is not parallel:
        raise CheckpointError(
            f"{file}: the head {_OTHER[parallel]}; expected an EAGLE-3 head that drafts "
            f"{'in parallel' if parallel else 'one token after the other'}; for this one it's speculate "
            f"{'eagle3' if parallel else 'peagle'}"
        )
    if _flag(file, raw, "use_aux_hidden_state") is False:
        raise CheckpointError(
            f"{file}: use_aux_hidden_state is false: the head reads the target's last state alone, which isn't supported in "
            "this format; expected a head that reads three inner states, or one for speculate eagle"
        )
    before_residual = _flag(file, raw, "norm_before_residual")
    if envelope and before_residual is None and not parallel:  # of parallel heads all readers take it as false
        raise CheckpointError(
            f"{file}: norm_before_residual is missing, and readers of {ENVELOPE} take its absence both ways; add what the "
            "head was trained with, true or false"
        )
    before_fc, each = _flag(file, raw, "norm_before_fc"), _flag(file, raw, "fc_norm")
    return Eagle3Options(
        layers=_layers(file, raw, depth),
        prefix="layers.0" if "layers.0.hidden_norm.weight" in present else "midlayer",
        # A file of before these keys can't have the tensors; one that has them and no key means them.
        norm_before_fc="input_norm.weight" in present if before_fc is None else before_fc,
        fc_norm="fc_norm.0.weight" in present if each is None else each,
        norm_before_residual=bool(before_residual),
        norm_output=bool(_flag(file, raw, "norm_output")),
    )


def _flag(file: Path, raw: dict[str, object], key: str) -> bool | None:
    """True or false where the file says so, at its top or in ``eagle_config``."""
    own = raw.get(_NESTED)
    found = [part[key] for part in (raw, own) if isinstance(part, dict) and part.get(key) is not None]
    if not all(isinstance(each, bool) for each in found):
        raise CheckpointError(f"{file}: {key} is {shown(found[0])}, expected true or false")
    if len(set(map(bool, found))) > 1:
        raise CheckpointError(f"{file}: {key} is {shown(found[0])}, and {shown(found[1])} in {_NESTED}; expected one of them")
    return bool(found[0]) if found else None


def _layers(file: Path, raw: dict[str, object], depth: int) -> tuple[int, ...]:
    """The layers whose input is read; the published choice where the file names none."""
    found: dict[str, tuple[int, ...]] = {}
    for place, key, later in _LAYER_KEYS:
        part = raw if place is None else raw.get(place)
        named = part.get(key) if isinstance(part, dict) else None
        if named is None:
            continue
        name = key if place is None else f"{place}.{key}"
        whole = isinstance(named, list) and len(named) <= _SHOWN
        if not isinstance(named, list) or not whole or not all(is_whole(layer, -_SHOWN, MAX_LAYERS) for layer in named):
            raise CheckpointError(f"{file}: {name} is {shown(named)}, expected three layers of a target of {depth} layers")
        found[name] = tuple(layer + later for layer in named)
    if len(set(found.values())) > 1:
        said = "; ".join(f"{name}: the inputs of layers {list(layers)}" for name, layers in found.items())
        raise CheckpointError(f"{file}: the head's layers are named in more than one way, and differently ({said})")
    layers = next(iter(found.values()), tuple(sorted({2, depth // 2, depth - 3})))
    if len(layers) != 3 or not all(0 <= layer < depth for layer in layers):
        name = next(iter(found), "eagle_config.eagle_aux_hidden_state_layer_ids")
        raise CheckpointError(
            f"{file}: the head would read the inputs of layers {list(layers)} of a target of {depth} layers, expected three "
            f"layers; name them in {name}"
        )
    return layers
