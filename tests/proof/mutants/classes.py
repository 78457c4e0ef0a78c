"""Subject classes of mutants, so that a sample covers each class."""

from __future__ import annotations

import random
from collections.abc import Sequence

from proof.mutants.mutation_sites import MutationSite

CLASSES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("fences", (".fences",), ("fence", "signal(", "wait", "_done", "_ready", "_free.", "record(")),
    ("graph keys", (".graphs",), ("graph", "capture", "replay", "bucket")),
    ("padding", (".staging",), ("pad", "bucket", "_MULTIPLE", "cumsum", "fill_(", "zero_(")),
    (
        "policies",
        (".options", ".resolve", ".draft_length", ".draft_costs", ".assembly"),
        ("sync.", "policy", "overlap", "waiter", "exact", "plans_on_host", "mode"),
    ),
    (
        "scheduler transitions",
        (
            ".scheduler",
            ".request",
            ".pages",
            ".batch",
            ".admission",
            ".loop",
            ".session",
            ".lending",
            ".groups",
        ),
        ("retire", "preempt", "in_flight", "finished", "admit"),
    ),
    (
        "results",
        (".results", ".hand_over", ".engine"),
        ("result", "output", "emitted", "accepted"),
    ),
    ("state", (".state.",), ()),
    ("drafts", (".speculative.",), ()),
)
"""Name of a class; ends or parts of its modules' names; words of a change. A change is of the first class of whose modules it
is, else of the first of whose words it has one, else of ``other``."""


def class_of(site: MutationSite) -> str:
    """Return the name of the class that a mutant belongs to."""
    module = f"{site.module}"
    for name, modules, _ in CLASSES:
        if any(module.endswith(part) for part in modules if not part.endswith(".")):
            return name
    text = f"{site.function} {site.before}"
    for name, modules, words in CLASSES:
        if any(word in text for word in words) or any(part in module for part in modules if part.endswith(".")):
            return name
    return "other"


def sample_sites(sites: Sequence[MutationSite], count: int, seed: int) -> list[MutationSite]:
    """Return a sample with equally many mutants of each class that has any left; each prefix is such a sample, too."""
    dice = random.Random(seed)
    by_class: dict[str, list[MutationSite]] = {}
    for site in dice.sample(list(sites), len(sites)):
        by_class.setdefault(class_of(site), []).append(site)
    found: list[MutationSite] = []
    while any(by_class.values()) and len(found) < count:
        found += [left.pop() for _, left in sorted(by_class.items()) if left]
    return found[:count]
