"""Parsing of the quantization config of a checkpoint, for each supported method.

The library compressed-tensors parses its own configs. This module parses the others: ``fp8`` of Hugging Face, ``awq``,
``gptq``, ``modelopt``, ``auto-round``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

from outrider.device import ConfigError
from outrider.device.kernels.formats import FP4, FP8, INT4, INT8
from outrider.device.kernels.weight_formats import WeightFormat, weight_format
from outrider.errors import CheckpointError, shown
from outrider.model.checkpoint.files import present, read_json, wrap_read_errors
from outrider.model.config.config_fields import is_whole
from outrider.model.quantization.cache import KEY, MODELOPT_KEY
from outrider.model.quantization.loading import Quantization, check_quantized_mode
from outrider.model.quantization.storages import (
    COMPRESSED_STORAGES,
    AwqStorage,
    GptqStorage,
    MicroscalingStorage,
    PackedStorage,
    Scheme,
    ValuesStorage,
)

_EXPRESSION_PREFIX = "re:"
_EXPRESSION_CHARACTERS = frozenset(r"*+?^$()[]{}|\\")
"""Characters that mark a name in AutoRound's config as an expression."""
_MAX_CHARACTERS = 512
_MAX_OPEN_REPEATS = 4
"""Maximum number of open repeats (``*``, ``+``) in an expression. The matching time can grow with this power of the name's
length.
"""


def checked_pattern(target: str) -> str:
    """Return ``target`` unchanged: a name, or ``re:`` and an expression.

    Raises :class:`ConfigError` for an expression whose matching time may explode: one with nested repeats, with a group
    reference, or with more than four open repeats.
    """
    if not target.startswith(_EXPRESSION_PREFIX):
        return target
    text = target.removeprefix(_EXPRESSION_PREFIX)
    try:
        if len(text) > _MAX_CHARACTERS:
            raise ValueError(f"more than {_MAX_CHARACTERS} characters")
        parsed: Any = re.compile(text) and _parser().parse(text)
        if _repeats(parsed, inside=False) > _MAX_OPEN_REPEATS:
            raise ValueError(f"more than {_MAX_OPEN_REPEATS} open repeats")
    except (re.error, ValueError, RecursionError, OverflowError) as error:
        raise ConfigError(f"the expression {shown(text)} of a config can't be used: {error}") from error
    return target


def _checked_expression(text: str) -> str:
    """Return the expression ``text`` unchanged. Errors are those of :func:`checked_pattern`."""
    return checked_pattern(f"{_EXPRESSION_PREFIX}{text}").removeprefix(_EXPRESSION_PREFIX)


def _parser() -> Any:
    from re import _parser  # type: ignore[attr-defined]

    return _parser


def _repeats(parsed: Any, *, inside: bool) -> int:
    """Return the number of open repeats (``*``, ``+``) in a parsed expression. Raises ValueError for nested ones and for
    group references. ``inside``: the expression is part of an open repeat.
    """
    found = 0
    for operator, argument in parsed:
        name = str(operator)
        if name.startswith("GROUPREF"):
            raise ValueError("it refers to a group")
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            open_ended = argument[1] > 1
            if open_ended and inside:
                raise ValueError("a repeat in a repeat")
            found += open_ended
            found += _repeats(argument[2], inside=inside or open_ended)
        elif name == "BRANCH":
            found += sum(_repeats(branch, inside=inside) for branch in argument[1])
        elif name in ("SUBPATTERN", "ASSERT", "ASSERT_NOT", "ATOMIC_GROUP"):
            inner = argument if name == "ATOMIC_GROUP" else argument[-1]
            found += _repeats(inner, inside=inside)
    return found


FindScheme = Callable[[str], Scheme | None]
_KEY, _LEGACY_KEY = "quantization_config", "compression_config"
_LEGACY_FILES = ("quantize_config.json", "quant_config.json")
"""Files that older writers of GPTQ and AWQ put next to config.json."""
_MODELOPT_FILE = "hf_quant_config.json"
"""File that ModelOpt puts next to config.json, whether or not that repeats its contents."""
_MAX_GROUP_SIZE = 1 << 20
_INSTEAD = "take the checkpoint in another of these formats, or the plain one (outrider quantize makes quantised ones of it)"


