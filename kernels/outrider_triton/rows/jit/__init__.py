"""Kernels of :mod:`outrider_triton.rows` in Triton's language; rules: :mod:`outrider_triton.jit`."""
