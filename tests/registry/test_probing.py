"""Plugins that would take the process down are found out in a child process; the others are as they were."""

import json
import logging
import os
import textwrap

import pytest
import torch

from harmful import HARMFUL
from outrider.device import BackendNotFound, PluginContractError
from outrider.registry import Registry, probing
from outrider.registry.plugins import installed_entry_points
from outrider.registry.probing import PluginProbe, fingerprint

LOADS = "from outrider.device.plugin import BackendInfo, hookimpl\n"


@pytest.fixture
def probe(tmp_path):
    return PluginProbe(limit_s=1.5, cache=tmp_path / "cache")


def by_name(registry):
    return {candidate.name: candidate for candidate in registry.backends.candidates()}


@pytest.mark.slow
def test_harmful_plugins_take_nobody_down(install, probe, caplog):
    for name, (source, _) in HARMFUL.items():
        install(name, source, probed=True)
    install("zebra", probed=True, priority=7)
    registry = Registry(probe=probe)
    found = by_name(registry)
    for name, (_, says) in HARMFUL.items():
        assert found[name].status == "broken"
        assert says in found[name].reason
        assert f"outrider-{name} 1.0" in found[name].advice
    assert (found["zebra"].status, found["cpu"].status) == ("usable", "usable")
    with caplog.at_level(logging.WARNING):
        assert registry.select().name == "zebra"
    assert "'crashes' was passed over: plugin 'crashes' of outrider-crashes 1.0" in caplog.text


def test_what_loads_without_harm_is_remembered_while_its_files_are_the_same(install, probe, monkeypatch):
    site = install("chip", probed=True)
    asked = []
    in_child = probing.in_child

    def counted(plugins, describe, *, limit_s):
        asked.extend(plugin.name for plugin in plugins)
        return in_child(plugins, describe, limit_s=limit_s) if plugins else {}

    monkeypatch.setattr(probing, "in_child", counted)
    monkeypatch.setattr(probing, "_is_trusted", lambda plugin: plugin.name != "chip")
    again = PluginProbe(limit_s=probe.limit_s, cache=probe.cache)
    for each in (probe, probe, again):
        assert by_name(Registry(probe=each))["chip"].status == "usable"
    assert asked == ["chip"]
    module = next(site.glob("*.py"))
    os.utime(module, ns=(1, 1))
    assert by_name(Registry(probe=PluginProbe(cache=probe.cache)))["chip"].status == "usable"
    assert asked == ["chip", "chip"]


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": 1}'])
def test_a_spoiled_cache_is_made_anew(install, probe, text):
    install("chip", probed=True)
    probe.cache.mkdir()
    (probe.cache / "plugins.json").write_text(text)
    assert by_name(Registry(probe=probe))["chip"].status == "usable"
    (entry,) = (each for each in installed_entry_points("outrider.backends").entry_points if each.name == "chip")
    assert fingerprint(entry) in json.loads((probe.cache / "plugins.json").read_text())


def test_harm_is_not_remembered(install, probe):
    site = install("chip", "import os; os._exit(3)", probed=True)
    assert by_name(Registry(probe=probe))["chip"].status == "broken"
    next(site.glob("*.py")).write_text(LOADS)
    assert "is missing" in by_name(Registry(probe=PluginProbe(cache=probe.cache)))["chip"].reason


@pytest.mark.slow
def test_a_plugin_that_changes_global_state_is_told_of(install, probe, monkeypatch):
    """Also where it's the first to import torch, so that nobody knows what torch was like before."""
    monkeypatch.delenv("CHIP_HOME", raising=False)
    threads = torch.get_num_threads()
    changing = """
        import os, sys, threading
        os.environ["CHIP_HOME"] = "there"
        sys.setrecursionlimit(12345)
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        print("chip 1.2 loaded")
        import torch
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        torch.set_float32_matmul_precision("medium")
        torch.set_grad_enabled(False)
        torch.manual_seed(1)
    """
    verdict = found_in_child(install, "chip", textwrap.dedent(changing))
    assert verdict.harm == ""
    assert verdict.changes == (
        "torch's default dtype",
        "torch's default device",
        "torch's number of threads",
        "torch's deterministic algorithms",
        "torch's precision of float32 products",
        "torch's gradient mode",
        "torch's random state",
        "the recursion limit",
        "the environment",
        "running threads",
        "standard output (it prints)",
    )
    assert torch.get_num_threads() == threads
    assert found_in_child(install, "good", "import torch\n").changes == ()


def found_in_child(install, name, source):
    install(name, source + LOADS, probed=True)
    (entry,) = (each for each in installed_entry_points("outrider.backends").entry_points if each.name == name)
    return probing.in_child([entry], "backend_info", limit_s=60)[entry]


def test_a_named_backend_is_not_probed(install, monkeypatch):
    install("chip", probed=True)
    install("hangs", HARMFUL["hangs"][0], probed=True)
    monkeypatch.setattr(probing, "in_child", lambda *_, **__: pytest.fail("probed"))
    assert Registry().create("chip").given == (0, {})


# -- metadata that can't be read ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [b"[outrider.backends]\nno equals sign\n", b"[outrider.backends]\nname = \xff\xfe\n"])
def test_a_malformed_distribution_hides_no_other(install, text, caplog):
    install("chip", priority=50)
    (next(install("bad").glob("*.dist-info")) / "entry_points.txt").write_bytes(text)
    registry = Registry()
    assert registry.select().name == "chip"
    assert "distribution 'outrider-bad' in" in caplog.text
    (note,) = registry.notes
    assert "entry_points.txt, METADATA) can't be read" in note
    with pytest.raises(BackendNotFound, match="no backend named 'bad' is installed.*distribution 'outrider-bad' in"):
        registry.create("bad")


# -- descriptions of the wrong type ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("interface_min", "1", "interface_min='1', expected int"),
        ("priority", "high", "priority='high', expected int"),
        ("priority", True, "priority=True, expected int"),
        ("usable", "no", "usable='no', expected bool"),
        ("reason", None, "reason=None, expected str"),
        ("device_count", "2", "device_count='2', expected int | None"),
        ("options", ["a"], "options=['a'], expected Mapping[str, str]"),
        ("options", {"a": 1}, "options={'a': 1}, expected Mapping[str, str]"),
        ("cache_variables", "HOME", "cache_variables='HOME', expected tuple[str, ...]"),
        ("ci", {}, "ci={}, expected CiDeclaration"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(install, field, value, expected):
    install("chip", **{field: value})
    registry = Registry()
    found = by_name(registry)["chip"]
    assert found.status == "broken"
    assert expected in found.reason
    assert registry.select().name == "cpu"
    with pytest.raises(PluginContractError, match="hook backend_info says"):
        registry.create("chip")


@pytest.mark.parametrize("error", ["GeneratorExit", "SystemExit", "type('Odd', (BaseException,), {})"])
def test_an_exception_of_any_class_stays_with_its_plugin(install, error):
    install("chip", f"raise {error}('no')")
    found = by_name(Registry())
    assert (found["chip"].status, found["cpu"].status) == ("broken", "usable")
