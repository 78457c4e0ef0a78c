"""Whether the fields of a description have the types that its class declares."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from outrider.device.plugin import PluginInfo
from outrider.errors import shown


def wrong_field(info: PluginInfo, declared: type[PluginInfo]) -> str:
    """The first field whose value isn't of its declared type, as ``field=value, expected type``; empty where all fit."""
    return _wrong(info, declared, "")


def _wrong(record: Any, declared: type, within: str) -> str:
    hints = typing.get_type_hints(declared)
    for field in dataclasses.fields(declared):
        value, hint = getattr(record, field.name), hints[field.name]
        name = f"{within}{field.name}"
        if dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, hint):
            inner = _wrong(value, hint, f"{name}.")
            if inner:
                return inner
        elif not _fits(value, hint):
            return f"{name}={shown(value)}, expected {_named(hint)}"
    return ""


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is tuple:  # tuple[X, ...] is the only kind that descriptions have
        return isinstance(value, tuple) and all(_fits(item, arguments[0]) for item in value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            return False
        return all(_fits(key, arguments[0]) and _fits(item, arguments[1]) for key, item in value.items())
    if hint is int and isinstance(value, bool):
        return False
    return isinstance(value, hint)


def _named(hint: Any) -> str:
    name = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    return name.replace("collections.abc.", "").replace("typing.", "")
