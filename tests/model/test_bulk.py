"""Reading a checkpoint in large pieces by several threads gives what reading it tensor by tensor does."""

import pytest
import torch
from safetensors.torch import save_file

from outrider.errors import CheckpointError
from outrider.model.checkpoint import bulk
from outrider.model.checkpoint.files import Piece, Target
from outrider.model.checkpoint.loading import load_tensors, loading_stream
from outrider.model.checkpoint.opening import open_checkpoint
from outrider.registry import get_backend

SHAPES = {"a": (37, 5), "b": (3, 5), "c": (64,), "d": (1, 2, 3), "e": (700,)}


def written(directory, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    save_file(tensors, directory / "model.safetensors")
    return tensors


TARGETS = [
    Target("ab", (Piece("a", (37, 5)), Piece("b", (3, 5)))),
    *(Target(name, (Piece(name, SHAPES[name]),)) for name in "cde"),
]


def loaded(directory, backend, dtype=torch.bfloat16, progress=None):
    files = open_checkpoint(directory)
    with loading_stream(backend, dtype) as stream:
        weights = load_tensors(files, TARGETS, dtype=dtype, backend=backend, stream=stream, progress=progress)
    return {name: tensor.cpu() for name, tensor in weights.items()}


@pytest.mark.parametrize("backend", ["cpu", "sim:strategy=lazy"])
@pytest.mark.parametrize("piece", [60, 500, 1 << 20], ids=["many pieces", "some", "one each"])
def test_the_values_are_those_of_the_file(tmp_path, monkeypatch, backend, piece):
    """Small pieces: each of the few buffers is used many times, so a copy that wasn't waited for would be overwritten."""
    monkeypatch.setattr(bulk, "_CHUNK_BYTES", piece)
    monkeypatch.setattr(bulk, "_MAX_PINNED_BUFFERS", 3)
    tensors = written(tmp_path)
    found = loaded(tmp_path, get_backend(backend))
    assert torch.equal(found["ab"], torch.cat((tensors["a"], tensors["b"])))
    assert all(torch.equal(found[name], tensors[name]) for name in "cde")


def test_another_dtype_is_cast(tmp_path):
    tensors = written(tmp_path, torch.float32)
    found = loaded(tmp_path, get_backend("cpu"))
    assert torch.equal(found["e"], tensors["e"].to(torch.bfloat16))


@pytest.mark.parametrize("backend", ["cpu", "sim"])
def test_each_tensor_is_told_of_once(tmp_path, backend):
    written(tmp_path)
    seen = []
    loaded(tmp_path, get_backend(backend), progress=lambda *each: seen.append(each))
    assert [name for name, _, _ in seen] == ["a", "b", "c", "d", "e"]
    assert [done for _, done, _ in seen] == sorted({done for _, done, _ in seen})
    assert {total for _, _, total in seen} == {seen[-1][1]}


@pytest.mark.parametrize("backend", ["cpu", "sim"])
def test_a_file_that_shrinks_meanwhile_is_told(tmp_path, backend):
    written(tmp_path)
    files = open_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    path.unlink()  # the one that is open keeps its content
    path.write_bytes(content[:-20])
    device = get_backend(backend)
    with (
        pytest.raises(CheckpointError, match=r"model\.safetensors.*tensor '.'.*bytes early"),
        loading_stream(device, torch.bfloat16) as stream,
    ):
        load_tensors(files, TARGETS, dtype=torch.bfloat16, backend=device, stream=stream, progress=None)
