"""What a guided request's output must be: records that are checked when they're made. No library is needed for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from outrider.device.errors import ConfigError
from outrider.engine.requests.patterns import written
from outrider.engine.requests.schemas import supported_schema
from outrider.errors import shown

MAX_GUIDE_TEXT = 1 << 18
"""Characters of a schema, an expression or a grammar."""
MAX_CHOICES = 4096
"""Strings of a :class:`Choice`."""


@dataclass(frozen=True, slots=True)
class Guide:
    """What the text of an output must be, from its first character to its last. One of the classes below."""


@dataclass(frozen=True, slots=True)
class JsonSchema(Guide):
    """JSON that a schema accepts. ``schema``: its text, or what the text means (a mapping); kept as text.

    Objects have their properties in the schema's order, and no others than those that it names. Keywords that can't be
    enforced are an error (:mod:`outrider.engine.requests.schemas` lists those that can).
    """

    schema: str | Mapping[str, Any]

    def __post_init__(self) -> None:
        given: Any = self.schema
        if isinstance(given, str):
            given = _json(_text("the JSON schema", given))
        if not isinstance(given, Mapping):
            raise ConfigError(f"the JSON schema is {shown(self.schema)}; expected a JSON object, as text or as a mapping")
        object.__setattr__(self, "schema", _text("the JSON schema", _written(given)))
        _text("the JSON schema", self.written)

    @property
    def written(self) -> str:
        """As the compiler takes it."""
        return _written(supported_schema(json.loads(str(self.schema))))


@dataclass(frozen=True, slots=True)
class JsonObject(Guide):
    """Any JSON object."""


@dataclass(frozen=True, slots=True)
class Regex(Guide):
    """A text that the whole of ``pattern`` matches, as Python's ``re`` has it. Flags, look-around, back references, and
    anchors elsewhere than at its ends are an error.
    """

    pattern: str

    def __post_init__(self) -> None:
        _text("the regular expression", self.pattern)
        _text("the regular expression", self.written)

    @property
    def written(self) -> str:
        """As the compiler takes it."""
        return written(self.pattern, in_json=False)


@dataclass(frozen=True, slots=True)
class Ebnf(Guide):
    """A text of a context-free grammar, in the EBNF that llama.cpp calls GBNF. ``root``: the rule to begin with."""

    grammar: str
    root: str = "root"

    def __post_init__(self) -> None:
        _text("the grammar", self.grammar)
        _text("the grammar's root", self.root)


@dataclass(frozen=True, slots=True)
class Choice(Guide):
    """One of several texts."""

    options: Sequence[str]

    def __post_init__(self) -> None:
        given: Any = self.options
        listed = not isinstance(given, str) and isinstance(given, Sequence) and 0 < len(given) <= MAX_CHOICES
        if not listed or not all(isinstance(option, str) and option for option in given):
            raise ConfigError(f"the choice is {shown(given)}; expected 1 to {MAX_CHOICES} strings that aren't empty")
        _text("the choice", "".join(given))
        object.__setattr__(self, "options", tuple(dict.fromkeys(given)))

    @property
    def grammar(self) -> str:
        """The same as a grammar."""
        return "root ::= " + " | ".join(json.dumps(option, ensure_ascii=False) for option in self.options)


GUIDES: Final[tuple[type[Guide], ...]] = (JsonSchema, JsonObject, Regex, Ebnf, Choice)
"""All of them."""


def _text(what: str, given: object) -> str:
    if not isinstance(given, str) or not given or len(given) > MAX_GUIDE_TEXT:
        raise ConfigError(f"{what} is {shown(given)}; expected a text of 1 to {MAX_GUIDE_TEXT} characters")
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} has half a character at {error.start} (a lone surrogate)") from None
    if "\0" in given:
        raise ConfigError(f"{what} has a zero character at {given.index(chr(0))}; leave it out")
    return given


def _json(text: str) -> Any:
    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} isn't JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        said = "it's nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"the JSON schema {shown(text)} isn't JSON: {said}") from None


def _written(schema: Any) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the JSON schema can't be written as JSON: {error}") from None
