"""The same work on several engines: what each is given, what is made of its runs, and what is said where one can't."""

import contextlib
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest

from outrider.model.config.model_config import ModelConfig, RecurrentConfig
from outrider.model.config.rope import RopeConfig
from outrider.model.config.shapes import shape_config
from outrider_bench.acceptance import acceptance_rates
from outrider_bench.child import BenchFailed, open_session
from outrider_bench.commands import peers
from outrider_bench.load import MixedLoad, quantiles, token_ids
from outrider_bench.peers.work import PeerWork
from outrider_bench.plot import series_svg
from outrider_bench.random_checkpoint import checkpoint_config, write_configs
from outrider_bench.random_model import RandomModel
from processes import gone

SMALL = ("--shape", "tiny", "--dtype", "float32")
VLLM = """
class SpeculativeConfig:
    __dataclass_fields__ = {"synthetic_acceptance_rates": None}

def output(number, count):
    one = type("Output", (), {"token_ids": list(range(count))})
    return type("Request", (), {"request_id": number, "outputs": [one]})

class Engine:
    def __init__(self): self.left = {}
    def add_request(self, number, prompt, params):
        assert params.given["output_kind"] == "delta" and prompt["prompt_token_ids"]
        self.left[number] = params.count
    def has_unfinished_requests(self): return bool(self.left)
    def step(self):
        made = [output(number, min(2, count)) for number, count in self.left.items()]
        self.left = {number: count - 2 for number, count in self.left.items() if count > 2}
        return made

class SamplingParams:
    def __init__(self, **given):
        assert given["ignore_eos"] and given["temperature"] == 0.0
        self.count, self.given = given["max_tokens"], given

class Metric:
    def __init__(self, name, value): self.name, self.value = name, value

class LLM:
    def __init__(self, model, **given):
        import json, pathlib
        config = json.loads((pathlib.Path(model) / "config.json").read_text())
        assert config["num_hidden_layers"] in (2, 4) and config["vocab_size"] == 512
        assert given["load_format"] == "dummy" and not given["enable_prefix_caching"]
        quantized = config.get("quantization_config")
        self.speculative = given.get("speculative_config")
        self.drafts = self.passed = 0
        if self.speculative:
            draft = json.loads((pathlib.Path(self.speculative["model"]) / "config.json").read_text())
            if self.speculative["method"] == "mtp":
                assert self.speculative["model"] == model and config["mtp_num_hidden_layers"] == 1
                assert given["gdn_prefill_backend"] == "triton"
            else:
                assert draft["num_hidden_layers"] == 1 and draft.get("quantization_config") == quantized
            assert self.speculative["rejection_sample_method"] == "synthetic"
            rates = self.speculative["synthetic_acceptance_rates"]
            assert abs(1 + sum(rates) - 2.5) < 1e-6 and abs(rates[1] - rates[0] ** 2) < 1e-6
        self.llm_engine = Engine()
    def generate(self, prompts, params, use_tqdm):
        import time
        time.sleep(0.004 * max(each.count for each in params))
        self.drafts += 2 * len(prompts); self.passed += 3 * len(prompts)
        return [output(str(i), params[i].count) for i in range(len(prompts))]
    def get_metrics(self):
        name = "vllm:spec_decode_num_"
        return [Metric(name + "drafts", self.drafts), Metric(name + "draft_tokens", 4 * self.drafts),
                Metric(name + "accepted_tokens", self.passed)]
"""


def installed(tmp_path, name, source):
    package = tmp_path / name
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text(source)
    if name == "vllm":
        (package / "config.py").write_text("from vllm import SpeculativeConfig\n")
        (package / "sampling_params.py").write_text("class RequestOutputKind:\n    DELTA = 'delta'\n")
    metadata = tmp_path / f"{name}-9.9.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")


WORK = (*SMALL, "--batch", "1,2", "--prompt-tokens", "8", "--new-tokens", "41", "--accept-length", "2.5", "--json")
MIXED = (
    *("--phases", "decode,prefill,batch-prefill,mixed,context", "--prefill-tokens", "16", "--contexts", "12"),
    *("--prefill-batches", "3x12", "--lengths", "log-normal"),
    *("--requests", "5", "--prompts", "2-9", "--outputs", "1-7"),
)


