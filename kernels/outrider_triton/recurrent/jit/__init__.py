"""Kernels of :mod:`outrider_triton.recurrent` in Triton's language; rules: :mod:`outrider_triton.jit`."""
