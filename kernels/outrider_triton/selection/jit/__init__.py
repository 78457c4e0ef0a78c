"""Kernels of :mod:`outrider_triton.selection` in Triton's language; rules: :mod:`outrider_triton.jit`."""