def read_quantization(directory: Path, *, mode: str = "kernels") -> Quantization | None:
    """Parse the quantization config of ``directory``. Return None if there is none.

    Raises :class:`CheckpointError` with the name of an unsupported method or scheme, and :class:`ConfigError` for an unknown
    mode.
    """
    checked_mode = check_quantized_mode(mode)
    path, config = _read_quantization_config(directory)
    if config is None:
        return None
    with wrap_read_errors(path, "a config of quantised weights"):
        if not isinstance(config, dict):
            raise ConfigError(f"{_KEY} is {shown(config)}, expected a JSON object")
        method = config.get("quant_method") or _method_of(path, config)
        if not isinstance(method, str) or method not in _METHODS:
            raise ConfigError(
                f"quant_method is {shown(method)}, which isn't supported; supported are {', '.join(_METHODS)}; {_INSTEAD}"
            )
        cache = _modelopt_cache(config) if method == "modelopt" else config.get(KEY)
        return Quantization(
            path=path,
            method=method,
            scheme=_METHODS[method]({**config, KEY: None}),
            mode=checked_mode,
            cache=cache,
            weights=method not in _STACK_SCHEMES and (method != "compressed-tensors" or bool(config.get("config_groups"))),
            stacks=_STACK_SCHEMES.get(method),
        )


def refuse_quantized(directory: Path) -> None:
    """Raise :class:`CheckpointError` if a checkpoint is quantized, for a loader of unquantized weights only."""
    path, config = _read_quantization_config(directory)
    if config is None:
        return
    method = config.get("quant_method") or _method_of(path, config) if isinstance(config, dict) else None
    raise CheckpointError(
        f"{path}: says how weights are quantised ({shown(method)}), and transformers' own code runs plain ones alone here; "
        "take the plain checkpoint, or one of a family that runs natively, without --through-transformers (outrider models "
        "lists them)"
    )


def _read_quantization_config(directory: Path) -> tuple[Path, Any]:
    """Return the path of the file with the quantization config, and that config, or None if there is none."""
    path = directory / "config.json"
    raw = read_json(path)
    text = raw.get("text_config")
    for part in (raw, text if isinstance(text, dict) else {}):
        for key in (_KEY, _LEGACY_KEY):
            if part.get(key) is not None:
                return path, part[key]
    for file in _LEGACY_FILES:
        if present(directory / file):
            return directory / file, read_json(directory / file)
    if present(directory / _MODELOPT_FILE):
        return directory / _MODELOPT_FILE, {"quant_method": "modelopt", **read_json(directory / _MODELOPT_FILE)}
    return path, None


def _method_of(path: Path, config: Mapping[str, Any]) -> str | None:
    """Return the quantization method of a config that doesn't name one, derived from the file of the config, or None."""
    if path.name == _LEGACY_FILES[1] or "w_bit" in config:
        return "awq"
    if path.name not in _LEGACY_FILES and {"bits", "group_size"} <= config.keys():
        return "mlx"  # MLX writes no method
    return "gptq" if path.name == _LEGACY_FILES[0] else None


# -- compressed-tensors --------------------------------------------------------------------------------------------


def _compressed_tensors(config_object: Mapping[str, Any]) -> FindScheme:
    try:
        from compressed_tensors.quantization import QuantizationConfig
        from compressed_tensors.utils.match import match_name
    except ImportError as error:
        raise ConfigError(
            "weights are quantised as compressed-tensors writes them, and its library isn't installed: "
            "pip install 'outrider[quantized]'"
        ) from error
    for key in ("transform_config", "sparsity_config"):
        value = config_object.get(key)
        if value and not (isinstance(value, dict) and value.get("format") == "dense"):
            raise ConfigError(f"{key} is {shown(value)}, which isn't supported; {_INSTEAD}")
    config = _validate(QuantizationConfig, config_object)
    schemes: list[tuple[str, Scheme | None]] = []
    for name, group in config.config_groups.items():
        scheme = _group_scheme(name, group, config.format)
        schemes += [(checked_pattern(target), scheme) for target in group.targets]
    ignore = [checked_pattern(each) for each in config.ignore or ()]

    def matches(target: str, module: str) -> bool:
        return target == "Linear" or bool(match_name(module, target))

    # Names take precedence over expressions, and these over classes, as in the library.
    schemes.sort(key=lambda entry: (entry[0] == "Linear", entry[0].startswith("re:")))

    def find(module: str) -> Scheme | None:
        if any(matches(each, module) for each in ignore):
            return None
        return next((scheme for target, scheme in schemes if matches(target, module)), None)

    return find


