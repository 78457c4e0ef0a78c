"""Benchmarks that run in processes of their own: start-up, other engines, sanitizers."""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.registry import Registry
from outrider_bench.child import ChildFailed, run_child
from outrider_bench.commands import sanitizer as bench_sanitizer

SMALL = ("--shape", "tiny", "--dtype", "float32")


def test_a_start_in_stages(outrider):
    result = outrider("bench", "startup", "--backend", "cpu", *SMALL, "--batch", "2", "--graphs", "--json").json
    (start,) = result["starts"].values()
    assert list(start["stages"]) == [
        "import",
        "open the device",
        "load",
        "allocate",
        "compile kernels",
        "capture graphs",
        "first token",
    ]
    assert start["stages"]["import"] > 0.2
    assert start["stages"]["first token"] > 0
    assert sum(start["stages"].values()) == pytest.approx(start["total"])
    assert start["compiled"] is None
    assert "graphs captured" in start["captured"]


def test_a_backend_that_compiles_starts_cold_and_warm(outrider, monkeypatch):
    calls = []

    def child(module, work, *, variables, limit_s):
        calls.append(variables)
        stages = {"import": 1.0, "compile kernels": 2.0 / len(calls)}
        total = sum(stages.values())
        chosen = {"dtype": "bfloat16", "chosen": [{"name": "mode", "value": "fused", "why": "it's there"}]}
        return {"stages": stages, "total": total, "compiled": {"linear": 3}, "captured": None, "device": "x:0", **chosen}

    info = Registry.info
    monkeypatch.setattr(Registry, "info", lambda self, name: replace(info(self, name), cache_variables=("SOME_CACHE",)))
    monkeypatch.setattr("outrider_bench.commands.startup.run_child", child)
    shown = outrider("bench", "startup", "--backend", "cpu")
    lines = {line.split("  ")[0]: line.split()[-2:] for line in shown.out.splitlines() if line}
    assert lines["stage"] == ["cold", "warm"]
    assert lines["compile kernels"] == ["2.00", "1.00"]
    assert "compiled: linear 3" in shown.out
    assert "chosen: mode fused (it's there)" in shown.out
    assert calls[0] == calls[1]  # the cache that the cold one has left
    assert calls[0]["SOME_CACHE"].startswith("/")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("startup", "--shape", "no-such-shape"), "there is no shape 'no-such-shape'"),
        (("startup", "--speculate", "mtp"), "--speculate is 'mtp'"),
        (("peers", "--engines", "outrider,outrider"), "--engines is 'outrider,outrider'"),
        (("peers", "--speculate", "ngram"), "--speculate is 'ngram'"),
        (("sanitizer", "--modes", "quick"), "--modes is 'quick'"),
    ],
)
def test_bad_input(outrider, arguments, message):
    command, *rest = arguments
    result = outrider("bench", command, "--backend", "cpu", *rest)
    assert result.code == 1
    assert message in result.err


def test_a_child_that_dies_says_how():
    with pytest.raises(ChildFailed, match=r"exit code 1.*No module named 'outrider\.cli\.nothing'|exit code 1.*nothing"):
        run_child("outrider.cli.nothing", {}, variables={}, limit_s=60)


def test_a_child_that_takes_too_long_is_ended():
    with pytest.raises(ChildFailed, match="within 0.01 s"):
        run_child("outrider_bench.startup_child", {}, variables={}, limit_s=0.01)


VLLM = """
class SpeculativeConfig:
    __dataclass_fields__ = {"synthetic_acceptance_length": None}

class SamplingParams:
    def __init__(self, **given):
        assert given["ignore_eos"] and given["temperature"] == 0.0
        self.count = given["max_tokens"]

class Metric:
    def __init__(self, name, value): self.name, self.value = name, value

class LLM:
    def __init__(self, model, **given):
        import json, pathlib
        config = json.loads((pathlib.Path(model) / "config.json").read_text())
        assert config["num_hidden_layers"] == 2 and config["vocab_size"] == 512
        assert given["load_format"] == "dummy" and not given["enable_prefix_caching"]
        self.speculative = given.get("speculative_config")
        self.drafts = self.passed = 0
        if self.speculative:
            draft = json.loads((pathlib.Path(self.speculative["model"]) / "config.json").read_text())
            assert draft["num_hidden_layers"] == 1
            assert self.speculative["rejection_sample_method"] == "synthetic"
            assert self.speculative["synthetic_acceptance_length"] == 2.5
    def generate(self, prompts, params, use_tqdm):
        import time
        time.sleep(0.004 * params.count)
        self.drafts += 2 * len(prompts); self.passed += 3 * len(prompts)
        one = type("Output", (), {"token_ids": list(range(params.count))})
        return [type("Request", (), {"outputs": [one]}) for _ in prompts]
    def get_metrics(self):
        name = "vllm:spec_decode_num_"
        return [Metric(name + "drafts", self.drafts), Metric(name + "accepted_tokens", self.passed)]
"""
SGLANG = """
import os, time
class Engine:
    def __init__(self, **given):
        assert given["load_format"] == "dummy" and given["disable_radix_cache"]
        self.speculative = "speculative_algorithm" in given
        assert ("SGLANG_SIMULATE_ACC_LEN" in os.environ) == self.speculative
        if self.speculative:
            assert os.environ["SGLANG_SIMULATE_ACC_LEN"] == "2.5" and given["speculative_num_draft_tokens"] == 4
    def generate(self, input_ids, sampling_params):
        count = sampling_params["max_new_tokens"]
        time.sleep(0.002 * count)
        meta = {"completion_tokens": count - SHORT, "spec_verify_ct": 3}
        return [{"meta_info": meta} for _ in input_ids]
    def shutdown(self): pass
"""


