"""Kernels of :mod:`outrider_triton.experts` in Triton's language; rules: :mod:`outrider_triton.jit`."""
