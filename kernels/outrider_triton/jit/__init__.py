"""Kernels in Triton's language, and functions that kernels of several subjects share.

A kernel accesses only the operands that its operator's schema names.

``PDL``: programmatic dependent launch. Every program first lets the next kernel of the stream start. It then waits for the
preceding kernel before it accesses anything that a kernel may have written; before the wait it may only read weights. All
programs wait, so a finished kernel implies that all kernels before it have finished.
"""
