"""Check what a plugin declares about its CI: ``outrider ci-matrix`` copies the declaration into a workflow."""

from __future__ import annotations

from typing import Any

from outrider.device.errors import ConfigError
from outrider.device.plugin import CiDeclaration
from outrider_conformance.levels import parse_level


def declaration_fault(ci: object) -> str:
    """Return why a workflow can't use a plugin's declaration; empty for a usable declaration."""
    if not isinstance(ci, CiDeclaration):
        return f"it declares ci={ci!r}; expected a CiDeclaration"
    if not ci.runner_labels or not _is_words(ci.runner_labels):
        return f"it declares runner_labels={ci.runner_labels!r}; expected a tuple of at least one label, each one word"
    if not _is_words(ci.ranks_runner_labels):
        return f"it declares ranks_runner_labels={ci.ranks_runner_labels!r}; expected a tuple of labels, each one word"
    if not isinstance(ci.markers, tuple | list) or not all(map(_is_line, ci.markers)):
        return f"it declares markers={ci.markers!r}; expected a tuple of texts, each without line breaks"
    if ci.container is not None and not _is_word(ci.container):
        return f"it declares container={ci.container!r}; expected the name of an image, without spaces and line breaks"
    if ci.torch is not None and not _is_line(ci.torch):
        return f"it declares torch={ci.torch!r}; expected the address of a package index, or a requirement, on one line"
    if type(ci.device_count) is not int or ci.device_count < 1:
        return f"it declares device_count={ci.device_count!r}; expected a number of devices, at least 1"
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