def _validate(kind: Any, given: Mapping[str, Any]) -> Any:
    """Validate ``given`` with the library's model ``kind``. Raises :class:`ConfigError` with the key of an invalid value."""
    try:
        return kind.model_validate(dict(given))
    except ValueError as error:
        found: Any = getattr(error, "errors", None)
        if found is None:
            raise
        first_error = found(include_url=False, include_context=False)[0]
        # The location contains keys, and in brackets the models that the library tried.
        key = ".".join(str(part) for part in first_error["loc"] if "[" not in str(part)) or _KEY
        value = "missing" if first_error["type"] == "missing" else shown(first_error["input"])
        reason = first_error["msg"].removeprefix("Value error, ").rstrip(".")
        raise ConfigError(f"{key} is {value}, which compressed-tensors doesn't take: {reason}; {_INSTEAD}") from error


def _group_scheme(name: str, group: Any, default_format: str) -> Scheme | None:
    source, weights = f"config group {name!r}", group.weights
    format = str(getattr(group.format, "value", group.format) or default_format)
    if format == "dense":
        return None
    if weights is None or group.output_activations is not None:
        raise ConfigError(f"{source} quantises {'outputs' if weights is not None else 'no weights'}, which isn't supported")
    what = f"{source}: {weights.num_bits} bits, {weights.type}, strategy {weights.strategy}, format {format}"
    if format not in COMPRESSED_STORAGES:
        known = ", ".join(COMPRESSED_STORAGES)
        raise ConfigError(f"{what}: the format isn't supported; supported are {known}; {_INSTEAD}")
    storage = COMPRESSED_STORAGES[format]
    is_packed, is_integer = isinstance(storage, PackedStorage), weights.type == "int"
    if isinstance(storage, MicroscalingStorage):
        return _microscaling_scheme(what, group, storage, source)
    fits = weights.num_bits == 8 if not is_integer else weights.num_bits in ((4, 8) if is_packed else range(2, 9))
    if not fits or (is_packed and not is_integer):
        raise ConfigError(f"{what}: expected 4 or 8 bits of type int, or 8 of type float; {_INSTEAD}")
    if weights.dynamic:
        raise ConfigError(f"{what}: weights are dynamic, expected stored scales")
    if not is_integer and not weights.symmetric:
        raise ConfigError(f"{what}: floats with zero points aren't supported; {_INSTEAD}")
    blocks: Mapping[str, Callable[[], tuple[int, int]]] = {
        "tensor": lambda: (0, 0),
        "channel": lambda: (1, 0),
        "group": lambda: (1, weights.group_size),
        "block": lambda: (weights.block_structure[0], weights.block_structure[1]),
    }
    if weights.strategy not in blocks:
        raise ConfigError(f"{what}: the strategy isn't supported; supported are {', '.join(blocks)}; {_INSTEAD}")
    rows, columns = blocks[weights.strategy]()
    if is_packed:
        storage = PackedStorage(packed_zeros=weights.strategy in ("channel", "group"))
    parsed = WeightFormat(
        elements=FP8 if not is_integer else INT4 if is_packed and weights.num_bits == 4 else INT8,
        rows=rows,
        columns=columns,
        zeros=not weights.symmetric,
        **_input_activations(source, group.input_activations),
    )
    return Scheme(parsed, storage, source)