def interrupted_at_the_second(monkeypatch):
    """Stands in for the children: the first answers one run, then Ctrl-C comes."""
    answers = [{"iteration_ms": 4.5, "tokens_per_s": 600.0, "acceptance_length": 2.5, "limit_ms": 4.0}]

    def ask(request, *, limit_s):
        if not answers:
            raise KeyboardInterrupt
        return answers.pop()

    @contextlib.contextmanager
    def opened(function, work, *, variables, limit_s, log, python):
        yield SimpleNamespace(about={"version": "1", "settings": "set", "start_s": 1.0}, ask=ask)

    monkeypatch.setattr("outrider_bench.commands.peers.open_session", opened)


INTERRUPTED = ("bench", "peers", "--backend", "cpu", "--engines", "outrider,transformers", "--repeat", "1")


def test_what_was_measured_before_ctrl_c_is_shown(outrider, monkeypatch):
    interrupted_at_the_second(monkeypatch)
    shown = outrider(*INTERRUPTED)
    assert "4.500" in shown.out
    assert "interrupted at outrider, eagle, after 1 of 3 measurements" in shown.err
    interrupted_at_the_second(monkeypatch)
    result = outrider(*INTERRUPTED, "--json")
    assert (shown.code, result.code) == (130, 130)
    assert result.json["error"]["type"] == "Interrupted"
    (measured,) = result.json["engines"]
    assert measured["results"][0]["iteration_ms"] == 4.5
    assert measured["results"][0]["ratio_to_limit"] == 1.125


@pytest.mark.slow
def test_other_engines_get_the_same_work(child, tmp_path):
    """Stand-ins with the parts of the real ones that are used; they check what they're given."""
    installed(tmp_path, "vllm", VLLM)
    kept = tmp_path / "kept"
    arguments = ("--engines", "vllm", *WORK, *MIXED, "--repeat", "1", "--keep", str(kept))
    result = child("bench", "peers", "--backend", "cpu", *arguments, path=(tmp_path,)).json
    assert {"tiny-float32", "vllm-eagle.log", "vllm-none.log"} <= {each.name for each in kept.iterdir()}
    assert (kept / "tiny-float32" / "target" / "config.json").is_file()
    found = {(each["engine"], each["speculate"]): each for each in result["engines"]}
    assert {(each["engine"], each["status"]) for each in found.values()} == {("vllm", "measured")}
    assert all(each["version"] == "9.9" for each in found.values())
    plain, speculative = found["vllm", "none"], found["vllm", "eagle"]
    assert [row["batch"] for row in plain["results"]] == [1, 2]
    for row in plain["results"]:
        assert row["iteration_ms"] > 0  # a busy machine makes it anything
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * 1e3 / row["iteration_ms"])
    for row in speculative["results"]:
        # As the engine counted it: 1 + 3/2 tokens a draft.
        assert row["acceptance_length"] == pytest.approx(2.5)
        in_a_row = row["tokens_per_s"] * row["iteration_ms"] / 1e3
        assert in_a_row == pytest.approx(row["batch"] * row["acceptance_length"])
    for each in (plain, speculative):
        assert [row["prompt_tokens"] for row in each["context"]] == [12]
        (row,) = each["prefill"]
        assert row["prompt_tokens"] == 16
        assert row["first_token_ms"] >= 4  # ms: the stand-in sleeps so long for a token
        (row,) = each["batch_prefill"]
        assert (row["prompts"], len(row["runs"])) == ("3 x 12", 1)
        assert row["seconds"] >= 0.004
        assert row["prompt_tokens_per_s"] == pytest.approx(36 / row["seconds"])
    mixed, seen = found["vllm", "none"]["mixed"], found["vllm", "none"]["latency"]
    tokens = result["mixed"]["output_tokens"]
    assert mixed["tokens_per_s"] == pytest.approx(tokens / mixed["seconds"])
    assert set(seen["first_token_ms"]) == set(seen["between_tokens_ms"]) == {"p50", "p95", "p99", "max"}


