"""``outrider models``, and the options that choose a proposer."""

import pytest

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
    [("--speculate", "ngram"), ("--speculate", "eagle", "--draft-topk", "3", "--draft-nodes", "8", "--draft-tokens", "3")],
)
def test_proposers_give_plain_tokens(outrider, options):
    result = outrider("generate", "--prompt", "def read(", "--max-tokens", "20", "--compare", *options)
    assert result.code == 0
    assert result.out.endswith("same tokens as plain greedy decoding: yes\n")


def test_an_unknown_proposer_is_named_with_the_known_ones(outrider):
    result = outrider("generate", "--prompt", "x", "--speculate", "medusa")
    assert result.code == 1
    assert "medusa" in result.err
    assert "draft-model" in result.err
