"""What tests add from outside to a plugin's backend that runs on the emulated device; the plugin's code is unchanged."""

import sys
from dataclasses import replace

import torch_npu
from torch_npu.npu.streams import Idle, Stream

from outrider.device import InterfaceError, TorchEvent, TorchStream
from outrider_sim.backend import ObserverTap
from outrider_sim.exploration import SimControl
from outrider_sim.machine.device_state import PinnedTensor, host_extent
from outrider_sim.strategies import Exhaustive
from outrider_sim.torch_device.opinfo import extent
from outrider_sim.torch_device.tensor import SimTensor

_ONLY_LISTED = 3  # the list of streams, the loop's variable, getrefcount's argument


class _Tap(ObserverTap):
    def synchronized(self, stream):
        for candidate in self._backend.streams:
            if candidate.native.queue is stream:
                self.observer.stream_synchronized(candidate)


class _Event(TorchEvent):
    def _synchronize_within(self, seconds):
        """There is no clock: a wait with a limit that asks again and again would never let the device go on."""
        self._synchronize()
        return True


class _Control(SimControl):
    def steps(self, stream):
        if stream is None:
            return super().steps(None)
        return stream.native.queue.label, stream.native.queue.issued


class Emulated:
    """Put before a plugin's backend: a schedule that tools decide, and accesses that they see."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.epoch = 0
        self.default_stream = TorchStream(self, "default", 0, Stream.of(self.sim.machine.default))
        self.default_stream.epoch = 0
        self._streams.append(self.default_stream)  # what nobody placed runs there, and tools must know it
        self.sim.machine.replays = 0

    @property
    def sim(self):
        return torch_npu.registered.dispatcher.current

    def as_current(self):
        """What the simulator's control asks of its backend: there is one device here."""
        return torch_npu.registered.dispatcher.using(self.sim)

    @property
    def capabilities(self):
        return replace(super().capabilities, reports_accesses=True, row_exact_accesses=True)

    @property
    def control(self):
        return _Control(self)

    def attach(self, observer):
        super().attach(observer)
        self.sim.machine.tap = _Tap(self, observer)
        self.sim.machine.scheduler.update_mode()

    def detach(self):
        super().detach()
        self.sim.machine.tap = None
        self.sim.machine.scheduler.update_mode()

    def locate(self, tensor):
        if isinstance(tensor, PinnedTensor):
            return host_extent(tensor, False)
        if not isinstance(tensor, SimTensor):
            raise InterfaceError(f"a tensor on {tensor.device} that isn't pinned has no place on {self.label}")
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
            if stream.name == name and stream.epoch < self.epoch:
                stream.name = f"{name}~{stream.epoch}"
                self.sim.machine.rename_stream(stream.native.queue, stream.name)
        return super().create_stream(name, priority=priority)

    def _create_event(self, name, timing):
        return _Event(self, name, timing, super()._create_event(name, timing).native)

    def _create_stream(self, name, priority):
        made = super()._create_stream(name, priority)
        made.epoch = self.epoch  # before another thread finds it in the list
        self.sim.machine.rename_stream(made.native.queue, name)  # schedules speak of streams by name
        return made
