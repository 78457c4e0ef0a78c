"""The kernels themselves. Each reads and writes just what its operator's schema says (:mod:`outrider_triton.ops`).

``PDL``: programmatic dependent launch. Every program then first lets the next kernel of the stream start, and waits for the
one before it before it touches anything that a kernel may have written; what comes between may read weights alone. Each
program waits, so a kernel that has finished implies that all before it have.
"""