HYBRID = ModelConfig(
    family="qwen3_5",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_size=32,
    max_context=1024,
    rms_eps=1e-6,
    qk_norm=True,
    attention_gate=True,
    norm_offset=1.0,
    rope=RopeConfig(theta=1e7, rotated_share=0.25),
    recurrent=RecurrentConfig(layers=(0, 1, 2), key_heads=4, value_heads=4, key_size=16, value_size=16, kernel_size=4),
)
WITHOUT_TOKENS = {"family": "", "eos_token_ids": (), "bos_token_id": None}


def same_sizes(found, expected):
    rope = replace(found.rope, original_context=expected.rope.original_context)
    return replace(found, rope=rope, **WITHOUT_TOKENS) == replace(expected, **WITHOUT_TOKENS)


@pytest.mark.parametrize("shape", ["qwen3.5-27b", "qwen3.5-35b-a3b"])
def test_a_hybrids_config_says_its_sizes(shape, tmp_path):
    target, draft = write_configs(shape, tmp_path, dtype="bfloat16")
    assert same_sizes(shape_config(str(target)), shape_config(shape))
    content = json.loads((target / "config.json").read_text())
    assert content["rope_parameters"]["mrope_section"] == [11, 11, 10]
    assert "layer_types" not in json.loads((draft / "config.json").read_text())


@pytest.mark.slow
def test_hybrids_run_in_vllms_own_packages_and_here(child, tmp_path):
    """vLLM is in a directory of packages that only its process sees, and gets the head that is part of the target."""
    packages, shape = tmp_path / "packages", tmp_path / "shape"
    packages.mkdir()
    shape.mkdir()
    installed(packages, "vllm", VLLM)
    (shape / "config.json").write_text(json.dumps(checkpoint_config(HYBRID, dtype="float32")))
    kinds = ("--engines", "outrider,vllm", "--speculate", "mtp", "--shape", str(shape), "--dtype", "float32")
    sizes = ("--batch", "2", "--prompt-tokens", "8", "--new-tokens", "41", "--accept-length", "2.5", "--repeat", "2")
    phases = ("--phases", "decode,batch-prefill", "--prefill-batches", "2x9", "--json")
    own = ("--vllm-packages", str(packages), "--vllm-arguments", '{"gdn_prefill_backend": "triton"}')
    result = child("bench", "peers", "--backend", "cpu", *kinds, *sizes, *phases, *own, VLLM_USE_X="1").json
    found = {each["engine"]: each for each in result["engines"]}
    assert {name: each["status"] for name, each in found.items()} == {"outrider": "measured", "vllm": "measured"}
    assert found["vllm"]["versions"]["vllm"] == "9.9"
    assert "vllm" not in found["outrider"]["versions"]
    assert "defaults, gdn_prefill_backend='triton', VLLM_USE_X=1" in found["vllm"]["settings"]
    for each in found.values():
        assert each["versions"]["torch"]
        assert [len(row["runs"]) for row in (*each["results"], *each["batch_prefill"])] == [2, 2]
    assert [(each["phase"], each["case"]) for each in result["ratios"]] == [("decode", 2), ("batch-prefill", "2 x 9")]


def test_an_interpreter_for_vllm_starts_vllm_alone(asked, outrider, tmp_path):
    python = tmp_path / "python"
    python.write_text("")
    arguments = ("--engines", "outrider,vllm", "--speculate", "none", "--batch", "1", "--repeat", "1")
    outrider("bench", "peers", "--backend", "cpu", *SMALL, *arguments, "--vllm-python", str(python))
    assert asked.interpreters == {"outrider": sys.executable, "vllm": str(python)}


@pytest.mark.slow
def test_an_engine_that_does_less_work_has_no_figures(child, tmp_path):
    installed(tmp_path, "vllm", VLLM.replace("params[i].count) for i", "params[i].count - 1) for i"))
    arguments = ("--engines", "vllm", "--speculate", "none", "--repeat", "1", *WORK)
    place = tmp_path / "temporary"
    place.mkdir()
    given = {"path": (tmp_path,), "TMPDIR": str(place)}
    (found,) = child("bench", "peers", "--backend", "cpu", *arguments, **given).json["engines"]
    assert found["results"] == []
    assert found["status"] == "failed: asked for 16 new tokens, a request got 15: that isn't the same work"
    assert list(place.glob("outrider-*")) == []


