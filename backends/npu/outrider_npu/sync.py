"""The policy of an Ascend device."""

from __future__ import annotations

from outrider.device import Recompute, SpeculativeSync, StepMode, Waiter


class NpuSync(SpeculativeSync):
    """How an overlapped iteration is ordered here. Events have generations, so fences are events.

    Attention takes the lengths as lists on the host: the plan needs exact ones (behind *lengths on host*), and graphs get
    them rebound before each replay, for every draft step and for verify, between *params free* and *params bound*. The
    values are copied into each call, so no list is shared by two iterations.

    Positions on three axes are computed again from their source once the plan stream has joined, and copied into the
    verify graph's input again: a plan that ran beside the draft was seen to leave others there.
    """

    step_modes = frozenset({StepMode.STAGED})
    published_waiter = Waiter.STREAM
    exact_host_lengths = True
    fused_host_wait = True  # one graph for the iteration would hold lengths that the host must know before it's launched
    recompute_after_join = frozenset({Recompute.MROPE_POSITIONS})
    refresh_before_replay = frozenset({"rope_positions"})
    rebind_params = True
