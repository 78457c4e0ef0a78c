"""The pytest plugin of the kit: options, fixtures, the selection of tests, time limits, and the verdict of each test.

Load it by name (``-p outrider_conformance.plugin``). It has no pytest entry point, so other test runs never load it.
"""

from __future__ import annotations

import datetime
import gc
import shlex
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from outrider.device import Backend, OutriderError
from outrider_conformance.completed_waits import checking_waits
from outrider_conformance.kernel_calls import counting
from outrider_conformance.kit import KIT, Kit
from outrider_conformance.lab import Lab
from outrider_conformance.levels import DEFAULT_LEVEL, LEVELS, level_of, parse_level
from outrider_conformance.programs import DEFAULT_PROGRAMS
from outrider_conformance.reporting.causes import tracing_verbs
from outrider_conformance.reporting.recorder import CALLS, VERBS_CALLED, ReportRecorder
from outrider_conformance.reporting.verdict import NOT_REACHED, Waiver, mark_of, read_waivers, set_verdict, test_id

if TYPE_CHECKING:
    from outrider_conformance.kernel_calls import KernelCalls
    from outrider_conformance.ranks.runner import RankRunner


TIMEOUT_S = 120.0
FIRST_KERNEL_LEVEL = 4
"""Number of the first level whose kernel calls are counted."""
DRAWS = 6
WAIVERS = pytest.StashKey[Sequence[Waiver]]()
RECORDER = pytest.StashKey[ReportRecorder]()
_CLOCK = "outrider-conformance-clock"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the kit to pytest's command line."""
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
    group.addoption("--kit-timeout", type=float, default=TIMEOUT_S, metavar="SECONDS", help="limit for one test of the kit")
    group.addoption(
        "--programs",
        type=int,
        default=DEFAULT_PROGRAMS,
        metavar="N",
        help="total number of random programs (default: %(default)s); 0 skips them, so that no level is passed",
    )
    group.addoption("--kit-seed", type=int, default=0, metavar="N", help="random seed of operands and programs")
    group.addoption(
        "--kit-draws",
        type=int,
        default=DRAWS,
        metavar="N",
        help="random operand sets for each kernel and dtype, in addition to the fixed ones",
    )
    group.addoption("--kit-test", action="append", default=[], metavar="ID", help="run only this test; may be repeated")
    group.addoption("--kit-command", metavar="TEXT", help="command line that the report names (default: pytest's own)")


def pytest_configure(config: pytest.Config) -> None:
    """Read the options, and register the time limit and the report's recorder. A wrong option is a usage error."""
    config.addinivalue_line("markers", "promise(member, words): the promise of the backend interface that the test checks")
    config.addinivalue_line("markers", "needs(*abilities): declared abilities that the test is about")
    try:
        if KIT not in config.stash:
            name = config.getoption("--backend")
            if name is None:
                return  # a run of other tests
            config.stash[KIT] = Kit(name)
        parse_level(config.getoption("--level"))
        path = config.getoption("--waivers")
        config.stash[WAIVERS] = read_waivers(Path(path)) if path else ()
    except OutriderError as error:
        raise pytest.UsageError(str(error)) from error
    config.pluginmanager.register(PhaseTimeLimit(config.getoption("--kit-timeout")), _CLOCK)
    recorder = ReportRecorder(config, config.stash[KIT])
    config.stash[RECORDER] = recorder
    config.pluginmanager.register(recorder, "outrider-conformance-recorder")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the modules above the requested level, so that pytest counts and imports only the tests that it runs."""
    level = level_of(collection_path)
    return True if level is not None and KIT in config.stash and level > parse_level(config.getoption("--level")) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the requested levels, ordered by level."""
    suite = [(item, level) for item in items if (level := level_of(item.path)) is not None]
    if not suite:
        return
    if KIT not in config.stash:
        raise pytest.UsageError("the conformance suite needs --backend NAME; `outrider backends` lists what is installed")
    limit = parse_level(config.getoption("--level"))
    others = [item for item in items if level_of(item.path) is None]
    kept = sorted((pair for pair in suite if pair[1] <= limit), key=lambda pair: pair[1])
    items[:] = [*others, *(item for item, _ in kept)]
    config.stash[RECORDER].requested(test_id(item) for item, _ in kept)
    config.stash[RECORDER].stops = not config.getoption("--kit-test")
    chosen = set(config.getoption("--kit-test"))
    if chosen:
        absent = sorted(chosen - {test_id(item) for item, _ in kept})
        if absent:
            raise pytest.UsageError(f"no test has the id {', '.join(absent)} at these levels; report.json lists the ids")
        left = [item for item, _ in kept if test_id(item) not in chosen]
        config.hook.pytest_deselected(items=left)
        items[:] = [*others, *(item for item, _ in kept if test_id(item) in chosen)]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude the imported modules from garbage collection, which becomes faster, also at the end of the process."""
    if KIT in session.config.stash:
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Set the verdict of a test by the kit's rules for skips and waivers."""
    report = yield
    if level_of(item.path) is not None and KIT in item.config.stash:
        today = datetime.datetime.now(datetime.UTC).date()
        set_verdict(item, call, report, item.config.stash[WAIVERS], today, alone=_repeat_command(item))
    return report


