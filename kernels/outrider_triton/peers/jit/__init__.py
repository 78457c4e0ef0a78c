"""Kernels of :mod:`outrider_triton.peers` in Triton's language; rules: :mod:`outrider_triton.jit`."""
