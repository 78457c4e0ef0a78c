"""Conversion of messages to plain data for JSON and back, by the types of their fields. Decoding never executes anything.

All messages between processes use it: between ranks, between a server and its engine, and between prefill and decode servers.
The format follows from the type hints alone:

- a dataclass is an object of its fields, a named tuple an array of them; if a type has several such classes, the value is
  an object {class name: fields};
- a tuple is an array;
- bytes are base64; a tensor is an object of its dtype, its shape, and base64 of its bytes or the index of a blob that travels
  with the message;
- a float that JSON lacks is an object such as ``{"float": "inf"}``.
"""

from __future__ import annotations

import base64
import math
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from outrider.device import OutriderError
from outrider.engine.guides.guides import GUIDES, Guide
from outrider.errors import shown

Blobs: TypeAlias = list[bytes] | None
Write: TypeAlias = Callable[[Any, Blobs], Any]
Read: TypeAlias = Callable[[Any, Sequence[bytes]], Any]

_FLOAT = "float"
_MAX_TENSOR_DIMS = 8
_SUBCLASSES: Mapping[type, tuple[type, ...]] = {Guide: GUIDES}
"""The classes that a field of an abstract class may hold."""
_TYPES_OF_OBJECT = None | bool | int | float | str | tuple[object, ...]
"""The types that a field of type ``object`` may hold."""
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    )
}


class MessageError(OutriderError):
    """A value that a message can't hold, or plain data that isn't a message. The text has the path of the wrong field, which
    grows towards the outermost field while the error passes.
    """

    path = ""

    def __str__(self) -> str:
        return f"record{self.path} {self.args[0]}"


def to_plain(value: object, kind: Any, blobs: Blobs = None) -> Any:
    """Return ``value`` as plain data for JSON. Raises :class:`MessageError` if any part doesn't have the type ``kind``.

    The bytes of tensors are appended to ``blobs``. Without ``blobs``, they are part of the result.
    """
    return _writer(kind)(value, blobs)


def from_plain(plain: Any, kind: Any, blobs: Sequence[bytes] = ()) -> Any:
    """Return the value of type ``kind`` that :func:`to_plain` wrote; tensors are new host tensors.

    Raises :class:`MessageError` for unknown or missing fields and wrong types. Its cause is the error of a class that refuses
    the values of its fields.
    """
    return _reader(kind)(plain, blobs)


# -- types -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _FieldFormat:
    """The conversion of the values of one type. ``write`` or ``read`` is None if the value already is plain data."""

    accepts: type | tuple[type, ...]
    plain: tuple[type, ...]
    """The types that the encoded value may have."""
    write: Write | None = None
    read: Read | None = None
    refuses: tuple[type, ...] = ()
    """Subclasses of ``accepts`` that other formats convert, such as bool under int."""


@cache
def _alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the members of the union ``kind``, or ``kind`` alone if it is no union."""
    if kind is object:
        kind = _TYPES_OF_OBJECT
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(each for part in get_args(kind) for each in _alternatives(part))
    return _SUBCLASSES.get(kind, (kind,))


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "_fields"))


@cache
def _formats(kind: Any) -> tuple[_FieldFormat, ...]:
    alternatives = _alternatives(kind)
    records = [each for each in alternatives if _is_record(each)]
    found = [format for each in alternatives if not _is_record(each) and (format := _format(each)) is not None]
    if len(records) == 1:
        return (*found, _record_format(records[0]))
    return (*found, *([_named_records_format({each.__name__: each for each in records})] if records else []))


def _format(kind: Any) -> _FieldFormat | None:
    """Return the format of values of ``kind`` that are no dataclass or named tuple; None for a type whose values are never
    sent.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in (type(None), bool, str):
        return _FieldFormat(kind, (kind,), None if kind is not str else lambda value, _: str(value))
    if kind is int:
        return _FieldFormat(int, (int,), lambda value, _: operator.index(value), refuses=(bool,))
    if kind is float:  # Python allows an int in a float field
        return _FieldFormat((float, int), (float, int, dict), _write_float, _read_float, refuses=(bool,))
    if kind is bytes:
        return _FieldFormat(
            bytes, (str,), lambda value, _: base64.b64encode(value).decode(), lambda plain, _: _decoded(plain)
        )
    if kind is Tensor:
        return _FieldFormat(Tensor, (dict,), _write_tensor, _read_tensor)
    if origin is Literal:
        check = _one_of(arguments)
        return _FieldFormat(str, (str,), check, check)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _FieldFormat(kind, (str,), lambda value, _: value.value, _member_of(kind))
    if origin in (tuple, Sequence):
        return _sequence_format(kind)
    if origin is Mapping and arguments[0] is str:
        return _mapping_format(arguments[1])
    return None


