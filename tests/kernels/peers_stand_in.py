"""The CUDA backend's groups on a host without GPUs: shared files for the peers' memory, gloo for NCCL, Triton's interpreter."""

from __future__ import annotations

import tempfile
from pathlib import Path
from unittest import mock

import torch

from kernels.devices import SMALL
from outrider_cpu.backend import CpuBackend
from outrider_cuda.collectives import CudaGroup
from outrider_triton.kernelset import TritonKernels


class _Handle:
    def __init__(self, folder, number, size):
        self._folder, self._number, self._size = folder, number, size

    def get_buffer(self, rank, shape, dtype):
        return _mapped(self._folder / f"{rank}-{self._number}", shape, dtype)


def _mapped(path, shape, dtype):
    count = 1
    for each in shape:
        count *= each
    return torch.from_file(str(path), shared=True, size=count, dtype=dtype).view(shape)


class StandIn(CpuBackend):
    """A host that takes itself for one of several GPUs."""

    def __init__(self, place):
        super().__init__()
        self._given["kernels"] = TritonKernels(SMALL, everywhere=True)
        self.place = place

    def _create_group(self, name, ranks, rank, store, timeout_s):
        return CudaGroup(self, name, ranks, rank, store, timeout_s)


def stood_in(place):
    """Patches for what a GPU would answer, and the backend."""
    folder = Path(tempfile.gettempdir()) / f"outrider-peers-{place.store.get('folder').decode()}"
    folder.mkdir(exist_ok=True)
    made = []

    def empty(shape, *, dtype, device):
        made.append(folder / f"{place.rank}-{len(made)}")
        return _mapped(made[-1], shape, dtype)

    def rendezvous(memory, name):
        assert isinstance(name, str)
        assert name
        number = len(made) - 1
        place.store.set(f"made/{number}/{place.rank}", "1")
        place.store.wait([f"made/{number}/{rank}" for rank in range(place.size)])
        return _Handle(folder, number, place.size)

    def one_shot(group, tensor):
        super(CudaGroup, group)._all_reduce(tensor, "sum")

    return (
        StandIn(place),
        mock.patch("torch.cuda.get_device_capability", lambda device: (8, 0)),
        mock.patch("torch.cuda.synchronize", lambda device: None),
        mock.patch("torch.distributed._symmetric_memory.empty", empty),
        mock.patch("torch.distributed._symmetric_memory.rendezvous", rendezvous),
        mock.patch("torch._C._distributed_c10d._SymmetricMemory.set_group_info", lambda *given: None),
        mock.patch("outrider_cuda.collectives.CudaGroup._sum_in_one_shot", one_shot),
        folder,
    )


def check(place, *, folder):
    """What ``peers_on_devices`` checks, with few replays, and that small tensors went by the peers' memory."""
    import shutil
    from contextlib import ExitStack
    from dataclasses import replace

    from kernels import peers_on_devices as on_devices

    if place.rank == 0:
        place.store.set("folder", folder)
    backend, *patches, where = stood_in(place)
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(mock.patch.object(on_devices, "REPLAYS", 2))
        stack.enter_context(mock.patch.object(on_devices, "SHAPES", ((1, 64), (3, 130), (2, 1100))))
        stack.enter_context(mock.patch.object(on_devices, "late", lambda *given: None))
        said = on_devices.check(replace(place, backend=backend))
    place.store.set(f"done/{place.rank}", "1")
    place.store.wait([f"done/{rank}" for rank in range(place.size)])
    if place.rank == 0:
        shutil.rmtree(where)
    return said
