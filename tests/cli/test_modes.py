"""How the engine of a command launches iterations: the same tokens in each mode, and errors of a device."""

import pytest

from outrider import SamplingParams
from outrider.cli.options.models import Speculation, load
from outrider.device import CapabilityError, ConfigError
from outrider.engine.requests.request import FinishReason


def engine(backend="cpu", **running):
    """The bundled model with its EAGLE head, launched as ``running`` says."""
    speculation = Speculation.with_defaults(None, model=None, draft=None, draft_tokens=4)
    return load(backend, speculation, max_requests=1, dtype="float32", settings=running)


RUNNING = [{"graphs": True}, {"mode": "fused"}, {"overlap": True}, {"mode": "fused", "overlap": True}]


@pytest.mark.parametrize("running", RUNNING)
def test_each_mode_gives_the_tokens_of_the_command(outrider, running):
    usual = outrider("generate", "--prompt", "def read(", "--max-tokens", "12", "--dtype", "float32", "--json").json
    loaded = engine(**running)
    (result,) = loaded.generate([loaded.tokenizer.encode("def read(")], SamplingParams(max_tokens=12))
    assert list(result.token_ids) == usual["token_ids"]
    loaded.close()


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="expected one of staged, fused"):
        engine(mode="quick")


def test_a_mode_that_the_backend_lacks_is_refused():
    with pytest.raises(CapabilityError, match="doesn't run in fused mode; its modes are staged"):
        engine("sim:like=npu", mode="fused")


def test_a_request_that_ends_with_an_error_is_exit_1(outrider, monkeypatch):
    from outrider.engine.state.results import BadValue, Results

    redeem = Results.read_results

    def bad(self, ticket, copied):
        outcomes = redeem(self, ticket, copied)
        if ticket.batch.decode:
            outcomes[0].bad_values[ticket.batch.decode[0].id] = (BadValue("target.logits", 3, None, None),)
        return outcomes

    monkeypatch.setattr(Results, "read_results", bad)
    result = outrider("generate", "--prompt", "def read(", "--max-tokens", "12", "--json")
    assert result.code == 1
    assert result.json["finish_reason"] == FinishReason.ERROR
    assert result.json["error"] == "request 0: target.logits holds NaN at index 3"
    assert len(result.json["token_ids"]) == 1  # the prompt's, which came before
