"""The CUDA backend's groups without GPUs: shared files for the peers' memory, gloo for NCCL, Triton's interpreter."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch

from kernels.devices import SMALL
from outrider.device import Observer
from outrider_cpu.backend import CpuBackend
from outrider_cuda.collectives import CudaGroup
from outrider_triton.kernelset import TritonKernels

SYMMETRIC = "torch._C._distributed_c10d._SymmetricMemory"


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
        self._declarations["kernels"] = TritonKernels(SMALL)
        self.place = place

    def _create_group(self, name, ranks, rank, store, timeout_s):
        return CudaGroup(self, name, ranks, rank, store, timeout_s, peers=True)


def stood_in(place, folder):
    """The backend, and patches for what a GPU would answer. ``folder``: where the peers' memory lies, of all ranks."""
    folder = Path(folder)
    made = []

    def empty(shape, strides, dtype, device, group_name):
        assert math.prod(shape) == 0 or strides[-1] == 1
        made.append(folder / f"{place.index}-{len(made)}")
        return _mapped(made[-1], shape, dtype)

    def rendezvous(memory, name):
        assert isinstance(name, str)
        assert name
        number = len(made) - 1
        place.store.set(f"made/{number}/{place.index}", "1")
        place.store.wait([f"made/{number}/{rank}" for rank in range(place.size)])
        return _Handle(folder, number, place.size)

    return (
        StandIn(place),
        mock.patch("torch.cuda.get_device_capability", return_value=(8, 0)),
        mock.patch("torch.cuda.synchronize"),
        mock.patch("torch.cuda.device", return_value=nullcontext()),
        mock.patch(f"{SYMMETRIC}.empty_strided_p2p", empty),
        mock.patch(f"{SYMMETRIC}.rendezvous", rendezvous),
        mock.patch(f"{SYMMETRIC}.set_group_info"),
    )


def fall_back(place, *, folder):
    """A GPU whose symmetric memory doesn't work on rank 1: both ranks go by the library, say so, and the sums are right."""
    import warnings
    from contextlib import ExitStack

    backend, *patches = stood_in(place, folder)

    def broken(memory, name):
        raise RuntimeError("no such thing")

    with ExitStack() as stack, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for patch in patches:
            stack.enter_context(patch)
        if place.index == 1:
            stack.enter_context(mock.patch(f"{SYMMETRIC}.rendezvous", broken))
        else:
            stack.enter_context(mock.patch(f"{SYMMETRIC}.rendezvous", lambda memory, name: _Own(memory)))
        group = backend.create_group("pair", ranks=(0, 1), rank=place.index, store=place.store, timeout_s=60.0)
        x = torch.full((4,), place.index + 1.0)
        group.all_reduce(x, stream=backend.create_stream("main"))
        said = [str(one.message) for one in caught if one.category is RuntimeWarning]
        found = group.implementations, group.has_peer_memory, x.tolist(), said
        group.close()
    return found


class _Told(Observer):
    def __init__(self):
        self.calls = []

    def collective(self, group, call, stream, reads, writes):
        del group, stream
        self.calls.append((call.kind, {each.data_ptr() for each in reads}, {each.data_ptr() for each in writes}))


def told(place, *, folder):
    """Return what a tool hears of the fused norm, whose operands no operator shows: (kind, all reads, all writes, result)."""
    from contextlib import ExitStack

    backend, *patches = stood_in(place, folder)
    observer = _Told()
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        group = backend.create_group("pair", ranks=(0, 1), rank=place.index, store=place.store)
        stream = backend.create_stream("main")
        x, residual, weight = torch.ones(3, 128), torch.ones(3, 128), torch.ones(128)
        kernels = backend.kernels_in_use
        with backend.on(stream):  # the first call makes the memory
            kernels.all_reduce_rms_norm(x.clone(), residual.clone(), weight, 1e-6, group=group, stream=stream)
        backend.attach(observer)
        with backend.on(stream):
            normed = kernels.all_reduce_rms_norm(x, residual, weight, 1e-6, group=group, stream=stream)
        backend.detach()
        [(kind, reads, writes)] = observer.calls
        peers = {each.data_ptr() for each in group.peer_written}
        group.close()
    all_reads = reads == {each.data_ptr() for each in (x, residual, weight)}
    all_writes = len(peers) == 1 and writes == peers | {each.data_ptr() for each in (x, residual, normed)}
    return kind, all_reads, all_writes, normed[0, :2].tolist()


def shots(place, *, folder, dtypes, shapes):
    """The bits of sums and norms by one shot, two shots and one shot again, and the shots that were taken.

    The ranks come late in turn. Each entry: the bits of the sums, of the residual and of the norms.
    """
    import time
    from contextlib import ExitStack

    from outrider_triton import peers as exchange

    backend, *patches = stood_in(place, folder)
    taken, found = [], []

    def launch(kernel, grid, *arguments, **settings):
        taken.append(settings["SHOTS"])
        honest(kernel, grid, *arguments, **settings)

    honest = exchange.launch
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(mock.patch.object(exchange, "launch", launch))
        group = backend.create_group("all", ranks=range(place.size), rank=place.index, store=place.store)
        stream = backend.create_stream("main")
        for dtype in dtypes:
            for shape in shapes:
                dice = torch.Generator().manual_seed(sum(shape))
                kind = getattr(torch, dtype)
                parts = torch.randn(place.size, *shape, generator=dice).to(kind)
                start, weight = torch.randn(*shape, generator=dice).to(kind), torch.randn(shape[1], generator=dice).to(kind)
                for turn, implementation in enumerate(("one shot", "two shot", "one shot", "two shot")):
                    group.restrict_implementations(implementation)
                    summed, x, residual = parts[place.index].clone(), parts[place.index].clone(), start.clone()
                    if turn % place.size == place.index:
                        time.sleep(0.05)
                    with backend.on(stream):
                        group.all_reduce(summed, stream=stream)
                        normed = backend.kernels_in_use.all_reduce_rms_norm(
                            x, residual, weight, 1e-6, group=group, stream=stream
                        )
                    found.append([each.view(torch.uint8).flatten().tolist() for each in (summed, residual, normed)])
                wanted = parts[0].float()
                for part in parts[1:]:
                    wanted += part.float()
                scale = 0 if dtype == "float32" else torch.finfo(kind).eps  # the interpreter truncates to bfloat16
                torch.testing.assert_close(summed, wanted.to(kind), rtol=scale, atol=scale)
        group.close()
    return found, taken


class _Own:
    def __init__(self, memory):
        self._memory = memory

    def get_buffer(self, *_):
        return self._memory


def check(place, *, folder):
    """Run the checks of ``peers_on_devices``, with few replays."""
    from contextlib import ExitStack
    from dataclasses import replace

    from kernels import peers_on_devices as on_devices

    backend, *patches = stood_in(place, folder)
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(mock.patch.object(on_devices, "REPLAYS", 2))
        stack.enter_context(mock.patch.object(on_devices, "SHAPES", ((1, 64), (3, 130), (2, 1100))))
        stack.enter_context(mock.patch.object(on_devices, "late"))
        return on_devices.check(replace(place, backend=backend))
