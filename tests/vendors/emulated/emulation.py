"""The plugin ``npu`` on the emulation, in this process: ``pytest -p emulation``, with this directory on the path.

The plugin's code is unchanged. Added from outside: a device file that isn't there, the handle by which tools decide the
simulated machine's schedule, and the machine's own reports of memory accesses.
"""

import sys
from dataclasses import replace

import torch_npu
from torch_npu.npu.streams import Idle, Stream

from outrider.device import SeamError, TorchStream
from outrider_npu import backend as module
from outrider_npu import machine
from outrider_sim.backend import SimControl
from outrider_sim.exhaustive import Exhaustive
from outrider_sim.operands import extent
from outrider_sim.pinned import PinnedTensor
from outrider_sim.sim import host_extent
from outrider_sim.tap import SeamTap
from outrider_sim.tensor import SimTensor

machine.device_count = lambda devices=None: 1
_ONLY_LISTED = 3  # the list of streams, the loop's variable, getrefcount's argument
_CAPABILITIES = replace(module.CAPABILITIES, reports_accesses=True, row_exact_accesses=True)


class _Tap(SeamTap):
    def synchronized(self, stream):
        for candidate in self._backend.streams:
            if candidate.native.queue is stream:
                self._observer.stream_synchronized(candidate)


class _Control(SimControl):
    def steps(self, stream):
        if stream is None:
            return super().steps(None)
        return stream.native.queue.label, stream.native.queue.issued


class EmulatedNpu(module.NpuBackend):
    """The plugin's backend with a schedule that tools decide and accesses that they see."""

    def __init__(self, ordinal):
        super().__init__(ordinal)
        self.epoch = 0
        self.default_stream = TorchStream(self, "default", 0, Stream.of(self.sim.machine.default))
        self.default_stream.epoch = 0
        self._streams.append(self.default_stream)  # what nobody placed runs there, and tools must know it
        self.sim.machine.replays = 0

    @property
    def sim(self):
        return torch_npu.registered.dispatcher.current

    @property
    def capabilities(self):
        return _CAPABILITIES

    @property
    def control(self):
        return _Control(self)

    def attach(self, observer):
        super().attach(observer)
        self.sim.machine.tap = _Tap(self, observer)
        self.sim.machine.update_mode()

    def detach(self):
        super().detach()
        self.sim.machine.tap = None
        self.sim.machine.update_mode()

    def locate(self, tensor):
        if isinstance(tensor, PinnedTensor):
            return host_extent(tensor, False)
        if not isinstance(tensor, SimTensor):
            raise SeamError(f"a tensor on {tensor.device} that isn't pinned has no place on {self.label}")
        return extent(tensor, False, "")

    def start_over(self, strategy):
        """As the simulator's own backend does it."""
        sim = self.sim
        sim.machine.reset(strategy)
        self.epoch += 1
        self._streams[:] = [s for s in self._streams if s is self.default_stream or sys.getrefcount(s) > _ONLY_LISTED]
        Idle.drop()
        floor = sim.memory.start_over(getattr(strategy, "floor", None))
        if isinstance(strategy, Exhaustive):
            strategy.floor = floor
        sim.manual_seed(sim.options.seed)

    def create_stream(self, name, *, priority=0):
        """A program's streams are called the same in each of its runs, so that schedules stay valid."""
        for stream in self._streams:
            if stream.name == name and getattr(stream, "epoch", 0) < self.epoch:
                stream.name = f"{name}~{stream.epoch}"
                self.sim.machine.rename_stream(stream.native.queue, stream.name)
        made = super().create_stream(name, priority=priority)
        made.epoch = self.epoch
        return made

    def _create_stream(self, name, priority):
        made = super()._create_stream(name, priority)
        self.sim.machine.rename_stream(made.native.queue, name)  # schedules speak of streams by name
        return made


def make():
    return EmulatedNpu(0)


module.NpuBackend = EmulatedNpu
