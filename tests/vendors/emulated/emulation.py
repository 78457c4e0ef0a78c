"""The plugin ``npu`` on the emulation, in this process: ``pytest -p emulation``, with this directory on the path.

The plugin's code is unchanged. Added from outside: a device file that isn't there, the handle by which tools decide the
simulated machine's schedule, and the machine's own reports of memory accesses.
"""

from dataclasses import replace

import torch
import torch_npu
from tools import Emulated
from torch_npu import operators

from outrider.device import ROW_ACCESS
from outrider_npu import backend as module
from outrider_npu import kernels, plugin

plugin.device_count = lambda devices=None: 1


class EmulatedNpu(Emulated, module.NpuBackend):
    """The plugin's backend."""


def lift_limits():
    """Let CANN's operators take float64, heads and pages of any size: what is proved of the ordering, with tiny models whose
    tokens never hang on rounding, then goes through them, and not through torch's references.
    """
    operators.LIMITS.update(attention={torch.float64}, rotation={torch.float64}, head=1, page=1)
    operators.LIMITS["page of one"] = 1
    kernels._DTYPES = frozenset({torch.float64})
    kernels._HEAD_ALIGNMENT = 1
    kernels._PAGE_ALIGNMENT = {True: 1, False: 1}
    module.CAPABILITIES = replace(module.CAPABILITIES, dtypes=module.CAPABILITIES.dtypes | {torch.float64})


def attended_rows(call):
    """Return the rows of the sequences' pages.

    Page 0 holds padding, which operations write in no order; results of padding are dropped.
    """
    cache = call["k_cache"] if "k_cache" in call else call["key"]
    operands = {"k_cache": cache, "block_table": call["block_table"], "seq_lens": torch.as_tensor(call["seq_lens"])}
    rows = ROW_ACCESS["outrider::paged_attention"]["k_cache"](operands)
    return rows[rows >= cache.shape[1]]


def make():
    return EmulatedNpu(0)


for operator, operands in (
    (torch.ops.outrider_npu.fused_attention.default, ("key", "value")),
    (torch.ops.outrider.paged_attention.default, ("k_cache", "v_cache")),
):
    torch_npu.registered.dispatcher.info(operator).resolvers = dict.fromkeys(operands, attended_rows)
module.NpuBackend = EmulatedNpu
