"""The kit kills what it killed when the table was made: a sample in the slow run, all in the soak; the table is complete."""

import os
import random
import subprocess
import sys

import pytest

from conformance.mutants import generated, matrix, table

ROOT = table.ROOT


def command(*arguments, timeout, module="conformance.mutants"):
    """The package's own command, in a process that has no threads to fork with."""
    search = [str(ROOT / "tests"), *(path for path in sys.path if path)]
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(search)},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def kills():
    return table.read()[0]


def test_the_table_names_every_mutant_and_every_legal_backend(kills):
    _, legal = table.read()
    assert set(kills) == set(table.mutants())
    assert legal == list(table.legals())
    assert {name: level for name, (level, _) in kills.items()} == {
        name: mutant.level for name, mutant in table.mutants().items() if name in kills
    }


def test_the_table_names_tests_that_exist(kills):
    from outrider_conformance.reporting.report import suite_functions

    assert {test.partition("[")[0] for _, test in kills.values()} <= set(suite_functions())


def test_there_are_many_and_each_level_has_some(kills):
    assert len({(m.verb, m.fault) for m in table.mutants().values()}) >= 60
    assert {level for level, _ in kills.values()} == {0, 1, 2, 3, 4, 6}


@pytest.mark.slow
def test_a_sample_is_killed_by_the_tests_that_the_table_names(kills):
    """Twelve of each level, the same ones each time; and the unbroken backends pass the same tests. One plugin of each class
    in ``test_unseen_plugins.py`` is killed by default.
    """
    dice, levels = random.Random(7), range(5)
    quick = {name: level for name, (level, test) in kills.items() if "test_l4_engine" not in test}
    of_level = {level: sorted(name for name, at in quick.items() if at == level) for level in levels}
    names = [name for some in of_level.values() for name in dice.sample(some, min(12, len(some)))]
    assert len(names) >= len(levels)
    arguments = [item for name in names for item in ("--kill", name)]
    code, output = command(*arguments, timeout=1200)
    assert code == 0, output
    assert output.count("ok  ") == len(names)


@pytest.mark.soak
def test_all_are_killed_and_the_legal_ones_pass():
    code, output = command("--jobs", "2", timeout=7200)
    assert code == 0, "\n".join(line for line in output.splitlines() if not line.startswith("ok "))


# -- generated ones -------------------------------------------------------------------------------------------------------

MATRIX = "conformance.mutants.matrix"


def test_the_matrix_names_generated_mutants():
    """With the test that convicts each; of kernels, all of them."""
    made, convicted = generated.mutants(), matrix.read()
    assert set(convicted) <= set(made)
    of_kernels = {name for name, one in made.items() if one.kind.startswith("kernels")}
    assert of_kernels <= set(convicted)
    assert len(set(convicted) - of_kernels) >= 60


@pytest.mark.slow
def test_a_sample_of_generated_mutants_is_convicted_by_the_tests_that_the_matrix_names():
    code, output = command("--known", "--every", "12", module=MATRIX, timeout=1200)
    assert code == 0, output
    assert output.count("killed   ") >= 20


@pytest.mark.soak
def test_all_generated_mutants_are_convicted_but_the_explained():
    code, output = command("--seeds", "1", module=MATRIX, timeout=7200)
    assert code == 0, output
