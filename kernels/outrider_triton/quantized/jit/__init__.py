"""Kernels of :mod:`outrider_triton.quantized` in Triton's language; rules: :mod:`outrider_triton.jit`."""
