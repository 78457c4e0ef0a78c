"""What a backend can do, as frozen data with conservative defaults."""

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """Behaviours of a device, and what it does best. Each default is safe for a device of which nothing is known.

    Fields describe behaviour, never libraries or vendors. Core may read one to choose a shape, a bucket or a step
    mode; it never forks the step on one. Declaring an ability that doesn't work, and working without declaring it,
    are both failures of conformance.
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

    updates_graph_params: bool = False
    """Host parameters of captured operations can be rebound between replays (``Graph.update_params``)."""

    forks_in_capture: bool = False
    """The callable may place work on other streams, joined by events, and they become branches of the graph."""

    waits_inside_graphs: bool = False
    """A captured graph may wait for, or record, an event that lives outside it."""

    collectives: bool = False
    """``create_group`` works: several devices, each a rank, move and reduce tensors between them."""

    captures_collectives: bool = False
    """A group's verbs may be captured in a graph, and each replay makes the calls anew. Without graphs it says nothing: an
    eager replay makes them anyway."""

    peer_memory: bool = False
    """Ranks may reach each other's memory (``Group.peer_buffers``), where the machine connects their devices."""

    perturbs_timing: bool = False
    """``delay(stream, cycles)`` keeps a stream busy, so that tests can provoke other interleavings."""

    reports_accesses: bool = False
    """The backend tells an attached observer each operation's memory accesses itself."""

    row_exact_accesses: bool = False
    """Reported accesses of operations that index by data name the rows really touched."""

    memory_limit: bool = False
    """``memory_info`` reports a real limit of device memory."""

    host_writes_memory: bool = False
    """The host writes device memory itself: outside of every scope, what torch does to a device tensor happens at once, in
    memory that host and device share. Weights are then read into their place, without a buffer between. Not for devices
    that are ``asynchronous``."""

    dtypes: frozenset[torch.dtype] = frozenset({torch.float32})
    """Floating dtypes in which every kernel of the backend's KernelSet works."""

    preferred_dtypes: tuple[torch.dtype, ...] = ()
    """The dtypes of ``dtypes`` in which the backend's own kernels run, best first. Where nobody names a dtype, a checkpoint
    in one of these keeps its own. Any other is loaded in one that holds all its values where there is such, else in the
    first. Empty: each of ``dtypes`` is as good."""

    quantized_formats: frozenset[str] = frozenset()
    """Formats of quantised weights that models are loaded in without anybody asking: products with them
    (``KernelSet.linear_quantized``) are as good as this device has them. Of a format that isn't here there's the torch
    reference alone, which a caller must ask for by name. See :data:`~outrider.device.QUANTIZED_FORMATS`."""

    page_size: int = 16
    """Tokens of a KV page with which the backend's own kernels run. It's taken where nobody names another."""

    def as_dict(self) -> dict[str, object]:
        """Fields by name: what ``outrider backends --open --json`` prints. ``dtypes`` and ``quantized_formats`` as
        sorted strings, ``preferred_dtypes`` as strings in their order.
        """
        values: dict[str, object] = {f.name: getattr(self, f.name) for f in fields(self)}
        values["dtypes"] = sorted(str(d).removeprefix("torch.") for d in self.dtypes)
        values["quantized_formats"] = sorted(self.quantized_formats)
        values["preferred_dtypes"] = [str(d).removeprefix("torch.") for d in self.preferred_dtypes]
        return values
