"""Conversion of records to JSON text and back, by the types of their fields. Decoding never executes anything.

The format follows from the type hints alone:

- a dataclass is an object of its fields; if a type has several dataclasses, an object {class name: fields};
- a tuple is an array;
- bytes are base64, and a tensor is base64 of its safetensors bytes;
- a float that JSON lacks is an object such as ``{"float": "inf"}``.
"""

from __future__ import annotations

import base64
import json
import math
import operator
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from outrider.device import DeviceError, OutriderError
from outrider.engine.requests.guides import GUIDES, Guide
from outrider.errors import one_line, shown

VERSION = 1
"""The version of the format. It increases with each change that makes old text ambiguous."""
_VERSION, _RECORD, _FLOAT = "version", "record", "float"
_SUBCLASSES: Mapping[type, tuple[type, ...]] = {Guide: GUIDES}
"""The classes that a field of an abstract class may hold."""
_TYPES_OF_OBJECT = None | bool | int | float | str | tuple[object, ...]
"""The types that a field of type ``object`` may hold."""


class RecordError(DeviceError):
    """Invalid record text, or a value that a record can't hold. The message has the path of the wrong field.

    The error stops the engine, because the ranks can't agree any more.
    """

    device_lost = True


def encode(value: object, kind: Any) -> str:
    """Return ``value`` as text. Raises :class:`RecordError` if any part of it doesn't have the type ``kind``."""
    return json.dumps({_VERSION: VERSION, _RECORD: to_json(value, kind)}, allow_nan=False, separators=(",", ":"))


def to_json(value: object, kind: Any) -> Any:
    """Return ``value`` as plain data for JSON, without the version. Raises :class:`RecordError` as :func:`encode` does."""
    return _write(value, kind, "record")


def from_json(json_value: Any, kind: Any) -> Any:
    """Return the value of type ``kind`` that :func:`to_json` converted. Raises :class:`RecordError`.

    The error's cause is the error of the dataclass, if that refused its fields.
    """
    return _read(json_value, kind, "record")


def decode(text: str | bytes, kind: Any) -> Any:
    """Return the value of type ``kind`` that :func:`encode` wrote.

    Raises :class:`RecordError` for text that isn't JSON, another version, unknown or missing fields, and wrong types.
    """
    try:
        envelope = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"a record of another rank can't be read: {one_line(str(error))}; expected JSON") from None
    if not isinstance(envelope, dict) or envelope.get(_VERSION) != VERSION or type(envelope.get(_VERSION)) is not int:
        raise RecordError(
            f"a record of another rank has no version {VERSION}: {shown(envelope)}; start all ranks with the same software"
        )
    if envelope.keys() != {_VERSION, _RECORD}:
        raise RecordError(
            f"a record of another rank has the keys {shown(sorted(envelope))}; expected {_VERSION} and {_RECORD}"
        )
    return from_json(envelope[_RECORD], kind)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a key is there twice")
    return unique


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} isn't JSON")


# -- types -------------------------------------------------------------------------------------------------------------


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    """Return the field types of a dataclass, by field name."""
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}


