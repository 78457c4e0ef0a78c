"""``--accept-length``: a mean number of tokens, or the shares that a head reached on a kind of text."""

import json

import pytest

from outrider.bundled import SMOLLM2_HEADS, bundled
from outrider.device import ConfigError
from outrider_bench.acceptance import acceptance_rates, check_acceptance, describe_acceptance


def test_a_measured_head_gives_the_chance_of_each_position():
    shares = json.loads((bundled("smollm2_eagle3") / "acceptance.json").read_text())["3"]["code"]
    found = acceptance_rates("smollm2_eagle3:code", 3)
    assert found == pytest.approx((shares[0], shares[0] * shares[1], shares[0] * shares[1] * shares[2]))
    assert acceptance_rates("smollm2_eagle3:code", 2) == found[:2]


def test_the_shortest_measured_length_that_suffices(tmp_path):
    (tmp_path / "acceptance.json").write_text(json.dumps({"7": {"chat": [0.5] * 7}, "3": {"chat": [0.9, 0.8, 0.7]}}))
    assert acceptance_rates(f"{tmp_path}:chat", 3) == pytest.approx((0.9, 0.72, 0.504))
    assert acceptance_rates(f"{tmp_path}:chat", 4) == pytest.approx((0.5, 0.25, 0.125, 0.0625))
    with pytest.raises(ConfigError, match=r"has figures of 7, 3 draft tokens, none for 8; lower --draft-tokens"):
        acceptance_rates(f"{tmp_path}:chat", 8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("0.5", "expected a number of at least 1"),
        ("nan", "expected a number of at least 1"),
        ("smollm2_eagle3", r"'smollm2_eagle3' names no kind|can't be read"),
        ("smollm2_eagle3:poems", "expected smollm2_eagle3: and one of chat, code, maths, summary"),
        ("nowhere:chat", r"nowhere/acceptance.json can't be read: .*; expected a number, or HEAD:KIND with .*smollm2_eagle3"),
    ],
)
def test_other_values(given, message):
    with pytest.raises(ConfigError, match=message):
        check_acceptance(given)


@pytest.mark.parametrize("content", ["[]", "{", '{"3": 4}', '{"3": {"chat": "abc"}}'])
def test_a_broken_table(tmp_path, content):
    (tmp_path / "acceptance.json").write_text(content)
    with pytest.raises(ConfigError, match="can't be read"):
        check_acceptance(f"{tmp_path}:chat")


@pytest.mark.parametrize("kind", ["chat", "code", "maths", "summary"])
@pytest.mark.parametrize("head", sorted(SMOLLM2_HEADS))
def test_the_description_names_the_head_and_its_mean(head, kind):
    mean = 1 + sum(acceptance_rates(f"{head}:{kind}", 3))
    assert 1.5 < mean < 4
    assert describe_acceptance(f"{head}:{kind}", 3) == f"synthetic, mean {mean:.4g}, as {head}:{kind}"
    assert describe_acceptance(2.98, 3) == describe_acceptance("2.98", 3) == "synthetic, mean 2.98"
