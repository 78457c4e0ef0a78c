"""Kernels between the passes of a model: request rows, placement, publication and NaN checks."""