@cache
def _writer(kind: Any) -> Write:
    formats = _formats(kind)
    by_type: dict[type, Write | None] = {each: None for each in (type(None), bool, int, str) if _is_plain(each, formats)}

    def write(value: Any, blobs: Blobs) -> Any:
        value_type = type(value)
        if value_type not in by_type:
            by_type[value_type] = _format_of(value, formats, kind).write
        convert = by_type[value_type]
        return value if convert is None else convert(value, blobs)

    return write


def _is_plain(value_type: type, formats: Sequence[_FieldFormat]) -> bool:
    """Return True if one of ``formats`` sends values of exactly ``value_type`` unchanged."""
    return any(each.accepts is value_type and value_type in each.plain and each.read is None for each in formats)


def _format_of(value: Any, formats: Sequence[_FieldFormat], kind: Any) -> _FieldFormat:
    for each in formats:
        if isinstance(value, each.accepts) and not isinstance(value, each.refuses):
            return each
        if each.accepts is int and hasattr(value, "__index__") and not isinstance(value, bool | Tensor):
            return each
    raise MessageError(f"is {shown(value)}, which a message can't hold; expected {_type_names(kind)}")


@cache
def _reader(kind: Any) -> Read:
    formats = _formats(kind)
    by_type: dict[type, list[Read | None]] = {}
    for each in formats:
        for plain_type in each.plain:
            by_type.setdefault(plain_type, []).append(each.read)

    def read(plain: Any, blobs: Sequence[bytes]) -> Any:
        found = by_type.get(type(plain))
        if found is None:
            raise MessageError(f"is {shown(plain)}; expected {_type_names(kind)}")
        for convert in found[:-1]:
            try:
                return plain if convert is None else convert(plain, blobs)
            except MessageError:
                continue
        return plain if found[-1] is None else found[-1](plain, blobs)

    return read


def _type_names(kind: Any) -> str:
    return " or ".join(
        str(each if get_origin(each) is not None else getattr(each, "__name__", each)) for each in _alternatives(kind)
    )


# -- records, sequences, mappings ----------------------------------------------------------------------------------------


def _convert_part(step: str | int, convert: Callable[[Any, Any], Any], part: Any, blobs: Any) -> Any:
    """Convert one part of a value. ``step`` is the name or the index of the part, for the path of an error."""
    try:
        return convert(part, blobs)
    except MessageError as error:
        error.path = (f".{step}" if isinstance(step, str) else f"[{step}]") + error.path
        raise


def _record_format(kind: Any) -> _FieldFormat:
    is_array = hasattr(kind, "_fields")

    def write(value: Any, blobs: Blobs) -> Any:
        items = _field_converters(kind, _writer).items()
        written = {name: _convert_part(name, convert, getattr(value, name), blobs) for name, convert in items}
        return list(written.values()) if is_array else written

    def read(plain: Any, blobs: Sequence[bytes]) -> Any:
        readers = _field_converters(kind, _reader)
        if is_array:
            _check_count(plain, len(readers))
            plain = dict(zip(readers, plain, strict=True))
        for defect, names in (("unknown", plain.keys() - readers.keys()), ("missing", readers.keys() - plain.keys())):
            if names:
                raise MessageError(f"is wrong: {kind.__name__} has {defect} fields: {shown(sorted(names))}")
        values = {name: _convert_part(name, convert, plain[name], blobs) for name, convert in readers.items()}
        try:
            return kind(**values)
        except (OutriderError, TypeError, ValueError) as error:
            raise MessageError(f"isn't a {kind.__name__}: {error}") from error

    return _FieldFormat(kind, (list if is_array else dict,), write, read)


@cache
def _field_converters(kind: Any, converter: Callable[[Any], Any]) -> Mapping[str, Any]:
    hints = get_type_hints(kind)
    names = kind._fields if hasattr(kind, "_fields") else [each.name for each in fields(kind)]
    return {name: converter(hints[name]) for name in names}


def _named_records_format(classes: Mapping[str, Any]) -> _FieldFormat:
    """Return the format of several classes: an object {class name: fields}."""

    def write(value: Any, blobs: Blobs) -> Any:
        name = type(value).__name__
        return {name: _writer(classes[name])(value, blobs)}

    def read(plain: Any, blobs: Sequence[bytes]) -> Any:
        name = next(iter(plain), "")
        if len(plain) != 1 or name not in classes:
            raise MessageError(f"is {shown(plain)}; expected one of {', '.join(classes)}")
        return _convert_part(name, _reader(classes[name]), plain[name], blobs)

    return _FieldFormat(tuple(classes.values()), (dict,), write, read)


