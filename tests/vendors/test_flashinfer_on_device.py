"""FlashInfer's attention on a device, against float64, and the tokens of an engine that has it. Not run without both."""

import pytest

from outrider.device import BackendError
from outrider.registry import get_backend
from vendors.flashinfer_numerics import CASES, CONFIGS, PROPOSERS, check, check_tokens, generate, random_model

NEW_TOKENS = 48
pytestmark = pytest.mark.needs_device("cuda")


@pytest.fixture(scope="module")
def backend():
    try:
        return get_backend("cuda:kernels=flashinfer")
    except BackendError as error:
        pytest.skip(f"not run: {error}")


@pytest.fixture(scope="module")
def model(backend):
    return random_model(backend)


@pytest.fixture(scope="module")
def plain(backend, model):
    return generate(backend, model, None, new_tokens=NEW_TOKENS, logprobs=2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_numbers(backend, case, record_property):
    record_property("largest error", check(backend, case, heads=32, kv_heads=8))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("speculate", PROPOSERS)
def test_tokens_are_those_of_plain_decoding(backend, model, plain, speculate, config, record_property):
    differ = check_tokens(backend, model, plain, speculate, config, new_tokens=NEW_TOKENS)
    record_property("prompts that differ at a near-tie", differ)
