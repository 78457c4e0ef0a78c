"""Old names of modules go on working for one version: the same module objects, and one warning for each old package."""

import importlib
import subprocess
import sys
import warnings

import pytest

from outrider._moved import MOVED, MovedModule, new_name

PLUGINS = ["-p", "outrider.conformance.plugin", "-p", "outrider.sanitizer.pytest_plugin"]
SUITE = ["--pyargs", "outrider.conformance.suite.test_l0_plugin"]


@pytest.fixture
def forgotten():
    """Old names as if nobody had used them yet, before and after."""

    def forget():
        for name in [name for name in sys.modules if new_name(name)]:
            del sys.modules[name]

    forget()
    yield
    forget()


def test_every_old_name_is_gone_and_has_a_new_one():
    for old, new in MOVED.items():
        assert importlib.util.find_spec(new) is not None, new
        assert new_name(new) is None, f"{old} leads to {new}, which is an old name itself"


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_the_same_module(forgotten, old):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = importlib.import_module(old)
    assert len([each for each in caught if f" {old} is now {MOVED[old]};" in str(each.message)]) == 1
    new = importlib.import_module(MOVED[old])
    assert module is new
    assert (module.__name__, module.__spec__.name) == (MOVED[old], MOVED[old])


def test_a_package_warns_once(forgotten):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from outrider.sanitizer import watch
        from outrider.sanitizer.findings import Report
        from outrider.sanitizer.races.program import Race
    assert [str(each.message).split()[2] for each in caught if each.category is MovedModule] == ["outrider.sanitizer"]
    import outrider_sanitizer
    from outrider_sanitizer.races import program

    assert (watch, Report, Race) == (outrider_sanitizer.watch, outrider_sanitizer.Report, program.Race)


def test_a_name_that_nobody_had_is_not_found(forgotten):
    with pytest.warns(MovedModule), pytest.raises(ModuleNotFoundError, match="nothing_like_it"):
        importlib.import_module("outrider.sanitizer.nothing_like_it")


def test_pytest_takes_the_old_names(tmp_path):
    """As docs and CI of other people's backends have them: ``-p`` of both plugins, ``--pyargs`` of the suite."""
    chosen = ["--backend", "cpu", "-k", "test_it_says_what_it_is", "-q", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *PLUGINS, *SUITE, *chosen]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
