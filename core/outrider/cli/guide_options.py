"""Options that say what an output must be, and the guide that they ask for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.inputs import check_utf8, read_bounded
from outrider.errors import RequestError

if TYPE_CHECKING:
    from outrider.engine.requests.guides import Guide

_PANEL = "What the output must be"
_MOST = 1 << 20

JsonSchemaOption = Annotated[
    str | None,
    typer.Option(
        "--json-schema", metavar="FILE|TEXT", rich_help_panel=_PANEL, help="JSON that a schema accepts; TEXT begins with {."
    ),
]
JsonObjectOption = Annotated[bool, typer.Option("--json-object", rich_help_panel=_PANEL, help="Any JSON object.")]
RegexOption = Annotated[
    str | None,
    typer.Option("--regex", metavar="PATTERN", rich_help_panel=_PANEL, help="A text that the whole expression matches."),
]
GrammarOption = Annotated[
    Path | None,
    typer.Option(
        "--grammar", metavar="FILE", rich_help_panel=_PANEL, help="A text of a grammar in EBNF (GBNF), from the rule root on."
    ),
]
ChoiceOption = Annotated[
    list[str] | None,
    typer.Option("--choice", metavar="TEXT", rich_help_panel=_PANEL, help="One of several texts. Repeatable."),
]


def chosen_guide(
    json_schema: str | None, json_object: bool, regex: str | None, grammar: Path | None, choice: list[str] | None
) -> Guide | None:
    """The guide that was asked for, None without. Raises :class:`RequestError` for several, or a file that isn't text."""
    from outrider.engine.requests.guides import Choice, Ebnf, JsonObject, JsonSchema, Regex

    given = {
        "--json-schema": json_schema is not None,
        "--json-object": json_object,
        "--regex": regex is not None,
        "--grammar": grammar is not None,
        "--choice": bool(choice),
    }
    named = [name for name, asked in given.items() if asked]
    if len(named) > 1:
        raise RequestError(f"{' and '.join(named)} given: an output follows one of them; leave the others out")
    if json_schema is not None:
        check_utf8("--json-schema", json_schema)
        inline = json_schema.lstrip().startswith("{")
        return JsonSchema(json_schema if inline else _read(Path(json_schema), "a JSON schema"))
    if json_object:
        return JsonObject()
    if regex is not None:
        check_utf8("--regex", regex)
        return Regex(regex)
    if grammar is not None:
        return Ebnf(_read(grammar, "a grammar"))
    for text in choice or ():
        check_utf8("--choice", text)
    return Choice(choice) if choice else None


def _read(path: Path, what: str) -> str:
    try:
        return read_bounded(path, what, _MOST).decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
