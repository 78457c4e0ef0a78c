"""Every test of the suite names a promise, in words that the backend interface's docstring has."""

import ast
import inspect
from dataclasses import fields

import pytest

import outrider.device
from conformance.conftest import suite_modules
from outrider.device import Capabilities
from outrider_conformance.programs.trial import PROMISES
from outrider_conformance.promises import docstring, first_sentence


def decorators(node, name):
    return [d for d in node.decorator_list if isinstance(d, ast.Call) and getattr(d.func, "id", "") == name]


def suite_tests():
    for path in suite_modules():
        tree = ast.parse(path.read_text())
        constants = {
            node.targets[0].id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        }
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield path.stem, node, constants


@pytest.mark.parametrize(("node", "constants"), [pytest.param(n, c, id=f"{m}::{n.name}") for m, n, c in suite_tests()])
def test_quotes_the_backend_interface(node, constants):
    (promise,) = decorators(node, "promise")
    member, *quoted = (constants[a.id] if isinstance(a, ast.Name) else a.value for a in promise.args)
    words = quoted[0] if quoted else first_sentence(member)[1]
    assert words
    assert " ".join(words.split()) in docstring(member), f"{member} doesn't say {words!r} but: {docstring(member)}"
    assert ast.get_docstring(node)


@pytest.mark.parametrize(("member", "words"), PROMISES.values(), ids=PROMISES)
def test_convictions_by_random_programs_quote_the_backend_interface(member, words):
    assert words in docstring(member), f"{member} doesn't say {words!r} but: {docstring(member)}"


@pytest.mark.parametrize(("node"), [pytest.param(n, id=f"{m}::{n.name}") for m, n, _ in suite_tests()])
def test_names_abilities_that_exist(node):
    for marker in decorators(node, "needs"):
        assert {a.value for a in marker.args} <= {f.name for f in fields(Capabilities)}


def test_every_ability_has_a_test():
    covered = {a.value for _, node, _ in suite_tests() for marker in decorators(node, "needs") for a in marker.args}
    # dtypes are run through everywhere; rebinding is tested on devices without graphs too, so it has no marker.
    # captures_in_part takes an ability back, and what a device prefers isn't one.
    others = {"dtypes", "updates_graph_params", "captures_in_part", "preferred_dtypes", "page_size", "quantized_formats"}
    assert covered | others == {f.name for f in fields(Capabilities)}


def test_every_verb_has_a_test():
    """Each public verb of the backend interface is called in the suite, or named as one that no plugin overrides."""
    text = "".join(path.read_text() for path in suite_modules())
    for name in ("Stream", "Event", "Flag", "Graph", "Backend"):
        owner = getattr(outrider.device, name)
        for verb, member in inspect.getmembers(owner, inspect.isfunction):
            if not verb.startswith("_") and verb in vars(owner):
                special = {"locate", "mark_stale", "mark_mirror", "capturing", "rehearsing"}  # for tools and plugins
                assert verb in special or f".{verb}" in text or f'"{verb}"' in text, f"the suite never calls {name}.{verb}"
                del member