def _repeat_command(item: pytest.Item) -> str:
    """Return the command that repeats one test, with the seed and number of programs of this run."""
    command = ["outrider", "conform", "--backend", str(item.config.stash[KIT].spec), "--test", test_id(item)]
    for option, name, default in (("--programs", "--programs", DEFAULT_PROGRAMS), ("--kit-seed", "--seed", 0)):
        if (value := item.config.getoption(option)) != default:
            command += [name, str(value)]
    return shlex.join(command)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test above a broken level, and one whose abilities the backend doesn't declare, with a reason."""
    level = level_of(item.path)
    if level is None:
        return
    broken = item.config.stash[RECORDER].broken_level
    if broken is not None and level > broken:
        pytest.skip(f"{NOT_REACHED}L{broken} is broken")
    abilities = mark_of(item, "needs")
    if not abilities:
        return
    declared = item.config.stash[KIT].open().capabilities
    absent = [ability for ability in abilities if not getattr(declared, str(ability))]
    if absent:
        undeclared(absent)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Check the host's waits, and record the verbs of the plugin that a test calls, so that the report can rank the causes.

    Random programs call all verbs: a failing one blames one of them by itself.
    """
    if level_of(item.path) is None:
        return (yield)
    if "random_programs" in getattr(item, "fixturenames", ()):
        with checking_waits():
            return (yield)
    with checking_waits(), tracing_verbs() as verbs:
        try:
            return (yield)
        finally:
            item.user_properties.append((VERBS_CALLED, sorted(verbs)))


def undeclared(abilities: list[object]) -> None:
    """Skip the running test because the backend doesn't declare ``abilities``."""
    pytest.skip(f"not declared: {', '.join(map(str, abilities))}")


# -- fixtures ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def kit(pytestconfig: pytest.Config) -> Kit:
    """Return the backend under test with its registry."""
    if KIT not in pytestconfig.stash:
        raise pytest.UsageError("the conformance suite needs --backend NAME")
    return pytestconfig.stash[KIT]


@pytest.fixture
def backend(kit: Kit, request: pytest.FixtureRequest) -> Generator[Backend]:
    """Yield a new backend, and drain it after the test. From L4 on, the calls of its kernels are counted."""
    backend = kit.open()
    if (level_of(request.path) or 0) < FIRST_KERNEL_LEVEL:
        yield backend
        backend.synchronize()
        return
    with counting(backend.kernels_in_use) as calls:
        yield backend
        backend.synchronize()
    request.node.user_properties.append((CALLS, calls.rows()))


@pytest.fixture
def observed(kit: Kit, request: pytest.FixtureRequest) -> KernelCalls:
    """Return which kernels answer the engine's calls. The first test of a process that uses it runs the engines."""
    from outrider_conformance.engines import observe  # imports the engine, which the levels below L4 don't need

    first = kit.observed is None
    found = observe(kit)
    if first:
        request.node.user_properties.append((CALLS, found.rows()))
    return found


@pytest.fixture
def lab(kit: Kit, backend: Backend, pytestconfig: pytest.Config) -> Lab:
    """Return the new backend with the means to run programs in many orders."""
    seed, draws = (pytestconfig.getoption(name) for name in ("--kit-seed", "--kit-draws"))
    return Lab(backend, kit.pace, seed=seed, draws=draws)


@pytest.fixture(scope="session")
def ranks(kit: Kit) -> Generator[RankRunner]:
    """Yield a runner of programs on several ranks, each with a device of its own."""
    from outrider_conformance.ranks.runner import RankRunner

    runner = RankRunner(kit)
    yield runner
    runner.end_ranks()


@pytest.fixture
def random_programs(kit: Kit, pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Return a function that tries the random programs of a family: ``random_programs("copies")``."""
    from outrider_conformance.programs.trial import program_count, try_programs

    clock = pytestconfig.pluginmanager.get_plugin(_CLOCK)
    total, start = pytestconfig.getoption("--programs"), pytestconfig.getoption("--kit-seed")

    def trial(family: str) -> None:
        if total < 1:
            pytest.skip("--programs 0")
        try_programs(
            kit.open,
            backend=str(kit.spec),
            family=family,
            count=program_count(family, total),
            start=start,
            alive=clock.renew if isinstance(clock, PhaseTimeLimit) else lambda: None,
        )

    return trial


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str, float, str], None]:
    """Return a function that reports a measured figure: ``figure("launch cost", 4.2, "µs")``."""

    def note(name: str, value: float, unit: str) -> None:
        record_property("figure", [name, float(value), unit])

    return note


Figure = Callable[[str, float, str], None]
__all__: list[Any] = ["backend", "figure", "kit", "lab", "observed", "random_programs", "ranks"]


_REPEAT_S = 2.0


class PhaseTimeLimit:
    """A pytest plugin that interrupts a phase of a test after ``limit`` seconds. It needs a platform with ``SIGALRM``."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._armed = False

    def renew(self) -> None:
        """Restart the time limit. A test calls this between parts of which each may hang."""
        if self._armed:
            signal.setitimer(signal.ITIMER_REAL, self._limit, min(self._limit, _REPEAT_S))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        """Limit the time of one phase: the backend opens, the test's body runs, or the device drains."""
        with self._limited(item):
            return (yield)

    pytest_runtest_call = pytest_runtest_teardown = pytest_runtest_setup

    @contextmanager
    def _limited(self, item: pytest.Item) -> Generator[None]:
        usable = hasattr(signal, "SIGALRM") and threading.current_thread() is threading.main_thread()
        if level_of(item.path) is None or self._limit <= 0 or not usable:
            yield
            return

        def late(*_: object) -> None:
            pytest.fail(f"still running after {self._limit:g} s: enqueued work never finishes, or a call never returns")

        before = signal.signal(signal.SIGALRM, late)
        # The alarm repeats: draining the device after a test that hangs may hang too.
        signal.setitimer(signal.ITIMER_REAL, self._limit, min(self._limit, _REPEAT_S))
        self._armed = True
        try:
            yield
        finally:
            self._armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
