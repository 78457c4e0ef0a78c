"""Small problems of the conformance kit's kernels: a value for each dimension of a shape."""

import torch

from outrider_conformance.random_kernels.kernels import KERNELS, problem

SMALL = {"tokens": 5, "inner": 40, "outer": 24, "hidden": 24, "gates": 20, "vocabulary": 37, "heads": 2, "size": 0, "page": 1}
SMALL |= {"batch": 3, "new": 2, "context": 30, "ragged": 1, "tree": 0, "window": 0, "padding": 1, "moves": 9, "layout": 1}
SMALL |= {"bias": 1, "levels": 0, "drafts": 2, "nodes": 4, "depth": 2, "sampling": 1, "draft": 0, "entries": 4, "width": 35}
SMALL |= {"blocks": 1, "zeros": 1, "active": 0, "nan": 0, "alone": 0, "far": 0, "head_norms": 0}
SMALL |= {"channels": 24, "kernel_size": 4, "repeats": 2, "key_size": 24, "value_size": 20}
SMALL |= {"windowed": 1, "deep": 0, "flag": 1, "count": 3, "experts": 4, "chosen": 2, "held": 0, "scoring": 0}
SMALL |= {"wide_norm": 0, "partial": 0, "sharp": 0, "whole": 0, "scale_dtype": 0}
SMALL |= {
    "absorbed": 1,
    "latent": 1,
    "split": 0,
    "ranks": 0,
    "gated": 0,
    "head_scales": 0,
    "no_norm": 0,
    "attend": 0,
    "prompt": 0,
}


def small(name, dtype=torch.float32, **changes):
    """The problem of a kernel in these sizes; ``changes``: other values of dimensions that it may have."""
    drawn, sizes = KERNELS[name], SMALL | changes
    return problem(drawn, {dimension: sizes[dimension] for dimension in drawn.dimensions}, dtype, 0)