def _microscaling_scheme(what: str, group: Any, storage: MicroscalingStorage, source: str) -> Scheme:
    weights = group.weights
    fits = weights.num_bits == FP4.bits and weights.type == "float" and weights.strategy == "group" and weights.symmetric
    if not fits or weights.dynamic or group.input_activations is not None:
        raise ConfigError(f"{what}: expected 4 bits of type float, strategy group, and unquantised activations; {_INSTEAD}")
    return Scheme(WeightFormat(elements=FP4, columns=weights.group_size, power_scales=True), storage, source)


def _input_activations(source: str, args: Any) -> dict[str, Any]:
    """Return the :class:`WeightFormat` fields for quantized activations that ``args`` describes; empty for
    unquantized ones.
    """
    if args is None:
        return {}
    what = f"{source}: input activations of {args.num_bits} bits, {args.type}, strategy {args.strategy}"
    if args.num_bits != 8 or not args.symmetric:
        zero = "" if args.symmetric else ", with zero points"
        raise ConfigError(f"{what}{zero}: expected 8 symmetric bits; {_INSTEAD}")
    elements = INT8 if args.type == "int" else FP8
    if args.dynamic is True and args.strategy in ("token", "group"):
        return {"activations": elements, "activation_group": args.group_size or 0}
    if args.dynamic is False and args.strategy == "tensor":
        return {"activations": elements, "static": True}
    timing = "dynamic" if args.dynamic else "static"
    raise ConfigError(
        f"{what}, {timing}: supported are dynamic scales of a token or of a group, and a static one of a tensor"
        + ("; a dynamic one of all tokens would make a request's tokens depend on its neighbours" if args.dynamic else "")
    )


# -- fp8 of Hugging Face, awq, gptq, modelopt ----------------------------------------------------------------------


def _fp8(config: Mapping[str, Any]) -> FindScheme:
    block, activation = config.get("weight_block_size"), config.get("activation_scheme", "dynamic")
    if activation not in ("dynamic", "static"):
        raise ConfigError(f"activation_scheme is {shown(activation)}, expected dynamic or static")
    if config.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):
        raise ConfigError(f"fmt is {shown(config['fmt'])}, expected e4m3")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(is_whole(size, 1, _MAX_GROUP_SIZE) for size in block)
    ):
        raise ConfigError(f"weight_block_size is {shown(block)}, expected two positive whole numbers")
    if block is not None and activation == "static":
        raise ConfigError("activation_scheme is static with a weight_block_size, expected dynamic")
    rows, columns = (0, 0) if block is None else block
    static = activation == "static"
    format = WeightFormat(elements=FP8, rows=rows, columns=columns, activations=FP8, activation_group=columns, static=static)
    scheme = Scheme(format, ValuesStorage("weight_scale" if block is None else "weight_scale_inv"), _KEY)
    return _all_except(scheme, _modules(config, "modules_to_not_convert") or _modules(config, "ignored_layers"))


def _awq(config: Mapping[str, Any]) -> FindScheme:
    key, version = _word_layout(config, "version", "gemm")
    if version != "gemm":
        raise ConfigError(f"{key} is {shown(config[key])}, and of AWQ only gemm is supported; {_INSTEAD}")
    bits = config.get("bits", config.get("w_bit", 4))
    if bits != 4:
        raise ConfigError(f"bits is {shown(bits)}, expected 4 for AWQ")
    zero_point = _flag(config, "zero_point", True)
    group = _group_size(config.get("group_size", config.get("q_group_size", 128)))
    format = WeightFormat(elements=INT4, columns=group, zeros=zero_point)
    return _all_except(Scheme(format, AwqStorage(), _KEY), _modules(config, "modules_to_not_convert"))


def _gptq(config: Mapping[str, Any]) -> FindScheme:
    base = _gptq_scheme(config)
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise ConfigError(f"dynamic is {shown(dynamic)}, expected a JSON object")
    rules: list[tuple[re.Pattern[str], Scheme | None]] = []
    for key, override in dynamic.items():
        expression = re.compile(_checked_expression(key[2:] if key[:2] in ("-:", "+:") else key))
        if not isinstance(override, dict):
            raise ConfigError(f"dynamic[{shown(key)}] is {shown(override)}, expected a JSON object")
        rules.append((expression, None if key.startswith("-:") else _gptq_scheme({**config, **override})))
    head = _flag(config, "lm_head", False)
    skipped = _all_except(
        base, _modules(config, "modules_to_not_convert") + _modules(config, "modules_in_block_to_not_quantize")
    )

    def find(module: str) -> Scheme | None:
        if module.endswith("lm_head") and not head:
            return None
        for expression, scheme in rules:
            if expression.match(module):
                return scheme
        return skipped(module)

    return find