@cache
def _alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the types that a value of ``kind`` may have: the members of a union, else one type."""
    if kind is object:
        kind = _TYPES_OF_OBJECT
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(each for part in get_args(kind) for each in _alternatives(part))
    return _SUBCLASSES.get(kind, (kind,))


@cache
def _classes(kind: Any) -> Mapping[str, type]:
    """Return the dataclasses among the alternatives of ``kind``, by name."""
    return {each.__name__: each for each in _alternatives(kind) if isinstance(each, type) and is_dataclass(each)}


# -- to JSON -----------------------------------------------------------------------------------------------------------


def _write(value: Any, kind: Any, path: str) -> Any:
    classes = _classes(kind)
    if type(value) in classes.values():
        record_type: Any = type(value)
        hints = _hints(record_type)
        written = {name: _write(getattr(value, name), hint, f"{path}.{name}") for name, hint in hints.items()}
        return written if len(classes) == 1 else {type(value).__name__: written}
    for each in _alternatives(kind):
        written = _write_simple(value, each, path)
        if written is not _NO_MATCH:
            return written
    raise RecordError(f"{path} is {shown(value)}, which a record can't hold; expected {_type_names(kind)}")


_NO_MATCH = object()


def _write_simple(value: Any, kind: Any, path: str) -> Any:
    """Return the JSON form of a value that isn't a dataclass, or ``_NO_MATCH`` if it doesn't have the type ``kind``."""
    origin, arguments = get_origin(kind), get_args(kind)
    if value is None or isinstance(value, bool):
        return value if kind in (type(None), bool) and isinstance(value, kind) else _NO_MATCH
    if kind is int and hasattr(value, "__index__") and not isinstance(value, Tensor):
        return operator.index(value)
    if kind is float and isinstance(value, int | float):  # Python allows an int in a float field
        return value if math.isfinite(value) else {_FLOAT: repr(float(value))}
    if (kind is str and isinstance(value, str)) or (kind is Path and isinstance(value, Path)):
        return str(value)
    if origin is Literal:
        return value if value in arguments else _NO_MATCH
    if kind is bytes and isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if kind is Tensor and isinstance(value, Tensor):
        from safetensors.torch import save

        return base64.b64encode(save({"": value.contiguous()})).decode()
    if origin in (tuple, Sequence) and isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_write(item, part, f"{path}[{index}]") for index, (item, part) in enumerate(_parts(value, kind, path))]
    if origin is Mapping and arguments[0] is str and isinstance(value, Mapping):
        return {_write(key, str, path): _write(each, arguments[1], f"{path}[{key!r}]") for key, each in value.items()}
    return _NO_MATCH


def _parts(value: Sequence[Any], kind: Any, path: str) -> list[tuple[Any, Any]]:
    """Return the pairs (item, type) of a sequence."""
    arguments = get_args(kind)
    if get_origin(kind) is Sequence or arguments[-1] is Ellipsis:
        return [(item, arguments[0]) for item in value]
    if len(value) != len(arguments):
        raise RecordError(f"{path} has {len(value)} items; expected {len(arguments)}")
    return list(zip(value, arguments, strict=True))


# -- from JSON ---------------------------------------------------------------------------------------------------------


def _read(json_value: Any, kind: Any, path: str) -> Any:
    classes = _classes(kind)
    if isinstance(json_value, dict) and classes:
        if len(classes) == 1:
            return _read_fields(json_value, next(iter(classes.values())), path)
        name = next(iter(json_value), "")
        if len(json_value) == 1 and name in classes and isinstance(json_value[name], dict):
            return _read_fields(json_value[name], classes[name], f"{path}.{name}")
        raise RecordError(f"{path} of a record is {shown(json_value)}; expected one of {', '.join(classes)}")
    for each in _alternatives(kind):
        value = _read_simple(json_value, each, path)
        if value is not _NO_MATCH:
            return value
    raise RecordError(f"{path} of a record is {shown(json_value)}; expected {_type_names(kind)}")


def _read_fields(json_fields: dict[str, Any], kind: Any, path: str) -> Any:
    hints = _hints(kind)
    for defect, names in (("unknown", json_fields.keys() - hints), ("missing", hints.keys() - json_fields)):
        if names:
            raise RecordError(f"{path} of a record: {kind.__name__} has {defect} fields: {shown(sorted(names))}")
    values = {name: _read(json_fields[name], hint, f"{path}.{name}") for name, hint in hints.items()}
    try:
        return kind(**values)
    except (OutriderError, TypeError, ValueError) as error:
        raise RecordError(f"{path} of a record isn't a {kind.__name__}: {error}") from error


def _read_simple(json_value: Any, kind: Any, path: str) -> Any:
    """Return a value that isn't a dataclass, or ``_NO_MATCH`` if ``json_value`` doesn't have the type ``kind``."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in (type(None), bool, int, str):
        return json_value if type(json_value) is kind else _NO_MATCH
    if kind is float:
        return _read_float(json_value)
    if kind is Path:
        return Path(json_value) if isinstance(json_value, str) else _NO_MATCH
    if origin is Literal:
        return json_value if isinstance(json_value, str) and json_value in arguments else _NO_MATCH
    if kind in (bytes, Tensor):
        return _read_bytes(json_value, kind, path) if isinstance(json_value, str) else _NO_MATCH
    if origin in (tuple, Sequence) and isinstance(json_value, list):
        parts = _parts(json_value, kind, path)
        return tuple(_read(item, part, f"{path}[{index}]") for index, (item, part) in enumerate(parts))
    if origin is Mapping and arguments[0] is str and isinstance(json_value, dict):
        return {key: _read(item, arguments[1], f"{path}[{key!r}]") for key, item in json_value.items()}
    return _NO_MATCH


def _read_float(json_value: Any) -> Any:
    if isinstance(json_value, dict) and json_value.keys() == {_FLOAT} and json_value[_FLOAT] in ("inf", "-inf", "nan"):
        return float(json_value[_FLOAT])
    # json.loads returns inf for 1e999, which is valid JSON.
    is_finite = type(json_value) is int or (type(json_value) is float and math.isfinite(json_value))
    return json_value if is_finite else _NO_MATCH


def _read_bytes(text: str, kind: type, path: str) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        data = base64.b64decode(text, validate=True)
        if kind is bytes:
            return data
        (tensor,) = load(data).values()
    except (ValueError, KeyError, SafetensorError) as error:
        raise RecordError(f"{path} of a record can't be read: {one_line(str(error))}; expected base64 of it") from None
    return tensor


def _type_names(kind: Any) -> str:
    alternatives = _alternatives(kind)
    return " or ".join(
        str(each if get_origin(each) is not None else getattr(each, "__name__", each)) for each in alternatives
    )