def _sequence_format(kind: Any) -> _FieldFormat:
    arguments = get_args(kind)
    is_fixed = get_origin(kind) is tuple and arguments[-1] is not Ellipsis
    # A list of values that are plain data already, such as tokens, is copied as a whole.
    plain_item = arguments[0] if not is_fixed and arguments[0] in (int, str) else None

    def convert(items: Any, blobs: Any, converter: Callable[[Any], Any]) -> Sequence[Any]:
        if plain_item is not None and set(map(type, items)) <= {plain_item}:
            return items  # type: ignore[no-any-return]
        kinds = arguments if is_fixed else arguments[:1] * len(items)
        _check_count(items, len(kinds))
        return [
            _convert_part(i, converter(each), item, blobs) for i, (item, each) in enumerate(zip(items, kinds, strict=True))
        ]

    return _FieldFormat(
        Sequence,
        (list,),
        lambda value, blobs: list(convert(value, blobs, _writer)),
        lambda plain, blobs: tuple(convert(plain, blobs, _reader)),
        refuses=(str, bytes),
    )


def _check_count(items: Sequence[Any], count: int) -> None:
    if len(items) != count:
        raise MessageError(f"has {len(items)} items; expected {count}")


def _mapping_format(kind: Any) -> _FieldFormat:
    def convert(values: Mapping[str, Any], blobs: Any, converter: Callable[[Any], Any]) -> dict[str, Any]:
        return {_writer(str)(key, None): _convert_part(key, converter(kind), value, blobs) for key, value in values.items()}

    return _FieldFormat(
        Mapping,
        (dict,),
        lambda value, blobs: convert(value, blobs, _writer),
        lambda plain, blobs: convert(plain, blobs, _reader),
    )


# -- single values -----------------------------------------------------------------------------------------------------


def _write_float(value: float, blobs: Blobs) -> Any:
    del blobs
    return value if math.isfinite(value) else {_FLOAT: repr(float(value))}


def _read_float(plain: Any, blobs: Sequence[bytes]) -> Any:
    del blobs
    if isinstance(plain, dict) and plain.keys() == {_FLOAT} and plain[_FLOAT] in ("inf", "-inf", "nan"):
        return float(plain[_FLOAT])
    # json.loads returns inf for 1e999, which is valid JSON.
    if isinstance(plain, dict) or not math.isfinite(plain):
        raise MessageError(f"is {shown(plain)}; expected float")
    return plain


def _one_of(words: Sequence[str]) -> Callable[[Any, Any], str]:
    def check(value: Any, _: Any) -> str:
        if value not in words:
            raise MessageError(f"is {shown(value)}; expected one of {', '.join(map(repr, words))}")
        return str(value)

    return check


def _member_of(kind: type[Enum]) -> Read:
    def read(plain: Any, _: Any) -> Enum:
        try:
            return kind(plain)
        except ValueError as error:
            raise MessageError(f"is {shown(plain)}; expected {kind.__name__}") from error

    return read


def _write_tensor(value: Tensor, blobs: Blobs) -> dict[str, Any]:
    host = torch.empty(value.shape, dtype=value.dtype)
    host.copy_(value)
    data = host.view(-1).view(torch.uint8).numpy().tobytes() if host.numel() else b""
    described = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if blobs is None:
        return {**described, "data": base64.b64encode(data).decode()}
    blobs.append(data)
    return {**described, "blob": len(blobs) - 1}


def _read_tensor(plain: Any, blobs: Sequence[bytes]) -> Tensor:
    try:
        dtype, shape = _DTYPES[plain["dtype"]], plain["shape"]
        data = blobs[plain["blob"]] if "blob" in plain else _decoded(plain["data"])
        if not all(type(size) is int and size >= 0 for size in shape) or len(shape) > _MAX_TENSOR_DIMS:
            raise ValueError(f"{shown(shape)} is no shape")
        if math.prod(shape) * dtype.itemsize != len(data):
            raise ValueError(f"a tensor of shape {shape} came with {len(data)} bytes")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise MessageError(f"isn't a Tensor: {type(error).__name__}: {error}") from None
    tensor = torch.empty(shape, dtype=dtype)
    if data:
        tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return tensor


def _decoded(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise MessageError(f"can't be read: {error}; expected base64") from None
