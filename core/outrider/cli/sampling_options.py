"""Options of commands that sample, and log-probabilities as scripts get them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.inputs import check_utf8

if TYPE_CHECKING:
    from outrider.engine.requests.logprobs import TokenLogprobs
    from outrider.engine.requests.sampling import SamplingParams

_PANEL = "Sampling"

TemperatureOption = Annotated[float, typer.Option("--temperature", metavar="T", help="0 is greedy.")]
SeedOption = Annotated[int, typer.Option("--seed", metavar="S", help="Seed of the draws; unused at temperature 0.")]
TopKOption = Annotated[
    int, typer.Option("--top-k", metavar="K", rich_help_panel=_PANEL, help="Draw from the K likeliest tokens; 0: all.")
]
TopPOption = Annotated[
    float,
    typer.Option("--top-p", metavar="P", rich_help_panel=_PANEL, help="Draw from the likeliest tokens of mass P."),
]
MinPOption = Annotated[
    float,
    typer.Option("--min-p", metavar="P", rich_help_panel=_PANEL, help="Drop tokens below P times the highest probability."),
]
RepetitionPenaltyOption = Annotated[
    float,
    typer.Option(
        "--repetition-penalty", metavar="X", rich_help_panel=_PANEL, help="Above 1: penalize tokens of prompt and output."
    ),
]
PresencePenaltyOption = Annotated[
    float,
    typer.Option("--presence-penalty", metavar="X", rich_help_panel=_PANEL, help="Subtracted from logits of output tokens."),
]
FrequencyPenaltyOption = Annotated[
    float,
    typer.Option("--frequency-penalty", metavar="X", rich_help_panel=_PANEL, help="The same, for each time in the output."),
]
StopOption = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", rich_help_panel=_PANEL, help="End before this text. Repeatable."),
]
LogprobsOption = Annotated[
    int | None,
    typer.Option(
        "--logprobs", metavar="N", rich_help_panel=_PANEL, help="With --json: log-probabilities, also of the N likeliest."
    ),
]
SamplesOption = Annotated[
    int, typer.Option("--n", metavar="N", rich_help_panel=_PANEL, help="Number of samples, each with a seed of its own.")
]


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are drawn, and where a text ends."""

    temperature: TemperatureOption = 0.0
    seed: SeedOption = 0
    top_k: TopKOption = 0
    top_p: TopPOption = 1.0
    min_p: MinPOption = 0.0
    repetition_penalty: RepetitionPenaltyOption = 1.0
    presence_penalty: PresencePenaltyOption = 0.0
    frequency_penalty: FrequencyPenaltyOption = 0.0
    stop: StopOption = None

    def params(self, **others: Any) -> SamplingParams:
        """The engine's record of them and ``others``. Raises :class:`RequestError` for a value that can't be."""
        from outrider.engine.requests.sampling import SamplingParams

        for text in self.stop or ():
            check_utf8("--stop", text)
        return SamplingParams(
            temperature=self.temperature,
            seed=self.seed,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            stop=tuple(self.stop or ()),
            **others,
        )


def logprob_data(logprobs: Sequence[TokenLogprobs]) -> list[dict[str, object]]:
    """One object for each token."""
    return [{"token": entry.token, "logprob": entry.logprob, "top": [list(pair) for pair in entry.top]} for entry in logprobs]
