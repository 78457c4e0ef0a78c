"""Check of a plugin's CI declaration, which ``outrider ci-matrix`` copies into a workflow."""

from __future__ import annotations

from typing import Any

from outrider.device.errors import ConfigError
from outrider.device.plugin import CiDeclaration
from outrider_conformance.levels import parse_level


def declaration_fault(ci: object) -> str:
    """Return the reason why a workflow can't use a plugin's CI declaration; empty for a usable declaration."""
    if not isinstance(ci, CiDeclaration):
        return f"it declares ci={ci!r}; expected a CiDeclaration"
    checks = {
        "runner_labels": (
            bool(ci.runner_labels) and _is_words(ci.runner_labels),
            "a tuple of labels, at least one, each one word",
        ),
        "ranks_runner_labels": (_is_words(ci.ranks_runner_labels), "a tuple of labels, each one word"),
        "markers": (isinstance(ci.markers, tuple | list) and all(map(_is_line, ci.markers)), "a tuple of lines of text"),
        "container": (ci.container is None or _is_word(ci.container), "the name of an image, without spaces and line breaks"),
        "torch": (ci.torch is None or _is_line(ci.torch), "the address of a package index or a requirement, on one line"),
        "device_count": (type(ci.device_count) is int and ci.device_count > 0, "a number of devices, at least 1"),
    }
    for name, (is_usable, expected) in checks.items():
        if not is_usable:
            return f"it declares {name}={getattr(ci, name)!r}; expected {expected}"
    try:
        parse_level(str(ci.level))
    except ConfigError as error:
        return f"it declares {error}"
    return ""


def _is_words(labels: object) -> bool:
    return isinstance(labels, tuple | list) and all(_is_word(label) and "," not in label for label in labels)


def _is_word(value: Any) -> bool:
    return _is_line(value) and " " not in value


def _is_line(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and bool(value.strip())
