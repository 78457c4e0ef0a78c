"""``outrider models``, and the options that choose a proposer."""

import gc

import pytest

from outrider import Engine
from outrider.bundled import bundled
from outrider.cli.options.models import Speculation, load
from outrider.model import supported_families
from outrider.speculative.build import BUILDERS


def test_every_family_and_proposer_is_listed(outrider):
    data = outrider("models", "--json").json
    assert data["families"] == list(supported_families())
    assert set(data["proposers"]) == set(BUILDERS)
    shown = outrider("models").out
    assert all(name in shown for name in (*supported_families(), *BUILDERS))


@pytest.mark.parametrize(
    "options",
    [("--speculate", "ngram"), ("--speculate", "eagle", "--draft-topk", "3", "--draft-tokens", "3")],
)
def test_proposers_give_plain_tokens(outrider, options):
    result = outrider("generate", "--prompt", "def read(", "--max-tokens", "20", "--compare", *options)
    assert result.code == 0
    assert result.err.endswith("same tokens as non-speculative greedy decoding: yes\n")


@pytest.mark.parametrize(
    ("kind", "others", "policy"),
    [
        ("ngram", {}, "lookup"),
        ("suffix", {"settings": {"batch_invariant": True}}, "fixed"),
        ("suffix", {"settings": {"draft_length": "fixed"}}, "fixed"),
        ("ngram", {"max_requests": 2}, "fixed"),
        ("eagle", {}, "fixed"),
    ],
)
def test_a_lookup_for_one_request_on_the_host_drafts_by_repeats(kind, others, policy):
    draft = bundled("eagle") if kind == "eagle" else None
    wanted = Speculation(kind=kind, model=bundled("target"), draft=draft, draft_tokens=2)
    engine = load("cpu", wanted, **{"max_requests": 1} | others)
    assert engine.draft_length.policy == policy
    engine.close()


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_while_an_engine_starts(monkeypatch, collects):
    """And afterwards as before, also where the start fails."""
    found = []

    def made(*given, **named):
        found.append(gc.isenabled())
        raise RuntimeError("as it may")

    monkeypatch.setattr(Engine, "from_checkpoint", made)
    wanted = Speculation(kind="none", model=bundled("target"), draft=None, draft_tokens=1)
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with pytest.raises(RuntimeError, match="as it may"):
            load("cpu", wanted, max_requests=1)
        assert (found, gc.isenabled()) == ([False], collects)
    finally:
        (gc.enable if before else gc.disable)()
