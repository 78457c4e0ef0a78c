"""What callers hand over: token ids of every kind that means some, and typed errors for the rest."""

import numpy as np
import pytest
import torch

from outrider.engine.requests.admission import checked_int, checked_tokens
from outrider.errors import RequestError


@pytest.mark.parametrize(
    "given",
    [(1, 2, 3), [1, 2, 3], range(1, 4), np.array([1, 2, 3]), torch.tensor([1, 2, 3]), iter([1, 2, 3]), (np.int32(1), 2, 3)],
)
def test_whole_numbers_however_they_come(given):
    assert checked_tokens(given, limit=8) == (1, 2, 3)


@pytest.mark.parametrize(
    "given",
    [
        "123",
        b"123",
        [1.0],
        [1.7],
        [True],
        {1: 2},
        {1, 2},
        None,
        7,
        [None],
        ["1"],
        [[1]],
        [2**63],
        [-(2**70)],
        np.array([1.5]),
        np.array(3),
        torch.tensor([True]),
        torch.tensor([[1]]),
        [float("nan")],
    ],
    ids=repr,
)
def test_what_is_no_token_is_refused_by_type(given):
    with pytest.raises(RequestError, match="expected"):
        checked_tokens(given, limit=8)


def test_an_endless_prompt_is_read_no_further_than_the_context():
    def endless():
        while True:
            yield 1

    with pytest.raises(RequestError, match="more than 8 tokens"):
        checked_tokens(endless(), limit=8)
    assert len(checked_tokens([1] * 8, limit=8)) == 8


@pytest.mark.parametrize("given", ["high", 1.5, True, None, 2**64, [1]])
def test_a_number_that_is_none(given):
    with pytest.raises(RequestError, match="priority is"):
        checked_int(given, "priority")
