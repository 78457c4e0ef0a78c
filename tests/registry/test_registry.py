"""Discovery, selection and diagnosis, over distributions that lie in a temporary directory."""

import sys

import pytest

import outrider
from outrider.device import (
    AmbiguousBackend,
    BackendLoadError,
    BackendNotFound,
    ConfigError,
)
from outrider.registry import Registry, get_backend


def by_name(registry):
    return {candidate.name: candidate for candidate in registry.backends.candidates()}


def test_the_reference_backend_is_installed():
    backend = get_backend("cpu")
    assert backend.name == "cpu"
    assert outrider.get_backend is get_backend
    assert get_backend("cpu") is not backend


def test_a_named_backend_loads_that_plugin_alone(install):
    install("chip")
    install("other", "raise RuntimeError('loaded')")
    backend = get_backend("chip:2,mode=fast")
    assert backend.given == (2, {"mode": "fast"})
    assert "outrider_other_plugin" not in sys.modules


def test_broken_plugins_stop_no_other(install):
    install("broken", "import no_such_vendor_package")
    install("hollow", "")
    install("chip", usable=False, reason="no device found", advice="plug one in")
    found = by_name(Registry())
    assert found["cpu"].status == "usable"
    assert (found["broken"].status, found["broken"].info) == ("broken", None)
    assert "no_such_vendor_package" in found["broken"].reason
    assert "outrider-broken 1.0" in found["broken"].advice
    assert found["hollow"].status == "broken"
    assert (found["chip"].status, found["chip"].reason, found["chip"].advice) == (
        "unusable",
        "no device found",
        "plug one in",
    )
    assert found["chip"].distribution == "outrider-chip 1.0"


def test_unknown_name_lists_what_there_is(install):
    install("chip")
    with pytest.raises(BackendNotFound, match=r"'chop'.*did you mean 'chip'\?.*installed: chip, cpu"):
        get_backend("chop")


def test_named_but_unusable(install):
    install("chip", usable=False, reason="no device found", advice="plug one in")
    with pytest.raises(BackendLoadError, match="'chip' is installed but can't run here: no device found; plug one in"):
        get_backend("chip")


@pytest.mark.parametrize(
    ("info", "spec", "match"),
    [
        ("", "chip", "OSError: device is busy; --debug shows the traceback"),
        ('advice="load the driver"', "chip:3", "OSError: device is busy; load the driver"),
        ("priority=50", "auto", r"device is busy.*it was probed; choose one with --backend"),
    ],
)
def test_failing_to_open(install, info, spec, match):
    install(
        "chip",
        f"""
        from outrider.device.plugin import BackendInfo, hookimpl
        @hookimpl
        def backend_info():
            return BackendInfo(name="chip", description="", {info})
        @hookimpl
        def create_backend(ordinal, options):
            raise OSError("device is busy")
        """,
    )
    with pytest.raises(BackendLoadError, match=match):
        get_backend(spec)


def test_the_plugins_own_error_passes_unchanged():
    with pytest.raises(ConfigError, match="backend 'cpu' has no option 'seed'; known: freed"):
        get_backend("cpu:seed=1")
    with pytest.raises(ConfigError, match="option freed='mine': expected one of kept, returned"):
        get_backend("cpu:freed=mine")


def test_two_distributions_of_one_name(install):
    install("chip", distribution="outrider-chip-a")
    install("chip", distribution="outrider-chip-b")
    with pytest.raises(
        AmbiguousBackend, match=r"outrider-chip-. 1.0 and outrider-chip-. 1.0 both offer a backend named 'chip'"
    ):
        get_backend("chip")
    candidate = by_name(Registry())["chip"]
    assert candidate.status == "duplicate"
    assert "outrider-chip-a" in candidate.reason
    assert "outrider-chip-b" in candidate.reason


def test_one_distribution_seen_twice_is_one(install):
    from importlib.metadata import entry_points

    install("chip")
    points = [*entry_points(group="outrider.backends", name="chip")] * 2
    assert Registry(points).create("chip").given == (0, {})


def test_explicit_beats_environment_beats_probe(install):
    install("chip", priority=50)
    registry = Registry()
    assert registry.select().name == "chip"
    assert registry.select(None, "cpu").name == "cpu"
    assert registry.select("chip:1", "cpu").name == "chip"
    assert registry.select("auto", "cpu").name == "chip"
    assert registry.select(None, "auto").chosen_by == "probe"
    assert registry.select(None, "").name == "chip"


