"""Records as JSON text, by the types of their fields: what ranks tell each other through a store. Nothing in it is ever run.

A type says how its values are written: there's no second list of fields. A dataclass is an object of its fields; where one of
several dataclasses may stand, an object of its name and that. A tuple is an array, bytes are base64, a tensor is base64 of
safetensors' bytes. Numbers that JSON hasn't are ``{"float": "inf"}``.
"""

from __future__ import annotations

import base64
import json
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from operator import index
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from outrider.device import DeviceError, OutriderError
from outrider.engine.requests.guides import GUIDES, Guide
from outrider.errors import one_line, shown

VERSION = 1
"""It rises when text that was right could be misunderstood."""
_VERSION, _RECORD, _FLOAT = "version", "record", "float"
_ONE_OF: Mapping[type, tuple[type, ...]] = {Guide: GUIDES}
"""Classes that stand for others."""
_PLAIN = None | bool | int | float | str | tuple[object, ...]
"""What a field of type ``object`` holds."""


class RecordError(DeviceError):
    """Text between ranks that isn't a record of this version, or a value that can't be written as one. The text says where.

    Ranks that don't understand each other can't go on.
    """

    device_lost = True


def encode(value: object, kind: Any) -> str:
    """A value of type ``kind`` as text. Raises :class:`RecordError` for one that isn't, wherever it's wrong."""
    return json.dumps({_VERSION: VERSION, _RECORD: _write(value, kind, "record")}, allow_nan=False, separators=(",", ":"))


def decode(text: str | bytes, kind: Any) -> Any:
    """The value again. Raises :class:`RecordError` for text that isn't one, unknown and missing fields, and wrong types."""
    try:
        read = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"a record of another rank can't be read: {one_line(str(error))}; expected JSON") from None
    if not isinstance(read, dict) or read.get(_VERSION) != VERSION or type(read.get(_VERSION)) is not int:
        raise RecordError(
            f"a record of another rank has no version {VERSION}: {shown(read)}; start all ranks with the same software"
        )
    if read.keys() != {_VERSION, _RECORD}:
        raise RecordError(f"a record of another rank has the keys {shown(sorted(read))}; expected {_VERSION} and {_RECORD}")
    return _read(read[_RECORD], kind, "record")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _constant(name: str) -> None:
    raise ValueError(f"{name} isn't JSON")


# -- types -------------------------------------------------------------------------------------------------------------


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    """The fields of a dataclass, with their types."""
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}


@cache
def _alternatives(kind: Any) -> tuple[Any, ...]:
    """The types that a value of ``kind`` may have: one, but for unions."""
    if kind is object:
        kind = _PLAIN
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(each for part in get_args(kind) for each in _alternatives(part))
    return _ONE_OF.get(kind, (kind,))


@cache
def _classes(kind: Any) -> Mapping[str, type]:
    """The dataclasses among the alternatives, by name."""
    return {each.__name__: each for each in _alternatives(kind) if isinstance(each, type) and is_dataclass(each)}


# -- to JSON -----------------------------------------------------------------------------------------------------------


def _write(value: Any, kind: Any, where: str) -> Any:
    classes = _classes(kind)
    if type(value) in classes.values():
        its: Any = type(value)
        hints = _hints(its)
        written = {name: _write(getattr(value, name), hint, f"{where}.{name}") for name, hint in hints.items()}
        return written if len(classes) == 1 else {type(value).__name__: written}
    for each in _alternatives(kind):
        written = _write_simple(value, each, where)
        if written is not _NOTHING:
            return written
    raise RecordError(f"{where} is {shown(value)}, which ranks can't tell each other; expected {_named(kind)}")


_NOTHING = object()


def _write_simple(value: Any, kind: Any, where: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if value is None or isinstance(value, bool):
        return value if kind in (type(None), bool) and isinstance(value, kind) else _NOTHING
    if kind is int and hasattr(value, "__index__") and not isinstance(value, Tensor):
        return index(value)
    if kind is float and isinstance(value, int | float):  # a float field may hold a whole number
        return value if math.isfinite(value) else {_FLOAT: repr(float(value))}
    if (kind is str and isinstance(value, str)) or (kind is Path and isinstance(value, Path)):
        return str(value)
    if origin is Literal:
        return value if value in arguments else _NOTHING
    if kind is bytes and isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if kind is Tensor and isinstance(value, Tensor):
        from safetensors.torch import save

        return base64.b64encode(save({"": value.contiguous()})).decode()
    if origin in (tuple, Sequence) and isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_write(each, part, f"{where}[{at}]") for at, (each, part) in enumerate(_parts(value, kind, where))]
    if origin is Mapping and arguments[0] is str and isinstance(value, Mapping):
        return {_write(key, str, where): _write(each, arguments[1], f"{where}[{key!r}]") for key, each in value.items()}
    return _NOTHING


