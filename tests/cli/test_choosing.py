"""What commands and engines choose for their user, that they say it, and that what is given stays."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider import Engine, EngineConfig
from outrider.bundled import SMOLLM2_HEADS, bundled
from outrider.cli.commands.generate import difference_of_logits
from outrider.cli.options.models import Speculation, load
from outrider_cpu.backend import CpuBackend
from outrider_proof import tiny

PLAIN = ("generate", "--prompt", "def read(", "--max-tokens", "3", "--speculate", "none")


def chosen(report):
    return {choice["name"]: choice["value"] for choice in report["chosen"]}


def test_generate_runs_the_best_mode_that_the_backend_declares(outrider):
    report = outrider(*PLAIN, "--backend", "sim", "--json")
    made = chosen(report.json)
    assert (made["mode"], made["overlap"], made["dtype"]) == ("fused", True, "bfloat16")
    assert (made["max_requests"], made["prefill_chunk"], made["max_context"]) == (1, 2048, 2048)
    assert {key: report.json[key] for key in ("mode", "graphs", "overlap", "dtype")} == {
        "mode": "fused",
        "graphs": False,
        "overlap": True,
        "dtype": "bfloat16",
    }
    assert all(choice["why"] for choice in report.json["chosen"])
    assert "chosen" not in report.err


def test_people_ask_for_it_and_read_it_on_standard_error(outrider):
    result = outrider(*PLAIN, "--backend", "cpu", "--verbose")
    assert "outrider: max_requests 1 (this command makes one request)\n" in result.err
    assert "outrider: mode staged (the device captures no graphs)\n" in result.err
    assert "outrider: overlap off (" in result.err
    assert "tokens in " in result.err
    assert outrider(*PLAIN, "--backend", "cpu").err.count("\n") == 1  # the statistics


def test_given_settings_stay():
    given = {"max_context": 64, "page_size": 8, "prefill_chunk": 16, "max_requests": 2}
    engine = load(
        "cpu",
        Speculation.with_defaults("none", model=None, draft=None, draft_tokens=4),
        max_requests=1,
        dtype="float32",
        settings={"mode": "staged", "graphs": False, "overlap": False, "kv_memory": 0.001, **given},
    )
    assert {name: getattr(engine.config, name) for name in given} == given
    (choice,) = engine.chosen
    assert choice.name == "num_pages"
    assert "kv_memory 0.001 of" in choice.why


def test_a_context_longer_than_the_models_is_an_error(outrider):
    result = outrider(*PLAIN, "--backend", "cpu", "--max-context", "4096", "--json")
    assert result.code == 1
    assert "max_context is 4096, the model was made for 2048 at most" in result.json["error"]["message"]


def test_comparing_is_done_in_float32_and_says_so(outrider):
    first, second = outrider(*PLAIN, "--backend", "cpu", "--compare", "--json").json["chosen"][:2]
    assert (first["name"], first["value"]) == ("dtype", "float32")
    assert "--compare compares tokens" in first["why"]
    assert second["name"] == "max_requests"
    assert outrider(*PLAIN, "--backend", "cpu", "--compare", "--dtype", "bfloat16", "--json").json["dtype"] == "bfloat16"


def test_a_difference_has_the_gap_of_the_logits():
    """The token that plain decoding takes has the largest logit, so the gap is that of the other one."""
    plain = Engine(tiny.target(), tiny.BACKEND, config=tiny.plain_config(dtype="float64", max_context=32))
    prompt, right = (1, 2, 3), tiny.plain((1, 2, 3), 4)
    wrong = (*right[:2], (right[2] + 1) % tiny.VOCABULARY, right[3])
    found = difference_of_logits(plain, prompt, wrong, right)
    assert (found["position"], found["speculative"], found["plain"]) == (2, wrong[2], right[2])
    assert found["gap"] > 0
    assert found["gap_roundings"] > 1
    assert difference_of_logits(plain, prompt, right[:2], right) is None  # in the length alone


class Preferring(CpuBackend):
    """A device whose kernels want what Ascend's want."""

    @property
    def capabilities(self):
        return replace(super().capabilities, preferred_dtypes=(torch.bfloat16, torch.float16), page_size=128)


def test_an_engine_takes_what_the_device_prefers():
    engine = Engine.from_checkpoint(bundled("target"), Preferring(), config=EngineConfig(max_requests=1))
    assert (engine.config.page_size, engine.config.dtype, engine.model.dtype) == (128, "bfloat16", torch.bfloat16)
    assert engine.max_context == engine.config.max_context == 2048
    why = {choice.name: choice.why for choice in engine.chosen}
    assert why["dtype"] == "the checkpoint's"
    again = Engine(engine.model, engine.backend, config=engine.config)
    assert again.config is engine.config


@pytest.mark.parametrize(
    ("kind", "head"), [(None, "eagle"), ("eagle", "eagle"), ("suffix+eagle", "eagle"), ("dflash", "dflash")]
)
def test_the_bundled_model_brings_its_head(kind, head):
    """Of the kind that is asked for, and without asking the EAGLE head."""
    chosen = Speculation.with_defaults(kind, model=None, draft=None, draft_tokens=3)
    assert (chosen.kind, chosen.draft) == (kind or "eagle", bundled(head))


@pytest.mark.parametrize("kind", ["none", "ngram", "suffix", "mtp", "peagle"])
def test_the_bundled_model_has_no_head_of_other_kinds(kind):
    assert Speculation.with_defaults(kind, model=None, draft=None, draft_tokens=3).draft is None


@pytest.mark.parametrize("name", sorted(SMOLLM2_HEADS))
def test_a_bundled_head_is_named_by_draft(name, tmp_path, monkeypatch):
    """The name chooses the proposer too, unless one is given. A directory of that name comes first."""
    target = bundled("target")
    chosen = Speculation.with_defaults(None, model=target, draft=Path(name), draft_tokens=3)
    assert (chosen.kind, chosen.draft) == (name.removeprefix("smollm2_"), bundled(name))
    assert Speculation.with_defaults("eagle", model=target, draft=Path(name), draft_tokens=3).kind == "eagle"
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    assert Speculation.with_defaults("eagle", model=target, draft=Path(name), draft_tokens=3).draft == Path(name)
