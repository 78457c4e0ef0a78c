"""Streams, events and external events of the emulated device."""

from contextlib import contextmanager

import torch_npu
from outrider.device.errors import DeviceLost
from outrider_sim.machine.queue import OperationKind


def sim():
    return torch_npu.registered.dispatcher.current


def machine():
    return sim().machine


@contextmanager
def as_npu(what):
    """The machine's typed loss as torch_npu tells it: a RuntimeError with CANN's number."""
    try:
        yield
    except DeviceLost as error:
        raise RuntimeError(f"{what} failed, error code:507015 ({error})") from error


class Idle:
    """Streams that no object holds any more. They're handed out again, as torch_npu does with the few that it has."""

    queues = []  # noqa: RUF012

    @classmethod
    def take(cls, priority):
        for queue in cls.queues:
            if not queue.queue and queue.priority == priority:
                cls.queues.remove(queue)
                return queue
        return machine().create_stream("", priority)

    @classmethod
    def drop(cls):
        """Before a run that shall find the machine as the first one did."""
        for queue in cls.queues:
            machine().drop_stream(queue)
        cls.queues.clear()


class Stream:
    def __new__(cls, device=None, priority=0, **kwargs):
        made = super().__new__(cls)
        made.queue, made._owned = Idle.take(priority), True
        return made

    def __del__(self):
        if self._owned:
            Idle.queues.append(self.queue)

    @classmethod
    def of(cls, queue):
        made = super().__new__(cls)
        made.queue, made._owned = queue, False
        return made

    @property
    def device_index(self):
        return 0

    def wait_event(self, event):
        event.wait(self)

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def query(self):
        target = self.queue.issued
        return machine().query(lambda: self.queue.done >= target, self.queue)

    def synchronize(self):
        with as_npu("ACL stream synchronize"):
            machine().synchronize_stream(self.queue)

    def __eq__(self, other):
        return isinstance(other, Stream) and other.queue is self.queue

    def __hash__(self):
        return hash(self.queue.id)


def _current():
    return Stream.of(machine().stream)


class Event:
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
        made = super().__new__(cls)
        made.state = machine().create_event()
        return made

    def record(self, stream=None):
        machine().record(self.state, (stream or _current()).queue)

    def wait(self, stream=None):
        if self.state.latest is not None:  # a wait for what was never recorded passes, as it does there
            machine().wait(self.state.latest, (stream or _current()).queue)

    def query(self):
        latest = self.state.latest
        return latest is None or machine().query(lambda: latest.done, latest)

    def elapsed_time(self, end_event):
        return (end_event.state.latest.time - self.state.latest.time) / 1000.0

    def synchronize(self):
        if self.state.latest is not None:
            with as_npu("ACL event synchronize"):
                machine().synchronize_event(self.state.latest)


class ExternalEvent:
    """Up from its record until its reset; a wait may come first, and a record while it's up is lost."""

    def __new__(cls):
        made = super().__new__(cls)
        made.state = machine().create_flag()
        return made

    def record(self, stream=None):
        machine().flag(OperationKind.FLAG_SET, self.state, (stream or _current()).queue)

    def wait(self, stream=None):
        machine().flag(OperationKind.FLAG_WAIT, self.state, (stream or _current()).queue)

    def reset(self, stream=None):
        machine().flag(OperationKind.FLAG_RESET, self.state, (stream or _current()).queue)
