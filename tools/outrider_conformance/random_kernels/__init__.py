"""Kernels on random operands: the operands, the expected results in float64, the rounding bounds, and the memory that may be
written.

The references are written from the docstrings of the interface. They share no code with the kernels that they check.
"""