def installed(tmp_path, name, source):
    package = tmp_path / name
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text(source)
    if name == "vllm":
        (package / "config.py").write_text("from vllm import SpeculativeConfig\n")
    metadata = tmp_path / f"{name}-9.9.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")


WORK = (*SMALL, "--batch", "1,2", "--prompt-tokens", "8", "--new-tokens", "11", "--accept-length", "2.5", "--json")


def test_what_a_child_has_started_ends_with_it(tmp_path):
    """An engine's own processes would hold the device, and the next engine would be measured beside them."""
    (tmp_path / "lingering.py").write_text(
        "import json, pathlib, subprocess, sys, time\n"
        "more = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], stdout=subprocess.DEVNULL)\n"
        "work = json.loads(sys.argv[1])\n"
        "pathlib.Path(work['file']).write_text(str(more.pid))\n"
        "time.sleep(work['seconds'])\n"
        "print('{}')\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    for seconds, limit_s in ((60, 5), (0, 60)):
        work = {"file": str(tmp_path / "pid"), "seconds": seconds}
        if seconds:
            with pytest.raises(ChildFailed, match="its processes were ended"):
                run_child("lingering", work, variables={"PYTHONPATH": path}, limit_s=limit_s)
        else:
            run_child("lingering", work, variables={"PYTHONPATH": path}, limit_s=limit_s)
        pid, patience = int((tmp_path / "pid").read_text()), time.monotonic() + 10
        while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            assert time.monotonic() < patience, "a process of the child's still runs"
            time.sleep(0.05)


def interrupted_at_the_second(monkeypatch):
    calls = []

    def child(module, work, *, variables, limit_s):
        calls.append(module)
        if len(calls) > 1:
            raise KeyboardInterrupt
        row = {"batch": 1, "iteration_ms": 4.5, "tokens_per_s": 600.0, "acceptance_length": 2.5}
        return {"results": [row | {"limit_ms": 4.0, "ratio_to_limit": 1.125}], "kernels": "torch"}

    monkeypatch.setattr("outrider_bench.commands.peers.run_child", child)


def test_what_was_measured_before_ctrl_c_is_shown(outrider, monkeypatch):
    interrupted_at_the_second(monkeypatch)
    result = outrider("bench", "peers", "--backend", "cpu", "--engines", "outrider,transformers")
    assert result.code == 130
    assert "4.500" in result.out
    assert "interrupted at outrider, none, after 1 of 3 measurements" in result.err


def test_what_was_measured_before_ctrl_c_is_in_the_json(outrider, monkeypatch):
    interrupted_at_the_second(monkeypatch)
    result = outrider("bench", "peers", "--backend", "cpu", "--engines", "outrider,transformers", "--json")
    assert result.code == 130
    assert result.json["error"]["type"] == "Interrupted"
    (measured,) = result.json["engines"]
    assert measured["results"][0]["iteration_ms"] == 4.5


def test_other_engines_get_the_same_work(child, tmp_path):
    """Stand-ins with the parts of the real ones that are used; they check what they're given."""
    installed(tmp_path, "vllm", VLLM)
    installed(tmp_path, "sglang", SGLANG.replace("SHORT", "0"))
    result = child("bench", "peers", "--backend", "cpu", "--engines", "vllm,sglang", *WORK, path=(tmp_path,)).json
    found = {(each["engine"], each["speculate"]): each for each in result["engines"]}
    assert {each["status"] for each in found.values()} == {"measured"}, found
    assert all(each["version"] == "9.9" for each in found.values())
    for engine, ms in (("vllm", 4), ("sglang", 2)):
        plain, speculative = found[engine, "none"], found[engine, "eagle"]
        assert [row["batch"] for row in plain["results"]] == [1, 2]
        for row in plain["results"]:
            assert row["iteration_ms"] == pytest.approx(ms, rel=0.5)
            assert row["tokens_per_s"] == pytest.approx(row["batch"] * 1e3 / row["iteration_ms"])
        for row in speculative["results"]:
            # As the engine counted it: 1 + 3/2 tokens a draft here, 10 tokens in 3 verifications there.
            assert row["acceptance_length"] == pytest.approx({"vllm": 2.5, "sglang": 10 / 3}[engine])
            assert row["iteration_ms"] == pytest.approx(ms * row["acceptance_length"], rel=0.5)


def test_an_engine_that_does_less_work_has_no_figures(child, tmp_path):
    installed(tmp_path, "sglang", SGLANG.replace("SHORT", "1"))
    arguments = ("--engines", "sglang", "--speculate", "none", *WORK)
    (found,) = child("bench", "peers", "--backend", "cpu", *arguments, path=(tmp_path,)).json["engines"]
    assert found["results"] == []
    assert found["status"] == "failed: asked for 1 new tokens, a request got 0: that isn't the same work"


def test_what_is_not_installed_is_said_so_and_transformers_is_measured(outrider):
    engines = ("--engines", "outrider,transformers,vllm", "--speculate", "none")
    result = outrider("bench", "peers", "--backend", "cpu", "--mode", "staged", *engines, *WORK).json
    found = {each["engine"]: each for each in result["engines"]}
    assert {name: each["status"] for name, each in found.items()} == {
        "outrider": "measured",
        "transformers": "measured",
        "vllm": "not installed",
    }
    for each in found.values():
        assert [row["batch"] for row in each["results"]] == ([1, 2] if each["status"] == "measured" else [])
    assert "no synthetic acceptance" in found["transformers"]["settings"]
    assert result["acceptance"] == "synthetic, mean 2.5"


SIZE = {"batch": 1, "new_tokens": 10, "prompt_tokens": 8, "draft_tokens": 2, "backend": "cpu"}


@pytest.mark.parametrize("watched", [False, True])
def test_decoding_is_measured_alone_and_watched(watched):
    found = bench_sanitizer.measure({**SIZE, "config": bench_sanitizer.MODES["fused"], "watched": watched})
    assert found["iteration_ms"] > 0
    assert found["findings"] == []
    assert (found["operations"] or 0) > 500 if watched else found["operations"] is None


@pytest.mark.slow
def test_sanitizers_are_compared_in_processes_of_their_own(outrider):
    size = ("--batch", "1", "--new-tokens", "10", "--prompt-tokens", "8", "--draft-tokens", "2")
    rows = outrider("bench", "sanitizer", "--backend", "cpu", *size, "--json").json["results"]
    assert [row["mode"] for row in rows] == list(bench_sanitizer.MODES)
    assert all(row["ours_slowdown"] > 1 and row["torch_ms"] is None for row in rows)


def test_torchs_own_sanitizer_runs_under_the_variables_that_the_backend_names(outrider, monkeypatch):
    def child(module, work, *, variables, limit_s):
        if variables == {"SOME_SANITIZER": "1"} and work["config"]["mode"] == "fused":
            raise ChildFailed("it gave up")
        ms = 6.0 if variables else 2.0 if work["watched"] else 1.0
        return {"iteration_ms": ms, "operations": 9 if work["watched"] else None, "findings": []}

    info = Registry.info
    variables = {"SOME_SANITIZER": "1"}
    monkeypatch.setattr(Registry, "info", lambda self, name: replace(info(self, name), sanitizer_variables=variables))
    monkeypatch.setattr("outrider_bench.commands.sanitizer.run_child", child)
    shown = outrider("bench", "sanitizer", "--backend", "cpu", "--modes", "graphs,fused")
    assert shown.code == 0
    rows = [line.split() for line in shown.out.splitlines()]
    assert ["graphs", "1.000", "2.000", "2.0", "0", "6.000", "6.0"] in rows
    assert ["fused", "1.000", "2.000", "2.0", "0", "n/a"] in rows
    assert "torch's own, fused: it gave up" in shown.out


def test_a_finding_in_the_engine_fails_the_command(outrider, monkeypatch):
    def child(module, work, *, variables, limit_s):
        return {"iteration_ms": 1.0 + work["watched"], "operations": 5, "findings": ["a race"] if work["watched"] else []}

    monkeypatch.setattr("outrider_bench.commands.sanitizer.run_child", child)
    shown = outrider("bench", "sanitizer", "--backend", "cpu", "--modes", "staged")
    assert shown.code == 1
    assert "staged: a race" in shown.out
    assert "none for this backend" in shown.out
