"""Torch's own database of operators, on the device and on the host: a sample; all of it takes ten minutes."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import opinfo_run
from opinfo_exceptions import DIFFERENT, SHAPES_ONLY

SAMPLE = (
    "add", "addmm", "argmax", "cat", "cumsum", "gather", "index_put", "linalg.det", "linalg.ldl_solve",
    "linalg.matrix_rank", "matmul",
    "nn.functional.batch_norm", "nn.functional.binary_cross_entropy", "nn.functional.conv2d", "nn.functional.embedding_bag",
    "nn.functional.layer_norm", "softmax", "sort", "std_mean", "to_sparse", "unique", "where",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_a_sample_of_operators(sim):
    comparison = opinfo_run.Comparison(sim(), samples=1)
    entries = {}
    for op in opinfo_run.op_infos():
        if op.name in SAMPLE and not op.variant_test_name:
            found, said = comparison.check(op)
            entries[op.name] = {"found": found, "said": said}
    failed = opinfo_run.failures(entries)
    assert len(entries) == len(SAMPLE)
    assert {name for name, _ in failed} == {"to_sparse"}, failed


@pytest.mark.slow
def test_all_operators_are_as_on_the_host_or_listed(tmp_path):
    entries = opinfo_run.run(tmp_path / "journal.jsonl")
    failed = {name for name, _ in opinfo_run.failures(entries)}
    assert len(entries) > 600
    assert failed == set(DIFFERENT), sorted(failed ^ set(DIFFERENT))
    assert {name.partition(":")[0] for name in entries} >= set(SHAPES_ONLY)
