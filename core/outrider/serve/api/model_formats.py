"""The table of formats by model family, ``formats.toml``, and the choice of a format for a checkpoint."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType
from typing import Any, Final, Literal

import regex

from outrider.device import ConfigError

_JSON_NAME = r'"name"\s*:\s*"(?P<name>[^"\\]{1,256})"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
NAMED_ARGUMENTS = regex.compile(rf'\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?{_JSON_NAME}(?=\{{)')
"""Start of a JSON object that is a call: everything before the object of the arguments."""
_PROMPT_TAIL = 256
"""Number of characters at the end of a prompt in which :meth:`ModelFormat.open_reasoning` looks for the start of
reasoning.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatRegion:
    """A kind of region in a model's text, such as the reasoning or a tool call.

    All regular expressions match a text as soon as they have it: none ends with an optional part.
    """

    kind: Literal["content", "reasoning", "call"]
    starts: tuple[str, ...]
    """Literals with which ``head`` may begin."""
    head: str
    """Regular expression of the text from the start to the body. The groups ``name`` and ``id`` are those of a call."""
    body: Literal["text", "json", "object", "parameters", "elements", "python", "pairs"] = "text"
    """What follows the head.

    - ``text``: reasoning up to one of ``ends``; content up to the next region.
    - ``json``: the arguments, a JSON object.
    - ``object``: a JSON object with the name and the arguments.
    - ``parameters``: one tagged value for each argument, up to one of ``ends``.
    - ``elements``: one element for each argument, named by its tag. Objects and lists are elements in elements. ``parameter``
      is the tag that begins or, with the group ``close``, ends an element or the call; ``value_ends`` begins each tag.
    - ``python``: the keyword arguments of a Python call, each after ``parameter``, up to one of ``ends``.
    - ``pairs``: an object whose keys have no quotes and whose texts stand between ``ends[0]``.
    """
    ends: tuple[str, ...] = ()
    """Literals that end reasoning, or regular expressions that end a call with ``parameters``."""
    parameter: str = ""
    """Regular expression before a tagged value. The group ``key`` is its name; ``text`` matches if it is text."""
    value_ends: tuple[str, ...] = ()
    """Literals after a tagged value. If one begins with a line break, the value's first line break isn't part of it."""
    value_limits: tuple[str, ...] = ()
    """Literals that may show that a tagged value has ended although its end is missing. They aren't part of the value."""
    limit: str = ""
    """Regular expression of the text at a value limit. The group ``key`` is the next parameter's name."""
    again: str = ""
    """Regular expression between this call and the next ``object``, or up to the arguments of the next ``python`` call."""
    tails: tuple[str, ...] = ()
    """Regular expressions of text after a call that belongs to it. Each may be absent."""
    only_first: bool = False
    """True if the region must begin the answer."""


def _regions(group: str, **defaults: str) -> Mapping[str, tuple[FormatRegion, ...]]:
    """Return the regions of one group of the table, by the name of the format. ``none`` has no regions."""
    formats = {"none": ()} | {
        name: tuple(FormatRegion(**{**defaults, **{key: _fixed(value) for key, value in row.items()}}) for row in rows)
        for name, rows in _TABLE[group].items()
    }
    return MappingProxyType(formats | {alias: formats[name] for alias, name in _TABLE["aliases"].items() if name in formats})


def _fixed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


_TABLE: Final[Mapping[str, Any]] = MappingProxyType(
    tomllib.loads(resources.files("outrider.serve.api").joinpath("formats.toml").read_text(encoding="utf-8"))
)
TOOL_FORMATS: Final = _regions("tools", kind="call")
"""Regions of tool calls by the name of the format."""
REASONING_FORMATS: Final = _regions("reasoning")
"""Regions of reasoning, and of control tokens around content, by the name of the format."""


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """The formats of one model's text: its regions of reasoning and of tool calls."""

    tool_format: str
    reasoning_format: str

    @property
    def regions(self) -> tuple[FormatRegion, ...]:
        """All regions of the model's text, those of calls first: their heads are more specific."""
        return TOOL_FORMATS[self.tool_format] + REASONING_FORMATS[self.reasoning_format]

    @property
    def literals(self) -> str:
        """A text that contains each literal of the regions, from which the tokenizer finds the special tokens to
        spell out.
        """
        patterns = [
            pattern
            for region in self.regions
            for pattern in (*region.starts, region.head, *region.ends, region.parameter, *region.value_ends, *region.tails)
        ]
        return "\n".join(patterns + [regex.sub(r"\\(.)", r"\1", pattern) for pattern in patterns])

    def open_reasoning(self, prompt: str) -> FormatRegion | None:
        """Return the region of the reasoning in which ``prompt`` ends, or None if it ends elsewhere."""
        tail = prompt[-_PROMPT_TAIL:]
        reasoning = (region for region in self.regions if region.kind == "reasoning")
        return next((region for region in reasoning if regex.search(rf"(?:{region.head})\s*\Z", tail)), None)


def choose_format(tool_format: str | None, reasoning_format: str | None, chat_template: str) -> ModelFormat:
    """Return the format of a model. None stands for the format that the chat template shows.

    Raises :class:`ConfigError` for an unknown name.
    """
    for option, name, known in (
        ("--tool-format", tool_format, TOOL_FORMATS),
        ("--reasoning-format", reasoning_format, REASONING_FORMATS),
    ):
        if name is not None and name not in known:
            raise ConfigError(f"{option} is {name!r}; expected one of {', '.join(known)}")
    shown: Mapping[str, str] = next(
        (row for row in _TABLE["marks"] if all(text in chat_template for text in row["texts"])), {}
    )
    return ModelFormat(tool_format or shown.get("tool", "none"), reasoning_format or shown.get("reasoning", "none"))
