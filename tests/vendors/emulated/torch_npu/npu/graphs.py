"""Graphs of the emulated device, task groups and their updates."""

from outrider_sim.machine.graphs import OpenCapture
from outrider_sim.machine.memory import Pool
from outrider_sim.machine.queue import Op, OperationKind
from torch_npu.npu.streams import machine, sim

_MODES = ("global", "thread_local", "relaxed")


def is_current_stream_capturing():
    return machine().stream.capture is not None


def graph_pool_handle():
    return _Pools.token()


class _Pools:
    """Private memory by the token that a program holds."""

    made = {}  # noqa: RUF012

    @classmethod
    def token(cls):
        token = (len(cls.made) + 1, 0)
        cls.made[token] = Pool(f"pool {token[0]}")
        return token


class _Handle:
    """A captured operation of a task group."""

    def __init__(self, op, pool, capture):
        self.op, self.pool, self.capture = op, pool, capture


class _Update:
    """What a stream hands its operations to while a task group is updated: none of them runs."""

    open = False

    def __init__(self, handle):
        self.handle = handle
        self.pool = handle.pool
        self.name = "a task update"
        self.ops = []

    def add(self, op, stream):
        self.ops.append(op)

    def poison(self, block, stream):
        """Memory that an update allocates isn't the group's: what is written there is lost."""


def _tasks(ops):
    return [op for op in ops if op.kind in (OperationKind.KERNEL, OperationKind.COPY)]


def graph_task_group_begin(stream):
    capture = stream.queue.capture
    if not isinstance(capture, OpenCapture):
        raise RuntimeError("graph_task_group_begin: the stream isn't captured, error code is 107003")
    capture.group_start = len(capture.nodes)


def graph_task_group_end(stream):
    capture = stream.queue.capture
    tasks = _tasks(op for _, op in capture.nodes[capture.group_start :])
    if len(tasks) != 1:
        raise RuntimeError(
            f"graph_task_group_end: {len(tasks)} tasks in a group ({[t.name for t in tasks]}), one is supported"
        )
    return _Handle(tasks[0], capture.pool, capture)


def graph_task_update_begin(stream, handle):
    if stream.queue.capture is not None:
        raise RuntimeError("graph_task_update_begin: the stream is captured, error code is 107003")
    if handle.capture.open:
        raise RuntimeError("graph_task_update_begin: the group's graph is still being captured")
    stream.queue.capture = _Update(handle)


def graph_task_update_end(stream):
    update, stream.queue.capture = stream.queue.capture, None
    tasks = _tasks(update.ops)
    mine = update.handle.op
    if [task.name for task in tasks] != [mine.name]:
        raise RuntimeError(f"graph_task_update_end: tasks {[t.name for t in tasks]} aren't the group's [{mine.name!r}]")
    (new,) = tasks

    def apply():
        mine.fn, mine.args, mine.kwargs, mine.post = new.fn, new.args, new.kwargs, new.post

    machine().enqueue(Op(OperationKind.LAUNCH, f"update {mine.name}", apply, cost=machine().like.kernel_us), stream.queue)


class NPUGraph:
    def __new__(cls):
        return super().__new__(cls)

    def __init__(self):
        self._capture = self._program = None

    def capture_begin(self, pool=None, capture_error_mode="global"):
        if capture_error_mode not in _MODES:
            raise RuntimeError(f"capture_error_mode {capture_error_mode!r} isn't one of {_MODES}")
        if self._capture is not None or self._program is not None:
            raise RuntimeError("This NPUGraph instance already owns a captured graph.")
        queue = machine().stream
        if queue is machine().default:
            raise RuntimeError("NPU graphs must be captured on a non-default stream")
        memory = Pool("graph") if pool is None else _Pools.made[pool]
        self._capture = OpenCapture(sim(), "graph", memory, queue)
        self._capture.begin()

    def capture_end(self):
        capture, self._capture = self._capture, None
        if capture is None:
            raise RuntimeError("capture_end without a capture")
        try:
            self._program = capture.finish()
        finally:
            capture.close()

    def replay(self):
        if self._program is None:
            raise RuntimeError("replay of a graph that was never captured")
        machine().replays += 1
        self._program.replay(machine().stream)

    def reset(self):
        self._program = None

    def pool(self):
        raise NotImplementedError("the emulation doesn't hand a graph's own pool out")
