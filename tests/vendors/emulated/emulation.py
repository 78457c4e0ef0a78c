"""The plugin ``npu`` on the emulation, in this process: ``pytest -p emulation``, with this directory on the path.

The plugin's code is unchanged. Added from outside: a device file that isn't there, the handle by which tools decide the
simulated machine's schedule, and the machine's own reports of memory accesses.
"""

from tools import Emulated

from outrider_npu import backend as module
from outrider_npu import machine

machine.device_count = lambda devices=None: 1


class EmulatedNpu(Emulated, module.NpuBackend):
    """The plugin's backend."""


def make():
    return EmulatedNpu(0)


module.NpuBackend = EmulatedNpu
