"""Options of a request on the command line: how its tokens are sampled, where its text ends, and what it must match."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from outrider.cli.options.option_values import closest, number, option, text, whole
from outrider.cli.terminal.inputs import read_text
from outrider.errors import RequestError, shown

if TYPE_CHECKING:
    from outrider.engine.guides.guides import Guide
    from outrider.engine.requests.sampling import SamplingParams

_MAX_GUIDE_BYTES = 1 << 20

MaxTokensOption = Annotated[int, option("--max-tokens", value=whole(1), help="Maximum number of new tokens of a text.")]
TemperatureOption = Annotated[
    float, option("--temperature", value=number(0), help="Temperature of the samples; 0 is greedy.")
]
SeedOption = Annotated[
    int, option("--seed", value=whole(-(2**63), 2**63 - 1), help="Random seed of the samples; unused at temperature 0.")
]
TopKOption = Annotated[int, option("--top-k", value=whole(0), help="Sample from the K likeliest tokens; 0: all.")]
TopPOption = Annotated[
    float,
    option("--top-p", value=number(0, 1, above=True), help="Sample from the likeliest tokens with this total probability."),
]
StopOption = Annotated[list[str] | None, option("--stop", value=text(), help="End before this text. Repeatable.")]
GuideOption = Annotated[
    list[str] | None,
    option(
        "--guide",
        value=text("KIND[=VALUE]"),
        help="The output must match: json-object, json-schema=FILE|TEXT (TEXT starts with {), regex=PATTERN, grammar=FILE "
        "(EBNF of GBNF, from the rule root on), or choice=TEXT. Repeat choice for several texts.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options of a request: how its tokens are sampled, and where its text ends."""

    temperature: TemperatureOption = 0.0
    seed: SeedOption = 0
    top_k: TopKOption = 0
    top_p: TopPOption = 1.0
    stop: StopOption = None

    def params(self, **others: Any) -> SamplingParams:
        """Return the engine's record of these options and ``others``. Raises :class:`RequestError` for a bad value."""
        from outrider.engine.requests.sampling import SamplingParams

        return SamplingParams(
            temperature=self.temperature,
            seed=self.seed,
            top_k=self.top_k,
            top_p=self.top_p,
            stop=tuple(self.stop or ()),
            **others,
        )


def build_guide(given: Sequence[str]) -> Guide | None:
    """Return the guide that the values of ``--guide`` describe, or None without a value.

    Raises :class:`RequestError` for an unknown kind, for several guides, and for a file that isn't UTF-8 text.
    """
    from outrider.engine.guides.guides import ChoiceGuide, Ebnf, JsonObject, JsonSchema, Regex

    if not given:
        return None
    pairs = [text.partition("=")[::2] for text in given]
    kinds = {kind for kind, _ in pairs}
    if len(kinds) > 1 or (len(pairs) > 1 and kinds != {"choice"}):
        raise RequestError(f"--guide was given {len(pairs)} times; an output matches one guide: repeat choice=TEXT alone")
    kind, value = pairs[0]
    if (kind == "json-object") == ("=" in given[0]):
        raise RequestError(
            f"--guide is {shown(given[0])}; expected json-object, or a kind with its value, such as regex=[0-9]+"
        )
    match kind:
        case "json-object":
            return JsonObject()
        case "json-schema":
            return JsonSchema(
                value if value.lstrip().startswith("{") else read_text(Path(value), "a JSON schema", _MAX_GUIDE_BYTES)
            )
        case "regex":
            return Regex(value)
        case "grammar":
            return Ebnf(read_text(Path(value), "a grammar", _MAX_GUIDE_BYTES))
        case "choice":
            return ChoiceGuide([text for _, text in pairs])
    kinds_of_guide = ("json-object", "json-schema", "regex", "grammar", "choice")
    raise RequestError(
        f"--guide has the kind {shown(kind)}; expected one of {', '.join(kinds_of_guide)}{closest(kind, kinds_of_guide)}"
    )
