"""Modes on the command line: the same tokens, and what a bad value looks like."""

import pytest

from outrider.engine.requests.request import FinishReason


@pytest.mark.parametrize("options", [("--graphs",), ("--mode", "fused"), ("--overlap",), ("--mode", "fused", "--overlap")])
def test_generate_gives_the_same_tokens(outrider, options):
    usual = outrider("generate", "--prompt", "def read(", "--max-tokens", "12", "--dtype", "float32", "--json").json
    other = outrider("generate", "--prompt", "def read(", "--max-tokens", "12", *options, "--compare", "--json").json
    assert other["token_ids"] == usual["token_ids"]
    assert other["same_as_plain"]


def test_a_mode_that_is_not_there(outrider):
    result = outrider("generate", "--prompt", "x", "--mode", "quick", "--json")
    assert result.code == 1
    assert "expected one of staged, fused" in result.json["error"]["message"]


def test_a_backend_that_does_not_run_fused(outrider):
    result = outrider("generate", "--prompt", "x", "--mode", "fused", "--backend", "sim:like=npu", "--json")
    assert result.code == 1
    assert "doesn't run in fused mode; its modes are staged" in result.json["error"]["message"]


def test_a_request_that_ends_with_an_error_is_exit_1(outrider, monkeypatch):
    from outrider.engine.state.probes import BadValue
    from outrider.engine.state.results import Results

    redeem = Results.redeem

    def bad(self, ticket, copied):
        outcomes = redeem(self, ticket, copied)
        if ticket.batch.decode:
            outcomes[0].bad[ticket.batch.decode[0].id] = (BadValue("target.logits", 3, None, None),)
        return outcomes

    monkeypatch.setattr(Results, "redeem", bad)
    result = outrider("generate", "--prompt", "def read(", "--max-tokens", "12", "--json")
    assert result.code == 1
    assert result.json["finish_reason"] == FinishReason.ERROR
    assert result.json["error"] == "request 0: target.logits holds NaN at index 3"
    assert len(result.json["token_ids"]) == 1  # the prompt's, which came before
