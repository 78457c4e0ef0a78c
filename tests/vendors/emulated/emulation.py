"""The plugin ``npu`` on the emulation, in this process: ``pytest -p emulation``, with this directory on the path.

The plugin's code is unchanged. Added from outside: a device file that isn't there, and the handle by which tools decide the
simulated machine's schedule.
"""

import sys

import torch_npu
from torch_npu.npu.streams import Idle

from outrider.device import Backend
from outrider_npu import backend as module
from outrider_npu import machine
from outrider_sim.backend import SimControl
from outrider_sim.exhaustive import Exhaustive

machine.device_count = lambda devices=None: 1
_ONLY_LISTED = 3  # the list of streams, the loop's variable, getrefcount's argument


class EmulatedNpu(module.NpuBackend):
    """The plugin's backend with a schedule that tools decide."""

    epoch = 0

    @property
    def sim(self):
        return torch_npu.registered.dispatcher.current

    @property
    def control(self):
        return _Control(self)

    def start_over(self, strategy):
        """As the simulator's own backend does it."""
        sim = self.sim
        sim.machine.reset(strategy)
        self._streams[:] = [stream for stream in self._streams if sys.getrefcount(stream) > _ONLY_LISTED]
        Idle.drop()
        floor = sim.memory.start_over(getattr(strategy, "floor", None))
        if isinstance(strategy, Exhaustive):
            strategy.floor = floor
        sim.manual_seed(sim.options.seed)

    def _create_stream(self, name, priority):
        made = super()._create_stream(name, priority)
        self.sim.machine.rename_stream(made.native.queue, name)  # schedules speak of streams by name
        return made


class _Control(SimControl):
    def steps(self, stream):
        if stream is None:
            return super().steps(None)
        return stream.native.queue.label, stream.native.queue.issued


def make(**_) -> Backend:
    return EmulatedNpu(0)


module.NpuBackend = EmulatedNpu