def _gptq_scheme(config: Mapping[str, Any]) -> Scheme:
    bits, (key, layout) = config.get("bits"), _word_layout(config, "checkpoint_format", "gptq")
    if bits not in (4, 8) or isinstance(bits, bool):
        raise ConfigError(f"bits is {shown(bits)}, expected 4 or 8 for GPTQ; {_INSTEAD}")
    if layout not in ("gptq", "gptq_v2"):
        raise ConfigError(f"{key} is {shown(config[key])}, expected gptq or gptq_v2; {_INSTEAD}")
    group, is_symmetric = _group_size(config.get("group_size", 128)), _flag(config, "sym", True)
    format = WeightFormat(elements=INT4 if bits == 4 else INT8, columns=group, zeros=not is_symmetric)
    return Scheme(format, GptqStorage(zero_offset=1 if layout == "gptq" else 0), _KEY)


def _auto_round(config: Mapping[str, Any]) -> FindScheme:
    """Return the scheme finder of AutoRound's config: words packed as by GPTQ or AWQ, with other settings in
    ``extra_config`` for modules, by their names or by expressions. A name takes precedence.
    """
    packing, data_type, extra = config.get("packing_format"), config.get("data_type", "int"), config.get("extra_config") or {}
    name = "auto_gptq" if packing is None else str(packing).removeprefix("auto_round:")
    if name not in _AUTO_ROUND_LAYOUTS:
        known = ", ".join(f"auto_round:{each}" for each in _AUTO_ROUND_LAYOUTS)
        raise ConfigError(f"packing_format is {shown(packing)}, which isn't supported; supported are {known}; {_INSTEAD}")
    if data_type != "int":
        raise ConfigError(f"data_type is {shown(data_type)}, expected int; {_INSTEAD}")
    if not isinstance(extra, dict) or not all(isinstance(each, dict) for each in extra.values()):
        raise ConfigError(f"extra_config is {shown(extra)}, expected a JSON object of objects by the names of modules")
    common = {**config, "checkpoint_format": _AUTO_ROUND_LAYOUTS[name], "version": "gemm", "dynamic": None, "lm_head": True}

    def parse(fields: Mapping[str, Any]) -> FindScheme:
        if is_whole(fields.get("bits"), 16, 32):
            return lambda module: None
        return _awq({**fields, "zero_point": not _flag(fields, "sym", True)}) if name == "auto_awq" else _gptq(fields)

    default, by_name = parse(common), {name: parse({**common, **fields}) for name, fields in extra.items()}
    marked = [name for name in extra if not _EXPRESSION_CHARACTERS.isdisjoint(name)]
    expressions = [(re.compile(_checked_expression(name)), by_name[name]) for name in marked]

    def find(module: str) -> Scheme | None:
        matching = (scheme for expression, scheme in expressions if expression.search(module))
        return (by_name.get(module) or next(matching, default))(module)

    return find


def _word_layout(config: Mapping[str, Any], older_key: str, default: str) -> tuple[str, object]:
    """Return the key that names the layout of the packed words, and the layout in lower case.

    The key is ``older_key``, or ``format`` in newer releases.
    """
    key = older_key if config.get(older_key) is not None or config.get("format") is None else "format"
    value = config.get(key)
    return key, default if value is None else value.lower() if isinstance(value, str) else value


