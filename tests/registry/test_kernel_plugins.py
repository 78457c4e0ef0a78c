"""Kernel sets of plugins: found like backends, used only where they're asked for."""

import ast
import importlib
import sys
from pathlib import Path

import pytest

from outrider.device import (
    BackendLoadError,
    BackendNotFound,
    ConfigError,
    InterfaceError,
    KernelSet,
    PluginContractError,
)
from outrider.registry import Registry, get_backend
from outrider.registry.backends import KERNELS_OPTION

ROOT = Path(__file__).resolve().parents[2]
GROUP = "outrider.kernels"
SOURCE = """
    from outrider.device.plugin import KernelInfo, hookimpl
    @hookimpl
    def kernel_info():
        return KernelInfo(name="quick", description="made up", {info})
    @hookimpl
    def create_kernels(backend):
        from outrider.device import KernelSet
        {make}
"""
MAKE = """class Quick(KernelSet):
            name = "quick"
        Quick.made_for = backend
        return Quick()"""


@pytest.fixture
def quick(install):
    def add(info="", make=MAKE):
        install("quick", SOURCE.format(info=info, make=make), group=GROUP)

    return add


def test_used_where_asked_for_and_nowhere_else(quick):
    quick()
    chosen, own = get_backend("cpu:kernels=quick"), get_backend("cpu")
    assert chosen.kernels_in_use.name == "quick"
    assert chosen.kernels_in_use.made_for is chosen
    assert chosen.kernels.name == "cpu", "the device's own stay what they are"
    assert own.kernels_in_use is own.kernels


def test_nothing_is_loaded_without_being_asked_for(install):
    install("quick", "raise RuntimeError('loaded')", group=GROUP)
    get_backend("cpu")
    assert "outrider_quick_plugin" not in sys.modules


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "backends").iterdir()))
def test_no_backend_declares_the_option(name):
    """The registry answers ``kernels`` itself, so a backend's own option of this name would never reach the backend."""
    plugin = importlib.import_module(f"outrider_{name}.plugin")
    assert KERNELS_OPTION not in plugin.backend_info().options


def test_stands_beside_the_backends_own_options(quick):
    quick()
    backend = get_backend("sim:seed=3,kernels=quick")
    assert (backend.name, backend.kernels_in_use.name) == ("sim", "quick")
    assert backend.spec == "sim:0,seed=3,kernels=quick", "creates the backend again"


def test_the_model_computes_with_them(quick):
    from outrider import Engine
    from outrider.bundled import bundled

    quick(
        make=MAKE.replace(
            "return Quick()",
            "Quick.linear = lambda s, x, w, b=None, **_: x.new_zeros(*x.shape[:-1], len(w))\n        return Quick()",
        )
    )
    engine = Engine.from_checkpoint(bundled("target"), get_backend("cpu:kernels=quick"))
    (completion,) = engine.generate([[5, 6, 7]])
    assert set(completion.token_ids) == {0}, "logits of nothing but zeros"


def test_an_unknown_name_lists_what_there_is(quick):
    quick()
    with pytest.raises(BackendNotFound, match=r"no kernel set named 'quack' .*did you mean 'quick'\?.*'outrider.kernels'"):
        get_backend("cpu:kernels=quack")


def test_for_another_backend(quick):
    quick(info='backends=("sim", "chip")')
    with pytest.raises(ConfigError, match="'quick' of outrider-quick 1.0 is for sim, chip, not for 'cpu'"):
        get_backend("cpu:kernels=quick")


def test_unusable_here(quick):
    quick(info='usable=False, reason="the processor lacks it", advice="use another one"')
    with pytest.raises(BackendLoadError, match="'quick' is installed but can't run here: the processor lacks it; use anoth"):
        get_backend("cpu:kernels=quick")


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        ("return None", PluginContractError, "create_kernels returned None, expected a KernelSet"),
        ("return KernelSet", PluginContractError, "returned a type, expected a KernelSet"),
        ("raise OSError('libquick.so: not found')", BackendLoadError, "libquick.so: not found"),
    ],
)
def test_a_plugin_that_makes_no_kernels(quick, make, error, says):
    quick(make=make)
    with pytest.raises(error, match=says):
        get_backend("cpu:kernels=quick")


@pytest.mark.parametrize(
    ("source", "status", "says"),
    [
        ("import no_such_vendor_package", "broken", "no_such_vendor_package"),
        ("", "broken", "hook 'create_kernels' is missing; expected @hookimpl def create_kernels(backend: Backend)"),
        (SOURCE.format(info="interface_min=0, interface_max=0", make=MAKE), "broken", "install a newer plugin"),
    ],
)
def test_a_broken_one_is_diagnosed_and_stops_nobody(install, source, status, says):
    install("quick", source, group=GROUP)
    candidate = next(each for each in Registry().kernels.candidates() if each.name == "quick")
    assert candidate.status == status
    assert says in candidate.reason
    assert get_backend("cpu").name == "cpu"


def test_chosen_once():
    backend = get_backend("cpu")
    backend.use_kernels(KernelSet())
    with pytest.raises(InterfaceError, match="make another backend"):
        backend.use_kernels(KernelSet())


def own_kernels_read(source):
    """Lines that read a backend's own kernels, past the choice of the person who runs it."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr == "kernels" and ast.unparse(node.value).split(".")[-1] == "backend"
    ]


def test_the_core_computes_with_what_was_chosen():
    core = ROOT / "core" / "outrider"
    for part in ("model", "speculative", "engine", "cli"):
        for path in sorted((core / part).rglob("*.py")):
            assert own_kernels_read(path.read_text(encoding="utf-8")) == [], path.name
    assert own_kernels_read("Decoder(config, weights, parts.backend.kernels)") == [1]
    assert own_kernels_read("Decoder(config, weights, backend.kernels_in_use)") == []
