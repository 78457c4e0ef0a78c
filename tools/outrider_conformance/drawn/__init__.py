"""Kernels on drawn operands: what is drawn, what is right in float64, how far off rounding may be, and what may be touched.

The references here are written from the interface's docstrings alone; they share no code with the kernels that they judge.
"""