@pytest.mark.slow
def test_what_is_not_installed_is_said_so_and_transformers_is_measured(outrider):
    engines = ("--engines", "outrider,transformers,vllm", "--speculate", "none", "--repeat", "2")
    result = outrider("bench", "peers", "--backend", "cpu", "--mode", "staged", *engines, *WORK).json
    found = {each["engine"]: each for each in result["engines"]}
    assert {name: each["status"] for name, each in found.items()} == {
        "outrider": "measured",
        "transformers": "measured",
        "vllm": "not installed",
    }
    for each in found.values():
        assert [row["batch"] for row in each["results"]] == ([1, 2] if each["status"] == "measured" else [])
        assert all(len(row["runs"]) == 2 for row in each["results"])
    first, second = found["outrider"]["results"][0], found["transformers"]["results"][0]
    ratio = result["ratios"][0]
    assert (ratio["engine"], ratio["phase"], ratio["case"]) == ("transformers", "decode", 1)
    assert ratio["ratio"] == pytest.approx(first["tokens_per_s"] / second["tokens_per_s"])
    assert ratio["at_equal_acceptance"] == pytest.approx(second["iteration_ms"] / first["iteration_ms"])
    assert "no synthetic acceptance" in found["transformers"]["settings"]
    assert result["acceptance"] == "synthetic, mean 2.5"


def test_a_session_that_dies_says_how_and_one_that_is_silent_is_ended(tmp_path):
    (tmp_path / "dying.py").write_text("import sys\ndef serve(given):\n    sys.exit('no such device')")
    (tmp_path / "silent.py").write_text("import time\ndef serve(given):\n    time.sleep(60)")
    path = {"PYTHONPATH": str(tmp_path)}
    with (
        pytest.raises(BenchFailed, match="dying:serve ended with exit code 1: no such device"),
        open_session("dying:serve", {}, variables=path, limit_s=30),
    ):
        pass
    began = time.monotonic()
    with (
        pytest.raises(BenchFailed, match="silent:serve didn't answer within"),
        open_session("silent:serve", {}, variables=path, limit_s=0.2),
    ):
        pass
    assert time.monotonic() - began < 30


LATE = """
import os, subprocess, sys, time
def serve(given):
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield {"pid": os.getpid(), "worker": worker.pid}
    time.sleep(60)
"""


def test_a_session_that_is_late_with_an_answer_is_ended_and_not_waited_for_again(tmp_path):
    (tmp_path / "late.py").write_text(LATE)
    with open_session("late:serve", {}, variables={"PYTHONPATH": str(tmp_path)}, limit_s=30) as opened:
        with pytest.raises(BenchFailed, match=r"late:serve didn't answer within 0\.1 s; its processes were ended"):
            opened.ask({}, limit_s=0.1)
        with pytest.raises(ProcessLookupError):
            os.kill(opened.about["pid"], 0)
        assert gone(opened.about["worker"], seconds=30)
        with pytest.raises(BenchFailed, match="late:serve ended with exit code -9"):
            opened.ask({}, limit_s=60)


SCRATCH = """
import pathlib, sys, time
def serve(given):
    pathlib.Path(given["scratch"], "target").mkdir()
    if given["dies"]:
        sys.exit("no such device")
    yield {"scratch": given["scratch"]}
    time.sleep(60)
"""


ENDS = {
    "as it should": contextlib.nullcontext,
    "it's interrupted": lambda: pytest.raises(KeyboardInterrupt),
    "it's late": lambda: pytest.raises(BenchFailed, match="didn't answer within"),
    "it dies": lambda: pytest.raises(BenchFailed, match="no such device"),
}


