"""Options of commands that sample, and log-probabilities as scripts get them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from outrider.engine.requests.logprobs import TokenLogprobs

_PANEL = "Sampling"

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


def logprob_data(logprobs: Sequence[TokenLogprobs]) -> list[dict[str, object]]:
    """One object for each token."""
    return [{"token": entry.token, "logprob": entry.logprob, "top": [list(pair) for pair in entry.top]} for entry in logprobs]