def test_nothing_falls_back(install):
    install("chip", priority=50, usable=False, reason="no device found")
    registry = Registry()
    assert registry.select().name == "cpu"
    with pytest.raises(BackendLoadError, match=r"no device found.*OUTRIDER_BACKEND asks for it"):
        registry.create(registry.select(None, "chip"))
    with pytest.raises(ConfigError, match="OUTRIDER_BACKEND=ch ip"):
        registry.select(None, "ch ip")


def test_two_equal_candidates(install):
    install("chip", priority=50)
    install("chop", priority=50)
    with pytest.raises(
        AmbiguousBackend, match=r"'chip' \(outrider-chip 1.0\) and 'chop' \(outrider-chop 1.0\).*--backend NAME"
    ):
        Registry().select()
    assert Registry().select("chop").name == "chop"


def test_negative_priority_is_never_probed(install):
    install("chip", priority=-1)
    points = Registry()
    assert points.select().name == "cpu"
    assert points.create("chip").given == (0, {})


def test_probing_says_what_it_passed_over(install, caplog):
    install("broken", "import no_such_vendor_package")
    assert Registry().select().name == "cpu"
    assert "'broken' was passed over" in caplog.text
    assert "no_such_vendor_package" in caplog.text


def test_nothing_to_choose(install):
    from importlib.metadata import entry_points

    install("chip", usable=False, reason="no device found")
    with pytest.raises(BackendNotFound, match="none is installed"):
        Registry([]).select()
    with pytest.raises(BackendNotFound, match="chip: no device found"):
        Registry(entry_points(group="outrider.backends", name="chip")).select()


def test_a_registry_sees_a_later_installation(install):
    registry = Registry()
    assert "chip" not in registry.backends.names
    install("chip")
    assert "chip" in registry.backends.names
    assert registry.create("chip").given == (0, {})


def test_a_registry_that_reads_once_sees_what_there_was(install):
    registry = Registry(once=True)
    install("chip")
    assert "chip" in registry.backends.names
    install("chop")
    assert "chop" not in registry.backends.names
    with pytest.raises(BackendNotFound, match="no backend.* named 'chop'"):
        registry.create("chop")
    assert registry.create("chip").given == (0, {})


@pytest.mark.parametrize("group", ["outrider.backend", "outrider_backends", "Outrider.Backends"])
def test_a_misspelt_group_is_named(install, outrider, group):
    install("chip", group=group)
    install("fast", group="outrider.kernels")  # a group of another kind is no mistake
    (note,) = Registry().notes
    assert "distribution 'outrider-chip' in " in note
    assert f"has entry points in the group {group!r}, which Outrider doesn't read" in note
    assert note in outrider("backends", "--json").json["notes"]
    assert note in outrider("conform", "--backend", "chip", "--json").json["error"]["message"]


def test_a_registry_sees_a_distribution_that_changes_in_place(install):
    site = install("chip")
    registry = Registry()
    assert "chip" in registry.backends.names
    (points,) = site.glob("*.dist-info/entry_points.txt")
    points.write_text(points.read_text().replace("chip =", "chop ="))
    assert "chip" not in registry.backends.names
    assert "chop" in registry.backends.names
    points.write_text("[outrider.backends]\nchip\n")
    assert "chip" not in registry.backends.names
    with pytest.raises(BackendNotFound, match=r"distribution 'outrider-chip' in .* was passed over: its metadata"):
        registry.create("chip")


def test_observers_see_each_new_backend_while_their_scope_lasts():
    first, second = [], []
    with Registry.observing(first.append):
        made = Registry().create("cpu")
        with Registry.observing(second.append):
            inner = get_backend("cpu")
        after = Registry().create("cpu")
    Registry().create("cpu")
    assert first == [made, inner, after]
    assert second == [inner]


def test_an_observer_that_fails_is_heard_and_leaves_no_trace():
    def refuse(backend):
        raise ValueError(backend.label)

    with pytest.raises(ValueError, match="cpu"), Registry.observing(refuse):
        Registry().create("cpu")
    Registry().create("cpu")