@pytest.mark.parametrize("ends", ENDS)
def test_a_session_leaves_no_directory_behind_however_it_ends(ends, tmp_path, monkeypatch):
    (tmp_path / "writing.py").write_text(SCRATCH)
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    path, work = {"PYTHONPATH": str(tmp_path)}, {"dies": ends == "it dies"}
    with ENDS[ends](), open_session("writing:serve", work, variables=path, limit_s=30) as opened:
        (scratch,) = place.iterdir()
        assert str(scratch) == opened.about["scratch"]
        assert [each.name for each in scratch.iterdir()] == ["target"]
        if ends == "it's interrupted":
            raise KeyboardInterrupt
        if ends == "it's late":
            opened.ask({}, limit_s=0.1)
    assert list(place.iterdir()) == []


WORKED = PeerWork(
    model=RandomModel(shape="tiny", speculate="eagle", draft_tokens=3, accept_length=2.5),
    dtype="float32",
    batches=(1, 4),
    prompt_tokens=8,
    new_tokens=16,
    rates=acceptance_rates(2.5, 3),
    device="cpu",
    phases=("decode", "prefill", "mixed"),
    lengths=(32,),
    prompt_batches=((2, 16),),
    contexts=(16, 24),
    load=MixedLoad(requests=3, seed=7, prompts=(4, 8), outputs=(2, 4)),
    max_requests=4,
    max_context=None,
    memory=0.5,
)


def test_the_cache_holds_what_runs_at_once():
    longest = sorted((prompt + output + 8 for prompt, output in WORKED.load.lengths), reverse=True)
    assert WORKED.context == 32 + 1 + 8
    assert WORKED.cached_tokens >= max(4 * (8 + 16 + 8), sum(longest))


def test_a_load_is_drawn_from_its_ranges_and_by_its_seed():
    load = MixedLoad(requests=256, seed=7)
    assert load.lengths == MixedLoad(requests=256, seed=7).lengths != MixedLoad(requests=256, seed=8).lengths
    assert {32 <= prompt <= 1036 and 16 <= output <= 400 for prompt, output in load.lengths} == {True}
    assert load.describe()["prompt_tokens"] == sum(prompt for prompt, _ in load.lengths)


def test_log_normal_lengths_lie_around_their_medians():
    load = MixedLoad(requests=2001, seed=7, prompts=(16, 4096), outputs=(16, 1024), distribution="log-normal")
    prompts, outputs = zip(*load.lengths, strict=True)
    assert (min(prompts), max(prompts), min(outputs), max(outputs)) == (16, 4096, 16, 1024)
    assert statistics.median(prompts) == pytest.approx(350, rel=0.1)
    assert statistics.median(outputs) == pytest.approx(160, rel=0.1)
    assert load.describe()["distribution"] == "prompts log-normal 16 to 4096, outputs log-normal 16 to 1024, all at once"


def test_quantiles():
    assert quantiles([]) is None
    assert quantiles([0.001 * n for n in range(1, 101)]) == pytest.approx({"p50": 50, "p95": 95, "p99": 99, "max": 100})
    for count in (1, 2, 3, 19, 20, 21, 99, 101, 250):
        values = [0.001 * n * n for n in reversed(range(count))]
        for share in (50, 95, 99):
            reached = [value for value in values if 100 * sum(other <= value for other in values) >= share * count]
            assert quantiles(values)[f"p{share}"] == 1e3 * min(reached)


def test_prompts_are_tokens_however_small_the_vocabulary():
    for vocabulary in (1, 2, 5, 6, 400):
        assert {0 <= token < vocabulary for token in token_ids(7, 50, vocabulary)} == {True}


@pytest.mark.parametrize(("length", "drafted"), [(1.0, 1), (2.98, 3), (4.0, 3)])
def test_equal_chances_make_the_length(length, drafted):
    rates = acceptance_rates(length, drafted)
    assert 1 + sum(rates) == pytest.approx(length)
    assert [rates[0] ** (place + 1) for place in range(drafted)] == pytest.approx(list(rates))