def _parts(value: Sequence[Any], kind: Any, where: str) -> list[tuple[Any, Any]]:
    """Each item with its type."""
    arguments = get_args(kind)
    if get_origin(kind) is Sequence or arguments[-1] is Ellipsis:
        return [(each, arguments[0]) for each in value]
    if len(value) != len(arguments):
        raise RecordError(f"{where} has {len(value)} items; expected {len(arguments)}")
    return list(zip(value, arguments, strict=True))


# -- from JSON ---------------------------------------------------------------------------------------------------------


def _read(given: Any, kind: Any, where: str) -> Any:
    classes = _classes(kind)
    if isinstance(given, dict) and classes:
        if len(classes) == 1:
            return _read_fields(given, next(iter(classes.values())), where)
        name = next(iter(given), "")
        if len(given) == 1 and name in classes and isinstance(given[name], dict):
            return _read_fields(given[name], classes[name], f"{where}.{name}")
        raise RecordError(f"{where} of a record is {shown(given)}; expected one of {', '.join(classes)}")
    for each in _alternatives(kind):
        found = _read_simple(given, each, where)
        if found is not _NOTHING:
            return found
    raise RecordError(f"{where} of a record is {shown(given)}; expected {_named(kind)}")


def _read_fields(given: dict[str, Any], kind: Any, where: str) -> Any:
    hints = _hints(kind)
    for what, names in (("unknown", given.keys() - hints), ("missing", hints.keys() - given)):
        if names:
            raise RecordError(f"{where} of a record: {kind.__name__} has {what} fields: {shown(sorted(names))}")
    values = {name: _read(given[name], hint, f"{where}.{name}") for name, hint in hints.items()}
    try:
        return kind(**values)
    except (OutriderError, TypeError, ValueError) as error:
        raise RecordError(f"{where} of a record isn't a {kind.__name__}: {error}") from error


def _read_simple(given: Any, kind: Any, where: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in (type(None), bool, int, str):
        return given if type(given) is kind else _NOTHING
    if kind is float:
        return _read_float(given)
    if kind is Path:
        return Path(given) if isinstance(given, str) else _NOTHING
    if origin is Literal:
        return given if isinstance(given, str) and given in arguments else _NOTHING
    if kind in (bytes, Tensor):
        return _read_bytes(given, kind, where) if isinstance(given, str) else _NOTHING
    if origin in (tuple, Sequence) and isinstance(given, list):
        parts = _parts(given, kind, where)
        return tuple(_read(each, part, f"{where}[{at}]") for at, (each, part) in enumerate(parts))
    if origin is Mapping and arguments[0] is str and isinstance(given, dict):
        return {key: _read(each, arguments[1], f"{where}[{key!r}]") for key, each in given.items()}
    return _NOTHING


def _read_float(given: Any) -> Any:
    if isinstance(given, dict) and given.keys() == {_FLOAT} and given[_FLOAT] in ("inf", "-inf", "nan"):
        return float(given[_FLOAT])
    finite = type(given) is int or (type(given) is float and math.isfinite(given))  # 1e999 is infinite, and JSON
    return given if finite else _NOTHING


def _read_bytes(given: str, kind: type, where: str) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        found = base64.b64decode(given, validate=True)
        if kind is bytes:
            return found
        (tensor,) = load(found).values()
    except (ValueError, KeyError, SafetensorError) as error:
        raise RecordError(f"{where} of a record can't be read: {one_line(str(error))}; expected base64 of it") from None
    return tensor


def _named(kind: Any) -> str:
    alternatives = _alternatives(kind)
    return " or ".join(
        str(each if get_origin(each) is not None else getattr(each, "__name__", each)) for each in alternatives
    )
