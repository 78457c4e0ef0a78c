"""The pytest plugin: options, fixtures, which tests belong to a run, and how each is judged.

Load it by name (``-p outrider_conformance.plugin``); it has no entry point of pytest's, so that it never joins a run that
didn't ask for it.
"""

from __future__ import annotations

import datetime
import gc
import shlex
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from outrider.device import Backend, BackendInfo, OutriderError
from outrider_conformance.clock import Clock
from outrider_conformance.counting import counting
from outrider_conformance.kit import KIT, Kit
from outrider_conformance.lab import Lab
from outrider_conformance.levels import DEFAULT_LEVEL, LEVELS, level_of, parse_level
from outrider_conformance.programs import DEFAULT_PROGRAMS
from outrider_conformance.recorder import CALLS, Recorder
from outrider_conformance.verdict import judge, mark_of, test_id
from outrider_conformance.waivers import Waiver, read_waivers

if TYPE_CHECKING:
    from outrider_conformance.observed import Observed
    from outrider_conformance.ranks import RankRunner

TIMEOUT = 120.0
COUNTED = 4
"""The first level whose tests call kernels."""
DRAWS = 6
WAIVERS = pytest.StashKey[Sequence[Waiver]]()
RECORDER = pytest.StashKey[Recorder]()
_CLOCK = "outrider-conformance-clock"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The kit's options."""
    group = parser.getgroup("outrider conformance")
    group.addoption("--backend", metavar="NAME", help="backend under test, as in NAME, NAME:1 or NAME:key=value")
    group.addoption(
        "--level",
        metavar="L4",
        default=f"L{DEFAULT_LEVEL}",
        help="run the levels up to this one: " + "; ".join(f"L{n} {what}" for n, what in LEVELS.items()),
    )
    group.addoption("--report", metavar="DIR", help="write report.json, report.xml, report.html and badge.svg there")
    group.addoption("--waivers", metavar="FILE", help="TOML file of known failures, each with a reason, a link and a date")
    group.addoption("--kit-timeout", type=float, default=TIMEOUT, metavar="SECONDS", help="limit for one test of the kit")
    group.addoption(
        "--programs",
        type=int,
        default=DEFAULT_PROGRAMS,
        metavar="N",
        help="random programs over the interface, in all (default: %(default)s); 0 leaves them out, so nothing is passed",
    )
    group.addoption("--kit-seed", type=int, default=0, metavar="N", help="what operands and programs are drawn from")
    group.addoption(
        "--kit-draws", type=int, default=DRAWS, metavar="N", help="draws for each kernel and dtype, beside the fixed ones"
    )
    group.addoption("--kit-test", action="append", default=[], metavar="ID", help="run this test alone; may be repeated")
    group.addoption("--kit-command", metavar="TEXT", help="the command line that the report names, if not pytest's own")


def pytest_configure(config: pytest.Config) -> None:
    """Read the options; a mistake in them is a usage error, not a failed test."""
    config.addinivalue_line("markers", "promise(member, words): the promise of the backend interface that the test checks")
    config.addinivalue_line("markers", "needs(*abilities): declared abilities that the test is about")
    try:
        if KIT not in config.stash:
            name = config.getoption("--backend")
            if name is None:
                return  # loaded, but not asked for anything: a run of other tests
            config.stash[KIT] = Kit(name)
        parse_level(config.getoption("--level"))
        path = config.getoption("--waivers")
        config.stash[WAIVERS] = read_waivers(Path(path)) if path else ()
    except OutriderError as error:
        raise pytest.UsageError(str(error)) from error
    config.pluginmanager.register(Clock(config.getoption("--kit-timeout")), _CLOCK)
    recorder = Recorder(config, config.stash[KIT])
    config.stash[RECORDER] = recorder
    config.pluginmanager.register(recorder, "outrider-conformance-recorder")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the levels that were asked for, in order."""
    ours = [(item, level) for item in items if (level := level_of(item.path)) is not None]
    if not ours:
        return
    if KIT not in config.stash:
        raise pytest.UsageError("the conformance suite needs --backend NAME; `outrider backends` lists what is installed")
    limit = parse_level(config.getoption("--level"))
    others = [item for item in items if level_of(item.path) is None]
    kept = sorted((pair for pair in ours if pair[1] <= limit), key=lambda pair: pair[1])
    items[:] = [*others, *(item for item, _ in kept)]
    config.stash[RECORDER].requested(test_id(item) for item, _ in kept)
    chosen = set(config.getoption("--kit-test"))
    if chosen:
        absent = sorted(chosen - {test_id(item) for item, _ in kept})
        if absent:
            raise pytest.UsageError(f"no test is called {', '.join(absent)} at these levels; a report has the ids")
        left = [item for item, _ in kept if test_id(item) not in chosen]
        config.hook.pytest_deselected(items=left)
        items[:] = [*others, *(item for item, _ in kept if test_id(item) in chosen)]


def pytest_collection_finish(session: pytest.Session) -> None:
    """What the suite has imported stays: no later collection of garbage looks through it again, the last ones included."""
    if KIT in session.config.stash:
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Judge the outcome: what may be skipped, what is waived, and waived tests that passed."""
    report = yield
    if level_of(item.path) is not None and KIT in item.config.stash:
        today = datetime.datetime.now(datetime.UTC).date()
        judge(item, call, report, item.config.stash[WAIVERS], today, alone=_alone(item))
    return report


