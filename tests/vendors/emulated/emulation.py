"""The plugin ``npu`` on the emulation, in this process: ``pytest -p emulation``, with this directory on the path.

The plugin's code is unchanged. Added from outside: a device file that isn't there, the handle by which tools decide the
simulated machine's schedule, and the machine's own reports of memory accesses.
"""

from dataclasses import replace

import torch
import torch_npu
from tools import Emulated
from torch_npu import operators

from outrider_npu import backend as module
from outrider_npu import kernels, machine

machine.device_count = lambda devices=None: 1


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


def attended_pages(call):
    """Return the pages of the sequences.

    Page 0 holds padding, which operations write in no order; results of padding are dropped.
    """
    table, cache = call["block_table"], call["k_cache"] if "k_cache" in call else call["key"]
    used = -(-torch.as_tensor(call["seq_lens"]) // cache.shape[1])
    pages = table[torch.arange(table.shape[1]) < used.unsqueeze(1)].unique()
    return pages[pages > 0]


def make():
    return EmulatedNpu(0)


ATTENTION = {"outrider_npu::fused_attention": ("key", "value"), "outrider::paged_attention": ("k_cache", "v_cache")}
for operator, operands in ATTENTION.items():
    torch_npu.registered.dispatcher.declare_rows(operator, dict.fromkeys(operands, attended_pages))
module.NpuBackend = EmulatedNpu
