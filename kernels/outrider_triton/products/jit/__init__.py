"""Kernels of :mod:`outrider_triton.products` in Triton's language; rules: :mod:`outrider_triton.jit`."""
