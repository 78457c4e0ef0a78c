"""An emulation of torch_npu's runtime surface on the simulated machine: what the plugin uses of it, and no more.

Test support, put on the path by tests alone. Names, signatures and operator schemas are torch_npu 2.13.0's (a test holds
them against its wheel); behaviour is what its documentation and CANN's say, which no hardware has confirmed here.
``EMULATION_OPTIONS`` in the environment are options of the simulated device, as in ``strategy=random,seed=3``.
"""

import os
from dataclasses import replace

import torch

from outrider_sim.backend import register_device
from outrider_sim.options import parse_options

__version__ = "2.13.0"

_given = dict(pair.split("=", 1) for pair in filter(None, os.environ.get("EMULATION_OPTIONS", "").split(",")))
# The device's name is a parameter; torch's slot for outside devices is called npu in this process unless another is given.
_options = parse_options({"like": "npu", "name": "npu", **_given})
# torch_npu saves tensors in a capture on a stream of its own, so captures fork.
_options = replace(_options, like=replace(_options.like, forks_in_capture=True))
registered = register_device(_options.name, _options)

from torch_npu import npu, operators  # noqa: E402

npu_fused_infer_attention_score = torch.ops.npu.npu_fused_infer_attention_score
_npu_fused_infer_attention_score_get_max_workspace = torch.ops.npu._npu_fused_infer_attention_score_get_max_workspace
npu_rotary_mul = torch.ops.npu.npu_rotary_mul


def npu_fusion_attention(*args, **kwargs):
    """Only imported: transformers does so where it finds torch_npu. Nothing here calls it."""
    raise NotImplementedError("the emulation has no npu_fusion_attention")


__all__ = ["npu", "operators", "registered"]
