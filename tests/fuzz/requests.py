"""Requests as clumsy and hostile callers make them: every argument of the engine's API, right, on the edge and absurd."""

import math
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import strategies as st

from outrider import SamplingParams
from outrider_proof import tiny

ABSURD = st.one_of(
    st.none(),
    st.booleans(),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.sampled_from([0, -1, 1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30, 1e-50, 2.0**-32, 2.0**32, 1e39, 1e308]),
    st.floats(),
    st.integers(),
    st.just([]),
    st.just({}),
    st.just(object()),
    st.just(SimpleNamespace()),
    st.just(np.float32(1.5)),
    st.just(np.int8(3)),
    st.just(torch.tensor(2)),
)

OPTIONS = {
    "max_tokens": st.integers(1, 6),
    "temperature": st.sampled_from([0.0, 2.0**-32, 0.7, 1.0, 2.0**32]),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop_token_ids": st.lists(st.integers(0, tiny.VOCABULARY - 1), max_size=3),
    "ignore_eos": st.booleans(),
    "top_k": st.sampled_from([0, 1, 3, tiny.VOCABULARY, 2**31 - 1]),
    "top_p": st.sampled_from([2.0**-32, 0.3, 1.0]),
    "min_p": st.sampled_from([0.0, 0.2, 1.0]),
    "repetition_penalty": st.sampled_from([2.0**-32, 0.5, 1.0, 1.7, 2.0**32]),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(
        st.integers(0, tiny.VOCABULARY - 1), st.sampled_from([-math.inf, -(2.0**64), -1.0, 0.0, 2.0**64]), max_size=4
    ),
    "min_tokens": st.integers(0, 3),
    "logprobs": st.sampled_from([None, 0, 1, 20]),
    "n": st.integers(1, 3),
    "stop": st.just(()),
}


@st.composite
def sampling(draw):
    """Keywords of SamplingParams; one in three has an absurd value, or a name that there isn't."""
    names = draw(st.lists(st.sampled_from(sorted(OPTIONS)), unique=True, max_size=6))
    chosen = {name: draw(OPTIONS[name]) for name in names}
    if draw(st.integers(0, 2)) == 0:
        chosen[draw(st.sampled_from([*sorted(OPTIONS), "best_of"]))] = draw(ABSURD)
    return chosen


TOKENS = st.lists(st.integers(0, tiny.VOCABULARY - 1), min_size=1, max_size=8)
PROMPTS = st.one_of(
    TOKENS,
    TOKENS,
    TOKENS.map(tuple),
    TOKENS.map(np.array),
    TOKENS.map(torch.tensor),
    st.lists(st.one_of(st.integers(), ABSURD), max_size=3),
    ABSURD,
    st.integers(60, 5000).map(lambda count: [1] * count),
)


@st.composite
def requests(draw):
    """Arguments of ``add_request``: the prompt, keywords of its parameters, and what else is passed."""
    others = {}
    if draw(st.integers(0, 4)) == 0:
        others["priority"] = draw(st.one_of(st.integers(-5, 5), ABSURD))
    if draw(st.integers(0, 9)) == 0:
        others["media"] = draw(ABSURD)
    return draw(PROMPTS), draw(sampling()), others


def params_of(keywords):
    """The parameters, or what their making raised."""
    try:
        return SamplingParams(**keywords)
    except (ValueError, TypeError) as error:  # ConfigError is one of the first
        return error
