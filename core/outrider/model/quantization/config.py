"""What a checkpoint's config says of its quantised weights, in the words of each method.

compressed-tensors' own library reads its configs. The others are read here: ``fp8`` of Hugging Face, ``awq``, ``gptq``,
``modelopt``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from outrider.device import ConfigError
from outrider.errors import CheckpointError, shown
from outrider.model.config_fields import is_whole
from outrider.model.quantization.cache import KEY, MODELOPT_KEY
from outrider.model.quantization.loading import Quantization, QuantizedMode
from outrider.model.quantization.patterns import pattern
from outrider.model.quantization.scheme import Activations, Scheme
from outrider.model.reading import present, read_json, reading

Find = Callable[[str], Scheme | None]
_KEY, _OLDER_KEY = "quantization_config", "compression_config"
_BESIDE = ("quantize_config.json", "quant_config.json")
"""Files that older writers of GPTQ and of AWQ left beside config.json."""
_MODELOPT = "hf_quant_config.json"
"""What ModelOpt leaves beside config.json, whether that says the same or nothing."""
_MAX_GROUP = 1 << 20
_INSTEAD = "take the checkpoint in another of these formats, or the plain one (outrider quantize makes quantised ones of it)"


def read_quantization(directory: Path, *, mode: str = QuantizedMode.KERNELS) -> Quantization | None:
    """Read what config.json in ``directory`` says of quantised weights; None where it says nothing.

    Raises :class:`CheckpointError` for a method or a scheme that isn't supported; the error names it. Raises
    :class:`ConfigError` for a mode that there isn't.
    """
    mode = QuantizedMode.of(mode)  # a caller may have its name alone, which is none of those that it's compared with
    path, given = _given(directory)
    if given is None:
        return None
    with reading(path, "a config of quantised weights"):
        if not isinstance(given, dict):
            raise ConfigError(f"{_KEY} is {shown(given)}, expected a JSON object")
        method = given.get("quant_method") or _method_of(path, given)
        if not isinstance(method, str) or method not in _METHODS:
            raise ConfigError(
                f"quant_method is {shown(method)}, which isn't supported; supported are {', '.join(_METHODS)}; {_INSTEAD}"
            )
        cache = _modelopt_cache(given) if method == "modelopt" else given.get(KEY)
        return Quantization(
            path=path,
            method=method,
            scheme=_METHODS[method]({**given, KEY: None}),
            mode=mode,
            cache=cache,
            weights=method != "compressed-tensors" or bool(given.get("config_groups")),
        )


def refuse_quantized(directory: Path) -> None:
    """Raise :class:`CheckpointError` where a checkpoint says that it's quantised: only plain ones are read then."""
    path, given = _given(directory)
    if given is None:
        return
    method = given.get("quant_method") or _method_of(path, given) if isinstance(given, dict) else None
    raise CheckpointError(
        f"{path}: says how weights are quantised ({shown(method)}), and transformers' own code runs plain ones alone here; "
        "take the plain checkpoint, or one of a family that runs natively, without --through-transformers (outrider models "
        "lists them)"
    )


def _given(directory: Path) -> tuple[Path, Any]:
    """The file that says how weights are quantised, and what it says; None where none does."""
    path = directory / "config.json"
    raw = read_json(path)
    text = raw.get("text_config")
    for part in (raw, text if isinstance(text, dict) else {}):
        for key in (_KEY, _OLDER_KEY):
            if part.get(key) is not None:
                return path, part[key]
    for other in _BESIDE:
        if present(directory / other):
            return directory / other, read_json(directory / other)
    if present(directory / _MODELOPT):
        return directory / _MODELOPT, {"quant_method": "modelopt", **read_json(directory / _MODELOPT)}
    return path, None


def _method_of(path: Path, given: Mapping[str, Any]) -> str | None:
    """The method of a file that doesn't name it."""
    if path.name == _BESIDE[1] or "w_bit" in given:
        return "awq"
    return "gptq" if path.name == _BESIDE[0] else None


# -- compressed-tensors --------------------------------------------------------------------------------------------


