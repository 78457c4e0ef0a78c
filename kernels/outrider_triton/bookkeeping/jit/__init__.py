"""Kernels of :mod:`outrider_triton.bookkeeping` in Triton's language; rules: :mod:`outrider_triton.jit`."""
