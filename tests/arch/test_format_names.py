"""No code of the product branches on the name of a weight format: its registries say what a format is."""

import ast

import pytest

from arch.parsing import nodes
from outrider.device.kernels.weight_formats import WEIGHT_FORMATS

PACKAGES = ("core/", "backends/", "kernels/", "tools/")
NAMES = frozenset({*WEIGHT_FORMATS, *(each.elements.name for each in WEIGHT_FORMATS.values())})


def names_in(node):
    return [each for each in ast.walk(node) if isinstance(each, ast.Constant) and each.value in NAMES]


def offences(source):
    """Lines that compare with the name of a format, match it, or look something up in a table of several."""
    found = []
    for node in nodes(source):
        if isinstance(node, ast.Compare | ast.MatchValue):
            found += [node.lineno] if names_in(node) else []
        elif isinstance(node, ast.Dict):
            keys = [each for each in node.keys if isinstance(each, ast.Constant) and each.value in NAMES]
            found += [node.lineno] if len(keys) > 1 else []
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "startswith":
            found += [node.lineno] if names_in(node) else []
    return found


def test_no_code_compares_names_of_formats(source_files):
    files = {name: text for name, text in source_files.items() if name.startswith(PACKAGES)}
    assert len(files) > 300
    assert {name: found for name, text in files.items() if (found := offences(text))} == {}


@pytest.mark.parametrize(
    "snippet",
    [
        "if weight.format == 'int4': pass",
        "x = 2 if 'fp8' != format else 1",
        "ok = format in ('fp8', 'int8')",
        "match format:\n    case 'fp8-block': pass",
        "bits = {'fp8': 8, 'int4': 4}[format]",
        "if name.startswith('int4'): pass",
    ],
)
def test_catches(snippet):
    assert offences(snippet)


@pytest.mark.parametrize("snippet", ["weight_format('fp8')", "methods = {'fp8': 1, 'awq': 2}", "torch.dtype == torch.int8"])
def test_passes(snippet):
    assert not offences(snippet)