def _compressed_tensors(given: Mapping[str, Any]) -> Find:
    try:
        from compressed_tensors.quantization import QuantizationConfig
        from compressed_tensors.utils.match import match_name
    except ImportError as error:
        raise ConfigError(
            "weights are quantised as compressed-tensors writes them, and its library isn't installed: "
            "pip install 'outrider[quantized]'"
        ) from error
    for key in ("transform_config", "sparsity_config"):
        value = given.get(key)
        if value and not (isinstance(value, dict) and value.get("format") == "dense"):
            raise ConfigError(f"{key} is {shown(value)}, which isn't supported; {_INSTEAD}")
    config = _validated(QuantizationConfig, given)
    named: list[tuple[str, Scheme | None]] = []
    for name, group in config.config_groups.items():
        scheme = _group_scheme(name, group, config.format)
        named += [(pattern(target), scheme) for target in group.targets]
    ignore = [pattern(each) for each in config.ignore or ()]

    def matches(target: str, module: str) -> bool:
        return target == "Linear" or bool(match_name(module, target))

    # A name before an expression before a class, as the library orders them.
    named.sort(key=lambda entry: (entry[0] == "Linear", entry[0].startswith("re:")))

    def find(module: str) -> Scheme | None:
        if any(matches(each, module) for each in ignore):
            return None
        return next((scheme for target, scheme in named if matches(target, module)), None)

    return find


def _validated(kind: Any, given: Mapping[str, Any]) -> Any:
    """The library's record of a config. Raises :class:`ConfigError` that names the key of what it doesn't take."""
    try:
        return kind.model_validate(dict(given))
    except ValueError as error:
        found: Any = getattr(error, "errors", None)
        if found is None:
            raise
        first = found(include_url=False, include_context=False)[0]
        # Between the keys stand the kinds that the library tried.
        key = ".".join(str(part) for part in first["loc"] if "[" not in str(part)) or _KEY
        value = "missing" if first["type"] == "missing" else shown(first["input"])
        reason = first["msg"].removeprefix("Value error, ").rstrip(".")
        raise ConfigError(f"{key} is {value}, which compressed-tensors doesn't take: {reason}; {_INSTEAD}") from error


_STORAGES: Mapping[str, str] = MappingProxyType(
    {"float-quantized": "values", "int-quantized": "values", "naive-quantized": "values", "pack-quantized": "packed"}
)


def _group_scheme(name: str, group: Any, overall: str) -> Scheme | None:
    source, weights = f"config group {name!r}", group.weights
    format = str(getattr(group.format, "value", group.format) or overall)
    if format == "dense":
        return None
    if weights is None or group.output_activations is not None:
        raise ConfigError(f"{source} quantises {'outputs' if weights is not None else 'no weights'}, which isn't supported")
    what = f"{source}: {weights.num_bits} bits, {weights.type}, strategy {weights.strategy}, format {format}"
    if format not in _STORAGES:
        raise ConfigError(f"{what}: the format isn't supported; supported are {', '.join(_STORAGES)}; {_INSTEAD}")
    storage = _STORAGES[format]
    whole = weights.type == "int"
    fits = weights.num_bits == 8 if not whole else weights.num_bits in ((4, 8) if storage == "packed" else range(2, 9))
    if not fits or (storage == "packed" and not whole):
        raise ConfigError(f"{what}: expected 4 or 8 bits of type int, or 8 of type float; {_INSTEAD}")
    if weights.dynamic:
        raise ConfigError(f"{what}: weights are dynamic, expected stored scales")
    if not whole and not weights.symmetric:
        raise ConfigError(f"{what}: floats with zero points aren't supported; {_INSTEAD}")
    blocks: Mapping[str, Callable[[], tuple[int, int]]] = {
        "tensor": lambda: (0, 0),
        "channel": lambda: (1, 0),
        "group": lambda: (1, weights.group_size),
        "block": lambda: (weights.block_structure[0], weights.block_structure[1]),
    }
    if weights.strategy not in blocks:
        raise ConfigError(f"{what}: the strategy isn't supported; supported are {', '.join(blocks)}; {_INSTEAD}")
    return Scheme(
        storage=storage,
        block=blocks[weights.strategy](),
        source=source,
        bits=weights.num_bits if storage == "packed" else 8,
        dtype=torch.int8 if whole else torch.float8_e4m3fn,
        symmetric=bool(weights.symmetric),
        packed_zeros=weights.strategy in ("channel", "group"),
        activations=_input_activations(source, group.input_activations),
    )