def _alone(item: pytest.Item) -> str:
    """The command that runs a test by itself, drawing what this run drew."""
    command = ["outrider", "conform", "--backend", str(item.config.stash[KIT].spec), "--test", test_id(item)]
    for option, name, default in (("--programs", "--programs", DEFAULT_PROGRAMS), ("--kit-seed", "--seed", 0)):
        if (value := item.config.getoption(option)) != default:
            command += [name, str(value)]
    return shlex.join(command)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test about abilities that the backend doesn't declare, and say so."""
    if level_of(item.path) is None:
        return
    abilities = mark_of(item, "needs")
    if not abilities:
        return
    declared = item.config.stash[KIT].open().capabilities
    absent = [ability for ability in abilities if not getattr(declared, str(ability))]
    if absent:
        undeclared(absent)


def undeclared(abilities: list[object]) -> None:
    """Skip: the test is about abilities that the backend doesn't declare."""
    pytest.skip(f"not declared: {', '.join(map(str, abilities))}")


# -- fixtures ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def kit(pytestconfig: pytest.Config) -> Kit:
    """The backend under test, and where it's looked up."""
    if KIT not in pytestconfig.stash:
        raise pytest.UsageError("the conformance suite needs --backend NAME")
    return pytestconfig.stash[KIT]


@pytest.fixture
def info(kit: Kit) -> BackendInfo:
    """What the plugin says about itself."""
    return kit.info


@pytest.fixture
def backend(kit: Kit, request: pytest.FixtureRequest) -> Generator[Backend]:
    """A new backend; drained after the test, whether it passed or failed. From L4 on, calls of its kernels are counted."""
    backend = kit.open()
    if (level_of(request.path) or 0) < COUNTED:
        yield backend
        backend.synchronize()
        return
    with counting(backend.kernels_in_use) as calls:
        yield backend
        backend.synchronize()
    request.node.user_properties.append((CALLS, calls.rows()))


@pytest.fixture
def observed(kit: Kit, request: pytest.FixtureRequest) -> Observed:
    """Who answers the engine's calls of kernels. The first test of a process that asks for it runs the engines."""
    from outrider_conformance.observed import observe  # the engine: the levels below need the backend interface alone

    first = kit.observed is None
    found = observe(kit)
    if first:
        request.node.user_properties.append((CALLS, found.calls.rows()))
    return found


@pytest.fixture
def lab(kit: Kit, backend: Backend, pytestconfig: pytest.Config) -> Lab:
    """The new backend with the means to provoke orders on it."""
    seed, draws = (pytestconfig.getoption(name) for name in ("--kit-seed", "--kit-draws"))
    return Lab(backend, kit.pace, seed=seed, draws=draws)


@pytest.fixture(scope="session")
def ranks(kit: Kit) -> Generator[RankRunner]:
    """Runs a program on several ranks, each with a device of its own."""
    from outrider_conformance.ranks import RankRunner

    runner = RankRunner(kit)
    yield runner
    runner.end()


@pytest.fixture
def random_programs(kit: Kit, pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Try this backend's share of random programs of a family: ``random_programs("copies")``."""
    from outrider_conformance.programs.trial import convict, share

    clock = pytestconfig.pluginmanager.get_plugin(_CLOCK)
    total, start = pytestconfig.getoption("--programs"), pytestconfig.getoption("--kit-seed")

    def trial(family: str) -> None:
        if total < 1:
            pytest.skip("--programs 0")
        convict(
            kit.open,
            backend=str(kit.spec),
            family=family,
            count=share(family, total),
            start=start,
            alive=clock.renew if isinstance(clock, Clock) else lambda: None,
        )

    return trial


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str, float, str], None]:
    """Report a measured figure: ``figure("launch cost", 4.2, "µs")``."""

    def note(name: str, value: float, unit: str) -> None:
        record_property("figure", [name, float(value), unit])

    return note


Figure = Callable[[str, float, str], None]
__all__: list[Any] = ["backend", "figure", "info", "kit", "lab", "observed", "random_programs", "ranks"]
