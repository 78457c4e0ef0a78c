"""SamplingParams: frozen, by keyword, validated, with errors that say what was expected."""

import dataclasses
import math

import pytest

from outrider import SamplingParams
from outrider.device import ConfigError

NAN, INF = math.nan, math.inf
BAD = {
    "top_k": [-1, 1.5, True, "3", 2**31, 10**30],
    "top_p": [1e-50, 0.0, -0.1, 1.01, NAN, INF, None, True],
    "min_p": [-0.1, 1.1, NAN, "x"],
    "repetition_penalty": [0.0, -1.0, NAN, INF, 1e39, 10**400, 1e-50],
    "presence_penalty": [-2.1, 2.1, NAN],
    "frequency_penalty": [-2.1, 2.1, NAN],
    "temperature": [-0.1, NAN, INF, "hot", True, 1e39, 10**400, 2.0**-33, 1e-50],
    "max_tokens": [0, 1.0, True, 2**31, 10**30],
    "min_tokens": [-1, 65, 0.5],
    "logprobs": [10**30, -1, 1.5, True],
    "n": [0, -1, 1.5, 1025, 10**9],
    "seed": [1.5, True, 2**63],
    "ignore_eos": [1, None],
    "stop": ["", ("a", ""), (1,), None],
    "stop_token_ids": [tuple(range(1025)), "12", (1.5,), None, 3],
    "logit_bias": [
        {1: 1e39},
        {1: -(10**400)},
        {1: NAN},
        {1: INF},
        {-1: 1.0},
        {"a": 1.0},
        {True: 1.0},
        ((1, 2.0, 3),),
        ((1, 0.5), (1, 0.6)),
        "ab",
        3,
    ],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_value_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"{name} is .*; expected"):
        SamplingParams(**{name: value})


def test_extremes_that_the_device_can_compute_with():
    SamplingParams(temperature=2.0**-32, repetition_penalty=2.0**32, top_p=2.0**-32, logit_bias={0: 2.0**64, 1: -(2.0**64)})


@pytest.mark.parametrize("name", ["seed", "top_k", "temperature", "max_tokens", "n"])
def test_a_number_that_python_does_not_write_out_is_refused_too(name):
    with pytest.raises(ConfigError, match=f"{name} is a number of thousands of digits; expected"):
        SamplingParams(**{name: 10**5000})


def test_frozen_and_by_keyword():
    with pytest.raises(TypeError):
        SamplingParams(3)
    params = SamplingParams()
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3


def test_lists_become_tuples_and_one_string_is_one_stop():
    params = SamplingParams(stop="END", stop_token_ids=[3, 4], logit_bias={5: 1, 2: -INF})
    assert params.stop == ("END",)
    assert params.stop_token_ids == (3, 4)
    assert params.logit_bias == ((2, -INF), (5, 1.0))
    assert hash(params) == hash(dataclasses.replace(params))


def test_several_greedy_samples_are_refused():
    with pytest.raises(ConfigError, match="n is 2 at temperature 0"):
        SamplingParams(n=2)


def test_neutral_options_use_nothing():
    params = SamplingParams(top_k=5, top_p=0.5, min_p=0.1)
    used = [params.biased, params.penalized, params.truncated]
    assert used == [False] * 3, "a greedy request needs no truncation"
    assert SamplingParams(temperature=1.0, min_p=0.1).truncated
    assert SamplingParams(repetition_penalty=0.9).penalized
    assert SamplingParams(min_tokens=1).biased