@pytest.fixture
def asked(monkeypatch):
    """Stands in for the children: what they are asked, in order."""

    class Asked(list):
        interpreters: ClassVar = {}

    made = Asked()

    @contextlib.contextmanager
    def opened(function, work, *, variables, limit_s, log, python):
        engine = function.removeprefix("outrider_bench.peers.").removesuffix(":serve")
        made.interpreters[engine] = python

        def ask(request, *, limit_s):
            made.append((engine, request["phase"], request["case"]))
            figures = {"iteration_ms": 4.0, "first_token_ms": 9.0, "seconds": 2.0, "tokens_per_s": 5.0 * len(made)}
            return figures | {"acceptance_length": 2.5, "first_tokens": None}

        yield SimpleNamespace(about={"version": "1", "settings": "set", "start_s": 3.0, "tuned_s": 7.0}, ask=ask)

    monkeypatch.setattr("outrider_bench.commands.peers.open_session", opened)
    monkeypatch.setattr("outrider_bench.commands.peers.find_spec", lambda name: name)
    return made


SEVERAL = ("--phases", "decode,prefill,context", "--batch", "1,2", "--prefill-tokens", "16", "--contexts", "12")


def test_everything_is_run_once_before_anything_twice_and_engines_alternate(asked, outrider):
    arguments = ("--engines", "outrider,vllm", "--speculate", "none", *SEVERAL, "--repeat", "2")
    result = outrider("bench", "peers", "--backend", "cpu", *SMALL, *arguments)
    once = [(engine, *case) for case in CASES for engine in ("outrider", "vllm")]
    assert asked == once * 2
    assert "outrider, none: started in 3.0 s, after 7.0 s of tuning" in result.out


CASES = (("decode", 1), ("decode", 2), ("prefill", 16), ("context", 12))


def test_what_was_measured_so_far_is_in_a_file_after_each_run(asked, outrider, tmp_path, monkeypatch):
    file, plot, sizes = tmp_path / "so-far.json", tmp_path / "plot.svg", []
    whole = peers.write_output

    def kept(option, path, text):
        if path == file:
            sizes.append([sum(len(row["runs"]) for row in each["results"]) for each in json.loads(text)["engines"]])
        return whole(option, path, text)

    monkeypatch.setattr(peers, "write_output", kept)
    arguments = ("--engines", "outrider", "--speculate", "none", *SEVERAL, "--repeat", "2", "--plot", str(plot))
    result = outrider("bench", "peers", "--backend", "cpu", *SMALL, *arguments, "--so-far", str(file))
    assert sizes == [[], [1], [2], [2], [2], [3], [4], [4], [4]]  # decode alone; the first is of its start
    assert "outrider, none: decode 2: iteration_ms 4, first_token_ms 9" in result.err
    drawn = plot.read_text()
    assert [drawn.count(text) for text in (": decode", ": prefill", ": context", "<svg")] == [1, 1, 1, 4]


def test_a_plot_has_each_engine_and_each_size():
    drawn = series_svg({"ours": [(1, 2.0), (8, 3.0)], "<theirs>": [(8, 4.0)]}, title="t", across="batch size", up="ms")
    assert drawn.count("<circle") == 3
    assert "&lt;theirs&gt;, 8: 4.000" in drawn


def test_a_plot_that_cannot_be_written_takes_no_measurement_with_it(asked, outrider, tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("outrider_bench.plot.write_whole", full)
    files = ("--plot", str(tmp_path / "x.svg"), "--so-far", str(tmp_path / "x.json"))
    arguments = ("--engines", "outrider", "--speculate", "none", *SEVERAL, "--repeat", "1", *files)
    result = outrider("bench", "peers", "--backend", "cpu", *SMALL, *arguments, "--json")
    assert result.code == 1
    assert [row["batch"] for row in result.json["engines"][0]["results"]] == [1, 2]
    assert result.json["plot_failed"].endswith("x.svg wasn't written: No space left on device")
    assert f"--so-far {tmp_path / 'x.json'} wasn't written" in result.err


@pytest.mark.slow
def test_prompts_have_tokens_of_a_small_vocabulary(outrider, tmp_path):
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 64}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config | {"max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e4}))
    sizes = ("--batch", "1", "--prompt-tokens", "40", "--new-tokens", "41", "--repeat", "1")
    kinds = ("--engines", "outrider", "--speculate", "none", "--dtype", "float32")
    result = outrider("bench", "peers", "--backend", "cpu", "--shape", str(file), *kinds, *sizes, "--json").json
    assert result["engines"][0]["status"] == "measured"
