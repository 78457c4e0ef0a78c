"""Chances of synthetic acceptance: for a mean length, or as measured with a head."""

from __future__ import annotations

import json
from itertools import accumulate
from operator import mul
from pathlib import Path

from outrider.bundled import SMOLLM2_HEADS, bundled
from outrider.device.errors import ConfigError

MEASURED_FILE = "acceptance.json"
"""File of a head's directory with the accepted share of each draft position, by draft length and kind of text.

The command that trains heads writes it. A position counts where all earlier positions were accepted.
"""
_MAX_LENGTH = 1025


def acceptance_rates(given: str | float, draft_tokens: int) -> tuple[float, ...]:
    """Return, for each of ``draft_tokens`` positions, the chance that the draft token and all before it are accepted.

    ``given`` is a mean number of tokens an iteration, the target's own included, or ``HEAD:KIND``: a head's directory or a
    bundled head's name, and a kind of text. Of the head's measured draft lengths the shortest that suffices is used. For a
    mean, a draft token after an accepted one is accepted with one fixed chance. Raises :class:`ConfigError` for a mean that
    ``draft_tokens`` can't give, and for a head, kind or length without a measurement.
    """
    mean = _mean_of(given)
    if mean is None:
        measured = _measured(str(given))
        lengths = sorted(int(length) for length in measured if int(length) >= draft_tokens)
        if not lengths:
            raise ConfigError(
                f"--accept-length {given} has figures of {', '.join(measured)} draft tokens, none for {draft_tokens}; lower "
                "--draft-tokens"
            )
        return tuple(accumulate(measured[str(lengths[0])][:draft_tokens], mul))
    if not 1 <= mean <= draft_tokens + 1:
        raise ConfigError(f"--accept-length is {mean:g}; with {draft_tokens} drafted tokens it is 1 to {draft_tokens + 1}")
    low, high = 0.0, 1.0
    for _ in range(60):
        chance = (low + high) / 2
        low, high = (chance, high) if sum(_powers(chance, draft_tokens)) < mean - 1 else (low, chance)
    return _powers(high, draft_tokens)


def rates_of_requests(given: str | float, draft_tokens: int) -> tuple[tuple[float, ...], ...]:
    """Return chances of :func:`acceptance_rates` for each part of ``given`` between commas. Requests have them in turn."""
    return tuple(acceptance_rates(part, draft_tokens) for part in str(given).split(","))


def check_acceptance(given: str) -> None:
    """Raise :class:`ConfigError` unless each part of ``given`` between commas is a possible mean or a measured head."""
    for part in given.split(","):
        mean = _mean_of(part)
        if mean is None:
            _measured(part)
        elif not 1 <= mean <= _MAX_LENGTH:  # also not a number
            raise ConfigError(f"expected a number of at least 1, at most {_MAX_LENGTH}, or HEAD:KIND of a measured head")


def describe_acceptance(given: str | float, draft_tokens: int) -> str:
    """Return the acceptance as a report names it, with its mean number of tokens an iteration."""
    rates = rates_of_requests(given, draft_tokens)
    mean = f"synthetic, mean {1 + sum(map(sum, rates)) / len(rates):.4g}"
    return mean if _mean_of(given) is not None else f"{mean}, as {given}"


def _mean_of(given: str | float) -> float | None:
    try:
        return float(given)
    except ValueError:
        return None


def _measured(given: str) -> dict[str, list[float]]:
    """Return the accepted share of each position by draft length, for a kind of text."""
    head, _, kind = given.rpartition(":")
    directory = bundled(head) if head in SMOLLM2_HEADS else Path(head)
    try:
        found = json.loads((directory / MEASURED_FILE).read_text(encoding="utf-8"))
        kinds = sorted(set.intersection(*(set(shares) for shares in found.values())))
        if head and kind in kinds:
            return {str(int(length)): [_share(each) for each in shares[kind]] for length, shares in found.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{given!r} is no number, and {directory / MEASURED_FILE} can't be read: {error}; expected a number, or "
            f"HEAD:KIND with {', '.join(SMOLLM2_HEADS)} or a head's directory with measured shares"
        ) from error
    raise ConfigError(f"{given!r} names no kind of text that was measured; expected {head}: and one of {', '.join(kinds)}")


def _share(given: float) -> float:
    if not 0 <= given <= 1:
        raise ValueError(f"{given!r} is no share from 0 to 1")
    return given


def _powers(chance: float, count: int) -> tuple[float, ...]:
    return tuple(chance**number for number in range(1, count + 1))
