"""A proposer that was written for earlier names of the interface keeps working, and is told of today's names."""

from pathlib import Path

import pytest
import torch

from outrider import SamplingParams
from outrider.speculative.eagle import EagleProposer
from outrider.speculative.proposer import Draft, DraftInputs, Proposer, RelaySpec
from outrider_proof import tiny


def written_before():
    class Before(Proposer):
        name = "before"
        seen = ()

        @property
        def depth(self):
            return 2

        @property
        def capture_layers(self):
            return (1, 0)

        @property
        def draft_tokens(self):
            return 7

        @property
        def relay(self):
            return (RelaySpec("none", (), torch.int64),)

        def allocate(self, *, backend, pages, page_size):
            pass

        def draft(self, inputs):
            tokens = (inputs.lens.unsqueeze(1) + torch.arange(2)) % tiny.VOCABULARY
            assert (inputs.deltas, inputs.host_lens) == (None, None)
            return Draft(tokens, None)

        def extend(self, inputs):
            self.seen = tuple(state.shape[0] == inputs.tokens.shape[0] for state in inputs.captured)
            return {"none": inputs.last}

    return Before()


def test_a_proposer_with_the_names_before():
    with pytest.warns(DeprecationWarning, match="is now") as told:
        proposer = written_before()
    assert {Path(each.filename) for each in told} == {Path(__file__)}
    assert {str(each.message).split("; the old")[0] for each in told} == {
        "Proposer.capture_layers, which Before overrides, is now aux_hidden_state_layers",
        "Proposer.draft_tokens, which Before overrides, is now num_draft_tokens",
    }
    assert (proposer.aux_hidden_state_layers, proposer.num_draft_tokens) == ((1, 0), 7)
    engine = tiny.engine(proposer)
    with pytest.warns(DeprecationWarning, match="is now") as told:
        (done,) = engine.generate([(3, 1, 4)], SamplingParams(max_tokens=6, ignore_eos=True))
    assert {str(each.message).split(" is now")[0] for each in told} == {
        *("DraftInputs.lens", "DraftInputs.deltas", "DraftInputs.host_lens"),
        "ExtendInputs.captured",
    }
    assert done.token_ids == tiny.plain((3, 1, 4), 6)
    assert proposer.seen == (True, True)


def test_old_names_that_nobody_overrides_give_the_new_value():
    inputs = DraftInputs(*(torch.tensor([number]) for number in range(5)), None, {}, 9, False)
    with pytest.warns(DeprecationWarning, match="DraftInputs.lens is now seq_lens"):
        assert inputs.lens is inputs.seq_lens
    with pytest.warns(DeprecationWarning, match="Proposer.draft_tokens is now num_draft_tokens"):
        assert EagleProposer(tiny.eagle_head(), draft_tokens=3).draft_tokens == 3
