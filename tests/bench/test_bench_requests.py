"""bench prefill and bench mixed: whole requests, on the clock."""

import json
from dataclasses import replace

import pytest

from outrider import Engine
from outrider.model.config.shapes import shape_config
from outrider_bench.random_checkpoint import checkpoint_config, write_checkpoint
from outrider_cpu import backend as cpu_backend

SMALL = ("--backend", "cpu", "--shape", "tiny", "--dtype", "float32")


def test_first_tokens(outrider, tmp_path):
    plot = tmp_path / "prompts.svg"
    arguments = ("--prompt-tokens", "8,40", "--repeat", "2", "--prefill-chunk", "16", "--plot", str(plot))
    result = outrider("bench", "prefill", *SMALL, *arguments, "--json").json
    assert [row["prompt_tokens"] for row in result["results"]] == [8, 40]
    assert (result["speculate"], result["acceptance"], result["prefill_chunk"]) == ("eagle", "real", 16)
    for row in result["results"]:
        assert 0 < row["first_token_ms_min"] <= row["first_token_ms"] <= row["first_token_ms_max"]
        assert len(row["runs"]) == 2
        assert row["going_on_ms"] > 0
        assert row["device_ms"] > 0
        assert row["profile_clock"] == "host"
    assert plot.read_text().count("<circle") == 2


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_written_checkpoint_is_loaded_and_a_simulated_device_has_times_of_its_own(name, outrider, tmp_path):
    shape = shape_config("tiny")
    if name == "qwen3_moe":  # whose layers have norms of queries and keys, which the EAGLE head has not
        shape = replace(shape, family=name, qk_norm=True, experts=shape_config("qwen3-30b-a3b").experts)
        shape = replace(shape, experts=replace(shape.experts, count=4, per_token=2, intermediate_size=32))
    config = tmp_path / "shape.json"
    config.write_text(json.dumps(checkpoint_config(shape, dtype="float32")))
    written = write_checkpoint(str(config), tmp_path, shard=100_000)
    assert len(list(written.target.glob("model-*.safetensors"))) > 1
    assert written.bytes == sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    files = ("--model", str(written.target), "--draft", str(written.draft), "--speculate", "eagle")
    sizes = ("--prompt-tokens", "8", "--repeat", "1", "--dtype", "float32", "--mode", "staged", "--no-graphs")
    shown = outrider("bench", "prefill", "--backend", "sim", *files, *sizes)
    assert shown.code == 0, shown.err
    (row,) = [line.split() for line in shown.out.splitlines() if line.strip().startswith("8 ")]
    assert float(row[3]) > 0


def test_a_mixed_load(outrider):
    load = ("--requests", "6", "--prompts", "3-20", "--outputs", "2-9", "--max-requests", "3", "--accept-length", "2.5")
    drafts = ("--draft-weights", "fp8", "--draft-vocabulary", "40")
    result = outrider("bench", "mixed", *SMALL, *load, *drafts, "--json").json
    assert (result["draft_weights"], result["draft_vocabulary"]) == ("fp8", "40")
    assert (result["quantized"], result["draft"]) == (None, "random weights")
    assert result["load"]["requests"] == 6
    assert result["tokens_per_s"] == pytest.approx(result["load"]["output_tokens"] / result["seconds"])
    assert result["acceptance"] == "synthetic, mean 2.5"
    assert result["max_requests"] == 3
    for name in ("first_token_ms", "between_tokens_ms"):
        shares = result[name]
        assert 0 < shares["p50"] <= shares["p95"] <= shares["p99"] <= shares["max"] <= 1e3 * result["seconds"]


def test_the_bundled_model_serves_a_load_too(outrider):
    load = ("--requests", "3", "--prompts", "3-9", "--outputs", "2-5", "--draft-tokens", "2", "--draft-weights", "int8")
    shown = outrider("bench", "mixed", "--backend", "cpu", *load)
    assert shown.code == 0
    assert "bundled model on cpu" in shown.out
    assert "uniform 3 to 9" in shown.out


def test_a_prompt_may_be_as_long_as_the_models_context_lets_it(outrider, tmp_path):
    """Room for drafts isn't needed beyond it."""
    shape = checkpoint_config(replace(shape_config("tiny"), max_context=40), dtype="float32")
    (tmp_path / "config.json").write_text(json.dumps(shape))
    given = ("--backend", "cpu", "--shape", str(tmp_path / "config.json"), "--prompt-tokens", "32")
    result = outrider("bench", "prefill", *given, "--repeat", "1", "--json")
    assert (result.code, result.json["max_context"]) == (0, 40), result.err
    few = ("--prompt-tokens", "36", "--new-tokens", "4")
    assert outrider("bench", "decode", *given, *few, "--json").json["results"][0]["iterations"] > 0


@pytest.mark.parametrize(("context", "measured"), [(600, [512]), (40, [])])
def test_default_prompt_lengths_are_those_that_fit(outrider, tmp_path, context, measured):
    shape = checkpoint_config(replace(shape_config("tiny"), max_context=context), dtype="float32")
    (tmp_path / "config.json").write_text(json.dumps(shape))
    given = ("--backend", "cpu", "--shape", str(tmp_path / "config.json"), "--repeat", "1", "--json")
    result = outrider("bench", "prefill", *given)
    assert [row["prompt_tokens"] for row in result.json.get("results", ())] == measured
    assert ("--prompt-tokens 512 and the 8 tokens after them don't fit" in result.out) is (measured == [])


@pytest.mark.parametrize(
    ("named", "bfloat16", "dtype", "why"),
    [
        ("float32", True, "float32", "the config's"),
        ("float64", True, "float64", "the config's"),
        ("int8", True, "bfloat16", "the published checkpoint's"),
        (None, True, "bfloat16", "the published checkpoint's"),
        (
            None,
            False,
            "float32",
            "the published checkpoint is in bfloat16, and the device's own kernels run in float32, float64",
        ),
    ],
)
def test_a_config_says_the_dtype_of_its_shape(named, bfloat16, dtype, why, outrider, tmp_path, monkeypatch):
    """Each case sets ``bfloat16``, the processor's ability, itself."""
    monkeypatch.setattr(cpu_backend, "computes_bfloat16", lambda: bfloat16)
    config = checkpoint_config(shape_config("tiny"), dtype="float32") | {"dtype": named, "torch_dtype": named}
    (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    given = ("--backend", "cpu", "--shape", str(tmp_path / "config.json"), "--prompt-tokens", "8", "--repeat", "1")
    result = outrider("bench", "prefill", *given, "--json")
    assert result.code == 0, result.err
    (found,) = [each for each in result.json["chosen"] if each["name"] == "dtype"]
    assert (found["value"], found["why"]) == (dtype, why)


@pytest.mark.parametrize(
    "arguments",
    [
        ("prefill", "--prompt-tokens", "64,64,128", "--repeat", "1", "--kv-memory", "0.005"),
        ("mixed", "--requests", "4", "--prompts", "40-40", "--outputs", "2-2", "--kv-memory", "0.005"),
    ],
)
def test_no_prompt_that_is_timed_is_served_from_a_cached_prefix(arguments, outrider, monkeypatch):
    made = []
    init = Engine.__init__

    def noted(self, *given, **named):
        init(self, *given, **named)
        made.append(self)

    monkeypatch.setattr(Engine, "__init__", noted)
    command, *rest = arguments
    result = outrider("bench", command, "--backend", "cpu", *rest)
    assert result.code == 0, result.err
    assert made
    assert [engine.stats.prefix_hits for engine in made] == [0] * len(made)
