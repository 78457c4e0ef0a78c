"""What the plugin for ROCm uses of torch, and what the shared base uses of torch's CUDA module, exists in torch's source.

torch's HIP build has the same Python files: they are generated once, and ``torch.version.hip`` tells the builds apart.
"""

import ast
from pathlib import Path

import pytest

from vendors.uses import Vocabulary, bind_uses, check_changes, check_record, collect

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "core" / "outrider" / "device" / "torch_backend.py"
PLUGINS = [ROOT / "backends" / name / f"outrider_{name}" for name in ("rocm", "cuda")]
STREAM, EVENT, GRAPH = (f"torch.cuda.{name}" for name in ("Stream", "Event", "CUDAGraph"))
WORDS = Vocabulary(
    roots={"torch": "torch"},
    module="torch.cuda",
    natives={"TorchStream": STREAM, "stream": STREAM, "TorchEvent": EVENT, "TorchGraph": GRAPH},
    made={"_new_graph": GRAPH, "current_stream": STREAM},
)
# Of torch itself only what belongs to the device: the rest is torch's everyday surface, which every test here runs.
USES = [
    use
    for file in (BASE, *(file for plugin in PLUGINS for file in sorted(plugin.glob("*.py"))))
    for use in collect(file, WORDS, ROOT)
    if use.path.startswith(("torch.cuda.", "torch.version."))
]


def test_the_collector_sees_the_plugins():
    found = {use.path for use in USES}
    for path in (
        "torch.version.hip",
        "torch.version.cuda",
        "torch.cuda.device_count",
        "torch.cuda.get_device_properties",
        "torch.cuda.CUDAGraph",
        f"{GRAPH}.capture_begin",
        f"{STREAM}.wait_event",
        "torch.cuda.graph_pool_handle",
        "torch.cuda._sleep",
    ):
        assert path in found, path


def test_every_name_resolves_and_every_call_binds(torch_surface, record_property):
    found, problems = bind_uses(torch_surface, USES)
    assert problems == []
    bound = sum(kind == "python" and use.call is not None for use, kind in found)
    check_record("rocm-static.json", {"names": len({use.path for use in USES}), "calls bound": bound}, record_property)


@pytest.mark.sample(8)
@pytest.mark.parametrize("use", [use for use in USES if use.call is not None], ids=lambda use: f"{use.path}@{use.where}")
def test_a_changed_call_is_caught(torch_surface, use):
    check_changes(torch_surface, use)


def properties():
    """Fields of a device's properties, from torch's own stub of its compiled part."""
    import torch

    stub = ast.parse((Path(torch.__file__).parent / "_C" / "__init__.pyi").read_text())
    (made,) = [n for n in stub.body if isinstance(n, ast.ClassDef) and n.name == "_CudaDeviceProperties"]
    return {n.target.id: ast.unparse(n.annotation) for n in made.body if isinstance(n, ast.AnnAssign)}


def test_properties_of_the_device():
    """What the architecture is read from."""
    tree = ast.parse((PLUGINS[0] / "backend.py").read_text())
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == "properties"}
    assert used == {"gcnArchName", "warp_size"}
    of_kernels = {"multi_processor_count", "shared_memory_per_multiprocessor", "L2_cache_size"}
    assert used | of_kernels <= set(properties())  # what kernels in Triton are cut up by
    assert "gcn_arch_name" not in properties()


def test_hip_has_its_name_in_the_version():
    import torch

    assert hasattr(torch.version, "hip")
    assert torch.version.hip is None, "this torch is built for HIP: run the conformance suite instead"
