"""The plugin ``rocm`` on a HIP-like personality of the simulated machine: ``pytest -p emulation_hip``.

torch's HIP build answers as ``torch.cuda``, a name that torch's slot for outside devices can't have: the device is called
``amd`` here, and its module has the names of torch.cuda that the plugin uses. The plugin's code is unchanged.
"""

import os
from types import ModuleType, SimpleNamespace

os.environ["EMULATION_OPTIONS"] = ",".join(filter(None, [os.environ.get("EMULATION_OPTIONS"), "name=amd,like=rocm"]))

import torch
from tools import Emulated

from outrider_rocm import backend as module
from outrider_rocm import plugin

ARCHITECTURE = "gfx942:sramecc+:xnack-"
WAVE_SIZE = 64


class CUDAGraph(torch.amd.NPUGraph):
    """Graphs without task groups."""


class _Module(ModuleType):
    """What torch's CUDA module offers, on the emulated device: nothing that is torch_npu's alone."""

    _ABSENT = frozenset({"ExternalEvent", "NPUGraph", "graph_task_group_begin", "graph_task_update_begin"})

    def __getattr__(self, name):
        if name in self._ABSENT:
            raise AttributeError(f"torch.cuda has no {name}")
        return getattr(_emulated, name)


_emulated = torch.amd
torch.amd = _Module("torch.amd")
torch.amd.CUDAGraph = CUDAGraph
torch.amd.get_device_properties = lambda device=None: SimpleNamespace(
    gcnArchName=ARCHITECTURE, warp_size=WAVE_SIZE, multi_processor_count=304
)
torch.amd.get_device_name = lambda device=None: "AMD (emulated)"
plugin.hip_version = lambda: "6.4 (emulated)"
torch.cuda.device_count = lambda: 1


class EmulatedHip(Emulated, module.RocmBackend):
    """The plugin's backend, on a device type of another name."""

    device_type = "amd"


def make(**options):
    return EmulatedHip(0, **options)


module.RocmBackend = EmulatedHip