def _input_activations(source: str, args: Any) -> Activations | None:
    if args is None:
        return None
    what = f"{source}: input activations of {args.num_bits} bits, {args.type}, strategy {args.strategy}"
    if args.num_bits != 8 or not args.symmetric:
        zero = "" if args.symmetric else ", with zero points"
        raise ConfigError(f"{what}{zero}: expected 8 symmetric bits; {_INSTEAD}")
    format = "int8" if args.type == "int" else "fp8"
    if args.dynamic is True and args.strategy in ("token", "group"):
        return Activations(format, group=args.group_size or 0)
    if args.dynamic is False and args.strategy == "tensor":
        return Activations(format, static=True)
    how = "dynamic" if args.dynamic else "static"
    raise ConfigError(
        f"{what}, {how}: supported are dynamic scales of a token or of a group, and a static one of a tensor"
        + ("; a dynamic one of all tokens would make a request's tokens depend on its neighbours" if args.dynamic else "")
    )


# -- fp8 of Hugging Face, awq, gptq, modelopt ----------------------------------------------------------------------


def _fp8(given: Mapping[str, Any]) -> Find:
    block, activation = given.get("weight_block_size"), given.get("activation_scheme", "dynamic")
    if activation not in ("dynamic", "static"):
        raise ConfigError(f"activation_scheme is {shown(activation)}, expected dynamic or static")
    if given.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):
        raise ConfigError(f"fmt is {shown(given['fmt'])}, expected e4m3")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(is_whole(size, 1, _MAX_GROUP) for size in block)
    ):
        raise ConfigError(f"weight_block_size is {shown(block)}, expected two positive whole numbers")
    if block is not None and activation == "static":
        raise ConfigError("activation_scheme is static with a weight_block_size, expected dynamic")
    scheme = Scheme(
        storage="values",
        block=(0, 0) if block is None else (block[0], block[1]),
        source=_KEY,
        dtype=torch.float8_e4m3fn,
        scale="weight_scale" if block is None else "weight_scale_inv",
        activations=Activations("fp8", static=activation == "static", group=0 if block is None else block[1]),
    )
    return _except(scheme, _modules(given, "modules_to_not_convert") or _modules(given, "ignored_layers"))


def _awq(given: Mapping[str, Any]) -> Find:
    key, version = _layout(given, "version", "gemm")
    if version != "gemm":
        raise ConfigError(f"{key} is {shown(given[key])}, and of AWQ only gemm is supported; {_INSTEAD}")
    bits = given.get("bits", given.get("w_bit", 4))
    if bits != 4:
        raise ConfigError(f"bits is {shown(bits)}, expected 4 for AWQ")
    zero_point = _flag(given, "zero_point", True)
    scheme = Scheme(
        storage="awq",
        block=(1, _group_size(given.get("group_size", given.get("q_group_size", 128)))),
        source=_KEY,
        bits=4,
        symmetric=not zero_point,
    )
    return _except(scheme, _modules(given, "modules_to_not_convert"))


def _gptq(given: Mapping[str, Any]) -> Find:
    base = _gptq_scheme(given)
    dynamic = given.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise ConfigError(f"dynamic is {shown(dynamic)}, expected a JSON object")
    rules: list[tuple[re.Pattern[str], Scheme | None]] = []
    for key, override in dynamic.items():
        expression = re.compile(pattern(f"re:{key[2:] if key[:2] in ('-:', '+:') else key}").removeprefix("re:"))
        if not isinstance(override, dict):
            raise ConfigError(f"dynamic[{shown(key)}] is {shown(override)}, expected a JSON object")
        rules.append((expression, None if key.startswith("-:") else _gptq_scheme({**given, **override})))
    head = _flag(given, "lm_head", False)
    skipped = _except(base, _modules(given, "modules_to_not_convert") + _modules(given, "modules_in_block_to_not_quantize"))

    def find(module: str) -> Scheme | None:
        if module.endswith("lm_head") and not head:
            return None
        for expression, scheme in rules:
            if expression.match(module):
                return scheme
        return skipped(module)

    return find


