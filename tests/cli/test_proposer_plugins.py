"""Proposers of plugins, through the command line; and the two example packages, as pip installs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.bundled import bundled
from outrider.device import BackendLoadError, ConfigError
from outrider.registry import get_backend
from outrider.speculative import build
from outrider.speculative.plugin import BUILTIN_PROPOSERS

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
GROUP = "outrider.proposers"
SOURCE = """
    from outrider.speculative.plugin import ProposerInfo, hookimpl
    @hookimpl
    def proposer_info():
        return ProposerInfo(name={name!r}, description="made up", needs="patience", {info})
    @hookimpl
    def create_proposer(options):
        {make}
"""


@pytest.fixture
def guess(install):
    def add(name="guess", info="", make="raise AssertionError('not called')"):
        install(name, SOURCE.format(name=name, info=info, make=make), group=GROUP)

    return add


def generate(outrider, name):
    return outrider("generate", "--prompt", "def", "--max-tokens", "4", "--speculate", name)


def test_every_builder_has_a_name_that_people_can_type():
    assert set(build._BUILDER_OF) == set(BUILTIN_PROPOSERS)


def test_the_api_finds_the_plugins_that_the_command_line_finds(guess):
    from outrider.engine.engine import Engine

    guess(make="raise OSError('asked')")
    with pytest.raises(BackendLoadError, match="hook create_proposer failed: OSError: asked"):
        Engine.from_checkpoint(bundled("target"), get_backend("cpu"), speculate="guess")
    with pytest.raises(ConfigError, match=r"speculate is 'gues'; expected one of .*mine.*; plugins: guess"):
        Engine.from_checkpoint(
            bundled("target"), get_backend("cpu"), speculate="gues", builders={"mine": lambda options: None}
        )


def test_a_builder_that_is_given_comes_before_a_plugin(guess):
    from outrider.engine.engine import Engine
    from outrider.speculative.proposer import NonSpeculativeProposer

    guess()
    engine = Engine.from_checkpoint(
        bundled("target"), get_backend("cpu"), speculate="guess", builders={"guess": lambda options: NonSpeculativeProposer()}
    )
    assert engine.generate([[1, 2, 3]])[0].token_ids


def test_an_unknown_name_lists_outriders_and_the_plugins(outrider, guess):
    assert "did you mean" not in generate(outrider, "gues").err
    guess()
    err = generate(outrider, "gues").err
    assert "expected one of eagle, eagle3, peagle, dflash" in err
    assert "none, guess; did you mean 'guess'?" in err


@pytest.mark.parametrize(
    ("make", "says"),
    [
        ("return None", "hook create_proposer returned None, expected a Proposer"),
        ("raise OSError('table.bin: not found')", "hook create_proposer failed: OSError: table.bin: not found"),
    ],
)
def test_a_plugin_that_makes_no_proposer(outrider, guess, make, says):
    guess(make=make)
    result = generate(outrider, "guess")
    assert result.code == 1
    assert says in result.err


def test_unusable_here(outrider, guess):
    guess(info="usable=False, reason='no table', advice='make one'")
    assert "proposer 'guess' is installed but can't run here: no table; make one" in generate(outrider, "guess").err


def test_a_broken_one_stops_nobody_and_is_listed(outrider, install, guess):
    install("bad", "import no_such_package", group=GROUP)
    guess()
    assert generate(outrider, "none").code == 0
    others = {row["name"]: row for row in outrider("doctor", "--json").json["others"]}
    assert others["guess"]["status"] == "usable"
    assert others["bad"]["status"] == "broken"
    assert "no_such_package" in others["bad"]["reason"]
    for command in ("doctor", "backends"):
        out = outrider(command).out
        assert "--speculate guess" in out
        assert "no_such_package" in out
    assert outrider("models", "--json").json["proposers"]["guess"] == "patience (from outrider-guess 1.0)"


def test_none_takes_the_place_of_outriders_own(outrider, guess):
    guess(name="ngram")
    assert generate(outrider, "ngram").code == 0
    others = outrider("doctor", "--json").json["others"]
    (row,) = (each for each in others if each["name"] == "ngram")
    assert row["status"] == "broken"
    assert "nothing takes its place" in row["reason"]


# -- the examples ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"]
    packages = [str(EXAMPLES / "bigram_proposer"), str(EXAMPLES / "lean_kernels")]
    subprocess.run([*command, str(target), *packages], check=True, timeout=300)
    return target


@pytest.fixture
def found(site, monkeypatch):
    """The examples, as this process finds them."""
    monkeypatch.syspath_prepend(str(site))
    yield
    for name in [name for name in sys.modules if name.startswith(("outrider_bigram", "outrider_lean"))]:
        del sys.modules[name]


@pytest.mark.usefixtures("found")
@pytest.mark.slow
def test_the_example_proposer_drafts_and_the_tokens_are_the_same(outrider):
    found = outrider(
        *("generate", "--prompt", "def read(self", "--max-tokens", "96", "--compare", "--json"),
        *("--speculate", "bigram", "--backend", "cpu"),
    )
    assert found.code == 0, found.err
    assert found.json["same_tokens"] is True
    assert found.json["speculate"] == "bigram"
    assert found.json["acceptance_length"] > 1.1, "it must really draft"
    assert found.json["iterations"] < found.json["non_speculative"]["iterations"]


@pytest.mark.usefixtures("found")
def test_the_example_kernels_and_proposer_together(outrider):
    chosen = ("--backend", "cpu:kernels=lean", "--speculate", "bigram")
    found = outrider("generate", "--prompt", "def read(self", "--max-tokens", "24", "--compare", "--json", *chosen)
    assert found.json["same_tokens"] is True
    refused = outrider("generate", "--prompt", "def", "--backend", "sim:kernels=lean")
    assert (refused.code, "is for cpu, not for 'sim'" in refused.err) == (1, True)
    tree = outrider("generate", "--prompt", "def", "--backend", "cpu", "--speculate", "bigram", "--draft-topk", "2")
    assert (tree.code, "chains alone" in tree.err) == (1, True)


@pytest.mark.slow
def test_the_example_kernels_pass_the_kits_kernel_tests(site, monkeypatch):
    from outrider_conformance.run import conform

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(site))
    report = conform("cpu:kernels=lean", level="L4", extra=["-k", "l4_kernels", "--kit-draws", "4"])
    outcomes = {test["outcome"] for test in report["tests"]}
    assert report["kernels"] == "lean"
    assert "passed" in outcomes
    assert "failed" not in outcomes, [test["id"] for test in report["tests"] if test["outcome"] == "failed"]


@pytest.mark.slow
def test_the_kit_finds_kernels_that_are_wrong(install):
    """The same tests, over a set whose norm forgets the weight."""
    from outrider_conformance.run import conform

    wrong = """
    from outrider.device.plugin import KernelInfo, hookimpl
    @hookimpl
    def kernel_info():
        return KernelInfo(name="wrong", description="")
    @hookimpl
    def create_kernels(backend):
        from outrider.device import KernelSet
        class Wrong(KernelSet):
            name = "wrong"
            def rms_norm(self, x, weight, eps):
                return super().rms_norm(x, weight * 0 + 1, eps)
        return Wrong()
    """
    path = install("wrong", wrong, group="outrider.kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")]))
        report = conform("cpu:kernels=wrong", level="L4", extra=["-k", "l4_kernels and rms_norm"])
    assert any(test["outcome"] == "failed" and "rms_norm" in test["id"] for test in report["tests"])
