"""Entry point of pytest: loads the sanitizer's plugin, unless ``-p`` has already loaded it."""

from __future__ import annotations

import pytest

from outrider_sanitizer import pytest_plugin


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the sanitizer's plugin, which adds its command-line options."""
    del parser
    if not pluginmanager.is_registered(pytest_plugin):
        pluginmanager.register(pytest_plugin, pytest_plugin.__name__)
