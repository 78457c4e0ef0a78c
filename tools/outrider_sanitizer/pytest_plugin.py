"""A pytest plugin that watches each test, without a change to the test:

    pytest --outrider-sanitize [--outrider-backend sim:like=npu]

A test with a finding fails, and its failure is the report. The work of its fixtures is watched too. To watch a part of one
test:

    def test_my_step(sanitized):
        backend = get_backend("sim")
        with sanitized(backend):
            step(backend)

An installed Outrider registers the plugin with pytest. Elsewhere: ``pytest -p outrider_sanitizer.pytest_plugin``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from outrider.device import Backend
    from outrider_sanitizer.report import Report

    Sanitized = Callable[[Backend], AbstractContextManager[Report]]

# Nothing of torch is imported before it's asked for: pytest loads this file in every run.


@pytest.fixture
def sanitized() -> Sanitized:
    """Return a context manager factory: work on the backend inside the ``with`` must be clean, or the test fails."""
    from outrider_sanitizer import watch

    @contextmanager
    def clean(backend: Backend) -> Generator[Report]:
        with watch(backend) as report:
            yield report
        report.raise_if_any()

    return clean


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the two command-line options of the sanitizer."""
    group = parser.getgroup("outrider", "races and stale reads on streams")
    group.addoption(
        "--outrider-sanitize",
        action="store_true",
        help="watch each test, and fail it where the sanitizer finds a fault",
    )
    group.addoption(
        "--outrider-backend",
        metavar="SPEC",
        help="the device that tests use through torch (default: OUTRIDER_BACKEND, then sim, which tests may call cuda)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Open the device before test modules are imported, so that `torch.sim` exists, and `torch.cuda` means the same."""
    if config.getoption("--outrider-sanitize"):
        from outrider_sanitizer.cuda_names import map_cuda_names

        watcher = _Watcher(config.getoption("--outrider-backend"))
        names = ExitStack()
        config.add_cleanup(names.close)
        names.enter_context(map_cuda_names(watcher.backend))
        config.pluginmanager.register(watcher, "outrider-sanitize")


class _Watcher:
    """The plugin that watches each test from its setup to the end of its call, and fails a test with findings."""

    def __init__(self, spec: str | None) -> None:
        from outrider.registry import Registry
        from outrider_sanitizer.scripts import select_for_script

        registry = Registry()
        self.backend = registry.create(select_for_script(registry, spec))
        self.key: pytest.StashKey[tuple[ExitStack, list[Report]]] = pytest.StashKey()
        """The device's scope, and the reports, of the watched test."""
        self.tests = 0
        self.operations = 0
        self.findings = 0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None]:
        """Reset the device and begin to watch the test."""
        from outrider_sanitizer import watch
        from outrider_sanitizer.scripts import with_new_backends

        if self.backend.control is not None:
            self.backend.control.reset()
        reports: list[Report] = []
        stack = ExitStack()
        stack.enter_context(
            with_new_backends(self.backend, lambda made, inner: reports.append(inner.enter_context(watch(made))))
        )
        item.stash[self.key] = stack, reports
        return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        """Fail the test with the report; if the test failed itself, show the report in addition to its error."""
        failed = True
        try:
            result = yield
            failed = False
        finally:
            found = self._end(item)
            if failed and found:
                item.add_report_section("call", "Outrider's sanitizer", "\n\n".join(str(report) for report in found))
        if found:
            pytest.fail("\n\n".join(str(report) for report in found), pytrace=False)
        return result

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Stop watching the test if its body never ran."""
        self._end(item)

    def _end(self, item: pytest.Item) -> list[Report]:
        watched = item.stash.get(self.key, None)
        if watched is None:
            return []
        del item.stash[self.key]
        stack, reports = watched
        stack.close()
        found = [report for report in reports if not report.clean]
        self.tests += 1
        self.operations += sum(report.operations for report in reports)
        self.findings += sum(len(report) for report in found)
        return found

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the watched counts: a run without operations proves nothing about the program."""
        terminalreporter.write_line(
            f"outrider: {self.tests} tests and {self.operations} operations watched on {self.backend.label}, "
            f"{self.findings} findings"
        )
        if self.tests and not self.operations:
            terminalreporter.write_line(
                "outrider: no operation was seen; do the tests use the device that --outrider-backend names?", yellow=True
            )
