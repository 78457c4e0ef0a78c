"""Kernels of :mod:`outrider_triton.attention` in Triton's language; rules: :mod:`outrider_triton.jit`."""
