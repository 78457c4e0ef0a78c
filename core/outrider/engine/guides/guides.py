"""Guides: validated records that say which texts a guided request may generate. They need no grammar library."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from outrider.device.errors import ConfigError
from outrider.engine.guides.patterns import to_xgrammar_syntax
from outrider.engine.guides.schemas import supported_schema
from outrider.errors import shown

MAX_GUIDE_TEXT = 1 << 18
"""Maximum number of characters of a schema, an expression or a grammar."""
MAX_CHOICES = 4096
"""Maximum number of strings of a :class:`ChoiceGuide`."""


@dataclass(frozen=True, slots=True)
class Guide:
    """The base class of guides. A guide constrains the whole text of an output, from its first to its last character."""

    after: str = field(default="", kw_only=True)
    """If not empty: the guide constrains only the text after the first occurrence of this text, which must come.

    White space of the token that completes the text isn't part of the constrained text.
    """
    unless: tuple[str, ...] = field(default=(), kw_only=True)
    """The guide doesn't constrain a text that begins with one of these texts, after at most one token of white space."""


@dataclass(frozen=True, slots=True)
class JsonSchema(Guide):
    """A guide for a JSON text that a schema accepts."""

    schema: str | Mapping[str, Any]
    """The schema as JSON text or as a mapping; stored as JSON text."""

    def __post_init__(self) -> None:
        schema: Any = self.schema
        if isinstance(schema, str):
            schema = _parse_json(_checked_text("the JSON schema", schema))
        if not isinstance(schema, Mapping):
            raise ConfigError(f"the JSON schema is {shown(self.schema)}; expected a JSON object, as text or as a mapping")
        object.__setattr__(self, "schema", _checked_text("the JSON schema", _dump_json(schema)))
        _checked_text("the JSON schema", self.compiler_text)

    @property
    def compiler_text(self) -> str:
        """The schema as JSON text in the form that the grammar compiler reads."""
        return _dump_json(supported_schema(json.loads(str(self.schema))))


@dataclass(frozen=True, slots=True)
class JsonObject(Guide):
    """A guide for any JSON object, without a schema."""


@dataclass(frozen=True, slots=True)
class Regex(Guide):
    """A guide for a text that the regular expression ``pattern`` matches from its first to its last character, in the syntax
    of Python's ``re``.
    """

    pattern: str

    def __post_init__(self) -> None:
        _checked_text("the regular expression", self.pattern)
        _checked_text("the regular expression", self.compiler_text)

    @property
    def compiler_text(self) -> str:
        """The expression in the syntax of the grammar compiler."""
        return to_xgrammar_syntax(self.pattern, in_json=False)


@dataclass(frozen=True, slots=True)
class Ebnf(Guide):
    """A guide for a text of a context-free grammar, in the EBNF that llama.cpp calls GBNF."""

    grammar: str
    root: str = "root"
    """The name of the grammar rule that the whole text must match."""

    def __post_init__(self) -> None:
        _checked_text("the grammar", self.grammar)
        _checked_text("the grammar's root", self.root)


@dataclass(frozen=True, slots=True)
class ChoiceGuide(Guide):
    """A guide that allows exactly one of the texts ``options``."""

    options: Sequence[str]

    def __post_init__(self) -> None:
        options: Any = self.options
        is_list = not isinstance(options, str) and isinstance(options, Sequence) and 0 < len(options) <= MAX_CHOICES
        if not is_list or not all(isinstance(option, str) and option for option in options):
            raise ConfigError(f"the choice is {shown(options)}; expected 1 to {MAX_CHOICES} strings that aren't empty")
        _checked_text("the choice", "".join(options))
        object.__setattr__(self, "options", tuple(dict.fromkeys(options)))

    @property
    def grammar(self) -> str:
        """The options as a GBNF grammar with one rule, which the grammar compiler reads."""
        return "root ::= " + " | ".join(json.dumps(option, ensure_ascii=False) for option in self.options)


GUIDES: Final[tuple[type[Guide], ...]] = (JsonSchema, JsonObject, Regex, Ebnf, ChoiceGuide)
"""All guide classes that a request may use."""


def _checked_text(name: str, text: object) -> str:
    if not isinstance(text, str) or not text or len(text) > MAX_GUIDE_TEXT:
        raise ConfigError(f"{name} is {shown(text)}; expected a text of 1 to {MAX_GUIDE_TEXT} characters")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} has half a character at {error.start} (a lone surrogate)") from None
    if "\0" in text:
        raise ConfigError(f"{name} has a zero character at {text.index(chr(0))}; leave it out")
    return text


def _parse_json(text: str) -> Any:
    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} isn't JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        reason = "it's nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"the JSON schema {shown(text)} isn't JSON: {reason}") from None


def _dump_json(schema: Any) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the JSON schema can't be written as JSON: {error}") from None
