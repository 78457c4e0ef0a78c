"""Plugins that once passed the kit, two for each thing that vendors ask, and generated ones: each fails with its promise."""

import pytest

from conformance.mutants import random_plugins, unseen
from conformance.test_mutants import command

PLUGINS = unseen.plugins()
MODULE = "conformance.mutants.unseen"


def test_each_class_has_a_fast_case():
    """At least one of drivers, of kernels, of what vendors ask, of rare faults and of backends runs each time."""
    fast = {name for name, one in PLUGINS.items() if one.fast}
    for made in (unseen.drivers(), unseen.numerics(), unseen.asked(), unseen.rare(), unseen.backends()):
        assert fast & {one.name for one in made}


@pytest.mark.parametrize(
    "which", ["fast", pytest.param("slow", marks=pytest.mark.slow)], ids=["one of each class", "the others"]
)
def test_plugins_fail_with_the_promise_that_they_break(which):
    code, output = command("--which", which, timeout=1200, module=MODULE)
    assert code == 0, output
    assert output.count("ok  ") == sum(one.fast is (which == "fast") for one in PLUGINS.values())


def test_half_of_the_generated_plugins_are_subtle_and_no_two_are_equal():
    made = random_plugins.plugins()
    assert len({one.name for one in made}) == len(made) == 200
    assert sum(one.subtle for one in made) == 100
    assert [one.name for one in random_plugins.plugins()] == [one.name for one in made]
    assert {one.base for one in made} == {"cpu", "threads", "sim", "sim like npu"}


@pytest.mark.slow
def test_a_sample_of_generated_plugins_fails_with_the_promise_that_it_breaks():
    code, output = command("--every", "9", timeout=1800, module="conformance.mutants.random_plugins")
    assert code == 0, output
