"""Capabilities of a backend, as frozen data with conservative defaults."""

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """Behaviours and preferences of a device. Each default is safe for an unknown device.

    Fields describe behaviour, never libraries or vendors. Core may read a field to choose a shape, a bucket or a step
    mode; core never forks the step on a field. A declared ability that doesn't work fails conformance, and so does a
    working ability that isn't declared.
    """

    asynchronous: bool = False
    """Work returns to the host before it has run. False: each operation has finished when its call returns."""

    concurrent_streams: bool = False
    """Two streams may run at the same time, in any order that the waits allow."""

    stream_priorities: bool = False
    """``create_stream(priority=…)`` takes other values than 0; a lower number is more urgent."""

    event_timing: bool = False
    """Events made with ``timing=True`` measure device time between two records."""

    flags: bool = False
    """``create_flag`` works: resettable flags, for which a wait may be enqueued before its set."""

    captures_graphs: bool = False
    """``capture`` records device work once and ``replay`` launches it without running the callable again.
    Without it a capture replays eagerly, with the same meaning."""

    captures_in_part: bool = False
    """A capture raises :class:`CaptureError` for some operators and kernels, because the device's graphs can't hold them (on
    OpenCL, work of the host in a queue's order). An engine then uses no graphs unless the user asks for them."""

    updates_graph_params: bool = False
    """Host parameters of captured operations can be rebound between replays (``Graph.update_params``)."""

    forks_in_capture: bool = False
    """The callable may place work on other streams, joined by events, and they become branches of the graph."""

    waits_inside_graphs: bool = False
    """A captured graph may wait for, or record, an event that lives outside it."""

    collectives: bool = False
    """``create_group`` works: several devices, each a rank, move and reduce tensors between them."""

    captures_collectives: bool = False
    """A group's verbs may be captured in a graph, and each replay makes the calls anew. Without graphs the field has no
    meaning: an eager replay makes the calls anyway."""

    peer_memory: bool = False
    """Ranks may reach each other's memory (``Group.peer_buffers``), where the machine connects their devices."""

    perturbs_timing: bool = False
    """``delay(stream, cycles)`` keeps a stream busy, so that tests can provoke other interleavings."""

    reports_accesses: bool = False
    """The backend itself reports each operation's memory accesses to an attached observer."""

    row_exact_accesses: bool = False
    """Reported accesses of operations that index by data name exactly the touched rows."""

    memory_limit: bool = False
    """``memory_info`` reports a real limit of device memory."""

    host_writes_memory: bool = False
    """Host and device share memory: outside of every scope, torch changes a device tensor at once. The loader then reads
    weights directly into the device tensor, without a staging buffer. Not for devices that are ``asynchronous``."""

    dtypes: frozenset[torch.dtype] = frozenset({torch.float32})
    """Floating dtypes in which every kernel of the backend's KernelSet works."""

    preferred_dtypes: tuple[torch.dtype, ...] = ()
    """The dtypes of ``dtypes`` in which the backend's own kernels run, best first. If the user names no dtype, a checkpoint
    in a preferred dtype keeps its dtype. Any other checkpoint is loaded in a preferred dtype that holds all its values, or
    in the first one if there is no such dtype. Empty: all ``dtypes`` are equally good."""

    quantized_formats: frozenset[str] = frozenset()
    """Formats of quantised weights in which models are loaded by default: those of the backend's own kernels
    (``KernelSet.linear_quantized``), or all, if the torch references are its kernels. For any other format the user must
    request the reference by name. See :data:`~outrider.device.QUANTIZED_FORMATS`."""

    page_size: int = 16
    """Tokens of a KV page with which the backend's own kernels run: the default if the user names no page size."""

    def as_dict(self) -> dict[str, object]:
        """Return the fields by name, as ``outrider backends --open --json`` prints them.

        ``dtypes`` and ``quantized_formats`` are sorted strings; ``preferred_dtypes`` are strings in their order.
        """
        values: dict[str, object] = {f.name: getattr(self, f.name) for f in fields(self)}
        values["dtypes"] = sorted(str(d).removeprefix("torch.") for d in self.dtypes)
        values["quantized_formats"] = sorted(self.quantized_formats)
        values["preferred_dtypes"] = [str(d).removeprefix("torch.") for d in self.preferred_dtypes]
        return values
