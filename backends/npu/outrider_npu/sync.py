"""The synchronization policy of Ascend devices."""

from __future__ import annotations

from outrider.device import Recompute, SpeculativeSync, StepMode, Waiter


class NpuSync(SpeculativeSync):
    """Synchronization policy of Ascend devices. Events have generations, so fences are events.

    Attention takes lengths as host lists. The plan needs exact lengths, so it follows the fence *lengths on host*. Each
    replay of a draft step or of verify is preceded by an update of the lengths, between *params free* and *params
    bound*. Each call copies the values, so no two iterations share a list.

    Three-axis positions are recomputed from their source after the plan stream has joined and copied to the verify
    graph's input again: a plan that ran concurrently with the draft was observed to leave wrong positions there.
    """

    step_modes = frozenset({StepMode.STAGED})
    published_waiter = Waiter.STREAM
    exact_host_lengths = True
    fused_host_wait = True  # one graph for the iteration would hold lengths that the host must know before it's launched
    recompute_after_join = frozenset({Recompute.MROPE_POSITIONS})
    refresh_before_replay = frozenset({"rope_positions"})
    rebind_params = True