def _modelopt(config: Mapping[str, Any]) -> FindScheme:
    """Return the scheme finder of ``hf_quant_config.json``, or of the flatter form in config.json, which calls unquantized
    modules ``ignore``.
    """
    fields = _modelopt_fields(config)
    algorithm = fields.get("quant_algo")
    known = {
        "FP8": WeightFormat(elements=FP8, rows=0, activations=FP8, static=True),
        "FP8_PER_CHANNEL_PER_TOKEN": WeightFormat(elements=FP8, activations=FP8),
    }
    found = known.get(algorithm.upper()) if isinstance(algorithm, str) else None
    if found is None:
        raise ConfigError(
            f"quant_algo is {shown(algorithm)}, which isn't supported; of ModelOpt's supported are {', '.join(known)}; "
            f"{_INSTEAD}"
        )
    scheme = Scheme(found, ValuesStorage(), "quant_algo")
    names = _modules(fields, "exclude_modules") + _modules(fields, "ignore")
    scheme_by_name = _all_except(scheme, [name for name in names if "*" not in name])
    patterns = [name for name in names if "*" in name]

    def find(module: str) -> Scheme | None:
        return None if any(fnmatchcase(module, name) for name in patterns) else scheme_by_name(module)

    return find


def _modelopt_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    fields = config.get("quantization", config)
    if not isinstance(fields, dict):
        raise ConfigError(f"quantization is {shown(fields)}, expected a JSON object")
    return fields


def _modelopt_cache(config: Mapping[str, Any]) -> object:
    """Return the KV cache scheme of a ModelOpt config in the vocabulary of compressed-tensors, or None if the cache is
    unquantized.
    """
    if config.get(KEY) is not None:
        return config[KEY]
    algorithm = _modelopt_fields(config).get(MODELOPT_KEY)
    if algorithm is None:
        return None
    return {"num_bits": 8, "type": "float"} if algorithm == "FP8" else {MODELOPT_KEY: algorithm}


def _group_size(value: object) -> int:
    """Return the number of columns that share a scale; 0 for -1, which means all columns. Raises :class:`ConfigError` unless
    it is a multiple of 8.
    """
    if value == -1 and not isinstance(value, bool):
        return 0
    if not is_whole(value, 1, _MAX_GROUP_SIZE) or value % 8:
        raise ConfigError(f"group_size is {shown(value)}, expected -1 or a positive multiple of 8")
    return value


def _flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{key} is {shown(value)}, expected true or false")
    return value


def _modules(config: Mapping[str, Any], key: str) -> list[str]:
    names = config.get(key) or []
    flat = (
        [name for each in names for name in (each if isinstance(each, list) else [each])] if isinstance(names, list) else [0]
    )
    if len(flat) > 1 << 16 or not all(isinstance(name, str) for name in flat):
        raise ConfigError(f"{key} is {shown(names)}, expected a list of module names")
    return [str(name) for name in flat]


def _all_except(scheme: Scheme, names: Sequence[str]) -> FindScheme:
    """Return a scheme finder: ``scheme`` for every module but those that have one of ``names`` among the dotted parts of
    their name.
    """
    skipped = tuple(f".{name.strip('.')}." for name in names if name.strip("."))

    def find(module: str) -> Scheme | None:
        dotted = f".{module}."
        return None if any(name in dotted for name in skipped) else scheme

    return find


_AUTO_ROUND_LAYOUTS = MappingProxyType({"auto_gptq": "gptq", "gptqmodel": "gptq_v2", "auto_awq": "awq"})
"""Layouts of AutoRound's packed words, by its names of them."""


def _only_stacks(config: Mapping[str, Any]) -> FindScheme:
    """Return no scheme for every module: only stacks of experts are quantized (:attr:`Quantization.stacks`)."""
    del config
    return lambda module: None


_STACK_SCHEMES: Mapping[str, Scheme] = MappingProxyType(
    {"mxfp4": Scheme(weight_format("mxfp4"), MicroscalingStorage(), _KEY)}
)
"""Schemes of the tensors with all experts of a layer, by the method that stores them so."""

_METHODS: Mapping[str, Callable[[Mapping[str, Any]], FindScheme]] = MappingProxyType(
    {
        "compressed-tensors": _compressed_tensors,
        "fp8": _fp8,
        "awq": _awq,
        "gptq": _gptq,
        "modelopt": _modelopt,
        "auto-round": _auto_round,
        "intel/auto-round": _auto_round,
        **dict.fromkeys(_STACK_SCHEMES, _only_stacks),
    }
)
