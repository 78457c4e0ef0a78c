"""What an iteration does besides its layers: on a device with queues each operation more is microseconds of every token."""

from collections import Counter

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from outrider import SamplingParams

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


class Counted(TorchDispatchMode):
    """Counts operators, those within an operator not among them."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket._qualified_op_name] += 1
        return func(*args, **(kwargs or {}))


def decoded(bundle, prompt, **config):
    """The operators of a request's iterations behind its prompt."""
    engine = bundle.engine(max_requests=2, max_context=64, **config)
    engine.add_request(prompt, PARAMS)
    engine.step()
    counted = Counted()
    with counted:
        while engine.has_unfinished:
            engine.step()
    assert counted.calls["outrider::publish_accepted"] > 0
    return counted.calls


@pytest.mark.parametrize("mode", ["staged", "fused"])
def test_without_drafts_the_last_tokens_are_verified_where_they_are(tiny64, tiny_tokens, mode):
    calls = decoded(tiny64, tiny_tokens[0][:8], speculate="none", mode=mode)
    assert calls["aten::cat"] == 0
