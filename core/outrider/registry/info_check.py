"""Type check of the fields of a plugin's description."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from outrider.errors import shown


def wrong_field(record: Any, declared: type, prefix: str = "") -> str:
    """Return ``field=value, expected type`` for the first field of another type than declared; empty if all are right.

    ``prefix``: the path of a nested record, for its field names.
    """
    hints = typing.get_type_hints(declared)
    for field in dataclasses.fields(declared):
        value, hint = getattr(record, field.name), hints[field.name]
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, hint):
            nested = wrong_field(value, hint, f"{name}.")
            if nested:
                return nested
        elif not _has_type(value, hint):
            return f"{name}={shown(value)}, expected {_type_name(hint)}"
    return ""


def _has_type(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_has_type(value, one) for one in arguments)
    if origin is tuple:  # descriptions have no other tuples than tuple[X, ...]
        return isinstance(value, tuple) and all(_has_type(item, arguments[0]) for item in value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            return False
        return all(_has_type(key, arguments[0]) and _has_type(item, arguments[1]) for key, item in value.items())
    if hint is int and isinstance(value, bool):
        return False
    return isinstance(value, hint)


def _type_name(hint: Any) -> str:
    name = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    return name.replace("collections.abc.", "").replace("typing.", "")