def _gptq_scheme(given: Mapping[str, Any]) -> Scheme:
    bits, (key, layout) = given.get("bits"), _layout(given, "checkpoint_format", "gptq")
    if bits not in (4, 8) or isinstance(bits, bool):
        raise ConfigError(f"bits is {shown(bits)}, expected 4 or 8 for GPTQ; {_INSTEAD}")
    if layout not in ("gptq", "gptq_v2"):
        raise ConfigError(f"{key} is {shown(given[key])}, expected gptq or gptq_v2; {_INSTEAD}")
    return Scheme(
        storage="gptq",
        block=(1, _group_size(given.get("group_size", 128))),
        source=_KEY,
        bits=int(bits),
        symmetric=_flag(given, "sym", True),
        zero_offset=1 if layout == "gptq" else 0,
    )


def _layout(given: Mapping[str, Any], older: str, default: str) -> tuple[str, object]:
    """The layout of the words, in small letters, and the key that names it: ``older``, or ``format`` of later releases."""
    key = older if given.get(older) is not None or given.get("format") is None else "format"
    value = given.get(key)
    return key, default if value is None else value.lower() if isinstance(value, str) else value


def _modelopt(given: Mapping[str, Any]) -> Find:
    """``hf_quant_config.json``, or what config.json says in its place: one level less, and another name for what is plain."""
    said = _modelopt_part(given)
    algorithm = said.get("quant_algo")
    known = {"FP8": ((0, 0), Activations("fp8", static=True)), "FP8_PER_CHANNEL_PER_TOKEN": ((1, 0), Activations("fp8"))}
    found = known.get(algorithm.upper()) if isinstance(algorithm, str) else None
    if found is None:
        raise ConfigError(
            f"quant_algo is {shown(algorithm)}, which isn't supported; of ModelOpt's supported are {', '.join(known)}; "
            f"{_INSTEAD}"
        )
    block, activations = found
    scheme = Scheme(storage="values", block=block, source="quant_algo", dtype=torch.float8_e4m3fn, activations=activations)
    names = _modules(said, "exclude_modules") + _modules(said, "ignore")
    parts = _except(scheme, [name for name in names if "*" not in name])
    wild = [name for name in names if "*" in name]

    def find(module: str) -> Scheme | None:
        return None if any(fnmatchcase(module, name) for name in wild) else parts(module)

    return find


def _modelopt_part(given: Mapping[str, Any]) -> Mapping[str, Any]:
    said = given.get("quantization", given)
    if not isinstance(said, dict):
        raise ConfigError(f"quantization is {shown(said)}, expected a JSON object")
    return said


def _modelopt_cache(given: Mapping[str, Any]) -> object:
    """What it says of the KV cache, in compressed-tensors' words."""
    if given.get(KEY) is not None:
        return given[KEY]
    algorithm = _modelopt_part(given).get(MODELOPT_KEY)
    if algorithm is None:
        return None
    return {"num_bits": 8, "type": "float"} if algorithm == "FP8" else {MODELOPT_KEY: algorithm}


def _group_size(value: object) -> int:
    """Columns of a group; 0 for all of them."""
    if value == -1 and not isinstance(value, bool):
        return 0
    if not is_whole(value, 1, _MAX_GROUP) or value % 8:
        raise ConfigError(f"group_size is {shown(value)}, expected -1 or a positive multiple of 8")
    return value


def _flag(given: Mapping[str, Any], key: str, default: bool) -> bool:
    value = given.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{key} is {shown(value)}, expected true or false")
    return value


def _modules(given: Mapping[str, Any], key: str) -> list[str]:
    names = given.get(key) or []
    flat = (
        [name for each in names for name in (each if isinstance(each, list) else [each])] if isinstance(names, list) else [0]
    )
    if len(flat) > 1 << 16 or not all(isinstance(name, str) for name in flat):
        raise ConfigError(f"{key} is {shown(names)}, expected a list of module names")
    return [str(name) for name in flat]


def _except(scheme: Scheme, names: Sequence[str]) -> Find:
    """``scheme`` for every module but those whose name has one of ``names`` as a part, between dots or at an end."""
    skipped = tuple(f".{name.strip('.')}." for name in names if name.strip("."))

    def find(module: str) -> Scheme | None:
        dotted = f".{module}."
        return None if any(name in dotted for name in skipped) else scheme

    return find


_METHODS: Mapping[str, Callable[[Mapping[str, Any]], Find]] = MappingProxyType(
    {"compressed-tensors": _compressed_tensors, "fp8": _fp8, "awq": _awq, "gptq": _gptq, "modelopt": _modelopt}
)
