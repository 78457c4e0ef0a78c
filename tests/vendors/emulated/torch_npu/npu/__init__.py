"""Streams, events, external events, memory and graphs of the emulated device."""

import sys

import torch

import torch_npu
from outrider.device.errors import OutOfDeviceMemory
from outrider_sim.machine.queue import Op, OperationKind
from torch_npu.npu import utils
from torch_npu.npu.graphs import (
    NPUGraph,
    graph_pool_handle,
    graph_task_group_begin,
    graph_task_group_end,
    graph_task_update_begin,
    graph_task_update_end,
    is_current_stream_capturing,
)
from torch_npu.npu.streams import Event, ExternalEvent, Stream, sim
from torch_npu.npu.utils import StreamContext, current_stream, default_stream, device, set_stream, stream, synchronize

_base = getattr(torch, torch_npu.registered.name)  # what torch itself wants of a device: random states, autocast
_allocate = sim().memory.allocate


def _allocate_as_npu(nbytes, stream):
    try:
        return _allocate(nbytes, stream)
    except OutOfDeviceMemory as error:
        raise torch.OutOfMemoryError(f"NPU out of memory. Tried to allocate {nbytes} bytes: {error}") from error


sim().memory.allocate = _allocate_as_npu


def is_available():
    return True


def device_count():
    return 1


def current_device():
    return 0


def get_device_name(device_name=None):
    return "Ascend (emulated)"


def mem_get_info(device=None):
    memory = sim().memory
    return memory.limit - memory.allocated, memory.limit


def memory_allocated(device=None):
    return sim().memory.allocated


def empty_cache():
    sim().memory.empty_cache()


def _sleep(cycles):
    machine = sim().machine
    machine.enqueue(Op(OperationKind.LAUNCH, "delay", cost=cycles / 1000.0), machine.stream)


def _is_in_bad_fork():
    return False


_plain_empty = torch.empty


def _empty(*size, **options):
    """torch's pinned memory needs a build for an accelerator; torch_npu's allocator of the host would come in here."""
    if options.pop("pin_memory", False):
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        return sim().pinned(tuple(shape), options.get("dtype") or torch.get_default_dtype())
    return _plain_empty(*size, **options)


torch.empty = _empty
# What torch's accelerator module would ask the device's guard, which torch's Python backends leave out.
torch.accelerator.current_device_index = current_device
torch.accelerator.current_stream = current_stream
torch.accelerator.set_stream = set_stream
for _name in dir(_base):
    if not _name.startswith("__") and _name not in globals():
        globals()[_name] = getattr(_base, _name)
setattr(torch, torch_npu.registered.name, sys.modules[__name__])

__all__ = ["Event", "ExternalEvent", "NPUGraph", "Stream", "StreamContext", "utils"]
__all__ += ["current_stream", "default_stream", "device", "set_stream", "stream", "synchronize"]
__all__ += ["graph_pool_handle", "graph_task_group_begin", "graph_task_group_end", "graph_task_update_begin"]
__all__ += ["graph_task_update_end", "is_current_stream_capturing"]
